"""Records what a GPU computes for every form of instruction that the emulator knows.

    python scripts/record_ptx_forms.py                      # writes tests/data/ptx_forms.json
    python scripts/record_ptx_forms.py --only 'cvt' --out /tmp/forms.json

It runs the PTX of tests/emulator/forms.py through the CUDA driver. A form that the driver refuses, or that fails or
hangs, is recorded as that, and the others go on. It also records the tensor maps that the driver encodes.
tests/emulator/test_forms.py compares.
"""

import argparse
import collections
import ctypes
import json
import multiprocessing
import re
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from quackish.emulator import tensor_map  # noqa: E402
from tests.emulator import forms as emulator_forms  # noqa: E402
from tests.emulator.forms import Case  # noqa: E402

BATCH = 64  # kernels per module: a module costs some milliseconds of its own
PATIENCE = 30  # seconds without a result before a kernel counts as hanging; the first one waits for the driver
LIMIT = 170  # seconds for all forms: those that come later are not recorded
TARGETS = {(9, 0): "sm_90a", (10, 0): "sm_100a"}
ERROR_LOG, ERROR_LOG_SIZE = 5, 6  # CUjit_option
CLUSTER_DIMENSION = 4  # CUlaunchAttributeID
ELEMENTS = {"f16": 6, "f32": 7, "bf16": 9}  # CUtensorMapDataType
L2_PROMOTION_128B = 2  # CUtensorMapL2promotion: what CuTe DSL encodes


