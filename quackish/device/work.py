"""The bytes and FLOPs of a launch, computed from its problem and sizes, and an estimate of its time.

Sizes are run-time arguments such as rows, classes and tiles; `KernelSpec.sizes` lists them. Bytes are device memory
traffic: each input read once, each output written once. Scratch that stays in the L2 is not counted, nor are a few
numbers per row or column of a GEMM. All rows count as live and all groups as used: only the GPU knows their numbers.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from quackish.gpu import Roofs

LAUNCH_US = 2.0  # about the time of an empty kernel; not measured per GPU
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_ITEMSIZE = {None: 0, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}

Sizes = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Work:
    """The bytes and FLOPs of a launch."""

    bytes_read: int
    bytes_written: int
    flops: int
    note: str = ""  # how the data affects the work
    depends_on_data: bool = False  # the launch often returns at once; the bytes are those of such a launch
    exponentials: int = 0  # of attention's scores, one each, in whole blocks

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The time of a launch at given speeds of memory and tensor cores. Short GEMMs can be faster: see `Roofs`."""

    us: float
    bound: str  # what takes this time: "memory", "tensor cores", "exponentials" or "launch"
    most_us: float  # if these do not overlap; equal to `us` but for launches with exponentials


# The other arithmetic of a score (conversions, additions, maxima, masks) takes about twice the time of its exponential.
# Times in benchmarks/results are at most 5 % above `most_us`, but twice it in windows of up to 64 tokens. With 1
# instead of 2, triangles are up to 29 % above.
_PER_EXPONENTIAL = 2


def estimate(work: Work, roofs: Roofs) -> Estimate:
    """The longest of these times: memory traffic, tensor cores, exponentials and an empty launch."""
    bandwidth = roofs.add if work.bytes_read >= 2 * work.bytes_written else roofs.copy
    bounds = {
        "memory": 1e6 * work.bytes / bandwidth,
        "tensor cores": 1e6 * work.flops / roofs.gemm,
        "exponentials": 1e6 * work.exponentials / roofs.exponentials,
        "launch": LAUNCH_US,
    }
    bound = max(bounds, key=bounds.__getitem__)
    most_us = sum(bounds.values()) + _PER_EXPONENTIAL * bounds["exponentials"] if work.exponentials else bounds[bound]
    return Estimate(bounds[bound], bound, most_us)


def returns_at_once(note: str) -> Work:
    """The work of a launch that reads a flag and does nothing unless it is set."""
    return Work(4, 0, 0, note, depends_on_data=True)


def describe(problem: Any, sizes: Sizes) -> str:
    """Sizes and problem in one line, without default values: "m=16384 n=4096 x=bf16 y=bf16"."""
    return " ".join([*(f"{name}={value}" for name, value in sizes.items()), *_words(problem)])


def _words(problem: Any) -> Iterator[str]:
    for field in dataclasses.fields(problem) if dataclasses.is_dataclass(problem) else ():
        name, value = field.name.removesuffix("_dtype"), getattr(problem, field.name)
        if dataclasses.is_dataclass(value):  # a part of the problem, with options of its own
            yield f"{name}={type(value).__name__}"
            yield from _words(value)
        elif value != field.default and value is not None:
            yield name if value is True else f"{name}={SHORT.get(value, value)}"


def bytes_of(*dtypes: str | None) -> int:
    """The bytes of one element of each dtype, added up. None adds nothing."""
    return sum(_ITEMSIZE[dtype] for dtype in dtypes)


def ceil_div(n: int, d: int) -> int:
    return -(-n // d)
