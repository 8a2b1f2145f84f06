"""Draw the course's objects: one theme, one 16:9 picture each. Floor 4.

Every function returns a matplotlib Figure made without pyplot, so nothing is
drawn twice. Its repr is what a notebook test compares: a digest of all that
is drawn, and ``summary``, one sentence that says what the picture shows. Axes
hold the data's own units (bytes, seconds); only tick labels are scaled, in
powers of ten.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import itertools
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from course_utils import host

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

OKABE_ITO = ("#000000", "#E69F00", "#56B4E9", "#009E73",
             "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
_BLACK, _ORANGE, _SKY, _GREEN, _YELLOW, _BLUE, _RED, _PURPLE = OKABE_ITO
_PALE, _GREY, _MONO = "#F2F2F2", "#666666", "DejaVu Sans Mono"
SIZE, DPI = (12.8, 7.2), 100  # inches; 1280 x 720 pixels
# Colour and hatch go together; dark text is readable on each.
_FILLS = ((_SKY, ""), (_ORANGE, "//"), (_GREEN, ".."), (_YELLOW, "xx"),
          (_PURPLE, "\\\\"), ("white", "--"))
# Lines need contrast with white: the pale colours stay out.
_LINES = ((_BLUE, "o", "-"), (_RED, "s", "--"), (_GREEN, "^", "-."),
          (_BLACK, "D", ":"))
_THEME = {
    "figure.facecolor": "white", "axes.facecolor": "white",
    "font.family": ["DejaVu Sans"], "font.size": 16,
    "axes.titlesize": 16, "axes.labelsize": 16, "figure.titlesize": 22,
    "xtick.labelsize": 14, "ytick.labelsize": 14, "legend.fontsize": 14,
    "lines.linewidth": 2.5, "lines.markersize": 9, "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False,
    "text.parse_math": False,  # IR is full of "$"
}


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
    Stage("Dispatch to kernel", "Who starts the work?", "kernel execution",
          "queue, launch, wait"),
    Stage("Kernel to chip", "Where does time go?", "inside the chip",
          "schedule, load, multiply, store"),
)
# ARTEFACTS[n - 1] is what stage n receives, ARTEFACTS[n] what it hands on.
ARTEFACTS = ("model", *(stage.handed_on for stage in STAGES))


@functools.cache
def _picture() -> type[Figure]:
    from matplotlib.figure import Figure

    class Picture(Figure):
        """A Figure that shows itself as PNG, whatever backend is set."""

        summary = ""
        tiles: Sequence[Figure] = ()  # the figures pasted into this one

        def _ipython_display_(self) -> None:
            # This goes before pyplot's formatter, which would crop. The
            # digest in both lets a test hold picture and text together.
            from IPython.display import display

            data = base64.b64encode(png(self, digest(self))).decode("ascii")
            display({"image/png": data, "text/plain": repr(self)}, raw=True)

        def __repr__(self) -> str:
            return f"<Picture {digest(self)}: {self.summary}>"

        __str__ = __repr__

    return Picture


def new(summary: str, size: tuple[float, float] = SIZE,
        **options: Any) -> Figure:
    """An empty opaque Figure of ``size`` inches with this ``summary``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = _picture()(figsize=size, dpi=DPI, **options)
    FigureCanvasAgg(figure)
    figure.summary = summary
    return figure


def digest(figure: Figure) -> str:
    """Eight hex digits of every text and number drawn, but of no pixel."""
    from matplotlib.ticker import FixedLocator

    said, texts = [], [*figure.texts]
    texts += [t for legend in figure.legends for t in legend.get_texts()]
    for ax in figure.axes:
        texts += [ax.title, *ax.texts]
        for axis in (ax.xaxis, ax.yaxis):
            texts += [axis.label]
            if isinstance(axis.get_major_locator(), FixedLocator):
                texts += axis.get_ticklabels()  # the others follow the data
        said += [ax.get_xscale(), ax.get_yscale(),
                 *(patch.get_hatch() for patch in ax.patches)]
        drawn = [text.get_unitless_position() for text in ax.texts]
        drawn += [line.get_xydata().flat for line in ax.lines]
        drawn += [patch.get_patch_transform().transform_path(
            patch.get_path()).vertices.flat for patch in ax.patches]
        drawn += [path.vertices.flat for group in ax.collections
                  for path in group.get_paths()]
        said += [f"{number:.6g}" for numbers in drawn for number in numbers]
    said += [text.get_text() for text in texts]
    said += [digest(tile) for tile in getattr(figure, "tiles", ())]
    return hashlib.sha256(repr(said).encode()).hexdigest()[:8]


