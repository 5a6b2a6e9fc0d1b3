"""The MLP of a mixture of experts, and grouped matrix products.

api.py           grouped_mlp and grouped_mm, which take rows sorted by expert
moe.py           moe_mlp, which takes tokens and a router's choice and calls grouped_mlp
checks.py        checks of the arguments
reference.py     the steps in PyTorch: the specification, and the portable path; groups.py: its products by group
problems.py      what the kernels compute, how they are configured, and their descriptions
kernels/         device code
kernel_steps.py  the steps with kernels
operators.py     the operators and their gradients, written in steps
tools.py         what bench, explain, precompile, tune and doctor know of it; measure.py, providers.py: for bench
"""
