"""What both operations' comparisons with the truth share: chunks of rows, and whether results repeat."""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from quackish.testing.errors import same_bits


def chunks(m: int, width: int, elements: int) -> Iterator[slice]:
    """Rows, at most so many that they have `elements` of `width` each: fp64 of a large cell is never held whole."""
    rows = max(1, elements // width)
    return (slice(start, min(start + rows, m)) for start in range(0, m, rows))


def same_every_time(run: Callable[[], Sequence[Tensor | None]], runs: int) -> bool:
    """Whether `runs` runs give the same bytes."""
    first: list[Tensor | None] = []
    for _ in range(runs):
        now = run()
        if not first:  # copies: a provider may hand out the same memory again
            first = [None if t is None else t.clone() for t in now]
        elif not all(map(same_bits, first, now)):
            return False
    return True
