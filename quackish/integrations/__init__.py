"""quackish in other libraries. Each integration is imported on first use."""

import importlib
from typing import TYPE_CHECKING

_MODULES = "megatron", "torchtitan", "trainer", "transformers", "trl"

if TYPE_CHECKING:
    from quackish.integrations import megatron as megatron
    from quackish.integrations import torchtitan as torchtitan
    from quackish.integrations import trainer as trainer
    from quackish.integrations import transformers as transformers
    from quackish.integrations import trl as trl
else:

    def __getattr__(name: str):
        if name in _MODULES:
            return importlib.import_module(f"quackish.integrations.{name}")
        raise AttributeError(f"module 'quackish.integrations' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*_MODULES]
