"""Types of the public functions: what mypy, which checks tests/typed_user.py, cannot see."""

import inspect
from typing import get_args, get_type_hints

import pytest

import quackish
from quackish import types
from quackish.ops.linear_cross_entropy.layout import SCHEDULES
from quackish.ops.linear_cross_entropy.sharded.api import _ParallelOptions
from quackish.ops.mlp.reference import ACTIVATIONS
from tests import typed_user


@pytest.mark.parametrize("part", [typed_user.norms, typed_user.losses, typed_user.experts, typed_user.tools])
def test_the_typed_program_runs(part):
    part()


def test_literals_are_what_the_checks_accept():
    assert get_args(types.Schedule) == ("auto", *SCHEDULES)
    assert get_args(types.Activation) == ACTIVATIONS


NAMED = {"residual", "return_lse", "return_stats"}  # by the overloads


def check_options(function, options):
    parameters = inspect.signature(function).parameters.values()
    expected = {p.name: p.annotation for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in NAMED}
    got = inspect.get_annotations(options)
    assert {name: None if kind is type(None) else kind for name, kind in got.items()} == expected


def test_overloads_have_all_options_of_a_function():
    check_options(quackish.rms_norm, types.RmsNormOptions)
    check_options(quackish.linear_cross_entropy, types.LinearCrossEntropyOptions)
    check_options(quackish.LinearCrossEntropyLoss, types.LossModuleOptions)
    check_options(quackish.LinearCrossEntropyLoss.forward, types.LossCallOptions)
    check_options(quackish.parallel.linear_cross_entropy, _ParallelOptions)


def test_annotations_can_be_read():
    """As pydantic, typeguard and documentation generators do."""
    for function in (quackish.rms_norm, quackish.grouped_mlp, quackish.linear_cross_entropy, quackish.profile.__init__):
        get_type_hints(function)
    assert "options" in get_type_hints(quackish.parallel.VocabParallelHead.__init__)


def test_applied_has_all_options_of_apply():
    pytest.importorskip("transformers", minversion="5")
    from quackish.integrations.transformers import patching

    check_options(patching.apply, patching._ApplyOptions)
    assert get_type_hints(patching.applied)["model"] is patching.Model
