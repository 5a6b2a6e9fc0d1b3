"""Small kernels for the launcher's tests: one for the GPU, one that runs on the CPU, one that does not compile."""

import dataclasses
from typing import Optional

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, const_expr


@dataclasses.dataclass(frozen=True)
class ToyProblem:
    dtype: str = "bfloat16"
    bias: bool = False


@dataclasses.dataclass(frozen=True)
class ToyConfig:
    threads: int = 128
    local_array: bool = False  # use a register array with a runtime index, which is in local memory like spills


class Toy:
    """o = alpha * reversed x (+ b); each CTA reverses its elements through shared memory."""

    def __init__(self, problem: ToyProblem, config: ToyConfig):
        self.problem, self.config = problem, config

    def fake_args(self):
        dtype = {"bfloat16": cutlass.BFloat16, "float32": cutlass.Float32}[self.problem.dtype]
        n = cute.sym_int()
        x, b, o = (cute.runtime.make_fake_compact_tensor(dtype, (n,), assumed_align=16) for _ in range(3))
        stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
        return x, b if self.problem.bias else None, o, Float32(1), stream

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,
        mB: Optional[cute.Tensor],  # noqa: UP045
        mO: cute.Tensor,
        alpha: Float32,
        stream: CUstream,
    ):
        threads = self.config.threads
        grid, block = [cute.ceil_div(mX.shape[0], threads), 1, 1], [32, threads // 32, 1]
        self.kernel(mX, mB, mO, alpha).launch(grid=grid, block=block, stream=stream)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mB: Optional[cute.Tensor], mO: cute.Tensor, alpha: Float32):  # noqa: UP045
        threads = self.config.threads
        tid = cute.arch.thread_idx()[1] * 32 + cute.arch.thread_idx()[0]
        i = cute.arch.block_idx()[0] * threads + tid
        sX = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(threads), 16)
        sX[tid] = mX[i].to(Float32) * alpha if i < mX.shape[0] else Float32(0)
        cute.arch.sync_threads()
        v = sX[threads - 1 - tid]
        if const_expr(self.config.local_array):
            r = cute.make_rmem_tensor((32,), Float32)
            r.fill(0.0)
            for k in cutlass.range(threads, unroll=1):
                r[(k * i) % 32] += sX[k]
            v = r[i % 32]
        if i < mX.shape[0]:
            if const_expr(mB is not None):
                v += mB[i].to(Float32)
            mO[i] = v.to(mO.element_type)


@dataclasses.dataclass(frozen=True)
class HostProblem:
    factor: int = 2


@dataclasses.dataclass(frozen=True)
class HostConfig:
    unroll: int = 1


class HostToy:
    """o = factor * x in host code only, so the compiled function can be called without a GPU."""

    def __init__(self, problem: HostProblem, config: HostConfig):
        self.problem, self.config = problem, config

    def fake_args(self):
        n = cute.sym_int()
        return tuple(
            cute.runtime.make_fake_compact_tensor(Float32, (n,), memspace=cute.AddressSpace.generic) for _ in range(2)
        )

    @cute.jit
    def __call__(self, mX: cute.Tensor, mO: cute.Tensor):
        for i in cutlass.range(mX.shape[0], unroll=self.config.unroll):
            mO[i] = mX[i] * Float32(self.problem.factor)


class BrokenToy(HostToy):
    @cute.jit
    def __call__(self, mX: cute.Tensor, mO: cute.Tensor):
        mO[0] = mX.no_such_attribute
