"""A chip to scale, and the memories it reaches from near to far. Floor 4."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, log10
from typing import TYPE_CHECKING

from course_utils import chips
from course_utils.plot.base import (
    DPI,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SIZE,
    SKY,
    YELLOW,
    amount,
    box,
    canvas,
    eng,
    name_rows,
    sentence,
    themed,
    titled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LANES = {"fp32": (SKY, ""), "int32": (ORANGE, "//"), "fp64": (GREEN, "..")}


@themed
def chip(c: chips.Chip | str) -> Figure:
    """An NVIDIA chip: the SMs of its die, and one of them opened.

    On the left area is memory: each SM's own, and the L2. SMs that are on
    the die but switched off are hatched. ValueError for a chip that the
    table does not divide into SMs and subpartitions.
    """
    c = chips.get(c)
    if "subpartitions_per_sm" not in c.values:
        raise ValueError(f"c is {c.name}, which has no SMs to open: "
                         "plot.hierarchy draws its memories.")
    die, lit = c.full_die_sm_count, c.sm_count
    title = f"{c.title}: {lit} of {die} SMs"
    ax = canvas("", title)
    own = sum(level.bytes for level in c.levels() if level.units == lit)
    across = round(die**0.5 * 1.5)
    rows, pitch = -(-die // across), 630 / across
    while (high := c.l2_bytes / own * (pitch - 3)**2 / (across * pitch - 3)
           ) + rows * pitch > 490:
        pitch -= 0.5
    wide, top = across * pitch - 3, 96 + rows * pitch + 5
    spots = [(30 + i % across * pitch, 96 + i // across * pitch)
             for i in range(die)]
    _cells(ax, spots[:lit], pitch - 3, pitch - 3, SKY)
    _cells(ax, spots[lit:], pitch - 3, pitch - 3, "white", "////")
    _cells(ax, [(30, top)], wide, high, YELLOW)
    ax.text(30 + wide / 2, top + high / 2, f"L2, {_binary(c.l2_bytes)}",
            ha="center", va="center")
    page = SIZE[0] * SIZE[1] * DPI**2 / (pitch - 3)**2 * own  # bytes
    note = (f"Area is memory: {_binary(own)} in each SM. To this scale\n"
            f"the {c.memory_type} would fill {c.hbm_bytes / page:,.0f} "
            "pages of this size.")
    if die > lit:
        note += f"\nHatched: {die - lit} SMs switched off, drawn last."
    ax.text(30, top + high + 12, note, size=14, va="top")
    ax.figure.summary = (f"{title}, {_binary(own)} of memory in each, beside "
                         f"an L2 of {_binary(c.l2_bytes)}. {_sm(ax, c)}")
    return ax.figure


def _sm(ax: Axes, c: chips.Chip) -> str:
    """One SM opened, a row a subpartition; says in words what it drew."""
    parts, left, top = c.subpartitions_per_sm, 680, 96
    counts = {"scheduler": 1, "registers": c.registers_per_sm // parts,
              **{name: getattr(c, f"{name}_lanes_per_sm") // parts
                 for name in _LANES if f"{name}_lanes_per_sm" in c.values},
              "tensor\ncore": c.tensor_cores_per_sm // parts}
    widths = {"scheduler": 96, "registers": 100, "fp32": 92, "int32": 60,
              "fp64": 60, "tensor\ncore": 82}
    gap = (542 - sum(widths[n] for n in counts)) / (len(counts) - 1)
    box(ax, left, top, 570, 584)
    ax.text(left + 14, top + 26, f"One SM: {parts} equal subpartitions",
            weight="bold", va="center")
    x = left + 14
    for name, count in counts.items():
        w = widths[name]
        label = f"{name}\nlanes" if name in _LANES else name
        ax.text(x + w / 2, top + 114, f"{label}\n{count:,}", size=14,
                ha="center", va="bottom", linespacing=1.1)
        for row in range(parts):
            y = top + 122 + row * 92
            if name in _LANES:
                n = 8 if count > 16 else 4
                _cells(ax, [(x + i % n * w / n, y + 8 + i // n * 17)
                            for i in range(count)],
                       w / n - 2, 14, *_LANES[name])
            else:
                _cells(ax, [(x, y)], w, 78, {"scheduler": "white",
                       "registers": YELLOW}.get(name, PURPLE))
        x += w + gap
    y = top + 122 + parts * 92
    said = [f"{level.name}, {_binary(level.bytes)}" for level in c.levels()
            if level.units == c.sm_count and level.name != "registers"]
    for i, text in enumerate(said):
        w = 542 / len(said)
        _cells(ax, [(left + 14 + i * w, y)], w, 76, YELLOW)
        ax.text(left + 14 + (i + 0.5) * w, y + 38, text, ha="center",
                va="center")
    each = ", ".join(f"{n:,} {name}" for name, n in counts.items())
    return (f"One SM: {parts} subpartitions, each with {each}; shared by "
            f"all: {'; '.join(said)}.".replace("\n", " "))


@themed
def hierarchy(c: chips.Chip | str) -> Figure:
    """A chip's memories, smallest first: what they hold and how fast they are
    read, all units of a kind together. Measured speeds say so."""
    c = chips.get(c)
    levels = c.levels()
    measured = {v.value for v in c.values.values()
                if v.meaning.startswith("measured")}
    sizes = [level.bytes * level.units for level in levels]
    speeds = [level.bandwidth or 0 for level in levels]
    held = [amount(size, "B") + f" in {level.units:,} pieces" * (
        level.units > 1) for size, level in zip(sizes, levels, strict=True)]
    fast = [amount(speed, "B/s") + ", measured" * (speed in measured)
            if speed else "not published" for speed in speeds]
    names = [level.name for level in levels]
    figure = titled(
        sentence(names, map(", ".join, zip(held, fast, strict=True))),
        f"{c.title}: far is large, near is fast")
    for ax, values, marks, label, unit, step, face in zip(
            figure.subplots(1, 2, sharey=True), (sizes, speeds), (held, fast),
            ("holds, in all (log scale)", "reads, in all (log scale)"),
            ("B", "B/s"), (2, 1), (YELLOW, SKY), strict=True):
        name_rows(ax, names)
        low = min(v for v in values if v) / 10
        ax.barh(range(len(values)), [max(v - low, 0) for v in values], 0.6,
                low, facecolor=face, edgecolor="black")
        for y, (value, mark) in enumerate(zip(values, marks, strict=True)):
            ax.text(max(value, low), y, f"  {mark}", size=14, va="center")
        ax.set(xscale="log", xlabel=label,
               xlim=(low, max(values) * (max(values) / low)**0.8))
        decades = range(ceil(log10(low)), ceil(log10(max(values))), step)
        ax.set_xticks([10**n for n in decades])
        ax.minorticks_off()
        eng(ax.xaxis, unit)
    return figure


def _cells(ax: Axes, spots: Iterable[tuple[float, float]], w: float, h: float,
           face: str, hatch: str = "") -> None:
    """Equal boxes with their upper left corners at ``spots``."""
    for x, y in spots:
        ax.bar(x, h, w, y, align="edge", facecolor=face, hatch=hatch,
               edgecolor=GREY, lw=0.8)


def _binary(count: float) -> str:
    """Bytes in KiB or MiB."""
    return (f"{count / 2**20:.4g} MiB" if count >= 2**20
            else f"{count / 2**10:.4g} KiB")
