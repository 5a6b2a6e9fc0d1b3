"""RMSNorm: what is asked (Problem) and how it is done (Config). M is in none of them."""

import dataclasses

# Bytes an element, by dtype name as torch and the DSL both spell it.
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True)
class RmsNormFwdProblem:
    """y = norm(res) * (weight_offset + weight) + bias, res = x + residual; dtypes by name, None where absent."""

    n: int
    x_dtype: str
    y_dtype: str
    weight_dtype: str | None = None
    bias_dtype: str | None = None
    residual_dtype: str | None = None
    packed: bool = True  # row r of x and residual starts at r * n; else at (r // m1) * s0 + (r % m1) * s1
    aligned: bool = True  # every row of every tensor starts and ends on a 16-byte boundary


@dataclasses.dataclass(frozen=True)
class RmsNormBwdProblem:
    """The gradients that are asked for, by dtype name; None where one is not."""

    n: int
    x_dtype: str  # what was normalised: x, or res where there was a residual
    dy_dtype: str
    weight_dtype: str | None = None
    dres_dtype: str | None = None  # gradient that arrives at res
    dx_dtype: str | None = None
    dresidual_dtype: str | None = None  # asked for only where its dtype is not dx's
    dweight_dtype: str | None = None
    dbias_dtype: str | None = None
    packed: bool = True
    aligned: bool = True
