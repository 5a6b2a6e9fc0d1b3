"""The arguments of the linear cross entropy kernels: one NamedTuple per kernel, for host and device code.

`problem.args` is the NamedTuple of specs: each argument is a `Ptr`, the type of a number, or None if absent. A field's
default is its spec if that is the same for all problems. A launch fills the NamedTuple with addresses and numbers, by
position: `**keywords` take 5 us longer.

The whole call has m rows and v classes; a launch handles `rows` chunk rows, starting at slot `start`. Matrices are
contiguous unless a stride, in elements, is given. Columns of exp_logits from v_split on may be in exp_logits2.
"""

from typing import Any, NamedTuple

from quackish.configs.arguments import ALIGNED_F32, ALIGNED_I16, BF16, F32, I32, Ptr


class CompactArgs(NamedTuple):
    target: Any = None  # (m,) int32 or int64
    class_weight: Any = None  # (v,) fp32, bf16 or fp16; absent without class weights or with another divisor
    num_items_at: Any = None  # 0-dim fp32; with divisor "tensor"
    order: Any = I32  # (m,), written: the row of each slot
    inv_divisor: Any = F32  # (1,), written
    tickets: Any = I32  # (NUM_TICKETS,), zeroed
    num_live: Any = I32  # (1,), written
    num_items: Any = "float32"  # used with divisor "float"
    ignore_index: Any = "int64"
    v: Any = "int32"
    m: Any = "int32"


class GatherArgs(NamedTuple):
    x: Any = None  # (m, h) bf16 or fp16
    w: Any = None  # (v, h) as x
    bias: Any = None  # (v,) fp32, bf16 or fp16; absent without bias
    target: Any = None  # (m,) int32 or int64
    order: Any = I32  # (m,)
    num_live: Any = I32  # (1,)
    live_x: Any = None  # (rows, h) as x, written: the live rows of x
    slot_target: Any = I32  # (rows,), written: the target; -1 if it is not a class
    row_shift: Any = F32  # (rows,), written
    row_max_bits: Any = I32  # (rows,), written: row_shift, encoded
    flags: Any = I32  # (1 + ceil(rows / 128),), zeroed
    dx: Any = None  # (m, h), ignored rows are zeroed; absent without dx_dtype
    loss: Any = None  # (m,) fp32, ignored rows are zeroed; with rows_out
    lse: Any = None  # (m,) fp32, ignored rows are zeroed; with rows_out
    log_prob: Any = None  # (m,) fp32, ignored rows are zeroed; with return_stats, as all up to argmax_bits
    entropy: Any = None  # (m,) fp32, ignored rows are zeroed
    predicted: Any = None  # (m,) int32, -1 in ignored rows
    argmax_bits: Any = None  # (rows,) int64, written: less than the code of any argmax
    x_stride: Any = "int64"
    softcap: Any = "float32"
    start: Any = "int32"
    rows: Any = "int32"
    v: Any = "int32"


class RowsArgs(NamedTuple):
    slot_target: Any = I32  # (rows,)
    order: Any = I32  # (m,)
    num_live: Any = I32  # (1,)
    part_sum: Any = None  # (rows, tiles) fp32: sums of exponentials; with stats
    part_wsum: Any = None  # (rows, tiles) fp32: sums of class weight * logit; with stats and label smoothing
    part_elog: Any = None  # (rows, tiles) fp32: sums of e * log2(e); with stats and return_stats
    argmax_bits: Any = None  # (rows,) int64; with stats and return_stats
    target_logit: Any = None  # (rows,) fp32; with stats or "scale"
    row_max_bits: Any = I32  # (rows,)
    class_weight: Any = None  # (v,) fp32, bf16 or fp16; absent without class weights
    total_weight: Any = None  # 0-dim fp32: sum of the class weights; with class weights and label smoothing
    loss: Any = None  # (m,) fp32, written; with stats
    lse: Any = F32  # (m,), written with stats, else read
    row_sum: Any = F32  # (rows,), written with stats, else read
    log_prob: Any = None  # (m,) fp32, written; with stats and return_stats
    entropy: Any = None  # (m,) fp32, written with stats and return_stats; read with grad_entropy
    predicted: Any = None  # (m,) int32, written; with stats and return_stats
    grad_loss: Any = None  # fp32, 0-dim or (m,); with gradients, absent for 1
    inv_divisor: Any = F32  # (1,)
    grad_lse: Any = None  # (m,) fp32; with gradients, if lse has one
    grad_log_prob: Any = None  # (m,) fp32; with gradients, if log_prob has one
    grad_entropy: Any = None  # (m,) fp32; with "coefs", if the entropy has one
    exp_logits: Any = None  # (rows, v_split or v) bf16, target entries are overwritten; with "scale"
    exp_logits2: Any = None  # (rows, v - v_split) bf16; with exp_logits_split
    live_x: Any = None  # (rows, h) bf16 or fp16; with "scale" and h
    scaled_x: Any = None  # as live_x, and may be the same memory, written: row_scale * live_x
    row_scale: Any = None  # (rows,) fp32, written; with "scale"
    coefs: Any = None  # (rows, 4) fp32, written; with "coefs"
    coef_entropy: Any = None  # (rows,) fp32, written; with grad_entropy
    first_slot_of_class: Any = None  # (v,) int32, filled with NO_SLOT; with first_slot_of_class
    softcap: Any = "float32"
    z_loss: Any = "float32"
    label_smoothing: Any = "float32"
    exp_logits_stride: Any = "int64"
    exp_logits2_stride: Any = "int64"
    v_split: Any = "int32"
    v: Any = "int32"
    tiles: Any = "int32"
    start: Any = "int32"
    rows: Any = "int32"
    logit_scale: Any = None  # 0-dim fp32; here and below, absent for 1


