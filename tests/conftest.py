"""For all tests: what is marked `gpu` is skipped, with the reason, where there is no GPU."""

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # Skipping here, not by a marker, makes the summary one line for all of them.
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: torch.cuda.is_available() is False")


@pytest.fixture(autouse=True, scope="session")
def _no_table_of_the_users(tmp_path_factory):
    """Configs are those of the package, whatever was tuned on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUACKISH_CONFIG_DIR", str(tmp_path_factory.mktemp("configs")))
        yield
