"""Blackwell's tensor cores and tensor memory in the emulator: a small GEMM, and mistakes in its PTX.

tests/emulator/forms.py has each instruction by itself.
"""

import dataclasses
import functools
import re
from typing import NamedTuple

import pytest
import torch

from quackish import emulation, emulator
from quackish.device.compile import Request
from quackish.emulator import Fault
from quackish.gpu import B200
from tests.emulator import forms
from tests.emulator.test_forms import emulate
from tests.emulator.toy_tcgen05 import Gemm, GemmConfig, GemmProblem
from tests.variants import one_per

AT_ONCE, LATE = "at_once", "late"
CLUSTERS = 2
M, N, K = 260, 128, 136  # 6 tiles, or 4 of two CTAs: several for each cluster, and rows and depth have a tail


@functools.cache
def exported(ctas):
    return emulation._obtain(Request(Gemm, GemmProblem(), GemmConfig(ctas), "sm_100a"))


@functools.cache
def operands():
    """(a, b, a @ b.T): integers, so that sums are exact in any order."""
    torch.manual_seed(0)
    a, b = (torch.randint(-3, 4, (rows, K)).bfloat16() for rows in (M, N))
    return a, b, (a.double() @ b.double().T).float()


def multiply(ctas, completion, seed, change=lambda ptx: ptx):
    """(whether the product is right, the report)."""
    a, b, truth = operands()
    d = torch.full((M, N), float("nan"))
    code = exported(ctas)
    kernel = emulator.Kernel(code._replace(ptx=change(code.ptx)), B200, "toy_tcgen05")
    with emulator.record(completion, seed) as report:
        kernel(a.data_ptr(), b.data_ptr(), d.data_ptr(), M, N, K, CLUSTERS, 0)
    return torch.equal(d, truth), report


