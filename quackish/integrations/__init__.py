"""quackish in other people's classes, which are imported only when they are asked for."""

from quackish.integrations import transformers

__all__ = ["transformers"]
