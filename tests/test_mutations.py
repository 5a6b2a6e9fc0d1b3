"""scripts/mutations.py: its list applies to the tree, and its runner tells killed from surviving mutations."""

import ast
import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("mutations", ROOT / "scripts" / "mutations.py")
mutations = sys.modules[SPEC.name] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(mutations)


# The list ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda m: m.name)
def test_mutations_apply_and_their_tests_exist(mutation):
    text = mutations.apply(mutation, ROOT)
    assert text != (ROOT / mutation.file).read_text(encoding="utf-8")
    ast.parse(text)
    # at most one line differs
    assert abs(mutation.old.count("\n") - mutation.new.count("\n")) <= 1
    file, _, select = shlex.split(mutation.tests)
    tests = re.findall(r"^def (test_\w+)", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    assert any(select.split()[0] in name for name in tests)


def test_a_mutation_that_does_not_apply(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    with pytest.raises(ValueError, match=r"mutation m: 'x = 1' occurs 2 times in a\.py, expected once; update scripts"):
        mutations.apply(mutations.Mutation("m", "a.py", "x = 1", "x = 2", "t"), tmp_path)


# The runner, on a toy ------------------------------------------------------------------------------------------------

TOY = """
def double(x):
    return 2 * x
"""
TESTS = """
import pytest
from quackish.toy import double


def test_first():
    assert double(0) == 0


def test_double():
    assert double(3) == 6


def test_fails_anyway():
    assert double(3) == 7


def test_skipped():
    pytest.skip("no GPU")
"""


def toy(name, select):
    return mutations.Mutation(name, "quackish/toy.py", "2 * x", "3 * x", f"tests/test_toy.py -k '{select}'")


@pytest.fixture
def root(tmp_path):
    files = {"quackish/__init__.py": "", "quackish/toy.py": TOY, "tests/test_toy.py": TESTS, "pyproject.toml": ""}
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_killed_and_surviving_mutations(root, capsys):
    listed = [
        toy("killed", "first or double"),
        toy("survives", "first"),
        toy("fails_anyway", "fails_anyway"),
        toy("no_tests", "nowhere"),
        toy("only_skipped", "skipped"),
    ]
    assert mutations.main(["--jobs", "2"], listed, root) == 1
    out = capsys.readouterr().out
    for line in (
        "killed: killed by tests/test_toy.py::test_double (",
        "survives: SURVIVED (",
        "fails_anyway: not run: without the mutation: tests/test_toy.py::test_fails_anyway (",
        "no_tests: not run: pytest tests/test_toy.py -k 'nowhere' ended with exit code 5: 4 deselected",
        "only_skipped: not run: pytest tests/test_toy.py -k 'skipped' ended with exit code 0: SKIPPED [1] tests/test_",
        "1 of 5 killed",
    ):
        assert f"\n{line}" in out
    assert (root / "quackish" / "toy.py").read_text() == TOY
