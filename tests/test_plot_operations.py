"""plot.shares and plot.products: the data is read back from the axes."""

import math
from types import SimpleNamespace

import pytest

from course_utils import plot

pytest.importorskip("matplotlib")

ROWS = {"Y = X W": "mk,kn->mn", "dW = Xᵀ dY": "mk,mn->kn",
        "dX = dY Wᵀ": "mn,kn->mk"}
SIZES = {"m": 512, "k": 1024, "n": 2048}


def op(matmul, flops, size):
    return SimpleNamespace(matmul=matmul, flops=flops, bytes=size)


COST = SimpleNamespace(ops=[
    op(900, 900, 10), op(0, 60, 20), op(0, 30, 30), op(0, 10, 40)])


def test_shares_are_drawn_as_counted():
    figure = plot.shares(COST)
    bars = figure.axes[0].patches
    drawn = {}
    for bar in bars:
        row = round(bar.get_y() + bar.get_height() / 2)
        drawn.setdefault(row, []).append(round(bar.get_width(), 6))
    assert drawn == {0: [90, 10], 1: [10, 90], 2: [25, 75]}
    assert figure.summary == ("FLOPs: 90.0 % products; bytes: 10.0 % "
                              "products; ops: 25.0 % products")
    assert bars[0].get_hatch() != bars[1].get_hatch()  # not colour alone


def test_shares_of_a_real_count_add_up():
    jax = pytest.importorskip("jax")
    from course_utils import flops

    cost = flops.count(lambda x, w: jax.nn.relu(x @ w), *(
        jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 16), (16, 4))
    ))
    widths = [bar.get_width() for bar in plot.shares(cost).axes[0].patches]
    assert [a + b for a, b in zip(widths[::2], widths[1::2], strict=True)] == (
        pytest.approx([100, 100, 100]))
    assert widths[0] == pytest.approx(100 * 1024 / (1024 + 32))


def rectangles(ax):
    """(width, height) of each matrix, row by row."""
    found = []
    for group in ax.collections:
        for path in group.get_paths():
            (left, top), (right, bottom) = path.get_extents().get_points()
            found.append((right - left, bottom - top))
    return found


def test_matrices_are_to_one_scale():
    drawn = rectangles(plot.products(ROWS, **SIZES).axes[0])
    names = [name for row in ROWS.values()
             for name in row.replace("->", ",").split(",")]
    scale = {round(size / SIZES[letter], 9)
             for box, name in zip(drawn, names, strict=True)
             for size, letter in zip(box, name[::-1], strict=True)}
    assert len(drawn) == 9 and len(scale) == 1


def test_the_summed_edge_is_the_thick_one():
    figure = plot.products(ROWS, **SIZES)
    thick = [line for line in figure.axes[0].lines
             if line.get_linewidth() > 5]
    lengths = [math.dist(*line.get_xydata()) for line in thick]
    unit = max(lengths) / SIZES["n"]
    assert [round(x / unit) for x in lengths] == [
        1024, 1024, 512, 512, 2048, 2048]
    bold = [text.get_text() for text in figure.axes[0].texts
            if text.get_weight() == "bold" and "=" in text.get_text()]
    assert [t for t in bold if t not in ROWS] == [
        "k = 1024"] * 2 + ["m = 512"] * 2 + ["n = 2048"] * 2
    assert "dW = Xᵀ dY: sums over m, 2.147 GFLOP" in figure.summary


@pytest.mark.parametrize("draw", [
    lambda: plot.shares(COST), lambda: plot.products(ROWS, **SIZES)])
def test_what_is_written_is_inside_and_legible(draw):
    figure = draw()
    figure.draw_without_rendering()
    width, height = figure.bbox.size
    for text in [*figure.texts, *figure.axes[0].texts]:
        where = text.get_window_extent()
        assert 0 <= where.x0 and where.x1 <= width, text
        assert 0 <= where.y0 and where.y1 <= height, text
        assert text.get_size() >= 14


def test_each_product_counts_its_own_letters():
    """And is drawn no smaller for a letter that none of them has."""
    rows = {"A = X W": "mk, kn -> mn", "B = U V": "pq,qr->pr"}
    figure = plot.products(rows, m=2, k=3, n=4, p=10, q=10, r=10, z=10**6)
    assert figure.summary == ("A = X W: sums over k, 48 FLOP; "
                              "B = U V: sums over q, 2 kFLOP")
    said = [text.get_text() for text in figure.axes[0].texts]
    assert "2 · 2 · 3 · 4\n= 48 FLOP" in said
    assert "2 · 10 · 10 · 10\n= 2 kFLOP" in said
    assert max(max(box) for box in rectangles(figure.axes[0])) == (
        pytest.approx(200))


@pytest.mark.parametrize("ops, rows", [
    ([op(0, 0, 20)], "bytes: 0.0 % products; ops: 0.0 % products"),
    ([op(8, 8, 0)], "FLOPs: 100.0 % products; ops: 100.0 % products")])
def test_what_counts_nothing_is_left_out(ops, rows):
    assert plot.shares(SimpleNamespace(ops=ops)).summary == rows


@pytest.mark.parametrize("formula, letters", [
    ("y = X v", "mk,k->m"), ("Y = X W", "bmk,bkn->bmn"), ("Y = X W", "mk,kn"),
    ("Y = X W", "mz,zn->mn"), ("Y = X", "mk->km"), ("X W", "mk,kn->mn"),
    ("Y = X W", "mm,mk->mk"), ("Y = X W", "mk,mk->mk"), ("Y = X W", ""),
    ("Y = X W", "mm,kk->nn"), ("Y = X W", "mk,mk->kn")])
def test_what_is_no_product_of_two_matrices_gets_a_sentence(formula, letters):
    with pytest.raises(ValueError, match="give a product of two") as caught:
        plot.products({formula: letters}, **SIZES)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0, -1, 2.5, "8", True])
def test_a_size_that_is_none_is_named(size):
    with pytest.raises(ValueError, match="k is .*give a whole number"):
        plot.products(ROWS, **SIZES | {"k": size})


def test_no_product_and_too_many_are_refused():
    with pytest.raises(ValueError, match="0 rows to draw"):
        plot.shares(SimpleNamespace(ops=[]))
    with pytest.raises(ValueError, match="products to draw"):
        plot.products({}, m=1)
    with pytest.raises(ValueError, match="4 products"):
        plot.products({str(n): "mk,kn->mn" for n in range(4)}, **SIZES)
