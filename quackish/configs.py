"""The configs of kernels, for `quackish.config`: `quackish.configs.GemmConfig` and others.

`choose(problem, gpu)` returns the config of a problem, its source and the reason.
"""

from quackish import ops
from quackish.device.choose import Choice, choose

__all__ = ["Choice", "choose"]


def _classes() -> dict[str, type]:
    return {v.config.__name__: v.config for spec in ops.specs().values() for v in spec.on.values()}


def __getattr__(name: str) -> type:
    classes = _classes()
    if name not in classes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return classes[name]


def __dir__() -> list[str]:
    return [*__all__, *_classes()]