def png(figure: Figure, description: str | None = None) -> bytes:
    """Any Figure as PNG, opaque, at the course's resolution."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_dpi(DPI)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata={
        "Software": None,  # would change with the version of matplotlib
        "Description": description})
    return buffer.getvalue()


def themed(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Run ``draw`` under the course's theme, whatever the reader has set."""

    @functools.wraps(draw)
    def inner(*args: Any, **kwargs: Any) -> Any:
        style = host.need("matplotlib.style", "it draws every figure")
        with style.context(["default", _THEME]):
            return draw(*args, **kwargs)

    return inner


def _canvas(summary: str, title: str) -> Axes:
    """Axes over the whole figure, in pixels, y downwards."""
    ax = new(summary).add_axes((0, 0, 1, 1), xlim=(0, SIZE[0] * DPI),
                               ylim=(SIZE[1] * DPI, 0))
    ax.axis("off")
    ax.figure.suptitle(title, x=30 / 1280, y=1 - 44 / 720, weight="bold",
                       ha="left", va="center")
    return ax


def _chart(summary: str, title: str) -> Axes:
    figure = new(summary, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.2, h_pad=0.2)
    figure.suptitle(title, x=0.02, ha="left", weight="bold")
    return figure.subplots()


def _box(ax: Axes, x: float, y: float, w: float, h: float,
         face: str = _PALE, edge: str = _GREY) -> None:
    ax.broken_barh([(x, w)], (y, h), facecolor=face, edgecolor=edge, lw=1.5)


def _arrow(ax: Axes, *path: tuple[float, float], color: str = _GREY) -> None:
    """A line along the points of ``path`` with a head at its end."""
    ax.plot(*zip(*path[:-1], strict=True), color=color)
    ax.annotate("", path[-1], path[-2], arrowprops={
        "arrowstyle": "-|>", "color": color, "lw": 2.5,
        "mutation_scale": 22, "shrinkA": 0, "shrinkB": 0})


def _excerpts(ax: Axes, h: float, most: int, sizes: Sequence[float],
              boxes: Sequence[tuple[float, float, float, str]]) -> None:
    """Write (x, y, width, text) excerpts, all in the largest size that fits;
    at the smallest, what does not fit is cut and ends in an ellipsis."""
    texts = [textwrap.dedent(text.expandtabs(2)).strip("\n").splitlines()
             for *_, text in boxes]
    high, wide = 1.71, 0.87  # pixels a point, at most, of a line and a letter
    size = next((size for size in sizes if all(
        min(len(text), most) * high * size <= h
        and max(map(len, text[:most]), default=0) * wide * size <= w
        for (_, _, w, _), text in zip(boxes, texts, strict=True))), sizes[-1])
    rows = min(most, int(h / high / size))
    for (x, y, w, _), text in zip(boxes, texts, strict=True):
        kept = text if len(text) <= rows else [*text[:rows - 1], "…"]
        room = int(w / wide / size)
        ax.text(x, y, "\n".join(
            row if len(row) <= room else row[:room - 1] + "…"
            for row in kept), size=size, va="top", family=_MONO)


def _stage(n: int) -> Stage:
    if n not in range(1, len(STAGES) + 1):
        raise ValueError(f"n is a stage, 1 to {len(STAGES)}; got {n!r}.")
    return STAGES[n - 1]


