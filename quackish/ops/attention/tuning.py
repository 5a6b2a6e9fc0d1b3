"""What `quackish tune` tries for attention's kernels.

A whole call on random data prepares the arguments of each, which is then launched alone.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from quackish.device.kernel_device import KernelDevice, require_device
from quackish.device.spec import Tuning
from quackish.gpu import Gpu
from quackish.ops.attention.arguments import Strided
from quackish.ops.attention.config import REGISTERS, AttentionConfig
from quackish.ops.attention.kernel_steps import AttentionSteps
from quackish.ops.attention.prepared import Kernel
from quackish.ops.attention.reference import Inputs, Options
from quackish.ops.attention.score_problems import AttentionBiasProblem, AttentionProblem, AttentionProductProblem
from quackish.ops.attention.small_problems import AttentionSmallBackwardProblem

_ALIGNED = 16  # columns: TMA loads rows of a bias or a mask that start on 16 bytes


def _attention_configs(problem: AttentionProblem, base: AttentionConfig, gpu: Gpu) -> Iterator[AttentionConfig]:
    for values in itertools.product(REGISTERS, problem.tiles, range(1, 7), problem.own_stages):
        yield AttentionConfig(*values)


def _same_merit(problem: AttentionProblem, config: AttentionConfig) -> float:
    return 1.0  # all are tried: there are at most 72


def _data(
    p: AttentionProblem, sizes: Mapping[str, int], device: torch.device
) -> Callable[[], Callable[[], tuple[Tensor | None, ...]]]:
    """A bias has the batch and heads in `sizes`; a mask (batch, 1, Lq, Lk) keeps half of the keys."""
    inputs = _inputs(p, sizes, device)
    q = inputs.q
    options = Options(q.shape[3] ** -0.5, 20.0 if p.softcap else None, None, 0 if p.band else None)
    on = require_device("tune", device)
    steps = _Recorder(on, p)
    plan = steps.plan(inputs, options)
    out, lse, residual = steps.forward(inputs, options, plan)
    do = torch.randn(out.shape, dtype=out.dtype, device=device)
    dlse = torch.randn(lse.shape, device=device) if getattr(p, "dlse", False) else None
    steps.backward(do, dlse, out, lse, residual, inputs, options, _needs_dbias(p), plan)
    args = steps.args
    assert args is not None, (p, steps.problems)
    written = tuple(steps.memory_at(getattr(args, name)) for name in p.spec.results)
    held = inputs, do, steps  # the memory that `args` has addresses of

    def make() -> Callable[[], tuple[Tensor | None, ...]]:
        launch = on.kernel_for(p, on.gpu).launch

        def run() -> tuple[Tensor | None, ...]:
            assert held is not None
            launch(args, on.stream())
            return written

        return run

    return make


def _needs_dbias(p: AttentionProblem) -> bool:
    """True if backward launches the problem's kernel for the gradient of a bias."""
    if isinstance(p, AttentionSmallBackwardProblem):
        return p.dbias_dtype is not None
    return isinstance(p, AttentionProductProblem | AttentionBiasProblem) or getattr(p, "dbias", False)


class _Recorder(AttentionSteps):
    """Keeps the arguments of a problem's launch, and all memory."""

    def __init__(self, device: KernelDevice, wanted: AttentionProblem):
        super().__init__(device)
        self.wanted, self.args = wanted, None
        self.problems: list[Any] = []
        self.memory: dict[int, Tensor] = {}
        allocate = self.empty

        def empty(*how: Any) -> Tensor:
            t = allocate(*how)
            self.memory[t.data_ptr()] = t
            return t

        self.empty = empty

    def _launch(self, kernel: Kernel, args: Any) -> None:
        super()._launch(kernel, args)
        self.problems.append(kernel.problem)
        if kernel.problem == self.wanted:
            self.args = args

    def memory_at(self, address: Any) -> Tensor | None:
        return self.memory.get(address.base if isinstance(address, Strided) else address)


def _inputs(p: AttentionProblem, sizes: Mapping[str, int], device: torch.device) -> Inputs:
    batch, heads, num_q, num_k, d = (sizes[name] for name in ("batch", "heads", "num_q", "num_k", "d"))
    dtype = getattr(torch, p.dtype)

    def scores(of: str, dtype: torch.dtype, aligned: bool, rows: int = num_q) -> Tensor:
        row = -(-num_k // _ALIGNED) * _ALIGNED + (not aligned)
        shape = sizes.get(f"{of}_batch", batch), sizes.get(f"{of}_heads", heads), rows, row
        return torch.randn(shape, dtype=dtype, device=device)[..., :num_k]

    q = torch.randn(batch, heads, num_q, d, dtype=dtype, device=device)
    k, v = (torch.randn(batch, heads // sizes["group"], num_k, d, dtype=dtype, device=device) for _ in "kv")
    bias_dtype = p.dtype if isinstance(p, AttentionProductProblem) else p.bias_dtype
    bias = None if bias_dtype is None else scores("bias", getattr(torch, bias_dtype), p.bias_aligned)
    mask = None
    if p.mask:
        keep = scores("mask", torch.float32, p.mask_aligned, 1 if p.mask_of_keys else num_q)
        mask = torch.empty_strided(keep.shape, keep.stride(), dtype=torch.bool, device=device)
        torch.gt(keep, 0, out=mask)
    return Inputs(q, k, v, bias, mask)


TUNING = Tuning(_attention_configs, _same_merit, 1.0, _data)
