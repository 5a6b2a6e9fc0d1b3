"""Memory that the launches of linear cross entropy share: exp_logits and the RowState."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from quackish.device.arguments import by_name
from quackish.device.cuda import address
from quackish.device.kernel_device import KernelDevice
from quackish.ops.linear_cross_entropy import row_state
from quackish.ops.linear_cross_entropy.row_problems import ExpLogitsArgs
from quackish.ops.linear_cross_entropy.row_state import RowStateParts

I32, F32 = torch.int32, torch.float32


def padded_matrix(device: KernelDevice, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A matrix whose rows are aligned to 128 bytes."""
    if columns % 8:  # kernels read 16 bytes at a time: the last row needs allocated padding
        return padded_matrix(device, rows, -(-columns // 8) * 8, dtype)[:, :columns]
    return device.empty((rows, columns), padded_strides(columns), dtype)


def padded_strides(columns: int) -> tuple[int, int]:
    return -(-columns // 64) * 64, 1


def view_into(owner: Tensor, offset: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A matrix `offset` bytes into the storage of `owner`, which is contiguous at storage offset 0."""
    if owner.dtype != dtype:
        owner = owner.view(-1).view(dtype)
    return owner.as_strided((rows, columns), (columns, 1), offset // dtype.itemsize)


def row_slice(t: Tensor, first: int, last: int) -> Tensor:
    """t[first:last]; t itself if that is all of it, because slicing takes a microsecond."""
    return t if last - first == t.shape[0] else t[first:last]


class ExpLogits(NamedTuple):
    """exp_logits or dlogits of a chunk: one matrix, or two that split its columns."""

    first: Tensor | None  # (rows, split) bf16; (rows, v) if `second` is None; None: not stored
    split: int = 0
    second: Tensor | None = None  # (rows, v - split)

    def rows(self, n: int) -> "ExpLogits":
        """The first n rows."""
        if self.first is None or n == self.first.shape[0]:
            return self
        return ExpLogits(self.first[:n], self.split, None if self.second is None else self.second[:n])

    def blocks(self, v: int) -> list[tuple[Tensor | None, int, int]]:
        """(matrix, first class, end of its classes) of each matrix."""
        if self.second is None:
            return [(self.first, 0, v)]
        return [(self.first, 0, self.split), (self.second, self.split, v)]

    def args(self) -> ExpLogitsArgs:
        first, second = self.first, self.second
        return by_name(ExpLogitsArgs)(
            first=first.data_ptr(), second=address(second), first_stride=first.stride(0),
            second_stride=0 if second is None else second.stride(0), split=self.split,
        )  # fmt: skip


NOT_STORED = ExpLogits(None)


# PyTorch's allocator returns the same addresses in each step.
_parts_at = functools.lru_cache(maxsize=1024)(row_state.parts_at)
_DTYPES = {name: getattr(torch, part.dtype) for name, part in row_state.DESCRIPTIONS._asdict().items()}


class RowState(NamedTuple):
    """Numbers per row in one allocation, and the addresses of its parts. Forward fills it, backward reads it."""

    memory: Tensor  # (row_state.size(m, return_stats),) int32
    m: int
    parts: RowStateParts

    @classmethod
    def new(cls, device: KernelDevice, m: int, return_stats: bool = False) -> "RowState":
        """Uninitialized state for m rows."""
        return cls.from_memory(device.vector(row_state.size(m, return_stats), I32), m)

    @classmethod
    def from_memory(cls, memory: Tensor, m: int) -> "RowState":
        return cls(memory, m, _parts_at(memory.data_ptr(), m))

    @property
    def address(self) -> int:
        return self.parts.tickets

    def tensor(self, name: str, n: int | None = None) -> Tensor:
        """The first n numbers of a part, by default m."""
        first = (getattr(self.parts, name) - self.address) // 4
        return self.memory[first : first + (self.m if n is None else n)].view(_DTYPES[name])
