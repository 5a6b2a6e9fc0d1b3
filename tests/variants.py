"""Which of many cases tests compile, and what all compiled kernels keep."""

import dataclasses
import itertools

import pytest

from quackish.device import launch
from quackish.gpu import B200, H200


def one_per(key, cases):
    """A list of the cases for parametrize. Those with a key that occurred before are exhaustive."""
    params, seen = [], set()
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        params.append(pytest.param(*values, marks=pytest.mark.exhaustive if key(*values) in seen else ()))
        seen.add(key(*values))
    return params


def few_of(few, *values):
    """A list of the product of the values for parametrize. Cases that are not in `few` are exhaustive."""
    return [
        pytest.param(*case, marks=() if case in few else pytest.mark.exhaustive) for case in itertools.product(*values)
    ]


def one_per_kernel(cases):
    """For cases (name, problem, GPU): one problem and one GPU of each kernel are not exhaustive."""
    return one_per(lambda name, problem, gpu: name, cases)


def one_per_epilogue(problems):
    """Few of the problems, one of each epilogue of which is not exhaustive."""
    return one_per(lambda problem: type(problem.epilogue), all_pairs((problem,) for problem in problems))


# Values of these fields are compiled once per kernel, not with every value of the other fields.
ALONE = {"n", "h", "dtype", "bias_dtype", "activation", "max_groups"}


def fields_of(problem):
    """(name, value) of the fields of a problem and of its epilogue, for which the value is the class."""
    for name, value in vars(problem).items():
        yield name, type(value) if dataclasses.is_dataclass(value) else value
        if dataclasses.is_dataclass(value):
            yield from fields_of(value)


def num_options(problem):
    return sum(bool(value) for _, value in fields_of(problem))


def all_pairs(cases):
    """Few of the cases (..., problem), which together have every pair of values that two fields of a case have.

    Of fields in ALONE they have every value per kernel. Of cases with as many new pairs, the problem with more options
    comes first: it takes more registers.
    """

    def pairs_of_fields(case):
        fields = [*enumerate(case[:-1]), *fields_of(case[-1])]
        yield from itertools.combinations([field for field in fields if field[0] not in ALONE], 2)
        yield from ((case[:-1], field) for field in fields if field[0] in ALONE)

    pairs_of = {case: set(pairs_of_fields(case)) for case in sorted(cases, key=lambda case: -num_options(case[-1]))}
    missing = set().union(*pairs_of.values())
    while missing:
        case = max(pairs_of, key=lambda case: len(pairs_of[case] & missing))
        missing -= pairs_of[case]
        yield case


def on_gpus(cases):
    """(name, problem, GPU): all cases on Hopper; the first of each kernel on Blackwell, with the same source.

    Blackwell comes first, because the emulator compiles and runs each kernel for Hopper in every run of the tests.
    """
    on_blackwell = set()
    for name, problem in cases:
        if name not in on_blackwell:
            yield name, problem, B200
        on_blackwell.add(name)
        yield name, problem, H200


def check_compiles(name, problem, config, gpu, ctas_per_sm=1):
    """No spilled register, and as many CTAs fit on an SM. Returns the resources."""
    used = launch.resources(problem.spec.kernel_class(gpu), problem, config, gpu.target)
    assert used.stack_bytes == used.local_loads == used.local_stores == 0, (used, config)
    assert used.smem_bytes <= gpu.smem_bytes, (used, config)
    assert ctas_per_sm * (used.smem_bytes + 1024) <= gpu.smem_bytes_per_sm, (used, config)
    assert ctas_per_sm * config.threads * used.registers <= 65_536, (used, config)
    return used
