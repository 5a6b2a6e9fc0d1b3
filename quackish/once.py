"""Objects that all threads share, made by the first thread that asks."""

import threading
from collections.abc import Callable, Hashable
from typing import Any

# One lock for all of them, because making one may make another. Code that holds the compiler's lock makes none.
_lock = threading.RLock()


def once(made: dict[Any, Any], key: Hashable, make: Callable[..., Any], *args: Any) -> Any:
    """made[key], or make(*args), which is not None and is kept there. Threads that race get the same object."""
    value = made.get(key)
    if value is None:
        with _lock:
            value = made.get(key)
            if value is None:
                value = made[key] = make(*args)
    return value
