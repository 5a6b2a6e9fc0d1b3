"""Attention with a learned bias and a mask for torch.

api.py           scaled_dot_product_attention
checks.py        checks of the arguments; flattens batch dimensions
autograd.py      custom operators and their gradients, written in the steps of `reference/attention.py`
kernel_steps.py  the same steps with kernels
"""
