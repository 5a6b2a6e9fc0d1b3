"""A pytest fixture that runs a test of kernels several times, each time with other timing.

In conftest.py:

    pytest_plugins = ["quackish.emulator.pytest_plugin"]

A test that takes the argument `emulated` runs once for each completion and seed in `SETTINGS`. The argument is the
report of `emulator.record`.

    def test_scale(emulated):
        kernel(x, y, 3.0)
        ...
        assert len(emulated.launches) == 1

`@pytest.mark.parametrize("emulated", [("late", 7)], indirect=True)` chooses other settings.
"""

from collections.abc import Iterator

import pytest

from quackish import emulator
from quackish.emulator.completion import COMPLETIONS

SETTINGS = [(completion, seed) for completion in COMPLETIONS for seed in range(3)]


@pytest.fixture(params=SETTINGS, ids=lambda setting: f"{setting[0]}-{setting[1]}")
def emulated(request: pytest.FixtureRequest) -> Iterator[emulator.Report]:
    """The report of the launches in this test."""
    completion, seed = request.param
    with emulator.record(completion, seed) as report:
        yield report
