"""Programs: what they execute and touch; calls in a queue."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from course_utils import host
from course_utils.kernels.trace import traced
from course_utils.plot.base import (
    FILLS,
    canvas,
    chart,
    legend,
    legible,
    name_rows,
    segments,
    sentence,
    themed,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from course_utils.kernels import Launch
    from course_utils.kernels.trace import Access, Operand, Trace
    from course_utils.simulate import Queue

Box = tuple[int, int, int, int]  # first and last row, first and last column
# The boxes a program touches, its blocks with masked lanes, number of these.
Share = tuple[list[Box], list[Box], int]
_DONE = {"load": "read", "store": "written", "atomic": "updated"}


@themed
def instructions(counts: DataFrame,
                 title: str = "Instructions that each program executes",
                 ) -> Figure:
    """How often each program executes each kind of instruction.

    ``counts`` has one row a program and one column a kind; each number is a
    segment, and each row ends in its sum.
    """
    legible("kinds of instruction", len(counts.columns), len(FILLS))
    rows, said = {}, []
    for name, row in counts.iterrows():
        total = f"{row.sum():,} in all"
        rows[name] = ([(end - n, n, kind, f"{n:,} {kind}")
                       for kind, n, end in zip(counts.columns, row,
                                               row.cumsum(), strict=True)
                       if n], total)
        said.append(", ".join(f"{n:,} {kind}" for kind, n in row.items())
                    + f", {total}")
    ax = chart(sentence(counts.index, said), title)
    ax.set_xlabel("instructions executed")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    segments(ax, rows, counts.columns)
    return ax.figure


@themed
def timeline(queue: Queue, upto: float = 0,
             title: str = "One host thread, one device (simulated)") -> Figure:
    """The calls of a simulated queue: a host row and a device row, in us.

    ``upto`` us are drawn at least, so that several share a scale.
    """
    legible("calls", len(queue.calls), 60)
    upto = max(queue.total_us, upto)
    rows = {"host": ("issues a call", f"returned after {queue.returned_us:g}"),
            "device": ("runs a kernel", f"finished after {queue.total_us:g}")}
    ax = chart(f"{len(queue.calls)} kernels: the host {rows['host'][1]} us, "
               f"the device {rows['device'][1]} us", title)
    name_rows(ax, [*rows])
    for y, (side, (does, said)) in enumerate(rows.items()):
        for i, call in enumerate(queue.calls):
            a, b = getattr(call, f"{side}_start"), getattr(call, f"{side}_end")
            ax.barh(y, b - a, 0.7, a, label=does, facecolor=FILLS[y][0],
                    hatch=FILLS[y][1], edgecolor="black")
            if b - a > upto / 25:
                ax.text((a + b) / 2, y, i, size=14, ha="center", va="center",
                        bbox={"fc": "white", "ec": "none", "pad": 1})
        ax.text(b, y, f"  {said} us", size=14, va="center")
    legend(ax)
    ax.set(xlim=(0, 1.3 * upto), xlabel="microseconds")
    return ax.figure


@themed
def programs(run: Launch | Trace, program: int | tuple[int, ...] = 0,
             title: str = "Which program touches which elements") -> Figure:
    """What the programs of a traced launch read and write, per tensor.

    A program's share of a tensor is the elements it touches; ``program``'s
    is marked. Where programs share elements only ``program`` is drawn. Lanes
    that a mask switched off are counted; next to neighbours in a vector they
    are hatched. Raises ValueError for tensors of more than two dimensions and
    for those of which several elements are one in memory.
    """
    trace = traced(run)
    chosen = trace.program(program)
    legible("programs", len(trace.programs), 128)
    accesses: dict[tuple[str, str], dict[Any, list[Access]]] = {}
    for a in trace.accesses:
        accesses.setdefault((a.tensor, a.kind), {}).setdefault(
            a.program, []).append(a)
    legible("tensors read or written", len(accesses), 5)
    figure = canvas("", title).figure
    places = _places({key: trace.tensors[key[0]].shape for key in accesses})
    figure.summary = "; ".join(
        _panel(figure, place, f"{name}: {_DONE[kind]}",
               trace.tensors[name].shape, _shares(
                   name, trace.tensors[name], accesses[name, kind], chosen),
               chosen)
        for (name, kind), place in places.items())
    seen = {text: handle for ax in figure.axes for handle, text in zip(
        *ax.get_legend_handles_labels(), strict=True)}
    figure.legend(seen.values(), seen, loc="lower right", ncols=3)
    return figure


def _shares(name: str, tensor: Operand, accesses: dict[Any, list[Access]],
            chosen: Any) -> dict[Any, Share]:
    """Of each program, or of ``chosen`` only where programs share elements."""
    np = host.need("numpy", "a trace is arrays of offsets")
    places, shape = tensor.places(), tensor.shape
    if len(shape) > 2 or (places >= 0).sum() < math.prod(shape):
        raise ValueError(f"{name} has shape {shape}, strides {tensor.strides}"
                         ": programs draws one or two dimensions, each "
                         "element in a place of its own.")
    found, shared = {}, False
    seen = np.zeros((1, 1, *shape)[-2:], bool)
    for program, made in accesses.items():
        touched, blocks = np.zeros_like(seen), []
        for a in made:
            elements = places[a.offsets]
            touched.flat[elements] = True
            if len(seen) == 1 and (np.diff(elements) == 1).all() and (
                    a.lanes > elements.size):
                start = int(elements[0]) - a.lane
                blocks.append((0, 0, start, start + a.lanes - 1))
        shared = shared or bool((touched & seen).any())
        seen |= touched
        found[program] = _boxes(touched), blocks, sum(
            a.lanes - a.pattern.size for a in made)
    return {p: s for p, s in found.items() if p == chosen or not shared}


def _boxes(touched: Any) -> list[Box]:
    """Rectangles that cover what is True, from the top left."""
    np = host.need("numpy", "a trace is arrays of offsets")
    found = []
    tops = [0, *np.flatnonzero((touched[1:] != touched[:-1]).any(1)) + 1]
    for top, end in zip(tops, [*tops[1:], len(touched)], strict=True):
        edges = np.flatnonzero(np.diff(
            touched[top].astype(int), prepend=0, append=0)).tolist()
        found += [(int(top), int(end) - 1, c, to - 1)
                  for c, to in zip(edges[::2], edges[1::2], strict=True)]
    return found


def _places(shapes: dict[Any, tuple[int, ...]]) -> dict[Any, tuple]:
    """Left, top, width and height of each tensor's panel, in pixels.

    A product x @ w = y is laid out as it is computed: y below w and right of
    x, a vector above w. Anything else stands in rows.
    """
    deep = [name for name in shapes if len(shapes[name]) == 2]
    flat = [name for name in shapes if name not in deep]
    if len(deep) == 3 and len(flat) < 2:
        (m, k), (k_too, n), y = (shapes[name] for name in deep)
        if k == k_too and tuple(y) == (m, n):
            top = 196 if flat else 110
            s = (570 - top) / (k + m)  # pixels an element, down; t across
            t = min(1050 / (k + n), 2 * s)
            left, low = k * t + 180, top + k * s + 60
            return {deep[0]: (90, low, k * t, m * s),
                    **{name: (left, 110, n * t, 26) for name in flat},
                    deep[1]: (left, top, n * t, k * s),
                    deep[2]: (left, low, n * t, m * s)}
    step = 560 / len(shapes)
    return {name: (90, 120 + i * step, 1130, min(90, step - 80))
            for i, name in enumerate(shapes)}


def _panel(figure: Figure, place: tuple, name: str, shape: tuple[int, ...],
           shares: dict[Any, Share], chosen: tuple[int, ...]) -> str:
    """Draw one tensor, axes in elements; what is drawn, in words."""
    left, top, width, height = place
    rows, cols = (1, 1, *shape)[-2:]
    ax = figure.add_axes((left / 1280, 1 - (top + height) / 720,
                          width / 1280, height / 720), label=name)
    legible("pieces", sum(len(s[0]) for s in shares.values()) or 1, 2000)
    said, start, end = [], 0, cols
    for at, (boxes, blocks, masked) in shares.items():
        marked, number = at == chosen, _number(at)
        r, to_r, c, to_c = (f(side) for f, side in zip(
            (min, max, min, max), zip(*boxes, strict=True), strict=True))
        words = f"{c}-{to_c}" if rows == 1 else f"[{r}-{to_r}, {c}-{to_c}]"
        if len(boxes) > 1:
            words = f"{sum(map(_area, boxes))} of {words}"
        said += [f"{number}: {words}" + f" ({masked} masked)" * bool(masked)]
        for shown, label, (face, hatch) in (
                (blocks, "masked lanes", FILLS[5]),
                (boxes, f"program {number}" if marked else "other programs",
                 FILLS[marked])):
            for r, to_r, c, to_c in shown:
                ax.broken_barh([(c, to_c - c + 1)], (r, to_r - r + 1), lw=1,
                               facecolor=face, hatch=hatch, edgecolor="black",
                               label=label)
                start, end = min(start, c), max(end, to_c + 1)
        wide = (to_c - c + 1) / cols * width
        if len(boxes) == 1 and height > 30 and wide > (
                130 if rows == 1 else 24):
            ax.text((c + to_c + 1) / 2, (r + to_r + 1) / 2,
                    f"program {number}\n{words}" if rows == 1 else number,
                    size=14, ha="center", va="center", bbox=marked and {
                        "fc": "white", "ec": "none", "pad": 1} or None)
    ax.set(xlim=(start, end), ylim=(rows, 0), xticks=[0, cols],
           yticks=[0, rows] * (rows > 1))
    ax.broken_barh([(0, cols)], (0, rows), facecolor="none", lw=3,
                   edgecolor="black")
    ax.text(0, 1.02, name, va="bottom", transform=ax.transAxes)
    more = f" and {len(said) - 8} more" * (len(said) > 8)
    return (f"{name}, program "
            f"{', '.join(said[:8]) or f'{_number(chosen)}: nothing'}{more}")


def _area(box: Box) -> int:
    return (box[1] - box[0] + 1) * (box[3] - box[2] + 1)


def _number(program: tuple[int, ...]) -> str:
    return ", ".join(map(str, program)).removesuffix(", 0, 0")