@themed
def stage_map(n: int) -> Figure:
    """The five stages from model to chip, left to right, stage ``n`` lit."""
    lit, step, left, rail = _stage(n), 220, 90, 230
    title = f"Stage {n} of {len(STAGES)}: {lit.name}"
    ax = _canvas(f"{title}; it receives {ARTEFACTS[n - 1]}, "
                 f"hands on {lit.handed_on}.", title)
    for i, stage in enumerate(STAGES):
        x, middle, on = left + i * step, left + (i + 0.5) * step, stage is lit
        color, ink = (_BLUE, "white") if on else (_GREY, "black")
        style = {"color": ink, "ha": "center", "va": "top"}
        _arrow(ax, (x + 10, rail), (x + step - 10, rail), color=color)
        ax.plot([middle, middle], [rail, 300], color=color)
        _box(ax, x + 8, 300, step - 16, 330, _BLUE if on else _PALE, color)
        ax.text(middle, 316, i + 1, size=36, weight="bold", **style)
        ax.text(middle, 400, textwrap.fill(stage.name, 12), size=18,
                weight="bold", **style)
        ax.text(middle, 500, textwrap.fill(stage.question, 16), **style)
    for i, name in enumerate(ARTEFACTS):
        x, near = left + i * step, i in (n - 1, n)
        ax.plot(x, rail, "o", color=_BLUE if near else _GREY, markersize=13)
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
    ax = _canvas(f"{title}; {stage.verbs}: from {ARTEFACTS[n - 1]} to "
                 f"{stage.handed_on}.", title)
    for x, head in ((30, f"received: {ARTEFACTS[n - 1]}"),
                    (735, f"handed on: {stage.handed_on}")):
        ax.text(x, 136, head, weight="bold", va="bottom")
        _box(ax, x, 150, w, h)
    _excerpts(ax, h - 28, 99, range(30, 13, -1), [
        (42, 164, w - 24, received), (747, 164, w - 24, handed_on)])
    _arrow(ax, (555, middle), (725, middle), color=_BLUE)
    ax.text(640, middle - 15, stage.verbs.replace(", ", "\n"), ha="center",
            va="bottom", weight="bold", color=_BLUE, linespacing=1.4)
    return ax.figure


@themed
def ladder(columns: Mapping[str, Sequence[tuple[str, str]]] | Iterable[Any],
           trunk: Sequence[tuple[str, str]] = (), lines: int = 6,
           title: str = "One function, rung by rung") -> Figure:
    """Real excerpts of one function's representations, top to bottom.

    ``trunk`` are the (name, excerpt) all targets share, ``columns`` maps a
    target's name to its own; an ``ir`` ladder is a trunk alone. ``lines`` is
    the most an excerpt shows; fewer where there is no room.
    """
    if not isinstance(columns, Mapping):
        trunk, columns = [(rung.name, rung.text) for rung in columns], {}
    across = min(3, len(trunk)) or 1
    levels = -(-len(trunk) // across)
    deep = levels + max(map(len, columns.values()), default=0)
    _legible("rows", deep, 5)
    _legible("columns", len(columns) or across, 4)
    said = [", ".join(name for name, _ in trunk)] * bool(trunk)
    said += [f"{target}: {', '.join(name for name, _ in rungs)}"
             for target, rungs in columns.items()]
    ax = _canvas("; ".join(said), title)
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
                weight="bold", color=_BLUE)
        if trunk:
            links.append((spots[len(trunk) - 1], (x, y - gap, w)))
        links += itertools.pairwise(own)
        spots += own
    for a, b in links:
        _link(ax, a, b, h)
    excerpts = []
    for (x, y, w), (name, text) in zip(spots, itertools.chain(
            trunk, *columns.values()), strict=True):
        _box(ax, x, y, w, h)
        ax.text(x + 10, y + 6, name, size=14, weight="bold", va="top")
        excerpts.append((x + 10, y + 32, w - 20, text))
    _excerpts(ax, h - 40, lines, (16, 14, 12, 11), excerpts)
    return ax.figure


def _link(ax: Axes, a: Sequence[float], b: Sequence[float], h: float) -> None:
    """An arrow from box ``a`` to ``b``, each (x, y, width), h high."""
    if a[1] == b[1]:
        return _arrow(ax, (a[0] + a[2], a[1] + h / 2), (b[0], b[1] + h / 2))
    start, end = a[0] + a[2] / 2, b[0] + b[2] / 2
    bend = (a[1] + h + b[1]) / 2
    return _arrow(ax, (start, a[1] + h), (start, bend), (end, bend),
                  (end, b[1]))


