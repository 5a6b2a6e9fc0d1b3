"""Draws how two calls run: linear_cross_entropy_call.svg and rms_norm_backward.svg, beside this file.

python docs/internals/draw_calls.py        # needs matplotlib: pip install -e '.[bench]'
"""

from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch

WIDTH = 80  # of a drawing, in tenths of an inch, the unit of all positions
INPUT, WORK, SCRATCH, RESULT = COLORS = "#dbe5f1", "#f6c9b4", "#eeeeee", "#cfe8cf"


class Box(NamedTuple):
    text: str
    color: str
    x: float  # of the center
    y: float
    width: float
    height: float


class Drawing(NamedTuple):
    height: float
    legend: dict[str, str]  # {what a color means: color}
    boxes: dict[str, Box]
    arrows: list[tuple[str, str]]  # from a box to a box
    notes: dict[str, tuple[float, float]]  # {text: center}
    wait: float | None = None  # x of a dashed line


def linear_cross_entropy_call() -> Drawing:
    boxes = {
        "hidden": Box("hidden:\nthe chunk's\nlive rows", INPUT, 7, 23, 11, 8),
        "weight": Box("head.weight", INPUT, 7, 9, 11, 5),
        "logits": Box(
            "matmul 1: hidden x weight.\nThe logits stay in registers:\nexp, and fp32 sums of rows",
            WORK,
            25,
            16,
            19.5,
            8.5,
        ),
        "exp": Box("exp_logits,\n16 bits", SCRATCH, 43, 23, 11, 6),
        "rows": Box("per row:\nlse, loss, factors\nof the gradient", WORK, 43, 9, 14.5, 7.5),
        "dx": Box("matmul 2:\nexp_logits x weight", WORK, 59, 23, 15, 6),
        "dw": Box("matmul 3:\nexp_logits x hidden, in\nfp32, rounded once", WORK, 59, 13, 15.5, 7),
        "hidden_grad": Box("hidden's\ngradient", RESULT, 74, 23, 9.5, 5.5),
        "weight_grad": Box("weight's\ngradient", RESULT, 74, 13, 9.5, 5.5),
        "loss": Box("loss", RESULT, 74, 4.5, 9.5, 4.5),
    }
    arrows = [("hidden", "logits"), ("weight", "logits"), ("logits", "exp"), ("logits", "rows"), ("exp", "dx")]
    arrows += [
        ("exp", "dw"),
        ("rows", "dx"),
        ("rows", "dw"),
        ("rows", "loss"),
        ("dx", "hidden_grad"),
        ("dw", "weight_grad"),
    ]
    legend = {"input": INPUT, "computed": WORK, "held for one chunk": SCRATCH, "kept until backward": RESULT}
    note = "linear_cross_entropy by default: forward, for each chunk of rows. Backward only scales the gradients."
    return Drawing(33, legend, boxes, arrows, {note: (40, 31)})


def rms_norm_backward() -> Drawing:
    boxes, arrows = {}, []
    for i, (cta, y) in enumerate({"0": 24, "1": 15, "n - 1": 6}.items()):
        tiles = ("tiles 0, n, 2n, ...", "tiles 1, n + 1, ...", "tiles n - 1, ...")[i]
        boxes |= {
            f"in{i}": Box(f"x and dy:\n{tiles}", INPUT, 8, y, 13.5, 6),
            f"cta{i}": Box(f"CTA {cta}: dx of its tiles,\ndweight in fp32 registers", WORK, 27, y, 17.5, 6),
            f"part{i}": Box("its fp32 row\nof partials", SCRATCH, 44, y, 10.5, 6),
            f"sum{i}": Box(
                f"CTA {cta}: one slice\nof columns, added over\nall partials in order", WORK, 61, y, 16, 7.5
            ),
        }
        arrows += [(f"in{i}", f"cta{i}"), (f"cta{i}", f"part{i}"), (f"sum{i}", "dweight")]
        arrows += [(f"part{i}", f"sum{j}") for j in range(3)]
    boxes["dweight"] = Box("dweight", RESULT, 75.5, 15, 7.5, 6)
    legend = {
        "input, by TMA": INPUT,
        "computed": WORK,
        "scratch": SCRATCH,
        "result (dx is written along the way)": RESULT,
    }
    notes = {"rms_norm's backward: one launch, n CTAs that are all resident, no atomics on the sums": (40, 33)}
    notes["wait until all\npartials are written"] = 51, 29.5
    return Drawing(35, legend, boxes, arrows, notes, wait=51)


DRAWINGS = {"linear_cross_entropy_call": linear_cross_entropy_call, "rms_norm_backward": rms_norm_backward}


def figure(drawing: Drawing) -> Figure:
    fig = Figure(figsize=(WIDTH / 10, drawing.height / 10 + 0.3))  # white behind it, in dark mode too
    ax = fig.add_axes((0, 0.3 / (drawing.height / 10 + 0.3), 1, drawing.height / (drawing.height + 3)))
    ax.set(xlim=(0, WIDTH), ylim=(0, drawing.height))
    ax.axis("off")
    patches = {}
    for name, box in drawing.boxes.items():
        corner = box.x - box.width / 2, box.y - box.height / 2
        style = dict(boxstyle="round,pad=0,rounding_size=0.6", facecolor=box.color, edgecolor="0.4", linewidth=0.8)
        patches[name] = ax.add_patch(FancyBboxPatch(corner, box.width, box.height, **style))
        ax.text(box.x, box.y, box.text, ha="center", va="center", fontsize=8, linespacing=1.25)
    for start, end in drawing.arrows:
        a, b = drawing.boxes[start], drawing.boxes[end]
        ends = (a.x + a.width / 2, a.y), (b.x - b.width / 2, b.y)
        if abs(a.x - b.x) < 1:  # one above the other
            ends = (a.x, a.y - a.height / 2), (b.x, b.y + b.height / 2)
        ax.add_patch(
            FancyArrowPatch(
                *ends, arrowstyle="-|>", mutation_scale=8, color="0.35", linewidth=0.8, shrinkA=0, shrinkB=0
            )
        )
    if drawing.wait is not None:
        ax.plot([drawing.wait] * 2, [1.5, 27.5], color="0.35", linestyle="--", linewidth=1)
    for text, (x, y) in drawing.notes.items():
        ax.text(x, y, text, ha="center", va="center", fontsize=8, color="0.2")
    handles = [Patch(facecolor=color, edgecolor="0.4", label=text) for text, color in drawing.legend.items()]
    fig.legend(handles=handles, loc="lower center", ncols=len(handles), fontsize=7.5, frameon=False)
    return fig


def main() -> None:
    matplotlib.rcParams.update({"svg.hashsalt": "quackish", "svg.fonttype": "none"})  # the same file on every run
    for name, make in DRAWINGS.items():
        figure(make()).savefig(Path(__file__).with_name(f"{name}.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
