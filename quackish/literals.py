"""The names that options take, for `quackish.types` and, without torch, for the commands."""

from typing import Literal

Backend = Literal["auto", "cute", "reference"]
Reduction = Literal["none", "mean", "sum"]
Schedule = Literal["auto", "stored", "chunked", "recompute"]
Activation = Literal[
    "swiglu", "clamped_swiglu", "geglu", "geglu_erf", "reglu", "silu", "relu2", "gelu_tanh", "gelu_erf"
]  # fmt: skip
RotaryLayout = Literal["halves", "interleaved", "interleaved_to_halves"]
