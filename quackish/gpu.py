"""Properties and speeds of GPUs. All device queries are here."""

import dataclasses
import functools
import math
from typing import Any


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that configs depend on."""

    name: str
    family: str  # compute capability, such as "sm_90"; the table of kernels is by family
    target: str  # for the compiler, such as "sm_90a": the suffix enables architecture-specific instructions
    sm_count: int
    smem_bytes: int  # shared memory that one CTA can use
    smem_bytes_per_sm: int
    threads_per_sm: int = 2048
    registers_per_sm: int = 65_536
    ctas_per_sm: int = 32
    fast_memory: bool = False  # HBM3e: over 4 TB/s


# Shared memory and CTAs: CUDA C++ Programming Guide, compute capabilities 9.0, 10.0 and 10.3. SMs: NVIDIA's data
# sheets; B300 is assumed to have as many as B200, and GB200 has 152.
_SMEM: dict[str, Any] = dict(smem_bytes=232_448, smem_bytes_per_sm=233_472)
H100 = Gpu("H100", "sm_90", "sm_90a", sm_count=132, **_SMEM)  # SXM
H100_PCIE = Gpu("H100 PCIe", "sm_90", "sm_90a", sm_count=114, **_SMEM)
H100_NVL = Gpu("H100 NVL", "sm_90", "sm_90a", sm_count=132, **_SMEM)
GH200 = Gpu("GH200", "sm_90", "sm_90a", sm_count=132, **_SMEM)
H200 = Gpu("H200", "sm_90", "sm_90a", sm_count=132, **_SMEM, fast_memory=True)
B200 = Gpu("B200", "sm_100", "sm_100a", sm_count=148, **_SMEM, fast_memory=True)
GB200 = Gpu("GB200", "sm_100", "sm_100a", sm_count=152, **_SMEM, fast_memory=True)
B300 = Gpu("B300", "sm_103", "sm_103a", sm_count=148, **_SMEM, fast_memory=True)

# These run the portable path, as `explain` shows. Numbers are from the same sources.
A100 = Gpu("A100", "sm_80", "sm_80", sm_count=108, smem_bytes=166_912, smem_bytes_per_sm=167_936)
A10 = Gpu("A10", "sm_86", "sm_86", sm_count=72, smem_bytes=101_376, smem_bytes_per_sm=102_400, threads_per_sm=1536)
L40S = Gpu("L40S", "sm_89", "sm_89", sm_count=142, smem_bytes=101_376, smem_bytes_per_sm=102_400, threads_per_sm=1536)

_KNOWN = (H100, H100_PCIE, H100_NVL, GH200, H200, B200, GB200, B300, A100, A10, L40S)
NAMED = {gpu.name.lower().replace(" ", "-"): gpu for gpu in _KNOWN}

# Families with architecture-specific instructions, and their targets. The target of other families is the family.
_TARGETS = {"sm_90": "sm_90a", "sm_100": "sm_100a", "sm_103": "sm_103a"}
FAMILIES = tuple(_TARGETS)  # with kernels


@dataclasses.dataclass(frozen=True)
class Roofs:
    """Speeds of a GPU: measured peaks of long kernels, or an interval from what others published.

    `explain` estimates times from any of them; `profile` compares with measured ones only.
    """

    copy: float  # device memory, bytes read and written per second, with one read per write
    add: float  # the same with two reads per write, which is faster
    gemm: float  # tensor cores, FLOPs per second, dense bf16 or fp16
    source: str  # "measured" or "published"
    note: str = ""
    fastest: "Roofs | None" = None  # the fast end of an interval, whose slow end this is
    exponentials: float = math.inf  # per second; infinite where no kernel has them in its work


# 16 per cycle and SM (CUDA C++ Programming Guide), 132 SMs, 1.755 GHz: not measured.
_HOPPER_EXPONENTIALS = 16 * 132 * 1.755e9

# SXM. copy: 2 GB. add: `torch.add(a, b, out=c)` at 65536 x 4096 in bf16, 529.6 us. gemm: the three of linear cross
# entropy at 8192, 4096, 128256 by cuBLAS in bursts, 36.5 ms; one of 8192^3 reaches 798. Data sheet: 3.35 TB/s, 989.
_H100_ROOFS = Roofs(
    3.0e12, 3.04e12, 707e12, "measured", "707 TFLOP/s is at the power limit; short GEMMs reach 798.",
    exponentials=_HOPPER_EXPONENTIALS,
)  # fmt: skip
_ROOFS = {
    "H100": _H100_ROOFS,
    "H100 80GB HBM3": _H100_ROOFS,  # the device name of the SXM card
    # copy: 2 GB. add: `torch.add(a, b, out=c)` at 16384 x 65536 in bf16, benchmarks/results/H200/rms_norm.csv. gemm:
    # the three of linear cross entropy at 8192, 4096, 128256 by cuBLAS, 37 ms, linear_cross_entropy.csv in that folder;
    # single GEMMs of 0.6 to 1.4 ms below the power limit reached 746 to 843. Data sheet: 4.8 TB/s, 989 TFLOP/s.
    "H200": Roofs(
        4.25e12,
        4.39e12,
        700e12,
        "measured",
        "700 TFLOP/s is at the power limit; GEMMs of a millisecond reach 840.",
        exponentials=_HOPPER_EXPONENTIALS,
    ),
    # copy and add: 6.55 to 6.86 TB/s, which kernels of others achieved (pull requests NVIDIA/cccl#7391 and
    # NVIDIA/TransformerEngine#3315), of 7.67 (pytorch/ao#4002). gemm: an SM executes 8192 FLOPs per cycle, at a clock
    # that power limits. 1496 TFLOP/s is 1.23 GHz: linear cross entropy at 8192, 4096, 128256 in 17.26 ms, which QuACK
    # 0.6.2 states. 1611 is 1.33 GHz: a GEMM of 128256 x 4096 x 2048 by cuBLAS in 1.336 ms (linkedin/Liger-Kernel#1380).
    "B200": Roofs(6.55e12, 6.55e12, 1496e12, "published", fastest=Roofs(6.86e12, 6.86e12, 1611e12, "published")),
}


def roofs_of(gpu: Gpu) -> Roofs | None:
    """The roofs of the GPU's name; None if they are not known."""
    return _ROOFS.get(gpu.name)


def speeds(roofs: Roofs) -> str:
    copy, add, gemm = roofs.copy / 1e12, roofs.add / 1e12, roofs.gemm / 1e12
    return f"copy {copy:.2f} TB/s, add {add:.2f} TB/s, GEMM {gemm:.0f} TFLOP/s"


@functools.cache
def gpu_of(device_index: int) -> Gpu:
    """The Gpu of CUDA device `device_index`, queried once per process."""
    import torch

    p: Any = torch.cuda.get_device_properties(device_index)
    name, family = p.name.removeprefix("NVIDIA "), f"sm_{p.major}{p.minor}"
    return Gpu(
        name=name,
        family=family,
        target=_TARGETS.get(family, family),
        sm_count=p.multi_processor_count,
        smem_bytes=p.shared_memory_per_block_optin,
        smem_bytes_per_sm=p.shared_memory_per_multiprocessor,
        threads_per_sm=p.max_threads_per_multi_processor,
        registers_per_sm=p.regs_per_multiprocessor,
        fast_memory=name.startswith(("H200", "B200", "GB200", "B300", "GB300")) or name.endswith("HBM3e"),
    )
