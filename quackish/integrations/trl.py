"""quackish in the trainers of TRL 1.16: linear cross entropy in SFT, DPO, KTO, GRPO, RLOO; divergence in distillation.

    from quackish.integrations.trl import apply

    apply()

The first five compute log-probabilities per token by one autograd function, whose name in `trl.trainer.utils` is
rebound. `DistillationTrainer` calls a function of its file, whose name is rebound there.
"""

import importlib
import importlib.util
import inspect
import types
from collections.abc import Sequence

import torch
import trl
from torch import Tensor
from trl.trainer import utils
from typing_extensions import Never

import quackish
from quackish.errors import UnsupportedError, describe
from quackish.integrations.loss_options import check_loss_options
from quackish.types import Schedule

_NAME = "_ChunkedLogProbFunction"
_PARAMETERS = [
    "ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale",
    "outputs",
]  # fmt: skip
_DISTILLATION = "trl.trainer.distillation_trainer"
_DIVERGENCE = "_chunked_divergence_loss"
_DIVERGENCE_PARAMETERS = [
    "student_hidden_states", "teacher_hidden_states", "student_lm_head_weight", "teacher_lm_head_weight",
    "completion_mask", "beta", "num_items_in_batch", "student_lm_head_bias", "teacher_lm_head_bias",
    "student_logit_scale", "teacher_logit_scale", "student_final_logit_softcapping", "teacher_final_logit_softcapping",
    "temperature",
]  # fmt: skip
_OTHERS = "log_sum_sq_probs", "mean_logits"  # outputs that quackish's kernels do not compute


def apply(
    *model: Never, schedule: Schedule = "auto", chunk_size: int | None = None, memory_limit: int | None = None
) -> None:
    """Makes TRL's trainers compute log-probabilities and divergences with quackish, until `revert()`.

    Log-probabilities, entropy, `is_top1` and their gradients are quackish's. TRL's own function still computes two
    outputs without gradients, in another forward pass of the head: `log_sum_sq_probs` (DPO's `use_weighting`), and with
    a softcap `mean_logits` (a metric of DPO and KTO). Without one, `mean_logits` is a product with the weight's mean.
    `DistillationTrainer` computes its loss with `quackish.linear_divergence`. Call `apply` before or after a trainer is
    built; a second call changes the options. It takes no model.

    schedule, chunk_size, memory_limit: as in `quackish.linear_cross_entropy`; memory_limit also in `linear_divergence`.

    Raises:
        UnsupportedError: the installed TRL has no such function, or one with other arguments.
        ValueError, TypeError: an invalid option, or a model.
    """
    if model:
        raise TypeError(
            f"apply: the first argument is {describe(model[0])}, expected options by name: quackish.integrations.trl "
            "changes TRL's own loss. quackish.integrations.transformers.apply(model) patches one model"
        )
    theirs = _theirs()
    forward = getattr(theirs, "forward", None)
    found = None if forward is None else list(inspect.signature(forward).parameters)
    if found != _PARAMETERS:
        raise UnsupportedError(
            f"apply: trl {trl.__version__} has trl.trainer.utils.{_NAME} with the arguments {found}, expected "
            f"{_PARAMETERS}, as in TRL 1.16"
        )
    options = dict(schedule=schedule, chunk_size=chunk_size, memory_limit=memory_limit)
    check_loss_options("apply", **options)
    divergence, distillation = None, _distillation()
    if distillation is not None:
        divergence = _their_divergence(distillation)
        found = list(inspect.signature(divergence).parameters)
        if found != _DIVERGENCE_PARAMETERS:
            raise UnsupportedError(
                f"apply: trl {trl.__version__} has {_DISTILLATION}.{_DIVERGENCE} with the arguments {found}, expected "
                f"{_DIVERGENCE_PARAMETERS}, as in TRL 1.16"
            )
    setattr(utils, _NAME, _ChunkedLogProbs(theirs, options))
    if distillation is not None:
        setattr(distillation, _DIVERGENCE, _DivergenceLoss(divergence, memory_limit))


def revert() -> None:
    """Undoes `apply()`. Does nothing without one."""
    if hasattr(utils, _NAME):
        setattr(utils, _NAME, _theirs())
    distillation = _distillation()
    if distillation is not None:
        setattr(distillation, _DIVERGENCE, _their_divergence(distillation))


def _distillation() -> types.ModuleType | None:
    """The file of TRL's DistillationTrainer; None if the installed TRL has none, or one with another loss."""
    if importlib.util.find_spec(_DISTILLATION) is None:
        return None
    module = importlib.import_module(_DISTILLATION)
    return module if hasattr(module, _DIVERGENCE) else None


def _their_divergence(distillation: types.ModuleType):
    current = getattr(distillation, _DIVERGENCE)
    return current.theirs if isinstance(current, _DivergenceLoss) else current


def _theirs():
    """TRL's own function; None if the installed TRL has none."""
    current = getattr(utils, _NAME, None)
    return current.theirs if isinstance(current, _ChunkedLogProbs) else current


