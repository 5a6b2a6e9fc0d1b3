"""Errors and warnings of RMSNorm: wrong arguments, and why there is no kernel."""

import contextlib
import dataclasses
import math
import warnings

import pytest
import torch

from quackish import errors, gpu
from quackish.device import choose, toolchain
from quackish.device.kernel_device import KernelDevice, device_of, substitute
from quackish.device.kernel_for import kernel_for
from quackish.errors import PortablePathWarning, UnsupportedError
from quackish.ops.rms_norm import operators as ops
from quackish.ops.rms_norm import plans
from quackish.ops.rms_norm.api import RMSNorm, rms_norm, rms_norm_backward, rms_norm_forward
from quackish.ops.rms_norm.problems import MAX_M, RmsNormBwdProblem, RmsNormFwdProblem
from tests.rms_norm import cases
from tests.rms_norm.cases import FP32, FP64, Functions, leaf, rows, weights
from tests.rms_norm.emulated import Emulated

X, W = torch.ones(4, 8), torch.ones(8)


ERRORS = [
    (lambda: rms_norm(X, torch.ones(5)), ValueError, "rms_norm: weight has 5 elements but x has 8 columns"),
    (lambda: rms_norm(X, W, torch.ones(9)), ValueError, "rms_norm: bias has 9 elements but x has 8 columns"),
    (
        lambda: rms_norm(X, torch.ones(1, 8)), ValueError,
        "rms_norm: weight is (1, 8) but x is (4, 8); expected (8,), or x's last two dimensions (heads, n)",
    ),
    (
        lambda: rms_norm(X, W, X), ValueError,
        "rms_norm: bias is (4, 8) but weight is (8,); expected weight's shape, or (8,) without weight",
    ),
    (lambda: rms_norm(X, None, X), ValueError, "rms_norm: bias is (4, 8) but weight is None; expected weight's"),
    (lambda: rms_norm(torch.tensor(1.0), W), ValueError, "rms_norm: x is (); expected (..., n) with n >= 1"),
    (lambda: rms_norm(X[:, :0], None), ValueError, "rms_norm: x is (4, 0); expected"),
    (lambda: rms_norm(X, W, residual=X[:2]), ValueError, "residual is (2, 8) but x is (4, 8); expected equal"),
    (lambda: rms_norm(X.int(), W), TypeError, "rms_norm: x is int32; expected one of bfloat16, float16, float32"),
    (lambda: rms_norm([1.0], W), TypeError, "rms_norm: x is a list; expected a torch.Tensor"),
    (lambda: rms_norm(X, W.to("meta")), ValueError, "rms_norm: weight is on meta but x is on cpu"),
    (lambda: rms_norm(X, W, eps=W), TypeError, "rms_norm: eps is a Tensor; expected a float"),
    (lambda: rms_norm(X, W, eps=1.0) is rms_norm(X, W, eps=True), TypeError, "eps is True, a bool"),
    (lambda: rms_norm(X, W, eps=-1e-6), ValueError, "rms_norm: eps is -1e-06; expected a finite number, at least 0"),
    (lambda: rms_norm_forward(X, W, eps=math.nan), ValueError, "rms_norm: eps is nan; expected a finite number"),
    (lambda: rms_norm(X, W, eps=0) is rms_norm(X, W, eps=math.inf), ValueError, "rms_norm: eps is inf; expected"),
    (lambda: ops.forward(X, W, None, None, None, -1.0, 0.0, None, None, "auto"), ValueError, "eps is -1.0; expected"),
    (lambda: RMSNorm(8, eps=-1), ValueError, "RMSNorm: eps is -1; expected a finite number, at least 0"),
    (lambda: RMSNorm(8, weight_offset=math.nan), ValueError, "RMSNorm: weight_offset is nan; expected a finite number"),
    (lambda: rms_norm(X, W, eps=1e300), ValueError, "rms_norm: eps is 1e+300; expected a finite number"),
    (lambda: RMSNorm(8, backend="cuda"), ValueError, "RMSNorm: backend is 'cuda'; expected one of 'auto'"),
    (lambda: RMSNorm(8, out_dtype="bf16"), TypeError, "RMSNorm: out_dtype is 'bf16', a str; expected None or one of"),
    (lambda: rms_norm_backward(X, X, W, W[:4], weight_offset=math.inf), ValueError, "weight_offset is inf; expected"),
    (lambda: rms_norm(X, W, weight_offset=None), TypeError, "rms_norm: weight_offset is None"),
    (lambda: rms_norm(X, None, weight_offset=1.0), ValueError, "weight_offset is 1.0 but weight is None"),
    (lambda: rms_norm(X, W, out_dtype=torch.int8), TypeError, "rms_norm: out_dtype is torch.int8; expected None"),
    (lambda: rms_norm(X, W, residual_dtype=FP32), ValueError, "residual_dtype is torch.float32 but residual is"),
    (lambda: rms_norm_backward(X, X, W, W[:4], dresidual=True, dresidual_dtype=int), TypeError, "dresidual_dtype is"),
    (lambda: rms_norm(X, W, dweight_out=X), ValueError, "dweight_out is (4, 8) but weight is (8,); expected"),
    (lambda: rms_norm(X, None, dweight_out=W), ValueError, "dweight_out is (8,) but weight is None; expected"),
    (lambda: rms_norm(X, W, dweight_out=W.half()), TypeError, "dweight_out is float16; expected float32 or weight's"),
    (lambda: rms_norm(X, W, dweight_out=1.0), TypeError, "rms_norm: dweight_out is 1.0, a float; expected a torch"),
    (lambda: rms_norm(X, W, backend="cuda"), ValueError, "rms_norm: backend is 'cuda'; expected one of 'auto'"),
    (lambda: rms_norm(X, W, backend="cute"), UnsupportedError, "rms_norm: no kernel for cpu tensors"),
    (lambda: rms_norm_backward(X[:3], X, W, X[:, 0]), ValueError, "backward: dy is (3, 8) but x is (4, 8)"),
    (lambda: rms_norm_backward(X, X, W, W), ValueError, "rms_norm_backward: rstd is (8,), strides (1,), and x is"),
    (lambda: rms_norm_backward(X, X, W, W[:4].half()), TypeError, "rms_norm_backward: rstd is float16; expected"),
    (lambda: rms_norm_backward(None, X, W, W[:4]), TypeError, "rms_norm_backward: dy is None; expected"),
    (
        lambda: ops.backward(X, X, W, W[:4], None, 0.0, None, FP32, None, None, "auto"), ValueError,
        "rms_norm_backward: dresidual_dtype is given without dx_dtype; for one gradient, pass dx_dtype",
    ),
    (
        lambda: RMSNorm(8, elementwise_affine=False, weight_offset=1.0), ValueError,
        "RMSNorm: weight_offset is 1.0 but elementwise_affine is False",
    ),
    (lambda: RMSNorm(9)(X), ValueError, "RMSNorm: x is (4, 8); expected (..., 9)"),
    (lambda: RMSNorm((4, 8))(X, X.view(8, 4)), ValueError, "RMSNorm: residual is (8, 4) but x is (4, 8)"),
    (lambda: RMSNorm((4, 8))(X, dweight_out=X.view(8, 4)), ValueError, "RMSNorm: dweight_out is (8, 4) with strides"),
    (lambda: RMSNorm((4, 8))(X, dweight_out=X.view(8, 4).t()), ValueError, "(1, 4); expected contiguous (4, 8)"),
]  # fmt: skip


