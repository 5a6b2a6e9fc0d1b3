"""The arguments of linear cross entropy's kernels: one NamedTuple per kernel, the same for host and device code.

A problem's `args` is the NamedTuple of its kernel filled with what each argument is: a `Ptr`, the type of a number, or
None where it is absent. A launch fills it with addresses and numbers by position: `**keywords` take 5 us longer.

m rows and v classes are those of the whole call; a launch handles `rows` chunk rows, from slot `start` on. Matrices are
contiguous unless a stride, in elements, is given. Columns of exp_logits from v_split on may be in exp_logits2.
"""

import dataclasses
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True)
class Ptr:
    """An address of device memory, aligned to 16 bytes or to one element."""

    dtype: str
    aligned: bool = False


I32, F32, BF16 = Ptr("int32"), Ptr("float32"), Ptr("bfloat16")


def optional(dtype: str | None, aligned: bool = False) -> Ptr | None:
    return None if dtype is None else Ptr(dtype, aligned)


class CompactArgs(NamedTuple):
    target: Any  # (m,) int32 or int64
    class_weight: Any  # (v,) fp32, bf16 or fp16; absent without class weights or with another divisor
    num_items_at: Any  # 0-dim fp32; with divisor "tensor"
    order: Any  # (m,) int32, written: the row of each slot
    inv_divisor: Any  # (1,) fp32, written
    tickets: Any  # (NUM_TICKETS,) int32, zeroed
    num_live: Any  # (1,) int32, written
    num_items: Any  # fp32; used with divisor "float"
    ignore_index: Any  # int64
    v: Any  # int32
    m: Any  # int32


class GatherArgs(NamedTuple):
    x: Any  # (m, h) bf16 or fp16
    w: Any  # (v, h) as x
    bias: Any  # (v,) fp32, bf16 or fp16; absent without bias
    target: Any  # (m,) int32 or int64
    order: Any  # (m,) int32
    num_live: Any  # (1,) int32
    live_x: Any  # (rows, h) as x, written: the live rows of x
    slot_target: Any  # (rows,) int32, written: the target; -1 if it is no class
    row_shift: Any  # (rows,) fp32, written
    row_max_bits: Any  # (rows,) int32, written: row_shift, encoded
    flags: Any  # (1 + ceil(rows / 128),) int32, zeroed
    dx: Any  # (m, h), ignored rows are zeroed; absent without dx_dtype
    loss: Any  # (m,) fp32, ignored rows are zeroed; with rows_out
    lse: Any  # (m,) fp32, ignored rows are zeroed; with rows_out
    x_stride: Any  # int64
    softcap: Any  # fp32
    start: Any  # int32
    rows: Any  # int32
    v: Any  # int32


class RowsArgs(NamedTuple):
    slot_target: Any  # (rows,) int32
    order: Any  # (m,) int32
    num_live: Any  # (1,) int32
    part_sum: Any  # (rows, tiles) fp32: sums of exponentials; with stats
    part_wsum: Any  # (rows, tiles) fp32: sums of class weight * logit; with stats and label smoothing
    target_logit: Any  # (rows,) fp32; with stats or "scale"
    row_max_bits: Any  # (rows,) int32
    class_weight: Any  # (v,) fp32, bf16 or fp16; absent without class weights
    total_weight: Any  # 0-dim fp32: sum of the class weights; with these and label smoothing
    loss: Any  # (m,) fp32, written; with stats
    lse: Any  # (m,) fp32, written with stats, else read
    row_sum: Any  # (rows,) fp32, as lse
    grad_loss: Any  # fp32, 0-dim or (m,); with gradients, unless it is one
    inv_divisor: Any  # (1,) fp32
    grad_lse: Any  # (m,) fp32; with gradients, if lse has one
    exp_logits: Any  # (rows, v_split or v) bf16, target entries are overwritten; with "scale"
    exp_logits2: Any  # (rows, v - v_split) bf16; with exp_logits_split
    live_x: Any  # (rows, h) bf16 or fp16; with "scale" and h
    scaled_x: Any  # as live_x, and may be live_x, written: row_scale * live_x
    row_scale: Any  # (rows,) fp32, written; with "scale"
    coefs: Any  # (rows, 4) fp32, written; with "coefs"
    first_slot_of_class: Any  # (v,) int32, set to NO_SLOT; absent unless the problem says so
    softcap: Any  # fp32
    z_loss: Any  # fp32
    label_smoothing: Any  # fp32
    exp_logits_stride: Any  # int64
    exp_logits2_stride: Any  # int64
    v_split: Any  # int32
    v: Any  # int32
    tiles: Any  # int32
    start: Any  # int32
    rows: Any  # int32


