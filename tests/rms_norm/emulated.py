"""The kernels of RMSNorm in PyTorch.

They take the same arguments and access the same memory as compiled ones. Forward and backward of 20 x 256 take 0.002 s
of CPU; the emulator, which runs the compiled kernels, takes 0.3 s, and 3 s with compiling them for new options.
"""

import ctypes
import functools

import torch

from quackish import gpu
from quackish.device.kernel_device import KernelDevice
from quackish.device.kernel_for import CompiledKernel
from quackish.ops.rms_norm import reference
from quackish.ops.rms_norm.problems import RmsNormBwdProblem, RmsNormFwdProblem

FP32 = torch.float32
STREAM = 1234  # the handle of the current stream


class EmulatedConfig:
    def num_ctas(self, m, sm_count, heads):
        assert sm_count == gpu.H200.sm_count
        return min(m, 7)

    def scratch_floats(self, problem, num_ctas):
        return num_ctas * problem.n


class Emulated:
    """Emulated kernels, and their launches as (problem, arguments)."""

    def __init__(self):
        self.launches, self.tickets, self.scratch = [], torch.zeros(3, dtype=torch.int32), []
        self.device = KernelDevice(gpu.H200, self.kernel_for, stream=lambda: STREAM, workspace=self.take)

    def kernel_for(self, problem, on):
        assert on == gpu.H200
        kernel = {RmsNormFwdProblem: self.forward, RmsNormBwdProblem: self.backward}[type(problem)]
        return CompiledKernel(functools.partial(kernel, problem), EmulatedConfig())

    def take(self, stream, scratch_floats):
        assert stream == STREAM
        self.scratch.append(torch.empty(scratch_floats))
        return self.tickets.data_ptr(), self.scratch[-1].data_ptr(), None

    def forward(self, p, args, stream):
        x, weight, bias, residual, y, res, rstd, x_rows, residual_rows, eps, weight_offset, m, num_ctas = args
        self.launches.append((p, args))
        assert stream == STREAM
        assert num_ctas == min(m, 7)
        res_dtype = p.res_dtype or p.residual_dtype
        out_y, out_res, out_rstd = reference.rms_norm_fwd(
            read_rows(p, x, p.x_dtype, m, x_rows),
            read_parameter(p, weight, p.weight_dtype),
            read_parameter(p, bias, p.bias_dtype),
            read_rows(p, residual, p.residual_dtype, m, residual_rows),
            eps,
            weight_offset,
            None if res_dtype is None else getattr(torch, res_dtype),
            getattr(torch, p.y_dtype),
        )
        write(p, y, p.y_dtype, out_y)
        write(p, res, res_dtype, out_res)
        write(p, rstd, "float32", out_rstd)

    def backward(self, p, args, stream):
        x, weight, dy, dres, rstd, dx, dresidual, dweight, dbias, scratch, ticket = args[:11]
        x_rows, dy_rows, dres_rows, weight_offset, m, num_ctas = args[11:]
        self.launches.append((p, args))
        assert stream == STREAM
        if p.dweight_dtype or p.dbias_dtype:
            assert not memory(ticket, torch.int32, 3).any()
            memory(scratch, FP32, num_ctas * p.n).fill_(float("nan"))
        else:
            assert scratch is None
            assert ticket is None
        dtypes = (p.dx_dtype, p.dresidual_dtype, "float32" if p.add_dweight else p.dweight_dtype, p.dbias_dtype)
        out = reference.rms_norm_bwd(
            read_rows(p, dy, p.dy_dtype, m, dy_rows),
            read_rows(p, x, p.x_dtype, m, x_rows),
            read_parameter(p, weight, p.weight_dtype),
            memory(rstd, FP32, m).view(-1, p.heads),
            read_rows(p, dres, p.dres_dtype, m, dres_rows),
            weight_offset,
            *(getattr(torch, dtype) if dtype else None for dtype in dtypes),
        )
        if p.add_dweight:
            there = memory(dweight, getattr(torch, p.dweight_dtype), p.heads * p.n)
            there.copy_(there.float() + out[2].view(-1))
            out, dweight, dtypes = (*out[:2], None, out[3]), None, (*dtypes[:2], None, dtypes[3])
        for pointer, dtype, value in zip((dx, dresidual, dweight, dbias), dtypes, out, strict=True):
            write(p, pointer, dtype, value)


def memory(address, dtype, size):
    return torch.frombuffer((ctypes.c_char * (size * dtype.itemsize)).from_address(address), dtype=dtype)


def read_rows(p, address, dtype, m, layout):
    """(m / heads, heads, n) at the given addresses; None if the problem has no such tensor."""
    assert (address is None) == (dtype is None)
    assert (layout is None) == (p.packed or dtype is None)
    if dtype is None:
        return None
    dtype = getattr(torch, dtype)
    m1, s0, s1 = layout or (1, p.n, 0)
    r = torch.arange(m).view(-1, p.heads)
    start = (r // m1) * s0 + (r % m1) * s1
    assert not p.aligned or (address % 16 == 0 and not (start * dtype.itemsize % 16).any())
    return memory(address, dtype, int(start.max()) + p.n)[start[..., None] + torch.arange(p.n)]


def read_parameter(p, address, dtype):
    assert (address is None) == (dtype is None)
    assert not (p.aligned and address and address % 16)
    return None if dtype is None else memory(address, getattr(torch, dtype), p.heads * p.n).view(p.heads, p.n)


def write(p, address, dtype, value):
    assert (address is None) == (dtype is None)
    if dtype is not None:
        assert not p.aligned or address % 16 == 0
        memory(address, getattr(torch, dtype), value.numel()).copy_(value.reshape(-1))
