"""What the tools know about an operation: its shape, its options, the arguments of a call, and how to run it.

Files `tools.py` and this one import torch in functions alone, because it takes seconds and `--help` does without.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from quackish.device.spec import KernelSpec
from quackish.device.work import SHORT
from quackish.gpu import Gpu
from quackish.literals import Backend
from quackish.ops import parts
from quackish.ops.shared.models import MODELS, Model, Shapes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DTYPES = {short: name for name, short in SHORT.items()}  # the values of --dtype
MAX_SIZE = 1 << 29  # PyTorch fails with an internal error if a tensor's bytes overflow 64 bits

Args = dict[str, Any]  # the keyword arguments of a call
Options = Mapping[str, Any]  # the options that are given, by their names in `Operation.options`


class Maker(NamedTuple):
    """Makes tensors of seeded random numbers. Those on the meta device have no values."""

    dtype: torch.dtype
    device: torch.device

    def rows(self, *shape: int, seed: int, dtype: str | None = None) -> Tensor:
        from quackish.testing import inputs

        return inputs.rows(shape, self._dtype(dtype), seed=seed, device=self.device)

    def weights(self, n: int, seed: int = 1, dtype: str | None = None) -> Tensor:
        from quackish.testing import inputs

        return inputs.weights(n, self._dtype(dtype), seed=seed, device=self.device)

    def _dtype(self, name: str | None) -> torch.dtype:
        import torch

        return self.dtype if name is None else getattr(torch, name)

    def zeros(self, *shape: int) -> Tensor:
        import torch

        return torch.zeros(shape, device=self.device)


class Option(NamedTuple):
    """An option of the commands. An option `chunk_size` is `--chunk-size` on the command line."""

    keyword: str | None  # the argument of the call that it sets; None: `Operation.make` reads it
    arguments: dict[str, Any]  # arguments of argparse's add_argument
    tensor: Callable[..., Tensor] | None = None  # (maker, *shape) -> the argument; None: the value as given
    example: Any = True  # a value, which tests pass; it changes the arguments of the call
    needs: Options = types.MappingProxyType({})  # other options that it is given with


def value(
    keyword: str | None, help: str | None = None, *, example: Any, needs: Options | None = None, **arguments: Any
) -> Option:
    """An option with a value, which is the argument of the call."""
    return Option(keyword, dict(help=help, **arguments), example=example, needs=needs or {})


def flag(keyword: str | None, help: str, tensor: Callable[..., Tensor] | None = None) -> Option:
    """An option without a value: passes True, or a tensor."""
    return Option(keyword, dict(action="store_true", default=None, help=help), tensor)


def no_grad() -> Option:
    return flag(None, "forward only, without grad")


class SelfTest(NamedTuple):
    """A call that is compared with fp64."""

    shape: tuple[int, ...]
    options: Options = types.MappingProxyType({})
    dtype: str = "bfloat16"
    only_timed: bool = False  # too large for fp64


class Imported:
    """A function of a module that is imported when the function is called or inspected."""

    def __init__(self, module: str, name: str):
        self._module, self._name = module, name

    @functools.cached_property
    def __wrapped__(self) -> Callable[..., Any]:
        return getattr(importlib.import_module(self._module), self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class Operation:
    name: str
    title: str
    function: Callable[..., Any]  # what users call, `Imported`; takes the arguments of `arguments` and `backend`
    results: tuple[str, ...]  # the names of what it returns
    leaves: tuple[str, ...]  # the arguments that get gradients
    spec: KernelSpec | None  # a GPU without this kernel runs the portable path; None: an operation without kernels
    dims: tuple[str, ...]  # the names of the sizes, such as ("M", "N"); rows (tokens) come first
    example: str  # a shape
    small: tuple[int, ...]  # maximum sizes without a GPU; sizes of a self-test
    make: Callable[[Maker, tuple[int, ...], Options], Args]  # the arguments besides those that options set
    options: dict[str, Option]
    bench_options: tuple[str, ...] = ()  # those of `options` that bench takes, as data of a cell
    model_shapes: Callable[[Model, int], Shapes] = lambda model, tokens: {}  # shapes in public models
    passes: tuple[str, ...] = ()  # "forward" and "backward" if users can call them alone, as rms_norm_forward
    has_dry_run: bool = True  # explain, precompile and tune take it
    # (operation, arguments, gpu, passes) -> DryRun; None: `dry_run.launches`, for an operation that allocates by its
    # KernelDevice alone and whose only launches are of quackish's kernels
    dry_run: Callable[..., Any] | None = None
    explain: Callable[[Args, Gpu], tuple[list[str], list[str]]] | None = None  # more tables and notes for explain
    # More calls that launch all kernels, by what is special; `doctor` runs the one named "" (default: the shape
    # `small`), and `doctor --check` all of them and the large ones
    self_tests: Mapping[str, SelfTest] = dataclasses.field(default_factory=dict)
    bounds: Mapping[str, float] = dataclasses.field(
        default_factory=dict
    )  # of results' norm-wise errors; see `bound_of`
    large_tests: Sequence[SelfTest] = ()  # timed, beside cuBLAS; together they take 40 GB of memory

    def bound_of(self, result: str) -> float:
        """The norm-wise error that a result or gradient in bf16 may have: 1 to 4 times its unit roundoff."""
        return self.bounds.get(result, 0.004 if result in self.results else 0.008)

    @property
    def form(self) -> str:
        """The form of a shape, such as "MxN"."""
        return "x".join(self.dims)

    @property
    def models(self) -> list[str]:
        """The models with a shape for this operation."""
        return [name for name, model in MODELS.items() if self.model_shapes(model, 1)]

    def arguments(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, options: Options | None = None
    ) -> Args:
        """The keyword arguments of a call. On the meta device they take no memory, for dry runs.

        ValueError if the options do not fit together. Unless the option `no_grad` is given, leaves require grad.
        """
        maker, options = Maker(dtype, device), options or {}
        args = self.make(maker, shape, options)
        for name, given in options.items():
            option = self.options[name]
            if option.keyword is not None:
                args[option.keyword] = given if option.tensor is None else option.tensor(maker, *shape)
        for name in () if options.get("no_grad") else self.leaves:
            if args.get(name) is not None:
                args[name].requires_grad_()
        return args

    def forward(self, args: Args, backend: Backend) -> dict[str, Tensor]:
        """The results by name."""
        from torch import Tensor

        out = self.function(**args, backend=backend)
        named: dict[str, Tensor] = {}
        for name, result in zip(self.results, out if type(out) is tuple else (out,), strict=False):
            named |= {name: result} if isinstance(result, Tensor) else result._asdict()
        return named

    def backward(self, args: Args, results: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """The gradients of the leaves, such as "dx", for gradients of all results. None if a buffer got it."""
        import torch

        leaves = {name: t for name in self.leaves if (t := args.get(name)) is not None and t.requires_grad}
        if not leaves:  # the option no_grad
            return {}
        outputs = [t for t in results.values() if t.requires_grad]
        grads = torch.autograd.grad(outputs, list(leaves.values()), list(map(_gradient, outputs)), allow_unused=True)
        return {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}

    def call(self, args: Args, backend: Backend) -> dict[str, Tensor]:
        """Results, gradients and buffers after forward and backward. The buffers in `args` are left as they are."""
        from torch import Tensor

        buffers = {name: t.clone() for name, t in args.items() if name.endswith("_out") and isinstance(t, Tensor)}
        results = self.forward(args | buffers, backend)
        found = results | self.backward(args, results) | buffers
        return {name: t.detach() for name, t in found.items() if t is not None}


@functools.cache
def operations() -> dict[str, Operation]:
    """The functions that the tools take, by name."""
    return {op.name: op for tools in parts("tools") for op in tools.FUNCTIONS}


def in_fp64(args: Args, device: torch.device | str = "cpu") -> Args:
    """The same numbers in fp64: with backend "reference", a call gives the true results."""
    from torch import Tensor

    def convert(arg: Any) -> Any:
        if not isinstance(arg, Tensor):
            return arg
        t = arg.detach().to(device)
        return t.double().requires_grad_(arg.requires_grad) if t.is_floating_point() else t

    return {name: convert(arg) for name, arg in args.items()}


def _gradient(t: Tensor) -> Tensor:
    """A gradient of result `t`: multiples of 1/128 in (-1, 1), which every device and dtype represents exactly."""
    import torch

    if t.is_meta:
        return torch.empty_like(t)
    return ((torch.arange(t.numel(), device=t.device) * 138 % 251 - 125) / 128).to(t.dtype).view(t.shape)


def parse_shape(text: str, form: str = "") -> tuple[int, ...]:
    """(8192, 4096) from "8192x4096". ValueError if it does not match `form`, such as "MxN", or exceeds MAX_SIZE."""
    sizes = text.strip().lower().replace("×", "x").split("x")
    valid = all(size.isdecimal() and len(size) < 10 and 1 <= int(size) <= MAX_SIZE for size in sizes)
    if not valid or (form and len(sizes) != len(form.split("x"))):
        raise ValueError(f"{text!r}; expected {form or 'sizes such as 8x16'}, numbers from 1 to {MAX_SIZE}")
    return tuple(map(int, sizes))
