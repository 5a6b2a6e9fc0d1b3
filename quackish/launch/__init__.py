"""A kernel class, a problem, a config and a target in; a function that takes torch tensors out. No kernel by name.

A kernel class is called as `kernel_class(problem, config)`, both frozen dataclasses of ints, bools, strings and None.
The object has a `@cute.jit __call__`, and `fake_args()` with the arguments that it is compiled for; the last one is
`cute.runtime.make_fake_stream()`, in calls the handle of a stream of the current device. With
`make_fake_stream(use_tvm_ffi_env_stream=True)` it is not passed in calls: launches go to torch's current stream of the
device of the tensors among the arguments, of which there must be one.
"""

from quackish.launch.compile import Counters, Recording, Request, counters, get, observe, record
from quackish.launch.cubin import Resources, resources
from quackish.launch.parallel import prepare

__all__ = [
    "Counters",
    "Recording",
    "Request",
    "Resources",
    "counters",
    "get",
    "observe",
    "prepare",
    "record",
    "resources",
]
