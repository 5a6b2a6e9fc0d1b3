"""Steps on a GPU: captured in a CUDA graph, or without host synchronization."""

import contextlib

import torch


def captured(step):
    """(a CUDA graph of `step`, the results that a replay overwrites), after two runs that compile and allocate."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


@contextlib.contextmanager
def no_synchronization():
    """Raises if the code synchronizes with the host."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
