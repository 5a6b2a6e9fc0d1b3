"""What GPU tests do to the device around a call: poisoned memory, other work."""

import contextlib
from collections.abc import Iterator

import torch


def poison_free_memory(device: torch.device | str = "cuda", nbytes: int = 64 << 20) -> None:
    """Leaves NaN (0xFF in every byte) in what the caching allocator hands out next, up to about `nbytes`.

    Large and small requests come from different pools, so both are filled.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    sizes = [512] * 2048 + [64 << 10] * 64 + [1 << 20] * 16 + [nbytes // 4] * 4
    filled = [torch.full((size,), 255, dtype=torch.uint8, device=device) for size in sizes]
    torch.cuda.synchronize(device)
    del filled


@contextlib.contextmanager
def other_work(device: torch.device | str = "cuda", launches: int = 200) -> Iterator[None]:
    """Keeps another stream of the device busy with matrix products while the block runs, or for most of it."""
    stream = torch.cuda.Stream(device)
    a = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(launches):
            torch.mm(a, a)
    try:
        yield
    finally:
        torch.cuda.synchronize(device)
