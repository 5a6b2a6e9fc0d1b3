"""The steps of `reference.py` with kernels, one launch per step: bf16 and fp16.

Kernels read operands in place if one dimension is contiguous, the groups' matrices are adjacent, and all rows start on
16 bytes. Other operands are copied.
"""

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from quackish.device import choose, cuda
from quackish.device.arguments import by_name
from quackish.device.cuda import address
from quackish.device.kernel_device import KernelDevice
from quackish.kernels.gemm.grouped_problem import (
    MAX_GROUPS,
    MAX_ROWS,
    GroupedEpilogueSpec,
    GroupedGemmArgs,
    max_groups_for,
)
from quackish.once import once
from quackish.ops.mlp import reference
from quackish.ops.mlp.gemm_problems import (
    DSCALES_COLUMNS,
    Down,
    DownArgs,
    DownBackward,
    DownBackwardArgs,
    MlpGemmProblem,
    Store,
    Up,
    UpArgs,
    cluster_tile_for,
)
from quackish.ops.mlp.problems import TokenRowsArgs, TokenRowsProblem
from quackish.ops.mlp.reference import GATED, Needs
from quackish.ops.shared.launches import launches_of

# The same object every time: making one takes longer than looking it up.
_up, _down, _down_backward, _store = map(functools.cache, (Up, Down, DownBackward, Store))
_gemm_args = by_name(GroupedGemmArgs)


def why_unsupported(who: str, x: Tensor, columns: int = 0, groups: int = 0) -> str:
    """Why kernels do not cover these sizes and x's dtype; "" if they do."""
    rows, width = x.shape
    if x.dtype not in (torch.bfloat16, torch.float16):
        why = f"{x.dtype}; supported: torch.bfloat16, torch.float16"
    elif width % 8 or columns % 8:
        why = f"matrices with {width} and {columns} columns; expected multiples of 8"
    elif groups > MAX_GROUPS:
        why = f"{groups} groups; expected at most {MAX_GROUPS}"
    elif rows >= MAX_ROWS:
        why = f"{rows} rows; expected fewer than 2**30"
    else:
        return ""
    return f'{who}: no kernel for {why}. backend="auto" runs the portable path.'


