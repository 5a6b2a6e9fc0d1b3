"""The asserts of quackish.testing: what passes, and the messages of failures."""

import re

import pytest
import torch

import quackish
from quackish.testing import assert_close_to_fp64, assert_deterministic
from quackish.testing.errors import error

X = torch.randn(4, 8)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Scale(torch.autograd.Function):
    """x * factor, with a gradient multiplied by `wrong`."""

    @staticmethod
    def forward(ctx, x, factor, wrong):
        ctx.factor = factor * wrong
        return x * factor

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.factor, None, None


def raises(text, check, *args, **options):
    with pytest.raises(AssertionError, match=f"^{check.__name__}: {re.escape(text)}"):
        check(*args, **options)


@pytest.mark.parametrize("emulate", [None, "h200"])
def test_deterministic_says_what_ran(emulate):
    x, weight = torch.randn(4, 64).bfloat16().requires_grad_(), torch.ones(64, requires_grad=True)
    ran = assert_deterministic(quackish.rms_norm, x, weight, runs=3, emulate=emulate)
    assert ran == (("cpu", 3, 0) if emulate is None else ("an emulated h200", 3, 6))


def test_deterministic_in_the_emulator_finds_what_depends_on_completion():
    calls = []

    def changes(x):
        calls.append(1)
        return quackish.rms_norm(x, None) + (len(calls) == 3)

    message = "output 0 .* in run 3 of 6, with completion='late' and seed=1 on an emulated h200"
    with pytest.raises(AssertionError, match=message):
        assert_deterministic(changes, torch.randn(4, 64).bfloat16(), emulate="h200")


@pytest.mark.parametrize("device", DEVICES)
def test_deterministic(device):
    x, index = torch.randn(4, 8, device=device, requires_grad=True), torch.arange(3, device=device)
    calls = []

    def once_in(run, of):
        """2 in one run of `of`, else 1."""
        calls.append(None)
        return 1.0 + (len(calls) % of == run)

    assert_deterministic(lambda x, i: {"rows": (x[i] * 2, i), "sum": x.sum()}, x, index, runs=5)
    assert_deterministic(lambda: torch.full((3,), float("nan")), runs=2)
    name = "output 1 differs in 32 of 32 elements in run 3 of 4"
    raises(name, assert_deterministic, lambda x: (x + 1, x * once_in(3, 4)), x, runs=4)
    calls.clear()
    name = "gradient of input 1 differs in 32 of 32 elements in run 2 of 3"
    raises(name, assert_deterministic, lambda scale, x: Scale.apply(x, scale, once_in(2, 3)), 2.0, x, runs=3)
    calls.clear()
    shapes = "output 0 is (2, 8) float32 instead of (1, 8) float32 in run 2 of 2"
    raises(shapes, assert_deterministic, lambda x: x[: int(once_in(2, 3))], x, runs=2)


@pytest.mark.gpu
def test_memory_that_is_not_written_is_found():
    torch.zeros(1 << 16, device="cuda")  # free memory is zero at first
    raises("output 0 differs", assert_deterministic, lambda: torch.empty(1 << 16, device="cuda"), runs=2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_close_to_fp64(dtype, device):
    x = torch.randn(64, 8, device=device).to(dtype).requires_grad_()
    eps = torch.finfo(dtype).eps

    def scale(x, by, wrong=1.0):
        return {"product": Scale.apply(x, by, wrong), "largest": x.argmax(1)}

    assert_close_to_fp64(scale, scale, x, 1 / 3)
    wrong = "output 0 differs in 64 of 64 elements"
    raises(wrong, assert_close_to_fp64, lambda x: x.argmax(1), lambda x: x.argmax(1) + 1, x)
    how = dict(
        match=rf"gradient of input 0, \(64, 8\) {str(dtype)[6:]}, has error .* norm-wise and .*; expected at most"
    )
    with pytest.raises(AssertionError, **how):
        assert_close_to_fp64(lambda x, by: scale(x, by, 1 + 64 * eps), scale, x, 1 / 3)
    assert_close_to_fp64(lambda x, by: scale(x, by, 1 + 64 * eps), scale, x, 1 / 3, slack=128)
    one_element = torch.zeros_like(x)
    one_element[5, 5] = 80 * eps * x.detach().abs().max()
    with pytest.raises(AssertionError, match=r"output 0, .* at the worst element"):
        assert_close_to_fp64(lambda x: x + one_element, lambda x: x * 1, x)
    raises("output 0 is (8,), expected reference's ()", assert_close_to_fp64, lambda x: x.sum(0), torch.sum, x)
    name = (
        "function gives output 0, gradient of input 0; expected output 0, output 1, gradient of input 0, as reference"
    )
    raises(name, assert_close_to_fp64, lambda x: x * 1, lambda x: (x * 1, x), x)
    nan = torch.tensor(float("nan"), device=device)
    raises("output 0, (64, 8)", assert_close_to_fp64, lambda x: torch.where(x == x.max(), nan, x), lambda x: x * 1, x)


def test_one_run_is_not_enough():
    with pytest.raises(ValueError, match="assert_deterministic: runs is 1; expected at least 2"):
        assert_deterministic(torch.sin, X, runs=1)


def test_gradients_of_outputs_are_not_the_inputs():
    """As when both have seed 0: the gradient of a norm would be nearly 0."""
    x, seen = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).requires_grad_(), []

    def function(x):
        y = x * 1
        y.register_hook(seen.append)
        return y

    assert_close_to_fp64(function, function, x)
    assert len(seen) == 2
    assert all(dy.abs().mean() > 0.5 and (dy - x).abs().mean() > 0.5 for dy in seen)


@pytest.mark.parametrize("check", [lambda f: assert_deterministic(f, X), lambda f: assert_close_to_fp64(f, f, X)])
def test_a_function_without_tensors(check):
    with pytest.raises(TypeError, match="returned a float without tensors; expected a tensor, or tuples"):
        check(lambda x: x.sum().item())


def test_equal_infinities_are_close():
    def masked(x):
        return torch.where(X > 0, x, -torch.inf)

    assert_close_to_fp64(masked, masked, X)
    for wrong in (lambda x: -masked(x), lambda x: masked(x) * 1.001, lambda x: masked(x).clamp(min=-1e30)):
        with pytest.raises(AssertionError, match="output 0, "):
            assert_close_to_fp64(wrong, masked, X)


def test_noise_is_subtracted_from_errors():
    truth, noise = torch.tensor([4.0, -4.0], dtype=torch.float64), torch.tensor([0.25, 0.25])
    assert error(truth + noise, truth, noise) == (0.0, 0.0)
    assert error(truth + 3 * noise, truth, noise) == (0.125, 0.0625)