class SortArgs(NamedTuple):
    slot_target: Any = Ptr("int32", aligned=True)  # (rows,)
    order: Any = I32  # (m,)
    num_live: Any = I32  # (1,)
    row_scale: Any = F32  # (rows,)
    exp_logits: Any = BF16  # (rows, v_split or v), target entries are zeroed
    exp_logits2: Any = None  # (rows, v - v_split) bf16; with exp_logits_split
    exp_logits_stride: Any = "int64"
    exp_logits2_stride: Any = "int64"
    v_split: Any = "int32"
    sorted_target: Any = I32  # (rows,), written: slot_target, ascending
    sorted_row: Any = I32  # (rows,), written: its row of x
    sorted_grad: Any = F32  # (rows,), written: its gradient of the target's logit
    first_slot_of_class: Any = None  # (v,) int32, NO_SLOT before, updated; with first_slot_of_class
    index: Any = None  # (rows,) int64: the chunk row of each sorted slot; with presorted
    v: Any = "int32"
    start: Any = "int32"
    rows: Any = "int32"


class TargetsArgs(NamedTuple):
    x: Any = None  # (m, h) bf16 or fp16
    sorted_target: Any = I32  # (rows,)
    sorted_row: Any = I32  # (rows,)
    sorted_grad: Any = F32  # (rows,)
    num_live: Any = I32  # (1,)
    dw: Any = None  # (v1 - v0, h) bf16, fp16 or fp32, added to
    rounding_residual: Any = None  # (rows, h) int16: bits of dw that rounding dropped, at a class's first sorted slot
    x_stride: Any = "int64"
    v0: Any = "int32"
    v1: Any = "int32"
    start: Any = "int32"
    rows: Any = "int32"


class BiasArgs(NamedTuple):
    exp_logits: Any = None  # (rows, >= n) bf16 or fp16: exp_logits, or gradients of the logits
    row_scale: Any = None  # (rows,) fp32; absent: 1
    db: Any = F32  # (n,), written or added to
    num_live: Any = I32  # (1,)
    exp_logits_stride: Any = "int64"  # a multiple of 8
    start: Any = "int32"
    rows: Any = "int32"
    n: Any = "int32"


class ScatterArgs(NamedTuple):
    acc: Any = ALIGNED_F32  # (rows, h)
    row_scale: Any = None  # (rows,) fp32; absent: 1
    order: Any = I32  # (m,)
    dx: Any = None  # (m, h) bf16, fp16 or fp32, written
    num_live: Any = I32  # (1,)
    start: Any = "int32"
    rows: Any = "int32"


class ScaleArgs(NamedTuple):
    out: Any = None  # (n,) bf16, fp16 or fp32, scaled in place
    out2: Any = None  # (n2,) as out
    factor: Any = F32  # (1,)
    n: Any = "int64"
    n2: Any = "int64"
    num_ctas: Any = "int32"


class GemmArgs(NamedTuple):
    """D[m, n] = sum over k of A[m, k] * B[n, k]. In the arguments of its epilogues, too, m, n and k are these sizes.

    Strides are leading dimensions, multiples of 8.
    """

    a: Any = None  # (m, split or k) bf16 or fp16
    second: Any = None  # the columns from `split` on: of A with a_in_two, of D with d_in_two
    b: Any = None  # (n, k) as a
    d: Any = None  # (m, split or n) bf16, fp16 or fp32, written or added to; absent without out_dtype
    epilogue: Any = None  # SoftmaxArgs, DlogitsArgs, RowsOutArgs, ScaledArgs, ResidualArgs; absent for a plain store
    tail: Any = None  # TailArgs; with split_k_tail
    ticket: Any = None  # (1,) int32 of wave_sync, 0 before and after; absent with recompute_flagged
    num_live: Any = I32  # (1,)
    m: Any = "int32"
    n: Any = "int32"
    k: Any = "int32"
    split: Any = "int32"  # a multiple of 64; used with a_in_two or d_in_two
    start: Any = "int32"
    a_stride: Any = "int64"
    second_stride: Any = "int64"
    b_stride: Any = "int64"
    d_stride: Any = "int64"
    max_clusters: Any = "int32"  # resident at once