def amount(value: float, unit: str) -> str:
    """Four digits and the unit, in powers of ten: "4.194 MB"."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter(unit)(float(f"{value:.4g}"))


def _said(names: Iterable[str], marks: Iterable[str]) -> str:
    return "; ".join(map(": ".join, zip(names, marks, strict=True)))


def _eng(axis: Any, unit: str) -> None:
    """Tick labels in ``unit``, in powers of ten."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(unit))
    if axis.get_scale() == "linear":  # there is no half byte
        axis.get_major_locator().set_params(nbins=6, integer=unit == "B")


def _legible(what: str, count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise ValueError(f"there are {count} {what} to draw; 1 to {most} are "
                         "legible: pass fewer.")


def _rows(ax: Axes, names: Sequence[str]) -> None:
    """Name the horizontal rows 0, 1, ... from the top down."""
    _legible("rows", len(names), 12)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)


def _segments(ax: Axes, rows: Mapping[str, tuple[Sequence[Any], str]],
              kinds: Iterable[str] = ()) -> None:
    """Rows of segments (left, width, kind, name), each kind with its fill.

    Each name goes on its segment, or where that is too narrow, with the
    row's label behind the last; where that needs room, all is tried again.
    """
    _rows(ax, [*rows])
    kinds = list(dict.fromkeys([*kinds, *(
        kind for parts, _ in rows.values() for *_, kind, _ in parts)]))
    for y, (parts, _) in enumerate(rows.values()):
        for left, width, kind, _ in parts:
            face, hatch = _FILLS[kinds.index(kind)]
            ax.barh(y, width, 0.7, left, label=kind, facecolor=face,
                    hatch=hatch, edgecolor="black")
    _legend(ax)
    ax.figure.draw_without_rendering()  # settles how wide the axes are
    marks, (low, high), tried = len(ax.texts), ax.get_xlim(), None
    while high != tried:
        tried = high
        ax.set_xlim(low, high)
        for text in [*ax.texts[marks:]]:
            text.remove()
        bars = iter(ax.patches)
        for y, (parts, label) in enumerate(rows.values()):
            beside = [label] * bool(label) + [name for *_, name in parts if (
                not _fit(ax, next(bars), y, name))]
            end = max(left + width for left, width, *_ in parts)
            text = ax.text(end, y, "  " + ", ".join(beside), size=14,
                           va="center")
            share = (text.get_window_extent().width + 10) / ax.bbox.width
            high = max(high, low + (end - low) / (1 - min(share, 0.7)))


