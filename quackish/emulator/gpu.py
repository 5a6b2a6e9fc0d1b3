"""The GPUs that can be emulated, by name."""

import dataclasses
import re
from typing import Any


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What the emulator knows about a GPU. Any object with these attributes will do."""

    name: str
    target: str  # the compiler's target, such as "sm_90a"
    sm_count: int
    smem_bytes: int = 232_448  # shared memory that one CTA can use
    smem_bytes_per_sm: int = 233_472
    threads_per_sm: int = 2048
    registers_per_sm: int = 65_536


_KNOWN = [
    Gpu("H100", "sm_90a", 132),
    Gpu("H200", "sm_90a", 132),
    Gpu("B200", "sm_100a", 148),
    Gpu("B300", "sm_103a", 148),
]
NAMED = {gpu.name.lower(): gpu for gpu in _KNOWN}


def find(gpu: Any) -> Any:
    """Returns the GPU with a name; returns an object with the attributes of `Gpu` as it is."""
    if isinstance(gpu, str):
        if gpu.lower() not in NAMED:
            raise ValueError(f"gpu is {gpu!r}; expected one of {', '.join(NAMED)}, or an emulator.Gpu")
        return NAMED[gpu.lower()]
    missing = [field.name for field in dataclasses.fields(Gpu) if not hasattr(gpu, field.name)]
    if missing:
        raise TypeError(
            f"gpu is {gpu!r}, which lacks {', '.join(missing)}; expected a name such as 'b200', or an emulator.Gpu"
        )
    return gpu


def capability(gpu: Any) -> tuple[int, int]:
    """The compute capability, such as (9, 0)."""
    digits, _ = _split(gpu.target)
    return divmod(digits, 10)


def can_run(gpu: Any, target: str) -> bool:
    """True if the GPU runs PTX with the directive `.target`."""
    # Without a suffix: on this architecture and later ones. With "a": on this one alone. With "f": on later ones of the
    # same major version. (PTX, .target)
    (compiled, suffix), (own, _) = _split(target), _split(gpu.target)
    if suffix == "a":
        return compiled == own
    return compiled <= own and (suffix != "f" or compiled // 10 == own // 10)


def _split(target: str) -> tuple[int, str]:
    """Splits a target: sm_90a is (90, a)."""
    match = re.fullmatch(r"sm_(\d+)([af]?)", target)
    if match is None:
        raise ValueError(f"target is {target!r}; expected a name such as 'sm_90a'")
    return int(match[1]), match[2]
