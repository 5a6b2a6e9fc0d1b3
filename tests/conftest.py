"""Fixtures of all tests. Tests marked `gpu` need a GPU, those marked `exhaustive` or `peers` an option.

Tests that cannot run are deselected instead of skipped: thousands of skips would hide what ran.
"""

import atexit
import contextlib
import dataclasses
import datetime
import gc
import os
import warnings
import zlib
from pathlib import Path

import pytest
import torch

from tests import forked

# Compiled kernels and tuned configs of tests, kept between runs. Those of the user are neither used nor changed.
for _name in ("CACHE", "CONFIG"):
    os.environ[f"QUACKISH_{_name}_DIR"] = str(Path(__file__).parents[1] / "out" / "tests" / _name.lower())


gc.set_threshold(700, 10, 100)  # fewer full collections: each scans the objects of every library

if "PYTEST_XDIST_WORKER" in os.environ:  # at a normal end, nanobind reports objects of Triton's that are still alive
    atexit.register(os._exit, 0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive",
        nargs="?",
        const="all",
        choices=("all", "third"),
        help="also run slow tests, and those that try every variant: all, or a third that changes from day to day",
    )
    parser.addoption(
        "--source-lines",
        action="store_true",
        help="compile emulated kernels with source lines, which faults then name, in 4/3 of the time",
    )
    parser.addoption(
        "--peers", metavar="GPU", help="also run other libraries' kernels, on an emulated GPU: h100 or b200"
    )


def _left_out(config: pytest.Config) -> dict[str, str]:
    """The markers of tests that do not run, and why."""
    why = {}
    if not torch.cuda.is_available():
        why["gpu"] = "GPU tests do not run: torch.cuda.is_available() is False"
    if not config.getoption("exhaustive"):
        why["exhaustive"] = "exhaustive tests do not run: scripts/check.sh --exhaustive and .ci/run run them"
    if not config.getoption("peers"):
        why["peers"] = "tests of peers do not run: pip install '.[peers]', then pytest --peers h100, as .ci/run does"
    return why


def _runs_today(item: pytest.Item) -> bool:
    """True for a third of the tests, which is another one on each of three days."""
    return zlib.crc32(item.nodeid.encode()) % 3 == datetime.date.today().toordinal() % 3


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Libraries keep the kernels that they have compiled, so a process runs them on one GPU."""
    markers, gpu, exhaustive = _left_out(config), config.getoption("peers"), config.getoption("exhaustive")
    selected = [
        item
        for item in items
        if not any(map(item.get_closest_marker, markers))
        and (not item.get_closest_marker("exhaustive") or exhaustive == "all" or _runs_today(item))
        and not (gpu and item.get_closest_marker("peers") and item.callspec.params["gpu"] != gpu)
    ]
    kept = set(selected)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    # The longest test runs first, so that no process runs it alone at the end.
    items[:] = sorted(selected, key=lambda item: not _is_first(item))


def _is_first(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("exhaustive")
    return marker is not None and marker.kwargs.get("first", False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for why in _left_out(config).values():
        terminalreporter.line(why)


@pytest.fixture
def wide(monkeypatch):
    """Commands wrap nothing."""
    monkeypatch.setenv("COLUMNS", "1000")


@pytest.fixture(autouse=True, scope="session")
def _isolated_configs(tmp_path_factory, request):
    """Ignores this user's tuned configs, and allows editing sources while tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quackish.device.cache._STARTED", float("inf"))
        patch.setenv("QUACKISH_CONFIG_DIR", str(tmp_path_factory.mktemp("configs")))
        forked.ENVIRONMENT.update(os.environ)
        if not request.config.getoption("source_lines"):
            patch.setattr("quackish.emulation._OPTIONS", "--keep-ptx")
        yield


@pytest.fixture
def source_lines(monkeypatch):
    """Emulated kernels have source lines, which faults name."""
    from quackish import emulation

    monkeypatch.setattr(emulation, "_OPTIONS", "--keep-ptx --generate-line-info")
    emulation._loaded.clear()
    yield
    emulation._loaded.clear()


