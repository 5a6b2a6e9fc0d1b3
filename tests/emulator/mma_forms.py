"""Kernels for each form of mma.sync, with small integers, whose products are exact in any order of sums."""

import re
from collections.abc import Iterator

import numpy as np

from quackish.emulator import isa
from tests.emulator.forms import Case, case_name, random_of

BYTES = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}


def _bits(values: np.ndarray, element: str) -> np.ndarray:
    """Bits of integers from -3 to 3."""
    if element == "tf32":
        return values.astype(np.float32).view(np.uint32)
    if element == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    half = values.astype(np.float16).view(np.uint16)
    if element == "f16":
        return half
    if element == "e5m2":
        return (half >> 8).astype(np.uint8)
    codes = np.array([0x00, 0x38, 0x40, 0x44], np.uint8)  # e4m3: 0, 1, 2, 3
    return codes[np.abs(values)] | np.where(values < 0, 0x80, 0).astype(np.uint8)


def _registers(matrix: np.ndarray, element: str) -> list[list[int]]:
    """A or the columns of B: row 8 * (i % parts) + t / 4, and 4 bytes of k at 4 * (t % 4) + 16 * (i / parts)."""
    words = _bits(matrix, element).view(np.uint32)  # (rows, k in words)
    parts = len(matrix) // 8
    count = parts * words.shape[1] // 4
    return [[int(words[8 * (i % parts) + t // 4, t % 4 + 4 * (i // parts)]) for t in range(32)] for i in range(count)]


def _accumulator(matrix: np.ndarray, type_: str) -> list[list[int]]:
    """fp32: row 8 * (i / 2) + t / 4, column 2 * (t % 4) + i % 2. fp16: pairs of these."""
    bits = matrix.astype(np.float32 if type_ == "f32" else np.float16)
    words = np.ascontiguousarray(bits).view(np.uint32)
    if type_ == "f16":
        return [[int(words[8 * i + t // 4, t % 4]) for t in range(32)] for i in range(2)]
    return [[int(words[8 * (i // 2) + t // 4, 2 * (t % 4) + i % 2]) for t in range(32)] for i in range(4)]


def cases(form: isa.Form) -> Iterator[Case]:
    k, d, a_type, b_type = re.search(r"k(\d+)\.row\.col\.(\w+)\.(\w+)\.(\w+)", form.opcode).groups()
    random = random_of(form.opcode)
    a, b, c = (random.integers(-3, 4, shape) for shape in ((16, int(k)), (8, int(k)), (16, 8)))
    columns = [_registers(a, a_type), _registers(b, b_type), _accumulator(c, d)]
    expected = _accumulator(a @ b.T + c, d)
    names = iter(range(100))
    vectors = ["{" + ", ".join(f"%in{next(names)}" for _ in part) + "}" for part in columns]
    results = "{" + ", ".join(f"%out{i}" for i in range(len(expected))) + "}"
    inputs = [(32, column) for part in columns for column in part]
    body = f"{form.opcode} {', '.join([results, *vectors])};"
    yield Case(case_name(form), form.opcode, body, inputs, [(32, column) for column in expected])
