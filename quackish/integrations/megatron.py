"""The output layer and the loss of megatron-core 0.16 as one function, without logits. See docs/guides/parallel.md."""

from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

import quackish
from quackish import parallel
from quackish.errors import UnsupportedError, describe, refuse_unknown
from quackish.types import LinearCrossEntropyOptions

_FIXED = "linear_bias", "reduction"  # options that output_layer_loss passes itself
_OPTIONS = [name for name in LinearCrossEntropyOptions.__annotations__ if name not in _FIXED]


def output_layer_loss(
    output_layer: ColumnParallelLinear, hidden_states: Tensor, labels: Tensor, *, weight: Tensor | None = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """The losses per token of `compute_language_model_loss(labels, output_layer(hidden_states, weight=weight)[0])`.

    `quackish.linear_cross_entropy` computes them, or with tensor parallelism `quackish.parallel.linear_cross_entropy`,
    with the group, bias and sequence parallelism of `output_layer`.

    Args:
        output_layer: the output layer of a GPTModel. Its weight has this rank's classes.
        hidden_states: (sequence, batch, H); with sequence parallelism this rank's (sequence / ranks, batch, H).
        labels: (batch, sequence). Where it is -100, or `ignore_index`, the loss is 0; megatron-core has no such label.
        weight: as in output_layer's forward; for a shared embedding `model.shared_embedding_or_output_weight()`.
        options: options of `quackish.linear_cross_entropy`, such as `grad_weight_out=weight.main_grad`, which
            `overlap_grad_reduce` does not allow.

    Returns:
        (batch, sequence) fp32, the same on all ranks of the group.

    Raises:
        UnsupportedError: output_layer defers its weight gradient, or is an expert's.
    """
    if not isinstance(output_layer, ColumnParallelLinear):
        raise TypeError(
            f"output_layer_loss: output_layer is {describe(output_layer)}, expected the output_layer of a GPTModel"
        )
    refuse_unknown("output_layer_loss", options, _OPTIONS)
    config = output_layer.config
    if config.defer_embedding_wgrad_compute or output_layer.explicit_expert_comm:
        raise UnsupportedError(
            f"output_layer_loss: defer_embedding_wgrad_compute is {config.defer_embedding_wgrad_compute} and "
            f"explicit_expert_comm is {output_layer.explicit_expert_comm}, expected False for both"
        )
    weight = output_layer.weight if weight is None else weight
    bias = None if output_layer.skip_bias_add else output_layer.bias
    options = dict(linear_bias=bias, reduction="none", **options)
    target = labels.transpose(0, 1).contiguous()
    if output_layer.tp_group.size() == 1:
        loss = quackish.linear_cross_entropy(hidden_states, weight, target, **options)
    else:
        options |= dict(group=output_layer.tp_group, sequence_parallel=output_layer.sequence_parallel)
        loss = parallel.linear_cross_entropy(hidden_states, weight, target, **options)
    return loss.transpose(0, 1).contiguous()
