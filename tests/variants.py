"""Which of many cases every test run compiles, and what all compiled kernels keep."""

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
    return one_per(lambda problem: problem.epilogue, problems)


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
