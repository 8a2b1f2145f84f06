"""The pages' own pictures: the map, the stage card, the ladder."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from course_utils.plot.base import (
    BLUE,
    GREY,
    PALE,
    arrow,
    box,
    canvas,
    legible,
    themed,
    write_excerpts,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Stage(NamedTuple):
    """What one of the five stages asks, hands on to the next, and does."""

    name: str
    question: str
    handed_on: str
    verbs: str


STAGES = (
    Stage("Model to operations", "What must be computed?", "operations",
          "trace, count"),
    Stage("Operations to IR", "How is it written down?", "graph and IR",
          "capture, lower"),
    Stage("IR to executable", "What does a compiler decide?", "executable",
          "fuse, lay out, place buffers, emit code"),
    Stage("Dispatch to kernel", "When is the work done?", "kernel execution",
          "queue, launch, wait"),
    Stage("Kernel to chip", "Where does time go?", "inside the chip",
          "schedule, load, multiply, store"),
)

# ARTEFACTS[n - 1] is what stage n receives, ARTEFACTS[n] what it hands on.
ARTEFACTS = ("model", *(stage.handed_on for stage in STAGES))


def _stage(n: int) -> Stage:
    if n not in range(1, len(STAGES) + 1):
        raise ValueError(f"n is a stage, 1 to {len(STAGES)}; got {n!r}.")
    return STAGES[n - 1]


@themed
def stage_map(n: int) -> Figure:
    """The five stages from model to chip, left to right, stage ``n`` lit."""
    lit, step, left, rail = _stage(n), 220, 90, 230
    title = f"Stage {n} of {len(STAGES)}: {lit.name}"
    ax = canvas(f"{title}; it receives {ARTEFACTS[n - 1]}, "
                f"hands on {lit.handed_on}.", title)
    for i, stage in enumerate(STAGES):
        x, middle, on = left + i * step, left + (i + 0.5) * step, stage is lit
        color, ink = (BLUE, "white") if on else (GREY, "black")
        style = {"color": ink, "ha": "center", "va": "top"}
        arrow(ax, (x + 10, rail), (x + step - 10, rail), color=color)
        ax.plot([middle, middle], [rail, 300], color=color)
        box(ax, x + 8, 300, step - 16, 330, BLUE if on else PALE, color)
        ax.text(middle, 316, i + 1, size=36, weight="bold", **style)
        ax.text(middle, 400, textwrap.fill(stage.name, 12), size=18,
                weight="bold", **style)
        ax.text(middle, 500, textwrap.fill(stage.question, 16), **style)
    for i, name in enumerate(ARTEFACTS):
        x, near = left + i * step, i in (n - 1, n)
        ax.plot(x, rail, "o", color=BLUE if near else GREY, markersize=13)
        ax.text(x, rail - 22, textwrap.fill(name, 10), ha="center",
                va="bottom", weight="bold" if near else "normal")
    return ax.figure


@themed
def card(n: int, received: str, handed_on: str) -> Figure:
    """Stage ``n`` between the real artefacts it receives and hands on.

    ``received`` and ``handed_on`` are a few lines of text, shown verbatim
    and cut where they are longer or wider than their panel.
    """
    stage, w, h, middle = _stage(n), 515, 530, 415
    title = f"Stage {n}: {stage.name}"
    # The text of both is in the summary, for those who cannot see it; a test
    # compares what one notebook hands on with what the next receives.
    ax = canvas(f"{title}; {stage.verbs}: from {ARTEFACTS[n - 1]} to "
                f"{stage.handed_on}.\nreceived:\n{received}\nhanded on:\n"
                f"{handed_on}", title)
    for x, head in ((30, f"received: {ARTEFACTS[n - 1]}"),
                    (735, f"handed on: {stage.handed_on}")):
        ax.text(x, 136, head, weight="bold", va="bottom")
        box(ax, x, 150, w, h)
    write_excerpts(ax, h - 28, 99, range(30, 13, -1), [
        (42, 164, w - 24, received), (747, 164, w - 24, handed_on)])
    arrow(ax, (555, middle), (725, middle), color=BLUE)
    ax.text(640, middle - 15, stage.verbs.replace(", ", "\n"), ha="center",
            va="bottom", weight="bold", color=BLUE, linespacing=1.4)
    return ax.figure


@themed
def ladder(columns: Mapping[str, Sequence[tuple[str, str]]] | Iterable[Any],
           trunk: Sequence[tuple[str, str]] = (), lines: int = 6,
           title: str = "One function, rung by rung",
           apart: Sequence[str] = ()) -> Figure:
    """Real excerpts of one function's representations, top to bottom.

    ``trunk`` are the (name, excerpt) all targets share, ``columns`` maps a
    target's name to its own; an ``ir`` ladder is a trunk alone. ``lines`` is
    the most an excerpt shows; fewer where there is no room. Columns named in
    ``apart`` do not come from the trunk: no arrow leads there.
    """
    if not isinstance(columns, Mapping):
        trunk, columns = [(rung.name, rung.text) for rung in columns], {}
    across = min(3, len(trunk)) or 1
    levels = -(-len(trunk) // across)
    deep = levels + max(map(len, columns.values()), default=0)
    legible("rows", deep, 5)
    legible("columns", len(columns) or across, 4)
    said = [", ".join(name for name, _ in trunk)] * bool(trunk)
    said += [f"{target}: {', '.join(name for name, _ in rungs)}"
             for target, rungs in columns.items()]
    ax = canvas("; ".join(said), title)
    top, gap = 80, 30
    h = (620 + gap - gap * bool(columns)) / deep - gap

    def spot(row: int, column: int, of: int) -> tuple[float, float, float]:
        space = 44 if of < 4 else 18
        w = (1220 - space * (of - 1)) / of
        below = gap * (row >= levels)  # room for the name of the column
        return 30 + column * (w + space), top + row * (h + gap) + below, w

    spots = [spot(i // across, i % across, across)
             for i in range(len(trunk))]
    links = [*itertools.pairwise(spots)]
    for column, (target, rungs) in enumerate(columns.items()):
        own = [spot(levels + i, column, len(columns))
               for i in range(len(rungs))]
        x, y, w = own[0]
        ax.text(x + w / 2, y - gap + 2, target, va="top", ha="center",
                weight="bold", color=BLUE)
        if trunk and target not in apart:
            links.append((spots[len(trunk) - 1], (x, y - gap, w)))
        links += itertools.pairwise(own)
        spots += own
    for a, b in links:
        _link(ax, a, b, h)
    excerpts = []
    for (x, y, w), (name, text) in zip(spots, itertools.chain(
            trunk, *columns.values()), strict=True):
        box(ax, x, y, w, h)
        ax.text(x + 10, y + 6, name, size=14, weight="bold", va="top")
        excerpts.append((x + 10, y + 32, w - 20, text))
    write_excerpts(ax, h - 40, lines, (16, 14, 12, 11), excerpts)
    return ax.figure


def _link(ax: Axes, a: Sequence[float], b: Sequence[float], h: float) -> None:
    """An arrow from box ``a`` to ``b``, each (x, y, width), h high."""
    if a[1] == b[1]:
        return arrow(ax, (a[0] + a[2], a[1] + h / 2), (b[0], b[1] + h / 2))
    start, end = a[0] + a[2] / 2, b[0] + b[2] / 2
    bend = (a[1] + h + b[1]) / 2
    return arrow(ax, (start, a[1] + h), (start, bend), (end, bend),
                  (end, b[1]))
