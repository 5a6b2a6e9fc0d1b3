"""The loss of a head that PyTorch's ColwiseParallel shards after `apply`."""

from torch import Tensor

from quackish.errors import UnsupportedError


def loss_of_sharded_head(input: Tensor, weight: Tensor, target: Tensor, *, return_stats: bool, **options) -> Tensor:
    """Returns a replicated DTensor (ranks, ranks), each element of which is the loss.

    If ColwiseParallel then shards it, it is no longer square, which `from_sharded_head` refuses.
    """
    from torch.distributed.tensor import DTensor, Replicate

    from quackish import parallel

    if return_stats:
        raise UnsupportedError("return_token_accuracy is True, expected False: lm_head is sharded by ColwiseParallel")
    loss, mesh = parallel.linear_cross_entropy(input, weight, target, **options), weight.device_mesh
    copies = loss.expand(mesh.size(), mesh.size())
    return DTensor.from_local(copies, mesh, [Replicate()] * mesh.ndim, run_check=False)


def from_sharded_head(copies: Tensor) -> Tensor:
    """The loss in what `loss_of_sharded_head` returns, after ColwiseParallel."""
    copies = copies.to_local() if type(copies).__name__ == "DTensor" else copies
    if copies.shape[0] != copies.shape[1]:
        raise UnsupportedError(
            "lm_head is sharded by a ColwiseParallel whose output_layouts shard the logits; expected "
            "ColwiseParallel(output_layouts=Replicate()). quackish.parallel.linear_cross_entropy then computes the "
            "loss, and calls that need logits get all of them"
        )
    return copies[0, 0].clone()  # the model may add an auxiliary loss in place
