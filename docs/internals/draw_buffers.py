"""Draws docs/internals/linear_cross_entropy_buffers.svg: where each schedule keeps its buffers over time, to scale.

python docs/internals/draw_buffers.py        # needs matplotlib: pip install -e '.[bench]'
"""

import sys
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

M, H, V, ITEMSIZE = 8192, 4096, 128256, 2  # bf16
ROWS = M * H * ITEMSIZE / 1e9  # GB of the input's rows, or of dX
DW = V * H * ITEMSIZE / 1e9
# Classes whose exponentials, for all rows, fit into dW's storage behind these classes' own rows of dW.
SHARED = H / (H + M)
FRONT = SHARED * DW  # of dW: the rows of these classes
COLORS = {"dW": "#8da0cb", "dX": "#66c2a5", "exp_logits": "#fc8d62", "dlogits": "#ffd92f", "rows of x": "#cccccc"}


class Buffer(NamedTuple):
    kind: str  # of COLORS
    start: float  # in phases
    end: float
    bottom: float  # GB
    height: float
    label: str = ""


class Panel(NamedTuple):
    title: str
    phases: tuple[str, ...]
    forward: int  # how many of the phases are forward's
    buffers: list[Buffer]


def chunked() -> Panel:
    outside = (1 - SHARED) * M * V * ITEMSIZE / 1e9
    top = DW + 2 * ROWS
    return Panel(
        'schedule="chunked", all rows in one chunk',
        ("logits", "dX", "dW, first classes", "dW, other classes", "scale by grad"),
        4,
        [
            Buffer("exp_logits", 0, 3, FRONT, DW - FRONT, "exp_logits, first classes (inside dW)"),
            Buffer("dW", 2, 5, 0, FRONT, "dW"),
            Buffer("dW", 3, 5, FRONT, DW - FRONT),
            Buffer("dX", 1, 5, DW, ROWS, "dX"),
            Buffer("rows of x", 0, 4, DW + ROWS, ROWS),
            Buffer("exp_logits", 0, 4, top, outside, "exp_logits, other classes"),
        ],
    )


def stored() -> Panel:
    exp = M * V * ITEMSIZE / 1e9
    return Panel(
        'schedule="stored"',
        ("logits", "until backward", "scale rows of x", "dX", "dW"),
        1,
        [
            Buffer("exp_logits", 0, 5, 0, exp, "exp_logits, all rows and classes"),
            Buffer("rows of x", 0, 5, exp, ROWS),
            Buffer("rows of x", 2, 5, exp + ROWS, ROWS),
            Buffer("dX", 3, 5, exp + 2 * ROWS, ROWS, "dX"),
            Buffer("dW", 3, 5, exp + 3 * ROWS, DW, "dW"),
        ],
    )


def recompute() -> Panel:
    """Three blocks of classes in backward are drawn; there are more, and the last ones use a scratch of 96 MiB."""
    first, second = FRONT, FRONT + SHARED * (DW - FRONT)
    third = second + SHARED * (DW - second)
    return Panel(
        'schedule="recompute", gradients known in forward',
        ("logits and dX, by chunk", "dW, first classes", "dlogits, block 2", "dW, block 2", "... further blocks"),
        2,
        [
            Buffer("exp_logits", 0, 2, first, DW - first, "exp_logits, first classes"),
            Buffer("exp_logits", 0, 1, 0, first, "other classes, chunk"),
            Buffer("dW", 1, 5, 0, first, "dW"),
            Buffer("dlogits", 2, 4, second, DW - second, "dlogits, block 2"),
            Buffer("dW", 3, 5, first, second - first, "dW"),
            Buffer("dlogits", 4, 5, third, DW - third, "dlogits"),
            Buffer("dW", 4, 5, second, third - second),
            Buffer("dX", 0, 5, DW, ROWS, "dX"),
            Buffer("rows of x", 0, 2, DW + ROWS, ROWS),
            Buffer("rows of x", 2, 5, DW + ROWS, ROWS),
        ],
    )


def draw(ax: Axes, panel: Panel) -> None:
    for kind, start, end, bottom, height, label in panel.buffers:
        ax.add_patch(Rectangle((start, bottom), end - start, height, facecolor=COLORS[kind], edgecolor="black", lw=0.6))
        if label and height > 0.15:
            ax.text((start + end) / 2, bottom + height / 2, label, ha="center", va="center", fontsize=9)
    ax.axvline(panel.forward, color="black", linestyle="--", linewidth=1)
    ax.set_title(panel.title, fontsize=11, loc="left")
    ax.set_xticks([i + 0.5 for i in range(len(panel.phases))], panel.phases, fontsize=9)
    ax.tick_params(axis="x", length=0)
    ax.set(xlim=(0, len(panel.phases)), ylim=(0, 1.04 * max(b.bottom + b.height for b in panel.buffers)), ylabel="GB")
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def figure() -> Figure:
    panels = chunked(), stored(), recompute()
    fig = Figure(figsize=(9, 10.5), layout="constrained")
    heights = [max(b.bottom + b.height for b in panel.buffers) for panel in panels]
    for ax, panel in zip(fig.subplots(3, 1, height_ratios=heights), panels, strict=True):
        draw(ax, panel)
    handles = [Rectangle((0, 0), 1, 1, facecolor=color, edgecolor="black", lw=0.6) for color in COLORS.values()]
    fig.legend(handles, COLORS, loc="outside lower center", ncols=len(COLORS), fontsize=9)
    fig.suptitle(f"Memory over time: M {M}, H {H}, V {V}, bf16 (dashed line: forward | backward)", fontsize=12)
    return fig


if __name__ == "__main__":
    matplotlib.rcParams.update({"svg.hashsalt": "quackish", "svg.fonttype": "none"})  # the same file on every run
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("linear_cross_entropy_buffers.svg")
    figure().savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
