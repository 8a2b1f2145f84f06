"""Bytes between the levels of memory, and the roofline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from course_utils import chips, memory
from course_utils.plot.base import (
    BLACK,
    BLUE,
    DPI,
    FILLS,
    GREY,
    ORANGE,
    RED,
    SIZE,
    amount,
    box,
    canvas,
    chart,
    eng,
    legible,
    mark,
    sentence,
    themed,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "os^Dv*"
_TOP, _HIGH, _WIDE, _GAP = 120, 420, 190, 325  # pixels
# One place for each level and the arrow on its left, from HBM to the SMs.
_LEFT = [(SIZE[0] * DPI - 3 * _WIDE - 2 * _GAP) / 2 + n * (_WIDE + _GAP)
         for n in range(3)]


@themed
def traffic(t: memory.Traffic, title: str = "") -> Figure:
    """What passes between HBM, L2 and the SMs, an arrow for each tensor.

    An arrow is as thick as its bytes; reads point right, writes left.
    """
    rows = [(name, way) for name in dict.fromkeys(n for _, n in t.moved)
            for way in (0, 1) if any(t.moved[level, name][way]
                                     for level in t.levels)]
    legible("tensors read or written", len(rows), 7)
    c = chips.get(t.chip)
    words = ("read", "written")
    said = [f"{name} {words[way]} " + ", ".join(
        f"{level} {amount(t.moved[level, name][way], 'B')}"
        for level in t.levels) for name, way in rows]
    ax = canvas("; ".join(said), title or f"{t.kernel} on {t.chip}: "
                "bytes moved (simulated)")
    for x, head, below in zip(_LEFT, ("HBM", "L2", "SMs"), (
            amount(c.hbm_bytes, "B"), amount(t.cache_bytes, "B"),
            f"{c.sm_count} of them"), strict=True):
        box(ax, x, _TOP, _WIDE, _HIGH)
        ax.text(x + _WIDE / 2, _TOP + _HIGH / 2 - 14, head, size=24,
                weight="bold", ha="center")
        ax.text(x + _WIDE / 2, _TOP + _HIGH / 2 + 22, below, ha="center")
    step = _HIGH / len(rows)
    most = max(max(m) for m in t.moved.values())
    for n, (name, way) in enumerate(rows):
        y = _TOP + (n + 0.62) * step
        for x, level in zip(_LEFT[1:], ("HBM", "L2"), strict=True):
            count = t.moved[level, name][way]
            ax.text(x - _GAP / 2, y - step * 0.2 - 4,
                    f"{name}  {count / 1e6:.3g} MB", ha="center",
                    va="bottom")
            if count:
                _band(ax, x - _GAP + 12, x - 12, y, way,
                      max(2, count / most * step * 0.3))
    for x, level in zip(_LEFT[1:], ("HBM", "L2"), strict=True):
        whole = [sum(m[way] for (at, _), m in t.moved.items() if at == level)
                 for way in (0, 1)]
        ax.text(x - _GAP / 2, _TOP + _HIGH + 42, "\n".join(
            f"{word} {count / 1e6:.3g} MB" for word, count in
            zip(words, whole, strict=True)), ha="center", va="center",
            linespacing=1.5)
    ax.text(SIZE[0] * DPI / 2, 650, "blue, to the right: read      striped, "
            "to the left: written", ha="center", color=GREY)
    ax.text(SIZE[0] * DPI / 2, 684, f"The SMs read {t.reuse:.3g} bytes for "
            "each byte read from HBM.", ha="center", weight="bold")
    return ax.figure


def _band(ax: Axes, left: float, right: float, y: float, way: int,
          thick: float) -> None:
    """An arrow ``thick`` pixels thick: way 0 to the right, 1 to the left."""
    start, length = ((left, right - left), (right, left - right))[way]
    ax.arrow(start, y, length, 0, width=thick, head_width=thick + 14,
             head_length=22, length_includes_head=True,
             facecolor=(BLUE, ORANGE)[way], hatch=("", "//")[way],
             edgecolor="black", lw=1)


@themed
def roofline(chip: Any, points: Mapping[str, Any], dtype: Any = "bf16",
             title: str = "") -> Figure:
    """The chip's roof, and where kernels stand under it at best.

    ``points``: name -> ``memory.roofline`` point, or (FLOPs, bytes), then
    for ``dtype``. Each peak among them has its own ceiling.
    """
    c = chips.get(chip)
    legible("points", len(points), len(_MARKERS))
    points = {name: p if isinstance(p, memory.Point)
              else memory.roofline(c, dtype, *p) for name, p in points.items()}
    for name, p in points.items():
        if p.chip != c.name:
            raise ValueError(f"points: {name} is of {p.chip}, and this is "
                             f"the roofline of {c.name}.")
    roofs: dict[float, list[str]] = {}  # dtypes with this peak
    for p in points.values():
        roofs.setdefault(c.peak(p.dtype), []).append(p.dtype)
    ridges = [peak / c.hbm_bandwidth for peak in roofs]
    places = [p.intensity for p in points.values()]
    low, high = min(places + ridges) / 30, max(places + ridges) * 40
    ax = chart(sentence(points, (
        f"{p.intensity:.4g} FLOP/B, {p.bound}-bound, at best "
        f"{amount(p.flops_per_second, 'FLOP/s')}" for p in points.values())),
        title or f"Roofline of the {c.title}")
    for (peak, names), ridge in zip(roofs.items(), ridges, strict=True):
        ax.plot([low, ridge, high], [low * c.hbm_bandwidth, peak, peak],
                color=BLACK)
        ax.text(high, peak * 1.12, f"{', '.join(dict.fromkeys(names))} peak "
                f"{amount(peak, 'FLOP/s')}", size=14, ha="right", va="bottom")
        mark(ax, ridge, f"ridge {ridge:.4g}", GREY, "black")
    dots = {f"{name}: {p.intensity:.4g} FLOP/B": ax.plot(
        p.intensity, p.flops_per_second, marker, color=color, markersize=15,
        markeredgecolor="black", zorder=3)[0]
        for (name, p), marker, color in zip(points.items(), _MARKERS, (
            RED, BLUE, *(face for face, _ in FILLS)), strict=False)}
    ax.set(xscale="log", yscale="log", xlim=(low, high),
           xlabel="FLOP per byte of device memory", ylabel="FLOP/s")
    top = max(roofs) * 12
    ax.set_ylim(low * c.hbm_bandwidth, top)
    half = (low * min(ridges)) ** 0.5  # half way up the slope
    ax.text(half * 1.2, half * c.hbm_bandwidth / 1.2,
            f"{c.memory_type} {amount(c.hbm_bandwidth, 'B/s')}", size=14,
            va="top")
    ax.text(min(ridges) / 1.2, top / 3, "memory-bound", ha="right")
    ax.text(max(ridges) * 1.2, top / 3, "compute-bound")
    ax.xaxis.set_major_formatter("{x:g}")
    eng(ax.yaxis, "FLOP/s")
    ax.yaxis.set_minor_formatter("")
    # Handed over: a label that begins with "_" is not found by itself.
    ax.figure.legend(dots.values(), dots, ncols=2, loc="outside lower center")
    return ax.figure
