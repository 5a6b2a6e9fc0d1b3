"""What is seen while something is measured: the console and the progress bar, by rich."""

import functools
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

NO_GPU = "No GPU: the portable path runs on the CPU, small. This tries the benchmark itself; it measures nothing."
EXTRA = {"rich": "rich", "pandas": "pandas", "matplotlib": "matplotlib", "yaml": "pyyaml"}


def check_extra() -> None:
    """Raises ImportError that says what is missing of the extra `bench`, and how to get it."""
    missing = [name for module, name in EXTRA.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ImportError(f"bench needs {', '.join(missing)}; pip install 'quackish[bench]' brings it")


@functools.cache
def console() -> "Console":
    """The one console; as wide as the terminal, 120 columns where there is none."""
    from rich.console import Console

    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=120)


def progress(count: bool = True) -> "Progress":
    """A bar with the time that is left; `count` shows "3/10" of its steps too."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (TextColumn("{task.description}"), BarColumn(), *([MofNCompleteColumn()] if count else []))
    # Steps differ by a factor of 100: what is left is judged by ten minutes, not by the last thirty seconds.
    return Progress(*columns, TimeElapsedColumn(), Remaining(), console=console(), speed_estimate_period=600)
