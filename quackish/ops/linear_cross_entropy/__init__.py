"""Linear cross entropy for torch. `api.py` has what users call and picks a path: kernels or portable.

api.py         the function and the module; which path a call takes
checks.py      whether the arguments fit together
autograd.py    torch.autograd.Function for kernels in eager; custom operators for the rest, the portable path included
schedules.py   kernels: which launches, in which order, over which buffers
parts.py       what schedules are made of: launches that belong together
calls.py       what schedules are given and return
launches.py    kernels: buffers, and tensors in, arguments of a kernel out
cublas.py      the GEMMs by cuBLAS, where there is no GEMM kernel
warm_up.py     compiles the kernels of a first call side by side
portable.py    plain PyTorch, a chunk of logits at a time, on any device
"""

from quackish.ops.linear_cross_entropy.api import LinearCrossEntropyLoss, linear_cross_entropy, no_kernel_on
from quackish.reference.linear_cross_entropy import LinearCrossEntropyStats

__all__ = ["LinearCrossEntropyLoss", "LinearCrossEntropyStats", "linear_cross_entropy", "no_kernel_on"]
