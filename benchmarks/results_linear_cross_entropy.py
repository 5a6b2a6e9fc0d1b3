"""The rows of linear_cross_entropy.csv by case and provider."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from quackish.bench.measure_linear_cross_entropy import GEMMS, NONE_IGNORED, THREE_GEMMS
from quackish.bench.measured import AGAIN, OURS, is_ours
from quackish.bench.providers_linear_cross_entropy import PROVIDERS
from quackish.bench.schema import WRONG

NOT_COMPARED = (AGAIN, NONE_IGNORED, THREE_GEMMS, *GEMMS, "truth")

Row = dict[str, str]


class Key(NamedTuple):
    mode: str
    h: int
    v: int
    m: int
    data: str
    ignored: float

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.m, self.h, self.v

    def __str__(self) -> str:
        return f"{self.m} x {self.h} x {self.v}"


class Results:
    """The rows of a CSV by case and provider; of rows for the same, the last."""

    def __init__(self, rows: list[Row]):
        self.rows = rows
        self.cases: dict[Key, dict[str, Row]] = defaultdict(dict)
        for row in rows:
            m, h, v = (int(row[name]) for name in "mhv")
            key = Key(row["mode"], h, v, m, row["data"], float(row["ignored"]))
            self.cases[key][row["provider"]] = row

    def value(self, key: Key, provider: str, column: str) -> float | None:
        value = self.cases.get(key, {}).get(provider, {}).get(column)
        return float(value) if value else None

    def ms(self, key: Key, provider: str) -> float | None:
        return self.value(key, provider, "median_ms")

    def ratio(self, key: Key, over: str, under: str) -> float | None:
        """How many times `over` takes what `under` takes; inf where `over` was tried and has no time."""
        if over not in self.cases.get(key, {}) or not (b := self.ms(key, under)):
            return None
        return (self.ms(key, over) or math.inf) / b

    def train(self, shape: tuple[int, int, int], data: str = "normal") -> Key:
        m, h, v = shape
        return Key("train", h, v, m, data, 0.0)

    def providers(self, keys: Iterable[Key]) -> list[str]:
        """Those with a time in any of the cases; the known ones in their own order, our variants before peers."""
        names = {name for key in keys for name in self.cases[key] if self.ms(key, name) and name not in NOT_COMPARED}
        order = {name: i for i, name in enumerate(PROVIDERS)}
        return sorted(names, key=lambda name: (not is_ours(name), order.get(name, len(order)), name))

    def points(self, key: Key) -> dict[str, tuple[float, float]]:
        """(ms, GB) of each provider that has both."""
        both = {n: (self.ms(key, n), self.value(key, n, "peak_gb")) for n in self.providers([key])}
        return {name: point for name, point in both.items() if None not in point}

    def peers(self, key: Key) -> dict[str, tuple[float, float]]:
        return {name: point for name, point in self.points(key).items() if not is_ours(name)}

    def not_dominated(self, key: Key) -> list[str]:
        """The peers' points of which none of ours is at most as slow and as large; each as name, time and memory."""
        ours = [point for name, point in self.points(key).items() if is_ours(name)]
        return [
            f"{name} ({ms:.4g} ms, {gb:.4f} GB{', wrong results' if self.is_wrong(key, name) else ''})"
            for name, (ms, gb) in self.peers(key).items()
            if not any(a <= ms and b <= gb for a, b in ours)
        ]

    def is_wrong(self, key: Key, provider: str) -> bool:
        """Some error is no rounding, or NaN."""
        errors = (self.value(key, provider, column) for column in ("err_loss", "err_dx", "err_dw"))
        return any(not error <= WRONG for error in errors if error is not None)


def noise(results: Results) -> str:
    """How far apart two measurements of the same in the same turns were."""
    ratios = (results.ratio(key, AGAIN, OURS) for key in results.cases)
    apart = sorted(abs(r - 1) for r in ratios if r is not None)
    if not apart:
        return "noise: not measured"
    return f"noise: quackish twice in one case differs by {apart[len(apart) // 2]:.1%} (median), {apart[-1]:.1%} (most)"
