"""What commands and scripts print while they run: progress with the time left, and a note if there is no GPU."""

import sys
import time
from collections.abc import Callable

NO_GPU = "No GPU: small shapes run on the CPU. This tests the benchmark; the numbers say nothing about a GPU."
PROGRESS_S = 20.0  # between lines of progress


def progress(total: int, unit: str, clock: Callable[[], float] = time.monotonic) -> Callable[[int, str], None]:
    """Returns `show(done, text)`, which prints how much is done and the time left on stderr, at most every 20 seconds.

    `done` of the total, in units such as "steps", are finished, and `text` says what runs now.
    """
    started = last = clock()

    def show(done: int, text: str) -> None:
        nonlocal last
        now = clock()
        if now - last < PROGRESS_S:
            return
        last = now
        left = f", {duration((now - started) / done * (total - done))} left" if 0 < done < total else ""
        print(f"{done} of {total} {unit}, {duration(now - started)}{left}: {text}", file=sys.stderr, flush=True)

    return show


def duration(seconds: float) -> str:
    """Such as "8 s", "3 min 20 s", "12 min" or "2 h 5 min"."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 10:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
