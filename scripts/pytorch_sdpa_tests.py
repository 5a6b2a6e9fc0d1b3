#!/usr/bin/env python3
"""Runs PyTorch's own tests of scaled_dot_product_attention on quackish.scaled_dot_product_attention.

usage: python scripts/pytorch_sdpa_tests.py [test_transformers.py] [--device cuda]

The file is PyTorch's test/test_transformers.py, unmodified. Without a path, that of the installed version is downloaded
from GitHub. `torch.nn.functional.scaled_dot_product_attention` is replaced, so calls from torch.nn's modules are
replaced too. Where a test compares with PyTorch's math backend, those calls stay PyTorch's.

It fails if a test fails that is not in NOT_APPLICABLE, if a test passes that is, or if no call reached quackish. A test
that does not call the function proves nothing and is counted apart.
"""

import argparse
import collections
import importlib.util
import os
import re
import sys
import tempfile
import types
import unittest
import urllib.request
import warnings
from pathlib import Path

import torch
from torch.nn import functional

import quackish
from quackish.ops.attention import api, kernel_steps
from quackish.reference import attention as reference

URL = "https://raw.githubusercontent.com/pytorch/pytorch/v{}/test/test_transformers.py"

# Tests whose names match fully, and why they cannot pass
NOT_APPLICABLE: dict[str, str] = {}

OUTCOMES = ("passed", "failed", "not applicable", "skipped", "no call")

pytorch_sdpa = functional.scaled_dot_product_attention
calls: collections.Counter[str] = collections.Counter()
math_is_reference = True


def _count(path: str) -> None:
    calls[path] += 1


def _is_reference() -> bool:
    cuda = torch.backends.cuda
    others = cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled()
    return math_is_reference and not others


for _function in (_count, _is_reference):  # torch.compile calls them while it traces
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _replacement(*args, **kwargs):
    if _is_reference():
        return pytorch_sdpa(*args, **kwargs)
    _count("calls")
    return quackish.scaled_dot_product_attention(*args, **kwargs)


def _plain(*args, **kwargs):
    _count("PyTorch's own function")
    return pytorch_sdpa(*args, **kwargs)


def _counting(path: str, function):
    def counting(*args, **kwargs):
        _count(path)
        return function(*args, **kwargs)

    return counting


def replace() -> None:
    functional.scaled_dot_product_attention = _replacement
    api.functional = types.SimpleNamespace(scaled_dot_product_attention=_plain)
    for where, name in ((kernel_steps.AttentionSteps, "kernels"), (reference, "portable path")):
        for step in ("forward", "backward"):
            setattr(where, step, _counting(f"{name}, {step}", getattr(where, step)))


def load(path: Path, device: str) -> types.ModuleType:
    """PyTorch's test file as a module, whose classes are for `device`."""
    os.environ["PYTORCH_TESTING_DEVICE_ONLY_FOR"] = device
    sys.argv = sys.argv[:1]  # torch.testing reads them
    if importlib.util.find_spec("expecttest") is None:  # a base class; these tests use nothing of it
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase
    spec = importlib.util.spec_from_file_location("test_transformers", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["test_transformers"] = module
    spec.loader.exec_module(module)
    return module


class _Result(unittest.TestResult):
    """Of one test."""

    outcome, message = "passed", ""

    def addFailure(self, test, error):
        self.outcome, self.message = "failed", f"{error[0].__name__}: {error[1]}"

    addError = addFailure

    def addSkip(self, test, reason):
        self.outcome = "skipped"


def run(test: unittest.TestCase) -> tuple[str, str]:
    """(outcome, message). A test that uses only the math backend is run again, with quackish as that backend."""
    global math_is_reference
    for math_is_reference in (True, False):
        before, result = calls["calls"], _Result()
        type(test)(test._testMethodName).run(result)
        if calls["calls"] > before or result.outcome == "skipped":
            return result.outcome, result.message
    return "no call", result.message


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path, help="PyTorch's test/test_transformers.py; default: downloaded")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.path is None:
        url = URL.format(torch.__version__.split("+")[0])
        args.path = Path(tempfile.mkdtemp()) / "test_transformers.py"
        print(f"downloading {url}")
        urllib.request.urlretrieve(url, args.path)
    replace()
    warnings.simplefilter("ignore", quackish.PortablePathWarning)
    module = load(args.path, args.device)
    table: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    wrong = []
    for test in _tests(unittest.defaultTestLoader.loadTestsFromModule(module)):
        name = test._testMethodName
        outcome, message = run(test)
        reason = next((r for pattern, r in NOT_APPLICABLE.items() if re.fullmatch(pattern, name)), None)
        if reason and outcome == "passed":
            wrong.append(f"{name} passed, but is in NOT_APPLICABLE: {reason}")
        elif outcome == "failed" and reason:
            outcome = "not applicable"
        elif outcome == "failed":
            wrong.append(f"{name} failed: {message}")
        table[f"{type(test).__name__}.{name}"][outcome] += 1
    for name, row in table.items():
        print(name, dict(row))
    print(dict(calls))
    print("\n".join(wrong))
    return 1


def _tests(suite):
    for item in suite:
        yield from _tests(item) if isinstance(item, unittest.TestSuite) else [item]


if __name__ == "__main__":
    sys.exit(main())