@pytest.mark.parametrize("ctas", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_a_gemm_is_right_and_its_counts_are_the_same(ctas):
    counts = set()
    for completion, seed in (AT_ONCE, 0), (LATE, 0), (LATE, 1), (LATE, 2):
        right, report = multiply(ctas, completion, seed)
        assert right, (completion, seed)
        assert not report.findings
        (launch,) = report.launches
        counts.add((launch.mmas, launch.flops, launch.barrier_phases, launch.bytes_read, launch.tensor_memory_columns))
    ((mmas, flops, *_, columns),) = counts
    tiles = -(-M // (128 * ctas)) * -(-N // 64)
    assert (mmas, flops, columns) == (tiles * 3 * 4, tiles * 3 * 4 * 2 * 128 * ctas * 64 * 16, 64)


class Mistake(NamedTuple):
    pattern: str  # of the PTX
    index: int  # which of the places where it matches
    replacement: str
    noticed: str  # what a Fault says; WRONG: wrong numbers
    completion: str = LATE
    ctas: int = 1


WRONG = "wrong numbers"
RACE = "tensor memory, column 0 of lanes"
DEADLOCK = "deadlock: no thread can go on"
PRODUCT = r"(tcgen05\.mma\S*) \[(%r\d+)\], (%rd\d+), (%rd\d+), (%r\d+), (\{[^}]*\}, %p\d+);"
COMMIT = r"tcgen05\.commit\.[^;\[]*(\[[^\]]*\])[^;]*;"
LOAD = r"(tcgen05\.ld[^;]*)\[(%r\d+)\];"
ALLOCATION = r"(mov\.b32\s+%r\d+), 64;(\s+(?:\.loc[^\n]*\s+)?tcgen05\.alloc)"
RELEASE = r"mbarrier\.arrive\.shared[^;]*;"
TRY_WAIT = r"mbarrier\.try_wait\.\S+ (\w+), [^;]*;"
SKIP = r"setp.eq.u32 \1, 0, 0;"


def product(a=r"\3", b=r"\4", descriptor=r"\5", d=r"\2", rest=r"\6"):
    return rf"\1 [{d}], {a}, {b}, {descriptor}, {rest};"


def with_descriptor(operation):
    """The product with another instruction descriptor."""
    return "{ .reg .b32 %changed; " + operation.replace("D", r"\5") + "; " + product(descriptor="%changed") + "}"


MISTAKES = {
    "stage never released": Mistake(COMMIT, 0, "", DEADLOCK),
    "accumulator never announced": Mistake(COMMIT, 1, "", DEADLOCK),
    "accumulator announced at once": Mistake(
        COMMIT, 1, r"{ .reg .b64 %state; mbarrier.arrive.shared.b64 %state, \1; }", RACE
    ),
    "descriptor of the other matrix": Mistake(PRODUCT, 0, product(b=r"\3"), WRONG, AT_ONCE),
    "descriptor without its constant": Mistake(PRODUCT, 0, product(a="0x4000004000010000"), "must be 0b001"),
    "descriptor of an invalid swizzle": Mistake(PRODUCT, 0, product(a="0x6000404000010000"), "Values 3, 5 and 7"),
    "descriptor outside of shared memory": Mistake(
        PRODUCT, 0, product(a="0x4000404000013fff"), "access of shared memory"
    ),
    "instruction of fp16": Mistake(PRODUCT, 0, with_descriptor("xor.b32 %changed, D, 0x480"), WRONG, AT_ONCE),
    "instruction of fewer columns": Mistake(
        PRODUCT, 0, with_descriptor("xor.b32 %changed, D, 0x180000"), "nothing wrote"
    ),
    "instruction of columns beyond the allocation": Mistake(
        PRODUCT, 0, with_descriptor("xor.b32 %changed, D, 0x80000"), "columns 0 to 95"
    ),
    "instruction of half the rows": Mistake(
        PRODUCT, 0, with_descriptor("xor.b32 %changed, D, 0xc000000"), "nothing wrote"
    ),
    "instruction with a reserved bit": Mistake(
        PRODUCT, 0, with_descriptor("or.b32 %changed, D, 0x40"), "reserved bits set"
    ),
    "instruction of types that the kind lacks": Mistake(
        PRODUCT, 0, with_descriptor("or.b32 %changed, D, 0x100"), "types that .kind::f16 lacks"
    ),
    "accumulator not allocated": Mistake(PRODUCT, 0, product(d=r"\2+32"), "columns 32 to 95"),
    "accumulator at an odd lane": Mistake(PRODUCT, 0, product(d=r"\2+0x200000"), "into lane 32"),
    "first product adds": Mistake(PRODUCT, 0, product(rest=r"{0, 0, 0, 0}, 1"), "adds to tensor memory"),
    "lanes disabled": Mistake(PRODUCT, 0, product(rest=r"{0, 4, 0, 0}, 0"), WRONG, AT_ONCE),
    "group of another size": Mistake(r"tcgen05\.mma\.cta_group::1", 0, "tcgen05.mma.cta_group::2", "operands fit none"),
    "quarter of another warp": Mistake(LOAD, 0, r"\1[\2+0x200000];", "its lanes are"),
    "column of another tile": Mistake(LOAD, 0, r"\1[\2+1];", "columns 1 to 64"),
    "accumulator released before it is loaded": Mistake(r"tcgen05\.wait::ld\.sync\.aligned;", 0, "", RACE, AT_ONCE),
    "accumulator read before it is announced": Mistake(TRY_WAIT, 6, SKIP, "nothing wrote", AT_ONCE),
    "wait for the last stages with a parity that never changes": Mistake(
        r"xor\.b32\s+(%r\d+), (%r\d+), %r\d+;", 1, r"mov.b32 \1, \2;", "barrier-phase: a wait has passed"
    ),
    "accumulator never released": Mistake(RELEASE, 0, "", DEADLOCK),
    "allocation of a size that is no power of 2": Mistake(ALLOCATION, 0, r"\1, 96;\2", "alloc of 96 columns"),
    "allocation too small": Mistake(ALLOCATION, 0, r"\1, 32;\2", "access of tensor memory"),
    "allocation after the permit is relinquished": Mistake(
        r"(tcgen05\.alloc[^;]*;)([^;]*)(tcgen05\.relinquish[^;]*;)", 0, r"\3\2\1", "after tcgen05.relinquish"
    ),
    "never freed": Mistake(r"tcgen05\.dealloc[^;]*;", 0, "", "exits without tcgen05.dealloc"),
    "another size freed": Mistake(
        r"(tcgen05\.dealloc\S*\s+%r\d+), %r\d+;", 0, r"\1, 32;", "dealloc of 32 columns at 0"
    ),
    "freed twice": Mistake(r"tcgen05\.dealloc[^;]*;", 0, r"\g<0> \g<0>", "it has allocated none"),
    "one CTA of a pair never frees": Mistake(
        r"tcgen05\.dealloc[^;]*;", 0, r"{ .reg .pred %odd; setp.ne.u32 %odd, %cluster_ctarank, 0; @%odd bra skip;"
        r" \g<0> skip: }", "exits without tcgen05.dealloc", LATE, 2
    ),
    "announced to one CTA of a pair": Mistake(
        r"(tcgen05\.commit[^;]*), %rs\d+;", 1, r"\1, 1;", DEADLOCK, LATE, 2
    ),
    "loads of a pair signal two CTAs": Mistake(
        r"and\.b32\s+(%r\d+), (%r\d+), -16777224;", 0, r"mov.b32 \1, \2;", DEADLOCK, LATE, 2
    ),
}  # fmt: skip


def outcome(mistake, seed):
    def change(ptx):
        match = list(re.finditer(mistake.pattern, ptx))[mistake.index]
        return ptx[: match.start()] + match.expand(mistake.replacement) + ptx[match.end() :]

    try:
        right, _ = multiply(mistake.ctas, mistake.completion, seed, change)
        return "right numbers" if right else WRONG
    except (emulator.Fault, emulator.PtxError) as error:
        return str(error)


@pytest.mark.parametrize("name", one_per(lambda name: MISTAKES[name].noticed, MISTAKES))
def test_a_mistake_is_noticed(name):
    mistake = MISTAKES[name]
    outcomes = []
    for seed in range(4):
        outcomes.append(outcome(mistake, seed))
        if mistake.noticed in outcomes[-1]:
            return
    pytest.fail("\n\n".join(outcomes))


def test_a_relaxed_wait_for_products():
    """What a product has read may be overwritten; what the epilogue has read, behind a fence of tcgen05."""

    def relaxed(ptx):
        ptx = re.sub(r"(mbarrier\.try_wait\.parity)(\.shared)", r"\1.relaxed.cluster\2", ptx)
        return re.sub(r"(mbarrier\.arrive)(\.shared)", r"\1.relaxed.cluster\2", ptx)

    assert multiply(1, LATE, 0, relaxed)[0]
    with pytest.raises(Fault, match=RACE):
        multiply(1, LATE, 0, lambda ptx: ptx_without_fences(relaxed(ptx)))


def ptx_without_fences(ptx):
    return ptx.replace("tcgen05.fence::before_thread_sync;", "")


def test_one_address_for_all_warps_is_formal():
    same = "{ .reg .b32 %same; and.b32 %same, \\2, 0xffff; \\1[%same]; }"
    right, report = multiply(1, LATE, 0, lambda ptx: re.sub(LOAD, same, ptx))
    assert right
    assert {(finding.rule, finding.severity) for finding in report.findings} == {
        ("tensor-memory-first-lanes", "formal")
    }


def test_lanes_of_the_first_warp_mean_the_warps_own():
    (form,) = forms.isa.load()["tcgen05.ld.sync.aligned.32x32b.x2.b32"]
    (case,) = forms.cases_of(form)
    own, same = "and.b32 %mine, %w, 96;", "and.b32 %mine, %w, 0;"
    assert own in case.body
    assert not case.differences(emulate(dataclasses.replace(case, body=case.body.replace(own, same))))


FENCES = {
    "before_thread_sync in front of": r"tcgen05\.fence::before_thread_sync;",  # at the epilogue's release
    "after_thread_sync behind": r"tcgen05\.fence::after_thread_sync;",  # at its wait, the last one
}


@pytest.mark.parametrize("missing", one_per(lambda missing: 0, FENCES))
def test_barriers_that_hand_over_tensor_memory_need_fences(missing):
    """Cards run this kernel without them: the right numbers come with a finding."""

    def changed(ptx):
        fence = list(re.finditer(FENCES[missing], ptx))[-1]
        return ptx[: fence.start()] + ptx[fence.end() :]

    for completion in AT_ONCE, LATE:
        right, report = multiply(2, completion, 0, changed)
        assert right
        assert {(finding.rule, finding.severity) for finding in report.findings} == {("tensor-memory-fence", "formal")}
        assert all(f"no tcgen05.fence::{missing} the barrier" in finding.message for finding in report.findings)
