"""The drawn chip: counts and areas are read back from the axes."""

import itertools
import math

import pytest

from course_utils import chips, plot
from tests.test_plot import texts

pytest.importorskip("matplotlib")

GPUS = ["h100", "h100-pcie", "b200", "a100", "t4", "v100", "l4"]


def boxes(ax):
    """(x, y, width, height, hatch) of every box drawn as a bar."""
    return [(*bar.get_xy(), bar.get_width(), bar.get_height(),
             bar.get_hatch() or "") for bar in ax.patches]


@pytest.mark.parametrize("name", GPUS)
def test_sms_lit_and_off_are_the_tables(name):
    c = chips.get(name)
    ax = plot.chip(name).axes[0]
    die = [b for b in boxes(ax) if b[0] < 670 and b[2] == pytest.approx(b[3])]
    off = [b for b in die if b[4]]
    assert len(die) == c.full_die_sm_count
    assert len(die) - len(off) == c.sm_count
    last = boxes(ax)[c.full_die_sm_count]
    inside = (c.register_file_bytes + c.l1_smem_bytes
              + (c.tmem_bytes if name == "b200" else 0))
    ratio = last[2] * last[3] / (die[0][2] * die[0][3])
    assert ratio == pytest.approx(c.l2_bytes / inside)  # to scale


def test_an_h100_sm_has_128_64_64_lanes_and_4_tensor_cores():
    figure = plot.chip("h100")
    hatches = [b[4] for b in boxes(figure.axes[0]) if b[0] > 670]
    assert hatches.count("//") == 64 and hatches.count("..") == 64
    assert hatches.count("") == 128 + 4 * 3 + 1  # and what each part has
    for said in ("132 of 144", "16,384 registers", "1 tensor core",
                 "L1/SMEM, 256 KiB", "L2 of 50 MiB"):
        assert said in figure.summary
    pages = 80e9 / 2**19 * 32**2 / (1280 * 720)
    assert f"{pages:.0f} pages" in figure.axes[0].texts[1].get_text()


@pytest.mark.parametrize("name", chips.names())
def test_hierarchy_is_the_tables(name):
    c = chips.get(name)
    figure = plot.hierarchy(c)
    held, read = figure.axes
    for ax, wanted in ((held, [n.bytes * n.units for n in c.levels()]),
                       (read, [n.bandwidth for n in c.levels()])):
        assert ax.get_xscale() == "log"
        for bar, value in zip(ax.patches, wanted, strict=True):
            end = bar.get_x() + bar.get_width()
            assert end == pytest.approx(value or bar.get_x())
    assert [t.get_text() for t in held.get_yticklabels()] == [
        n.name for n in c.levels()]
    assert held.get_ylim()[0] > held.get_ylim()[1]  # smallest on top


def test_measured_speeds_say_so():
    said = plot.hierarchy("h100").summary
    assert "8.3 TB/s, measured" in said and "3.35 TB/s, m" not in said
    assert "34.6 MB in 132 pieces, not published" in said


@pytest.mark.parametrize("draw, name", [
    *((plot.chip, name) for name in GPUS),
    *((plot.hierarchy, name) for name in chips.names())])
def test_legible(draw, name, monkeypatch):
    written = [*texts(draw(name), monkeypatch).items()]
    for text, area in written:
        assert text.get_size() >= 14, text
        assert area.x0 >= 0 and area.x1 <= 1280, text
        assert area.y0 >= 0 and area.y1 <= 720, text
    for (a, one), (b, other) in itertools.combinations(written, 2):
        assert not one.overlaps(other), (a, b)


@pytest.mark.parametrize("name", ["tpu-v5e", "mi300x"])
def test_a_chip_without_sms_is_sent_to_hierarchy(name):
    with pytest.raises(ValueError, match=f"c is {name}.*plot.hierarchy"):
        plot.chip(name)


def test_bars_have_no_area_where_there_is_no_figure():
    ax = plot.hierarchy("tpu-v5e").axes[1]
    assert math.isclose(ax.patches[0].get_width(), 0, abs_tol=1e-9)