class Attribute(ctypes.Structure):  # CUlaunchAttribute: its value is a union of 64 bytes
    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("dynamic_shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


class Refused(Exception):
    """The driver does not assemble a module."""


class Gpu:
    """The first GPU, through the driver."""

    def __init__(self) -> None:
        try:
            self.driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise SystemExit(f"record_ptx_forms: no CUDA driver: {error}") from None
        self.call("cuInit", 0)
        device, self.context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        self.call("cuCtxSetCurrent", self.context)
        name, version, parts = ctypes.create_string_buffer(256), ctypes.c_int(), []
        self.call("cuDeviceGetName", name, 256, device)
        self.call("cuDriverGetVersion", ctypes.byref(version))
        for attribute in (75, 76):  # the compute capability's major and minor number
            part = ctypes.c_int()
            self.call("cuDeviceGetAttribute", ctypes.byref(part), attribute, device)
            parts.append(part.value)
        self.name, self.driver_version, self.capability = name.value.decode(), version.value, tuple(parts)

    def call(self, function: str, *args: Any) -> None:
        code = getattr(self.driver, function)(*args)
        if code != 0:
            text = ctypes.c_char_p()
            self.driver.cuGetErrorName(code, ctypes.byref(text))
            raise RuntimeError(f"{function}: {(text.value or b'').decode() or code}")

    def load(self, text: str) -> ctypes.c_void_p:
        module, log = ctypes.c_void_p(), ctypes.create_string_buffer(8192)
        options = (ctypes.c_int * 2)(ERROR_LOG, ERROR_LOG_SIZE)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
        try:
            self.call("cuModuleLoadDataEx", ctypes.byref(module), text.encode(), 2, options, values)
        except RuntimeError as error:
            message = " ".join(log.value.decode(errors="replace").split())
            raise Refused(f"{error} {message}"[:300]) from None
        return module

    def run(self, module: ctypes.c_void_p, entry: str, case: Case) -> np.ndarray:
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
        words, results = self.allocated(8 * len(case.words)), self.allocated(8 * case.results_size)
        given, got = case.words, np.zeros(case.results_size, np.uint64)
        self.call("cuMemcpyHtoD_v2", words, ctypes.c_void_p(given.ctypes.data), ctypes.c_size_t(given.nbytes))
        self.call("cuMemcpyHtoD_v2", results, ctypes.c_void_p(got.ctypes.data), ctypes.c_size_t(got.nbytes))
        parameter = case.data(words.value)
        data = ctypes.create_string_buffer(self.encoded(parameter) if case.tensor_map else parameter, 128)
        parameters = (ctypes.c_void_p * 3)(*map(ctypes.addressof, (words, results, data)))
        ctas = case.ctas
        clusters = Attribute(CLUSTER_DIMENSION, 0, (ctas, 1, 1))
        block = case.threads // ctas, 1, 1
        config = Config((ctas, 1, 1), block, 0, None, ctypes.pointer(clusters), int(ctas > 1))
        self.call("cuLaunchKernelEx", ctypes.byref(config), function, parameters, None)
        self.call("cuCtxSynchronize")
        self.call("cuMemcpyDtoH_v2", ctypes.c_void_p(got.ctypes.data), results, ctypes.c_size_t(got.nbytes))
        for address in (words, results):
            self.call("cuMemFree_v2", address)
        return got

    def encoded(self, ours: bytes) -> bytes:
        """The driver's encoding of the tensor map that tests/emulator/forms.py encodes as `ours`."""
        decoded = tensor_map.decode(ours)
        memory = ctypes.create_string_buffer(tensor_map.BYTES + 63)
        aligned = ctypes.addressof(memory) + -ctypes.addressof(memory) % 64
        rank = decoded.rank
        self.call(
            "cuTensorMapEncodeTiled", ctypes.c_void_p(aligned), ELEMENTS[decoded.element], ctypes.c_uint(rank),
            ctypes.c_void_p(decoded.address), (ctypes.c_uint64 * rank)(*decoded.sizes),
            (ctypes.c_uint64 * rank)(*decoded.strides), (ctypes.c_uint * rank)(*decoded.box),
            (ctypes.c_uint * rank)(*[1] * rank), 0, 0, L2_PROMOTION_128B, 0,
        )  # fmt: skip
        return ctypes.string_at(aligned, tensor_map.BYTES)

    def allocated(self, size: int) -> ctypes.c_uint64:
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address


def outcome(case: Case, results: np.ndarray) -> str:
    """What is recorded: the results themselves only if they tell something."""
    return "as expected" if not case.differences(results) else results.tobytes().hex()


def loaded(gpu: Gpu, cases: list[Case]) -> Iterator[tuple[Case, Any, str]]:
    """(case, its module, its entry), in modules of many cases; one that is refused comes with the error as module."""
    named = {f"form{i}": case for i, case in enumerate(cases)}
    try:
        module: Any = gpu.load(emulator_forms.module(named))
    except Refused as error:
        if len(cases) == 1:
            yield cases[0], error, ""
            return
        middle = len(cases) // 2
        yield from loaded(gpu, cases[:middle])
        yield from loaded(gpu, cases[middle:])
        return
    for entry, case in named.items():
        yield case, module, entry


def runnable(cases: list[Case], capability: tuple[int, int]) -> list[Case]:
    """Those for a GPU's architecture: code for sm_90a runs on no other."""
    return [case for case in cases if case.target == TARGETS.get(capability)]


def work(connection: Connection, cases: list[Case], make_gpu: Any) -> None:
    """Sends the GPU's properties, then an outcome for each case in their order. After an error the context is lost."""
    gpu = make_gpu()
    connection.send((gpu.name, gpu.driver_version, gpu.capability))
    cases = runnable(cases, gpu.capability)
    for first in range(0, len(cases), BATCH):
        for case, module, entry in loaded(gpu, cases[first : first + BATCH]):
            if isinstance(module, Refused):
                connection.send(f"refused: {module}")
                continue
            try:
                connection.send(outcome(case, gpu.run(module, entry, case)))
            except RuntimeError as error:
                connection.send(f"failed: {error}")
                return


def record(cases: list[Case], make_gpu: Any = Gpu, patience: float = PATIENCE) -> tuple[tuple, dict[str, str]]:
    """(the GPU's properties, outcomes by name). A worker process runs the cases; if it fails, another one goes on."""
    fork = multiprocessing.get_context("fork")
    properties, outcomes, rest = (), {}, cases
    end = time.monotonic() + LIMIT

    def has_news(connection: Connection) -> bool:
        return connection.poll(max(0, min(patience, end - time.monotonic())))

    while True:
        connection, other = fork.Pipe()
        worker = fork.Process(target=work, args=(other, rest, make_gpu))
        worker.start()
        other.close()
        done, why = 0, "failed: the process ended"
        try:
            if has_news(connection):
                properties = connection.recv()
                rest = runnable(rest, properties[2])
            while done < len(rest) and has_news(connection):
                outcomes[rest[done].name] = connection.recv()
                done += 1
            if done < len(rest):
                why = f"failed: no result within {patience} s"
        except EOFError:
            pass
        worker.kill()
        worker.join()
        if not properties:
            raise SystemExit("record_ptx_forms: the GPU cannot be used")
        if done == len(rest) or time.monotonic() > end:
            return properties, outcomes
        # After a failure that the worker reported, the next case is the first of the rest.
        if done == 0 or not outcomes[rest[done - 1].name].startswith("failed"):
            outcomes[rest[done].name] = why
            done += 1
        rest = rest[done:]


def encodings(cases: list[Case]) -> dict[str, str]:
    """The driver's encodings of the cases' tensor maps. Call it last: a process that uses the driver cannot fork."""
    maps, found = sorted({case.data(0) for case in cases if case.tensor_map}), {}
    gpu = Gpu() if maps else None
    for data in maps:
        try:
            found[data.hex()] = gpu.encoded(data).hex()
        except RuntimeError as error:
            found[data.hex()] = f"failed: {error}"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="record forms whose name matches")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "data" / "ptx_forms.json")
    args = parser.parse_args()
    begin = time.perf_counter()
    cases = [case for case in emulator_forms.cases() if re.match(args.only, case.name)]
    (name, driver, capability), outcomes = record(cases)
    digests = {case.name: case.digest for case in cases}
    content = {
        "gpu": name,
        "driver": driver,
        "target": TARGETS.get(capability, ""),
        "tensor_maps": encodings([case for case in cases if case.name in outcomes]),
        "cases": {name: [digests[name], result] for name, result in outcomes.items()},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(content, indent=0) + "\n")
    kinds = collections.Counter(
        re.match(r"as expected|refused|failed|", result)[0] or "other" for result in outcomes.values()
    )
    print(f"{name}, driver {driver}: {dict(kinds)} in {time.perf_counter() - begin:.1f} s, written to {args.out}")
    for case in cases:
        result = outcomes.get(case.name, "")
        if result.startswith(("refused", "failed")):
            print(f"  {case.name}: {result[:160]}")
        elif result and result != "as expected":
            wrong = case.differences(np.frombuffer(bytes.fromhex(result), np.uint64), approximately=True)
            print("\n".join(f"  {line}" for line in wrong[:2]), end="\n" * bool(wrong))
    return 0


if __name__ == "__main__":
    sys.exit(main())
