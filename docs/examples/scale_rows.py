"""A kernel of one's own, which docs/emulator.md runs in the emulator: y[i, j] = factor * x[i, j] * scale[i]."""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream

THREADS = 128


@cute.kernel
def kernel(x: cute.Tensor, scale: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32):
    row, _, _ = cute.arch.block_idx()
    column, _, _ = cute.arch.thread_idx()
    while column < x.shape[1]:
        y[row, column] = (x[row, column].to(cutlass.Float32) * scale[row] * factor).to(y.element_type)
        column += THREADS


@cute.jit
def scale_rows(x: cute.Tensor, scale: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32, stream: CUstream):
    kernel(x, scale, y, factor).launch(grid=[x.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream)