@pytest.mark.parametrize("call, kind, text", ERRORS)
def test_errors_name_the_argument(call, kind, text):
    for _ in range(2):  # the first call must not cache a plan
        with pytest.raises(kind) as caught:
            call()
        assert text in str(caught.value)


def test_tensors_without_memory_raise(norm_kernels):
    x, w = rows((3, 8)), weights(8)
    w.untyped_storage().resize_(0)  # as FSDP does after resharding a parameter
    with pytest.raises(ValueError, match=r"rms_norm: weight has shape \(8,\) but no memory"):
        rms_norm(x, w)
    assert not norm_kernels.launches


def test_modified_input_raises(norm_anywhere):
    x, w = leaf(rows((6, 8))) * 1.0, leaf(weights(8))
    y = rms_norm(x, w)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# No kernel ------------------------------------------------------------------------------------------------------------


def find(problem, backend="auto", device="cuda:0", m=5, **options):
    device = torch.device(device)
    return plans.find_kernel(problem, m, device, device_of(device), backend, **options)


FP32_PROBLEM = RmsNormFwdProblem(8, "float32", "float32")


@pytest.fixture
def two_gpus():
    with (
        substitute("cuda:0", KernelDevice(gpu.H200, kernel_for)),
        substitute("cuda:1", KernelDevice(gpu.A100, kernel_for)),
    ):
        yield


