"""What a Fault says, in which fields, and which findings end a run."""

import dataclasses
import json
import re
import traceback
from pathlib import Path

import numpy as np
import pytest

from quackish import emulator
from quackish.emulator import Fault
from quackish.emulator.rules import FORMAL, RULES, SEVERITIES
from tests.emulator.ptx import kernel, record

DOCS = Path(__file__).parents[2] / "docs" / "emulator.md"
HEAD = '.file 1 "kernels/toy.py"\n.shared .align 128 .b8 buffer[2048];'
REGISTERS = ".reg .b32 %t, %s, %a, %b, %v, %i; .reg .b64 %o; .reg .pred %p, %first;"
BEGIN = "mov.u32 %t, %tid.x; mov.u32 %s, buffer; setp.eq.u32 %first, %t, 0; mad.lo.u32 %a, %t, 4, %s;\n"
# Each thread writes its number, and reads one of the other warp. Then it writes again.
RACES = """
.loc 1 10 0
st.shared.u32 [%a], %t;
xor.b32 %b, %t, 32; mad.lo.u32 %b, %b, 4, %s;
.loc 1 11 0
ld.shared.u32 %v, [%b];
bar.sync 0;
.loc 1 12 0
@%first st.shared.u32 [%s], 7;
.loc 1 13 0
ld.shared.u32 %v, [%s];
"""
# Two warps read what a third one writes.
TWO_READS = """
setp.ge.u32 %p, %t, 32; @%p bra OTHERS;
.loc 1 20 0
ld.shared.u32 %v, [%s]; bra END;
OTHERS: setp.ge.u32 %p, %t, 64; @%p bra WRITE;
.loc 1 21 0
ld.shared.u32 %v, [%s]; bra END;
WRITE:
.loc 1 22 0
st.shared.u32 [%s], 7;
END:
"""


def run(body, threads=64, **settings):
    text = kernel(BEGIN + body, "x", REGISTERS, HEAD)
    return record(text, np.zeros(64, np.uint32), block=(threads, 1, 1), **settings)


def fault_of(body, threads=64, **settings):
    with pytest.raises(Fault) as caught:
        run(body, threads, **settings)
    return caught.value


def lines_of(findings):
    """(rule, the lines of both instructions) of each."""
    return {(finding.rule, frozenset((finding.line, finding.second.line))) for finding in findings}


def test_the_fields_of_a_fault():
    fault = fault_of(RACES)
    assert (fault.rule, fault.severity, fault.file) == ("shared-race", "fault", "kernels/toy.py")
    assert {fault.line, fault.second.line} == {10, 11}
    assert {fault.warps, fault.second.warps} == {(0,), (1,)}
    assert fault.cta == (0, 0, 0)
    assert fault.place.instruction.startswith(("st.shared", "ld.shared"))
    assert f"PTX line {fault.ptx_line}, kernels/toy.py:{fault.line}: {fault.place.instruction}" in str(fault)
    assert (fault.launch.launch, fault.launch.gpu, fault.launch.seed) == (0, "H200", 0)
    assert json.loads(json.dumps(dataclasses.asdict(fault)))["second"]["line"] == fault.second.line


def test_the_line_of_asynchronous_work():
    """An arrival that happens when no thread can go on is a fault of the line that issued it."""
    body = """
        @!%first bra END;
        mbarrier.init.shared.b64 [%s], 1; mbarrier.arrive.expect_tx.shared.b64 %o, [%s], 16;
        .loc 1 41 0
        cp.async.mbarrier.arrive.noinc.shared.b64 [%s];
        .loc 1 42 0
        END: bar.sync 0;
    """
    at_once, late = fault_of(body, completion="at_once"), fault_of(body, completion="late")
    assert [(fault.rule, fault.file, fault.line) for fault in (at_once, late)] == 2 * [
        ("mbarrier-count", "kernels/toy.py", 41)
    ]
    assert (at_once.issued_by, late.place) == (None, None)