class KernelSteps:
    """The steps on one device, with the names and arguments of the functions in `reference.py`."""

    def __init__(self, device: KernelDevice):
        self.device, self.stream, self.empty, self.matrix = device, device.stream, device.empty, device.matrix
        self._kernel = functools.lru_cache(maxsize=1024)(self._find_kernel)
        self._token_rows_kernel = functools.cache(self._find_token_rows)
        self._dw = launches_of(device).dw

    def up(self, x, w1, w3, b1, scales, offs, activation, keep_preactivation):
        rows, h = x.shape
        gated = activation in GATED
        i = w1.shape[-2] // 2 if gated and w3 is None else w1.shape[-2]
        act = self.matrix(rows, i, x.dtype)
        preactivation = self.matrix(rows, 2 * i if gated else i, x.dtype) if keep_preactivation else None
        bias, scales = _fp32(b1), _fp32(scales)
        args = UpArgs(address(preactivation), address(bias), address(scales))
        epilogue = _up(activation, scaled=scales is not None, biased=b1 is not None, keeps=keep_preactivation)
        w1, w3 = w1.contiguous(), None if w3 is None else w3.contiguous()  # Up has no kernel for b_major "n"
        self._rows(epilogue, x, w1, w3, act, offs, args, i, h)
        return preactivation, act

    def down(self, act, w2, b2, offs, residual=None):
        *_, n, k = w2.shape
        y, bias = self.matrix(act.shape[0], n, act.dtype), _fp32(b2)
        residual = None if residual is None else _aligned(residual)
        epilogue = _down(biased=b2 is not None, residual=residual is not None)
        self._rows(epilogue, act, w2, None, y, offs, DownArgs(address(bias), address(residual)), n, k)
        return y

    def down_backward(self, dy, w2, preactivation, scales, offs, activation, needs: Needs, overwrite=False):
        if not (needs.dpreactivation or needs.dscales):  # w2's gradient needs only act, without a matrix product
            return reference.down_backward(dy, w2, preactivation, scales, offs, activation, needs)
        rows = dy.shape[0]
        *_, h, i = w2.shape
        z = _aligned(preactivation)
        dz = z if overwrite else self.matrix(*z.shape, z.dtype)  # a tile reads its part of z before it stores dz there
        act = self.matrix(rows, i, dy.dtype)
        parts, s = None, _fp32(scales)
        if s is not None:  # partial sums of each row
            parts = self.matrix(-(-i // DSCALES_COLUMNS), rows, torch.float32)
        args = DownBackwardArgs(z.data_ptr(), act.data_ptr(), address(s), address(parts))
        self._rows(
            _down_backward(activation, scaled=s is not None), dy, w2, None, dz, offs, args, i, h, transposed=True
        )
        return dz, act, parts.sum(0).to(scales.dtype) if needs.dscales else None

    def rows_gradient(self, dpreactivation, w1, w3, offs):
        *_, k, n = w1.shape
        dx = self.matrix(dpreactivation.shape[0], n, dpreactivation.dtype)
        self._rows(_down(), dpreactivation, w1, w3, dx, offs, DownArgs(), n, k, transposed=True)
        return dx

    def weight_gradient(self, a, b, offs, dtype, out=None):
        a, b = _aligned(a), _aligned(b)
        (rows, m), n = a.shape, b.shape[1]
        if out is None:
            d = self._weight(offs, m, n, dtype)
        elif out.dtype is torch.float32 and out.is_contiguous() and out.data_ptr() % 16 == 0:
            d = out
        else:
            d = self._weight(offs, m, n, torch.float32).copy_(out)
        if offs is None:  # a plain matrix product, with a split tail
            self._dw(a, b, d, accumulate=out is not None)
        else:
            ld = a.stride(0) if rows > 1 else m  # a single row may have any stride
            self._launch(_store(accumulate=out is not None), a, b, None, d, offs, None, rows, n, m=m, a_stride=ld)
        if out is None:
            return d
        if d is out:
            torch.autograd.graph.increment_version(out)
        else:
            out.copy_(d)
        return None

    def bias_gradient(self, a, offs, dtype):
        ones = a.new_ones((a.shape[0], 8))  # kernels need at least 8 columns
        return self.weight_gradient(a, ones, offs, torch.float32)[..., 0].contiguous().to(dtype)

    def copy_rows(self, x, rows):
        return self._token_rows("copy", x, rows, rows.numel())

    def sum_rows(self, x, rows):
        return self._token_rows("sum", x, rows, rows.shape[0])

    # Memory and launches

    def _weight(self, offs: Tensor | None, m: int, n: int, dtype: torch.dtype) -> Tensor:
        """A weight's gradient: (groups, m, n), or (m, n) without offs."""
        return self.matrix(m, n, dtype) if offs is None else self.empty((len(offs), m, n), (m * n, n, 1), dtype)

    def _rows(
        self, epilogue: GroupedEpilogueSpec, a: Tensor, w: Tensor, second: Tensor | None, d: Tensor,
        offs: Tensor | None, args: tuple, n: int, k: int, transposed: bool = False,
    ) -> None:  # fmt: skip
        """d = a @ w[g].T for a (R, k) and w (groups, n, k), or a @ w[g] for a `transposed` w (groups, k, n).

        Without offs, w has no dimension of groups. If w is in two tensors, `second` is its other half: along n for Up,
        along k for Down.
        """
        if not w.is_contiguous() and w.mT.is_contiguous():
            w, transposed = w.mT, not transposed
            second = None if second is None else second.mT
        a, w = _aligned(a), _aligned(w.contiguous())
        second = None if second is None else _aligned(second.contiguous())
        self._launch(epilogue, a, w, second, d, offs, args, a.shape[0], n, k=k, b_major="n" if transposed else "k")

    def _launch(
        self, epilogue: GroupedEpilogueSpec, a: Tensor, b: Tensor, second: Tensor | None, d: Tensor,
        offs: Tensor | None, args: tuple | None, rows: int, n: int, m: int | None = None, k: int | None = None,
        a_stride: int | None = None, b_major: str = "k",
    ) -> None:  # fmt: skip
        """From `rows` on, the arguments are fields of `GroupedGemmArgs`, and b_major one of the problem."""
        groups = None if offs is None else len(offs)
        few_rows = rows <= 128 * (groups or 1)
        launch, clusters = self._kernel(
            choose.epoch, epilogue, a.dtype, groups, d.dtype, b_major, second is not None, few_rows, n, m, k
        )
        arguments = _gemm_args(
            a=a.data_ptr(), b=b.data_ptr(), second=address(second), d=d.data_ptr(), offs=address(offs), epilogue=args,
            a_stride=a_stride, rows=rows, m=m, n=n, k=k, groups=groups or 1, max_clusters=clusters,
        )  # fmt: skip
        launch(arguments, self.stream())

    def _find_kernel(
        self, epoch: int, epilogue: GroupedEpilogueSpec, dtype: torch.dtype, groups: int | None, out_dtype: torch.dtype,
        b_major: str, b_in_two: bool, few_rows: bool, n: int, m: int | None, k: int | None,
    ) -> tuple[Callable, int]:  # fmt: skip
        """(launch, the number of clusters)"""
        names, gpu = (cuda.name_of(dtype), cuda.name_of(out_dtype)), self.device.gpu
        problem = MlpGemmProblem(epilogue, names[0], max_groups_for(groups), names[1], b_major, b_in_two)
        columns = 2 * n if epilogue.has_pairs else n
        tile = cluster_tile_for(problem, gpu, m, columns, k and k * problem.k_parts, few_rows)
        problem = dataclasses.replace(problem, cluster_tile=tile)
        kernel = self.device.kernel_for(problem, gpu)
        return kernel.launch, kernel.config.max_clusters(gpu.sm_count)

    def _token_rows(self, op: str, x: Tensor, rows: Tensor, num_out: int) -> Tensor:
        x, rows = _aligned(x.contiguous()), rows.contiguous()  # a hook on saved tensors may return other strides
        (tokens, k), out = rows.shape, self.matrix(num_out, x.shape[1], x.dtype)
        launch = self._token_rows_kernel(op, x.shape[1], x.dtype)
        args = by_name(TokenRowsArgs)(x=x.data_ptr(), rows=rows.data_ptr(), out=out.data_ptr(), tokens=tokens, k=k)
        launch(args, self.stream())
        return out

    def _find_token_rows(self, op: str, n: int, dtype: torch.dtype) -> Callable:
        return self.device.kernel_for(TokenRowsProblem(op, n, cuda.name_of(dtype)), self.device.gpu).launch


def steps_of(device: KernelDevice) -> KernelSteps:
    """The steps that the calls on a device share."""
    return once(device.cache, "grouped_mlp", KernelSteps, device)


# Operands -------------------------------------------------------------------------------------------------------------


def _fp32(t: Tensor | None) -> Tensor | None:
    return None if t is None else _aligned(t.float().contiguous())


def _aligned(t: Tensor) -> Tensor:
    """t, or a copy if its rows do not start on 16 bytes. (Numbers of columns are multiples of 8.)"""
    if t.data_ptr() % 16 == 0 and (t.is_contiguous() or all(step == 1 or step % 8 == 0 for step in t.stride())):
        return t
    return t.clone(memory_format=torch.preserve_format)
