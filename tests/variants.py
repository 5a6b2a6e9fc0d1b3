"""Which of many cases tests compile, and what all compiled kernels keep."""

import itertools

import pytest

from quackish import kernels, launch
from quackish.gpu import B200, H200


def one_per(key, cases):
    """A list of the cases for parametrize. Those with a key that occurred before are exhaustive."""
    params, seen = [], set()
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        params.append(pytest.param(*values, marks=pytest.mark.exhaustive if key(*values) in seen else ()))
        seen.add(key(*values))
    return params


def one_per_kernel(cases):
    """For cases (name, problem, GPU): one problem and one GPU of each kernel are not exhaustive."""
    return one_per(lambda name, problem, gpu: name, cases)


def one_per_epilogue(problems):
    """Few of the problems, one of each epilogue of which is not exhaustive."""
    return one_per(lambda problem: problem.epilogue, all_pairs((problem,) for problem in problems))


def all_pairs(cases):
    """Few of the cases (..., problem), which together have every pair of values that two fields of a case have.

    Of cases with as many new pairs, the problem with more options comes first: it takes more registers.
    """
    pairs_of = {
        case: set(itertools.combinations([*enumerate(case[:-1]), *vars(case[-1]).items()], 2))
        for case in sorted(cases, key=lambda case: -sum(map(bool, vars(case[-1]).values())))
    }
    missing = set().union(*pairs_of.values())
    while missing:
        case = max(pairs_of, key=lambda case: len(pairs_of[case] & missing))
        missing -= pairs_of[case]
        yield case


def on_gpus(cases):
    """(*case, GPU): all cases on Hopper; every sixth on Blackwell, where sources and configs are the same."""
    for i, case in enumerate(cases):
        for gpu in (H200, B200) if i % 6 == 0 else (H200,):
            yield *case, gpu


def check_compiles(name, problem, config, gpu, ctas_per_sm=1):
    """No spilled register, and as many CTAs fit on an SM. Returns the resources."""
    used = launch.resources(kernels.find(name, gpu), problem, config, gpu.target)
    assert used.stack_bytes == used.local_loads == used.local_stores == 0, (used, config)
    assert used.smem_bytes <= gpu.smem_bytes, (used, config)
    assert ctas_per_sm * (used.smem_bytes + 1024) <= gpu.smem_bytes_per_sm, (used, config)
    assert ctas_per_sm * config.threads * used.registers <= 65_536, (used, config)
    return used