class SoftmaxArgs(NamedTuple):
    bias: Any = None  # (n,) fp32, bf16 or fp16; absent without bias
    class_weight: Any = None  # (n,) fp32; with class weights and label smoothing
    row_shift: Any = None  # (m,) fp32; absent with recompute_flagged
    slot_target: Any = I32  # (m,)
    row_max_bits: Any = I32  # (m,), updated; only read with recompute_flagged
    flags: Any = I32  # (1 + ceil(m / 128),), set; only read with recompute_flagged
    part_sum: Any = F32  # (m, tiles), written
    target_logit: Any = F32  # (m,), written
    part_wsum: Any = None  # (m, tiles) fp32, written; with label smoothing
    part_elog: Any = None  # (m, tiles) fp32, written; with return_stats
    argmax_bits: Any = None  # (m,) int64, updated; with return_stats, absent with recompute_flagged
    softcap: Any = "float32"
    tiles: Any = "int32"
    logit_scale: Any = None  # 0-dim fp32


class DlogitsArgs(NamedTuple):
    bias: Any = None  # (n,) fp32, bf16 or fp16; absent without bias
    class_weight: Any = None  # (v0 + n,) fp32; with class weights and label smoothing
    coefs: Any = ALIGNED_F32  # (m, 4)
    slot_target: Any = I32  # (m,)
    coef_entropy: Any = None  # (m,) fp32; if the entropy has a gradient
    softcap: Any = "float32"
    v0: Any = "int32"  # the class of the first column
    logit_scale: Any = None  # 0-dim fp32


class RowsOutArgs(NamedTuple):
    row_scale: Any = F32  # (m,)
    order: Any = I32  # (start + m,)


class ScaledArgs(NamedTuple):
    factor: Any = F32  # (1,)


class ResidualArgs(NamedTuple):
    first_slot_of_class: Any = I32  # (m,), NO_SLOT for classes without a slot
    rounding_residual: Any = ALIGNED_I16  # (slots, n), written: row first_slot_of_class[i] for row i of D


class TailArgs(NamedTuple):
    partials: Any = ALIGNED_F32  # (GemmConfig.tail_room,), written: partial sums
    tickets: Any = I32  # (NUM_TICKETS,), 0 before and after
    max_splits: Any = "int32"  # capacity of `partials`, in splits


class ExpArgs(NamedTuple):
    z: Any = ALIGNED_F32  # (rows, n): GEMM result, with columns up to the end of the last tile
    out: Any = None  # (rows, n) bf16 or fp16, written: exp_logits or dlogits; absent without out_dtype
    bias: Any = None  # (n,) fp32, bf16 or fp16; absent without bias
    class_weight: Any = None  # (n,) fp32; with class weights and label smoothing
    slot_target: Any = I32  # (rows,)
    num_live: Any = I32  # (1,)
    row_shift: Any = None  # (rows,) fp32; with "softmax", as all up to target_logit
    row_max_bits: Any = None  # (rows,) int32, updated
    flags: Any = None  # (1 + ceil(rows / 128),) int32, set
    part_sum: Any = None  # (rows, 2 * tiles) fp32, written: sums, shifts
    part_wsum: Any = None  # (rows, 2 * tiles) fp32, written: sums, zeros; with label smoothing
    part_elog: Any = None  # (rows, 2 * tiles) fp32, written: sums, zeros; with return_stats
    argmax_bits: Any = None  # (rows,) int64, updated; with return_stats
    target_logit: Any = None  # (rows,) fp32, written
    tile0: Any = "int32"  # the tile of the first column
    tiles: Any = "int32"
    coefs: Any = None  # (rows, 4) fp32; with "dlogits"
    coef_entropy: Any = None  # (rows,) fp32; with "dlogits", if the entropy has a gradient
    z_stride: Any = "int64"
    out_stride: Any = "int64"
    softcap: Any = "float32"
    v0: Any = "int32"  # the class of the first column
    start: Any = "int32"
    rows: Any = "int32"
    n: Any = "int32"
    logit_scale: Any = None  # 0-dim fp32


class RescaleArgs(NamedTuple):
    exp_logits: Any = None  # (rows, n) bf16, rescaled; absent unless stored
    part_sum: Any = F32  # (rows, 2 * tiles), rescaled: sums, shifts
    part_elog: Any = None  # (rows, 2 * tiles) fp32, rescaled; with return_stats
    row_max_bits: Any = I32  # (rows,)
    flags: Any = I32  # (1 + ceil(rows / 128),)
    num_live: Any = I32  # (1,)
    exp_logits_stride: Any = "int64"
    tile0: Any = "int32"  # the tile of the first column
    tiles: Any = "int32"
    start: Any = "int32"
    rows: Any = "int32"
    n: Any = "int32"
    logit_scale: Any = None  # 0-dim fp32


class ClearArgs(NamedTuple):
    out: Any = None  # (rows, h) bf16 or fp16, ignored rows are zeroed
    num_live: Any = I32  # (1,)
    start: Any = "int32"
    rows: Any = "int32"
