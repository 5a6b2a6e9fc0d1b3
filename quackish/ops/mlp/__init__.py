"""The MLP of a mixture of experts for torch, and grouped matrix products.

api.py           grouped_mlp and grouped_mm, which take rows sorted by expert
moe.py           moe_mlp, which takes tokens and a router's choice and calls grouped_mlp
checks.py        checks of the arguments
autograd.py      custom operators and their gradients, written in the steps of `reference/grouped_mlp.py`
kernel_steps.py  the same steps with kernels
"""