def test_one_warning_or_error_without_a_kernel(two_gpus):
    errors._warned.clear()
    for call, text in (
        (lambda: find(FP32_PROBLEM, device="cuda:1"), r"no kernel for sm_80 \(A100\); supported: sm_90"),
        (
            lambda: find(dataclasses.replace(FP32_PROBLEM, weight_dtype="float64")),
            "no kernel for weight in float64; supp",
        ),
        (lambda: find(FP32_PROBLEM, rstd_dtype=FP64), "no kernel for rstd in float64; supported: float32"),
        (lambda: find(FP32_PROBLEM, m=MAX_M + 1), "no kernel for 2146435073 rows of 8; at most 2146435072"),
    ):
        with pytest.warns(PortablePathWarning, match=f"^rms_norm: {text}"):
            assert call() is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert call() is None  # warned before
    with pytest.raises(UnsupportedError, match="rows of 8"):
        find(FP32_PROBLEM, backend="cute", m=MAX_M + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_reason = RmsNormBwdProblem(8, "float32", "float32")  # the same reason in both directions
        assert find(one_reason, device="cuda:1") is None
        assert find(FP32_PROBLEM, m=MAX_M + 2, backend="reference") is None
        assert find(FP32_PROBLEM, device="cpu") is None


def test_without_the_compiler():
    errors._warned.clear()

    def kernel_for(problem, gpu):
        return toolchain._folder("nvidia-cutlass-dsl", "not_installed")

    with substitute("cuda:0", KernelDevice(gpu.H200, kernel_for)):
        with pytest.warns(
            PortablePathWarning, match=r"^rms_norm: nvidia-cutlass-dsl.*installs it\. backend=.auto. runs"
        ):
            assert find(FP32_PROBLEM) is None
        with pytest.raises(UnsupportedError, match="no module named 'not_installed'"):
            find(FP32_PROBLEM, backend="cute")


@pytest.mark.parametrize("mode", ["function", "module", "operator", "no_grad", "backward", "compiled"])
def test_warning_points_at_the_users_line(mode):
    errors._warned.clear()
    choose.reload()
    emulated = Emulated()
    missing = RmsNormBwdProblem if mode == "backward" else RmsNormFwdProblem

    def kernel_for(problem, on):
        if type(problem) is missing:
            raise UnsupportedError("why")
        return emulated.kernel_for(problem, on)

    call = dict(module=RMSNorm(8), compiled=torch.compile(lambda x: rms_norm(x, None), backend="aot_eager"))
    call = call.get(mode, lambda x: rms_norm(x, None))
    context = {"operator": Functions(), "no_grad": torch.no_grad()}.get(mode, contextlib.nullcontext())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with substitute("cpu", dataclasses.replace(emulated.device, kernel_for=kernel_for)):
            with context:
                y = call(leaf(rows((4, 8))))
            if mode == "backward":
                y.sum().backward()
    line_in = cases.__file__ if mode == "operator" else __file__  # the user's function mode makes the call
    assert [w.filename for w in seen if "why" in str(w.message)] == [line_in]
