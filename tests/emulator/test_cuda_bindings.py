"""Functions of cuda.bindings in programs that are written for a GPU."""

import numpy as np
import pytest
from cuda.bindings import driver, runtime

from quackish.emulator import cuda_bindings
from quackish.emulator.memory import host_regions


def test_memory():
    with cuda_bindings.stand_ins():
        status, address = driver.cuMemAlloc(64)
        assert status == driver.CUresult.CUDA_SUCCESS
        assert int(address) % 256 == 0
        assert host_regions.registered[int(address)] == 64
        driver.cuMemsetD32Async(address, 7, 16, driver.CUstream(0))
        driver.cuMemsetD8(int(address) + 4, 1, 4)
        copy = np.zeros(16, np.uint32)
        assert driver.cuMemcpyDtoH(copy, address, 64) == (driver.CUresult.CUDA_SUCCESS,)
        assert copy.tolist() == [7, 0x01010101, *[7] * 14]
        driver.cuMemFree(address)
        assert int(address) not in host_regions.registered
        _, other = runtime.cudaMalloc(8)
    assert other not in host_regions.registered


def test_events_and_graphs():
    with cuda_bindings.stand_ins():
        (_, start), (_, end) = driver.cuEventCreate(0), driver.cuEventCreate(0)
        driver.cuEventRecord(start, driver.CUstream(0))
        driver.cuEventRecord(end, driver.CUstream(0))
        assert driver.cuEventElapsedTime(start, end)[1] > 0
        with pytest.raises(NotImplementedError, match="the emulator has no CUDA graphs"):
            runtime.cudaStreamBeginCapture(0, runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)


def test_other_functions_are_named():
    with (
        cuda_bindings.stand_ins(),
        pytest.raises(NotImplementedError, match="the emulator has no cuModuleLoad of cuda"),
    ):
        driver.cuModuleLoad(b"kernel.cubin")
    assert runtime.cudaGetErrorName(runtime.cudaError_t.cudaSuccess)[1] == b"cudaSuccess"
