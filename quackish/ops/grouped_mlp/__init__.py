"""The MLP of a mixture of experts for torch, and grouped matrix products.

api.py        the functions of rows that are sorted by expert
moe.py        the function of tokens and a router's choice, above them
checks.py     whether the arguments fit together
autograd.py   custom operators and their gradients, written once above the steps of `reference/grouped_mlp.py`
kernel_steps.py  the same steps on kernels
"""

from quackish.ops.grouped_mlp.api import grouped_mlp, grouped_mm
from quackish.ops.grouped_mlp.moe import moe_mlp

__all__ = ["grouped_mlp", "grouped_mm", "moe_mlp"]
