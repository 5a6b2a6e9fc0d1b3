"""Arguments to compile kernels with."""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float32, Int32, Int64

from quackish.device.arguments import Ptr

DTYPES = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": Float32,
    "uint8": cutlass.Uint8,
    "int16": cutlass.Int16,
    "int32": Int32,
    "int64": Int64,
}


def fake_pointer(dtype: str | None, aligned: bool = True):
    """A device pointer to compile with, aligned to 16 bytes or to one element; None if dtype is None."""
    if dtype is None:
        return None
    dtype = DTYPES[dtype]
    align = 16 if aligned else dtype.width // 8
    return cute.runtime.make_ptr(dtype, align, AddressSpace.gmem, assumed_align=align)


def fake_args(problem):
    """(arguments, stream) to compile with: `problem.args` with a pointer or number in place of each spec."""

    def fake(spec: tuple | Ptr | str | None):
        if isinstance(spec, tuple):  # a NamedTuple
            return spec._make(map(fake, spec))
        return fake_pointer(spec.dtype, spec.aligned) if isinstance(spec, Ptr) else spec and DTYPES[spec](1)

    return fake(problem.args), cute.runtime.make_fake_stream()
