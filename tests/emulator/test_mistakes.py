"""Mistakes in device code that the emulator must notice: a GEMM's PTX, changed in one place.

The kernel has most of what goes wrong on Hopper: a pipeline of TMA loads with multicast to the CTAs of a cluster, wgmma
in two warp groups that alternate, named barriers, and stores through shared memory.
"""

import dataclasses
import functools
import itertools
import re
from typing import NamedTuple

import pytest
import torch

import quackish
from quackish import emulation, emulator
from quackish.device.kernel_device import KernelDevice, device_of, substitute
from quackish.device.kernel_for import CompiledKernel, request_for
from quackish.gpu import H200
from quackish.testing.errors import error
from tests.variants import one_per

ONE_CLUSTER = dataclasses.replace(H200, sm_count=2)
SEEDS = range(4)
AT_ONCE, LATE = "at_once", "late"


class Mistake(NamedTuple):
    pattern: str  # of the PTX
    index: int  # which of the places where it matches
    replacement: str
    noticed: str  # what a Fault says; WRONG: wrong numbers
    completion: str = LATE


WRONG = "wrong numbers"
DEADLOCK = "deadlock: no thread can go on"
RACE = "race: "
IN_FLIGHT = "a register of a wgmma that may not be complete is accessed"

MATRICES = r"(wgmma\.mma_async[^;]*\}), (%rd\d+), (%rd\d+),"
LOAD_MULTICAST = (
    r"(cp\.async\.bulk\.tensor\S*multicast\S* \[[^]]*\], \[%rd\d+, \{%r\d+), (%r\d+)(\}\], \[%r\d+\]), (%rs\d+)"
)
FIRST_WGMMA = r"(wgmma\.mma_async[^{]*\{(%r\d+),)"
TRY_WAIT = r"mbarrier\.try_wait\.\S+ (\w+), [^;]*;"
SKIP = r"setp.eq.u32 \1, 0, 0;"
EXPECT = r"(mbarrier\.arrive\.expect_tx\.[^;]*), %r\d+;"
RELEASE = r"mbarrier\.arrive\.shared::cluster\.[^;]*;"
BYTES = 2 * 64 * (128 + 128)  # of a stage

MISTAKES = {
    "descriptor of the other matrix": Mistake(MATRICES, 0, r"\1, \2, \2,", WRONG, AT_ONCE),
    "descriptor outside of shared memory": Mistake(MATRICES, 0, r"\1, \2, 0x3fff,", "access of shared memory"),
    "descriptor with reserved bits": Mistake(MATRICES, 0, r"\1, \2, 0x8000,", "reserved bits"),
    "coordinate of another tile": Mistake(LOAD_MULTICAST, 0, r"\1, 0\3, \4", WRONG, AT_ONCE),
    "multicast to one CTA of two": Mistake(LOAD_MULTICAST, 0, r"\1, \2\3, 1", DEADLOCK, AT_ONCE),
    "multicast to a CTA that the cluster lacks": Mistake(LOAD_MULTICAST, 0, r"\1, \2\3, 7", "rank 2 in a cluster of 2"),
    "stage of the loop never released": Mistake(RELEASE, 0, "", DEADLOCK, AT_ONCE),
    "last stage of a tile never released": Mistake(RELEASE, 1, "", DEADLOCK, AT_ONCE),
    "no wait for a free stage": Mistake(TRY_WAIT, 0, SKIP, "1 arrivals at an mbarrier that expects 0 more"),
    "no wait for a tile's first loaded stage": Mistake(TRY_WAIT, 7, SKIP, RACE, AT_ONCE),
    "no wait for a loaded stage": Mistake(TRY_WAIT, 8, SKIP, RACE),
    "producer keeps registers that the consumers take": Mistake(
        r"(setmaxnreg\.dec\.sync\.aligned\.u32\s+)24;", 0, r"\g<1>32;", "waits for registers", AT_ONCE
    ),
    "too few bytes expected": Mistake(EXPECT, 0, rf"\1, {BYTES - 16};", DEADLOCK),
    "too many bytes expected": Mistake(EXPECT, 0, rf"\1, {BYTES + 16};", "16 bytes pending", AT_ONCE),
    "stage released while wgmma reads it": Mistake(r"wgmma\.wait_group\.sync\.aligned\s+1;", 0, "", RACE),
    "no wait for the last wgmma": Mistake(r"wgmma\.wait_group\.sync\.aligned\s+0;", 0, "", IN_FLIGHT),
    "wgmma not committed": Mistake(r"wgmma\.commit_group\.sync\.aligned;", 1, "", RACE),
    "accumulator changed between its fence and wgmma": Mistake(
        FIRST_WGMMA, 0, r"add.f32 \2, \2, 0f00000000; \1", "a wgmma needs a wgmma.fence before it", AT_ONCE
    ),
    "first wgmma of a tile without a fence of its registers": Mistake(
        r"wgmma\.fence\.sync\.aligned;", 0, "", "a wgmma needs a wgmma.fence before it", AT_ONCE
    ),
    "bounds of groups read before all are written": Mistake(r"bar\.sync\s+0;", 0, "", RACE, AT_ONCE),
    "warp groups do not alternate": Mistake(r"bar\.sync\s+%r\d+, 256;", 0, "", RACE, AT_ONCE),
    "tile written while it is stored": Mistake(r"bar\.sync\s+%r\d+, 128;", 0, "", "barrier-phase"),
    "tile stored while it is written": Mistake(r"bar\.sync\s+%r\d+, 128;", 1, "", RACE),
    "cluster's barriers used before they are initialized": Mistake(
        r"barrier\.cluster\.wait;", 0, "", "may use an mbarrier before its mbarrier.init"
    ),
    "cluster's barriers initialized without a fence": Mistake(
        r"fence\.mbarrier_init\.release\.cluster;", 0, "", "may use an mbarrier before its mbarrier.init", AT_ONCE
    ),
    "tile written while TMA reads it": Mistake(r"cp\.async\.bulk\.wait_group\.read\s+1;", 0, "", RACE, AT_ONCE),
    "tile stored without a fence of the async proxy": Mistake(
        r"fence\.proxy\.async\.shared::cta;", 0, "", "no fence.proxy.async is between", AT_ONCE
    ),
}  # fmt: skip


