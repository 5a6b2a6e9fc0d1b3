"""Runs PTX text in the emulator, with numpy arrays as its memory."""

import contextlib
import struct
from typing import NamedTuple

import numpy as np

from quackish import emulator
from quackish.emulator import decode, ptx
from quackish.gpu import H200

_REGISTER_OF = {1: "b16", 2: "b16", 4: "b32", 8: "b64"}


class Launch(NamedTuple):
    kernel: str
    grid: tuple
    block: tuple
    cluster: tuple
    shared_bytes: int
    cooperative: bool


def launch(
    text, *arguments, grid=(1, 1, 1), block=(32, 1, 1), cluster=(1, 1, 1), shared_bytes=0, gpu=H200,
    completion="at_once", seed=0, cooperative=False,
):  # fmt: skip
    """Runs the only entry of `text`, with ints and addresses of numpy arrays as parameters. Returns its report."""
    report = record(
        text, *arguments, grid=grid, block=block, cluster=cluster, shared_bytes=shared_bytes, gpu=gpu,
        cooperative=cooperative, completion=completion, seed=seed,
    )  # fmt: skip
    return report.launches[0]


def record(
    text, *arguments, grid=(1, 1, 1), block=(32, 1, 1), cluster=(1, 1, 1), shared_bytes=0, gpu=H200, cooperative=False,
    **settings,
):  # fmt: skip
    """As `launch`, with settings of `emulator.record`. Returns the whole report."""
    (entry,) = ptx.parse(text).entries.values()
    values = [argument.ctypes.data if isinstance(argument, np.ndarray) else argument for argument in arguments]
    parameters = bytearray(entry.parameter_bytes)
    for parameter, value in zip(entry.parameters.values(), values, strict=True):
        struct.pack_into({4: "<I", 8: "<Q"}[parameter.size], parameters, parameter.offset, value)
    with contextlib.ExitStack() as stack:
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                stack.enter_context(emulator.register(argument.ctypes.data, argument.nbytes))
        report = stack.enter_context(emulator.record(**settings))
        how = Launch(entry.name, grid, block, cluster, shared_bytes, cooperative)
        emulator.run(decode.decode(entry), how, bytes(parameters), gpu)
    return report


def kernel(body, parameters="", registers="", shared="", target="sm_90a", directives=""):
    """The text of an entry `test`. `parameters`: "a b" are 64-bit addresses, which registers %a and %b hold."""
    names = parameters.split()
    declarations = ", ".join(f".param .u64 p_{name}" for name in names)
    loads = "\n".join(f"ld.param.u64 %{name}, [p_{name}];" for name in names)
    addresses = "".join(f".reg .b64 %{name};\n" for name in names)
    return (
        f".version 9.0\n.target {target}\n.address_size 64\n{shared}\n"
        f".visible .entry test({declarations}) {directives}\n"
        f"{{\n{addresses}{registers}\n{loads}\n{body}\nret;\n}}\n"
    )


def execute(body, outputs, target="sm_90a", registers="", seed=0, **inputs):
    """Runs `body` in 32 threads, and returns the arrays of its outputs.

    inputs: arrays of 32 numbers, or of bool for predicates; register %name holds them, a number per thread
    outputs: {name: numpy type} of registers to return

        execute("add.s32 %d, %a, %b;", {"d": np.int32}, a=np.arange(32, dtype=np.int32), b=...)
    """
    results = {name: np.zeros(32, dtype) for name, dtype in outputs.items()}
    arrays = {f"in_{name}": np.ascontiguousarray(value) for name, value in inputs.items()}
    arrays |= {f"out_{name}": value for name, value in results.items()}
    declared = {**{name: value.dtype for name, value in inputs.items()}, **{n: v.dtype for n, v in results.items()}}
    lines = [".reg .b64 %address;\n.reg .b32 %lane;\n.reg .b32 %byte;"]
    for name, dtype in declared.items():
        lines.append(f".reg .{'pred' if dtype.kind == 'b' else _REGISTER_OF[dtype.itemsize]} %{name};")
    text = ["mov.u32 %lane, %laneid;"]
    text += [line for name in inputs for line in _access(name, declared[name], f"in_{name}", load=True)]
    text.append(body)
    text += [line for name in results for line in _access(name, declared[name], f"out_{name}", load=False)]
    registers = "\n".join(lines) + registers
    launch(kernel("\n".join(text), " ".join(arrays), registers, target=target), *arrays.values(), seed=seed)
    return results


def _access(name, dtype, array, load):
    """PTX that loads or stores this thread's element of an array."""
    yield f"mad.wide.u32 %address, %lane, {dtype.itemsize}, %{array};"
    if dtype.kind == "b" and load:
        yield "ld.global.u8 %byte, [%address];"
        yield f"setp.ne.u32 %{name}, %byte, 0;"
    elif dtype.kind == "b":
        yield f"selp.u32 %byte, 1, 0, %{name};"
        yield "st.global.u8 [%address], %byte;"
    else:
        operands = f"%{name}, [%address]" if load else f"[%address], %{name}"
        yield f"{'ld' if load else 'st'}.global.b{8 * dtype.itemsize} {operands};"
