"""The table of operations: arguments of calls on every device, and results compared with the reference in fp64."""

import inspect

import pytest
import torch

from quackish.gpu import H200
from quackish.ops.shared.dry_run import dry_run
from quackish.ops.shared.for_tools import in_fp64, operations, parse_shape

OPERATIONS = operations()
CPU, META, BF16 = torch.device("cpu"), torch.device("meta"), torch.bfloat16
CALLS = [(name, option) for name, op in OPERATIONS.items() for option in (None, *op.options)]
SELF_TESTS = [(name, what) for name, op in OPERATIONS.items() if op.spec and op.has_dry_run for what in op.self_tests]


def options_of(op, option):
    return {} if option is None else {option: op.options[option].example, **op.options[option].needs}


@pytest.mark.parametrize("name, option", CALLS)
def test_each_option_reaches_the_call(name, option):
    """Results, gradients and buffers agree with fp64, and an option changes the arguments."""
    op = OPERATIONS[name]
    options = options_of(op, option)
    args = op.arguments(op.small, BF16, CPU, options)
    assert args.keys() <= inspect.signature(op.function).parameters.keys()
    if option == "no_grad":
        assert not any(t.requires_grad for t in op.forward(args, "auto").values())
        assert op.call(args, "auto").keys() == op.forward(args, "auto").keys()
        return
    found, truth = op.call(args, "auto"), op.call(in_fp64(args), "reference")
    assert found.keys() == truth.keys()
    without = {f"d{leaf}" for leaf in op.leaves if args.get(leaf) is not None} - found.keys()
    assert len(without) == sum(key.endswith("_out") for key in args)  # a buffer gets the gradient instead
    for key, t in found.items():
        error = (t.double() - truth[key].double()).norm() / truth[key].double().norm()
        assert error <= 0.01, (key, float(error))
    plain = op.arguments(op.small, BF16, CPU)
    describe = lambda args: {key: (v.shape, v.dtype) if torch.is_tensor(v) else v for key, v in args.items()}  # noqa: E731
    assert option is None or describe(args) != describe(plain)


@pytest.mark.parametrize("name, option", CALLS)
def test_dry_runs_get_the_same_arguments_without_memory(name, option):
    op = OPERATIONS[name]
    args, meta = (op.arguments(op.small, BF16, where, options_of(op, option)) for where in (CPU, META))
    for key, t in args.items():
        if torch.is_tensor(t):
            assert meta[key].is_meta
            for of in ("shape", "dtype", "requires_grad"):
                assert getattr(meta[key], of) == getattr(t, of), (key, of)
            assert meta[key].stride() == t.stride()
        else:
            assert meta[key] == t


@pytest.mark.parametrize("name, what", SELF_TESTS)
def test_dry_runs_of_several_options(name, what):
    op = OPERATIONS[name]
    test = op.self_tests[what]
    args = op.arguments(test.shape, getattr(torch, test.dtype), META, test.options)
    dry = dry_run(op, args, H200, ("forward", "backward"), name)
    assert dry.portable is None
    assert dry.steps


def test_buffers_of_the_arguments_stay_as_they_are():
    op = OPERATIONS["linear_cross_entropy"]
    args = op.arguments((20, 16, 50), BF16, CPU, {"grad_weight_out": True})
    first, second = (op.call(args, "auto")["grad_weight_out"] for _ in range(2))
    assert torch.equal(first, second)
    assert first.any()
    assert not args["grad_weight_out"].any()


@pytest.mark.parametrize("text", ["8x32x64", "8x0", "8x", "99999999999999999999x8"])
def test_invalid_shapes(text):
    with pytest.raises(ValueError, match=f"'{text}'; expected MxN, numbers from 1 to 536870912"):
        parse_shape(text, "MxN")


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_two_options_set_one_argument(name):
    keywords = [option.keyword for option in OPERATIONS[name].options.values() if option.keyword is not None]
    assert len(set(keywords)) == len(keywords)
