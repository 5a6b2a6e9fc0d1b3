"""Test utilities: asserts, inputs, error measures and timing. Only the asserts are public."""

from quackish.testing.asserts import assert_close_to_fp64, assert_deterministic

__all__ = ["assert_close_to_fp64", "assert_deterministic"]


def __dir__() -> list[str]:
    return __all__
