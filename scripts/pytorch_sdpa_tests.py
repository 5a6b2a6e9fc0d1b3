#!/usr/bin/env python3
"""Runs PyTorch's own tests of scaled_dot_product_attention on quackish.scaled_dot_product_attention.

usage: python scripts/pytorch_sdpa_tests.py [test_transformers.py] [-k REGEX]

The file is PyTorch's test/test_transformers.py, unmodified. Without a path, the file of the installed version is
downloaded from GitHub. With a GPU, the tests for CUDA run, else those for the CPU: about an hour on one core.

`torch.nn.functional.scaled_dot_product_attention` is replaced, for torch.nn's modules too. Calls that allow only
PyTorch's math backend stay PyTorch's, because tests compare with them. A test without other calls runs again with these
calls replaced too. A test without a call of quackish proves nothing and has a column of its own. So has a test that
also fails with PyTorch's function.

Exit code 1: a test fails that is not in NOT_APPLICABLE, a test passes that is, or no call reached quackish.
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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import quackish
from quackish.ops.attention import api, kernel_steps, reference

URL = "https://raw.githubusercontent.com/pytorch/pytorch/v{}/test/test_transformers.py"

# Not run: dropout is refused, and most of these tests call PyTorch's operators instead.
DROPOUT = re.compile(r"_dropout(_p)?_0_[1-9]")

# How the names of tests begin that run and fail, and why
_NESTED = "nested tensors are refused"
_SERVED = "a call with a mask is served, although the allowed backend of PyTorch refuses it"
_TRAINS_WITH_DROPOUT = "dropout is refused; the module trains with its default"
NOT_APPLICABLE = {
    r"test_cudnn_attention_gqa": "key and value with different numbers of heads are refused",
    r"test_cudnn_attention_(seqlen1_dropout_heuristic|low_dropout)": "dropout is refused",
    r"test_(de|en)coder_padding_and_src_mask_bool": _TRAINS_WITH_DROPOUT,
    r"test_flash_attention_vs_math_ref_grads_nestedtensor": _NESTED,
    r"test_fused_kernels_(nested|seq_len_[01]_inputs)": _NESTED,
    r"test_invalid_fused_inputs_attn_mask_present": _SERVED,
    r"test_invalid_inputs_": "ValueError for shapes and devices and TypeError for dtypes, not RuntimeError",
    r"test_kpm_mask_trailing_column_with_nested_tensor": _TRAINS_WITH_DROPOUT,
    r"test_mask_invalid_last_dim_stride": _SERVED,
    r"test_nested_fails_on_padding_head_dim": _NESTED,
    r"test_scaled_dot_product_attention_.*_causal_attn_mask_": "a mask beside is_causal is accepted",
    r"test_scaled_dot_product_attention_fused_kernels_packed_(accuracy_)?.*type_nested": _NESTED,
    r"test_sdpa_zero_sized_tensors": "a head dimension of 0 is refused",
    r"test_transformerencoderlayer_src_mask": _TRAINS_WITH_DROPOUT,
}

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
EXCLUDED, NO_CALL, BOTH_FAIL = "not applicable", "no call", "fails with PyTorch's function"
OUTCOMES = (PASSED, FAILED, EXCLUDED, BOTH_FAIL, NO_CALL, SKIPPED)
CALL, MATH, OWN = "calls of quackish", "calls that stay PyTorch's", "PyTorch's own function"

_calls: collections.Counter[str] = collections.Counter()
_pytorch = functional.scaled_dot_product_attention
_stay_pytorchs = "math"  # or "all" or "none"


@torch.compiler.assume_constant_result  # torch.compile calls it while it traces
def _count(what: str) -> None:
    _calls[what] += 1


@torch.compiler.assume_constant_result
def _stays_pytorchs() -> bool:
    cuda = torch.backends.cuda
    fused = cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled()
    return _stay_pytorchs == "all" or (_stay_pytorchs == "math" and cuda.math_sdp_enabled() and not fused)


def _replacement(*args: Any, **kwargs: Any) -> Any:
    if _stays_pytorchs():
        _count(MATH)
        return _pytorch(*args, **kwargs)
    _count(CALL)
    return quackish.scaled_dot_product_attention(*args, **kwargs)


def _counting(what: str, function: Callable) -> Callable:
    def counting(*args: Any, **kwargs: Any) -> Any:
        _count(what)
        return function(*args, **kwargs)

    return counting


def replace() -> None:
    """Puts quackish's function in the place of PyTorch's and counts which path its calls take."""
    functional.scaled_dot_product_attention = _replacement
    api.functional = types.SimpleNamespace(scaled_dot_product_attention=_counting(OWN, _pytorch))  # type: ignore
    for where, name in ((kernel_steps.AttentionSteps, "kernels"), (reference, "portable path")):
        for step in ("forward", "backward"):
            setattr(where, step, _counting(f"{name}, {step}", getattr(where, step)))


def load(path: Path) -> types.ModuleType:
    """PyTorch's file as a module."""
    os.environ["PYTORCH_TESTING_DEVICE_ONLY_FOR"] = "cuda" if torch.cuda.is_available() else "cpu"
    os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"
    sys.argv = sys.argv[:1]  # torch.testing reads them
    if importlib.util.find_spec("expecttest") is None:  # these tests need only its base class
        sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)  # type: ignore[assignment]
    spec = importlib.util.spec_from_file_location("test_transformers", path)
    module = sys.modules["test_transformers"] = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def _run_once(test: unittest.TestCase, stay_pytorchs: str) -> tuple[str, str, collections.Counter[str]]:
    """(outcome, message, calls)"""
    global _stay_pytorchs
    _stay_pytorchs = stay_pytorchs
    # CausalBias works only with torch.nn.functional's function, so its tests call the replacement by its imported name.
    functional.scaled_dot_product_attention = _pytorch if "AttnBias" in type(test).__name__ else _replacement
    before, result = _calls.copy(), unittest.TestResult()
    type(test)(test._testMethodName).run(result)
    if failures := result.failures + result.errors:
        return FAILED, failures[0][1].strip().splitlines()[-1], _calls - before
    return SKIPPED if result.skipped else PASSED, "", _calls - before


