"""Traffic and roofline drawings: data read back, every text legible."""

import math

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from course_utils import chips, memory, plot  # noqa: E402
from tests.test_memory import trace  # noqa: E402
from tests.test_plot import texts  # noqa: E402

NAMES = ("x_ptr", "w_ptr", "b_ptr", "y_ptr")


def example(schedule="waves", **options):
    rows = [(p, "load", name, list(range(start, start + 4096)))
            for p in range(4) for name in NAMES[:2]
            for start in range(0, 4096 * (4 if name == "w_ptr" else 1), 4096)]
    rows += [(p, "load", "b_ptr", [0, 1, 2]) for p in range(4)]
    rows += [(p, "store", "y_ptr", list(range(2048 * p, 2048 * p + 2048)))
             for p in range(4)]
    return memory.traffic(trace(rows, dict.fromkeys(NAMES, 16384), 4),
                          schedule=schedule, **options)


def points(count=3):
    return {f"a kernel of some name {n}": (10.0 ** (n + 8), 1e8)
            for n in range(count)}


DRAWN = {
    "traffic": lambda: plot.traffic(example()),
    "tiny": lambda: plot.traffic(example("one by one", l2_bytes=8192)),
    "roofline": lambda: plot.roofline("h100", points()),
    "roofline of six": lambda: plot.roofline("b200", points(6)),
    "roofs": lambda: plot.roofline("h100", {
        "fp32": memory.roofline("h100", "fp32", 1e9, 1e7),
        "bf16": memory.roofline("h100", "bf16", 1e9, 1e7)}),
    "far left": lambda: plot.roofline("t4", {"add": (1, 12)}, "fp32"),
    "far right": lambda: plot.roofline("tpu-v5e", {"product": (1e5, 1)}),
}


@pytest.mark.parametrize("name", DRAWN)
def test_legible(name, monkeypatch):
    figure = DRAWN[name]()
    assert figure.get_size_inches().tolist() == [12.8, 7.2]
    page = figure.bbox
    written = {text: box for text, box in texts(figure, monkeypatch).items()
               if box.width > 1}
    for text, box in written.items():
        assert box.x0 >= 0 and box.x1 <= page.x1, text
        assert box.y0 >= 0 and box.y1 <= page.y1, text
        assert text.get_size() >= 14, text
    for a, box in written.items():
        for b, other in written.items():
            assert a is b or not box.overlaps(other), (a, b)
    one, other = DRAWN[name](), DRAWN[name]()
    assert plot.png(one) == plot.png(other)
    assert repr(one) == repr(other) == repr(DRAWN[name]())


@pytest.mark.parametrize("t", [
    example(), example("one by one", l2_bytes=8192)])
def test_arrows_are_as_thick_as_their_bytes(t):
    [ax] = plot.traffic(t).axes
    said = [text.get_text() for text in ax.texts]
    arrows = {}
    for patch in ax.patches:
        xs, ys = np.unique(patch.get_xy().round(6), axis=0).T
        right = sum(xs == xs.max()) == 1  # a tip, not a tail
        tail = ys[xs == (xs.min() if right else xs.max())]
        level = "HBM" if xs.max() < 640 else "L2"
        arrows.setdefault(round(ys.mean() / 20), {})[level] = right, np.ptp(
            tail)
    assert len(arrows) == 4
    most = max(max(m) for m in t.moved.values())
    whole = max(thick for row in arrows.values() for _, thick in row.values())
    for name, (_, row) in zip(NAMES, sorted(arrows.items()), strict=True):
        for level, (right, thick) in row.items():
            read, written = t.moved[level, name]
            assert right == (name != "y_ptr") == (read > 0)
            assert thick == pytest.approx(
                max(2, whole * (read + written) / most))
    for (_, name), m in t.moved.items():
        assert f"{name}  {sum(m) / 1e6:.3g} MB" in said
    assert f"read {t.read('HBM') / 1e6:.3g} MB" in " ".join(said)
    assert any(f"SMs read {t.reuse:.3g} bytes" in s for s in said)
    assert plot.amount(t.cache_bytes, "B") in said and "132 of them" in said


