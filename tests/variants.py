"""Which of many cases the tests always run."""

import pytest


def some(cases, every):
    """Every `every`-th case; the others are exhaustive."""
    for i, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        yield pytest.param(*values, marks=() if i % every == 0 else pytest.mark.exhaustive)
