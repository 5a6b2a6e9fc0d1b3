"""Memory of linear cross entropy's schedules: allocated on the device of a tensor that is given, nothing written."""

import torch
from torch import Tensor

from quackish.ops import cuda


def empty(like: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if like.is_cuda:  # the current device, which is like's
        return cuda.empty(shape, strides, dtype)
    return like.new_empty_strided(shape, strides, dtype=dtype)


def vector(like: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    return empty(like, (n,), (1,), dtype)


def matrix(like: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return empty(like, (rows, columns), (columns, 1), dtype)


def padded(like: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    if columns % 8:  # the last row's padding is memory too: it is read, 16 bytes at a time, not used
        return padded(like, rows, -(-columns // 8) * 8, dtype)[:, :columns]
    return empty(like, (rows, columns), padded_strides(columns), dtype)


def inside(of: Tensor, offset: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A matrix `offset` bytes into the storage that `of`, contiguous, has for itself."""
    if of.dtype != dtype:
        of = of.view(-1).view(dtype)
    return of.as_strided((rows, columns), (columns, 1), offset // dtype.itemsize)


def padded_strides(columns: int) -> tuple[int, int]:
    """Of E: its rows start on 128 bytes."""
    return -(-columns // 64) * 64, 1
