"""torchtitan 0.3: RMSNorm and the loss as overrides of its configs. docs/distributed.md shows how to name them.

--override.imports quackish.integrations.torchtitan.rms_norm,quackish.integrations.torchtitan.linear_cross_entropy
"""

from dataclasses import dataclass

from torch import Tensor, nn
from torchtitan.components.loss import IGNORE_INDEX, BaseLoss, ChunkedLossWrapper
from torchtitan.config import CompileConfig
from torchtitan.config.override import derive, override
from torchtitan.models import common
from torchtitan.protocols.module import Module

import quackish


class RMSNorm(quackish.RMSNorm, Module):
    """`quackish.RMSNorm` as torchtitan builds modules."""

    @dataclass(kw_only=True, slots=True)
    class Config(common.RMSNorm.Config):
        pass

    def __init__(self, config: Config):
        super().__init__(config.normalized_shape, config.eps, config.elementwise_affine)

    def forward(self, x: Tensor) -> Tensor:  # torchtitan's shardings go by the signature, and want nn.RMSNorm's
        return super().forward(x)


class LinearCrossEntropyLoss(ChunkedLossWrapper):  # the trainer leaves the head to a loss of this class
    """`quackish.linear_cross_entropy` in the forward of the model's lm_head, where FSDP has gathered its weight."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        z_loss: float = 0.0
        schedule: str = "auto"
        memory_limit: int | None = None

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None):
        self.options = dict(z_loss=config.z_loss, schedule=config.schedule, memory_limit=config.memory_limit)
        self.lm_head = None

    def set_lm_head(self, lm_head: nn.Module) -> None:
        self.lm_head, logits_of = lm_head, lm_head.forward

        def forward(input: Tensor, target: Tensor | None = None, **options) -> Tensor:
            if target is None:
                return logits_of(input)
            if lm_head.weight.shape[0] != lm_head.out_features:
                raise quackish.UnsupportedError(
                    f"LinearCrossEntropyLoss: lm_head.weight has {lm_head.weight.shape[0]} of {lm_head.out_features} "
                    "classes: tensor parallelism shards it; expected all. Use torchtitan's ChunkedLossWrapper there"
                )
            return quackish.linear_cross_entropy(
                input, lm_head.weight, target, linear_bias=lm_head.bias, **options, **self.options
            )

        lm_head.forward = forward

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **loss_inputs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        how = dict(reduction="sum") if global_valid_tokens is None else dict(num_items=global_valid_tokens)
        return self.lm_head(pred, labels, ignore_index=IGNORE_INDEX, **how), {}


@override(target=common.RMSNorm.Config, exact=True, description="RMSNorm: quackish")
def rms_norm(config: common.RMSNorm.Config) -> RMSNorm.Config:
    return derive(config, RMSNorm.Config)


@override(target=ChunkedLossWrapper.Config, exact=True, description="lm_head and cross entropy: quackish")
def linear_cross_entropy(config: ChunkedLossWrapper.Config, **options) -> LinearCrossEntropyLoss.Config:
    return LinearCrossEntropyLoss.Config(**options)
