"""What `quackish tune` tries for the GEMMs of linear cross entropy, and how it times them."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from quackish.device.kernel_device import require_device
from quackish.device.spec import Tuning
from quackish.gpu import Gpu
from quackish.kernels.gemm.problem import NUM_TICKETS, TILE_K, GemmArgs, TailArgs
from quackish.kernels.gemm.sm90_config import GemmConfig, gemm_smem_bytes
from quackish.kernels.gemm.sm100_config import gemm_sm100_smem_bytes
from quackish.kernels.gemm.tuning import (
    MIN_MERIT,
    multiplications_per_load,
    multiplications_per_load_sm100,
    sm100_configs,
)
from quackish.ops.linear_cross_entropy.gemm_problems import SOFTMAX_TILE_N, LceGemmProblem, Logits
from quackish.ops.linear_cross_entropy.row_problems import NO_SLOT, ROW_TILE
from quackish.tune.data import MakeRun, Run, addresses, dtype_of, epilogue_args, matrix, normal

_PINGPONG_TILES = ((128, 128), (128, 192), (192, 128))


def _gemm_configs(problem: LceGemmProblem, base: GemmConfig, gpu: Gpu) -> Iterator[GemmConfig]:
    tiles = itertools.product((64, 128, 192, 256), (128, 192, 256))
    clusters = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1))
    for tile_mn, cluster, pingpong in itertools.product(tiles, clusters, (False, True)):
        if pingpong and tile_mn not in _PINGPONG_TILES:
            continue
        tile = GemmConfig(*tile_mn, *cluster, pingpong=pingpong)
        stage = sum(tile_mn) * TILE_K * 2
        room = gpu.smem_bytes - gemm_smem_bytes(problem, dataclasses.replace(tile, num_stages=0))
        for group, along in itertools.product((4, 8, 16), ("m", "n")):
            yield dataclasses.replace(tile, num_stages=room // stage, group=group, group_along=along)


# Data ----------------------------------------------------------------------------------------------------------------


def _data(p: LceGemmProblem, sizes: Mapping[str, int], device: torch.device) -> MakeRun:
    """All rows are live. Outputs start as zeros; accumulating kernels add to them in every run."""
    m, n, k = sizes["m"], sizes["n"], sizes["k"]

    def padded(dtype: str | None, rows: int, columns: int) -> Tensor | None:
        """Rows are aligned to 128 bytes, as in exp_logits."""
        if dtype is None:
            return None
        return torch.zeros(rows, -(-columns // 64) * 64, dtype=dtype_of(dtype), device=device)[:, :columns]

    split, second = 0, None
    if isinstance(p.epilogue, Logits):  # logits around 1
        a, b = normal(device, p.dtype, m, k), normal(device, p.dtype, n, k).mul_(k**-0.5)
        if p.d_in_two:
            split = max(n // 512 * 256, 256)
            second = padded(p.out_dtype, m, n - split)
        d = padded(p.out_dtype, m, split or n)
    else:  # exponentials
        if p.a_in_two:
            split = max(k // 512 * 256, 256)
            second = padded(p.dtype, m, k - split).uniform_()
        a = padded(p.dtype, *((m, split or k) if p.a_major == "k" else (k, m))).uniform_()
        b, d = normal(device, p.dtype, k, n), torch.zeros(m, n, dtype=dtype_of(p.out_dtype), device=device)
    epilogue = _epilogue(p, m, n, k, device)
    written = [d, second if p.d_in_two else None]
    written += [getattr(epilogue, name, None) for name in ("part_sum", "part_wsum", "part_elog", "target_logit")]
    counters = torch.zeros(NUM_TICKETS + 1, dtype=torch.int32, device=device)
    num_live = torch.tensor([k if p.live == "k" else m], dtype=torch.int32, device=device)
    on = require_device("tune", device)

    def make() -> Run:
        kernel = on.kernel_for(p, on.gpu)
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
            kernel.launch(addresses(args), on.stream())
            return tuple(written)

        return run

    return make


def _epilogue(p: LceGemmProblem, m: int, n: int, k: int, device: torch.device) -> tuple | None:
    """The epilogue's arguments, by name."""
    spec: Any = p.args.epilogue
    options: Any = p.epilogue
    tiles = -(-n // SOFTMAX_TILE_N[require_device("tune", device).gpu.family])
    slots = torch.arange(m, dtype=torch.int32, device=device)
    makers = {
        "bias": lambda: normal(device, spec.bias.dtype, n),
        "class_weight": lambda: torch.rand(n, device=device),
        "row_shift": lambda: torch.zeros(m, device=device),
        "slot_target": lambda: torch.randint(n, (m,), dtype=torch.int32, device=device),
        "row_max_bits": lambda: torch.zeros(m, dtype=torch.int32, device=device),  # row_shift, encoded
        "flags": lambda: torch.zeros(1 + -(-m // ROW_TILE), dtype=torch.int32, device=device),
        "part_sum": lambda: torch.empty(m, tiles, device=device),
        "part_wsum": lambda: torch.empty(m, tiles, device=device),
        "part_elog": lambda: torch.empty(m, tiles, device=device),
        "argmax_bits": lambda: torch.full((m,), torch.iinfo(torch.int64).min, device=device),
        "target_logit": lambda: torch.empty(m, device=device),
        "logit_scale": lambda: torch.full((), 0.5, device=device),
        "softcap": lambda: 30.0 if options.softcap else 0.0,
        "tiles": lambda: tiles,
        "coefs": lambda: torch.rand(m, 4, device=device),
        "coef_entropy": lambda: torch.rand(m, device=device),
        "v0": lambda: 0,
        "row_scale": lambda: torch.rand(m, device=device) / k,
        "order": lambda: torch.randperm(m, device=device).int(),
        "factor": lambda: torch.full((1,), 0.5, device=device),
        "first_slot_of_class": lambda: torch.where(slots % 16 == 0, slots // 16, NO_SLOT),  # every 16th class has rows
        "rounding_residual": lambda: torch.zeros(-(-m // 16), n, dtype=torch.int16, device=device),
    }
    return epilogue_args(spec, makers)


def cublas(p: LceGemmProblem, sizes: Mapping[str, int], device: torch.device) -> tuple[Tensor, Tensor]:
    m, n, k = (sizes[name] for name in "mnk")
    options = dict(dtype=getattr(torch, p.dtype), device=device)
    return matrix(m, k, p.a_major == "k", **options), matrix(k, n, p.b_major == "n", **options)


GEMM = Tuning(_gemm_configs, multiplications_per_load, MIN_MERIT, _data)
_sm100 = functools.partial(sm100_configs, gemm_sm100_smem_bytes)
GEMM_SM100 = Tuning(_sm100, multiplications_per_load_sm100, MIN_MERIT, _data)