def test_the_roofline_is_the_chips():
    c = chips.get("h100")
    shown = points() | {"fp32": memory.roofline("h100", "fp32", 5e9, 1e7)}
    [ax] = plot.roofline("h100", shown).axes
    roofs = [line.get_xydata() for line in ax.lines
             if len(line.get_xdata()) == 3]
    assert [tuple(roof[1]) for roof in roofs] == [
        (c.ridge(d), c.peak(d)) for d in ("bf16", "fp32")]
    for (x0, y0), (x1, y1), (_, y2) in roofs:
        assert y0 / x0 == pytest.approx(c.hbm_bandwidth)
        assert y1 / x1 == pytest.approx(c.hbm_bandwidth) and y2 == y1
    [legend] = ax.figure.legends
    dots = dict(zip((t.get_text().rpartition(": ")[0]
                     for t in legend.get_texts()),
                    (line.get_xydata()[0] for line in ax.lines
                     if len(line.get_xdata()) == 1), strict=True))
    for name, p in shown.items():
        if not isinstance(p, memory.Point):
            p = memory.roofline("h100", "bf16", *p)
        assert tuple(dots[name]) == (p.intensity, p.flops_per_second)
        peak = c.peak(p.dtype)
        assert dots[name][1] == pytest.approx(min(
            peak, p.intensity * c.hbm_bandwidth))
    assert ax.get_xscale() == ax.get_yscale() == "log"
    said = [text.get_text() for text in ax.texts]
    assert "bf16 peak 989.4 TFLOP/s" in said and "HBM3 3.35 TB/s" in said
    assert f"ridge {c.ridge('bf16'):.4g}" in said
    left, right = (next(t.get_position()[0] for t in ax.texts
                        if t.get_text() == side) for side in
                   ("memory-bound", "compute-bound"))
    assert left < c.ridge("fp32") < c.ridge("bf16") < right
    marks = {(line.get_marker(), line.get_color()) for line in ax.lines
             if len(line.get_xdata()) == 1}
    assert len({marker for marker, _ in marks}) == len(shown)


def test_one_peak_has_one_ceiling_and_every_point_its_name():
    shown = {name: memory.roofline("h100", dtype, 1e9, 1e7 * n)
             for n, (name, dtype) in enumerate({
                 "_first": "bf16", "__": np.dtype("float16"),
                 "$x$": "bfloat16", "d": "bf16", "": "fp32"}.items(), 1)}
    figure = plot.roofline("h100", shown)
    [ax] = figure.axes
    assert len([line for line in ax.lines if len(line.get_xdata()) == 3]) == 2
    peaks = [t.get_text() for t in ax.texts if "peak" in t.get_text()]
    assert [peak.partition(" peak ")[0] for peak in peaks] == [
        "bf16, float16, bfloat16", "fp32"]
    [legend] = figure.legends
    assert [t.get_text().rpartition(": ")[0] for t in legend.get_texts()] == [
        *shown]
    markers = [h.get_marker() for h in legend.legend_handles]
    dots = [line for line in ax.lines if len(line.get_xdata()) == 1]
    assert markers == [line.get_marker() for line in dots]


def test_what_cannot_be_drawn_is_said():
    other = memory.roofline("a100", "bf16", 1, 1)
    with pytest.raises(ValueError, match="a is of a100-80, and this is"):
        plot.roofline("h100", {"a": other})
    with pytest.raises(ValueError, match="7 points to draw"):
        plot.roofline("h100", points(7))
    many = trace([(0, "load", name, [0]) for name in "abcdefgh"],
                 dict.fromkeys("abcdefgh", 1), 1)
    with pytest.raises(ValueError, match="8 tensors read or written"):
        plot.traffic(memory.traffic(many))
    assert math.isinf(memory.traffic(trace(
        [(0, "store", "x", [0])], {"x": 1}, 1)).reuse)
