"""Linear cross entropy for torch.

api.py         the public function and module; chooses between kernels and the portable path
checks.py      argument checks
autograd.py    torch.autograd.Function for eager calls on kernels
operators.py   custom operators for all other calls, and the choice between the two
schedules.py   on kernels: which steps run, in which order, over which buffers
steps.py       the steps of schedules, each one or a few launches
calls.py       arguments and results of schedules
buffers.py     memory that launches share: matrices, exp_logits, the RowState
launches.py    launches kernels
warm_up.py     compiles all kernels of a call in parallel before its first launch
memory.py      peak memory of a call, and `memory_limit`
portable.py    plain PyTorch on any device, one chunk of logits at a time
"""
