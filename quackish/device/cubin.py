"""Resource usage and instructions of a compiled kernel, read from its cubin."""

import dataclasses
import importlib.util
import math
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from quackish.device.compile import compile_kernel, lock

# ptxas adds 1 KB of system memory to static shared memory, if a kernel uses any; Gpu.smem_bytes excludes it.
_SYSTEM_SMEM_BYTES = 1024
_LAUNCH_CONFIG = "!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"  # cudaLaunchConfig_t
_TOOLKIT = "/usr/local/cuda"


@dataclasses.dataclass(frozen=True)
class Resources:
    """For a kernel class with several kernels: the maximum of each field, and the sum of local loads and stores."""

    registers: int  # per thread; with setmaxregister, at launch
    stack_bytes: int  # per thread: spilled registers, or arrays indexed at run time
    local_loads: int  # instructions that read such memory
    local_stores: int
    smem_bytes: int  # per CTA, static and dynamic: compare with Gpu.smem_bytes
    threads: int | None  # per CTA; None if not fixed at compile time


class Instruction(NamedTuple):
    address: int
    text: str  # such as "@P0 BRA 0x1d0"


def resources(kernel_class: Any, problem: Any, config: Any, target: str) -> Resources:
    """Compiles a kernel and returns its resource usage: the first result of `disassemble`."""
    return disassemble(kernel_class, problem, config, target)[0]


def disassemble(
    kernel_class: Any, problem: Any, config: Any, target: str
) -> tuple[Resources, list[Instruction]]:  # fmt: skip
    """Compiles, without cache or GPU, and reads the result with cuobjdump, from the CUDA toolkit or Triton.

    The instructions are those of all kernels of the class, one kernel after the other.
    Raises FileNotFoundError without cuobjdump, RuntimeError if compilation fails.
    """
    tool = _cuobjdump()
    with tempfile.TemporaryDirectory(prefix="quackish-") as folder:
        options = f"--keep-ptx --keep-cubin --dump-dir {folder}"
        with lock:
            compiled = compile_kernel(kernel_class, problem, config, target, options)
        path = Path(folder, "read.cubin")
        path.write_bytes(compiled.__cubin__)
        done = subprocess.run([tool, "--dump-resource-usage", "--dump-sass", path], capture_output=True, text=True)
    text = done.stdout
    usage = [dict(re.findall(r"(\w+):(\d+)", line)) for line in re.findall(r"^ *REG:.*", text, re.MULTILINE)]
    if done.returncode != 0 or not usage:
        raise RuntimeError(f"{tool} cannot read the cubin of {kernel_class.__qualname__}: {done.stderr or text}")
    threads = [math.prod(map(int, sizes.split(","))) for sizes in re.findall(r"\.reqntid ([\d, ]+)", compiled.__ptx__)]
    static_smem = max(int(kernel["SHARED"]) for kernel in usage)
    used = Resources(
        registers=max(int(kernel["REG"]) for kernel in usage),
        stack_bytes=max(int(kernel["STACK"]) for kernel in usage),
        local_loads=len(re.findall(r"\bLDL\b", text)),
        local_stores=len(re.findall(r"\bSTL\b", text)),
        smem_bytes=max(0, static_smem - _SYSTEM_SMEM_BYTES) + _dynamic_smem_bytes(str(compiled.ir_module)),
        threads=max(threads) if len(threads) == len(usage) else None,
    )
    code = re.findall(r"^ */\*([0-9a-f]{4,})\*/ +(.*?) *;", text, re.MULTILINE)
    return used, [Instruction(int(address, 16), instruction) for address, instruction in code]


def _dynamic_smem_bytes(module: str) -> int:
    """The largest dynamic shared memory of any launch. It is a constant in the host code, not in the cubin."""
    launch_config = re.escape(_LAUNCH_CONFIG)
    sizes = []
    for function in module.split("\n  llvm.func ")[1:]:
        constants = dict(re.findall(r"(%\w+) = llvm\.mlir\.constant\((\d+) : i64\)", function))
        fields = re.findall(rf"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : .* {launch_config}\n", function)
        for field in fields:
            sizes += [constants.get(value) for value in re.findall(rf"llvm\.store (%\w+), {field} : i64", function)]
    if not sizes or None in sizes:  # fail, or a change in the compiler would silently give 0 bytes
        raise RuntimeError("a launch in the kernel's host code has no constant size of shared memory")
    return max(map(int, sizes))


def _cuobjdump(default_toolkit: str = _TOOLKIT) -> str:
    """The path of cuobjdump. Raises FileNotFoundError if it is not installed."""
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), default_toolkit]
    candidates = [Path(toolkit, "bin") for toolkit in toolkits if toolkit]
    triton = importlib.util.find_spec("triton")  # found, not imported
    if triton is not None:
        candidates += [Path(folder, "backends/nvidia/bin") for folder in triton.submodule_search_locations]
    tool = shutil.which("cuobjdump") or shutil.which("cuobjdump", path=os.pathsep.join(map(str, candidates)))
    if tool is None:
        raise FileNotFoundError(
            "cuobjdump, which reads resource usage from a compiled kernel, is not on PATH, in CUDA_HOME or in Triton's "
            "wheel. Install one: `pip install triton`, or the CUDA toolkit."
        )
    return tool