class SortArgs(NamedTuple):
    slot_target: Any  # (rows,) int32
    order: Any  # (m,) int32
    num_live: Any  # (1,) int32
    row_scale: Any  # (rows,) fp32
    exp_logits: Any  # (rows, v_split or v) bf16, target entries are zeroed
    exp_logits2: Any  # (rows, v - v_split) bf16; with exp_logits_split
    exp_logits_stride: Any  # int64
    exp_logits2_stride: Any  # int64
    v_split: Any  # int32
    sorted_target: Any  # (rows,) int32, written: slot_target, ascending
    sorted_row: Any  # (rows,) int32, written: its row of x
    sorted_grad: Any  # (rows,) fp32, written: its gradient of the target's logit
    first_slot_of_class: Any  # (v,) int32, NO_SLOT before; absent unless the problem says so
    index: Any  # (rows,) int64: the chunk row of each sorted slot; with presorted
    v: Any  # int32
    start: Any  # int32
    rows: Any  # int32


class TargetsArgs(NamedTuple):
    x: Any  # (m, h) bf16 or fp16
    sorted_target: Any  # (rows,) int32
    sorted_row: Any  # (rows,) int32
    sorted_grad: Any  # (rows,) fp32
    num_live: Any  # (1,) int32
    dw: Any  # (v1 - v0, h) bf16, fp16 or fp32, added to
    rounding_residual: Any  # (rows, h) int16: the bits of dw that rounding dropped, at a class's first sorted slot
    x_stride: Any  # int64
    v0: Any  # int32
    v1: Any  # int32
    start: Any  # int32
    rows: Any  # int32


class BiasArgs(NamedTuple):
    exp_logits: Any  # (rows, >= n) bf16 or fp16: exp_logits, or gradients of the logits
    row_scale: Any  # (rows,) fp32; absent: 1
    db: Any  # (n,) fp32, written or added to
    num_live: Any  # (1,) int32
    exp_logits_stride: Any  # int64, a multiple of 8
    start: Any  # int32
    rows: Any  # int32
    n: Any  # int32


class ScatterArgs(NamedTuple):
    acc: Any  # (rows, h) fp32
    row_scale: Any  # (rows,) fp32; absent: 1
    order: Any  # (m,) int32
    dx: Any  # (m, h) bf16, fp16 or fp32, written
    num_live: Any  # (1,) int32
    start: Any  # int32
    rows: Any  # int32


class ScaleArgs(NamedTuple):
    out: Any  # (n,) bf16, fp16 or fp32, scaled in place
    out2: Any  # (n2,) as out
    factor: Any  # (1,) fp32
    n: Any  # int64
    n2: Any  # int64
    num_ctas: Any  # int32


class GemmArgs(NamedTuple):
    """D[m, n] = sum over k of A[m, k] * B[n, k]. Here and for its epilogues m, n and k are the sizes of this product.

    Strides are leading dimensions, multiples of 8.
    """

    a: Any  # (m, split or k) bf16 or fp16
    second: Any  # the columns from `split` on: of A with a_in_two, of D with d_in_two
    b: Any  # (n, k) as a
    d: Any  # (m, split or n) bf16, fp16 or fp32, written or added to; absent without out_dtype
    epilogue: Any  # SoftmaxArgs, DlogitsArgs, RowsOutArgs, ScaledArgs, ResidualArgs; absent for a plain store
    tail: Any  # TailArgs; with split_k_tail
    ticket: Any  # (1,) int32 of wave_sync, 0 before and after; absent with recompute_flagged
    num_live: Any  # (1,) int32
    m: Any  # int32
    n: Any  # int32
    k: Any  # int32
    split: Any  # int32, a multiple of 64; used with a_in_two or d_in_two
    start: Any  # int32
    a_stride: Any  # int64
    second_stride: Any  # int64
    b_stride: Any  # int64
    d_stride: Any  # int64
    max_clusters: Any  # int32: clusters that are resident at once


