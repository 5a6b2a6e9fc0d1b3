"""Config overrides for torchtitan 0.3: RMSNorm and the loss. See docs/guides/distributed.md.

--override.imports quackish.integrations.torchtitan.rms_norm,quackish.integrations.torchtitan.linear_cross_entropy
"""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX, BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import CompileConfig
from torchtitan.config.override import derive, override
from torchtitan.models import common
from torchtitan.models.deepseek_v3.mtp import MTPDecoder, MTPLoss
from torchtitan.protocols.module import Module

import quackish
from quackish import parallel
from quackish.errors import a
from quackish.integrations.plain import why_weights_unsupported
from quackish.types import Schedule


class RMSNorm(quackish.RMSNorm, Module):
    """`quackish.RMSNorm`, built from a torchtitan config."""

    @dataclass(kw_only=True, slots=True)
    class Config(common.RMSNorm.Config):
        pass

    def __init__(self, config: Config):
        super().__init__(config.normalized_shape, config.eps, config.elementwise_affine)

    # torchtitan shards arguments by name: keep nn.RMSNorm's signature
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class LinearCrossEntropyLoss(ChunkedLossWrapper):  # for subclasses of it, the trainer does not run lm_head
    """`quackish.linear_cross_entropy` in the forward of lm_head, where FSDP has gathered its weight."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        z_loss: float = 0.0
        schedule: Schedule = "auto"
        memory_limit: int | None = None

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None):
        self.options = dict(z_loss=config.z_loss, schedule=config.schedule, memory_limit=config.memory_limit)
        quackish.LinearCrossEntropyLoss(1, 1, **self.options)  # checks the options before the first step
        self.lm_head: nn.Module | None = None

    def set_lm_head(self, lm_head: nn.Module) -> None:
        """Called by torchtitan. Replaces lm_head.forward, which then returns the loss if it gets a target."""
        if getattr(type(lm_head), "forward", None) is not nn.Linear.forward:
            raise quackish.UnsupportedError(
                f"LinearCrossEntropyLoss: lm_head is {a(type(lm_head))} with its own forward, expected an "
                "nn.Linear. For this model use torchtitan's ChunkedLossWrapper"
            )
        if why := why_weights_unsupported(lm_head):
            raise quackish.UnsupportedError(f"LinearCrossEntropyLoss: lm_head: {why}")
        self.lm_head, compute_logits = lm_head, lm_head.forward

        def forward(input: Tensor, target: Tensor | None = None, **options) -> Tensor:
            if target is None:
                return compute_logits(input)
            weight, num_classes = lm_head.weight, lm_head.out_features
            if isinstance(target, DTensor) or weight.shape[0] != num_classes:
                raise quackish.UnsupportedError(
                    f"LinearCrossEntropyLoss: labels are {a(type(target))} and lm_head.weight has "
                    f"{weight.shape[0]} of {num_classes} classes; expected a plain tensor and all classes. Under "
                    'spmd_backend "full_dtensor", and "spmd_types" with tensor parallelism, use torchtitan\'s '
                    "ChunkedLossWrapper"
                )
            loss_function = quackish.linear_cross_entropy
            if isinstance(input, DTensor) and isinstance(weight, DTensor):  # "partial_dtensor": classes are sharded
                loss_function = parallel.linear_cross_entropy
            return loss_function(input, weight, target, linear_bias=lm_head.bias, **options)

        lm_head.forward = forward

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **loss_inputs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns (loss, {}), as torchtitan expects. pred: hidden states, because lm_head has not run."""
        if self.lm_head is None:
            raise RuntimeError("LinearCrossEntropyLoss has no lm_head yet: call set_lm_head(model.lm_head) first")
        divisor = dict(reduction="sum") if global_valid_tokens is None else dict(num_items=global_valid_tokens)
        # By keyword, because ColwiseParallel drops additional positional arguments.
        return self.lm_head(pred, target=labels, ignore_index=IGNORE_INDEX, **divisor, **self.options), {}


class MTPLinearCrossEntropyLoss(LinearCrossEntropyLoss):
    """torchtitan's MTPLoss on hidden states: the main loss, plus mtp_scale times the mean of the depths' losses."""

    @dataclass(kw_only=True, slots=True)
    class Config(LinearCrossEntropyLoss.Config):
        mtp_scale: float = 0.3

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None):
        super().__init__(config)
        self.loss = MTPLoss.Config(mtp_scale=config.mtp_scale).build(compile_config=None)
        self.loss.fn = self._summed

    def _summed(self, hidden: Tensor, labels: Tensor, *, global_vocab_size: int | None) -> Tensor:
        """The sum of one depth's losses. MTPLoss calls it for each depth."""
        return super().__call__(hidden, labels)[0]

    def __call__(  # type: ignore[override]
        self, pred: list[Tensor], labels: Tensor, global_valid_tokens: Tensor | None = None, **loss_inputs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return self.loss(pred, labels, global_valid_tokens, **loss_inputs)


_MTP_FORWARD = MTPDecoder.forward


def _hidden_states_of_mtp(self: MTPDecoder, *args, **kwargs):
    """MTPDecoder.forward, which supports `_skip_lm_head` only without MTP layers.

    It also returns hidden states if there is no lm_head, so a call runs without one.
    """
    if not self._skip_lm_head or self.mtp_layers is None:
        return _MTP_FORWARD(self, *args, **kwargs)
    lm_head, self.lm_head, self._skip_lm_head = self.lm_head, None, False
    try:
        return _MTP_FORWARD(self, *args, **kwargs)
    finally:
        self.lm_head, self._skip_lm_head = lm_head, True


@override(target=common.RMSNorm.Config, exact=True, description="RMSNorm: quackish")
def rms_norm(config: common.RMSNorm.Config) -> RMSNorm.Config:
    return derive(config, RMSNorm.Config)


@override(target=BaseLoss.Config, fqns=["loss"], description="lm_head and cross entropy: quackish")
def linear_cross_entropy(config: BaseLoss.Config, **options) -> LinearCrossEntropyLoss.Config:
    """Replaces torchtitan's loss. Raises ValueError for a loss that is no cross entropy.

    options: fields of LinearCrossEntropyLoss.Config.
    """
    if type(config) is MTPLoss.Config:
        if MTPDecoder.forward is _MTP_FORWARD:
            MTPDecoder.forward = _hidden_states_of_mtp
        return MTPLinearCrossEntropyLoss.Config(mtp_scale=config.mtp_scale, **options)
    loss_fn = config.loss_fn if type(config) is ChunkedLossWrapper.Config else config
    if type(loss_fn) is not CrossEntropyLoss.Config:
        raise ValueError(
            f"linear_cross_entropy: loss is {config!r}, expected a Config of CrossEntropyLoss, of ChunkedLossWrapper "
            "around it, or of MTPLoss"
        )
    return LinearCrossEntropyLoss.Config(**options)
