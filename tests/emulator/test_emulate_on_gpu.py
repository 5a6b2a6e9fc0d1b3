"""The same calls on a GPU and in the emulator: equal bits.

    python -m pytest -q tests/emulator/test_emulate_on_gpu.py       # on an H100 or H200

The kernels use no approximate function here, and inputs are integers. So all sums are exact, and do not depend on the
order of their terms, which matrix instructions leave open; what is rounded to 16 bits must have the same bits.
Without a GPU, exhaustive tests compare the emulator's completions, for calls that compile in little time.
"""

import contextlib

import pytest
import torch

import quackish
from quackish.device.kernel_device import device_of
from quackish.testing.errors import same_bits
from tests.emulator_cases import QUICK, emulated, is_emulator
from tests.linear_cross_entropy.test_gemms import LceKernels, ResidualArgs, launch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OFFS = [70, 70, 140]  # of 150 rows: one group without rows, and rows of no group


class Integers:
    """Random integers in [-largest, largest], and gradients of what is computed from them."""

    def __init__(self, device, dtype=BF16):
        self.device, self.dtype, self.generator, self.leaves = device, dtype, torch.Generator().manual_seed(0), []

    def __call__(self, *shape, largest=1):
        values = torch.randint(-largest, largest + 1, shape, generator=self.generator)
        leaf = values.to(self.dtype).to(self.device).requires_grad_()
        self.leaves.append(leaf)
        return leaf

    def results(self, y):
        """y and the gradients of all leaves."""
        with torch.no_grad():
            dy = torch.randint(-1, 2, y.shape, generator=self.generator).to(y.dtype).to(self.device)
        return [y.detach(), *torch.autograd.grad(y, self.leaves, dy)]


def offs(device):
    return torch.tensor(OFFS, dtype=torch.int32, device=device)


def groups_of_rows(device):
    integers = Integers(device)
    a, b = integers(150, 64, largest=9), integers(3, 64, 200, largest=9)
    return integers.results(quackish.grouped_mm(a, b, offs(device)))


def groups_of_columns(device):
    integers = Integers(device, FP16)
    a, b = integers(3, 136, 64, largest=3), integers(64, 152, largest=3)
    return integers.results(quackish.grouped_mm(a, b, offs(device)))


def groups_of_both(device):
    integers = Integers(device)
    a, b = integers(64, 152, largest=9), integers(152, 136, largest=9)
    return integers.results(quackish.grouped_mm(a, b, offs(device)))


def grouped_mlp(device):
    integers = Integers(device)
    x, w1, w2 = integers(150, 64), integers(3, 128, 64), integers(3, 64, 128)
    b1, b2, scales = integers(3, 128), integers(3, 64), integers(150, largest=2)
    y = quackish.grouped_mlp(x, w1, w2, offs(device), activation="relu2", b1=b1, b2=b2, scales=scales)
    return integers.results(y)


def moe_mlp(device):
    """token_rows copies the tokens to their experts, and adds the experts' results."""
    integers = Integers(device)
    x, weights, w1, w2 = integers(100, 64), integers(100, 2, largest=2), integers(4, 128, 64), integers(4, 64, 128)
    index = torch.rand(100, 4, generator=integers.generator).argsort(1)[:, :2].to(device)
    return integers.results(quackish.moe_mlp(x, index, weights, w1, w2, activation="relu2"))


def store_with_rounding_residual(device):
    """dweight of linear_cross_entropy, with the 16 bits that rounding to bf16 drops."""
    integers = Integers("cpu")
    e, x = (integers(200, n, largest=99).detach() for n in (136, 72))
    first_slots = torch.arange(136, dtype=torch.int32)
    after = launch(
        LceKernels(device_of(torch.device(device))), "dw", e=e, scaled_x=x, start=0, accumulate=False,
        state=torch.tensor([150], dtype=torch.int32), out=torch.zeros(136, 72, dtype=BF16),
        residual=ResidualArgs(first_slots, torch.zeros(136, 72, dtype=torch.int16)),
    )  # fmt: skip
    return [after.out, after.residual.rounding_residual]


def store_that_adds(device):
    integers = Integers("cpu")
    e, x = (integers(200, n, largest=9).detach() for n in (136, 72))
    after = launch(
        LceKernels(device_of(torch.device(device))), "dw", e=e, scaled_x=x, start=0, accumulate=True,
        state=torch.tensor([200], dtype=torch.int32), out=integers(136, 72, largest=99).detach().float(),
    )  # fmt: skip
    return [after.out]


def run(call, where):
    with emulated(where) if is_emulator(where) else contextlib.nullcontext() as report:
        results = call("cpu" if is_emulator(where) else f"cuda:{torch.cuda.current_device()}")
    if is_emulator(where):
        assert report.launches
    return [t.cpu() for t in results]


CALLS = [
    groups_of_rows, groups_of_columns, grouped_mlp, moe_mlp, groups_of_both, store_with_rounding_residual,
    store_that_adds,
]  # fmt: skip


@pytest.mark.parametrize(
    "call, where",
    [
        *(pytest.param(call, "cuda", marks=pytest.mark.gpu) for call in CALLS),
        *(pytest.param(call, "h200/at_once/1", marks=pytest.mark.exhaustive) for call in CALLS[4:]),
    ],
)
def test_integers_have_the_same_bits(call, where):
    if where == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the emulator is compared with Hopper's kernels, and this GPU is another one")
    ours, theirs = run(call, QUICK), run(call, where)
    assert any(t.count_nonzero() for t in ours)
    assert len(ours) == len(theirs)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert same_bits(a, b), f"result {i} differs"
