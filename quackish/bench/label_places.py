"""Finds places for labels of points in a figure, so that no label covers a point, a line or another label."""

import math
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

Dot = tuple[float, float]
CLOSE = 12.0  # a label at this distance needs no line to its point
SIZE = 7.0  # half of a point's width
ORDERS = 500  # of the labels, to try


class Box(NamedTuple):
    x0: float
    y0: float
    x1: float
    y1: float

    def meets(self, other: "Box") -> bool:
        return self.x0 < other.x1 and other.x0 < self.x1 and self.y0 < other.y1 and other.y0 < self.y1

    def within(self, other: "Box") -> bool:
        return other.x0 <= self.x0 and self.x1 <= other.x1 and other.y0 <= self.y0 and self.y1 <= other.y1


class Place(NamedTuple):
    """Relative to the point: where the corner or edge of the label is that is next to the point."""

    dx: float
    dy: float
    ha: str
    va: str
    cost: float

    def area(self, dot: Dot, size: Dot) -> Box:
        x = dot[0] + self.dx - size[0] * {"left": 0.0, "center": 0.5, "right": 1.0}[self.ha]
        y = dot[1] + self.dy - size[1] * {"bottom": 0.0, "center": 0.5, "top": 1.0}[self.va]
        return Box(x, y, x + size[0], y + size[1])

    def line(self, dot: Dot) -> list[Box]:
        """Small boxes along the line from the point to the label."""
        length = math.hypot(self.dx, self.dy)
        ways = [d / length for d in range(int(CLOSE), int(length) - 1, 3)]
        return [
            Box(x - 2, y - 2, x + 2, y + 2) for x, y in ((dot[0] + t * self.dx, dot[1] + t * self.dy) for t in ways)
        ]


def _candidates() -> list[Place]:
    found = []
    for radius in (CLOSE, *range(24, 180, 8)):
        for angle in range(0, 360, 15):
            dx, dy = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            ha = "left" if dx > 0.01 else "right" if dx < -0.01 else "center"
            va = "center" if abs(dy) < 0.3 else "bottom" if dy > 0 else "top"
            found.append(Place(radius * dx, radius * dy, ha, va, radius))
    return found


def find_places(
    dots: Mapping[str, Dot], sizes: Mapping[str, Dot], taken: Sequence[Box], frame: Box
) -> dict[str, Place]:
    """The places of the labels inside `frame`, by name, in pixels. Labels are placed in many orders; the best counts.

    A label covers nothing in `taken`, but its line to the point may cross it. A label without a free place is absent.
    The same arguments give the same places.
    """
    marks = [Box(x - SIZE, y - SIZE, x + SIZE, y + SIZE) for x, y in dots.values()]
    fitting = {
        name: [
            place
            for place in _candidates()
            if (area := place.area(dot, sizes[name])).within(frame) and not any(map(area.meets, (*marks, *taken)))
        ]
        for name, dot in dots.items()
    }
    rng, names, tried = random.Random(0), list(dots), []
    for _ in range(ORDERS):
        tried.append(_in_order(names, dots, sizes, fitting))
        rng.shuffle(names)
    return min(tried, key=lambda places: sum(places[name].cost if name in places else 1e3 for name in dots))


def _in_order(
    names: Sequence[str], dots: Mapping[str, Dot], sizes: Mapping[str, Dot], fitting: Mapping[str, Sequence[Place]]
) -> dict[str, Place]:
    """Each label in turn at its nearest free place."""
    places: dict[str, Place] = {}
    written: list[Box] = []
    for name in names:
        for place in fitting[name]:
            area, line = place.area(dots[name], sizes[name]), place.line(dots[name])
            if not any(mine.meets(box) for mine in (area, *line) for box in written):
                places[name] = place
                written += [area, *line]
                break
    return places
