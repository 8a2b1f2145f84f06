"""Programs and queues drawn: what is on the axes is what was traced."""

import itertools
from dataclasses import replace

import pytest

from course_utils import kernels, plot, simulate
from course_utils.kernels.trace import Access, Operand, Trace
from tests.test_plot import texts

np = pytest.importorskip("numpy")
pd = pytest.importorskip("pandas")
pytest.importorskip("matplotlib")


def access(program, kind, tensor, shape, offsets, itemsize=4):
    return Access((program, 0, 0), kind, tensor, shape, 0,
                  np.asarray(offsets, np.int64).ravel(), itemsize)


def add(n=250, block=64):
    """The trace of an addition, written down by hand."""
    grid = -(-n // block)
    return Trace("add", tuple(
        access(p, kind, tensor, (block,), range(p * block,
                                                min(n, (p + 1) * block)))
        for p in range(grid)
        for tensor, kind in (("x", "load"), ("out", "store"))),
        {name: Operand((n,), (1,), "float32", 4) for name in ("x", "out")},
        (grid,))


def product(m=6, k=4, n=10, tm=4, tn=4):
    """Of y = x @ w + b in tiles; x's rows are stored one after another, w's
    columns."""
    tensors = {"x": Operand((m, k), (k, 1), "float32", 4),
               "w": Operand((k, n), (1, k), "float32", 4),
               "b": Operand((n,), (1,), "float32", 4),
               "y": Operand((m, n), (n, 1), "float32", 4)}
    found, high, wide = [], -(-m // tm), -(-n // tn)
    for p in range(high * wide):
        rows = np.arange(p % high * tm, min(m, (p % high + 1) * tm))
        cols = np.arange(p // high * tn, min(n, (p // high + 1) * tn))
        half = np.arange(k // 2)
        for i in (half, half + k // 2):  # two steps along k
            found += [access(p, "load", "x", (tm, k // 2),
                             rows[:, None] * k + i),
                      access(p, "load", "w", (k // 2, tn),
                             i[:, None] + cols * k)]
        found += [access(p, "load", "b", (tn,), cols),
                  access(p, "store", "y", (tm, tn), rows[:, None] * n + cols)]
    return Trace("product", tuple(found), tensors, (high * wide,))


def rectangles(figure):
    """{panel: {label: [(left, right, top, bottom)]}}, in elements."""
    found = {}
    for ax in figure.axes:
        for group in ax.collections:
            for path in group.get_paths():
                (left, top), (right, bottom) = (
                    f(path.vertices, axis=0) for f in (np.min, np.max))
                found.setdefault(ax.get_label(), {}).setdefault(
                    group.get_label(), []).append((left, right, top, bottom))
    return found


def test_the_blocks_of_a_vector_and_the_partial_one():
    drawn = rectangles(plot.programs(add(), program=3))
    assert set(drawn) - {""} == {"x: read", "out: written"}
    for panel in ("x: read", "out: written"):
        boxes = drawn[panel]
        assert boxes["other programs"] == [
            (0, 64, 0, 1), (64, 128, 0, 1), (128, 192, 0, 1)]
        assert boxes["program 3"] == [(192, 250, 0, 1)]
        assert boxes["masked lanes"] == [(192, 256, 0, 1)]
    whole = plot.programs(add(256), program=(1, 0))
    assert "masked lanes" not in rectangles(whole)["x: read"]
    assert "2: 128-191, 3: 192-255" in whole.summary
    assert "masked" not in whole.summary


def test_the_tiles_of_a_product_and_what_one_of_them_reads():
    figure = plot.programs(product(), program=5)
    drawn = rectangles(figure)
    assert drawn["y: written"]["program 5"] == [(8, 10, 4, 6)]
    assert drawn["y: written"]["other programs"] == [
        (0, 4, 0, 4), (0, 4, 4, 6), (4, 8, 0, 4), (4, 8, 4, 6), (8, 10, 0, 4)]
    for panel, box in (("x: read", (0, 4, 4, 6)), ("b: read", (8, 10, 0, 1)),
                       ("w: read", (8, 10, 0, 4))):
        assert drawn[panel]["program 5"] == [box]
        assert "other programs" not in drawn[panel]  # they read the same
    assert "5: [4-5, 8-9] (12 masked)" in figure.summary
    spots = {ax.get_label(): ax.get_position() for ax in figure.axes}
    x, w, y = (spots[name] for name in ("x: read", "w: read", "y: written"))
    assert (x.y0, x.y1) == (y.y0, y.y1) and (w.x0, w.x1) == (y.x0, y.x1)
    assert x.x1 < y.x0 and w.y0 > y.y1


def drawn_elements(figure):
    """{panel: {label: elements drawn, one of (row, column) each}}."""
    return {panel: {label: sorted(
        (row, column) for left, right, top, bottom in boxes
        for row in range(int(top), int(bottom))
        for column in range(int(left), int(right)))
        for label, boxes in by.items()} for panel, by in rectangles(
            figure).items()}


@pytest.mark.parametrize("shape, shares", [
    ((10, 10), [range(64), range(64, 100)]),
    ((10, 10), [range(0, 100, 7), range(1, 100, 7)]),
    ((100,), [range(0, 100, 4), range(1, 100, 4)]),
    ((1, 100), [range(0, 100, 3), range(50, 51)]),
    ((4, 3), [[0, 2, 4], [1, 3, 11]]),
])
def test_what_is_drawn_is_what_each_program_touched(shape, shares):
    t = Operand(shape, tuple(int(np.prod(shape[i + 1:]))
                             for i in range(len(shape))), "float32", 4)
    seen = Trace("f", tuple(access(p, "load", "x", (128,), [*share])
                            for p, share in enumerate(shares)), {"x": t}, (2,))
    figure = plot.programs(seen, program=1)
    drawn = drawn_elements(figure)["x: read"]
    for label, share in (("other programs", shares[0]),
                         ("program 1", shares[1])):
        assert drawn[label] == [divmod(at, shape[-1]) for at in share]
    for p, share in enumerate(shares):
        assert f"{p}: " in figure.summary
        assert f"({128 - len(share)} masked)" in figure.summary
    assert len(rectangles(figure)["x: read"]["program 1"]) < 101


def test_masked_lanes_are_hatched_where_they_are():
    x = Operand((60,), (1,), "float32", 4)
    first = access(0, "load", "x", (64,), range(60))
    for lane, box in ((0, (0, 64)), (4, (-4, 60)), (1, (-1, 63))):
        seen = Trace("f", (replace(first, lane=lane),), {"x": x}, (1,))
        figure = plot.programs(seen)
        assert rectangles(figure)["x: read"]["masked lanes"] == [(*box, 0, 1)]
        [ax] = [ax for ax in figure.axes if ax.get_label() == "x: read"]
        assert ax.get_xlim() == (min(box[0], 0), max(box[1], 60))
    gaps = access(0, "load", "x", (64,), range(0, 60, 2))
    seen = Trace("f", (gaps,), {"x": x}, (1,))
    assert "masked lanes" not in rectangles(plot.programs(seen))["x: read"]


def test_where_programs_share_a_few_elements_only_one_is_drawn():
    x = Operand((1000,), (1,), "float32", 4)
    seen = Trace("f", tuple(access(p, "load", "x", (10,), range(
        9 * p, 9 * p + 10)) for p in range(3)), {"x": x}, (4,))
    assert [*rectangles(plot.programs(seen, 1))["x: read"]][0] == "program 1"
    assert "other programs" not in rectangles(plot.programs(seen))["x: read"]
    assert "program 3: nothing" in plot.programs(seen, 3).summary


COUNTS = pd.DataFrame(
    [[4096, 8192, 8192, 1024], [1024, 1024, 512, 0]], ["v5e", "a long name"],
    ["multiply", "take out", "add", "maximum"])
DRAWN = {
    "instructions": lambda: plot.instructions(COUNTS),
    "vector": lambda: plot.programs(add(), program=3),
    "many": lambda: plot.programs(add(4096, 64)),
    "product": lambda: plot.programs(product(), program=5),
    "every fourth": lambda: plot.programs(Trace("f", tuple(
        access(p, "load", "x", (64,), range(p, 250, 4)) for p in range(4)),
        {"x": Operand((250,), (1,), "float32", 4)}, (4,))),
    "running": lambda: plot.programs(product(512, 1024, 2048, 128, 128), 9),
    "hosts": lambda: plot.timeline(simulate.queue(10, 20, 8)),
    "device": lambda: plot.timeline(simulate.queue(20, 10, 8)),
    "narrow": lambda: plot.timeline(simulate.queue(1, 40, 60, sync_every=3)),
}


@pytest.mark.parametrize("name", DRAWN)
def test_legible(name, monkeypatch):
    figure = DRAWN[name]()
    written, page = texts(figure, monkeypatch), figure.bbox
    assert len(written) > 3
    for text, box in written.items():
        assert text.get_size() >= 14, text
        assert box.x0 >= 0 and box.x1 <= page.x1, text
        assert box.y0 >= 0 and box.y1 <= page.y1, text
    for (a, box_a), (b, box_b) in itertools.combinations(written.items(), 2):
        assert not box_a.overlaps(box_b), (a, b)


def test_instructions_are_drawn_one_after_another_and_summed():
    figure = plot.instructions(COUNTS)
    ax = figure.axes[0]
    for y, (_, row) in enumerate(COUNTS.iterrows()):
        spans = [(p.get_x(), p.get_width()) for p in ax.patches
                 if round(p.get_y() + 0.35) == y]
        assert spans == [(row.iloc[:i].sum(), n)
                         for i, n in enumerate(row) if n]
    said = " ".join(text.get_text() for text in ax.texts)
    assert "21,504 in all" in said and "2,560 in all" in said
    assert "512 add" in said and "0 maximum" not in said
    assert "v5e: 4,096 multiply, 8,192 take out" in figure.summary
    with pytest.raises(ValueError, match="7 kinds of instruction"):
        plot.instructions(pd.DataFrame([range(1, 8)]))


def test_a_timeline_holds_the_simulated_times():
    run = simulate.queue(10, 25, 5, sync_every=2)
    ax = plot.timeline(run).axes[0]
    spans = {side: [(p.get_x(), p.get_x() + p.get_width())
                    for p in ax.patches if round(p.get_y() + 0.35) == y]
             for y, side in enumerate(("host", "device"))}
    assert spans["host"] == [(c.host_start, c.host_end) for c in run.calls]
    assert spans["device"] == [(c.device_start, c.device_end)
                               for c in run.calls]
    said = [text.get_text().strip() for text in ax.texts]
    assert f"finished after {run.total_us} us" in said
    assert f"returned after {run.returned_us} us" in said


def test_bad_input_is_named():
    launch = kernels.Launch("add", None, "gpu", 0.1, (4,))
    with pytest.raises(ValueError, match="trace=True"):
        plot.programs(launch)
    with pytest.raises(ValueError, match=r"program 4 is not of the grid \(4"):
        plot.programs(add(), program=4)
    with pytest.raises(ValueError, match="129 programs"):
        plot.programs(add(129 * 64))
    for operand, words in (
            (Operand((2, 3, 4), (12, 4, 1), "float32", 4), "one or two dim"),
            (Operand((8,), (0,), "float32", 4), "a place of its own"),
            (Operand((4, 4), (1, 1), "float32", 4), "a place of its own")):
        seen = Trace("f", (access(0, "load", "x", (1,), [0]),),
                     {"x": operand}, (1,))
        with pytest.raises(ValueError, match=words):
            plot.programs(seen)
    scalar = Trace("f", (access(0, "store", "x", (1,), [0]),),
                   {"x": Operand((), (), "float32", 4)}, (1,))
    assert rectangles(plot.programs(scalar))["x: written"]["program 0"] == [
        (0, 1, 0, 1)]
    with pytest.raises(ValueError, match="0 tensors read or written"):
        plot.programs(Trace("f", (), {}, (1,)))
    with pytest.raises(ValueError, match="5000 pieces"):
        plot.programs(Trace("f", (access(0, "load", "x", (5000,), range(
            0, 10000, 2)),), {"x": Operand((10000,), (1,), "f", 4)}, (1,)))
    with pytest.raises(ValueError, match="61 calls"):
        plot.timeline(simulate.queue(1, 1, 61))


def test_a_real_launch_is_drawn():
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    x = torch.ones(250, device=kernels.device())
    done = kernels.launch(kernels.vector_add, 4, x, x.clone(),
                          torch.empty_like(x), 250, BLOCK_SIZE=64, trace=True)
    drawn = rectangles(plot.programs(done, program=3))
    assert drawn["output_ptr: written"]["program 3"] == [(192, 250, 0, 1)]
    assert done.difference(x + 1) == 0.0
    assert done.difference(np.full(250, 2.5)) == 0.5
    not_run = kernels.Launch("add", None, "recorded", 0.0, (4,))
    assert not_run.difference(x) == "not run here"