def _legend(ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    one_each = dict(zip(labels, handles, strict=True))
    ax.figure.legend(one_each.values(), one_each.keys(), ncols=len(one_each),
                     loc="outside lower center")


def _fit(ax: Axes, bar: Any, y: int, name: str) -> bool:
    """Write ``name`` on ``bar``, small and in two lines if need be; False,
    and nothing written, if it is too wide for that."""
    text = ax.text(bar.get_x() + bar.get_width() / 2, y, name, ha="center",
                   va="center")
    if bar.get_hatch():
        text.set_bbox({"fc": "white", "ec": "none", "pad": 2})
    for size, words in ((14, name), (12, name.replace("_", "_\n", 1))):
        text.set(size=size, text=words)
        if (text.get_window_extent().width
                <= bar.get_window_extent().width - 8):
            return True
    text.remove()
    return False


@themed
def backends(table: DataFrame, minimum: float | None = None,
             title: str = "Bytes moved, kernel by kernel") -> Figure:
    """Bytes each back end moves, one segment a kernel.

    ``table`` has the index ("back end", "kernel") and the columns author
    ("compiler" or "library"), who, bytes_read, bytes_written. ``minimum``
    is the compulsory traffic in bytes, a dashed line. Bytes not known (NaN)
    draw no segment, and the label then says "at least".
    """
    table = table.assign(moved=table.bytes_read + table.bytes_written)
    rows = {}
    for name, part in table.groupby(level=0, sort=False):
        moved = part.moved.fillna(0)
        left = moved.cumsum() - moved
        label = (f"{'at least ' * bool(part.moved.isna().any())}"
                 f"{amount(moved.sum(), 'B')}, {len(part)} kernel"
                 f"{'s' * (len(part) > 1)}")
        rows[name] = ([*zip(left, moved, part.author, part.who, strict=True)],
                      label)
    ax = _chart(_said(rows, (label for _, label in rows.values())), title)
    ax.set(xlabel="bytes read and written", xmargin=0.3125)
    _eng(ax.xaxis, "B")
    if minimum is not None:
        _mark(ax, minimum, f"least possible: {amount(minimum, 'B')}",
              _RED, _RED)
    _segments(ax, rows, ["compiler", "library"])
    return ax.figure


def _mark(ax: Axes, x: float, name: str, color: str, ink: str) -> None:
    """A dashed vertical line at ``x``, its name above it."""
    ax.axvline(x, color=color, linestyle="--", zorder=0)
    ax.text(x, 1.01, name, color=ink, size=14, ha="center", va="bottom",
            transform=ax.get_xaxis_transform())


@themed
def bars(labels: Sequence[str], values: Sequence[float], unit: str,
         title: str = "", xlabel: str = "") -> Figure:
    """One horizontal bar a label, each with its value in ``unit``."""
    marks = [amount(value, unit) if unit else f"{value:,}"
             for value in values]
    ax = _chart(_said(labels, marks), title)
    _rows(ax, labels)
    drawn = ax.barh(range(len(labels)), values, 0.7, edgecolor="black",
                    facecolor=_SKY)
    ax.bar_label(drawn, marks, padding=6, size=14)
    ax.set(xlabel=xlabel, xmargin=0.2)
    _eng(ax.xaxis, unit)
    return ax.figure


@themed
def lines(series: Mapping[str, Sequence[tuple[float, float]]], unit: str,
          title: str = "", xlabel: str = "", at: float | None = None
          ) -> Figure:
    """Points (x, y in ``unit``) of each series, both axes logarithmic.

    ``at`` draws a vertical line there.
    """
    _legible("lines", len(series), len(_LINES))
    ax = _chart("; ".join(
        f"{name}: {amount(points[0][1], unit)} at {points[0][0]:g} to "
        f"{amount(points[-1][1], unit)} at {points[-1][0]:g}"
        for name, points in series.items()), title)
    for (name, points), style in zip(series.items(), _LINES, strict=False):
        color, marker, line = style
        ax.plot(*zip(*points, strict=True), color=color, marker=marker,
                linestyle=line, label=name)
    if at is not None:
        _mark(ax, at, f"{at:g}", _GREY, "black")
    ax.set(xscale="log", yscale="log", xlabel=xlabel,
           ylabel={"s": "seconds"}.get(unit, unit))
    ax.xaxis.set_major_formatter("{x:g}")
    _eng(ax.yaxis, unit)
    ax.yaxis.set_minor_formatter("")
    _legend(ax)
    return ax.figure


@themed
def buffers(values: Sequence[Any],
            title: str = "Which values share memory, and when") -> Figure:
    """Live ranges of values over a schedule, one row for each allocation.

    A value has name, bytes, kind, allocation, offset, first and last (an
    ``ir`` ladder's ``.buffers``); values at different offsets of one
    allocation get rows of their own, which say where each begins.
    """
    ax = _chart("; ".join(
        f"{v.name}: {amount(v.bytes, 'B')}, steps {v.first} to {v.last}"
        for v in values), title)
    ax.set_xlabel("step of the schedule")
    ax.xaxis.get_major_locator().set_params(integer=True)
    spans = {(v.allocation, v.offset): [] for v in values}
    for v in values:
        spans[v.allocation, v.offset].append(v)
    apart = [allocation for allocation, _ in spans]
    _segments(ax, {
        f"allocation {at}: {amount(max(v.bytes for v in row), 'B')}"
        + f"\nfrom byte {offset:,}" * (apart.count(at) > 1): (
            [(v.first - 0.5, v.last - v.first + 1, v.kind, v.name)
             for v in row], "")
        for (at, offset), row in spans.items()})
    return ax.figure
