"""CPU tensors as arguments of functions that CuTe DSL compiles for a GPU.

Host code compiled by the DSL checks that tensors are on a CUDA device. It finds the device in DLPack's description of a
tensor, so a description that says "CUDA, device 0" lets CPU memory through, and all other checks stay as they are.
"""

import ctypes
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

_CPU, _CUDA = 1, 2  # DLDeviceType
_DEVICE_TYPE_OFFSET = 8  # in DLTensor, after the address

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]


class _Described:
    """Hands a DLPack capsule to a consumer, and says that its tensor is on CUDA."""

    def __init__(self, capsule: Any):
        self._capsule = capsule

    def __dlpack__(self, **how: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0


def at_call(argument: Any) -> Any:
    """Converts an argument of a call: CPU tensors in it claim to be on CUDA."""
    if isinstance(argument, torch.Tensor):
        return _from_torch(argument) if argument.device.type == "cpu" else argument
    if _is_dsl_tensor(argument):
        return on_cuda(argument)._tvm_ffi_tensor
    return _map(at_call, argument)


def at_compile(argument: Any) -> Any:
    """Converts an argument of `cute.compile`: CPU tensors in it claim to be on CUDA."""
    if isinstance(argument, torch.Tensor):
        from cutlass.cute.runtime import from_dlpack

        # The DSL does the same with a torch tensor.
        return on_cuda(from_dlpack(argument.detach())).mark_layout_dynamic()
    if _is_dsl_tensor(argument):
        return on_cuda(argument)
    return _map(at_compile, argument)


def on_cuda(tensor: Any) -> Any:
    """Makes a result of `from_dlpack` claim to be on CUDA, so that TVM-FFI takes it. Returns it."""
    import tvm_ffi

    own = getattr(tensor, "_tvm_ffi_tensor", None)
    if own is None or own.device.type == "cpu":
        described = tensor._dlpack_data
        _say_cuda(described)  # also for `mark_layout_dynamic`, which has kept the address of this description
        tensor._tvm_ffi_tensor = tvm_ffi.from_dlpack(_Described(described))
        tensor._dlpack_data = tensor._tvm_ffi_tensor.__dlpack__()
    return tensor


def _from_torch(tensor: torch.Tensor) -> Any:
    import tvm_ffi

    capsule = torch.utils.dlpack.to_dlpack(tensor.detach())
    _say_cuda(capsule)
    return tvm_ffi.from_dlpack(_Described(capsule))


def _say_cuda(capsule: Any) -> None:
    """Overwrites the device type in a capsule. Raises ValueError if the capsule was consumed."""
    if not _is_valid(capsule, b"dltensor"):
        raise ValueError("a tensor's DLPack capsule is in use, or of a version that the emulator does not know")
    address = _get_pointer(capsule, b"dltensor") + _DEVICE_TYPE_OFFSET
    device_type = ctypes.c_int32.from_address(address)
    if device_type.value == _CPU:
        device_type.value = _CUDA


def _is_dsl_tensor(argument: Any) -> bool:
    return hasattr(argument, "_dlpack_data")  # cutlass.cute.runtime._Tensor


def _map(convert: Any, argument: Any) -> Any:
    """Applies `convert` inside tuples, lists and dataclasses; returns anything else as it is."""
    if isinstance(argument, tuple) and hasattr(argument, "_fields"):
        return type(argument)(*map(convert, argument))
    if type(argument) in (tuple, list):
        return type(argument)(map(convert, argument))
    if dataclasses.is_dataclass(argument) and not isinstance(argument, type):
        changed = {}
        for field in dataclasses.fields(argument):
            if field.init:
                value = getattr(argument, field.name)
                converted = convert(value)
                if converted is not value:
                    changed[field.name] = converted
        return dataclasses.replace(argument, **changed) if changed else argument
    return argument


def addresses(name: str, argument: Any) -> Iterator[tuple[str, int]]:
    """Yields (name, address) of an argument of a call, and of its parts. Integers may be addresses, too."""
    if isinstance(argument, int) and not isinstance(argument, bool):
        yield name, argument
    elif hasattr(argument, "data_ptr"):
        yield name, argument.data_ptr()
    elif isinstance(argument, tuple) and hasattr(argument, "_fields"):
        for field, value in zip(argument._fields, argument, strict=True):
            yield from addresses(f"{name}.{field}" if name else field, value)
    elif type(argument) in (tuple, list):
        for i, value in enumerate(argument):
            yield from addresses(f"{name}[{i}]", value)
    elif dataclasses.is_dataclass(argument) and not isinstance(argument, type):
        for each in dataclasses.fields(argument):
            yield from addresses(f"{name}.{each.name}", getattr(argument, each.name))
