"""Launches of the kernels that operations share, on the current stream of their device."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quackish.device import choose, cuda
from quackish.device.arguments import by_name
from quackish.device.cuda import address
from quackish.device.kernel_device import KernelDevice
from quackish.device.kernel_for import CompiledKernel
from quackish.kernels.gemm.problem import NUM_TICKETS, EpilogueSpec, GemmArgs, ScaledArgs, Store, TailArgs
from quackish.once import once
from quackish.ops.shared.problems import ScaleArgs, ScaleProblem, StoreGemmProblem, is_dw_cooperative

_store, _scale_args = functools.cache(Store), by_name(ScaleArgs)


class SharedLaunches:
    """Matrices have unit stride along columns and row strides that are multiples of 8, and start on 16 bytes.

    num_live: (1,) int32. Only the rows before it count, of which the matrices' first row is `start`.
    """

    def __init__(self, device: KernelDevice):
        self.device, self.gpu, self.stream = device, device.gpu, device.stream
        self._kernel = functools.lru_cache(maxsize=1024)(self._find_kernel)
        self._scale = functools.lru_cache(maxsize=1024)(self._find_scale)

    def logits(self, x: Tensor, w: Tensor, out: Tensor, num_live: Tensor | None = None, start: int = 0) -> None:
        """out (rows, n) = x @ w.T of x (rows, h), w (n, h)."""
        (rows, h), live = x.shape, None if num_live is None else "m"
        problem = _problem(_store(), x.dtype, out.dtype, live=live)
        self._multiply(problem, x, w, out, (rows, w.shape[0], h), num_live, start)

    def dx(
        self, e: Tensor, w: Tensor, out: Tensor, num_live: Tensor | None = None, start: int = 0,
        factor: Tensor | None = None,
    ) -> None:  # fmt: skip
        """out (rows, h) = factor * e @ w of e (rows, n), w (n, h). factor: (1,) fp32."""
        (rows, n), live = e.shape, None if num_live is None else "m"
        problem = _problem(_store(scaled=factor is not None), e.dtype, out.dtype, b_major="n", live=live)
        self._multiply(problem, e, w, out, (rows, w.shape[1], n), num_live, start, factor)

    def dw(
        self, e: Tensor, x: Tensor, out: Tensor, num_live: Tensor | None = None, start: int = 0,
        factor: Tensor | None = None, accumulate: bool = False,
    ) -> None:  # fmt: skip
        """out (n, h) = (+= with `accumulate`) factor * e.T @ x of e (rows, n), x (rows, h), 0 in rows that don't count.

        The tiles of a partly filled last wave are split along the rows, in scratch of at most 69 MB.
        """
        (rows, n), h, live = e.shape, x.shape[1], None if num_live is None else "k"
        epilogue = _store(scaled=factor is not None, accumulate=accumulate)
        tail = is_dw_cooperative(n, h, self.gpu)
        problem = _problem(epilogue, e.dtype, out.dtype, a_major="m", b_major="n", live=live, split_k_tail=tail)
        self._multiply(problem, e, x, out, (n, h, rows), num_live, start, factor)

    def scale(self, out: Tensor, factor: Tensor, out2: Tensor | None = None) -> None:
        """out *= factor, out2 *= factor in place; equal dtypes, one fp32 factor. The kernel returns at once for 1."""
        n, n2 = out.numel(), 0 if out2 is None else out2.numel()
        if n + n2 == 0:
            return
        launch, num_ctas = self._scale(choose.epoch, out.dtype, max(n, n2))
        args = _scale_args(
            out=out.data_ptr(), out2=(out if out2 is None else out2).data_ptr(), factor=factor.data_ptr(), n=n, n2=n2,
            num_ctas=num_ctas,
        )  # fmt: skip
        launch(args, self.stream())

    def _multiply(
        self, problem: StoreGemmProblem, a: Tensor, b: Tensor, d: Tensor, sizes: tuple[int, int, int],
        num_live: Tensor | None, start: int, factor: Tensor | None = None,
    ) -> None:  # fmt: skip
        """sizes: m, n, k of GemmArgs."""
        kernel, stream, tail = self._kernel(choose.epoch, problem), self.stream(), None
        clusters = kernel.config.max_clusters(self.gpu.sm_count)
        m, n, k = sizes
        num_tickets = NUM_TICKETS if problem.split_k_tail else 1
        tickets, _, held = self.device.workspace(stream, 0, num_tickets)
        if problem.split_k_tail:
            splits, floats = kernel.config.tail_room(m, n, k, clusters)
            partials = self.device.vector(floats, torch.float32)
            tail = by_name(TailArgs)(partials=partials.data_ptr(), tickets=tickets, max_splits=splits)
        args = by_name(GemmArgs)(
            a=a.data_ptr(), second=None, b=b.data_ptr(), d=d.data_ptr(),
            epilogue=None if factor is None else by_name(ScaledArgs)(factor=factor.data_ptr()), tail=tail,
            ticket=tickets + 4 * (num_tickets - 1), num_live=address(num_live), m=m, n=n, k=k, split=0,
            start=None if num_live is None else start, a_stride=_row_stride(a), second_stride=0,
            b_stride=_row_stride(b), d_stride=_row_stride(d), max_clusters=clusters,
        )  # fmt: skip
        kernel.launch(args, stream)
        del held

    def _find_kernel(self, epoch: int, problem: Any) -> CompiledKernel:
        return self.device.kernel_for(problem, self.gpu)

    def _find_scale(self, epoch: int, dtype: torch.dtype, n: int) -> tuple[Callable[..., None], int]:
        """(launch, number of CTAs) of the kernel for n elements."""
        launch, config = self._kernel(epoch, ScaleProblem(cuda.name_of(dtype)))
        return launch, config.num_ctas(n * dtype.itemsize, self.gpu.sm_count)


def launches_of(device: KernelDevice) -> SharedLaunches:
    """The launches that the calls on a device share."""
    return once(device.cache, "shared", SharedLaunches, device)


def _row_stride(t: Tensor) -> int:
    return t.stride(0) if t.shape[0] > 1 else t.shape[1]  # a single row may have any stride


@functools.lru_cache(maxsize=1024)
def _problem(epilogue: EpilogueSpec, dtype: torch.dtype, out_dtype: torch.dtype, **fields: Any) -> StoreGemmProblem:
    return StoreGemmProblem(epilogue, cuda.name_of(dtype), cuda.name_of(out_dtype), **fields)
