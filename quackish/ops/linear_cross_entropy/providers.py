"""Providers of linear cross entropy: quackish with each schedule, and every peer at its public entry points.

Every provider takes x (m, h), w (v, h) and target (m,), and returns the mean loss over the rows that are not ignored,
for `backward()`. Modules are imported on first use, and kernels compile in the first call.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quackish.bench import torch_kernel
from quackish.bench.cells import OURS
from quackish.bench.measure import imported
from quackish.errors import UnsupportedError
from quackish.ops.linear_cross_entropy.tools import IGNORED

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def _quack(chunk_size: int = 4096, **options) -> Loss:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return functools.partial(chunked_linear_cross_entropy, chunk_size=chunk_size, **options)


def _quack_logits() -> Loss:
    from quack.linear_cross_entropy import linear_cross_entropy_func

    return lambda x, w, target: linear_cross_entropy_func(x, w, None, target, inplace_backward=True)


def _liger(impl: str = "nvidia-triton", accum_dtype: torch.dtype | None = None) -> Loss:
    from liger_kernel.functional import fused_linear_cross_entropy

    return lambda x, w, target: fused_linear_cross_entropy(x, w, target, accum_dtype=accum_dtype, impl=impl)[0]


def _liger_large_chunks() -> Loss:
    # Only the autograd function has an argument for the chunk size.
    from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

    options = (None, None, IGNORED, 0.0, 0.0, "mean", None, False, torch.float32)
    kernels = (False, False, False, "nvidia-cutedsl", None, 8)
    return lambda x, w, target: LigerFusedLinearCrossEntropyFunction.apply(x, w, target, *options, *kernels)[0]


def _liger_scaled(entropy: bool = True) -> Loss:
    # What liger_kernel.ops dispatches to on Hopper. By name, as its fallback elsewhere is PyTorch in chunks.
    from liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90 import LigerFusedScaledCrossEntropySM90Function

    def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        outputs = LigerFusedScaledCrossEntropySM90Function.apply(x, w, target, 1.0, IGNORED, 1, entropy)
        return _mean(*outputs, target) if entropy else _mean(outputs, None, target)

    return loss


def _mean(losses: Tensor, entropy: Tensor | None, target: Tensor) -> Tensor:
    """The mean of per-token losses. An entropy gets a gradient of zeros."""
    mean = losses.sum() / (target != IGNORED).sum()
    return mean if entropy is None else mean + 0.0 * entropy.sum()


def _torch_chunked_stats() -> Loss:
    from torch.utils.checkpoint import checkpoint

    def chunk(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        log_p = F.linear(x, w).float().log_softmax(-1)
        correct, entropy = log_p.argmax(-1) == target, -(log_p.exp() * log_p).sum(-1)
        return F.nll_loss(log_p, target, reduction="sum") + 0.0 * (correct.sum() + entropy.sum())

    def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        parts = zip(x.split(256), target.split(256), strict=True)
        return sum(checkpoint(chunk, a, w, b, use_reentrant=False) for a, b in parts) / (target != IGNORED).sum()

    return loss


def _torch() -> Loss:
    return lambda x, w, target: F.cross_entropy(F.linear(x, w), target)


def _torch_fp32() -> Loss:
    return lambda x, w, target: F.cross_entropy(F.linear(x, w).float(), target)


def _torch_compile() -> Loss:
    # One graph per shape is the fastest. Beyond the limit torch would silently run eager code.
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(_torch(), dynamic=False)


def _torch_chunked(chunk_size: int | None = None) -> Loss:
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise UnsupportedError(f"PyTorch {torch.__version__} has no chunked F.linear_cross_entropy; 2.13 does")
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk_size)
    loss: Any = functools.partial(F.linear_cross_entropy, options=options)
    loss.note = torch_kernel.note()
    return loss


def _torch_cute(chunk_size: int) -> Loss:
    if not torch_kernel.status().is_on:
        raise UnsupportedError(f"PyTorch's CuTe kernel does not run here: {torch_kernel.status().why}")
    return _torch_chunked(chunk_size)


SCHEDULES = {OURS: "auto"} | {f"{OURS}-{schedule}": schedule for schedule in ("stored", "chunked", "recompute")}
_LIGER_SM90 = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90:liger_fused_linear_cross_entropy_sm90"
_cce = functools.partial(imported, "cut_cross_entropy:linear_cross_entropy")
_quack_base = functools.partial(_quack, use_scaled_exp=False, tuned=False)
STATS, ENTROPY = f"{OURS}-stats", f"{OURS}-entropy"
TOKENS, TOKENS_ENTROPY = f"{OURS}-tokens", f"{OURS}-tokens-entropy"
# (loader, description) by name. A number at the end of a name is a chunk size in rows.
PEERS: dict[str, tuple[Callable[[], Loss], str]] = {
    "quack": (
        _quack,
        "QuACK's default: chunks of 4096 rows, its scaled-exp kernels (Hopper, bf16, V a multiple of 128)",
    ),
    **{f"quack-{rows}": (functools.partial(_quack, rows), "") for rows in (2048, 8192)},
    "quack-base": (_quack_base, "QuACK without scaled-exp kernels: cuBLAS, a row kernel, its own GEMM for dW"),
    **{f"quack-base-{rows}": (functools.partial(_quack_base, rows), "") for rows in (1024, 2048, 8192, 16384)},
    "quack-logits": (
        _quack_logits,
        "QuACK's F.linear and cross entropy of all logits at once; backward overwrites them",
    ),
    "liger-cute-sm90": (functools.partial(imported, _LIGER_SM90), "Liger's Hopper kernels, which store all logits"),
    "liger-cute": (functools.partial(_liger, "nvidia-cutedsl"), "liger with its CuTe row kernel"),
    "liger": (_liger, "Liger's default: chunks around cuBLAS with its Triton row kernel; dW accumulates in bf16"),
    "liger-fp32": (functools.partial(_liger, accum_dtype=torch.float32), "liger with dW accumulated in fp32"),
    "liger-fp32-large": (_liger_large_chunks, "liger-cute with dW accumulated in fp32 and chunks 8 times as large"),
    "liger-scaled": (
        _liger_scaled,
        "Liger's Hopper kernels for the per-token loss with the entropy, both with gradients; a call waits for the GPU "
        "once, to check targets",
    ),
    "liger-scaled-loss": (functools.partial(_liger_scaled, False), "the same without the entropy"),
    "cce": (_cce, "Apple's cut-cross-entropy; skips gradients close to zero"),
    "torch": (_torch, "F.cross_entropy(F.linear(x, w), target), eager"),
    "torch-compile": (_torch_compile, "the same under torch.compile"),
    "torch-fp32": (_torch_fp32, "F.cross_entropy of logits that are cast to fp32, eager"),
    "torch-chunked-stats": (
        _torch_chunked_stats,
        "loss, token accuracy and entropy in checkpointed chunks of 256 rows, in PyTorch, as training loops do",
    ),
    "torch-chunked": (_torch_chunked, "F.linear_cross_entropy, from torch 2.13 on"),
    **{
        f"torch-cute-{rows}": (
            functools.partial(_torch_cute, rows),
            f"PyTorch 2.15 CuTe: F.linear_cross_entropy with PyTorch's own kernel, in chunks of {rows} rows",
        )
        for rows in (256, 1024, 4096)
    },
}
ABOUT = {name: about for name, (_, about) in PEERS.items() if about} | {
    STATS: "with return_stats",
    ENTROPY: "with return_stats, and a gradient of the entropy",
    TOKENS: 'with reduction="none", and the mean in PyTorch',
    TOKENS_ENTROPY: "the same with return_stats, and a gradient of the entropy",
}
CHUNKED = tuple(f"{OURS}-chunked-{rows}" for rows in (1024, 2048, 4096, 8192))
RECOMPUTE = f"{OURS}-recompute-1024"  # memory for the logits of 1024 rows
PROVIDERS = (*SCHEDULES, *CHUNKED, RECOMPUTE, STATS, ENTROPY, TOKENS, TOKENS_ENTROPY, *PEERS)
# The default. ALL is measured at the headline shape.
MAIN = (
    *(OURS, f"{OURS}-chunked", f"{OURS}-recompute", "quack", "quack-base", "quack-logits", "liger-cute-sm90", "liger"),
    *("cce", "torch", "torch-compile", "torch-chunked"),
)
# With 65536 rows "quackish" equals "quackish-chunked", and "quackish-stored" needs 18 GB. ALL is for 8192 rows, where
# chunks of 8192 and 16384 rows are a single chunk.
_STATISTICS = (STATS, ENTROPY, "liger-scaled", "torch-chunked-stats")
PER_TOKEN = (TOKENS, TOKENS_ENTROPY, "liger-scaled", "liger-scaled-loss", "torch-chunked-stats")
MORE_OUTPUTS = tuple(dict.fromkeys((*_STATISTICS, *PER_TOKEN)))
_NOT_LONG = (f"{OURS}-stored", f"{OURS}-chunked", "torch-fp32", *_STATISTICS, *PER_TOKEN)
LONG = tuple(n for n in PROVIDERS if n not in _NOT_LONG)
ALL = tuple(
    n
    for n in PROVIDERS
    if n in (*SCHEDULES, *LONG, *_STATISTICS) and n not in (f"{OURS}-chunked-8192", "quack-base-16384")
)
# without grad, where all schedules are equal
LOSS = (OURS, STATS, "quack", "quack-base", "liger-scaled", "cce", "torch-chunked-stats", "torch")
HOST = (OURS, *(f"{OURS}-{s}" for s in ("stored", "chunked")), "quack", "liger-cute-sm90", "liger", "torch")


@functools.cache
def load(name: str) -> Loss:
    """The provider `name`, or the user's "module:attribute"; "quackish-chunked-2048" has chunks of 2048 rows.

    quackish comes first in every cell, so that in the first cell it compiles before QuACK is imported, which patches
    the DSL's tensor classes.
    """
    if name in PEERS:
        return PEERS[name][0]()
    if ":" in name:
        return imported(name)
    from quackish import linear_cross_entropy

    if name in (STATS, ENTROPY):
        return functools.partial(_with_stats, name == ENTROPY)
    if name in (TOKENS, TOKENS_ENTROPY):
        return functools.partial(_tokens, name == TOKENS_ENTROPY)
    schedule, _, rows = name.rpartition("-") if name[-1].isdigit() else (name, "", "")
    chunk_size = int(rows) if rows else None
    return functools.partial(linear_cross_entropy, schedule=SCHEDULES[schedule], chunk_size=chunk_size)


def _with_stats(entropy: bool, x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    from quackish import linear_cross_entropy

    loss, stats = linear_cross_entropy(x, w, target, return_stats=True)
    return loss + 0.0 * stats.entropy.sum() if entropy else loss


def _tokens(entropy: bool, x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    from quackish import linear_cross_entropy

    if not entropy:
        return _mean(linear_cross_entropy(x, w, target, reduction="none"), None, target)
    losses, stats = linear_cross_entropy(x, w, target, reduction="none", return_stats=True)
    return _mean(losses, stats.entropy, target)
