"""Runs kernels compiled by CuTe DSL on a CPU, by executing their PTX with numpy.

    kernel = emulator.compile(jit_function, *args, gpu="b200")     # as cute.compile
    with emulator.record(completion="late", seed=0) as report:
        kernel(*args)                          # the arguments that it takes on a GPU, with CPU tensors
    print(report.launches)

Kernels may access the memory of live CPU tensors, and what `register` names. `replace_cuda` is for libraries that call
cute.compile themselves, `load` for functions that are compiled already, and `quackish.emulator.pytest_plugin` has a
fixture for tests.
"""

import contextlib
import contextvars
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from quackish.emulator import arguments, decode, dsl, host, scripts, torch_cuda
from quackish.emulator.completion import COMPLETIONS
from quackish.emulator.dependent_launches import Ended
from quackish.emulator.errors import Circumstances, Fault, Place, PtxError, ToolMissing
from quackish.emulator.findings import Findings
from quackish.emulator.gpu import Gpu, can_run, find
from quackish.emulator.grid import Grid
from quackish.emulator.host import Exported, export
from quackish.emulator.memory import GlobalMemory, host_regions
from quackish.emulator.profile import LineCounts, Trace
from quackish.emulator.report import LaunchReport, Report

__all__ = [
    "Circumstances",
    "Exported",
    "Fault",
    "Gpu",
    "Kernel",
    "LaunchReport",
    "LineCounts",
    "Place",
    "PtxError",
    "Report",
    "ToolMissing",
    "compile",
    "export",
    "load",
    "record",
    "register",
    "replace_cuda",
    "unchanged",
]


def __dir__() -> list[str]:
    return __all__


_report: contextvars.ContextVar[Report | None] = contextvars.ContextVar("report", default=None)


@contextlib.contextmanager
def record(
    completion: str = "at_once",
    seed: Any = 0,
    how_to_repeat: str = "",
    suppress: Iterable[tuple[str, str]] = (),
    all_races: bool = False,
    profile: bool = False,
    trace: tuple[tuple[int, int, int], int] | None = None,
) -> Iterator[Report]:
    """Sets how this thread's launches run inside the block, and yields a report of what they did.

    completion: when asynchronous work happens: "at_once", or "late", as late as a wait permits
    seed: gives the order in which warps and CTAs take turns. The same seed repeats a run exactly.
    how_to_repeat: code or a command that repeats the block; faults show it
    suppress: (rule, place) of findings to ignore, such as ("shared-race", "softmax.py:24"). A place without a line is
        all of a file. It matches either instruction of a race, because their order may depend on the seed.
    all_races: races do not raise. The report's `findings` lists them, and the run goes on.
    profile: launches have counts for each source line and opcode: instructions, bytes, bank conflicts
    trace: (CTA, warp), such as ((0, 0, 0), 3). The report's `trace` lists the instructions of this warp.
    """
    if completion not in COMPLETIONS:
        raise ValueError(
            f"emulator.record: completion is {completion!r}; expected one of {', '.join(map(repr, COMPLETIONS))}"
        )
    how_to_repeat = how_to_repeat or f"with emulator.record(completion={completion!r}, seed={seed!r})"
    tracer = None if trace is None else Trace(*trace)
    report = Report(
        completion, seed, how_to_repeat, checks=Findings(suppress, all_races), profile=profile, tracer=tracer
    )
    token = _report.set(report)
    try:
        yield report
    finally:
        _report.reset(token)


@contextlib.contextmanager
def register(address: int, size: int) -> Iterator[None]:
    """Lets kernels access memory that belongs to no CPU tensor."""
    host_regions.registered[address] = size
    try:
        yield
    finally:
        del host_regions.registered[address]


