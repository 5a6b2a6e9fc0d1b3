"""scripts/emulate_programs.py: the table of programs, and what becomes of a program's output."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("emulate_programs", ROOT / "scripts" / "emulate_programs.py")
programs = sys.modules[SPEC.name] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(programs)

TRACEBACK = """1 launches on an emulated b200
Traceback (most recent call last):
  File "x.py", line 1, in <module>
{}
  more about it
"""
FAULT = """compiling
  a warning
race: thread 0 writes shared memory
  the read is of CTA (0, 0, 0)
  launch 0, counted from 0: kernel k (x.py:1)
  grid (1, 1, 1)
0 launches on an emulated b200
"""


@pytest.mark.parametrize(
    "status, output, outcome",
    [
        (0, "PASS\n2 launches on an emulated b200\n", "right"),
        (0, "PASS\n0 launches on an emulated b200\n", "error: no kernel was launched"),
        (1, FAULT, "fault: race: thread 0 writes shared memory"),
        (
            1,
            TRACEBACK.format("quackish.emulator.errors.PtxError: unknown instruction: x"),
            "unsupported: unknown instruction: x",
        ),
        (
            1,
            TRACEBACK.format("NotImplementedError: the emulator has no CUDA graphs"),
            "unsupported: the emulator has no CUDA graphs",
        ),
        (1, TRACEBACK.format("AssertionError: not close"), "error: AssertionError: not close"),
        (2, "usage: x\nx.py: error: n must be even\n0 launches on an emulated b200\n", "error: n must be even"),
    ],
)
def test_outcomes(status, output, outcome):
    assert programs.outcome(status, output) == outcome


def test_the_page_has_every_program_once():
    cases, results = programs.read_cases(), programs.read_results()
    assert len({case.name for case in cases}) == len(cases)
    assert set(results) == {case.name for case in cases}
    assert programs.page(cases, results) == programs.PAGE.read_text()


def test_what_does_not_run_has_a_reason():
    results = programs.read_results()
    assert [
        case.name for case in programs.read_cases() if results[case.name].outcome != "right" and not case.note
    ] == []
