"""The kernel of rotary: arguments, problem, config and description. Imports neither torch nor the DSL.

A pair of elements is rotated, and each of the R // 2 pairs has its own angle. Where the two elements of pair i are
depends on the layout: "split", at i and R/2 + i, or "adjacent", at 2i and 2i + 1.
"""

import dataclasses
from typing import Any, NamedTuple

from quackish.device.arguments import Ptr
from quackish.device.spec import KernelSpec, on_all
from quackish.device.work import Sizes, Work, bytes_of, ceil_div
from quackish.errors import UnsupportedError
from quackish.gpu import Gpu

DTYPES = ("bfloat16", "float16", "float32")
MAX_THREADS = 2**31 - 2**20  # indices of threads are 32-bit, up to a CTA past the last one
# {layout: whether the pairs of the argument, and those of the result, are adjacent}
LAYOUTS = {"halves": (False, False), "interleaved": (True, True), "interleaved_to_halves": (True, False)}


class Strides(NamedTuple):
    """In elements. The stride of the last dimension is 1."""

    batch: Any = "int64"
    head: Any = "int64"
    row: Any = "int64"


class TableStrides(NamedTuple):
    batch: Any = "int64"
    row: Any = "int64"


class RotaryArgs(NamedTuple):
    """Without k, k_heads is 0 and k and k_out are not accessed."""

    q: Any = None  # (batch, q_heads, length, d)
    k: Any = None  # (batch, k_heads, length, d)
    cos: Any = None  # (batch or 1, length, w)
    sin: Any = None  # as cos
    q_out: Any = None  # as q, written
    k_out: Any = None  # as k, written
    q_strides: Any = Strides()
    k_strides: Any = Strides()
    q_out_strides: Any = Strides()
    k_out_strides: Any = Strides()
    cos_strides: Any = TableStrides()
    sin_strides: Any = TableStrides()
    tokens: Any = "int32"  # batch * length
    length: Any = "int32"
    q_heads: Any = "int32"
    k_heads: Any = "int32"


@dataclasses.dataclass(frozen=True)
class RotaryProblem:
    """Batch, length, heads and strides are run-time arguments: one compiled kernel serves all."""

    d: int
    dtype: str  # of q and k
    table_dtype: str  # of cos and sin
    rotary_dim: int  # elements from there on are copied
    layout: str = "halves"
    half_table: bool = False  # one column per pair, not per element
    transpose: bool = False  # the gradient
    aligned: bool = True  # every row of every tensor starts and ends on a 16-byte boundary

    @property
    def adjacent(self) -> tuple[bool, bool, bool]:
        """Whether pairs are adjacent in what is read, in what is written, and in a table of one column per element."""
        argument, result = LAYOUTS[self.layout]
        return (result, argument, result) if self.transpose else (argument, result, result)

    @property
    def pairs(self) -> int:
        """Pairs per thread: an access has 16 bytes. 1 if rows are not aligned or the vectors do not fit."""
        vec = 16 // bytes_of(self.dtype) if self.aligned and self.d * bytes_of(self.dtype) % 16 == 0 else 1
        pairs = max(1, vec // 2) if any(self.adjacent) else vec
        return pairs if self.rotary_dim % (2 * pairs) == 0 else 1

    @property
    def rotating_threads(self) -> int:
        return self.rotary_dim // 2 // self.pairs

    @property
    def threads_per_token(self) -> int:
        """Each has 2 * pairs elements of a row, in every head; those after `rotating_threads` copy."""
        return self.rotating_threads + ceil_div(self.d - self.rotary_dim, 2 * self.pairs)

    @property
    def args(self) -> RotaryArgs:
        tensor, table = (Ptr(dtype, self.aligned) for dtype in (self.dtype, self.table_dtype))
        return RotaryArgs(q=tensor, k=tensor, cos=table, sin=table, q_out=tensor, k_out=tensor)


@dataclasses.dataclass(frozen=True)
class RotaryConfig:
    threads: int  # per CTA
    batch: int  # heads per CTA


def rotary_config(problem: RotaryProblem, gpu: Gpu) -> RotaryConfig:
    """The same on every GPU. UnsupportedError for other dtypes."""
    # (8, 32, 2048, 64) and (4, 32, 4096, 128) with 8 heads of k, in us on an H100 (a copy: 60 and 115):
    # 128 threads, 4 heads: 60.8, 118.4; 256 threads: 62.0, 119.8; 2 heads: 65.0, 135.8; 8 heads: 63.9, 119.7;
    # 8, 20 and 40 heads in turns of 4: 61.7, 118.5; 62.6, 122.0; 64.2, 122.6.
    for name, dtype in (("", problem.dtype), ("tables in ", problem.table_dtype)):
        if dtype not in DTYPES:
            raise no_kernel(f"{name}{dtype}; supported: {', '.join(DTYPES)}")
    return RotaryConfig(threads=128, batch=4)


def no_kernel(reason: str) -> UnsupportedError:
    return UnsupportedError(f'rotary: no kernel for {reason}. backend="auto" runs the portable path.')


# Description ----------------------------------------------------------------------------------------------------------


def _work(p: RotaryProblem, s: Sizes) -> Work:
    heads = s["tokens"] * (s["q_heads"] + s["k_heads"])
    tensors = heads * p.d * bytes_of(p.dtype)
    width = p.rotary_dim // 2 if p.half_table else p.rotary_dim
    tables = 2 * s["table_rows"] * width * bytes_of(p.table_dtype)
    return Work(tensors + tables, tensors, 3 * heads * p.rotary_dim)


def _table_rows(args: RotaryArgs) -> dict[str, Any]:
    """A table without a batch is read once."""
    return {"table_rows": args.length if args.cos_strides.batch == 0 else args.tokens}


_B = "bfloat16"
SPEC = KernelSpec(
    name="rotary",
    operation="rotary",
    problem=RotaryProblem,
    on=on_all("quackish.ops.rotary.kernels.rotary:Rotary", RotaryConfig, rotary_config),
    sizes=("tokens", "length", "q_heads", "k_heads"),
    more_sizes=_table_rows,
    work=_work,
    samples=[
        RotaryProblem(128, _B, "float32", 128),
        RotaryProblem(128, _B, _B, 64, "interleaved_to_halves", transpose=True),
        RotaryProblem(80, _B, _B, 32, "interleaved", half_table=True),
        RotaryProblem(81, "float32", "float32", 30, aligned=False),
    ],
)
SPECS = (SPEC,)
