"""Linear cross entropy.

A call travels down: api.py makes a `Call`, operators.py gives it to autograd, schedules.py orders its launches, and
launches.py fills the kernels' arguments. In this order:

reference.py   the formula, in plain PyTorch
api.py         the public function and module; chooses between kernels and the portable path
checks.py      argument checks
calls.py       the Call, the plan and gradients it carries, and the memory that its launches share
operators.py   autograd: a Function on kernels in plain eager mode, custom operators for all other calls
schedules.py   on kernels: which launches run, in which order, over which buffers
launches.py    launches of kernels, and the steps of schedules that are a few of them
layout.py      schedule, rows per chunk, and which buffers share storage, by rules on shapes
portable.py    plain PyTorch on any device, one chunk of logits at a time
row_state.py   the numbers per row that forward keeps for backward

kernels/, row_problems.py and gemm_problems.py have the kernels, and launch_problems.py has the problems of launches.
sharded/ is the vocabulary-parallel form.

dry_run.py     runs a call on meta tensors, with kernels that do nothing
warm_up.py     compiles all kernels of a call in parallel before its first launch
memory.py      peak memory of a call, and `memory_limit`
tools.py       what bench, explain, tune, precompile and doctor show; measure.py, providers.py and tuning.py likewise
"""