class Kernel:
    """A compiled function that runs on the CPU. It takes the arguments that it takes on a GPU, with CPU tensors.

    name: what reports and faults call it; by default the class or function that was compiled
    """

    def __init__(self, exported: host.Exported, gpu: Any, name: str = "", host_code: host.HostCode | None = None):
        self.gpu, self.ptx, self.name = find(gpu), exported.ptx, name
        self._host_code = host_code or host.load(exported, self.gpu)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        with torch._C.DisableTorchFunction():  # a mode may say that CPU tensors are on CUDA
            self._call(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> None:
        on_cuda = tuple(map(arguments.at_call, args)), {name: arguments.at_call(x) for name, x in kwargs.items()}
        launch = functools.partial(self._launch, functools.partial(self._names, *on_cuda))
        try:
            self._host_code.call(launch, *on_cuda[0], **on_cuda[1])
        except ValueError as error:  # of the host code, which checks arguments before it launches
            if "expected device_type=cpu" not in str(error):
                raise
            self._host_code.call(launch, *args, **kwargs)  # it was compiled with CPU tensors

    @property
    def entry(self) -> Any:
        """The compiled function."""
        return self._host_code.entry

    def _names(self, args: tuple, kwargs: dict[str, Any]) -> Iterator[tuple[str, int]]:
        """Yields (name, address) of a call's arguments."""
        signature = getattr(getattr(self.entry, "execution_args", None), "signature", None)  # as the DSL sees it
        names = list(signature.parameters) if signature else []
        unnamed = range(len(names), len(args))  # tuples whose fields have names need none
        names += ["" if hasattr(args[i], "_fields") else f"argument {i}" for i in unnamed]
        for name, argument in [*zip(names, args, strict=False), *kwargs.items()]:
            yield from arguments.addresses(name, argument)

    def _launch(self, names: Callable[[], Iterator[tuple[str, int]]], launch: host.Launch) -> None:
        """Runs one launch. The host code calls it. names: see `_names`"""
        program = self._program(launch.kernel)
        parameters = launch.parameters(program.entry.parameters.values())
        run(program, launch, parameters, self.gpu, self.name, names)

    def _program(self, kernel: str) -> decode.Program:
        """The program of an entry."""
        target, programs = decode.programs(self.ptx)
        if not can_run(self.gpu, target):
            raise ValueError(f"the function is compiled for {target}; gpu is {self.gpu.name}: {self.gpu.target}")
        return programs[kernel]


def run(
    program: decode.Program,
    launch: Any,
    parameters: bytes,
    gpu: Any,
    name: str = "",
    names_of_arguments: Callable[[], Iterable[tuple[str, int]]] = tuple,  # (name, address) of each
) -> None:
    """Runs a launch with the settings of `record`, and adds it to the report."""
    report = _report.get() or Report("at_once", 0, "outside of emulator.record")
    memory = GlobalMemory(host_regions, names_of_arguments)
    begin = time.perf_counter()
    report.checks.launch = _circumstances(program, launch, gpu, name, report)
    try:
        if report.before and report.before.has_been_overwritten(host_regions(None), memory.bytes_at):
            report.before = None  # an operation that is not a launch came after it
        grid = Grid(
            program, launch, parameters, gpu, memory, report.completion, report.seed,
            before=report.before, findings=report.checks, profile=report.profile, trace=report.tracer,
        )  # fmt: skip
        grid.run()
        _check_order(launch, grid, report)
    except Fault as fault:  # it says where in the kernel it is, so the emulator's own frames would only distract
        fault.launch = report.checks.launch
        raise fault.with_traceback(None) from None
    except RuntimeError as error:  # a mistake of the emulator
        raise RuntimeError(f"{error}\n{report.checks.launch}") from error.__cause__
    report.before = _ended(name or launch.kernel, grid)
    report.launches.append(
        LaunchReport(
            kernel=name or program.entry.source_name,
            grid=launch.grid,
            block=launch.block,
            cluster=launch.cluster,
            mmas=grid.mmas,
            flops=grid.flops,
            bytes_read=memory.bytes_read,
            bytes_written=memory.bytes_written,
            barrier_phases=grid.num_phases,
            shared_bytes=grid.shared_bytes,
            tensor_memory_columns=grid.tensor_memory_columns,
            instructions=grid.num_instructions,
            seconds=time.perf_counter() - begin,
            profile=grid.profile.lines() if grid.profile else None,
        )
    )


def _ended(name: str, grid: Grid) -> Ended:
    """What later launches need to know about this one, for `dependent_launches`."""
    races = grid.memory.races
    for earlier in races.dependent.running:
        earlier.running.clear()  # this launch's list has them; a chain would keep all launches
    ended = Ended(
        name,
        races.events,
        races.shadows,
        grid.lets_next_begin,
        grid.waits_first,
        races.dependent.running,
        races.reads_of,
    )
    ended.remember(grid.memory.bytes_at)
    return ended


def _check_order(launch: Any, grid: Grid, report: Report) -> None:
    """Reports a grid that may overlap the launch before it if no thread waits for that launch."""
    # "If the prerequisite grid is using griddepcontrol.launch_dependents, then the dependent grid must use
    # griddepcontrol.wait to ensure correct functional execution." (PTX, griddepcontrol)
    before = report.before
    if getattr(launch, "programmatic", False) and before and before.lets_next_begin and not grid.waits_for_previous:
        report.checks.add(
            Fault(
                "launch-race",
                "no thread executes griddepcontrol.wait, and the launch before this one executed "
                "griddepcontrol.launch_dependents, so both may run at the same time",
            )
        )


def _circumstances(program: decode.Program, launch: Any, gpu: Any, name: str, report: Report) -> Circumstances:
    """What every error says about the launch."""
    return Circumstances(
        launch=len(report.launches),
        kernel=f"{name}, {program.entry.title}" if name else program.entry.title,
        grid=launch.grid,
        block=launch.block,
        cluster=launch.cluster,
        shared_bytes=launch.shared_bytes,
        gpu=getattr(gpu, "name", gpu.target),
        sm_count=gpu.sm_count,
        completion=report.completion,
        seed=report.seed,
        how_to_repeat=report.how_to_repeat,
    )


def compile(function: Callable, *args: Any, gpu: Any, name: str = "", **kwargs: Any) -> Kernel:
    """Calls `cute.compile`. The result runs on the CPU as it would on `gpu`; this machine needs no GPU.

    function: what cute.compile takes: a function, method or object with `@cute.jit`
    args, kwargs: those of cute.compile: fake tensors and streams, numbers, constants, results of `from_dlpack`, CPU
        tensors; also `options`. Options that the emulator needs are added.
    gpu: a name, "h100", "h200", "b200" or "b300", an `emulator.Gpu`, or any object with its attributes
    name: what reports and faults call the kernel, instead of its name in the PTX

    The result takes the arguments that it takes on a GPU: CPU tensors in place of CUDA tensors, and any number as a
    stream. While compiling, `HardwareInfo` answers as for that GPU.
    """
    import cutlass.cute as cute

    return _compile(cute.compile, function, args, kwargs, find(gpu), name)


def _compile(compiler: Callable, function: Callable, args: tuple, kwargs: dict, gpu: Any, name: str = "") -> Kernel:
    with torch._C.DisableTorchFunction():
        exported, host_code = dsl.compile(compiler, function, args, kwargs, gpu)
    return Kernel(exported, gpu, name, host_code)


@contextlib.contextmanager
def replace_cuda(gpu: Any) -> Iterator[None]:
    """Inside the block, libraries that call `cute.compile` run on CPU tensors, as on the GPU `gpu`.

        with emulator.replace_cuda("b200"), emulator.record("late", seed=0) as report:
            from quack.rmsnorm import rmsnorm

            y = rmsnorm(x, weight)             # CPU tensors

    cute.compile does what `emulator.compile` does. `HardwareInfo` and `torch.cuda` answer as for that GPU. CPU tensors
    have `is_cuda`, but their `device` stays the CPU, so call what is below a check of `device.type`. Custom operators
    that are registered for CUDA are registered for the CPU, too: import the library inside the block.

    The block applies to all threads of the process. A library keeps kernels and answers about the GPU for later calls,
    so a process should emulate one GPU.
    """
    gpu = find(gpu)
    with dsl.answers(gpu), torch_cuda.answers(gpu), dsl.replace_compile(functools.partial(_compile, gpu=gpu)):
        yield


@contextlib.contextmanager
def unchanged(gpu: Any) -> Iterator[None]:
    """Inside the block, this thread runs programs that are written for the GPU `gpu`, with its tensors on the CPU.

    Adds to `replace_cuda`: "cuda" is the CPU in operations of PyTorch, tensors say that they are on CUDA, torch.cuda
    has streams and events, and functions with @cute.jit can be called without cute.compile. CUDA graphs raise
    NotImplementedError, and Triton's kernels do not run. Memory of PyTorch is aligned to 64 bytes here; programs that
    assume more run by the command `quackish emulate --gpu GPU script.py`.
    """
    import cutlass.cute as cute

    gpu = find(gpu)

    def compiled(function: Callable, args: tuple, kwargs: dict) -> Kernel:
        return _compile(cute.compile, function, args, kwargs, gpu)

    with replace_cuda(gpu), scripts.unchanged(compiled):
        yield


def load(compiled: Any, gpu: Any, name: str = "") -> Kernel:
    """Makes the result of `cute.compile` run on the CPU. It takes arguments by position.

    Compile with the options "--enable-tvm-ffi --keep-ptx --generate-line-info --dump-dir FOLDER".
    """
    return Kernel(host.export(compiled), gpu, name)
