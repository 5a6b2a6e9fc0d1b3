"""Tickets and scratch memory of kernels, by stream and in captures, on a simulated GPU."""

import itertools

import pytest
import torch

from quackish.device import workspace
from quackish.kernels.gemm.problem import NUM_TICKETS


@pytest.fixture
def device(monkeypatch):
    """workspace.py on a simulated GPU."""

    class Device:
        stream, capturing = 1, False

        def take(self, index, scratch_floats, *num_tickets):
            return workspace.take(index, self.stream, scratch_floats, *num_tickets)

        def new_reserve(self, index):
            assert not self.capturing
            zeros = torch.zeros(workspace._RESERVE * 32, dtype=torch.int32)
            workspace._reserve_memory.append(zeros)
            return iter(range(zeros.data_ptr(), zeros.data_ptr() + zeros.nbytes, 128))

    def on_cpu(make):
        return lambda *args, device=None, **options: make(*args, **options)

    d = Device()
    for owner, name, value in (
        (workspace, "_workspaces", {}),
        (workspace, "_reserves", {}),
        (workspace, "_reserve_memory", []),
        (workspace, "_RESERVE", 4),
        (workspace, "_MAX_STREAMS", 8),
        (workspace, "_new_reserve", d.new_reserve),
        (workspace.cuda, "is_capturing", lambda: d.capturing),
        (torch.cuda, "current_stream", lambda index: None),
        (torch, "zeros", on_cpu(torch.zeros)),
        (torch, "empty", on_cpu(torch.empty)),
    ):
        monkeypatch.setattr(owner, name, value)
    return d


def test_each_stream_has_its_own_workspace(device):
    first = device.take(0, 100)
    tickets = workspace.MAX_TICKETS
    assert first[2][:tickets].tolist() == [0] * tickets
    assert first[:2] == (first[2].data_ptr(), first[2].data_ptr() + 4 * tickets)
    assert device.take(0, 100)[:2] == device.take(0, 1)[:2] == first[:2]
    device.stream = 2
    second = device.take(0, 100)
    other = device.take(1, 100)
    assert len({*first[:2], *second[:2], *other[:2]}) == 6
    device.stream = 1
    assert device.take(0, 100)[:2] == first[:2]
    assert len(workspace._reserve_memory) == 2  # one per device


def test_scratch_grows_and_stays_alive_until_the_launch(device):
    taken = [device.take(0, floats) for floats in (65, 128, 129, 300, 70, 512)]
    assert [len(t[2]) - workspace.MAX_TICKETS for t in taken] == [128, 128, 256, 512, 512, 512]
    assert len({t[0] for t in taken}) == 3  # earlier ones stay alive until their launch
    assert all(t[2].data_ptr() == t[0] for t in taken)


def test_number_of_workspaces_is_bounded(device):
    for device.stream in range(100):
        device.take(0, 100)
        assert len(workspace._workspaces) <= 8
    assert len(workspace._reserve_memory) == 1


def test_captured_launch_has_its_own_tickets_and_scratch(device):
    eager = device.take(0, 100)
    device.capturing = True
    taken = [device.take(0, 100) for _ in range(3)]
    assert [b[0] - a[0] for a, b in itertools.pairwise(taken)] == [128] * 2
    assert len({t[1] for t in (eager, *taken)}) == 4
    for _, scratch, kept in taken:
        assert kept[1].data_ptr() == scratch
        assert len(kept[1]) == 100
    assert NUM_TICKETS <= workspace.MAX_TICKETS  # what a GEMM takes
    many = device.take(0, 4, workspace.MAX_TICKETS)  # more than the reserve has for a launch
    assert many[0] == many[2][0].data_ptr()
    assert many[2][0].tolist() == [0] * workspace.MAX_TICKETS
    device.capturing = False
    assert device.take(0, 100)[:2] == eager[:2]


def test_capture_without_reserve_allocates_tickets(device):
    device.capturing = True
    address, _, (zeros, _) = device.take(0, 4)  # the first launch
    assert zeros.data_ptr() == address
    assert zeros.tolist() == [0] * 32
    device.capturing = False
    device.take(0, 4)
    device.capturing = True
    assert [device.take(0, 4)[2][0] is None for _ in range(5)] == [True] * 4 + [False]  # used up
