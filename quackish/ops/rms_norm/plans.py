"""Plans of RMSNorm calls: what depends only on shapes, strides, dtypes and options, computed once.

These are the key of the plan cache, so a cached plan implies valid arguments, and a call checks only the pointers.
If no kernel covers a call, its plan runs portable.py, with backend "reference" reference.py.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quackish.device import choose, cuda
from quackish.device.kernel_device import KernelDevice, device_of, report_portable
from quackish.device.modes import are_plain, check_memory
from quackish.errors import UnsupportedError
from quackish.ops.rms_norm import portable, reference
from quackish.ops.rms_norm.checks import check_backward, check_forward, names
from quackish.ops.rms_norm.problems import (
    ITEMSIZE,
    MAX_M,
    BackwardArgs,
    ForwardArgs,
    RmsNormBwdProblem,
    RmsNormFwdProblem,
)

_MAX_PLANS = 4096  # the cache is cleared when full: with packed sequences, shapes may be new in every step
_plans: dict[tuple, "NormPlan"] = {}
# `_make` checks the number of fields; calling the class takes three times as long
_forward_args, _backward_args = ForwardArgs._make, BackwardArgs._make
_GRADIENTS = ("dx", "dresidual", "dweight", "dbias")  # of BackwardPlan


def plan_for(kind: "type[NormPlan]", tensors: tuple, options: tuple) -> "NormPlan | None":
    """Checks the arguments. Returns their plan of class `kind`; None if a tensor subclass needs an operator."""
    try:
        key = [choose.epoch, kind, *options, *map(type, options)]  # types, as 1, 1.0 and True are equal
        for t in tensors:
            if t is None:
                key.append(None)
            else:
                key += t.shape, t.is_contiguous() or t.stride(), t.dtype, t.device, type(t)
        key = tuple(key)
        plan = _plans.get(key)
        if plan is not None:
            return plan
    except (AttributeError, TypeError):  # not a tensor, or not hashable, as symbolic shapes
        key = None
    kind.check(*tensors, *options)
    if key is None or not are_plain(tensors):
        return None
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
    return _plans.setdefault(key, kind(*tensors, *options))  # of threads that race, the first one's


# Plans --------------------------------------------------------------------------------------------------------------


class NormPlan:
    """For a problem on m rows: `kernel` for pointers aligned to 16 bytes, else `unaligned`; None: portable."""

    check: Callable[..., None]
    run: Callable[..., tuple[Any, ...]]

    def __init__(self, problem: Any, x: Tensor, m: int, backend: str, rstd_dtype=torch.float32):
        # the shape and strides of outputs with x's shape
        self.shape, self.strides = tuple(x.shape), torch.empty(x.shape, device="meta").stride()
        self.m, self.backend, self.problem, self.device = m, backend, problem, device_of(x.device)
        if isinstance(self.device, KernelDevice):
            self.device_index, self.current_device = self.device.index, self.device.current
            self.make_current = self.device.make_current
            self.empty, self.stream, self.take_workspace = self.device.empty, self.device.stream, self.device.workspace
        self._call = (m, x.device, self.device, backend, rstd_dtype)
        self.kernel = find_kernel(problem, *self._call)
        self.steps = reference if backend == "reference" else portable  # without a kernel

    @functools.cached_property
    def unaligned(self) -> "PlannedLaunch | None":
        if not self.problem.aligned:
            return self.kernel
        return find_kernel(dataclasses.replace(self.problem, aligned=False), *self._call)


class ForwardPlan(NormPlan):
    check = staticmethod(check_forward)

    def __init__(self, x, weight, bias, residual, dweight_out, eps, weight_offset, residual_dtype, out_dtype, backend):
        res_dtype = None if residual is None else residual_dtype or residual.dtype
        # types and dtypes of the tensors saved for backward: res (x without a residual) and weight
        self.res_type, self.res_dtype = (type(x), x.dtype) if residual is None else (Tensor, res_dtype)
        self.weight_type, self.weight_dtype = type(weight), cuda.dtype_of(weight)
        self.x_dtype, self.bias_dtype, self.residual_dtype = x.dtype, cuda.dtype_of(bias), cuda.dtype_of(residual)
        self.eps, self.weight_offset = float(resolve_eps(x, eps)), float(weight_offset)
        self.out_dtype = out_dtype or x.dtype
        self.backward: dict[tuple, BackwardPlan] = {}  # a faster lookup for autograd than `plan_for`

        self.copies = not are_readable_in_place((x, residual), (weight, bias))
        rows, aligned = layout_of_rows((x, residual), (self.out_dtype, res_dtype))
        problem = RmsNormFwdProblem(
            n=x.shape[-1],
            x_dtype=cuda.dtype_name(x),
            y_dtype=names([self.out_dtype]),
            weight_dtype=cuda.dtype_name(weight),
            bias_dtype=cuda.dtype_name(bias),
            residual_dtype=cuda.dtype_name(residual),
            packed=rows[0] is None,
            aligned=aligned,
            heads=num_heads(weight),
            res_dtype=None if res_dtype == self.residual_dtype else names([res_dtype]),
        )
        super().__init__(problem, x, x.numel() // problem.n, backend)
        self.rstd_shape, self.rstd_strides = self.shape[:-1], tuple(s // problem.n for s in self.strides[:-1])
        self.arguments = (*rows, self.eps, self.weight_offset, self.m)

    def run(self, x, weight, bias, residual) -> tuple[Tensor, Tensor | None, Tensor]:
        """(y, res, rstd); res is None without a residual."""
        kernel = self.kernel
        if kernel is None:
            return self.run_portable(x, weight, bias, residual)
        if self.current_device() != self.device_index:  # allocations and the launch use the current device
            with self.make_current():
                return self.run(x, weight, bias, residual)
        if self.copies:
            x, residual, weight, bias = copy_unreadable((x, residual), (weight, bias))
        x_ptr = pointers = x.data_ptr()
        weight_ptr = bias_ptr = residual_ptr = res = res_ptr = None
        if weight is not None:
            weight_ptr = weight.data_ptr()
            pointers |= weight_ptr
        if bias is not None:
            bias_ptr = bias.data_ptr()
            pointers |= bias_ptr
        if residual is not None:
            residual_ptr = residual.data_ptr()
            pointers |= residual_ptr
        if 0 in (x_ptr, weight_ptr, bias_ptr, residual_ptr):
            check_memory("rms_norm", x=x, weight=weight, bias=bias, residual=residual)
        if pointers & 15:
            kernel = self.unaligned
            if kernel is None:
                return self.run_portable(x, weight, bias, residual)
        launch, num_ctas, _ = kernel
        empty = self.empty
        y = empty(self.shape, self.strides, self.out_dtype)
        if residual is not None:
            res = empty(self.shape, self.strides, self.res_dtype)
            res_ptr = res.data_ptr()
        rstd = empty(self.rstd_shape, self.rstd_strides, torch.float32)
        x_rows, residual_rows, eps, weight_offset, m = self.arguments
        launch(
            _forward_args((
                x_ptr, weight_ptr, bias_ptr, residual_ptr, y.data_ptr(), res_ptr, rstd.data_ptr(), x_rows,
                residual_rows, eps, weight_offset, m, num_ctas,
            )),
            self.stream(),
        )  # fmt: skip
        return y, res, rstd

    def run_portable(self, x, weight, bias, residual) -> tuple[Tensor, Tensor | None, Tensor]:
        options = self.eps, self.weight_offset, self.res_dtype, self.out_dtype
        y, res, rstd = self.steps.rms_norm_fwd(x, weight, bias, residual, *options)
        return y.contiguous(), None if res is None else res.contiguous(), rstd


class BackwardPlan(NormPlan):
    check = staticmethod(check_backward)
    parameter: tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides of dweight and dbias

    def __init__(
        self, dy, x, weight, rstd, dres, dweight_out,
        weight_offset, dx_dtype, dresidual_dtype, dweight_dtype, dbias_dtype, backend,
    ):  # fmt: skip
        self.kernel_adds = dweight_out is not None and dweight_out.is_contiguous()  # else add_to does
        if self.kernel_adds:
            dweight_dtype = dweight_out.dtype
        self.n, self.weight_offset = x.shape[-1], float(weight_offset)
        self.dtypes = (dx_dtype, dresidual_dtype, dweight_dtype, dbias_dtype)
        m = x.numel() // self.n if any(self.dtypes) else 0  # 0: no gradient to compute, so nothing to launch
        if dx_dtype is None:
            dres = None
        self.has_dres = dres is not None
        self.copies = not are_readable_in_place((dy, x, dres), (weight,))
        parameter = (self.n,) if weight is None else tuple(weight.shape)
        self.parameter = parameter, (self.n, 1)[-len(parameter) :]
        rows, aligned = layout_of_rows((x, dy, dres), (dx_dtype, dresidual_dtype))
        problem = RmsNormBwdProblem(
            n=self.n,
            x_dtype=cuda.dtype_name(x),
            dy_dtype=cuda.dtype_name(dy),
            weight_dtype=cuda.dtype_name(weight),
            dres_dtype=cuda.dtype_name(dres),
            **{f"{name}_dtype": names([d]) for name, d in zip(_GRADIENTS, self.dtypes, strict=True) if d is not None},
            packed=rows[0] is None,
            aligned=aligned,
            heads=num_heads(weight),
            add_dweight=self.kernel_adds,
        )
        super().__init__(problem, x, m, backend, rstd.dtype)
        self.arguments = (*rows, self.weight_offset, m)

    def run(self, dy, x, weight, rstd, dres, dweight_out=None) -> tuple[Tensor | None, ...]:
        """(dx, dresidual, dweight, dbias), None if no dtype was given. With dweight_out, dweight is None too."""
        kernel = self.kernel
        if kernel is None:
            return self.run_portable(dy, x, weight, rstd, dres, dweight_out)
        if self.current_device() != self.device_index:
            with self.make_current():
                return self.run(dy, x, weight, rstd, dres, dweight_out)
        if self.copies:
            dy, x, dres, weight = copy_unreadable((dy, x, dres), (weight,))
        x_ptr, dy_ptr = x.data_ptr(), dy.data_ptr()
        pointers = x_ptr | dy_ptr
        weight_ptr = dres_ptr = dweight_ptr = None
        if weight is not None:
            weight_ptr = weight.data_ptr()
            pointers |= weight_ptr
        if self.has_dres:
            dres_ptr = dres.data_ptr()
            pointers |= dres_ptr
        if self.kernel_adds:
            dweight_ptr = dweight_out.data_ptr()
            pointers |= dweight_ptr
        if 0 in (x_ptr, dy_ptr, weight_ptr, dres_ptr, dweight_ptr):
            check_memory("rms_norm_backward", x=x, dy=dy, weight=weight, dres=dres, dweight_out=dweight_out)
        if pointers & 15:
            kernel = self.unaligned
            if kernel is None:
                return self.run_portable(dy, x, weight, rstd, dres, dweight_out)

        launch, num_ctas, scratch_floats = kernel

        # outputs
        empty = self.empty
        dx = dx_ptr = dresidual = dresidual_ptr = dweight = dbias = dbias_ptr = None
        dx_dtype, dresidual_dtype, dweight_dtype, dbias_dtype = self.dtypes
        if dx_dtype is not None:
            dx = empty(self.shape, self.strides, dx_dtype)
            dx_ptr = dx.data_ptr()
        if dresidual_dtype is not None:
            dresidual = empty(self.shape, self.strides, dresidual_dtype)
            dresidual_ptr = dresidual.data_ptr()
        if dweight_dtype is not None and not self.kernel_adds:
            dweight = empty(*self.parameter, dweight_dtype)
            dweight_ptr = dweight.data_ptr()
        if dbias_dtype is not None:
            dbias = empty(*self.parameter, dbias_dtype)
            dbias_ptr = dbias.data_ptr()

        # workspace of the sums over CTAs
        stream = self.stream()
        scratch_ptr = tickets_ptr = workspace_owner = None
        if scratch_floats:
            tickets_ptr, scratch_ptr, workspace_owner = self.take_workspace(stream, scratch_floats)
        x_rows, dy_rows, dres_rows, weight_offset, m = self.arguments
        launch(
            _backward_args((
                x_ptr, weight_ptr, dy_ptr, dres_ptr, rstd.data_ptr(), dx_ptr, dresidual_ptr, dweight_ptr, dbias_ptr,
                scratch_ptr, tickets_ptr, x_rows, dy_rows, dres_rows, weight_offset, m, num_ctas,
            )),
            stream,
        )  # fmt: skip
        del workspace_owner  # alive until the launch
        if self.kernel_adds:
            torch.autograd.graph.increment_version(dweight_out)
        elif dweight_out is not None:
            dweight = add_to(dweight_out, dweight)
        return dx, dresidual, dweight, dbias

    def run_portable(self, dy, x, weight, rstd, dres, dweight_out=None) -> tuple[Tensor | None, ...]:
        dtypes = list(self.dtypes)
        if self.kernel_adds:
            dtypes[2] = rstd.dtype
        grads = self.steps.rms_norm_bwd(dy, x, weight, rstd, dres, self.weight_offset, *dtypes)
        dx, dresidual, dweight, dbias = (None if grad is None else grad.contiguous() for grad in grads)
        return dx, dresidual, add_to(dweight_out, dweight), dbias


def add_to(dweight_out: Tensor | None, dweight: Tensor | None) -> Tensor | None:
    """Adds dweight to the buffer and returns None; without a buffer, returns dweight."""
    if dweight_out is None or dweight is None:
        return dweight
    if are_plain((dweight_out,)):
        check_memory("rms_norm_backward", dweight_out=dweight_out)
    with torch.no_grad():
        dweight_out.add_(dweight)
    return None


class PlannedLaunch(NamedTuple):
    """A compiled kernel, and its launch parameters for a number of rows."""

    launch: Callable[..., None]
    num_ctas: int
    scratch_floats: int


def find_kernel(
    problem: Any, m: int, where: torch.device, device: KernelDevice | str, backend: str,
    rstd_dtype: torch.dtype = torch.float32,
) -> PlannedLaunch | None:  # fmt: skip
    """The kernel for `problem` on m rows; None for the portable path, with one warning per reason on a GPU.

    where: the device of the tensors; `device` is its `device_of`.

    With backend "cute", raises UnsupportedError instead of returning None.
    """
    if backend == "reference" or m == 0:  # without rows, the reference returns empty or zero results
        return None
    try:
        if isinstance(device, str):
            raise UnsupportedError(device)
        check_problem(problem, m)
        if rstd_dtype != torch.float32:  # fp64 if an input of forward was fp64
            raise _no_kernel(f"rstd in {names([rstd_dtype])}; supported: float32")
        launch, config = device.kernel_for(problem, device.gpu)
    except UnsupportedError as error:
        why = str(error)
        if not why.startswith("rms_norm"):  # from the device or the compiler
            why = f'rms_norm: {why} backend="auto" runs the portable path.'
        report_portable(why, where, backend)
        return None
    num_ctas = config.num_ctas(m, device.gpu.sm_count, problem.heads)
    return PlannedLaunch(launch, num_ctas, config.scratch_floats(problem, num_ctas) if problem.num_sums else 0)


def check_problem(problem: Any, m: int) -> None:
    """Raises UnsupportedError for a problem that no kernel covers on any GPU."""
    for field, dtype in vars(problem).items():
        if field.endswith("_dtype") and dtype is not None and dtype not in ITEMSIZE:
            raise _no_kernel(f"{field.removesuffix('_dtype')} in {dtype}; supported: {', '.join(ITEMSIZE)}")
    if m > MAX_M:
        raise _no_kernel(f"{m} rows of {problem.n}; at most {MAX_M} rows")


def _no_kernel(reason: str) -> UnsupportedError:
    return UnsupportedError(f'rms_norm: no kernel for {reason}. backend="auto" runs the portable path.')


# Layouts of rows ------------------------------------------------------------------------------------------------------


def fold_rows(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, int, int] | None:
    """(m1, s0, s1): row r of the tensor starts at element (r // m1) * s0 + (r % m1) * s1. None: must be copied.

    Rows are the last dimension, which needs stride 1. The other dimensions must fold into at most two strides.
    """
    if stride[-1] != 1:
        return None
    levels: list[tuple[int, int]] = []  # (size, stride), outermost first
    for size, step in zip(shape[:-1], stride[:-1], strict=True):
        if size == 1:
            continue
        if levels and levels[-1][1] == size * step:
            levels[-1] = (levels[-1][0] * size, step)
        else:
            levels.append((size, step))
    if len(levels) > 2:
        return None
    if len(levels) == 2:
        return levels[1][0], levels[0][1], levels[1][1]
    return 1, (levels[0][1] if levels else shape[-1]), 0


def layout_of_rows(inputs: Sequence[Tensor | None], outputs: Sequence[torch.dtype | None]) -> tuple[list, bool]:
    """(`fold_rows` of each input, all None if all inputs are packed; whether rows are aligned).

    Aligned means that rows of inputs and (packed) outputs start and end on 16-byte boundaries if the pointers do.
    """
    n = inputs[0].shape[-1]
    packed = (1, n, 0)
    rows = [None if t is None else fold_rows(t.shape, t.stride()) or packed for t in inputs]
    steps = [step * t.itemsize for t, row in zip(inputs, rows, strict=True) if row for step in (n, *row[1:])]
    steps += [n * dtype.itemsize for dtype in outputs if dtype is not None]
    if all(row in (None, packed) for row in rows):
        rows = [None] * len(rows)
    return rows, all(step % 16 == 0 for step in steps)


def are_readable_in_place(rows: Sequence[Tensor | None], parameters: Sequence[Tensor | None]) -> bool:
    """True if a kernel can read all of them in place."""
    return all(t is None or fold_rows(t.shape, t.stride()) for t in rows) and all(
        t is None or t.is_contiguous() for t in parameters
    )


def copy_unreadable(rows: Sequence[Tensor | None], parameters: Sequence[Tensor | None]) -> list[Tensor | None]:
    """All tensors; those that a kernel cannot read in place are copied."""
    return [t if are_readable_in_place((t,), ()) else t.contiguous() for t in rows] + [
        t if t is None else t.contiguous() for t in parameters
    ]


def num_heads(weight: Tensor | None) -> int:
    return 1 if weight is None or weight.dim() == 1 else weight.shape[0]


def resolve_eps(x: Tensor, eps: float | None) -> float:
    """eps, or F.rms_norm's default: the machine epsilon of the dtype that it computes in."""
    return eps if eps is not None else torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
