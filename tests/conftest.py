"""For all tests: those marked `gpu` are skipped without a GPU, those marked `exhaustive` without --exhaustive."""

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="also run tests that compile or try every variant")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # Skipping here, not by a marker, makes the summary one line for all of them.
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: torch.cuda.is_available() is False")
    if item.get_closest_marker("exhaustive") and not item.config.getoption("exhaustive"):
        pytest.skip("exhaustive: scripts/check.sh --exhaustive and .ci/run run it")


@pytest.fixture(autouse=True, scope="session")
def _no_table_of_the_users(tmp_path_factory):
    """Configs are those of the package, whatever was tuned on this machine; sources may be edited while tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quackish.launch.cache._STARTED", float("inf"))
        patch.setenv("QUACKISH_CONFIG_DIR", str(tmp_path_factory.mktemp("configs")))
        yield


@torch.compiler.assume_constant_result
def _no_reason(device):
    return ""


@pytest.fixture
def run_on(monkeypatch):
    """Makes linear_cross_entropy run with these kernels on any device: `run_on(lambda device: k)`."""
    from quackish.ops.linear_cross_entropy import api, autograd

    def set_kernels(kernels_of):
        monkeypatch.setattr(autograd, "kernels_of", kernels_of)
        monkeypatch.setattr(api, "no_kernel_on", _no_reason)
        monkeypatch.setattr(api, "_plans", {})

    return set_kernels


@pytest.fixture
def limits(monkeypatch):
    """Sets constants of linear cross entropy's layouts: `limits(SHARED_FROM=0)`."""
    from quackish.configs import linear_cross_entropy as configs

    caches = configs.layout, configs.first_classes

    def set_constants(**constants):
        for name, value in constants.items():
            monkeypatch.setattr(configs, name, value)
        for cache in caches:
            cache.cache_clear()

    yield set_constants
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def narrow(limits):
    """Blocks of recompute's backward, and chunks of its forward, that are small enough for small shapes."""
    limits(scratch_columns=lambda *how: 256, LEAST_PART=128 * 512)
