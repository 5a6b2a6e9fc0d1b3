"""Compiling with CuTe DSL for a GPU that this machine need not have."""

import contextlib
import contextvars
import functools
import itertools
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from quackish.emulator import arguments, host

_is_compiling = contextvars.ContextVar("is_compiling", default=False)
_lock = threading.RLock()  # the compiler is not thread-safe


def compile(
    compiler: Callable, function: Callable, args: tuple, kwargs: dict, gpu: Any
) -> tuple[host.Exported, host.HostCode]:
    """Compiles `function` by `compiler`, which is cute.compile. The result's entry is the DSL's callable."""
    from cutlass.cutlass_dsl import tvm_ffi_provider

    results: list[tuple[host.Exported, host.HostCode]] = []

    def create(compiled: Any) -> Any:
        exported = host.export(compiled)
        results.append((exported, host.load(exported, gpu)))
        return results[-1][1].function

    args = tuple(map(arguments.at_compile, args))
    kwargs = {name: arguments.at_compile(value) for name, value in kwargs.items()}
    # The DSL asks this method for the function that its callable calls, after it has handled keywords and defaults.
    base, method = tvm_ffi_provider.TVMFFIJitCompiledFunctionBase, "_create_tvm_ffi_function"
    with _lock, answers(gpu), _options(gpu), mock.patch.object(base, method, create):
        token = _is_compiling.set(True)
        try:
            # no_jit_engine: the DSL need not link the host code, which `host.load` does
            compiled = compiler(function, *args, **kwargs, no_jit_engine=True)
        finally:
            _is_compiling.reset(token)
    exported, host_code = results[-1]
    host_code.entry = compiled
    return exported, host_code


@contextlib.contextmanager
def replace_compile(compile_for_gpu: Callable) -> Iterator[None]:
    """Inside the block, cute.compile calls `compile_for_gpu(compiler, function, args, kwargs)`.

    compiler: what it would have called
    """
    from cutlass.base_dsl.compiler import CompileCallable

    original = CompileCallable._compile

    def replacement(self: Any, function: Callable, *args: Any, **kwargs: Any) -> Any:
        if _is_compiling.get():  # `compile`, which calls cute.compile
            return original(self, function, *args, **kwargs)
        return compile_for_gpu(functools.partial(original, self), function, args, kwargs)

    with mock.patch.object(CompileCallable, "_compile", replacement):
        yield


@contextlib.contextmanager
def _options(gpu: Any) -> Iterator[None]:
    """Sets what the emulator needs of the DSL's options. Options of a call come on top."""
    with tempfile.TemporaryDirectory(prefix="emulator-") as folder:
        needed = dict(keep_ptx=True, lineinfo=True, enable_tvm_ffi=True, dump_dir=folder)
        with contextlib.ExitStack() as stack:
            for variables, (name, value) in itertools.product(_variables(), needed.items()):
                stack.enter_context(mock.patch.object(variables, name, value))
            yield


@contextlib.contextmanager
def replace_calls(call: Callable) -> Iterator[None]:
    """Inside the block, a call of a function with @cute.jit by other functions calls `call(function, args, kwargs)`."""
    from cutlass._mlir import ir
    from cutlass.base_dsl.dsl import BaseDSL

    original = BaseDSL._func

    def replacement(self: Any, function: Callable, *args: Any, **kwargs: Any) -> Any:
        if _is_compiling.get() or ir.Context.current is not None:
            return original(self, function, *args, **kwargs)
        return call(function, args, kwargs)

    with mock.patch.object(BaseDSL, "_func", replacement):
        yield


# Options of a call, which the function does not get.
_CALL_OPTIONS = {"compile_only", "export_name", "gpu_module_attrs", "no_cache", "no_jit_engine", "pipeline"}


def without_options(kwargs: dict) -> dict:
    """The keyword arguments of a call that are the function's own."""
    return {name: value for name, value in kwargs.items() if name not in _CALL_OPTIONS}


def runtime_arguments(compiled: Any, args: tuple, kwargs: dict) -> tuple:
    """The arguments of a call that the compiled function takes: by position, with defaults, without constants."""
    return compiled.execution_args.get_rectified_args_from_original_args(args, kwargs)


def _variables() -> list[Any]:
    """The settings of `cute.jit` and of `cute.experimental.jit`."""
    from cutlass.cutlass_dsl import CuTeDSL, CuteExperimentalDSL

    return [language._get_dsl().envar for language in (CuTeDSL, CuteExperimentalDSL)]


@contextlib.contextmanager
def answers(gpu: Any) -> Iterator[None]:
    """Inside the block, the DSL's questions about the GPU are answered without a driver."""
    import cutlass.cuda
    from cutlass.base_dsl.runtime import cuda
    from cutlass.utils.hardware_info import HardwareInfo

    attributes = host.device_attributes(gpu)

    def init(self: Any, device_id: int = 0) -> None:
        self.device_id = device_id

    def max_active_clusters(self: Any, cluster_size: int, stream: Any = None) -> int:
        # One CTA per SM, as for the DSL's own answer, which lets a CTA have all shared memory.
        return gpu.sm_count // cluster_size

    answered = [
        (HardwareInfo, "__init__", init),
        (cuda, "initialize_cuda_context", lambda device_id=0, flags=0: None),
        (cutlass.cuda, "initialize_cuda_context", lambda device_id=0, flags=0: None),
        (HardwareInfo, "get_max_active_clusters", max_active_clusters),
        (HardwareInfo, "get_device_multiprocessor_count", lambda self: gpu.sm_count),
        (HardwareInfo, "get_l2_cache_size_in_bytes", lambda self: _L2_BYTES),
        (cuda, "get_device_attribute", lambda attribute, device_id=0: attributes[int(attribute)]),
        *((variables, "arch", gpu.target) for variables in _variables()),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, answer in answered:
            stack.enter_context(mock.patch.object(owner, name, answer))
        yield


_L2_BYTES = 50 << 20  # H100's; the emulator has no cache
