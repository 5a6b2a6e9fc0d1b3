"""Asserts for tests of any function of tensors: the same bits on every run, and results close to fp64."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from quackish.device import launch
from quackish.errors import a, describe
from quackish.testing.device import other_work, poison_free_memory
from quackish.testing.errors import bits, error, same_bits


class Ran(NamedTuple):
    """What `assert_deterministic` compared."""

    where: str  # a device, or such as "an emulated h200"
    runs: int
    launches: int  # of quackish's kernels; 0: PyTorch ran everything, as the portable path does


def assert_deterministic(
    function: Callable[..., Any], *inputs: Any, runs: int | None = None, emulate: str | None = None
) -> Ran:
    """Asserts that all outputs of `function(*inputs)` and all gradients have the same bytes in each of `runs` runs.

    Between runs free memory is filled with NaN, so that results do not repeat by chance. On a GPU another stream is
    busy during each run. In the emulator runs take turns with both completions and with other seeds.

    Args:
        function: returns a tensor, or tuples, lists and dicts of tensors.
        inputs: a gradient is computed for each tensor that requires grad. The gradients of outputs are random, and 1
            for 0-dim outputs.
        runs: at least 2. None: 20, and 6 in the emulator.
        emulate: a GPU such as "h200" or "b200", whose kernels run in `quackish.emulate`; inputs are on the CPU.

    Returns:
        What ran: on a CPU without `emulate`, that is PyTorch, and no kernel.
    """
    caller = "assert_deterministic"
    _check_callable(caller, function=function)
    if runs is None:
        runs = 20 if emulate is None else 6
    if not isinstance(runs, int):
        raise TypeError(f"{caller}: runs is {describe(runs)}; expected an int, at least 2")
    if runs < 2:
        raise ValueError(f"{caller}: runs is {runs}; expected at least 2, as the first is only compared with")
    launches = [0] * runs
    with _counted(emulate, 0, launches):
        first, incoming = _results(caller, function, inputs)
    device = next((t.device for t in first.values() if t is not None), "cpu")
    nbytes = max(64 << 20, 4 * sum(t.nbytes for t in first.values() if t is not None))
    for run in range(1, runs):
        poison_free_memory(device, nbytes)
        with other_work(device, launches=100), _counted(emulate, run, launches) as how:
            again, _ = _results(caller, function, inputs, incoming)
        _assert_same_names(caller, again, f"run {run + 1}", first, "run 1")
        for name, t in first.items():
            if not same_bits(again[name], t):
                raise AssertionError(f"{caller}: {name} {_difference(again[name], t)} in run {run + 1} of {runs}{how}")
    return Ran(str(device) if emulate is None else f"an emulated {emulate}", runs, sum(launches))


@contextlib.contextmanager
def _counted(emulate: str | None, run: int, launches: list[int]) -> Iterator[str]:
    """Counts the launches in the block. Yields how the emulator runs, for a message."""
    if emulate is None:
        before = launch.counters.launches
        yield ""
        launches[run] = launch.counters.launches - before
        return
    from quackish.emulation import emulate as emulated

    completion: Literal["late", "at_once"] = "late" if run % 2 == 0 else "at_once"
    seed = run // 2
    with emulated(emulate, completion, seed) as report:
        yield f", with {completion=} and {seed=} on an emulated {emulate}"
    launches[run] = len(report.launches)


def assert_close_to_fp64(
    function: Callable[..., Any], reference: Callable[..., Any], *inputs: Any, slack: float = 1.0
) -> None:
    """Asserts that all outputs of `function(*inputs)` and all gradients are close to those of `reference` in fp64.

    `reference` is called with fp64 copies of the inputs, as they are after rounding to their dtypes. An error is
    relative, norm-wise over a tensor and at the worst element: |got - truth| / (|truth| + rms of truth's row).

        dtype        norm-wise                          worst element
        fp32, fp64   8 * eps                            32 * eps
        bf16, fp16   0.6 * eps + 8 * eps of fp32        eps + 32 * eps of fp32

    So 16-bit results may differ by one final rounding of an fp32 result. Other dtypes must be equal.

    Args:
        function, reference: return tensors, or tuples, lists and dicts of tensors, in the same order.
        inputs: a gradient is computed for each tensor that requires grad, as in `assert_deterministic`.
        slack: multiplies the bounds, for example if intermediate results are rounded too.
    """
    caller = "assert_close_to_fp64"
    _check_callable(caller, function=function, reference=reference)
    if not isinstance(slack, (int, float)) or not slack > 0:
        raise TypeError(f"{caller}: slack is {describe(slack)}; expected a number above 0")
    got, incoming = _results(caller, function, inputs)
    truth, _ = _results(caller, reference, [_in_fp64(t) for t in inputs], incoming)
    _assert_same_names(caller, got, "function", truth, "reference")
    for name, want in truth.items():
        t = got[name]
        if t is None or want is None:
            if t is not want:
                raise AssertionError(f"{caller}: {name} is None only for {'function' if t is None else 'reference'}")
        elif t.shape != want.shape:
            raise AssertionError(f"{caller}: {name} is {tuple(t.shape)}, expected reference's {tuple(want.shape)}")
        elif not t.is_floating_point():
            if not torch.equal(t, want):
                raise AssertionError(f"{caller}: {name} {_difference(t, want)}")
        else:
            infinite = want.isinf() & (t == want)  # equal infinities; their difference would be NaN
            off = error(t.masked_fill(infinite, 0.0), want.double().masked_fill(infinite, 0.0))
            norm, worst = _bounds(t.dtype, slack)
            if not off.within(norm, worst):
                raise AssertionError(
                    f"{caller}: {name}, {_describe(t)}, has error {off.norm:.2e} norm-wise and {off.worst:.2e} at the "
                    f"worst element; expected at most {norm:.2e} and {worst:.2e}"
                )


def _check_callable(caller: str, **functions: Any) -> None:
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(
                f"{caller}: {name} is {describe(function)}; expected a function, which {caller} calls with the inputs"
            )


def _results(
    caller: str, function: Callable[..., Any], inputs: Sequence[Any], incoming: dict[int, Tensor] | None = None
) -> tuple[dict[str, Tensor | None], dict[int, Tensor]]:
    """Runs forward and backward. Returns {name: result} and {number of an output: its gradient}.

    incoming: gradients of outputs to use again where shapes match.
    """
    returned = function(*inputs)
    outputs = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)]
    if not outputs:  # nothing would be compared
        raise TypeError(
            f"{caller}: a function returned {a(type(returned))} without tensors; expected a tensor, or tuples, "
            "lists and dicts of tensors"
        )
    results = {f"output {i}": t.detach().clone() for i, t in enumerate(outputs)}
    differentiable = {i: t for i, t in enumerate(outputs) if t.requires_grad}
    leaves = {i: t for i, t in enumerate(inputs) if isinstance(t, Tensor) and t.requires_grad}
    grad_outputs = {i: _grad_output(t, i, (incoming or {}).get(i)) for i, t in differentiable.items()}
    if differentiable and leaves:
        grads = torch.autograd.grad(
            list(differentiable.values()), list(leaves.values()), list(grad_outputs.values()), allow_unused=True
        )
        results |= {f"gradient of input {i}": grad for i, grad in zip(leaves, grads, strict=True)}
    return results, grad_outputs


def _grad_output(output: Tensor, number: int, previous: Tensor | None) -> Tensor:
    """An output's gradient: the previous one if its shape fits, 1 for 0-dim outputs, or else random."""
    if previous is not None and previous.shape == output.shape:
        return previous.to(output.dtype)
    if output.dim() == 0:
        return torch.ones_like(output)
    # Not a seed of inputs: a gradient equal to the input hides errors, as a norm's dx would be nearly 0.
    generator = torch.Generator(output.device).manual_seed(7_654_321 + number)
    return torch.randn(output.shape, generator=generator, dtype=output.dtype, device=output.device)


def _in_fp64(t: Any) -> Any:
    if not isinstance(t, Tensor) or not t.is_floating_point():
        return t
    return t.detach().double().clone().requires_grad_(t.requires_grad)


def _bounds(dtype: torch.dtype, slack: float) -> tuple[float, float]:
    """Returns (norm-wise bound, bound at the worst element): see `assert_close_to_fp64`."""
    eps, computed = torch.finfo(dtype).eps, torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    rounded = 0.0 if eps == computed else eps
    return slack * (0.6 * rounded + 8 * computed), slack * (rounded + 32 * computed)


def _assert_same_names(caller: str, got: dict, source: str, expected: dict, expected_source: str) -> None:
    if got.keys() != expected.keys():
        names = f"{', '.join(got)}; expected {', '.join(expected)}"
        raise AssertionError(f"{caller}: {source} gives {names}, as {expected_source}")


def _difference(got: Tensor | None, want: Tensor | None) -> str:
    if got is None or want is None or (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"is {_describe(got)} instead of {_describe(want)}"
    differs = (bits(got) != bits(want)).view(-1, want.itemsize).any(1)
    return f"differs in {int(differs.sum())} of {want.numel()} elements"


def _describe(t: Tensor | None) -> str:
    return "None" if t is None else f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"
