"""What a GEMM computes, on any GPU: its arguments, its epilogue and its problem."""

import dataclasses
from typing import Any, NamedTuple

from quackish.device.arguments import ALIGNED_F32, F32, I32, Ptr, optional
from quackish.device.work import Sizes, Work, bytes_of
from quackish.gpu import Gpu

TILE_K = 64  # 128 bytes, the swizzle span. Two stages of 128 took 50 % longer (H200).

# `split_k_tail` uses one counter per warp group of a split tile, at most 4 per CTA; `wave_sync` uses the last counter.
NUM_TICKETS = 1024


class GemmArgs(NamedTuple):
    """D[m, n] = sum over k of A[m, k] * B[n, k]. In the arguments of its epilogues, too, m, n and k are these sizes.

    Strides are leading dimensions, multiples of 8.
    """

    a: Any = None  # (m, split or k) bf16 or fp16
    second: Any = None  # the columns from `split` on: of A with a_in_two, of D with d_in_two
    b: Any = None  # (n, k) as a
    d: Any = None  # (m, split or n) bf16, fp16 or fp32, written or added to; absent without out_dtype
    epilogue: Any = None  # `EpilogueSpec.args`
    tail: Any = None  # TailArgs; with split_k_tail
    ticket: Any = I32  # (1,) of wave_sync, 0 before and after; not used if the epilogue selects tiles
    num_live: Any = None  # (1,) int32; with live
    m: Any = "int32"
    n: Any = "int32"
    k: Any = "int32"
    split: Any = "int32"  # a multiple of 64; used with a_in_two or d_in_two
    start: Any = None  # int32; with live
    a_stride: Any = "int64"
    second_stride: Any = "int64"
    b_stride: Any = "int64"
    d_stride: Any = "int64"
    max_clusters: Any = "int32"  # resident at once


class TailArgs(NamedTuple):
    partials: Any = ALIGNED_F32  # (GemmConfig.tail_room,), written: partial sums
    tickets: Any = I32  # (NUM_TICKETS,), 0 before and after
    max_splits: Any = "int32"  # capacity of `partials`, in splits


class EpilogueSpec:
    """What an epilogue computes and what it needs: the base class of frozen dataclasses, whose fields are its options.

    An operation has its epilogues beside its problems. Their device code is in `epilogues` of its kernel classes.
    """

    stores_by_tma = True  # D, if the problem has an out_dtype
    can_pingpong = True
    accumulate = False  # D is added to the output

    def args(self, dtype: str) -> tuple | None:
        """The NamedTuple of its arguments. dtype: of A and B."""
        return None

    @property
    def selects_tiles(self) -> bool:
        """Whether it computes some tiles only: `num_tiles` and `is_selected` of its device code choose them."""
        return False

    def why_illegal(self, problem: Any, config: Any, gpu: Gpu) -> str | None:
        """Why a config that the GEMM allows does not suit the epilogue; None if it does."""
        return None

    def work(self, product: Work, sizes: Sizes) -> Work:
        """The work of a GEMM with it. product: the work of one that stores D."""
        read = product.bytes_read + product.bytes_written * self.accumulate
        return dataclasses.replace(product, bytes_read=read)


class ScaledArgs(NamedTuple):
    factor: Any = F32  # (1,)


@dataclasses.dataclass(frozen=True)
class Store(EpilogueSpec):
    """Stores D."""

    scaled: bool = False  # D is multiplied by a number in device memory
    accumulate: bool = False  # D is added to an fp32 output

    def args(self, dtype: str) -> ScaledArgs | None:
        return ScaledArgs() if self.scaled else None


@dataclasses.dataclass(frozen=True)
class GemmProblem:
    """D[m, n] = sum over k of A[m, k] * B[n, k] in fp32, followed by an epilogue.

    `live`: the dimension, "m" or "k", whose size is the number of live rows, num_live - start, read on the device. The
    kernel also multiplies the rows from the last live one to the end of its tile, TILE_K rows along k. Along k, A and B
    must be zero there.
    """

    epilogue: EpilogueSpec
    dtype: str  # of A and B: "bfloat16" or "float16"
    out_dtype: str | None  # None: D is not stored
    a_major: str = "k"  # "m" or "k": A's contiguous dimension
    b_major: str = "k"  # "n" or "k"
    live: str | None = None
    a_in_two: bool = False  # the columns of A are in two buffers
    d_in_two: bool = False  # the columns of D are in two buffers
    split_k_tail: bool = False  # split-K for the tiles of a partly filled last wave; on Hopper

    @property
    def args(self) -> GemmArgs:
        operand, out = Ptr(self.dtype, aligned=True), optional(self.out_dtype, aligned=True)
        return GemmArgs(
            a=operand, second=operand if self.a_in_two else out if self.d_in_two else None, b=operand, d=out,
            epilogue=self.epilogue.args(self.dtype), tail=TailArgs() if self.split_k_tail else None,
            num_live=I32 if self.live else None, start="int32" if self.live else None,
        )  # fmt: skip


def gemm_work(p: GemmProblem, sizes: Sizes) -> Work:
    m, n, k = sizes["m"], sizes["n"], sizes["k"]
    product = Work((m * k + n * k) * bytes_of(p.dtype), m * n * bytes_of(p.out_dtype), 2 * m * n * k)
    return p.epilogue.work(product, sizes)


def raster_why_illegal(c: Any, legal: dict[str, tuple]) -> str | None:
    """Why a config's tiles or their order are illegal. legal: the values of its fields."""
    for field, values in legal.items():
        if getattr(c, field) not in values:
            return f"{field} is {getattr(c, field)!r}; expected one of {', '.join(map(repr, values))}"
    if c.num_stages < 2:
        return f"num_stages is {c.num_stages}; expected at least 2"
    if not 1 <= c.group <= 256:  # kernels multiply it by the clusters of the other dimension, in 32 bits
        return f"group is {c.group}; expected from 1 to 256"
    return None
