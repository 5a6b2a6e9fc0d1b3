"""What quackish knows about a GPU: the one place that asks the device about itself."""

import dataclasses
import functools


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU as configs see it. `target` is what the compiler is given, `family` what kernels are listed under."""

    name: str
    family: str  # "sm_90", "sm_100", ...: the compute capability
    target: str  # "sm_90a": with the suffix that unlocks the family's own instructions
    sm_count: int
    smem_bytes: int  # shared memory one CTA may use
    smem_bytes_per_sm: int


# Shared memory: the CUDA C++ Programming Guide, compute capabilities 9.0, 10.0 and 10.3. SMs: NVIDIA's data sheets;
# B300 is assumed to have as many as B200.
_SMEM = dict(smem_bytes=232_448, smem_bytes_per_sm=233_472)
H100 = Gpu("H100", "sm_90", "sm_90a", sm_count=132, **_SMEM)  # SXM
H100_PCIE = Gpu("H100 PCIe", "sm_90", "sm_90a", sm_count=114, **_SMEM)
H100_NVL = Gpu("H100 NVL", "sm_90", "sm_90a", sm_count=132, **_SMEM)
GH200 = Gpu("GH200", "sm_90", "sm_90a", sm_count=132, **_SMEM)
H200 = Gpu("H200", "sm_90", "sm_90a", sm_count=132, **_SMEM)
B200 = Gpu("B200", "sm_100", "sm_100a", sm_count=148, **_SMEM)
B300 = Gpu("B300", "sm_103", "sm_103a", sm_count=148, **_SMEM)

# What runs the portable path: here for `explain`, which says so. Their numbers are from the same two sources.
A100 = Gpu("A100", "sm_80", "sm_80", sm_count=108, smem_bytes=166_912, smem_bytes_per_sm=167_936)
A10 = Gpu("A10", "sm_86", "sm_86", sm_count=72, smem_bytes=101_376, smem_bytes_per_sm=102_400)
L40S = Gpu("L40S", "sm_89", "sm_89", sm_count=142, smem_bytes=101_376, smem_bytes_per_sm=102_400)

_KNOWN = (H100, H100_PCIE, H100_NVL, GH200, H200, B200, B300, A100, A10, L40S)
NAMED = {gpu.name.lower().replace(" ", "-"): gpu for gpu in _KNOWN}

# Families whose own instructions need the architecture-specific target; all others get the plain one.
_TARGETS = {"sm_90": "sm_90a", "sm_100": "sm_100a", "sm_103": "sm_103a"}


@dataclasses.dataclass(frozen=True)
class Roofs:
    """What a kernel cannot be faster than on a GPU, and where the numbers are from: "measured" or "data sheet".

    `explain` computes floors from both; `profile` compares with measured roofs only.
    """

    copy: float  # bytes a second of device memory, read and written: one read to one write
    add: float  # ... two reads to one write, which is what DRAM likes better
    gemm: float  # FLOPs a second of the tensor cores, dense bf16 or fp16
    source: str
    note: str = ""


# SXM. copy: 2 GB. add: `torch.add(a, b, out=c)` at 65536 x 4096 in bf16, 529.6 us. gemm: the three of linear cross
# entropy at 8192, 4096, 128256 by cuBLAS in bursts, 36.5 ms; one of 8192^3 reaches 798. Data sheet: 3.35 TB/s, 989.
_H100_ROOFS = Roofs(3.0e12, 3.04e12, 707e12, "measured", "707 TFLOP/s is at the power limit; short GEMMs reach 798.")
_ROOFS = {
    "H100": _H100_ROOFS,
    "H100 80GB HBM3": _H100_ROOFS,  # as the SXM card calls itself
    # copy: 2 GB. add: `torch.add(a, b, out=c)` at 16384 x 65536 in bf16, benchmarks/results/H200/rms_norm.csv. gemm:
    # the three of linear cross entropy at 8192, 4096, 128256 by cuBLAS, 37 ms, linear_cross_entropy.csv beside it; in
    # that file single GEMMs of 0.6 to 1.4 ms reach 746 to 843. The data sheet has 4.8 TB/s and 989 TFLOP/s.
    "H200": Roofs(
        4.25e12, 4.39e12, 700e12, "measured", "700 TFLOP/s is at the power limit; GEMMs of a millisecond reach 840."
    ),
    "B200": Roofs(8e12, 8e12, 2250e12, "data sheet"),  # NVIDIA HGX B200 data sheet, an eighth; without sparsity
}


def roofs_of(gpu: Gpu) -> Roofs | None:
    """By the name alone; None for a GPU that is not in the table, whose roofs are not known."""
    return _ROOFS.get(gpu.name)


@functools.cache
def gpu_of(device_index: int) -> Gpu:
    """The Gpu behind CUDA device `device_index`; asked once a process."""
    import torch

    p = torch.cuda.get_device_properties(device_index)
    family = f"sm_{p.major}{p.minor}"
    return Gpu(
        name=p.name.removeprefix("NVIDIA "),
        family=family,
        target=_TARGETS.get(family, family),
        sm_count=p.multi_processor_count,
        smem_bytes=p.shared_memory_per_block_optin,
        smem_bytes_per_sm=p.shared_memory_per_multiprocessor,
    )
