"""The console and the progress bar, by rich; plain lines if output goes to a file."""

import contextlib
import functools
import importlib.util
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

NO_GPU = "No GPU: the portable path runs on the CPU, small. This tries the benchmark itself; it measures nothing."
EXTRA = {"rich": "rich", "matplotlib": "matplotlib", "yaml": "pyyaml"}
EVERY_S = 5.0  # between plain lines


@contextlib.contextmanager
def end_on_sigterm() -> Iterator[None]:
    """In this block SIGTERM, which `timeout` sends, does what Ctrl-C does: results so far are written."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt("SIGTERM")

    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread only
        yield
        return
    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def check_extra(extra: Mapping[str, str] = EXTRA) -> None:
    """Raises ImportError that says what of the extra `bench` is missing, and how to get it."""
    missing = [name for module, name in extra.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ImportError(f"bench needs {', '.join(missing)}; pip install 'quackish[bench]' brings it")


@functools.cache
def console() -> "Console":
    """The one console; as wide as the terminal, or 120 columns."""
    from rich.console import Console

    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=120)


class PlainLines:
    """Shows `line()` every few seconds from `start` to `stop`, or in a `with` block. Does not need rich."""

    def __init__(
        self,
        line: Callable[[], object],
        show: Callable[[object], None] = lambda line: print(line, flush=True),
        clock: Callable[[], float] = time.monotonic,
        every_s: float = EVERY_S,
    ):
        self._line, self._show, self._clock, self._every_s = line, show, clock, every_s
        self._last, self._lock, self._ended = clock(), threading.Lock(), threading.Event()

    def tick(self) -> None:
        """Shows the line if it is due."""
        if self._clock() - self._last >= self._every_s:
            self.say(self._line())

    def say(self, line: object) -> None:
        """Shows `line` now; the next one is due a few seconds later."""
        with self._lock:
            self._last = self._clock()
            self._show(line)

    def start(self) -> None:
        self._last = self._clock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s / 5):
            self.tick()

    def __enter__(self) -> "PlainLines":
        self.start()
        return self

    def __exit__(self, *error) -> None:
        self.stop()


@functools.cache
def progress_class() -> type["Progress"]:
    """rich's Progress, which prints plain lines where output is a file or a pipe. rich is imported only here."""
    from rich.progress import BarColumn, Progress

    class PlainProgress(Progress):
        def __init__(self, *columns, **options):
            super().__init__(*columns, **options)
            self.lines = None
            if not (self.console.is_interactive or self.console.is_jupyter):
                self.columns = tuple(column for column in self.columns if not isinstance(column, BarColumn))
                self.lines = PlainLines(self.get_renderable, self._show, self.get_time)

        def start(self) -> None:
            (self.lines or super()).start()

        def stop(self) -> None:
            (self.lines or super()).stop()
            if self.lines and not self.live.transient:
                self._show(self.get_renderable())

        def _show(self, line: object) -> None:
            for parts in self.console.render_lines(line, self.console.options.update(width=200), pad=False):
                text = "".join(part.text for part in parts).rstrip()
                self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    return PlainProgress


def progress() -> "Progress":
    """A bar with the elapsed and the remaining time."""
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    # Steps differ by a factor of 100: the speed is that of ten minutes, not of the last thirty seconds.
    text, left = TextColumn("{task.description}"), TextColumn("left")
    columns = (text, BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("elapsed"))
    return progress_class()(*columns, TimeRemainingColumn(), left, console=console(), speed_estimate_period=600)
