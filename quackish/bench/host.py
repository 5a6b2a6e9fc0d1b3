"""What work costs the host: how long it keeps the Python thread busy, until all is enqueued."""

import gc
import time
from collections.abc import Callable, Mapping

import torch

from quackish.testing.timing import Times


def host_times(works: Mapping[str, Callable], device: torch.device, repeats: int = 100) -> dict[str, Times]:
    """Microseconds until all is enqueued, the GPU never being waited for; in turns."""
    samples: dict[str, list[float]] = {name: [] for name in works}
    gc.collect()
    gc.disable()  # a collection in the middle would be the slowest part
    try:
        for i in range(repeats + 5):
            for name, work in works.items():
                start = time.perf_counter()
                work()
                if i >= 5:
                    samples[name].append(1e6 * (time.perf_counter() - start))
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
    finally:
        gc.enable()
    return {name: Times.of(times) for name, times in samples.items()}
