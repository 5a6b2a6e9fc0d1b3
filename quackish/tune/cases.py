"""A kernel's launch on random data, by any config: what is timed, and whose results are compared."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from quackish.configs.choose import config
from quackish.configs.gemm import NUM_TICKETS, SOFTMAX_TILE_N, GemmProblem
from quackish.configs.lce_rows import NO_SLOT, ROW_TILE
from quackish.configs.rms_norm import RmsNormBwdProblem, RmsNormFwdProblem
from quackish.configs.rules import name_of
from quackish.ops.kernel_for import Kernel
from quackish.ops.linear_cross_entropy.launches import LceKernels, LogitsArgs
from quackish.ops.rms_norm_plans import BackwardPlan, ForwardPlan

Run = Callable[[], tuple[Tensor | None, ...]]  # launches once; returns the results
Build = Callable[[Any], Run]  # of a config; it compiles, or loads, and launches once


def prepare(kernel: str, problem: Any, sizes: Mapping[str, int], device: torch.device) -> Build:
    """Data for `problem` at `sizes`, as quackish.work has them, on `device`; what is built shares it."""
    make = {"rms_norm_fwd": _forward, "rms_norm_bwd": _backward, "lce_gemm": _gemm}[kernel](problem, sizes, device)
    name = name_of(kernel, problem)

    def build(chosen: Any) -> Run:
        with config(**{name: chosen}):
            run = make()
            run()
        return run

    return build


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _normal(device: torch.device, dtype: str | None, *shape: int) -> Tensor | None:
    return None if dtype is None else torch.randn(shape, dtype=_dtype(dtype), device=device)


# RMSNorm: a plan keeps the kernel that it found ----------------------------------------------------------------------


def _forward(p: RmsNormFwdProblem, sizes: Mapping[str, int], device: torch.device) -> Callable[[], Run]:
    shape = sizes["m"], p.n
    x, residual = _normal(device, p.x_dtype, *shape), _normal(device, p.residual_dtype, *shape)
    weight, bias = _normal(device, p.weight_dtype, p.n), _normal(device, p.bias_dtype, p.n)

    def make() -> Run:
        plan = ForwardPlan(x, weight, bias, residual, 1e-6, 0.0, _dtype(p.y_dtype), "cute")
        assert plan.problem == p, (plan.problem, p)
        return lambda: plan.run(x, weight, bias, residual)

    return make


def _backward(p: RmsNormBwdProblem, sizes: Mapping[str, int], device: torch.device) -> Callable[[], Run]:
    shape = sizes["m"], p.n
    x, dy, dres = (_normal(device, dtype, *shape) for dtype in (p.x_dtype, p.dy_dtype, p.dres_dtype))
    weight, rstd = _normal(device, p.weight_dtype, p.n), x.float().square().mean(-1).rsqrt()
    asked = [_dtype(dtype) for dtype in (p.dx_dtype, p.dresidual_dtype, p.dweight_dtype, p.dbias_dtype)]

    def make() -> Run:
        plan = BackwardPlan(dy, x, weight, rstd, dres, 0.0, *asked, "cute")
        assert plan.problem == p, (plan.problem, p)
        return lambda: plan.run(dy, x, weight, rstd, dres)

    return make


# GEMMs ---------------------------------------------------------------------------------------------------------------


class _Gemms(LceKernels):
    """Keeps the kernel that its first launch found, whatever is chosen later; for one problem alone."""

    def __init__(self, device: torch.device, problem: GemmProblem):
        super().__init__(device)
        self.problem, self.found = problem, None

    def _add(self, key: tuple, name: str, problem: GemmProblem) -> Kernel:
        assert problem == self.problem, (problem, self.problem)
        if self.found is None:
            self.found = super()._add(key, name, problem)
        self._kernels[1][key] = self.found
        return self.found


def _gemm(p: GemmProblem, sizes: Mapping[str, int], device: torch.device) -> Callable[[], Run]:
    """All rows are live. Outputs start as zeros, and accumulate from run to run."""
    m, n, k = sizes["m"], sizes["n"], sizes["k"]
    if p.epilogue in ("softmax", "dlogits"):
        launch, outputs = (_logits if p.epilogue == "softmax" else _dlogits)(p, m, n, k, device)
    elif p.live == "k":
        e, xs = _exponentials(device, p.dtype, k, m), _normal(device, p.dtype, k, n)
        out, num_live = torch.zeros(m, n, dtype=_dtype(p.out_dtype), device=device), _count(device, k)
        outputs, tickets, slots, residual = (out,), _tickets(device, p), None, None
        factor = torch.full((1,), 0.5, device=device) if p.scaled else None
        if p.rounding_residual:  # of every 16th row
            slots = torch.arange(m, dtype=torch.int32, device=device)
            slots = torch.where(slots % 16 == 0, slots // 16, NO_SLOT)
            residual = torch.zeros(-(-m // 16), n, dtype=torch.int16, device=device)

        def launch(gemms):
            gemms.dw(e, xs, num_live, 0, out, p.accumulate, tickets, slots, residual, factor)
    else:
        launch, outputs = _dx(p, m, n, k, device)

    def make() -> Run:
        gemms = _Gemms(device, p)

        def run() -> tuple[Tensor | None, ...]:
            launch(gemms)
            return outputs

        return run

    return make


def _logits(p: GemmProblem, m: int, n: int, k: int, device: torch.device):
    x, w, bias, weight, softcap = _classifier(p, m, n, k, device)
    slot_target = torch.randint(n, (m,), dtype=torch.int32, device=device)
    row_shift = torch.zeros(m, device=device)
    split = max(n // 512 * 256, 256) if p.d_in_two else n
    e = None if p.out_dtype is None else _padded(device, p.out_dtype, m, split)
    e2 = _padded(device, p.out_dtype, m, n - split) if p.d_in_two else None
    tiles = -(-n // SOFTMAX_TILE_N)
    part_sum, target_logit = torch.empty(m, tiles, device=device), torch.empty(m, device=device)
    part_wsum = torch.empty(m, tiles, device=device) if p.smoothing else None
    row_max_bits = torch.zeros(m, dtype=torch.int32, device=device)  # row_shift, encoded
    flags = torch.zeros(1 + -(-m // ROW_TILE), dtype=torch.int32, device=device)
    num_live = _count(device, m)

    args = LogitsArgs(
        x, w, bias, weight, row_shift, slot_target, num_live, 0, softcap, e, e2, split, part_sum, part_wsum,
        target_logit, row_max_bits, flags,
    )  # fmt: skip

    def launch(gemms):
        gemms.logits(args)

    return launch, (e, e2, part_sum, part_wsum, target_logit)


def _dlogits(p: GemmProblem, m: int, n: int, k: int, device: torch.device):
    x, w, bias, weight, softcap = _classifier(p, m, n, k, device)
    slot_target = torch.randint(n, (m,), dtype=torch.int32, device=device)
    coefs = torch.rand(m, 4, device=device)
    e, num_live = _padded(device, p.out_dtype, m, n), _count(device, m)

    def launch(gemms):
        gemms.dlogits(x, w, bias, coefs, slot_target, num_live, 0, weight, softcap, p.smoothing, 0, e)

    return launch, (e,)


def _classifier(p: GemmProblem, m: int, n: int, k: int, device: torch.device):
    """x (m, k), w (n, k), bias, class weights, softcap: logits around 1."""
    x, w = _normal(device, p.dtype, m, k), _normal(device, p.dtype, n, k).mul_(k**-0.5)
    weight = torch.rand(n, device=device) if p.weighted else None
    return x, w, _normal(device, p.bias_dtype, n), weight, 30.0 if p.softcap else 0.0


def _dx(p: GemmProblem, m: int, n: int, k: int, device: torch.device):
    split = max(k // 512 * 256, 256) if p.a_in_two else k
    e = _exponentials(device, p.dtype, m, split)
    e2 = _exponentials(device, p.dtype, m, k - split) if p.a_in_two else None
    w, out = _normal(device, p.dtype, k, n), torch.zeros(m, n, dtype=_dtype(p.out_dtype), device=device)
    scale = torch.rand(m, device=device) / k if p.epilogue == "rows" else None
    order = torch.randperm(m, device=device).int() if p.epilogue == "rows" else None
    tickets, num_live = _tickets(device, p), _count(device, m)

    def launch(gemms):
        gemms.dx(e, e2, split if p.a_in_two else 0, w, scale, order, num_live, 0, out, p.accumulate, tickets)

    return launch, (out,)


def _exponentials(device: torch.device, dtype: str, rows: int, columns: int) -> Tensor:
    return _padded(device, dtype, rows, columns).uniform_()


def _padded(device: torch.device, dtype: str, rows: int, columns: int) -> Tensor:
    """Rows start on 128 bytes, as those of exp_logits do."""
    return torch.zeros(rows, -(-columns // 64) * 64, dtype=_dtype(dtype), device=device)[:, :columns]


def _tickets(device: torch.device, p: GemmProblem) -> Tensor | None:
    return torch.zeros(NUM_TICKETS, dtype=torch.int32, device=device) if p.split_k_tail else None


def _count(device: torch.device, rows: int) -> Tensor:
    return torch.tensor([rows], dtype=torch.int32, device=device)
