"""Operations over several GPUs. Every rank of a torch.distributed process group must call them."""

from quackish.ops.linear_cross_entropy.sharded.api import VocabParallelHead, linear_cross_entropy

__all__ = ["VocabParallelHead", "linear_cross_entropy"]


def __dir__() -> list[str]:
    return __all__
