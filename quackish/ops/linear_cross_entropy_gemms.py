"""Launches of linear cross entropy's GEMMs: the first half of `LceKernels`."""

from collections.abc import Callable

import torch
from torch import Tensor

from quackish import kernels, launch
from quackish.configs import choose
from quackish.configs.gemm import SOFTMAX_TILE_N, GemmConfig, GemmProblem, splits_dw_tail
from quackish.gpu import Gpu, gpu_of
from quackish.ops import workspace
from quackish.ops.cuda import address, current_stream_of, dtype_name


class GemmLaunches:
    """Operands are bf16 or fp16 with unit stride along their columns, rows a multiple of 8 elements apart.

    All sums run over the live rows alone, chunk rows [0, num_live - start), which the device counts.
    """

    keeps_rest = True  # `dw` may keep what its rounding takes

    def __init__(self, device: torch.device, gpu: Gpu | None = None):
        self.device, self.gpu = device, gpu or gpu_of(device.index)
        self.stream = current_stream_of(device)
        # a kernel, how many clusters it runs in, and its config
        self._gemms: dict[tuple, tuple[Callable[..., None], int, GemmConfig]] = {}
        self._epoch = choose.epoch  # of the choices that these follow from

    def num_tiles(self, v: int) -> int:
        """How many partial sums a row of `part_sum` has."""
        return -(-v // SOFTMAX_TILE_N)

    def logits(
        self,
        xc: Tensor,  # (rows, h)
        w: Tensor,  # (v, h)
        bias: Tensor | None,  # (v,)
        class_weight: Tensor | None,  # (v,) fp32; with part_wsum
        ref: Tensor,  # (rows,) fp32
        cls: Tensor,  # (rows,) int32
        num_live: Tensor,  # (1,) int32
        start: int,
        softcap: float | None,
        e: Tensor | None,  # (rows, v_split) bf16, or (rows, v) without e2
        e2: Tensor | None,  # (rows, v - v_split)
        v_split: int,  # with e2; a multiple of 64
        part_sum: Tensor,  # (rows, num_tiles(v)) fp32
        part_wsum: Tensor | None,  # as part_sum; with label smoothing
        zt: Tensor,  # (rows,) fp32
        top: Tensor,  # (rows,) int32
        flags: Tensor,  # (1 + ceil(rows / 128),) int32
    ) -> None:
        """e = exp(a - ref) * d for the logits a, its row sums (without d) a tile, zt = a at the target.

        Where a logit is far above ref, top is raised and the tile flagged; `redo` is to follow.
        """
        self._softmax(
            False, xc, w, bias, class_weight, ref, cls, num_live, start, softcap, e, e2, v_split, part_sum, part_wsum,
            zt, top, flags,
        )  # fmt: skip

    def redo(self, *args) -> None:
        """As `logits`, with the same arguments: flagged tiles once more, with top for ref; without flags it leaves."""
        self._softmax(True, *args)

    def _softmax(
        self, redo, xc, w, bias, class_weight, ref, cls, num_live, start, softcap, e, e2, v_split, part_sum, part_wsum,
        zt, top, flags,
    ) -> None:  # fmt: skip
        (rows, h), n = xc.shape, w.shape[0]
        bias_dtype, weighted = None if bias is None else bias.dtype, class_weight is not None
        smoothing, split = part_wsum is not None, e2 is not None
        options = softcap is None, smoothing, weighted, split
        key = (choose.epoch, "softmax", redo, xc.dtype, e is None, bias_dtype, *options)
        kernel, clusters, _ = self._gemms.get(key) or self._compile(
            key,
            epilogue="softmax",
            dtype=dtype_name(xc),
            out_dtype=dtype_name(e),
            bias_dtype=dtype_name(bias),
            softcap=softcap is not None,
            smoothing=smoothing,
            weighted=weighted,
            redo=redo,
            split_n=split,
        )
        given = (
            address(bias),
            address(class_weight),
            None if redo else ref.data_ptr(),
            cls.data_ptr(),
            top.data_ptr(),
            flags.data_ptr(),
            part_sum.data_ptr(),
            zt.data_ptr(),
            address(part_wsum),
            1.0 if softcap is None else softcap,
            part_sum.shape[1],
        )
        strides = xc.stride(0), e2.stride(0) if split else 0, w.stride(0), 0 if e is None else e.stride(0)
        stream, ticket, _kept = (self.stream(), None, None) if redo else self.stream_and_ticket()
        kernel(
            xc.data_ptr(), address(e2), w.data_ptr(), address(e), given, None, ticket, num_live.data_ptr(),
            (rows, n, h, v_split if split else 0, start), strides, clusters, stream,
        )  # fmt: skip

    def dlogits(
        self,
        xc: Tensor,  # (rows, h)
        w: Tensor,  # (n, h): classes v0 and up
        bias: Tensor | None,  # (n,)
        coefs: Tensor,  # (rows, 4) fp32: ref, ca / sum, cb, cs
        cls: Tensor,  # (rows,) int32
        num_live: Tensor,  # (1,) int32
        start: int,
        class_weight: Tensor | None,  # (v,) fp32; used with smoothing
        softcap: float | None,
        smoothing: bool,
        v0: int,
        e: Tensor,  # (rows, n) as xc
    ) -> None:
        """e = (ca / sum * exp(a - ref) - cs * class weight - onehot(target) * cb) * d for the logits a."""
        (rows, h), n = xc.shape, w.shape[0]
        if not smoothing:
            class_weight = None
        bias_dtype, weighted = None if bias is None else bias.dtype, class_weight is not None
        key = (choose.epoch, "dlogits", xc.dtype, e.dtype, bias_dtype, softcap is None, smoothing, weighted)
        kernel, clusters, _ = self._gemms.get(key) or self._compile(
            key,
            epilogue="dlogits",
            dtype=dtype_name(xc),
            out_dtype=dtype_name(e),
            bias_dtype=dtype_name(bias),
            softcap=softcap is not None,
            smoothing=smoothing,
            weighted=weighted,
        )
        capped = 1.0 if softcap is None else softcap
        given = address(bias), address(class_weight), coefs.data_ptr(), cls.data_ptr(), capped, v0
        strides = xc.stride(0), 0, w.stride(0), e.stride(0)
        stream, ticket, _kept = self.stream_and_ticket()
        kernel(
            xc.data_ptr(), None, w.data_ptr(), e.data_ptr(), given, None, ticket, num_live.data_ptr(),
            (rows, n, h, 0, start), strides, clusters, stream,
        )  # fmt: skip

    def dx(
        self,
        e: Tensor,  # (rows, v_split), or (rows, n) without e2
        e2: Tensor | None,  # (rows, n - v_split)
        v_split: int,  # with e2; a multiple of the GEMM's step along k
        w: Tensor,  # (n, h)
        row_scale: Tensor | None,  # (rows,) fp32; with order
        order: Tensor | None,  # (m,) int32
        num_live: Tensor,  # (1,) int32
        start: int,
        out: Tensor,  # (m, h) with order, else (rows, h) fp32; contiguous
        accumulate: bool,  # without order
        tickets: Tensor | None = None,  # (NUM_TICKETS,) int32, 0 before and after; with order
    ) -> None:
        """Row i of e @ w, times row_scale, to row order[start + i] of out; without order to row i, or added to it.

        Without order, rows up to the end of a tile with live rows are written too. With tickets, tiles of a
        partly filled last wave are split along the classes, which takes 17 MB of scratch, or 69 MB for deep tiles.
        """
        (n, h), rows = w.shape, e.shape[0]
        scattered = order is not None
        key = (choose.epoch, "dx", e.dtype, out.dtype, scattered, e2 is None, accumulate, tickets is None)
        kernel, clusters, config = self._gemms.get(key) or self._compile(
            key,
            epilogue="rows" if scattered else "store",
            dtype=dtype_name(e),
            out_dtype=dtype_name(out),
            b_major="n",
            split_k=e2 is not None,
            accumulate=accumulate,
            split_k_tail=tickets is not None,
        )
        shared, _scratch = _shared(tickets, config, rows, h, n, clusters)
        given = (row_scale.data_ptr(), order.data_ptr()) if scattered else None
        sizes = rows, h, n, 0 if e2 is None else v_split, start
        strides = e.stride(0), 0 if e2 is None else e2.stride(0), w.stride(0), out.stride(0)
        stream, ticket, _kept = self.stream_and_ticket()
        kernel(
            e.data_ptr(), address(e2), w.data_ptr(), out.data_ptr(), given, shared, ticket, num_live.data_ptr(), sizes,
            strides, clusters, stream,
        )  # fmt: skip

    def dw(
        self,
        e: Tensor,  # (rows, n)
        xs: Tensor,  # (rows, h)
        num_live: Tensor,  # (1,) int32
        start: int,
        out: Tensor,  # (n, h) contiguous; fp32 to accumulate
        accumulate: bool,
        tickets: Tensor | None = None,  # as in `dx`, along the rows; used where there are few tiles
        places: Tensor | None = None,  # (n,) int32; NO_PLACE for none
        rest: Tensor | None = None,  # (any, h) int16; both or none, for a bf16 out that is not added to
        factor: Tensor | None = None,  # (1,) fp32; None is 1; not with rest
    ) -> None:
        """out = (or += with `accumulate`) factor * e.T @ xs.

        rest[places[i]]: the bits that rounding cut off row i, if it is listed.
        """
        (rows, h), n = xs.shape, e.shape[1]
        if tickets is not None and not splits_dw_tail(n, h, self.gpu.sm_count):
            tickets = None
        key = (choose.epoch, "dw", e.dtype, out.dtype, accumulate, tickets is None, rest is None, factor is None)
        kernel, clusters, config = self._gemms.get(key) or self._compile(
            key,
            epilogue="store",
            dtype=dtype_name(e),
            out_dtype=dtype_name(out),
            a_major="m",
            b_major="n",
            live="k",
            accumulate=accumulate,
            split_k_tail=tickets is not None,
            scaled=factor is not None,
            rest=rest is not None,
        )
        shared, _scratch = _shared(tickets, config, n, h, rows, clusters)
        given = None if factor is None else (factor.data_ptr(),)
        if rest is not None:
            given = places.data_ptr(), rest.data_ptr()
        sizes, strides = (n, h, rows, 0, start), (e.stride(0), 0, xs.stride(0), out.stride(0))
        stream, ticket, _kept = self.stream_and_ticket()
        kernel(
            e.data_ptr(), None, xs.data_ptr(), out.data_ptr(), given, shared, ticket, num_live.data_ptr(), sizes,
            strides, clusters, stream,
        )  # fmt: skip

    def stream_and_ticket(self) -> tuple[int, int, tuple | None]:
        """The current stream, where the clusters of a launch on it meet, and what must be kept until then."""
        stream = self.stream()
        if self.device.type != "cuda":
            return stream, 0, None
        ticket, _, kept = workspace.take(self.device.index, stream, 0)
        return stream, ticket, kept

    def _compile(self, key: tuple, **fields) -> tuple[Callable[..., None], int, GemmConfig]:
        problem = GemmProblem(**fields)
        if self._epoch != key[0]:
            self._gemms, self._epoch = {}, key[0]
        config = choose.choose("lce_gemm", problem, self.gpu).config
        kernel = launch.get(kernels.find("lce_gemm", self.gpu), problem, config, self.gpu.target)
        clusters = config.max_clusters(self.gpu.sm_count)
        made = self._gemms[key] = kernel, clusters, config
        return made


def _shared(
    tickets: Tensor | None, config: GemmConfig, m: int, n: int, k: int, clusters: int
) -> tuple[tuple[int, int, int] | None, Tensor | None]:
    """What clusters that share tiles are given, and what must be kept until the launch."""
    if tickets is None:
        return None, None
    splits, floats = config.tail_room(m, n, k, clusters)
    partials = tickets.new_empty(floats, dtype=torch.float32)
    return (partials.data_ptr(), tickets.data_ptr(), splits), partials
