"""Functions of CuTe DSL such as other authors write, for tests of `emulator.compile`."""

import dataclasses
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass.utils import HardwareInfo

THREADS = 128


@cute.kernel
def multiply(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32):
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if i < x.shape[0]:
        y[i] = (x[i].to(cutlass.Float32) * factor).to(y.element_type)


@cute.jit
def scale(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32, stream: CUstream):
    grid = [cute.ceil_div(x.shape[0], THREADS), 1, 1]
    multiply(x, y, factor).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)


class Tensors(NamedTuple):
    x: cute.Tensor
    y: cute.Tensor


@dataclasses.dataclass(frozen=True)
class Options:
    factor: cutlass.Float32


class ScaleBySettings:
    """A kernel class: a constant, a tuple of tensors, a dataclass, and a default."""

    def __init__(self, power: int):
        self.power = power

    @cute.jit
    def __call__(self, tensors: Tensors, options: Options, more: cutlass.Float32 = 1.0):
        x, y = tensors
        factor = options.factor * more * 2.0**self.power
        multiply(x, y, factor).launch(grid=[cute.ceil_div(x.shape[0], THREADS), 1, 1], block=[THREADS, 1, 1])


@cute.kernel
def write_sizes(out: cute.Tensor, clusters: cutlass.Constexpr, sm_count: cutlass.Constexpr):
    out[0], out[1] = clusters, sm_count


@cute.jit
def ask_hardware(out: cute.Tensor):
    info = HardwareInfo()
    sizes = info.get_max_active_clusters(2), info.get_device_multiprocessor_count()
    # With min_blocks_per_mp the DSL asks for the shared memory of an SM.
    write_sizes(out, *sizes).launch(grid=[1, 1, 1], block=[32, 1, 1], min_blocks_per_mp=2)
