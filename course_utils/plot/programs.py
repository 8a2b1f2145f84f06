"""Programs of a launch and the elements they touch; calls in a queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from course_utils.plot.base import (
    FILLS,
    canvas,
    chart,
    legend,
    legible,
    name_rows,
    themed,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from course_utils.compilers.trace import Trace
    from course_utils.kernels import Launch
    from course_utils.simulate import Queue

Share = tuple[tuple[int, ...], tuple[int, ...]]  # live lanes, and all
_DONE = {"load": "read", "store": "written", "atomic": "updated"}


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

    A program's share of a tensor is drawn as one rectangle, from the first
    to the last element it touches, and ``program``'s is marked; lanes that a
    mask switched off are hatched. Where programs share elements only
    ``program`` is drawn. Tensors have one or two dimensions.
    """
    trace = getattr(run, "trace", run)
    if trace is None:
        raise ValueError("run has no trace: launch with trace=True.")
    chosen = (*([program] if isinstance(program, int) else program), 0, 0)[:3]
    if chosen not in trace.programs:
        raise ValueError(f"program is {program!r}; the grid is {trace.grid}.")
    legible("programs", len(trace.programs), 128)
    figure, shares = canvas("", title).figure, _shares(trace)
    places = _places({key: trace.tensors[key[0]].shape for key in shares})
    figure.summary = "; ".join(
        _panel(figure, place, f"{name}: {_DONE[kind]}",
               trace.tensors[name].shape, shares[name, kind], chosen)
        for (name, kind), place in places.items())
    seen = {text: handle for ax in figure.axes for handle, text in zip(
        *ax.get_legend_handles_labels(), strict=True)}
    figure.legend(seen.values(), seen, loc="lower right", ncols=3)
    return figure


def _element(offset: int, strides: tuple[int, ...]) -> tuple[int, int]:
    """Row and column; a vector is a row."""
    at = [0, 0]
    for axis in sorted(range(len(strides)), key=lambda a: -strides[a]):
        at[axis - len(strides)], offset = divmod(int(offset), strides[axis])
    return at[0], at[1]


def _shares(trace: Trace) -> dict[tuple[str, str], dict[Any, Share]]:
    """By (tensor, kind) and program: first and last row and column."""
    found: dict[tuple[str, str], dict[Any, Share]] = {}
    for a in trace.accesses:
        (r, c), (last_r, last_c) = (
            _element(at, trace.tensors[a.tensor].strides)
            for at in (a.offsets.min(), a.offsets.max()))
        live = whole = (r, last_r, c, last_c)
        if a.lanes > len(a.offsets):
            high, wide = (1, *a.shape)[-2:]
            whole = (r, r + high - 1, c, c + wide - 1)
        mine = found.setdefault((a.tensor, a.kind), {})
        mine[a.program] = tuple(
            (min(p[0], q[0]), max(p[1], q[1]), min(p[2], q[2]),
             max(p[3], q[3])) for p, q in zip(
                 mine.get(a.program, (live, whole)), (live, whole),
                 strict=True))
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
    rows, cols = (1, *shape)[-2:]
    ax = figure.add_axes((left / 1280, 1 - (top + height) / 720,
                          width / 1280, height / 720), label=name)
    if sum(_area(live) for live, _ in shares.values()) > rows * cols:
        shares = {p: s for p, s in shares.items() if p == chosen}
    said, end, low = [], cols, rows
    for at, (live, whole) in shares.items():
        marked, number = at == chosen, ", ".join(
            map(str, at)).removesuffix(", 0, 0")
        for (r, to_r, c, to_c), label, (face, hatch) in (
                (whole, "masked lanes", FILLS[5]),
                (live, f"program {number}" if marked else "other programs",
                 FILLS[marked]))[whole == live:]:
            ax.broken_barh([(c, to_c - c + 1)], (r, to_r - r + 1), lw=1,
                           facecolor=face, hatch=hatch, edgecolor="black",
                           label=label)
        words = f"{c}-{to_c}" if rows == 1 else f"[{r}-{to_r}, {c}-{to_c}]"
        masked = _area(whole) - _area(live)
        said += [f"{number}: {words}" + f" ({masked} masked)" * bool(masked)]
        wide = (to_c - c + 1) / cols * width
        if wide > (130 if rows == 1 else 24) and height > 30:
            ax.text((c + to_c + 1) / 2, (r + to_r + 1) / 2,
                    f"program {number}\n{words}" if rows == 1 else number,
                    size=14, ha="center", va="center", bbox=marked and {
                        "fc": "white", "ec": "none", "pad": 1} or None)
        low, end = max(low, whole[1] + 1), max(end, whole[3] + 1)
    ax.set(xlim=(0, end), ylim=(low, 0), xticks=[0, cols],
           yticks=[0, rows] * (rows > 1))
    ax.broken_barh([(0, cols)], (0, rows), facecolor="none", lw=3,
                   edgecolor="black")
    ax.text(0, 1.02, name, va="bottom", transform=ax.transAxes)
    more = f" and {len(said) - 8} more" * (len(said) > 8)
    return f"{name}, program {', '.join(said[:8])}{more}"


def _area(box: tuple[int, ...]) -> int:
    return (box[1] - box[0] + 1) * (box[3] - box[2] + 1)