class _ChunkedLogProbs:
    """Stands in for TRL's autograd function, of which TRL calls `apply` alone."""

    def __init__(self, theirs, options: dict):
        self.theirs, self.options = theirs, options

    def apply(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float,
        chunk_size: int, final_logit_softcapping: float | None = None, logit_scale: float = 1.0,
        outputs: Sequence[str] = ("entropy", *_OTHERS, "is_top1"),
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Computes one tensor (N,) for each of TRL's outputs; None for those that were not asked for.

        hidden: (N, H); weight: (V, H); bias: (V,); targets: (N,). chunk_size: the width of TRL's tiles, ignored here.
        """
        softcap = final_logit_softcapping
        if not (logit_scale > 0 and temperature > 0 and (softcap is None or softcap > 0)):
            return self.theirs.apply(
                hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs
            )
        others = [name for name in _OTHERS if name in outputs and (name != "mean_logits" or softcap is not None)]
        log_sum_sq_probs = mean_logits = None
        if others:  # which have no gradient
            with torch.no_grad():
                _, _, log_sum_sq_probs, mean_logits, _ = self.theirs.apply(
                    hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, others
                )
        if weight.dtype != hidden.dtype and not torch.is_autocast_enabled(hidden.device.type):  # cast_lm_head_to_fp32
            weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        # TRL scales before the cap: cap * tanh(scale * z / cap) = scale * c * tanh(z / c), where c = cap / scale.
        scale = logit_scale / temperature
        options = dict(
            linear_bias=bias, reduction="none", softcap=None if softcap is None else softcap / logit_scale,
            logit_scale=None if scale == 1 else scale, **self.options,
        )  # fmt: skip
        entropy = is_top1 = None
        if "entropy" in outputs or "is_top1" in outputs:
            loss, stats = quackish.linear_cross_entropy(hidden, weight, targets, return_stats=True, **options)
            entropy = stats.entropy if "entropy" in outputs else None
            is_top1 = stats.predicted == targets if "is_top1" in outputs else None
        else:
            loss = quackish.linear_cross_entropy(hidden, weight, targets, **options)
        if "mean_logits" in outputs and mean_logits is None:
            mean_logits = _mean_logits(hidden.detach(), weight.detach(), bias) * scale
        return -loss, entropy, log_sum_sq_probs, mean_logits, is_top1


def _mean_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The mean over classes of `hidden @ weight.T + bias`, from one matrix-vector product: (N,) fp32 or fp64."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):
        mean_logits = hidden.to(dtype) @ weight.mean(0, dtype=dtype)
        return mean_logits if bias is None else mean_logits + bias.detach().mean(dtype=dtype)


class _DivergenceLoss:
    """Stands in for the loss function of TRL's DistillationTrainer."""

    def __init__(self, theirs, memory_limit: int | None):
        self.theirs, self.memory_limit = theirs, memory_limit

    def __call__(
        self, student_hidden_states: Tensor, teacher_hidden_states: Tensor, student_lm_head_weight: Tensor,
        teacher_lm_head_weight: Tensor, completion_mask: Tensor, beta: float,
        num_items_in_batch: Tensor | int | None = None, student_lm_head_bias: Tensor | None = None,
        teacher_lm_head_bias: Tensor | None = None, student_logit_scale: float = 1.0, teacher_logit_scale: float = 1.0,
        student_final_logit_softcapping: float | None = None, teacher_final_logit_softcapping: float | None = None,
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """(loss, sum of the student's entropies, number of positions that count), as TRL's."""
        scales = student_logit_scale, teacher_logit_scale, temperature
        softcaps = student_final_logit_softcapping, teacher_final_logit_softcapping
        if not all(number > 0 for number in scales) or not all(cap is None or cap > 0 for cap in softcaps):
            return self.theirs(
                student_hidden_states, teacher_hidden_states, student_lm_head_weight, teacher_lm_head_weight,
                completion_mask, beta, num_items_in_batch, student_lm_head_bias, teacher_lm_head_bias,
                student_logit_scale, teacher_logit_scale, *softcaps, temperature,
            )  # fmt: skip
        x, weight, mask = student_hidden_states, _whole(student_lm_head_weight), completion_mask != 0
        teacher, teacher_weight = teacher_hidden_states.detach(), _whole(teacher_lm_head_weight).detach()
        teacher_bias = None if teacher_lm_head_bias is None else _whole(teacher_lm_head_bias).detach()
        bias = None if student_lm_head_bias is None else _whole(student_lm_head_bias)
        if not torch.is_autocast_enabled(x.device.type):
            weight, teacher, teacher_weight = (t.to(x.dtype) for t in (weight, teacher, teacher_weight))
        loss, entropy = quackish.linear_divergence(
            x, weight, teacher, teacher_weight, mask=mask, beta=beta, temperature=temperature, linear_bias=bias,
            teacher_bias=teacher_bias, softcap=softcaps[0], teacher_softcap=softcaps[1],
            logit_scale=student_logit_scale, teacher_logit_scale=teacher_logit_scale, num_items=num_items_in_batch,
            return_entropy=True, memory_limit=self.memory_limit,
        )  # fmt: skip
        return loss, entropy.sum(), mask.sum()


def _whole(t: Tensor) -> Tensor:
    """The whole tensor, which FSDP2 shards."""
    return t.full_tensor() if type(t).__name__ == "DTensor" else t
