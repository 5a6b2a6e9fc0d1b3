"""The arguments of a call in `explain`, `precompile` and `tune`: OP SHAPE and options; and its dry run."""

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quackish.cli.parser import CommandError
from quackish.device import toolchain
from quackish.gpu import H200, NAMED, Gpu, gpu_of
from quackish.ops.shared.argument_types import one_of
from quackish.ops.shared.for_tools import DTYPES, Args, Operation, operations, parse_shape

if TYPE_CHECKING:
    import torch

    from quackish.ops.shared.dry_run import DryRun

# The operations that explain, precompile and tune take, and (operation, passes) by name: rms_norm_forward is one pass.
DRY = tuple(op for op in operations().values() if op.has_dry_run)
CALLS: dict[str, tuple[Operation, tuple[str, ...]]] = {
    name: (op, passes)
    for op in DRY
    for name, passes in {op.name: ("forward", "backward"), **{f"{op.name}_{one}": (one,) for one in op.passes}}.items()
}


def add_arguments(parser: argparse.ArgumentParser, shapes: str = "") -> None:
    """Adds OP, SHAPE and the options of calls. `shapes` is the nargs of several SHAPEs; with "*" OP is optional too."""
    parser.add_argument("op", metavar="OP", choices=CALLS, help=", ".join(CALLS), nargs="?" if shapes == "*" else None)
    add_shape_and_options(parser, DRY, shapes)


def add_shape_and_options(parser: argparse.ArgumentParser, entries: Sequence[Operation], shapes: str = "") -> None:
    """Adds SHAPE, --dtype and the options of `entries`, grouped by the operations that take them."""
    shape_help = ", ".join(f"{op.form} for {op.name}" for op in entries)
    parser.add_argument("shapes" if shapes else "shape", metavar="SHAPE", help=shape_help, nargs=shapes or None)
    dtype_help = f"dtype of input and weight: {', '.join(DTYPES)} (bf16)"
    parser.add_argument("--dtype", type=one_of(DTYPES), default="bfloat16", help=dtype_help)
    groups: dict[str, Any] = {", ".join(op.name for op in entries): parser}
    for name, option in {name: option for op in entries for name, option in op.options.items()}.items():
        title = ", ".join(op.name for op in entries if name in op.options)
        if title not in groups:
            groups[title] = parser.add_argument_group(textwrap.fill(title, 78))
        groups[title].add_argument(flag_of(name), **option.arguments)


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def dry_run_call(args: argparse.Namespace, gpu: Gpu | None) -> "DryRun":
    """What the call `args` launches on `gpu` (None: a CPU). Raises CommandError for invalid arguments."""
    import torch

    from quackish.device.kernel_device import why_unsupported
    from quackish.ops.shared.dry_run import DryRun, dry_run

    op, passes = CALLS[args.op]
    meta = meta_arguments(args)
    if gpu is None:
        return DryRun(portable=why_unsupported(args.op, op.spec, torch.device("cpu")))
    try:
        return dry_run(op, meta, gpu, passes, args.op)
    except ValueError as error:
        raise CommandError(str(error).removeprefix(f"{op.name}: ")) from None


def meta_arguments(args: argparse.Namespace) -> Args:
    """The arguments of the call `args`, on the meta device. Raises CommandError for invalid ones."""
    from quackish.ops.shared.memory_counter import META

    return arguments_of(args, CALLS[args.op][0], DRY, META)


def shape_of(args: argparse.Namespace, op: Operation, entries: Sequence[Operation]) -> tuple[int, ...]:
    """The shape of the call `args`, without importing torch. Raises CommandError for it, and for options of others."""
    for other in entries:
        for name in other.options.keys() - op.options.keys():
            if getattr(args, name) is not None:
                raise CommandError(f"{flag_of(name)} is an option of {other.name}, not of {args.op}")
    try:
        return parse_shape(args.shape, op.form)
    except ValueError as error:
        raise CommandError(f"SHAPE is {error}") from None


def arguments_of(args: argparse.Namespace, op: Operation, entries: Sequence[Operation], device: "torch.device") -> Args:
    """The arguments of the call `args` of `op`, one of `entries`. Raises CommandError for invalid ones."""
    import torch

    shape = shape_of(args, op, entries)
    given = {name: value for name in op.options if (value := getattr(args, name)) is not None}
    try:
        return op.arguments(shape, getattr(torch, args.dtype), device, given)
    except ValueError as error:
        raise CommandError(str(error)) from None


def has_gpu() -> bool:
    """Without a driver, of CUDA or ROCm, the answer is no, before torch is imported."""
    if toolchain.driver_cuda() is None and not Path("/dev/kfd").exists():
        return False
    import torch

    return torch.cuda.is_available()


def select_gpu(name: str | None) -> tuple[Gpu | None, str]:
    """The GPU (None: a CPU) for --gpu, and how it was selected if none was named."""
    if name not in (None, "this"):
        return NAMED.get(name), ""
    if has_gpu():
        import torch

        return gpu_of(torch.cuda.current_device()), "the current one here"
    if name == "this":
        raise CommandError(f"--gpu is this, but there is no GPU here; expected one of {', '.join(NAMED)}, cpu")
    return H200, "there is none here, so an H200 is assumed; --gpu names another"
