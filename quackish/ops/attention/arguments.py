"""The arguments of attention's kernels, and the constants that host and device code share.

Lengths, batch, heads and strides are runtime arguments. Query head h uses key head h / (Hq / Hk). In tensors of
(B or 1, Hq or 1, Lq, Lk), a stride of 0 in the batch or head dimension means that the tensor is broadcast in it.
"""

from typing import Any, NamedTuple

from quackish.device.arguments import ALIGNED_F32, F32, Ptr

BLOCK = 64  # rows of a warp group's accumulator; queries and keys of a classified block of a mask
EMPTY, MIXED, FULL = range(3)  # classes of a block: no key, some keys or all keys take part
LARGE = 2.0**12  # an lse beyond it has lost digits in fp32: backward also reads its residual
ORDERED = 2 * BLOCK  # queries or keys of a tile that has a place in the order of a mask
MAX_D = 128


class Strided(NamedTuple):
    """A tensor (B, H, L, columns). Strides are in elements; columns are contiguous unless `column` is given."""

    base: Any = None
    batch: Any = "int64"
    head: Any = "int64"
    row: Any = "int64"
    column: Any = None  # for a bias or a mask that is not loaded by TMA


class ScoreArgs(NamedTuple):
    """What the scores depend on."""

    q: Any = None  # (B, Hq, Lq, d)
    k: Any = None  # (B, Hk, Lk, d)
    v: Any = None  # as k
    bias: Any = None  # (B or 1, Hq or 1, Lq, Lk)
    mask: Any = None  # (B or 1, Hq or 1, Lq, Lk) uint8
    classes: Any = None  # of the mask's blocks, uint8; a stride of 0 where the mask is broadcast; with mask
    order: Any = None  # (B or 1, Hq or 1, tiles, 1) int32: of ORDERED queries or keys, most work first; with `ordered`
    scale: Any = "float32"
    softcap: Any = None  # fp32
    left: Any = None  # int32: key j takes part in row i if i - left <= j <= i + right; with band
    right: Any = None
    batch: Any = "int32"
    heads: Any = "int32"  # Hq
    group: Any = "int32"  # Hq / Hk
    num_q: Any = "int32"  # Lq
    num_k: Any = "int32"  # Lk
    d: Any = "int32"
    max_ctas: Any = "int32"  # resident at once


class MaskArgs(NamedTuple):
    mask: Any = None  # (batches, heads, rows, columns) uint8: sizes are 1 where it is broadcast
    classes: Any = Ptr("uint8", aligned=False)  # (batches, heads, rows / BLOCK, columns / BLOCK) rounded up, written
    batches: Any = "int32"
    heads: Any = "int32"
    rows: Any = "int32"
    columns: Any = "int32"


class OrderArgs(NamedTuple):
    classes: Any = Strided(Ptr("uint8", aligned=False), column="int64")  # a stride of 0 where the mask is broadcast
    of_queries: Any = Ptr("int32", aligned=True)  # (batches, heads, num_q / ORDERED rounded up), written
    of_keys: Any = Ptr("int32", aligned=False)  # the same with num_k
    batches: Any = "int32"  # of the mask
    heads: Any = "int32"
    num_q: Any = "int32"
    num_k: Any = "int32"


class ForwardArgs(NamedTuple):
    scores: Any = ScoreArgs()
    o: Any = None  # (B, Hq, Lq, d), written
    lse: Any = F32  # (B, Hq, Lq), written
    lse_residual: Any = F32  # as lse, written: what rounding lse to fp32 dropped; 0 if |lse| <= LARGE


class RowsArgs(NamedTuple):
    o: Any = None  # (B, Hq, Lq, d)
    do: Any = None  # as o
    lse: Any = F32  # (B, Hq, Lq)
    lse_residual: Any = F32
    dlse: Any = None  # (B, Hq, Lq) fp32; if lse has a gradient
    stats: Any = ALIGNED_F32  # (4, B, Hq, stats_row), written: see `AttentionRows`
    stats_row: Any = "int64"  # a multiple of 4
    batch: Any = "int32"
    heads: Any = "int32"  # Hq
    num_q: Any = "int32"  # Lq
    d: Any = "int32"


class KeysArgs(NamedTuple):
    scores: Any = ScoreArgs()
    do: Any = None  # (B, Hq, Lq, d)
    stats: Any = ALIGNED_F32
    stats_row: Any = "int64"
    dk: Any = None  # (B, Hk, Lk, d), written
    dv: Any = None  # as dk
    dbias: Any = None  # (B, Hq, Lq, Lk), written; with dbias


class QueriesArgs(NamedTuple):
    scores: Any = ScoreArgs()
    do: Any = None  # (B, Hq, Lq, d)
    stats: Any = ALIGNED_F32
    stats_row: Any = "int64"
    dq: Any = None  # as q, written


class ProductArgs(NamedTuple):
    scores: Any = ScoreArgs()  # without bias and mask
    ds: Any = None  # (B, Hq, Lq, Lk)
    dq: Any = None  # as q, written


class SmallForwardArgs(NamedTuple):
    scores: Any = ScoreArgs()
    o: Any = None  # (B, Hq, Lq, d), written
    lse: Any = F32  # (B, Hq, Lq), written
    lse_residual: Any = F32  # as in ForwardArgs, written
    parts: Any = "int32"  # in which the matrices of scores that share one of the bias are divided
    batches: Any = "int32"  # B or 1: the sizes of the bias, and B without one
    heads_of_bias: Any = "int32"


class SmallBackwardArgs(NamedTuple):
    scores: Any = ScoreArgs()
    do: Any = None  # (B, H, Lq, d)
    o: Any = None  # as do
    lse: Any = F32  # (B, H, Lq)
    lse_residual: Any = F32
    dlse: Any = None  # (B, H, Lq) fp32; if lse has a gradient
    dq: Any = None  # as q, written
    dk: Any = None  # as k, written
    dv: Any = None  # as v, written
    dbias: Any = None  # (parts, B or 1, H or 1, Lq, Lk), written; its strides: batch, head, row
    part: Any = "int64"  # stride of dbias's parts
    parts: Any = "int32"  # as in SmallForwardArgs
    batches: Any = "int32"
    heads_of_bias: Any = "int32"


class BiasArgs(NamedTuple):
    scores: Any = ScoreArgs()
    do: Any = None  # (B, Hq, Lq, d)
    stats: Any = ALIGNED_F32
    stats_row: Any = "int64"
    dq: Any = None  # as q, written; in the kernel for both
    dbias: Any = None  # (parts, B or 1, Hq or 1, Lq, Lk), written; its strides: batch, head, row
    part: Any = "int64"  # stride of dbias's parts
    parts: Any = "int32"
    batches: Any = "int32"  # B or 1: the sizes of dbias
    heads_of_bias: Any = "int32"
