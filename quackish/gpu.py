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


# As the CUDA C++ Programming Guide gives them for compute capabilities 9.0 and 10.0; the SMs are NVIDIA's data sheets'.
_SMEM = dict(smem_bytes=232_448, smem_bytes_per_sm=233_472)
H100 = Gpu("H100", "sm_90", "sm_90a", sm_count=132, **_SMEM)
H200 = Gpu("H200", "sm_90", "sm_90a", sm_count=132, **_SMEM)
B200 = Gpu("B200", "sm_100", "sm_100a", sm_count=148, **_SMEM)

# Families whose own instructions need the architecture-specific target; all others get the plain one.
_TARGETS = {"sm_90": "sm_90a", "sm_100": "sm_100a"}


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
