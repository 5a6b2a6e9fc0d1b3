"""Counts the memory that PyTorch's operations on meta tensors would allocate."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")
# PyTorch's caching allocator rounds up to multiples of 512 bytes, and above 1 MiB adds up to 1 MiB more.
BLOCK, LARGE = 512, 1 << 20
SORT_BYTES = 24  # scratch of torch.sort per element: indices and CUB's temporary storage


class Allocation(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int


class LimitExceeded(Exception):
    pass


class MemoryCounter(TorchDispatchMode):
    """Counts the memory that operations on meta tensors would allocate."""

    def __init__(self):
        super().__init__()
        self.ignored: set[int] = set()  # storages that are not counted
        self.held: dict[int, tuple[StorageWeakRef, Allocation]] = {}
        self.peak, self.at_peak, self.limit = 0, [], math.inf
        self.calls = 1  # how often the current launch is repeated

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # with `out`, the result exists already and nothing reads its values: skip the operation
        result = kwargs["out"] if "out" in kwargs else func(*args, **kwargs)
        self.record_call(func, args, result)
        self.count(tensors_of(result), SORT_BYTES * args[0].numel() if func.overloadpacket.__name__ == "sort" else 0)
        return result

    def ignore(self, *tensors: Tensor | None) -> None:
        self.ignored |= {t.untyped_storage()._cdata for t in tensors if t is not None}

    def record_call(self, func, args, result) -> None:
        """Hook for subclasses."""

    def count(self, results: list[Tensor], scratch: int) -> None:
        stored = {t.untyped_storage()._cdata: t for t in results}
        new = [key for key in stored if key not in self.ignored and key not in self.held]
        if not new and not scratch:
            return
        self.held = {key: pair for key, pair in self.held.items() if not pair[0].expired()}
        for key in new:
            storage, t = stored[key].untyped_storage(), stored[key]
            allocation = Allocation(tuple(t.shape), t.dtype, self.allocation_size(storage.nbytes()))
            self.held[key] = StorageWeakRef(storage), allocation
        total = sum(held.bytes for _, held in self.held.values()) + scratch
        if total > self.limit:
            raise LimitExceeded
        if total > self.peak:
            self.peak, self.at_peak = total, [held for _, held in self.held.values()]

    def allocation_size(self, size: int) -> int:
        return -(-size // BLOCK) * BLOCK + (LARGE if size > LARGE else 0)


def tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
