"""What emulator.record counts and traces on demand."""

import re

import numpy as np
import pytest
import torch

import quackish
from quackish import emulation, emulator
from quackish.device.kernel_device import KernelDevice, substitute
from quackish.device.kernel_for import CompiledKernel, request_for
from quackish.emulator.profile import bank_conflicts
from quackish.gpu import H200
from tests.emulator.ptx import kernel, record
from tests.emulator_cases import small

HEAD = '.file 1 "kernels/toy.py"\n.shared .align 128 .b8 buffer[4096];'
REGISTERS = ".reg .b32 %t, %s, %a, %v, %i; .reg .b64 %o; .reg .pred %p;"
BODY = """
.loc 1 9 0
mov.u32 %t, %tid.x; mov.u32 %s, buffer; mad.lo.u32 %a, %t, 8, %s;
mov.u32 %v, %ctaid.x; mad.lo.u32 %v, %v, 64, %t; mad.wide.u32 %o, %v, 4, %x; mov.u32 %i, 0;
LOOP:
.loc 1 10 0
ld.global.u32 %v, [%o];
st.shared.u32 [%a], %v;
.loc 1 11 0
add.u32 %i, %i, 1; setp.lt.u32 %p, %i, 3; @%p bra LOOP;
setp.lt.u32 %p, %t, 8;
.loc 1 12 0
@%p st.global.u32 [%o], %i;
"""


def run(**settings):
    text = kernel(BODY, "x", REGISTERS, HEAD)
    return record(text, np.zeros(128, np.uint32), block=(64, 1, 1), grid=(2, 1, 1), **settings)


def test_counts_of_each_line():
    """Two CTAs of two warps execute the loop three times. Stores at a stride of two words have conflicts of two."""
    (launch,) = run(profile=True).launches
    counts = {(row.line, row.opcode): row for row in launch.profile}
    load, store, last = (counts[key] for key in ((10, "ld.global.u32"), (10, "st.shared.u32"), (12, "st.global.u32")))
    assert [row.instructions for row in (load, store, last)] == [12, 12, 4]
    assert [row.global_bytes_read for row in (load, store, last)] == [12 * 128, 0, 0]
    assert [row.global_bytes_written for row in (load, store, last)] == [0, 0, 2 * 8 * 4]
    assert [row.shared_bytes_written for row in (load, store, last)] == [0, 12 * 128, 0]
    assert [row.bank_conflicts for row in (load, store, last)] == [0, 12, 0]
    assert counts[11, "bra"].file == "kernels/toy.py"
    assert sum(row.instructions for row in launch.profile) == launch.instructions
    assert run().launches[0].profile is None


LANES = np.arange(32)


@pytest.mark.parametrize(
    "offsets, size, conflicts",
    [
        (4 * LANES, 4, 0),
        (0 * LANES, 4, 0),  # one word
        (2 * LANES, 2, 0),
        (8 * LANES, 4, 1),
        (128 * LANES, 4, 31),
        (132 * LANES, 4, 0),
        (8 * LANES, 8, 0),
        (16 * LANES, 8, 2),  # of each half of the warp
        (16 * LANES, 16, 0),
        (32 * LANES, 16, 4),  # of each quarter
        (128 * LANES, 16, 28),
    ],
)
def test_bank_conflicts(offsets, size, conflicts):
    assert bank_conflicts(np.zeros(32, int), LANES, offsets, size) == conflicts
    warps = np.repeat([0, 3], 32)
    assert bank_conflicts(warps, np.tile(LANES, 2), np.tile(offsets, 2), size) == 2 * conflicts


def multiply():
    a, b = torch.ones(100, 64).bfloat16(), torch.ones(2, 64, 128).bfloat16()
    quackish.grouped_mm(a, b, torch.tensor([30, 100], dtype=torch.int32))


def normalize():
    x, w = torch.ones(20, 256).bfloat16().requires_grad_(), torch.ones(256).bfloat16().requires_grad_()
    quackish.rms_norm(x, w, eps=1e-6).sum().backward()


@pytest.mark.parametrize("call", [normalize, multiply])
@pytest.mark.parametrize("completion", ["at_once", pytest.param("late", marks=pytest.mark.exhaustive)])
def test_lines_sum_up_to_the_launch(call, completion):
    """With bulk copies, atomic operations and threads that poll."""

    def kernel_for(problem, gpu):
        request = request_for(problem, gpu)
        return CompiledKernel(emulation.load(request, gpu, problem.spec.name), request.config)

    device = KernelDevice(
        small(H200), kernel_for, emulation._empty, workspace=emulation.Workspace().take, must_cover=True
    )
    with emulator.record(completion, 0, profile=True) as report, substitute("cpu", device):
        call()
    for launch in report.launches:
        totals = [launch.bytes_read, launch.bytes_written, launch.instructions]
        names = "global_bytes_read", "global_bytes_written", "instructions"
        assert [sum(getattr(row, name) for row in launch.profile) for name in names] == totals
        for row in launch.profile:
            if shape := re.match(r"wgmma.mma_async.sync.aligned.m64n(\d+)k16", row.opcode):  # 32 bytes of each row
                assert row.shared_bytes_read == row.instructions // 4 * 32 * (64 + int(shape[1]))


ATOMIC = """
mov.u32 %t, %tid.x; mov.u32 %s, buffer; setp.eq.u32 %p, %t, 0; mad.wide.u32 %o, %t, 4, %x;
red.global.add.u32 [%o], 1;
atom.global.cas.b32 %v, [%o], 1, 2;
@!%p bra END;
st.shared.v4.u32 [%s], {%t, %t, %t, %t}; fence.proxy.async.shared::cta;
cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%x+256], [%s], 16;
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
END:
"""


def test_bytes_of_atomic_operations():
    """They read and write. atom.cas does not count."""
    report = record(kernel(ATOMIC, "x", REGISTERS, HEAD), np.zeros(128, np.uint32), block=(64, 1, 1), profile=True)
    (launch,) = report.launches
    read = {row.opcode: row.global_bytes_read for row in launch.profile if row.global_bytes_read}
    written = {row.opcode: row.global_bytes_written for row in launch.profile if row.global_bytes_written}
    assert (
        read
        == written
        == {
            "red.global.add.u32": 256,
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32": 16,
        }
    )
    assert launch.bytes_read == launch.bytes_written == 272


def test_the_trace_of_a_warp():
    report = run(trace=((1, 0, 0), 1))
    lines = [place.line for place in report.trace if place.line >= 10]
    assert lines == 3 * [10, 10, 11, 11, 11] + [11, 12, 12]  # the last is `ret`
    assert [place.execution for place in report.trace if place.instruction.startswith("ld.global")] == [1, 2, 3]
    assert {(place.cta, place.threads) for place in report.trace} == {((1, 0, 0), "warp 1")}
    assert run().trace == []
    with pytest.raises(ValueError, match=r"trace is \(0, 3\); expected \(CTA, warp\)"):
        run(trace=(0, 3))
