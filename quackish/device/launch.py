"""Compiles and caches kernels: (kernel class, problem, config, target) -> a function called with torch tensors.

This layer knows no kernel by name. A kernel class is called as `kernel_class(problem, config)`, both frozen dataclasses
of ints, bools, strings and None. Instances have a `@cute.jit __call__`, and `fake_args()`, which returns the arguments
to compile for. The last one is `cute.runtime.make_fake_stream()`, and calls pass the handle of a stream of the current
device. With `make_fake_stream(use_tvm_ffi_env_stream=True)` calls pass no stream: launches go to torch's current stream
on the device of the tensor arguments, and at least one argument must be a tensor.
"""

from quackish.device.compile import Counters, Request, counters, get, observe
from quackish.device.compile_jobs import prepare
from quackish.device.cubin import Resources, disassemble, resources

__all__ = ["Counters", "Request", "Resources", "counters", "disassemble", "get", "observe", "prepare", "resources"]