@functools.cache
def operands():
    """(a, b, ends of groups, a @ b in fp64). More groups than a warp has threads, more steps than stages."""
    torch.manual_seed(0)
    groups, k, n = 36, 576, 256
    a, b = torch.randn(200, k).bfloat16(), torch.randn(groups, n, k).bfloat16()
    ends = torch.full((groups,), 120, dtype=torch.int32)
    ends[0], ends[-1] = 100, len(a)
    parts = [
        a[begin:end].double() @ b[group].double().T
        for begin, end, group in ((0, 100, 0), (100, 120, 1), (120, 200, -1))
    ]
    return a, b.transpose(1, 2), ends, torch.cat(parts)


def changed(ptx, mistake):
    match = list(re.finditer(mistake.pattern, ptx))[mistake.index]
    return ptx[: match.start()] + match.expand(mistake.replacement) + ptx[match.end() :]


@functools.cache
def kernel_with(mistake):
    """KernelDevice.kernel_for, with one mistake or none."""

    @functools.cache
    def kernel_for(problem, gpu):
        request = request_for(problem, gpu)
        exported = emulation._obtain(request)
        if mistake:
            exported = exported._replace(ptx=changed(exported.ptx, mistake))
        return CompiledKernel(emulator.Kernel(exported, gpu, problem.spec.name), request.config)

    return kernel_for


def multiply(mistake, completion, seed, launches=1):
    """The mean relative error of some launches that compute a @ b."""
    a, b, ends, truth = operands()
    device = KernelDevice(ONE_CLUSTER, kernel_with(mistake), emulation._empty, must_cover=True)
    with emulator.record(completion, seed), substitute("cpu", device):
        return sum(error(quackish.grouped_mm(a, b, ends).double(), truth).norm for _ in range(launches)) / launches


def outcome(mistake, seed):
    try:
        return "right numbers" if multiply(mistake, mistake.completion, seed) < 0.003 else WRONG
    except emulator.Fault as fault:
        return str(fault)


@pytest.mark.parametrize(
    "completion, seed", one_per(lambda completion, seed: completion, itertools.product([AT_ONCE, LATE], SEEDS))
)
def test_the_right_kernel_has_no_fault(completion, seed):
    assert multiply(None, completion, seed) < 0.003


def test_a_move_needs_no_fence():
    """Compilers put moves of accumulators in front of wgmma, and assemblers remove them."""
    assert multiply(Mistake(FIRST_WGMMA, 0, r"mov.b32 \2, \2; \1", ""), LATE, 0) < 0.003


@pytest.mark.parametrize("name", one_per(lambda name: MISTAKES[name].noticed, MISTAKES))
def test_a_mistake_is_noticed(name):
    mistake = MISTAKES[name]
    outcomes = []
    for seed in SEEDS:
        outcomes.append(outcome(mistake, seed))
        if mistake.noticed in outcomes[-1]:
            return
    pytest.fail("\n\n".join(outcomes))


@pytest.mark.exhaustive
def test_a_launch_waits_for_the_one_before():
    mistake = Mistake(r"griddepcontrol\.wait;", 0, "", "")
    for case, launches in (None, 2), (mistake, 1):
        assert multiply(case, AT_ONCE, 0, launches) < 0.003
    with pytest.raises(emulator.Fault, match=r"griddepcontrol.wait(.|\n)*launch 1"):
        multiply(mistake, AT_ONCE, 0, launches=2)


@pytest.mark.exhaustive
def test_a_fault_says_how_to_repeat_it(source_lines):
    """It gives the call that the user made, and everything that the run depends on."""
    a, b, ends, _ = operands()
    broken = kernel_with.__wrapped__(MISTAKES["stage of the loop never released"])  # compiled with source lines
    with quackish.emulate("h100", AT_ONCE, seed=7):
        device = dataclasses.replace(device_of(torch.device("cpu")), kernel_for=broken, cache={})
        with substitute("cpu", device), pytest.raises(emulator.Fault) as fault:
            quackish.grouped_mm(a, b, ends)
    for part in (
        "3 CTAs, (0, 1, 0), (0, 1, 1), (0, 1, 2), rank 1 of their clusters, warp 0 of each: waits for",
        "8 arrivals and 0 bytes pending", "PTX line",
        "grouped_sm90.py:", "kernel grouped_gemm", "H100 with 132 SMs",
        "with quackish.emulate(gpu='h100', completion='at_once', seed=7)",
    ):  # fmt: skip
        assert part in str(fault.value), (part, str(fault.value))
