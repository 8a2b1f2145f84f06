"""Charts of bytes, times and buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_utils.plot.base import (
    GREY,
    LINES,
    RED,
    SKY,
    amount,
    chart,
    eng,
    legend,
    legible,
    mark,
    name_rows,
    segments,
    sentence,
    themed,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


@themed
def backends(table: DataFrame, minimum: float | None = None,
             title: str = "Bytes moved, kernel by kernel") -> Figure:
    """Bytes each back end moves, one segment a kernel.

    ``table`` has the index ("back end", "kernel") and the columns author
    ("compiler" or "library"), who, bytes_read, bytes_written. ``minimum``
    is the compulsory traffic in bytes, a dashed line. Bytes not known (NaN)
    draw no segment, and the label then says "at least"; a back end whose
    author is "missing" is not on this machine, and its row says so.
    """
    table = table.assign(moved=table.bytes_read + table.bytes_written)
    rows = {}
    for name, part in table.groupby(level=0, sort=False):
        if (part.author == "missing").all():
            rows[name] = ([], "not on this machine")
            continue
        moved = part.moved.fillna(0)
        left = moved.cumsum() - moved
        label = (f"{'at least ' * bool(part.moved.isna().any())}"
                 f"{amount(moved.sum(), 'B')}, {len(part)} kernel"
                 f"{'s' * (len(part) > 1)}")
        rows[name] = ([*zip(left, moved, part.author, part.who, strict=True)],
                      label)
    ax = chart(sentence(rows, (label for _, label in rows.values())), title)
    ax.set(xlabel="bytes read and written", xmargin=0.3125)
    eng(ax.xaxis, "B")
    if minimum is not None:
        mark(ax, minimum, f"least possible: {amount(minimum, 'B')}",
              RED, RED)
    segments(ax, rows, ["compiler", "library"])
    return ax.figure


@themed
def bars(labels: Sequence[str], values: Sequence[float], unit: str,
         title: str = "", xlabel: str = "") -> Figure:
    """One horizontal bar a label, each with its value in ``unit``."""
    marks = [amount(value, unit) if unit else f"{value:,}"
             for value in values]
    ax = chart(sentence(labels, marks), title)
    name_rows(ax, labels)
    drawn = ax.barh(range(len(labels)), values, 0.7, edgecolor="black",
                    facecolor=SKY)
    ax.bar_label(drawn, marks, padding=6, size=14)
    ax.set(xlabel=xlabel, xmargin=0.2)
    eng(ax.xaxis, unit)
    return ax.figure


@themed
def lines(series: Mapping[str, Sequence[tuple[float, float]]], unit: str,
          title: str = "", xlabel: str = "", at: float | None = None
          ) -> Figure:
    """Points (x, y in ``unit``) of each series, both axes logarithmic.

    ``at`` draws a vertical line there.
    """
    legible("lines", len(series), len(LINES))
    ax = chart("; ".join(
        f"{name}: {amount(points[0][1], unit)} at {points[0][0]:g} to "
        f"{amount(points[-1][1], unit)} at {points[-1][0]:g}"
        for name, points in series.items()), title)
    for (name, points), style in zip(series.items(), LINES, strict=False):
        color, marker, line = style
        ax.plot(*zip(*points, strict=True), color=color, marker=marker,
                linestyle=line, label=name)
    if at is not None:
        mark(ax, at, f"{at:g}", GREY, "black")
    ax.set(xscale="log", yscale="log", xlabel=xlabel,
           ylabel={"s": "time"}.get(unit, unit))
    ax.xaxis.set_major_formatter("{x:g}")
    eng(ax.yaxis, unit)
    ax.yaxis.set_minor_formatter("")
    legend(ax)
    return ax.figure


@themed
def buffers(values: Sequence[Any],
            title: str = "Which values share memory, and when") -> Figure:
    """Live ranges of values over a schedule, one row for each allocation.

    A value has name, bytes, kind, allocation, offset, first and last (an
    ``ir`` ladder's ``.buffers``); values at different offsets of one
    allocation get rows of their own, which say where each begins.
    """
    ax = chart("; ".join(
        f"{v.name}: {amount(v.bytes, 'B')}, steps {v.first} to {v.last}"
        for v in values), title)
    ax.set_xlabel("step of the schedule")
    ax.xaxis.get_major_locator().set_params(integer=True)
    spans = {(v.allocation, v.offset): [] for v in values}
    for v in values:
        spans[v.allocation, v.offset].append(v)
    apart = [allocation for allocation, _ in spans]
    segments(ax, {
        f"allocation {at}: {amount(max(v.bytes for v in row), 'B')}"
        + f"\nfrom byte {offset:,}" * (apart.count(at) > 1): (
            [(v.first - 0.5, v.last - v.first + 1, v.kind, v.name)
             for v in row], "")
        for (at, offset), row in spans.items()})
    return ax.figure
