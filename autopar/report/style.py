"""Styles of figures: sized for a column of a paper, in colours for colour-blind readers, with labels at lines' ends.

Only the defaults of matplotlib's global state are read, and nothing is changed.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox
from PIL import Image

#: Width and height in inches (a column of a paper), and the size of text in points.
WIDTH, HEIGHT, FONT = 3.5, 2.5, 8.0
#: Dots per inch of files, which are shown at half their width.
DPI = 200
#: Okabe and Ito, "Color universal design", 2008.
BLUE, ORANGE, GREEN, PURPLE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9"
INK, GREY, PALE = "#333333", "#777777", "#BBBBBB"
#: Colour of methods, and dashes, which a print in grey keeps.
METHOD_STYLES = {
    "ps": (BLUE, "-"),
    "ps on hosts": (BLUE, "-"),
    "allgather": (ORANGE, "--"),
    "allreduce_rows": (GREEN, "-."),
    "allreduce": (INK, (0, (1, 1))),
}


class ReportFigure(Figure):
    """A figure that notebooks show even if pyplot isn't imported."""

    @property
    def shown_width(self) -> int:
        """The width in pixels on a page."""
        return round(self.get_figwidth() * DPI / 2)

    def png(self) -> bytes:
        """Returns the same bytes for the same figure; with a palette, which takes a third of the bytes of all
        colours."""
        drawn, written = io.BytesIO(), io.BytesIO()
        self.savefig(drawn, format="png", dpi=DPI)
        Image.open(drawn).convert("RGB").quantize(256).save(written, "png", optimize=True)
        return written.getvalue()

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        return self.png(), {"width": self.shown_width}


def blank(height: float = HEIGHT, width: float = WIDTH, panels: int = 1) -> tuple[ReportFigure, list[Axes]]:
    """Returns a figure of panels side by side, without frames."""
    figure = ReportFigure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, panels, squeeze=False, sharey=True)[0])
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.tick_params(labelsize=FONT, color=PALE)
        one.spines[["left", "bottom"]].set_color(PALE)
    return figure, axes


def fit_size(figure: ReportFigure) -> ReportFigure:
    """Fixes the layout, so that the figure is drawn the same from then on."""
    figure.draw_without_rendering()
    figure.draw_without_rendering()  # panels that share an axis are laid out in two rounds
    figure.set_layout_engine("none")
    return figure


def name_axes(axes: Axes, x: str, y: str = "", title: str = "") -> None:
    axes.set_xlabel(x, fontsize=FONT)
    axes.set_ylabel(y, fontsize=FONT)
    axes.set_title(title, fontsize=FONT, loc="left")


