"""quackish in other people's classes, which are imported only when they are asked for."""

import importlib


def __getattr__(name: str):
    if name in ("torchtitan", "transformers"):
        return importlib.import_module(f"quackish.integrations.{name}")
    raise AttributeError(f"module 'quackish.integrations' has no attribute {name!r}")
