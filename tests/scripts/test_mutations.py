"""scripts/mutations.py: each mutation of its list applies to the tree, and the test that must notice it exists."""

import ast
import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("mutations", ROOT / "scripts" / "mutations.py")
mutations = sys.modules[SPEC.name] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(mutations)


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
