"""KernelSpec: what a kernel says about itself, once. Launches, tools and tests read nothing else.

A problem (a frozen dataclass of ints, bools and dtype names) says what to compute. `problem.spec` describes its kernel.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from quackish.device.work import Sizes, Work
from quackish.errors import UnsupportedError
from quackish.gpu import FAMILIES, Gpu
from quackish.once import once

# GPU families whose kernels have run only in the emulator. A commit that takes one out adds the quackish-check.json of
# such a GPU, which `quackish doctor --check` writes: see docs/blackwell.md.
EMULATED_ONLY = ("sm_100", "sm_103")


class Variant(NamedTuple):
    """A kernel on a GPU family: its class, and how its config is chosen."""

    kernel: str  # "module:class", imported on first use; called as kernel(problem, config)
    config: type
    rule: Callable[[Any, Gpu], Any]  # (problem, gpu) -> config; raises UnsupportedError if there is none
    # (problem, config, gpu) -> reason; None if legal. Without it, a problem has one config, which users cannot force.
    why_illegal: Callable[[Any, Any, Gpu], str | None] | None = None
    tuning: str = ""  # "module:attribute" of a `Tuning`; with why_illegal


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What `quackish tune` may try, and how it measures."""

    configs: Callable[[Any, Any, Gpu], Any]  # (problem, analytical choice, gpu) -> configs, which may be illegal
    merit: Callable[[Any, Any], float]  # (problem, config) -> what bounds its speed from above
    min_merit: float  # the smallest share of the analytical choice's merit that is worth a try
    data: Callable[..., Any]  # (problem, sizes, device) -> function without arguments that builds a launch


@dataclasses.dataclass(frozen=True, eq=False)
class KernelSpec:
    """What quackish knows of a kernel, for all its problems."""

    name: str  # in listings, and in the table of tuned configs
    operation: str  # the function that users call, for messages
    problem: type  # gets this spec as its attribute `spec`
    on: Mapping[str, Variant]  # by GPU family
    # Numbers among the arguments of a launch that its work depends on: names of fields of the NamedTuple of arguments,
    # or of the first NamedTuple in it that has them.
    sizes: tuple[str, ...]
    work: Callable[[Any, Sizes], Work]  # (problem, sizes) -> bytes and FLOPs
    samples: Sequence[Any]  # problems that tests compile
    more_sizes: Callable[[Any], Mapping[str, int]] = lambda args: {}  # other numbers that the work depends on
    results: tuple[str, ...] = ()  # arguments that `tune` compares; with `tuning`
    # For a matrix product: "module:function" (problem, sizes, device) -> its operands, for torch.matmul.
    cublas: str = ""
    public_name: Callable[[Any], str] | None = None  # problem -> its name in `quackish.config`; None: one name for all
    public_names: tuple[str, ...] = ()  # all of them, if they can be forced; default: from `name`

    def __post_init__(self) -> None:
        self.problem.spec = self  # type: ignore[attr-defined]
        if not self.public_names:
            object.__setattr__(
                self, "public_names", (self.name.replace("_fwd", "_forward").replace("_bwd", "_backward"),)
            )

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @property
    def is_tunable(self) -> bool:
        """True if a problem has several configs, from which `tune` and `quackish.config` can choose."""
        return any(variant.why_illegal for variant in self.on.values())

    def name_of(self, problem: Any) -> str:
        """The user's name for the kernel of a problem, as in `quackish.config` and `tune`."""
        return self.public_names[0] if self.public_name is None else self.public_name(problem)

    def variant(self, gpu: Gpu) -> Variant:
        """The variant for a GPU. Raises UnsupportedError if the kernel does not support it."""
        if gpu.family not in self.on:
            supported = ", ".join(self.on) or "no GPU"
            raise UnsupportedError(
                f"{self.operation}: no kernel for {gpu.family} ({gpu.name}); supported: {supported}. "
                'backend="auto" runs the portable path.'
            )
        return self.on[gpu.family]

    def kernel_class(self, gpu: Gpu) -> "KernelClass":
        """The class for a GPU. Raises UnsupportedError if the kernel does not support it."""
        module, _, name = self.variant(gpu).kernel.partition(":")
        return once(_classes, (module, name), KernelClass, module, name)

    def sizes_of(self, args: Any) -> dict[str, int]:
        """The sizes among a launch's arguments, without those that are None. args: the NamedTuple."""
        parts = [part._asdict() for part in (args, *args) if hasattr(part, "_asdict")]
        found = {name: next(part[name] for part in parts if name in part) for name in self.sizes}
        found |= self.more_sizes(args)
        return {name: size for name, size in found.items() if size is not None}


def spec_of(problem: Any) -> KernelSpec | None:
    """The description of a problem's kernel; None for a kernel that has none."""
    return getattr(problem, "spec", None)


def loaded(where: str) -> Any:
    """The object at "module:name"."""
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


def on_all(*variant: Any, **fields: Any) -> dict[str, Variant]:
    """The same variant on every GPU family."""
    return dict.fromkeys(FAMILIES, Variant(*variant, **fields))


def on_hopper(*variant: Any, **fields: Any) -> dict[str, Variant]:
    return {"sm_90": Variant(*variant, **fields)}


def on_blackwell(*variant: Any, **fields: Any) -> dict[str, Variant]:
    return dict.fromkeys(("sm_100", "sm_103"), Variant(*variant, **fields))


class KernelClass:
    """A kernel class that is imported when called: importing the DSL takes 0.3 s, and cached kernels do not need it."""

    def __init__(self, module: str, name: str):
        self.__module__, self.__name__, self.__qualname__ = module, name, name

    def __call__(self, problem: Any, config: Any) -> Any:
        return getattr(importlib.import_module(self.__module__), self.__name__)(problem, config)

    def __repr__(self) -> str:
        return f"<{self.__module__}.{self.__name__}>"


_classes: dict[tuple[str, str], KernelClass] = {}