def run(test: unittest.TestCase, reason: str | None) -> tuple[str, str]:
    """(outcome, message); reason: why it is not applicable."""
    outcome, message, made = _run_once(test, "math")
    if not made[CALL] and made[MATH]:
        outcome, message, made = _run_once(test, "none")
    if outcome != SKIPPED and not made[CALL]:
        return NO_CALL, ""
    if outcome == FAILED and reason:
        return EXCLUDED, ""
    if outcome == FAILED and _run_once(test, "all")[0] == FAILED:
        outcome = BOTH_FAIL
    return outcome, message


def _tests(suite: Iterable) -> Iterator[Any]:
    for item in suite:
        yield from _tests(item) if isinstance(item, unittest.TestSuite) else (item,)


def _print_tables(counts: collections.Counter[tuple[str, str]]) -> None:
    """counts: of tests, by name and outcome; the names of classes have no dot."""
    names = sorted({name for name, _ in counts})
    for title, rows in ("test", [n for n in names if "." in n]), ("class", [n for n in names if "." not in n]):
        print(f"\n| {title} | {' | '.join(OUTCOMES)} |\n|{' --- |' * (len(OUTCOMES) + 1)}")
        for name in rows:
            print(f"| {name} | {' | '.join(str(counts[name, outcome]) for outcome in OUTCOMES)} |")
    print("\n".join(["", *(f"{count} {what}" for what, count in sorted(_calls.items()))]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path, help="PyTorch's test/test_transformers.py; default: downloaded")
    parser.add_argument("-k", metavar="REGEX", default="", help="only tests whose name contains it")
    args = parser.parse_args()
    if args.path is None:
        args.path = Path(tempfile.mkdtemp()) / "test_transformers.py"
        urllib.request.urlretrieve(URL.format(torch.__version__.split("+")[0]), args.path)
    replace()
    warnings.simplefilter("ignore", quackish.PortablePathWarning)
    module = load(args.path)
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    code = 0
    try:
        for test in _tests(unittest.defaultTestLoader.loadTestsFromModule(module)):
            name = test._testMethodName
            if not re.search(args.k, name):
                continue
            reason = next((why for start, why in NOT_APPLICABLE.items() if re.match(start, name)), None)
            outcome, message = (EXCLUDED, "") if DROPOUT.search(name) else run(test, reason)
            if outcome == PASSED and reason:
                outcome, message = FAILED, f"it passes, but NOT_APPLICABLE has it: {reason}"
            if message:
                print(f"{name} {outcome}: {message}", flush=True)
            code |= outcome == FAILED
            function = getattr(test, name).__func__.__qualname__
            counts.update([(function, outcome), (function.split(".")[0], outcome)])
    finally:  # also after Ctrl-C
        _print_tables(counts)
    return int(code or not _calls[CALL])


if __name__ == "__main__":
    sys.exit(main())
