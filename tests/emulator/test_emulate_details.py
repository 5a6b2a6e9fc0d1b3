"""Details of kernels, run in the emulator on small shapes. Each test kills mutations of scripts/mutations.py."""

import ctypes
import dataclasses

import pytest
import torch

import quackish
from quackish.device.kernel_device import device_of, substitute
from quackish.device.kernel_for import CompiledKernel
from quackish.emulator.memory import host_regions
from quackish.gpu import H200
from quackish.testing.errors import error, same_bits
from tests import emulated_kernels as stand_ins
from tests.linear_cross_entropy.test_gemms import ExpLogits, LceKernels, ResidualArgs, RowsOutArgs, add_residual, launch

BF16, FP32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")
completions = pytest.mark.parametrize("completion", ["late", "at_once"])


def gpu(sm_count):
    return dataclasses.replace(H200, sm_count=sm_count)


def random(*shape, dtype=BF16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# GEMMs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@completions
def test_tail_tiles_are_split_along_k(completion):
    """Two tiles on four clusters: two splits each."""
    m, h, k = 300, 8, 40 * 64
    e, w, scale = random(m, k), random(k, h, seed=1), torch.rand(m) + 0.5
    order, num_live = torch.randperm(m).int(), torch.tensor([m], dtype=torch.int32)
    with quackish.emulate(gpu(8), completion):
        out = launch(  # checks that the tickets are 0 again
            LceKernels(device_of(CPU)), "dx", e=ExpLogits(e), w=w, state=num_live, start=0,
            out=torch.full((m, h), torch.nan, dtype=BF16), split_tail=True, epilogue=RowsOutArgs(scale, order),
        ).out  # fmt: skip
    assert error(out[order.long()].double(), e.double() @ w.double() * scale[:, None]).norm < 0.003


@pytest.mark.exhaustive
def test_rounding_residual_of_ties():
    """A residual has 16 bits, and one of a tie that rounds down would need another one."""
    x = torch.tensor([[1.0, 1 + 2**-7, -1.0, -1 - 2**-7] * 2, [2**-8, 2**-8, -(2**-8), -(2**-8)] * 2]).to(BF16)
    e, first_slots = torch.ones(2, 8, dtype=BF16), torch.arange(8, dtype=torch.int32)
    with quackish.emulate(gpu(4)):
        after = launch(
            LceKernels(device_of(CPU)), "dw", e=e, scaled_x=x, state=torch.tensor([2], dtype=torch.int32), start=0,
            out=torch.zeros(8, 8, dtype=BF16), accumulate=False,
            residual=ResidualArgs(first_slots, torch.zeros(8, 8, dtype=torch.int16)),
        )  # fmt: skip
    want = x.float().sum(0).expand(8, 8)
    assert same_bits(after.out, want.to(BF16))
    assert torch.allclose(add_residual(after.out, after.residual.rounding_residual), want, rtol=2**-23, atol=0)


# Linear cross entropy -------------------------------------------------------------------------------------------------


def losses(x, w, target, **options):
    return quackish.linear_cross_entropy(x, w, target, reduction="none", **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", [5, 130, 300, 399])  # of each tile of 128 rows; a cluster has two
def test_a_row_far_above_its_target_is_recomputed(row):
    """Its tile of rows is flagged; exponentials of other rows are kept."""
    x, w, target = random(400, 64), random(264, 64, seed=1), torch.arange(400) % 264
    x[row] *= 60
    with quackish.emulate(gpu(4)):
        got = losses(x, w, target)
    assert error(got.double(), losses(x.double(), w.double(), target, backend="reference")).norm < 1e-4


def memory_of(args):
    """The tensors' memory at the addresses in a kernel's arguments, as bytes."""
    for generation in range(3):
        regions = host_regions(generation)
    values = {value for value in torch.utils._pytree.tree_leaves(args) if isinstance(value, int)}
    return [
        torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
        for address, size in regions
        if any(address <= value < address + size for value in values)
    ]


def like_stand_ins(device, names):
    """(the device, names of the kernels that have run): these kernels must write the bits that PyTorch code writes.

    PyTorch code replaces all other kernels.
    """
    seen = set()

    def kernel_for(problem, gpu):
        name, stand_in = problem.spec.name, stand_ins.kernel_for(problem, gpu)
        if name not in names:
            return stand_in
        kernel = device.kernel_for(problem, gpu)

        def launch(args, stream):
            memory = memory_of(args)
            before = [part.clone() for part in memory]
            stand_in.launch(args, stream)
            want = [part.clone() for part in memory]
            for part, content in zip(memory, before, strict=True):
                part.copy_(content)
            kernel.launch(args, stream)
            assert any(not torch.equal(*parts) for parts in zip(memory, before, strict=True))
            assert all(torch.equal(*parts) for parts in zip(memory, want, strict=True)), name
            seen.add(name)

        return CompiledKernel(launch, kernel.config)

    return dataclasses.replace(device, kernel_for=kernel_for, cache={}), seen


@pytest.mark.exhaustive
@pytest.mark.parametrize("targets", ["few classes", "no class"])
def test_compact_and_sort_write_what_their_stand_ins_write(targets):
    x, w = random(70, 64).requires_grad_(), random(264, 64, seed=1).requires_grad_()
    target = torch.arange(70) % 5 if targets == "few classes" else torch.full((70,), 264)
    target[::3] = -100
    with quackish.emulate(gpu(4)):
        device, seen = like_stand_ins(device_of(CPU), ("lce_compact", "lce_sort"))
        with substitute("cpu", device):
            quackish.linear_cross_entropy(x, w, target).backward()
    assert seen == {"lce_compact", "lce_sort"}


@pytest.mark.exhaustive
def test_each_launch_waits_for_the_one_before():
    """The emulator checks it. All kernels around the GEMMs begin early."""
    x, w = random(70, 64), random(264, 64, seed=1)
    with quackish.emulate(gpu(4)) as report:
        losses(x, w, torch.arange(70))
    assert {"lce_compact", "lce_gather", "lce_rows"} < {launch.kernel for launch in report.launches}


# RMSNorm --------------------------------------------------------------------------------------------------------------


def test_y_is_the_norm_of_the_rounded_sum():
    """y is fp32, so it shows whether the bf16 sum was rounded."""
    x, residual, weight = random(9, 264, dtype=FP32), random(9, 264, seed=1), random(264, dtype=FP32, seed=2)
    with quackish.emulate(gpu(4)):
        y, total = quackish.rms_norm(x, weight, residual=residual)
    assert total.dtype == BF16
    want = torch.nn.functional.rms_norm(total.double(), (264,), weight.double(), 1e-6)
    assert error(y.double(), want).norm < 1e-6


@pytest.mark.exhaustive
@pytest.mark.parametrize("n, completion", [(257, "late"), (512, "at_once")])
def test_gradients_of_all_rows_and_columns(n, completion):
    """More tiles of rows than CTAs, in a number that does not divide; 257 columns end in a slice of one."""
    leaves = [random(133, n).requires_grad_(), random(n, seed=1).requires_grad_()]
    dy = random(133, n, seed=2)
    with quackish.emulate(gpu(2), completion):
        got = torch.autograd.grad(quackish.rms_norm(*leaves), leaves, dy)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    want = torch.autograd.grad(torch.nn.functional.rms_norm(exact[0], (n,), exact[1], 1e-6), exact, dy.double())
    for gradient, truth in zip(got, want, strict=True):
        assert error(gradient.double(), truth).norm < 0.004
