"""The toolchain is found without importing the compiler (see test_layers.py), and is the one that an import finds."""

import sys
from pathlib import Path

import pytest

from quackish.device import toolchain
from quackish.errors import UnsupportedError


@pytest.fixture
def anew():
    toolchain.find.cache_clear()
    yield
    toolchain.find.cache_clear()


def test_find_matches_the_import():
    cutlass = pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    tvm_ffi = pytest.importorskip("tvm_ffi")
    found = toolchain.find()
    assert found.dsl == cutlass.__version__
    assert found.ffi == tvm_ffi.__version__
    assert found.flavour == f"cu{cutlass.CUDA_VERSION.major}"
    assert str(found.runtime) == cutlass.cute.runtime.find_runtime_libraries(enable_tvm_ffi=False)[0]


@pytest.mark.parametrize(
    "installed, driver, flavour",
    [([12, 13], (13, 0), 13), ([12, 13], (12, 4), 12), ([12], (13, 0), 12), ([12, 13], (14, 1), 13), ([12], None, 12)],
)
def test_flavour(installed, driver, flavour):
    assert toolchain.choose_flavour(installed, driver) == flavour


def test_no_flavour_for_the_driver():
    with pytest.raises(UnsupportedError, match=r"installed: cu13.* has CUDA 12\.4; the oldest supported is CUDA 12"):
        toolchain.choose_flavour([13], (12, 4))
    with pytest.raises(UnsupportedError, match=r"installed: none.*pip install 'nvidia-cutlass-dsl>="):
        toolchain.choose_flavour([], (12, 4))


@pytest.mark.parametrize("missing", ["cutlass", "tvm_ffi"])
def test_missing_parts(monkeypatch, anew, missing):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    monkeypatch.setitem(sys.modules, missing, None)  # then find_spec returns None
    with pytest.raises(UnsupportedError, match=f"is not installed .no module named {missing!r}"):
        toolchain.find()
    assert toolchain.versions() is None


def test_runtime_library_from_the_environment(monkeypatch, anew):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    monkeypatch.setenv("CUTE_DSL_LIBS", "/opt/other.so:/opt/lib/libcute_dsl_runtime.so")
    assert toolchain.find().runtime == Path("/opt/lib/libcute_dsl_runtime.so")
