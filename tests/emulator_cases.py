"""A Device whose kernels run in the emulator, for tensors of the CPU."""

import dataclasses
import functools
import tempfile

from quackish import emulator, kernels
from quackish.configs.choose import choose
from quackish.gpu import B200, H200
from quackish.launch.compile import compile_kernel, lock
from quackish.ops.device import Device
from quackish.ops.kernel_for import Kernel

SMALL_H200 = dataclasses.replace(H200, sm_count=4)  # takes little scratch for GEMMs
SMALL_B200 = dataclasses.replace(B200, sm_count=4)


@functools.cache
def _folder():
    return tempfile.mkdtemp(prefix="quackish-emulator-")


@functools.cache
def load(name, problem, config, gpu):
    options = f"--keep-ptx --generate-line-info --dump-dir {_folder()}"
    with lock:
        return emulator.load(compile_kernel(kernels.find(name, gpu), problem, config, gpu.target, options), gpu)


def kernel_for(name, problem, gpu):
    config = choose(name, problem, gpu).config
    return Kernel(load(name, problem, config, gpu), config)


def device(gpu=SMALL_H200):
    return Device(gpu, kernel_for)