class SoftmaxArgs(NamedTuple):
    bias: Any  # (n,) fp32, bf16 or fp16; absent without bias
    class_weight: Any  # (n,) fp32; with class weights and label smoothing
    row_shift: Any  # (m,) fp32; absent with recompute_flagged
    slot_target: Any  # (m,) int32
    row_max_bits: Any  # (m,) int32, raised; only read with recompute_flagged
    flags: Any  # (1 + ceil(m / 128),) int32, set; only read with recompute_flagged
    part_sum: Any  # (m, tiles) fp32, written
    target_logit: Any  # (m,) fp32, written
    part_wsum: Any  # (m, tiles) fp32, written; with label smoothing
    softcap: Any  # fp32
    tiles: Any  # int32


class DlogitsArgs(NamedTuple):
    bias: Any  # (n,) fp32, bf16 or fp16; absent without bias
    class_weight: Any  # (v0 + n,) fp32; with class weights and label smoothing
    coefs: Any  # (m, 4) fp32
    slot_target: Any  # (m,) int32
    softcap: Any  # fp32
    v0: Any  # int32: the class of the first column


class RowsOutArgs(NamedTuple):
    row_scale: Any  # (m,) fp32
    order: Any  # (start + m,) int32


class ScaledArgs(NamedTuple):
    factor: Any  # (1,) fp32


class ResidualArgs(NamedTuple):
    first_slot_of_class: Any  # (m,) int32, NO_SLOT for classes without a slot
    rounding_residual: Any  # (slots, n) int16, written: row first_slot_of_class[i] for row i of D


class TailArgs(NamedTuple):
    partials: Any  # (GemmConfig.tail_room,) fp32, written: partial sums
    tickets: Any  # (NUM_TICKETS,) int32, 0 before and after
    max_splits: Any  # int32: how many splits `partials` has room for


class ExpArgs(NamedTuple):
    z: Any  # (rows, n) fp32: products; its columns continue to the end of the last tile
    out: Any  # (rows, n) bf16 or fp16, written: exp_logits or dlogits; absent without out_dtype
    bias: Any  # (n,) fp32, bf16 or fp16; absent without bias
    class_weight: Any  # (n,) fp32; with class weights and label smoothing
    slot_target: Any  # (rows,) int32
    num_live: Any  # (1,) int32
    row_shift: Any  # (rows,) fp32; as all up to target_logit, with "softmax"
    row_max_bits: Any  # (rows,) int32, raised
    flags: Any  # (1 + ceil(rows / 128),) int32, set
    part_sum: Any  # (rows, 2 * tiles) fp32, written: sums, shifts
    part_wsum: Any  # (rows, 2 * tiles) fp32, written: sums, zeros; with label smoothing
    target_logit: Any  # (rows,) fp32, written
    tile0: Any  # int32: the tile of the first column
    tiles: Any  # int32
    coefs: Any  # (rows, 4) fp32; with "dlogits"
    z_stride: Any  # int64
    out_stride: Any  # int64
    softcap: Any  # fp32
    v0: Any  # int32: the class of the first column
    start: Any  # int32
    rows: Any  # int32
    n: Any  # int32


class RescaleArgs(NamedTuple):
    exp_logits: Any  # (rows, n) bf16, rescaled; absent unless stored
    part_sum: Any  # (rows, 2 * tiles) fp32, rescaled: sums, shifts
    row_max_bits: Any  # (rows,) int32
    flags: Any  # (1 + ceil(rows / 128),) int32
    num_live: Any  # (1,) int32
    exp_logits_stride: Any  # int64
    tile0: Any  # int32: the tile of the first column
    tiles: Any  # int32
    start: Any  # int32
    rows: Any  # int32
    n: Any  # int32


class ClearArgs(NamedTuple):
    out: Any  # (rows, h) bf16 or fp16, rows that are not live are zeroed
    num_live: Any  # (1,) int32
    start: Any  # int32
    rows: Any  # int32
