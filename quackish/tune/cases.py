"""Launches a kernel on random data by any config, to time it and compare its results."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from quackish.configs.choose import config, name_of
from quackish.configs.gemm import NUM_TICKETS, SOFTMAX_TILE_N, GemmArgs, GemmProblem, TailArgs
from quackish.configs.grouped_gemm import DSCALES_COLUMNS, GroupedGemmArgs, GroupedGemmProblem
from quackish.configs.lce_rows import NO_SLOT, ROW_TILE
from quackish.configs.rms_norm import RmsNormBwdProblem, RmsNormFwdProblem
from quackish.ops.device import require_device
from quackish.ops.rms_norm_plans import BackwardPlan, ForwardPlan, Plan
from quackish.tune.attention_cases import attention
from quackish.work import ATTENTION_RESULTS

Run = Callable[[], tuple[Tensor | None, ...]]  # launches once and returns the results
Build = Callable[[Any], Run]  # (config) -> Run; compiles or loads the kernel, and launches once


def prepare(kernel: str, problem: Any, sizes: Mapping[str, int], device: torch.device) -> Build:
    """Makes data for `problem` at `sizes`, as named in quackish.work. All runs that are built share it."""
    make_run = CASES[kernel](problem, sizes, device)
    name = name_of(kernel, problem)

    def build(chosen: Any) -> Run:
        with config(**{name: chosen}):
            run = make_run()  # keeps the kernel of this config
            run()
        return run

    return build


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _normal(device: torch.device, dtype: str | None, *shape: int) -> Tensor | None:
    return None if dtype is None else torch.randn(shape, dtype=_dtype(dtype), device=device)


# RMSNorm -------------------------------------------------------------------------------------------------------------


def _forward(p: RmsNormFwdProblem, sizes: Mapping[str, int], device: torch.device) -> Callable[[], Run]:
    shape = sizes["m"], p.n
    x, residual = _normal(device, p.x_dtype, *shape), _normal(device, p.residual_dtype, *shape)
    weight, bias = (_normal(device, dtype, *_parameter(p)) for dtype in (p.weight_dtype, p.bias_dtype))
    options = None, 1e-6, 0.0, _dtype(p.res_dtype), _dtype(p.y_dtype)
    return _norm(ForwardPlan, p, (x, weight, bias, residual), options)


def _backward(p: RmsNormBwdProblem, sizes: Mapping[str, int], device: torch.device) -> Callable[[], Run]:
    shape = sizes["m"], p.n
    x, dy, dres = (_normal(device, dtype, *shape) for dtype in (p.x_dtype, p.dy_dtype, p.dres_dtype))
    weight, rstd = _normal(device, p.weight_dtype, *_parameter(p)), x.float().square().mean(-1).rsqrt()
    dweight_out = _normal(device, p.dweight_dtype, *_parameter(p)) if p.add_dweight else None
    dtypes = [_dtype(dtype) for dtype in (p.dx_dtype, p.dresidual_dtype, p.dweight_dtype, p.dbias_dtype)]
    return _norm(BackwardPlan, p, (dy, x, weight, rstd, dres, dweight_out), (0.0, *dtypes))


def _parameter(p: RmsNormFwdProblem | RmsNormBwdProblem) -> tuple[int, ...]:
    return (p.n,) if p.heads == 1 else (p.heads, p.n)


def _norm(kind: Callable[..., Plan], problem: Any, tensors: tuple, options: tuple) -> Callable[[], Run]:
    def make() -> Run:
        plan = kind(*tensors, *options, "cute")
        assert plan.problem == problem, (plan.problem, problem)
        return lambda: plan.run(*tensors)

    return make


# GEMMs ---------------------------------------------------------------------------------------------------------------


def _gemm(p: GemmProblem, sizes: Mapping[str, int], device: torch.device) -> Callable[[], Run]:
    """All rows are live. Outputs start as zeros; accumulating kernels add to them in every run."""
    m, n, k = sizes["m"], sizes["n"], sizes["k"]

    def padded(dtype: str | None, rows: int, columns: int) -> Tensor | None:
        """Rows are aligned to 128 bytes, as in exp_logits."""
        if dtype is None:
            return None
        return torch.zeros(rows, -(-columns // 64) * 64, dtype=_dtype(dtype), device=device)[:, :columns]

    split, second = 0, None
    if p.epilogue in ("softmax", "dlogits"):  # logits around 1
        a, b = _normal(device, p.dtype, m, k), _normal(device, p.dtype, n, k).mul_(k**-0.5)
        if p.d_in_two:
            split = max(n // 512 * 256, 256)
            second = padded(p.out_dtype, m, n - split)
        d = padded(p.out_dtype, m, split or n)
    else:  # exponentials
        if p.a_in_two:
            split = max(k // 512 * 256, 256)
            second = padded(p.dtype, m, k - split).uniform_()
        a = padded(p.dtype, *((m, split or k) if p.a_major == "k" else (k, m))).uniform_()
        b, d = _normal(device, p.dtype, k, n), torch.zeros(m, n, dtype=_dtype(p.out_dtype), device=device)
    epilogue = _epilogue(p, m, n, k, device)
    written = [d, second if p.d_in_two else None]
    written += [getattr(epilogue, name, None) for name in ("part_sum", "part_wsum", "target_logit")]
    counters = torch.zeros(NUM_TICKETS + 1, dtype=torch.int32, device=device)
    num_live = torch.tensor([k if p.live == "k" else m], dtype=torch.int32, device=device)
    on = require_device("tune", device)

    def make() -> Run:
        kernel = on.kernel_for("lce_gemm", p, on.gpu)
        clusters = kernel.config.max_clusters(on.gpu.sm_count)

        def run() -> tuple[Tensor | None, ...]:
            tail = None
            if p.split_k_tail:
                splits, floats = kernel.config.tail_room(m, n, k, clusters)
                tail = TailArgs(torch.empty(floats, device=device), counters[1:], splits)
            args = GemmArgs(
                a=a, second=second, b=b, d=d, epilogue=epilogue, tail=tail, ticket=counters[:1], num_live=num_live, m=m,
                n=n, k=k, split=split, start=0, a_stride=a.stride(0),
                second_stride=0 if second is None else second.stride(0), b_stride=b.stride(0),
                d_stride=0 if d is None else d.stride(0), max_clusters=clusters,
            )  # fmt: skip
            kernel.launch(_addresses(args), on.stream())
            return tuple(written)

        return run

    return make


def _epilogue(p: GemmProblem, m: int, n: int, k: int, device: torch.device) -> tuple | None:
    """The epilogue's arguments, by their names in quackish/configs/gemm.py."""
    tiles = -(-n // SOFTMAX_TILE_N[require_device("tune", device).gpu.family])
    slots = torch.arange(m, dtype=torch.int32, device=device)
    makers = {
        "bias": lambda: _normal(device, p.bias_dtype, n),
        "class_weight": lambda: torch.rand(n, device=device),
        "row_shift": lambda: torch.zeros(m, device=device),
        "slot_target": lambda: torch.randint(n, (m,), dtype=torch.int32, device=device),
        "row_max_bits": lambda: torch.zeros(m, dtype=torch.int32, device=device),  # row_shift, encoded
        "flags": lambda: torch.zeros(1 + -(-m // ROW_TILE), dtype=torch.int32, device=device),
        "part_sum": lambda: torch.empty(m, tiles, device=device),
        "part_wsum": lambda: torch.empty(m, tiles, device=device),
        "target_logit": lambda: torch.empty(m, device=device),
        "softcap": lambda: 30.0 if p.softcap else 0.0,
        "tiles": lambda: tiles,
        "coefs": lambda: torch.rand(m, 4, device=device),
        "v0": lambda: 0,
        "row_scale": lambda: torch.rand(m, device=device) / k,
        "order": lambda: torch.randperm(m, device=device).int(),
        "factor": lambda: torch.full((1,), 0.5, device=device),
        "first_slot_of_class": lambda: torch.where(slots % 16 == 0, slots // 16, NO_SLOT),  # every 16th class has rows
        "rounding_residual": lambda: torch.zeros(-(-m // 16), n, dtype=torch.int16, device=device),
    }
    return _epilogue_args(p.args.epilogue, makers)


# Grouped GEMMs -------------------------------------------------------------------------------------------------------


def _grouped(p: GroupedGemmProblem, sizes: Mapping[str, int], device: torch.device) -> Callable[[], Run]:
    """All groups have the same size. Accumulating kernels add to their output in every run."""
    rows, n, groups, m, k = (sizes.get(name) for name in ("rows", "n", "groups", "m", "k"))
    width, parts, second = n * (1 + p.gated), -(-n // DSCALES_COLUMNS), None
    if p.along == "k":
        a, b = _normal(device, p.dtype, rows, m), _normal(device, p.dtype, rows, n)
        d_shape = groups, m, n
    else:  # sums around 1
        a = _normal(device, p.dtype, rows, k * (1 + (p.b_in_two and p.epilogue == "down")))
        b = _normal(device, p.dtype, groups, width if p.epilogue == "up" and not p.b_in_two else n, k).mul_(k**-0.5)
        second = _normal(device, p.dtype, groups, n, k).mul_(k**-0.5) if p.b_in_two else None
        d_shape = rows, width if p.epilogue == "down_backward" else n
    d = torch.zeros(d_shape, dtype=_dtype(p.out_dtype), device=device)
    offs = (torch.arange(1, groups + 1, device=device) * rows // groups).int()
    makers = {
        "preactivation": lambda: _normal(device, p.dtype, rows, width),
        "bias": lambda: torch.randn(groups, width if p.epilogue == "up" else n, device=device),
        "scales": lambda: torch.rand(rows, device=device),
        "act": lambda: torch.zeros(rows, n, dtype=_dtype(p.dtype), device=device),
        "dscales_parts": lambda: torch.zeros(parts, rows, device=device),
    }
    epilogue, on = _epilogue_args(p.args.epilogue, makers), require_device("tune", device)
    names = ("act", "dscales_parts", *["preactivation"] * (p.epilogue == "up"))
    written = d, *(getattr(epilogue, name, None) for name in names)

    def make() -> Run:
        kernel = on.kernel_for("grouped_gemm", p, on.gpu)
        clusters = kernel.config.max_clusters(on.gpu.sm_count)

        def run() -> tuple[Tensor | None, ...]:
            args = GroupedGemmArgs(
                a=a, b=b, second=second, d=d, offs=offs, epilogue=epilogue, a_stride=m, rows=rows, m=m, n=n, k=k,
                groups=groups, max_clusters=clusters,
            )  # fmt: skip
            kernel.launch(_addresses(args), on.stream())
            return written

        return run

    return make


def _epilogue_args(spec: tuple | None, makers: Mapping[str, Callable[[], Any]]) -> tuple | None:
    """Makes the arguments that the spec of an epilogue has."""
    if spec is None:
        return None
    fields: Any = spec  # a NamedTuple
    return fields._make(None if kind is None else makers[name]() for name, kind in fields._asdict().items())


def _addresses(args: Any) -> tuple:
    """Replaces the tensors in a NamedTuple by their addresses."""

    def value(arg: Any) -> Any:
        if isinstance(arg, Tensor):
            return arg.data_ptr()
        return _addresses(arg) if isinstance(arg, tuple) else arg

    return args._make(map(value, args))


CASES: dict[str, Callable[..., Callable[[], Run]]] = {
    "rms_norm_fwd": _forward,
    "rms_norm_bwd": _backward,
    "lce_gemm": _gemm,
    "grouped_gemm": _grouped,
    **{kernel: functools.partial(attention, kernel) for kernel in ATTENTION_RESULTS},
}
