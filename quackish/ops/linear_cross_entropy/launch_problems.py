"""The problems of launches, as functions of everything that they depend on.

A function and its arguments are the key of a kernel in LceKernels, so a launch of known kernels makes no problem. The
arguments are hashable and few; in one position, all have the same type or are None.
"""

import dataclasses
from typing import Any

import torch

from quackish.device.cuda import name_of
from quackish.kernels.gemm.problem import EpilogueSpec, Store
from quackish.ops.linear_cross_entropy.calls import ProblemFields
from quackish.ops.linear_cross_entropy.gemm_problems import Dlogits, LceGemmProblem, RowsOut, Softmax, StoreWithResidual
from quackish.ops.linear_cross_entropy.row_problems import (
    LceBiasProblem,
    LceCompactProblem,
    LceGatherProblem,
    LceRowsProblem,
    LceScatterProblem,
    LceSortProblem,
    LceTargetsProblem,
)


def made(kind: type, shared: Any = None, **fields: Any) -> Any:
    """A dataclass of class `kind` with these fields, and with its other fields that `shared` has.

    torch dtypes become their names.
    """
    if shared is not None:
        names = {field.name for field in dataclasses.fields(kind)}
        fields = {name: value for name, value in shared._asdict().items() if name in names} | fields
    return kind(**{name: name_of(f) if isinstance(f, torch.dtype) else f for name, f in fields.items()})


# Rows -----------------------------------------------------------------------------------------------------------------


def compact(target_dtype: torch.dtype, class_weight_dtype: torch.dtype | None, divisor: str) -> LceCompactProblem:
    return made(LceCompactProblem, target_dtype=target_dtype, class_weight_dtype=class_weight_dtype, divisor=divisor)


def gather(fields: ProblemFields, dx_dtype: torch.dtype | None) -> LceGatherProblem:
    return made(LceGatherProblem, fields, dx_dtype=dx_dtype)


def regather(h: int, dtype: torch.dtype, x_aligned: bool) -> LceGatherProblem:
    return made(LceGatherProblem, h=h, dtype=dtype, only_live_x=True, x_aligned=x_aligned)


def rows(
    fields: ProblemFields, stats: bool, scale: bool, coefs: bool, scales_x: bool, exp_logits_split: bool,
    first_slot_of_class: bool, grad_loss: str, grad_lse: bool, grad_log_prob: bool, grad_entropy: bool,
) -> LceRowsProblem:  # fmt: skip
    return made(
        LceRowsProblem, fields, stats=stats, grads="scale" if scale else "coefs" if coefs else "none",
        h=fields.h if scales_x else 0, dtype=fields.dtype if scales_x else None, label_smoothing=fields.smoothing,
        softcap=scale and fields.softcap, exp_logits_split=exp_logits_split, first_slot_of_class=first_slot_of_class,
        return_stats=stats and fields.return_stats, grad_loss=grad_loss, grad_lse=grad_lse,
        grad_log_prob=grad_log_prob, grad_entropy=grad_entropy,
    )  # fmt: skip


def bias(dtype: torch.dtype, row_scale: bool, accumulate: bool, wide: bool) -> LceBiasProblem:
    return made(LceBiasProblem, dtype=dtype, row_scale=row_scale, accumulate=accumulate, wide=wide)


def sort(exp_logits_split: bool, first_slot_of_class: bool, presorted: bool) -> LceSortProblem:
    return LceSortProblem(exp_logits_split, first_slot_of_class, presorted)


def targets(
    h: int, dtype: torch.dtype, dw_dtype: torch.dtype, x_aligned: bool, rounding_residual: bool
) -> LceTargetsProblem:
    return made(
        LceTargetsProblem, h=h, dtype=dtype, dw_dtype=dw_dtype, x_aligned=x_aligned, rounding_residual=rounding_residual
    )


def scatter(h: int, dx_dtype: torch.dtype) -> LceScatterProblem:
    return made(LceScatterProblem, h=h, dx_dtype=dx_dtype)


# GEMMs ----------------------------------------------------------------------------------------------------------------


def logits(
    fields: ProblemFields, out_dtype: torch.dtype | None, d_in_two: bool, recompute_flagged: bool
) -> LceGemmProblem:
    epilogue = made(Softmax, fields, recompute_flagged=recompute_flagged)
    return made(LceGemmProblem, epilogue=epilogue, dtype=fields.dtype, out_dtype=out_dtype, d_in_two=d_in_two)


def dlogits(fields: ProblemFields, out_dtype: torch.dtype, entropy: bool) -> LceGemmProblem:
    epilogue = made(Dlogits, fields, entropy=entropy)
    return made(LceGemmProblem, epilogue=epilogue, dtype=fields.dtype, out_dtype=out_dtype)


def dx(
    dtype: torch.dtype, out_dtype: torch.dtype, a_in_two: bool, split_k_tail: bool, rows_out: bool, accumulate: bool
) -> LceGemmProblem:
    epilogue: EpilogueSpec = RowsOut() if rows_out else Store(accumulate=accumulate)
    return made(
        LceGemmProblem, epilogue=epilogue, dtype=dtype, out_dtype=out_dtype, b_major="n", a_in_two=a_in_two,
        split_k_tail=split_k_tail,
    )  # fmt: skip


def dw(
    dtype: torch.dtype, out_dtype: torch.dtype, split_k_tail: bool, residual: bool, scaled: bool, accumulate: bool
) -> LceGemmProblem:
    epilogue: EpilogueSpec = StoreWithResidual() if residual else Store(scaled=scaled, accumulate=accumulate)
    return made(
        LceGemmProblem, epilogue=epilogue, dtype=dtype, out_dtype=out_dtype, a_major="m", b_major="n", live="k",
        split_k_tail=split_k_tail,
    )  # fmt: skip
