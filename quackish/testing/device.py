"""Test conditions on a device: poisoned free memory, and work on another stream."""

import contextlib
from collections.abc import Iterator

import torch


def poison_free_memory(device: torch.device | str = "cuda", nbytes: int = 64 << 20) -> None:
    """Fills about `nbytes` of free memory with NaN (0xFF bytes), for the next allocations.

    CUDA's caching allocator has pools for small and large requests; both are filled.
    """
    is_cuda = torch.device(device).type == "cuda"
    if is_cuda:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    sizes = [512] * 2048 + [64 << 10] * 64 + [1 << 20] * 16 + [nbytes // 4] * 4
    filled = [torch.full((size,), 255, dtype=torch.uint8, device=device) for size in sizes]
    if is_cuda:
        torch.cuda.synchronize(device)
    del filled


@contextlib.contextmanager
def other_work(device: torch.device | str = "cuda", launches: int = 200) -> Iterator[None]:
    """Keeps another stream of a GPU busy with matmuls for most of the block."""
    if torch.device(device).type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    a = torch.ones(2048, 2048, device=device, dtype=torch.bfloat16)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(launches):
            torch.mm(a, a)
    try:
        yield
    finally:
        torch.cuda.synchronize(device)
