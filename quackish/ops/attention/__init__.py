"""Attention with a learned bias and a mask.

api.py           scaled_dot_product_attention
checks.py        checks of the arguments; flattens batch dimensions
reference.py     the steps in PyTorch: the specification, and the portable path
score_problems.py, problems.py, arguments.py    what the kernels compute; their descriptions; their arguments
config.py        how they are configured
kernels/         device code
kernel_steps.py  the steps with kernels
efficient.py     the steps by PyTorch's memory-efficient attention, on GPUs without kernels
prepared.py      what their launches need besides addresses
mask_plan.py     where the parts of a mask's plan are in memory
operators.py     the operators and their gradients, written in steps
tools.py         what bench, explain, precompile, tune and doctor know of it; measure.py, providers.py: for bench
"""
