"""quackish in other libraries. Each integration is imported on first use."""

import importlib


def __getattr__(name: str):
    if name in ("torchtitan", "transformers"):
        return importlib.import_module(f"quackish.integrations.{name}")
    raise AttributeError(f"module 'quackish.integrations' has no attribute {name!r}")
