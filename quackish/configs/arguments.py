"""Specs of kernel arguments: a pointer, or None where an argument is absent."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Ptr:
    """A device address, aligned to 16 bytes or to one element."""

    dtype: str
    aligned: bool = False


I32, I64, F32, BF16 = Ptr("int32"), Ptr("int64"), Ptr("float32"), Ptr("bfloat16")
ALIGNED_F32, ALIGNED_I16 = Ptr("float32", aligned=True), Ptr("int16", aligned=True)


def optional(dtype: str | None, aligned: bool = False) -> Ptr | None:
    return None if dtype is None else Ptr(dtype, aligned)
