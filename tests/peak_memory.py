"""The peak of a step's memory on the CPU, as PyTorch's profiler counts it."""

import itertools

import torch


def taken(step):
    """The peak of the bytes that a step on the CPU allocates, including its results."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    del kept
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
