"""A pytest fixture for tests of kernels in a CI without a GPU.

In conftest.py:

    pytest_plugins = ["quackish.testing.pytest_plugin"]

A test that takes the argument `emulated_gpu` runs once for a Hopper and once for a Blackwell GPU. The argument is its
name, for `quackish.emulate` and `assert_deterministic(..., emulate=)`.
"""

import pytest


@pytest.fixture(params=["h200", "b200"])
def emulated_gpu(request: pytest.FixtureRequest) -> str:
    """The name of a GPU."""
    return request.param
