"""The list of mutations fits the tree, and scripts/mutations.py tells what kills one from what does not."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("mutations", ROOT / "scripts" / "mutations.py")
mutations = sys.modules[SPEC.name] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(mutations)


# The list ------------------------------------------------------------------------------------------------------------


def test_there_are_20_of_both_kinds():
    assert len({m.name for m in mutations.MUTATIONS}) == len(mutations.MUTATIONS) == 20
    assert sum("/kernels/" in m.file for m in mutations.MUTATIONS) >= 7
    assert sum("/ops/" in m.file for m in mutations.MUTATIONS) >= 5


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda m: m.name)
def test_applies_once_and_names_tests_that_exist(mutation):
    text = mutations.apply(mutation, ROOT)
    assert text != (ROOT / mutation.file).read_text(encoding="utf-8")
    ast.parse(text)
    # no more than a line differs
    assert abs(mutation.old.count("\n") - mutation.new.count("\n")) <= 1
    tests = re.findall(r"^def (test_\w+)", (ROOT / mutation.tests).read_text(encoding="utf-8"), re.MULTILINE)
    assert any(mutation.select.split()[0] in name for name in tests)


def test_a_mutation_that_does_not_fit_says_so(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    with pytest.raises(ValueError, match=r"mutation m: 'x = 1' occurs 2 times in a\.py, expected once; adapt it"):
        mutations.apply(mutations.Mutation("m", "a.py", "x = 1", "x = 2", "t", "t"), tmp_path)


# The runner, on a toy ------------------------------------------------------------------------------------------------

TOY = """
def double(x):
    return 2 * x


def is_stuck():
    return False
"""
TESTS = """
import os
import time

import pytest
from quackish.toy import double, is_stuck


def test_first():
    assert double(0) == 0


def test_double():
    assert double(3) == 6


def test_stuck():
    while is_stuck():
        time.sleep(0.01)


def test_crash():
    if double(1) != 2:
        os.abort()


def test_fails_anyway():
    assert double(3) == 7


@pytest.mark.skip(reason="needs a GPU")
def test_skipped():
    pass
"""


def toy(name, select, old="2 * x", new="3 * x"):
    return mutations.Mutation(name, "quackish/toy.py", old, new, "tests/test_toy.py", select)


@pytest.fixture
def root(tmp_path):
    for folder in ("quackish", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "quackish" / "__init__.py").touch()
    (tmp_path / "quackish" / "toy.py").write_text(TOY)
    (tmp_path / "tests" / "test_toy.py").write_text(TESTS)
    return tmp_path


def test_what_kills_and_what_does_not(root, capsys):
    listed = [
        toy("hangs", "stuck", "return False", "return True"),
        toy("killed", "first or double"),
        toy("survives", "first"),
        toy("crashes", "crash"),
        toy("wrong_syntax", "double", new="2 *"),
        toy("needs_gpu", "skipped"),
        toy("fails_anyway", "fails_anyway"),
        toy("no_tests", "nowhere"),
    ]
    out = root / "out" / "table.md"
    argv = ["--jobs", "2", "--timeout", "10", "--out", str(out)]
    assert mutations.main(argv, listed, root) == 1
    expected = {
        "hangs": "timeout after 10 s",
        "killed": "test_toy.py::test_double",
        "survives": "SURVIVED",
        "crashes": "crash with signal 6",
        "wrong_syntax": "not run: pytest tests/test_toy.py -k 'double' ended with exit code 2",
        "needs_gpu": "not run: needs a GPU",
        "fails_anyway": "not run: without the mutation: test_toy.py::test_fails_anyway",
        "no_tests": "not run: pytest tests/test_toy.py -k 'nowhere' ended with exit code 5",
    }
    printed = capsys.readouterr().out
    assert "3 of 8 killed" in printed
    lines = out.read_text().splitlines()
    assert lines[0] == "| mutation | file | killed by |"
    for line, (name, verdict) in zip(lines[2:], expected.items(), strict=True):
        assert line.startswith(f"| `{name}` | `quackish/toy.py` | {verdict}")
        assert re.search(rf"^{name} +quackish/toy\.py +{re.escape(verdict)}", printed, re.MULTILINE)
    assert (root / "quackish" / "toy.py").read_text() == TOY

    assert mutations.main(["--only", "killed", "crashes"], listed, root) == 0
    assert "2 of 2 killed" in capsys.readouterr().out


def test_list_and_mistakes(root, capsys):
    assert mutations.main(["--list", "--only", "killed"], [toy("killed", "double"), toy("other", "first")], root) == 0
    printed = capsys.readouterr().out
    assert "killed (quackish/toy.py)\n    '2 * x' -> '3 * x'\n    tests/test_toy.py -k 'double'" in printed
    assert "other" not in printed
    with pytest.raises(SystemExit, match="2"):
        mutations.main(["--only", "nothing"], [toy("killed", "double")], root)
    assert "--only nothing: expected names of mutations; --list shows them" in capsys.readouterr().err