@pytest.fixture
def poisoned(monkeypatch):
    """Fills newly allocated memory with NaN."""
    from quackish.device import cuda
    from quackish.device.kernel_device import device_of, substitute

    monkeypatch.setattr(cuda, "empty", cuda._empty)  # the faster allocator bypasses PyTorch, which fills memory
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with contextlib.ExitStack() as stack:
        if torch.cuda.is_available():
            where = torch.device("cuda", torch.cuda.current_device())
            if not isinstance(device := device_of(where), str):
                device = dataclasses.replace(device, empty=cuda._empty, cache={})
                stack.enter_context(substitute(where, device))
        yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def path(request, poisoned):
    """Makes linear_cross_entropy use one of lce_cases.PATHS, or run its kernels in the emulator: "kernels-h200/late/0".

    On "cpu", PyTorch code replaces the kernels.
    """
    from quackish.device.kernel_device import device_of, substitute, why_unsupported
    from quackish.ops.linear_cross_entropy.gemm_problems import GEMM_SPEC
    from tests import emulated_kernels as emulated
    from tests.emulator_cases import emulated as in_emulator
    from tests.emulator_cases import is_emulator
    from tests.linear_cross_entropy.cases import Path

    torch.manual_seed(0)
    kind, device = request.param.split("-")
    if kind == "portable":
        yield Path(torch.device(device))
        return
    with contextlib.ExitStack() as stack:
        where = torch.device("cpu")
        if device == "cuda":
            where = torch.device("cuda", torch.cuda.current_device())
            if reason := why_unsupported("linear_cross_entropy", GEMM_SPEC, where):
                pytest.skip(reason)
            on = dataclasses.replace(device_of(where), cache={})
        elif is_emulator(device):
            stack.enter_context(in_emulator(device))
            on = device_of(where)
        else:
            on = emulated.device()
        k = emulated.counted(on)
        stack.enter_context(substitute(where, on))
        close = 2e-6 if device == "cpu" else 1e-5
        yield Path(where, k, close=close, is_small=is_emulator(device), approximates=device != "cpu")


@pytest.fixture
def few_rows_counted(monkeypatch):
    """PyTorch sorts rows by class if a chunk has more than 100, instead of more than 16,384."""
    monkeypatch.setattr("quackish.ops.linear_cross_entropy.launches.MOST_ROWS_COUNTED", 100)


@pytest.fixture
def limits(monkeypatch):
    """Sets constants of quackish/ops/linear_cross_entropy/layout.py: `limits(SHARED_FROM=0)`."""
    from quackish.ops.linear_cross_entropy import layout as configs

    caches = configs.choose_layout, configs.first_classes

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
    """Makes the blocks and chunks of `recompute` small enough for small shapes."""
    limits(scratch_columns=lambda *how: 256, MIN_DX_ELEMENTS=128 * 512)


@pytest.fixture
def norm_kernels():
    """Runs RMSNorm of CPU tensors on emulated kernels, as that of CUDA tensors on compiled ones."""
    from quackish.device.kernel_device import substitute
    from quackish.ops.rms_norm import plans as rms_norm_plans
    from tests.rms_norm.emulated import Emulated

    emulated = Emulated()
    rms_norm_plans._plans.clear()
    with substitute("cpu", emulated.device):
        yield emulated


@pytest.fixture(params=["portable", "kernels"])
def norm_path(request):
    """Runs the test on the portable path of RMSNorm (the value is None) and on emulated kernels."""
    return request.getfixturevalue("norm_kernels") if request.param == "kernels" else None


@pytest.fixture(params=["portable", "kernels", pytest.param("gpu", marks=pytest.mark.gpu)])
def norm_anywhere(request):
    """As `norm_path`, and also on a GPU."""
    from quackish import errors
    from tests.rms_norm.cases import on
    from tests.rms_norm.emulated import Emulated

    if request.param != "gpu":
        yield request.getfixturevalue("norm_kernels") if request.param == "kernels" else None
        return
    on["device"] = "cuda"
    errors._warned.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.PortablePathWarning)
        yield Emulated()  # without launches
    on["device"] = "cpu"


@pytest.fixture
def where(request, poisoned, monkeypatch):
    """Makes grouped_mlp use the path that a test's `on_every_path` names, or run its kernel in the emulator."""
    from quackish.device.kernel_device import KernelDevice, substitute, why_unsupported
    from quackish.gpu import H200
    from quackish.ops.mlp import groups, reference
    from quackish.ops.mlp.problems import GEMM_SPEC
    from tests import emulated_kernels
    from tests.emulator_cases import emulated, is_emulator
    from tests.mlp.cases import BF16, FEW, FP16, FP64, Where

    kind, device = request.param.split("-")
    if kind == "portable":
        yield Where(device, "reference", (FP64, BF16))
        return
    if kind == "blocks":
        for module in (reference, groups):
            monkeypatch.setattr(module, "is_on_gpu", lambda t: True)
        monkeypatch.setattr(reference, "_CHUNK", 500)
        monkeypatch.setattr(groups, "_BATCH_BYTES", 2**18)
        yield Where(device, "reference", (FP64, BF16))
        return
    if kind == "emulated":
        with substitute("cpu", KernelDevice(H200, emulated_kernels.kernel_for)):
            yield Where(device, "cute", (BF16, FP16))
        return
    if is_emulator(device):
        with emulated(device):
            yield Where("cpu", "cute", (BF16,), FEW[device.split("/")[0]])
        return
    if reason := why_unsupported("grouped_mlp", GEMM_SPEC, torch.device("cuda", torch.cuda.current_device())):
        pytest.skip(reason)
    yield Where(device, "cute", (BF16, FP16))
