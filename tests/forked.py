"""Processes that start in a fraction of a second: a server that has imported PyTorch once forks them."""

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from unittest import mock

MODULES = [
    "quackish.bench.processes",
    "tests.linear_cross_entropy.parallel_checks",
    "tests.device.test_cache",
    "tests.integrations.test_distributed",
]
ENVIRONMENT: dict[str, str] = {}  # of the session, without what a test has set; conftest.py fills it


def context() -> ForkServerContext:
    """Starts the server at the first call. Tests run in parallel, so its processes have one thread each."""
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(MODULES)
    with mock.patch.dict(os.environ, ENVIRONMENT | {"OMP_NUM_THREADS": "1"}, clear=True):
        forkserver.ensure_running()
    return forked