def log_axes(axes: Axes, x: str = "count", y: str = "count", most: int = 5) -> None:
    """Makes both axes logarithmic, with numbers as "count" (1,000), "bytes" (1 kB), "share" (0.1%) or "seconds" (1 ms),
    at most `most` of them on the x axis."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.minorticks_off()
    for axis, kind, count in ((axes.xaxis, x, most), (axes.yaxis, y, 7)):
        low, high = axis.get_view_interval()
        ticks = log_ticks(low, high, count)
        axis.set_ticks(ticks, [_FORMATS[kind](tick) for tick in ticks])
    axes.grid(color=PALE, linewidth=0.4, alpha=0.6)


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Returns powers of ten between two numbers: every second or third one if there are too many; with 2 and 5 times
    them if there are fewer than three.

    >>> log_ticks(3, 20_000, 5), log_ticks(3, 20_000, 3), log_ticks(0.9, 25, 5)
    ([10.0, 100.0, 1000.0, 10000.0], [10.0, 1000.0], [1.0, 2.0, 5.0, 10.0, 20.0])
    """
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    if last - first >= 2:
        step = -(-(last - first + 1) // most)
        return [10.0**k for k in range(first, last + 1, step)]
    ticks = [digit * 10.0**k for k in range(first - 1, last + 1) for digit in (1, 2, 5)]
    return [tick for tick in ticks if low <= tick <= high]


def write(
    axes: Axes,
    words: str,
    at: tuple[float, float],
    offset: tuple[float, float],
    *,
    side: Literal["left", "right"] = "left",
    up: Literal["top", "center", "bottom"] = "bottom",
    colour: str = INK,
    bold: bool = False,
) -> Annotation:
    """Writes words beside a point of a panel, at an offset in points; `side` and `up`: the part of the words that is
    there."""
    weight = "bold" if bold else "normal"
    text = axes.annotate(
        words, at, offset, textcoords="offset points", fontsize=FONT, ha=side, va=up, color=colour, weight=weight
    )
    text.set_path_effects([withStroke(linewidth=2, foreground="white")])  # lines pass behind it
    return text


def lay_bars(axes: Axes, x: str, margin: float = 0.28) -> None:
    """Puts the first horizontal bar on top, makes room for numbers, and names the x axis."""
    axes.invert_yaxis()
    axes.margins(x=margin)
    axes.set_xlim(left=0)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(x, fontsize=FONT)


def legend_above(axes: Axes, columns: int = 3) -> None:
    gaps = {"handlelength": 0.8, "handletextpad": 0.4, "columnspacing": 1.0, "borderpad": 0.2, "borderaxespad": 0.0}
    axes.legend(fontsize=FONT, loc="lower left", bbox_to_anchor=(0.0, 1.0), frameon=False, ncols=columns, **gaps)


def keep_apart(texts: Sequence[Annotation]) -> None:
    """Removes texts that would cover an earlier one; the layout must be fixed."""
    kept: list[Bbox] = []
    for text in texts:
        box = text.get_window_extent()
        if any(box.overlaps(other) for other in kept):
            text.remove()
        else:
            kept.append(box)


def label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Writes texts (y, text, colour) at the right of the panel, at the height of their lines, moved apart if they would
    overlap."""
    figure = axes.get_figure(root=True)
    assert figure is not None, "a panel is in a figure"
    height = figure.get_figheight() * 0.72 * 72  # points of a panel: the rest is for the labels of axes
    gap = 1.25 * FONT / height
    scale = axes.transScale + axes.transLimits
    x = axes.get_xlim()[1]
    placed = sorted((float(scale.transform((x, y))[1]), text, colour) for y, text, colour in ends)
    heights = spread_labels([height for height, _, _ in placed], gap)
    for at, (_, text, colour) in zip(heights, placed, strict=True):
        axes.text(1.03, at, text, transform=axes.transAxes, color=colour, fontsize=FONT, va="center")


def spread_labels(heights: Sequence[float], gap: float) -> list[float]:
    """Returns ascending heights up to 1, moved by one pass up and one down so that neighbours are `gap` apart.

    >>> spread_labels([0.125, 0.25, 0.875], 0.25)
    [0.125, 0.375, 0.875]
    """
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + gap) if moved else height)
    limit = 1.0
    for k in reversed(range(len(moved))):
        moved[k] = min(moved[k], limit)
        limit = moved[k] - gap
    return moved


def format_count(value: float) -> str:
    """Writes 1000 as '1,000'."""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def format_size(value: float) -> str:
    """Writes 1000 as '1 kB'."""
    return _in_units(value, {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0})


def format_share(value: float) -> str:
    """Writes 0.001 as '0.1%'."""
    return f"{100 * value:.3g}%"


def format_seconds(value: float) -> str:
    """Writes 0.001 as '1 ms'."""
    return _in_units(value, {"s": 1.0, "ms": 1e-3, "µs": 1e-6})


def _in_units(value: float, sizes: Mapping[str, float]) -> str:
    unit = next((unit for unit, size in sizes.items() if value >= size), list(sizes)[-1])
    return f"{value / sizes[unit]:.3g} {unit}"


_FORMATS = {"count": format_count, "bytes": format_size, "share": format_share, "seconds": format_seconds}