@pytest.mark.parametrize("body", [RACES, "mov.u32 %s, 4; ld.shared.u32 %v, [%s];", "bar.sync 1, 96;"])
def test_a_fault_prints_without_the_emulator_s_own_calls(body):
    printed = "".join(traceback.format_exception(fault_of(body)))
    assert printed.count("Traceback") == 1
    assert "grid.py" not in printed


LOOP = """
mov.u32 %i, 0;
LOOP:
.loc 1 23 0
st.shared.u32 [%a], %i;
.loc 1 24 0
bar.sync 0;
xor.b32 %b, %t, {distance}; mad.lo.u32 %b, %b, 4, %s;
.loc 1 25 0
ld.shared.u32 %v, [%b];
add.u32 %i, %i, 1; setp.lt.u32 %p, %i, 4;
@%p bra LOOP;
"""
ACROSS = "belongs between the 1st execution of line 25 and the 2nd execution of line 23"


@pytest.mark.parametrize(
    "body, barrier",
    [
        (LOOP.format(distance=32), f"a barrier {ACROSS}"),
        (
            LOOP.format(distance=1).replace("bar.sync 0", "bar.warp.sync -1"),
            f"a barrier of the warp (bar.warp.sync) {ACROSS}",
        ),
        (RACES, "a barrier belongs between line 10 and line 11"),
    ],
)
def test_where_a_barrier_belongs(body, barrier):
    """In the order of the program, whichever access this seed's run comes to first."""
    orders = set()
    for seed in range(6):
        fault = fault_of(body, seed=seed)
        assert fault.advice == barrier
        again = next((place for place in (fault.place, fault.second) if place.execution == 2), None)
        assert body == RACES or f"at 2nd execution of PTX line {again.ptx_line}, kernels/toy.py:23: st" in str(fault)
        orders.add(fault.line)
    assert len(orders) == 2 or "warp.sync" in body


def test_no_barrier_repairs_warps_that_do_different_things():
    assert fault_of(TWO_READS, threads=96).advice == ""


def test_all_races_of_a_run():
    """Also where no thread would read what is wrong; each pair of instructions once."""
    for seed in range(3):
        findings = run(RACES, all_races=True, seed=seed).findings
        assert lines_of(findings) == {("shared-race", frozenset(lines)) for lines in ((10, 11), (12, 13))}
        assert len(findings) <= 4
    for seed in range(8):  # with some of them, both reads come before the write
        findings = run(TWO_READS, threads=96, all_races=True, seed=seed).findings
        assert lines_of(findings) == {("shared-race", frozenset(lines)) for lines in ((20, 22), (21, 22))}
        findings = run(LOOP.format(distance=32), all_races=True, seed=seed).findings
        assert lines_of(findings) == {("shared-race", frozenset((23, 25)))}
        assert len(findings) <= 2


def test_a_report_as_json():
    report = run(RACES, all_races=True, profile=True, trace=((0, 0, 0), 1))
    read = json.loads(report.to_json())
    lines = [(finding["rule"], finding["place"]["line"]) for finding in read["findings"]]
    assert lines == [(finding.rule, finding.line) for finding in report.findings]
    assert read["launches"][0]["profile"][-1]["file"] == "kernels/toy.py"
    assert [place["ptx_line"] for place in read["trace"]] == [place.ptx_line for place in report.trace]


def test_a_suppressed_race():
    """At either of its instructions, whatever the seed."""
    for seed in range(3):
        for first, other in ("kernels/toy.py:10", "toy.py:13"), ("toy.py:11", "toy.py:12"):
            report = run(RACES, seed=seed, suppress=[("shared-race", first), ("shared-race", other)])
            assert (report.findings, len(report.launches)) == ([], 1)
        run(RACES, seed=seed, suppress=[("shared-race", "toy.py")])
        for place in "toy.py:14", "oy.py", "oy.py:10", "other/toy.py", "toy.py:1":
            assert fault_of(RACES, seed=seed, suppress=[("shared-race", place)]).line in (10, 11)


