"""Every form of instruction that the emulator knows, against the PTX manual and against what a GPU did.

tests/data/ptx_forms.json has a GPU's results; scripts/record_ptx_forms.py writes it.
"""

import functools
import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from quackish import emulator
from quackish.emulator import decode, host, ptx, tensor_map
from quackish.emulator.rules import FAULT
from quackish.gpu import B200, H200
from tests.emulator import forms as emulator_forms

SPEC = importlib.util.spec_from_file_location(
    "record_ptx_forms", Path(__file__).parents[2] / "scripts" / "record_ptx_forms.py"
)
record_ptx_forms = sys.modules[SPEC.name] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(record_ptx_forms)

RECORDED = Path(__file__).parents[1] / "data" / "ptx_forms.json"
NOT_RECORDED = 0  # forms of sm_90a that were added since the last recording
FAMILIES = sorted({form.opcode.split(".")[0] for form in emulator_forms.forms()})


def aligned(count: int) -> np.ndarray:
    """Zeros, as words at a multiple of 256, as GPU memory is."""
    memory = np.zeros(8 * count + 256, np.uint8)
    first = -memory.ctypes.data % 256
    return memory[first : first + 8 * count].view(np.uint64)


def emulate(case: emulator_forms.Case) -> np.ndarray:
    words, results = aligned(len(case.words)), aligned(case.results_size)
    words[:] = case.words
    program = decode.decode(ptx.parse(emulator_forms.module({"form": case})).entries["form"])
    parameters = struct.pack("<QQ48x", words.ctypes.data, results.ctypes.data) + case.data(words.ctypes.data)
    ctas = (case.ctas, 1, 1)
    launch = host.Launch("form", ctas, (case.threads // case.ctas, 1, 1), ctas, 0, False, False, 0)
    gpu = B200 if case.target == "sm_100a" else H200
    with emulator.register(words.ctypes.data, words.nbytes), emulator.register(results.ctypes.data, results.nbytes):
        emulator.run(program, launch, parameters, gpu)
    return results


def of_family(family: str) -> list[emulator_forms.Case]:
    return [
        case
        for form in emulator_forms.forms()
        if form.opcode.split(".")[0] == family
        for case in emulator_forms.cases_of(form)
    ]


SLOW = ("tcgen05", "cp", "ld", "setp", "st", "wgmma")  # more than a second each
LATE = ("tcgen05", "cp", "mbarrier", "wgmma", "st", "bar", "barrier", "mapa")


@pytest.mark.parametrize(
    "family, completion",
    [
        *(pytest.param(family, "at_once", marks=[pytest.mark.exhaustive] * (family in SLOW)) for family in FAMILIES),
        *(pytest.param(family, "late", marks=pytest.mark.exhaustive) for family in LATE if family in FAMILIES),
    ],
)
def test_forms_compute_what_the_manual_says(family, completion):
    wrong = []
    with emulator.record(completion=completion, all_races=True) as report:
        for case in of_family(family):
            if not emulator_forms.is_one_of_many(case):
                wrong += case.differences(emulate(case))[:3]
    assert not wrong, "\n".join(wrong[:40])
    rules = {finding.rule for finding in report.findings if finding.severity == FAULT}
    assert rules <= {"uninitialized"}  # products of 64 rows leave lanes of tensor memory as they were


@pytest.mark.exhaustive
def test_all_shapes_of_matrices():
    wrong = []
    for case in emulator_forms.cases():
        if emulator_forms.is_one_of_many(case):
            wrong += case.differences(emulate(case))[:1]
    assert not wrong, "\n".join(wrong[:40])


@pytest.mark.exhaustive
def test_every_form_has_a_case():
    assert [
        emulator_forms.case_name(form) for form in emulator_forms.forms() if not emulator_forms.cases_of(form)
    ] == []
    assert emulator_forms.cases()  # whose names differ


@functools.cache
def recorded() -> dict:
    if not RECORDED.exists():
        pytest.skip(f"nothing was recorded yet: {RECORDED} does not exist; scripts/record_ptx_forms.py writes it")
    return json.loads(RECORDED.read_text())


def test_a_gpu_agrees():
    """Its results are those expected here, or within the manual's bound for approximate functions."""
    wrong, missing = [], []
    for case in emulator_forms.cases():
        digest, result = recorded()["cases"].get(case.name, ("", ""))
        if digest != case.digest:
            is_typical = not emulator_forms.is_one_of_many(case)
            missing += [case.name] * (is_typical and case.target == recorded()["target"])
        elif result.startswith(("refused", "failed")):
            wrong.append(f"{case.name}: {result}")
        elif result != "as expected":
            wrong += case.differences(np.frombuffer(bytes.fromhex(result), np.uint64), approximately=True)[:3]
    assert not wrong, "\n".join(wrong[:40])
    assert len(missing) <= NOT_RECORDED, f"record again: {len(missing)} cases have changed: {missing[:5]}"


def test_the_driver_encodes_tensor_maps_like_that():
    if "tensor_maps" not in recorded():
        pytest.skip("no tensor map was recorded yet; scripts/record_ptx_forms.py does so")
    for ours, encoded in recorded()["tensor_maps"].items():
        assert not encoded.startswith("failed"), encoded
        assert tensor_map.decode(bytes.fromhex(encoded)) == tensor_map.decode(bytes.fromhex(ours))


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_the_assembler_accepts_every_form(target):
    """So the table has no opcode that PTX lacks."""
    spec = importlib.util.find_spec("triton")
    folder = Path(spec.origin).parent / "backends" / "nvidia" / "bin" if spec and spec.origin else Path()
    assembler = shutil.which("ptxas-blackwell", path=str(folder))
    if assembler is None:
        pytest.skip("Triton's ptxas is not installed")
    cases = {f"k{i}": case for i, case in enumerate(emulator_forms.cases()) if case.target == target}
    text = emulator_forms.module(cases)
    done = subprocess.run(
        [assembler, "-arch", target, "-o", "/dev/null", "-"], input=text, capture_output=True, text=True
    )
    places, entry = [], ""
    for line in text.splitlines():
        found = re.match(r"\.visible \.entry (\w+)\(", line)
        entry = found[1] if found else entry
        places.append(entry)
    errors = re.findall(r"line (\d+); error\s*: (.*)", done.stderr)
    assert not errors, "\n".join(f"{cases[places[int(line) - 1]].name}: {message}" for line, message in errors[:40])
    assert done.returncode == 0, done.stderr[:2000]


class EmulatedGpu:
    """Stands in for the driver in a recording. It refuses popc, fails for min.u32, and the process ends at max.u32."""

    name, driver_version, capability = "emulated", 13000, (9, 0)

    def load(self, text):
        if "popc" in text:
            raise record_ptx_forms.Refused("no popc")

    def run(self, module, entry, case):
        if case.opcode == "min.u32":
            raise RuntimeError("cuCtxSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS")
        if case.opcode == "max.u32":
            os._exit(1)
        if case.opcode == "abs.s32":
            time.sleep(600)
        return emulate(case) + np.uint64(case.opcode == "add.u32")


@pytest.mark.exhaustive
def test_a_recording_survives_forms_that_fail():
    opcodes = [
        "abs.s16",
        "abs.s32",
        "add.u32",
        "add.f32x2",
        "max.u32",
        "max.s32",
        "min.u32",
        "neg.s32",
        "popc.b32",
        "or.b32",
    ]
    cases = [case for opcode in opcodes for case in emulator_forms.cases() if case.opcode == opcode]
    properties, outcomes = record_ptx_forms.record(cases, EmulatedGpu, patience=5)
    assert properties == ("emulated", 13000, (9, 0))
    results = {name.split()[0]: result for name, result in outcomes.items()}
    assert len(bytes.fromhex(results.pop("add.u32"))) == 8 * 128
    assert results == {
        "abs.s16": "as expected",
        "abs.s32": "failed: no result within 5 s",
        "max.u32": "failed: the process ended",
        "max.s32": "as expected",
        "min.u32": "failed: cuCtxSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS",
        "neg.s32": "as expected",
        "popc.b32": "refused: no popc",
        "or.b32": "as expected",
    }
