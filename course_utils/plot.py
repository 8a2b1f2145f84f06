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
import numbers
import sys
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
_UNITS = {"s": "seconds", "B": "bytes", "B/s": "bytes per second"}


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
    for legend in figure.legends:
        texts += legend.get_texts()
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
    texts = [textwrap.dedent(str(text).expandtabs(2)).strip("\n").splitlines()
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
    if type(n) is not int or not 1 <= n <= len(STAGES):
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


def _pairs(rungs: Iterable[Any]) -> list[tuple[str, str]]:
    return [(rung.name, rung.text) if hasattr(rung, "text") else tuple(rung)
            for rung in rungs]


@themed
def ladder(columns: Mapping[str, Iterable[Any]] | Iterable[Any],
           trunk: Iterable[Any] = (), lines: int = 6,
           title: str = "One function, rung by rung") -> Figure:
    """Real excerpts of one function's representations, top to bottom.

    ``trunk`` are the rungs all targets share, ``columns`` maps a target's
    name to its own rungs; a plain list of rungs (an ``ir`` ladder) is a
    trunk alone. A rung is (name, excerpt) or has ``name`` and ``text``.
    ``lines`` is the most an excerpt shows; fewer where there is no room.
    """
    if not isinstance(columns, Mapping):
        trunk, columns = [*trunk, *columns], {}
    shared = _pairs(trunk)
    forks = {k: rungs for k, v in columns.items() if (rungs := _pairs(v))}
    across = min(3, len(shared)) or 1
    levels = -(-len(shared) // across)
    deep = levels + max(map(len, forks.values()), default=0)
    if not 1 <= deep <= 5 or len(forks) > 4:
        raise ValueError(
            f"columns and trunk make {deep} rows and {len(forks)} columns; "
            "1 to 5 rows and up to 4 columns are legible: pass fewer rungs.")
    ax = _canvas("; ".join(": ".join([k] * bool(k) + [", ".join(
        name for name, _ in v)]) for k, v in [("", shared), *forks.items()]
        if v), title)
    top, gap = 80, 30
    h = (620 + gap - gap * bool(forks)) / deep - gap

    def spot(row: int, column: int, of: int) -> tuple[float, float, float]:
        space = 44 if of < 4 else 18
        w = (1220 - space * (of - 1)) / of
        below = gap * (row >= levels)  # room for the name of the column
        return 30 + column * (w + space), top + row * (h + gap) + below, w

    boxes = [(spot(i // across, i % across, across), rung)
             for i, rung in enumerate(shared)]
    for (a, _), (b, _) in zip(boxes, boxes[1:], strict=False):
        _link(ax, a, b, h)
    for column, (name, rungs) in enumerate(forks.items()):
        own = [spot(levels + i, column, len(forks))
               for i in range(len(rungs))]
        x, y, w = own[0]
        ax.text(x + w / 2, y - gap + 2, name, va="top", ha="center",
                weight="bold", color=_BLUE)
        if shared:
            _link(ax, boxes[len(shared) - 1][0], (x, y - gap, w), h)
        for a, b in zip(own, own[1:], strict=False):
            _link(ax, a, b, h)
        boxes += zip(own, rungs, strict=True)
    for (x, y, w), (name, _) in boxes:
        _box(ax, x, y, w, h)
        ax.text(x + 10, y + 6, name, size=14, weight="bold", va="top")
    _excerpts(ax, h - 40, lines, (16, 14, 12, 11), [
        (x + 10, y + 32, w - 20, text) for (x, y, w), (_, text) in boxes])
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


def _finite(what: str, values: Iterable[Any], log: bool = False) -> None:
    """ValueError for what an axis would leave out in silence."""
    for value in values:
        if not (isinstance(value, numbers.Real) and (value > 0 or not log)
                and abs(value) <= sys.float_info.max):
            raise ValueError(f"{what} holds {value!r}; pass finite numbers"
                             + ", above 0 on a logarithmic axis" * log + ".")


def _rows(ax: Axes, names: Sequence[str]) -> None:
    """Name the horizontal rows 0, 1, ... from the top down."""
    _legible("rows", len(names), 12)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)


def _fills(kinds: Iterable[str]) -> dict[str, dict[str, Any]]:
    names = list(dict.fromkeys(kinds))
    _legible("kinds", len(names), len(_FILLS))
    return {name: {"facecolor": face, "hatch": hatch, "label": name,
                   "edgecolor": "black", "height": 0.7}
            for name, (face, hatch) in zip(names, _FILLS, strict=False)}


def _legend(ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    one_each = dict(zip(labels, handles, strict=True))
    ax.figure.legend(one_each.values(), one_each.keys(), ncols=len(one_each),
                     loc="outside lower center")


def _name(ax: Axes, rows: Sequence[tuple[Sequence[Any], str]]) -> None:
    """Write each bar's name on it, and a row's label behind its last bar.

    ``rows`` are (bars with their names, label) from the top down. A name too
    wide for its bar goes into the label; where that needs room, all is tried
    again.
    """
    ax.figure.draw_without_rendering()  # settles how wide the axes are
    written, (low, high), tried = [], ax.get_xlim(), None
    while high != tried:
        ax.set_xlim(low, high)
        while written:
            written.pop().remove()
        tried = high
        for y, (bars, label) in enumerate(rows):
            texts = [_fit(ax, bar, y, name) for bar, name in bars]
            beside = [label] * bool(label) + [
                name for (_, name), text in zip(bars, texts, strict=True)
                if not text]
            end = max(bar.get_x() + bar.get_width() for bar, _ in bars)
            text = ax.text(end, y, "  " + ", ".join(beside), size=14,
                           va="center")
            written += [*filter(None, texts), text]
            share = (text.get_window_extent().width + 10) / ax.bbox.width
            high = max(high, low + (end - low) / (1 - min(share, 0.7)))


def _fit(ax: Axes, bar: Any, y: int, name: str) -> Any:
    """``name`` as a text on ``bar``, small and in two lines if need be; None
    if it is too wide for that."""
    text = ax.text(bar.get_x() + bar.get_width() / 2, y, name, ha="center",
                   va="center")
    if bar.get_hatch():
        text.set_bbox({"fc": "white", "ec": "none", "pad": 2})
    room = bar.get_window_extent().width - 8
    for size, words in ((14, name), (12, _halves(name)), (11, _halves(name))):
        text.set(size=size, text=words)
        if text.get_window_extent().width <= room:
            return text
    return text.remove()


def _halves(name: str) -> str:
    """``name`` in two lines, cut at the mark nearest to its middle."""
    cuts = [at + 1 for at, char in enumerate(name[:-1]) if not char.isalnum()]
    at = min(cuts, key=lambda cut: abs(2 * cut - len(name)), default=0)
    return f"{name[:at]}\n{name[at:]}".strip()


@themed
def backends(table: DataFrame, minimum: float | None = None,
             title: str = "Bytes moved, kernel by kernel") -> Figure:
    """Bytes each back end moves, one segment a kernel.

    ``table`` has the index ("back end", "kernel") and the columns author
    ("compiler" or "library"), who, bytes_read, bytes_written. ``minimum``
    is the compulsory traffic in bytes, a dashed line. Bytes not known (NaN)
    draw no segment, and the label then says "at least".
    """
    if lost := {"author", "who", "bytes_read", "bytes_written"} - set(
            getattr(table, "columns", ())):
        raise ValueError(f"table lacks the columns {sorted(lost)}; pass what "
                         "ir.compare_backends returns.")
    table = table.assign(moved=table.bytes_read + table.bytes_written)
    _finite("table", table.moved.dropna())
    parts = dict(iter(table.groupby(level=0, sort=False)))
    labels = [f"{'at least ' * bool(part.moved.isna().any())}"
              f"{amount(part.moved.sum(), 'B')}, {len(part)} kernel"
              f"{'s' * (len(part) > 1)}" for part in parts.values()]
    ax = _chart(_said(parts, labels), title)
    _rows(ax, [*parts])
    fills, rows = _fills(["compiler", "library", *table.author]), []
    for y, (part, label) in enumerate(zip(parts.values(), labels,
                                          strict=True)):
        part = part.assign(end=part.moved.fillna(0).cumsum())
        rows.append(([(ax.barh(y, row.moved, left=row.end - row.moved, **fills[
            row.author])[0], row.who) for row in part.fillna(
                {"moved": 0}).itertuples()], label))
    ax.set(xlabel="bytes read and written", xlim=(0, ax.get_xlim()[1] * 1.25))
    if minimum is not None:
        _finite("minimum", [minimum])
        ax.axvline(minimum, color=_RED, linestyle="--", zorder=0)
        ax.text(minimum, 1.01, f"least possible: {amount(minimum, 'B')}",
                color=_RED, size=14, ha="center", va="bottom",
                transform=ax.get_xaxis_transform())
    _eng(ax.xaxis, "B")
    _legend(ax)
    _name(ax, rows)
    return ax.figure


@themed
def bars(labels: Sequence[str], values: Sequence[float], unit: str,
         title: str = "", xlabel: str = "") -> Figure:
    """One horizontal bar a label, each with its value in ``unit``."""
    if len(labels) != len(values):
        raise ValueError(f"labels and values differ in length: "
                         f"{len(labels)} and {len(values)}.")
    _finite("values", values)
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
    for name, points in series.items():
        if not points:
            raise ValueError(f"series {name!r} has no points.")
        _finite(f"series {name!r}", [v for pair in points for v in pair], True)
    ax = _chart("; ".join(
        f"{name}: {amount(points[0][1], unit)} at {points[0][0]:g} to "
        f"{amount(points[-1][1], unit)} at {points[-1][0]:g}"
        for name, points in series.items()), title)
    for (name, points), style in zip(series.items(), _LINES, strict=False):
        color, marker, line = style
        ax.plot(*zip(*points, strict=True), color=color, marker=marker,
                linestyle=line, label=name)
    if at is not None:
        _finite("at", [at], True)
        ax.axvline(at, color=_GREY, linestyle="--", zorder=0)
        ax.text(at, 1.01, f"{at:g}", size=14, ha="center", va="bottom",
                transform=ax.get_xaxis_transform())
    ax.set(xscale="log", yscale="log", xlabel=xlabel,
           ylabel=_UNITS.get(unit, unit))
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
    rows: dict[tuple[int, int], list[Any]] = {}
    for v in values:
        rows.setdefault((v.allocation, v.offset), []).append(v)
    apart = [allocation for allocation, _ in rows]
    _rows(ax, [
        f"allocation {at}: {amount(max(v.bytes for v in row), 'B')}"
        + f"\nfrom byte {offset:,}" * (apart.count(at) > 1)
        for (at, offset), row in rows.items()])
    fills = _fills(v.kind for v in values)
    named = [([(ax.barh(y, v.last - v.first + 1, left=v.first - 0.5,
                        **fills[v.kind])[0], v.name) for v in row], "")
             for y, row in enumerate(rows.values())]
    ax.set_xlabel("step of the schedule")
    ax.xaxis.get_major_locator().set_params(integer=True)
    _legend(ax)
    _name(ax, named)
    return ax.figure