@pytest.mark.parametrize("rule", ["deadlock", "race"])
def test_a_rule_that_cannot_be_suppressed(rule):
    with (
        pytest.raises(ValueError, match=f"suppress has rule '{rule}'; expected one of shared-race, "),
        emulator.record(suppress=[(rule, "toy.py")]),
    ):
        pass


def test_a_finding_below_a_fault_is_listed(monkeypatch):
    monkeypatch.setitem(RULES, "shared-race", RULES["shared-race"]._replace(severity=FORMAL))
    findings = run(RACES).findings
    assert {finding.severity for finding in findings} == {"formal"}
    assert str(findings[0]).startswith("formal: shared-race: thread ")


def test_the_page_lists_the_rules():
    table = re.findall(r"^\| `([a-z-]+)` \| (\w+) \| (yes|no) \| (.*) \|$", DOCS.read_text(), re.M)
    assert table == [
        (name, rule.severity, "yes" if rule.goes_on else "no", rule.meaning) for name, rule in RULES.items()
    ]
    assert all(rule.severity in SEVERITIES for rule in RULES.values())


SHFL = """
@!%first bra JOIN;
.loc 1 31 0
{shfl}
JOIN:
.loc 1 32 0
bar.sync 0;
"""


@pytest.mark.parametrize("members, named", [("-1", "0xfffffffe"), ("%b", "0x2")])
def test_a_shuffle_by_the_first_lane_alone(members, named):
    """As `cute.arch.warp_idx()` inside `if lane == 0`."""
    shfl = f"mov.u32 %b, 3; shfl.sync.idx.b32 %a, %t, 0, 31, {members};"
    fault = fault_of(SHFL.format(shfl=shfl), threads=32)
    assert (fault.rule, fault.line, fault.second.line) == ("absent-lanes", 31, 32)
    assert fault.message == (
        f"lanes 0x1 of warp 0 alone come to shfl.sync.idx.b32, whose member mask also names lanes {named} of warp 0, "
        "which wait elsewhere"
    )
    assert "warp_idx() is such an instruction" in fault.advice
    run(SHFL.format(shfl="shfl.sync.idx.b32 %a, %t, 0, 31, 1;"), threads=32)


def test_the_other_lanes_wait_for_something_else():
    """Then the shuffle is not the mistake."""
    begin = "@%first mbarrier.init.shared.b64 [%s], 1; bar.warp.sync -1; @!%first bra JOIN;\n"
    wait = "WAIT: mbarrier.try_wait.parity.shared.b64 %p, [%s], 0; @!%p bra WAIT; JOIN:"
    assert fault_of(begin + wait + "shfl.sync.idx.b32 %a, %t, 0, 31, -1;", threads=32).rule == "deadlock"


@pytest.mark.parametrize(
    "ctas, first_line",
    [
        (1, "CTA (0, 0, 0), warp 1: {} mbarrier at 0x400 of CTA (0, 0, 0): {}"),
        (
            6,
            "6 CTAs, (0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0) and 2 more, warp 1 of each: {} mbarrier at 0x400 of "
            "its CTA: {}",
        ),
    ],
)
def test_a_deadlock_is_told_once_for_all_ctas(ctas, first_line):
    wait = "WAIT: mbarrier.try_wait.parity.shared.b64 %p, [%s], 0; @!%p bra WAIT;"
    body = f"@%first mbarrier.init.shared.b64 [%s], 1; bar.sync 0; setp.lt.u32 %p, %t, 32; @%p bra END; {wait} END:"
    fault = fault_of(body, grid=(ctas, 1, 1))
    assert fault.message == "no thread can go on"
    lines = fault.details.splitlines()
    reason = "waits for the end of a phase with parity 0:", "phase 0, 1 of 1 arrivals and 0 bytes pending"
    assert (lines[0].strip(), len(lines)) == (first_line.format(*reason), 2)
