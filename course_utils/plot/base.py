"""What every drawing shares: theme, canvas, digest, small helpers."""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_utils import host

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OKABE_ITO = ("#000000", "#E69F00", "#56B4E9", "#009E73",
             "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PURPLE = OKABE_ITO
PALE, GREY, MONO = "#F2F2F2", "#666666", "DejaVu Sans Mono"
SIZE, DPI = (12.8, 7.2), 100  # inches; 1280 x 720 pixels
# Colour and hatch go together; dark text is readable on each.
FILLS = ((SKY, ""), (ORANGE, "//"), (GREEN, ".."), (YELLOW, "xx"),
          (PURPLE, "\\\\"), ("white", "--"))
# Lines need contrast with white: the pale colours stay out.
LINES = ((BLUE, "o", "-"), (RED, "s", "--"), (GREEN, "^", "-."),
          (BLACK, "D", ":"))
THEME = {
    "figure.facecolor": "white", "axes.facecolor": "white",
    "font.family": ["DejaVu Sans"], "font.size": 16,
    "axes.titlesize": 16, "axes.labelsize": 16, "figure.titlesize": 22,
    "xtick.labelsize": 14, "ytick.labelsize": 14, "legend.fontsize": 14,
    "lines.linewidth": 2.5, "lines.markersize": 9, "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False,
    "text.parse_math": False,  # IR is full of "$"
}


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
    """Any Figure as PNG, opaque, at the course's resolution.

    256 colours are enough for flat drawings, and a third of the bytes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image, PngImagePlugin  # matplotlib brings it

    figure.set_dpi(DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = Image.frombuffer(
        "RGBA", canvas.get_width_height(), canvas.buffer_rgba()
    ).convert("RGB").quantize(256, Image.Quantize.MEDIANCUT)
    said = PngImagePlugin.PngInfo()
    said.add_text("Description", description or "")
    image.save(buffer := io.BytesIO(), "PNG", pnginfo=said, optimize=True)
    return buffer.getvalue()


def themed(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Run ``draw`` under the course's theme, whatever the reader has set."""

    @functools.wraps(draw)
    def inner(*args: Any, **kwargs: Any) -> Any:
        style = host.need("matplotlib.style", "it draws every figure")
        with style.context(["default", THEME]):
            return draw(*args, **kwargs)

    return inner


def canvas(summary: str, title: str) -> Axes:
    """Axes over the whole figure, in pixels, y downwards."""
    ax = new(summary).add_axes((0, 0, 1, 1), xlim=(0, SIZE[0] * DPI),
                               ylim=(SIZE[1] * DPI, 0))
    ax.axis("off")
    ax.figure.suptitle(title, x=30 / 1280, y=1 - 44 / 720, weight="bold",
                       ha="left", va="center")
    return ax


def titled(summary: str, title: str) -> Figure:
    figure = new(summary, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.2, h_pad=0.2)
    figure.suptitle(title, x=0.02, ha="left", weight="bold")
    return figure


def chart(summary: str, title: str) -> Axes:
    return titled(summary, title).subplots()


def box(ax: Axes, x: float, y: float, w: float, h: float,
         face: str = PALE, edge: str = GREY) -> None:
    ax.broken_barh([(x, w)], (y, h), facecolor=face, edgecolor=edge, lw=1.5)


def arrow(ax: Axes, *path: tuple[float, float], color: str = GREY) -> None:
    """A line along the points of ``path`` with a head at its end."""
    ax.plot(*zip(*path[:-1], strict=True), color=color)
    ax.annotate("", path[-1], path[-2], arrowprops={
        "arrowstyle": "-|>", "color": color, "lw": 2.5,
        "mutation_scale": 22, "shrinkA": 0, "shrinkB": 0})


def amount(value: float, unit: str) -> str:
    """Four digits and the unit, in powers of ten: "4.194 MB"."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter(unit)(float(f"{value:.4g}"))


def sentence(names: Iterable[str], marks: Iterable[str]) -> str:
    return "; ".join(map(": ".join, zip(names, marks, strict=True)))


def eng(axis: Any, unit: str) -> None:
    """Tick labels in ``unit``, in powers of ten."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(unit))
    if axis.get_scale() == "linear":  # there is no half byte
        axis.get_major_locator().set_params(nbins=6, integer=unit == "B")


def legible(what: str, count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise ValueError(f"there are {count} {what} to draw; 1 to {most} are "
                         "legible: pass fewer.")


def name_rows(ax: Axes, names: Sequence[str]) -> None:
    """Name the horizontal rows 0, 1, ... from the top down."""
    legible("rows", len(names), 12)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)


def legend(ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    one_each = dict(zip(labels, handles, strict=True))
    ax.figure.legend(one_each.values(), one_each.keys(), ncols=len(one_each),
                     loc="outside lower center")


def mark(ax: Axes, x: float, name: str, color: str, ink: str) -> None:
    """A dashed vertical line at ``x``, its name above it."""
    ax.axvline(x, color=color, linestyle="--", zorder=0)
    ax.text(x, 1.01, name, color=ink, size=14, ha="center", va="bottom",
            transform=ax.get_xaxis_transform())


def write_excerpts(ax: Axes, h: float, most: int, sizes: Sequence[float],
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
            for row in kept), size=size, va="top", family=MONO)


def segments(ax: Axes, rows: Mapping[str, tuple[Sequence[Any], str]],
              kinds: Iterable[str] = ()) -> None:
    """Rows of segments (left, width, kind, name), each kind with its fill.

    Each name goes on its segment, or where that is too narrow, with the
    row's label behind the last; where that needs room, all is tried again.
    """
    name_rows(ax, [*rows])
    kinds = list(dict.fromkeys([*kinds, *(
        kind for parts, _ in rows.values() for *_, kind, _ in parts)]))
    for y, (parts, _) in enumerate(rows.values()):
        for left, width, kind, _ in parts:
            face, hatch = FILLS[kinds.index(kind)]
            ax.barh(y, width, 0.7, left, label=kind, facecolor=face,
                    hatch=hatch, edgecolor="black")
    legend(ax)
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
            end = max((left + width for left, width, *_ in parts), default=0)
            text = ax.text(end, y, "  " + ", ".join(beside), size=14,
                           va="center")
            share = (text.get_window_extent().width + 10) / ax.bbox.width
            high = max(high, low + (end - low) / (1 - min(share, 0.7)))


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
