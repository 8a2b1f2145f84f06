"""figures/: every picture is what its code draws today, and is used."""

import functools
import itertools
import math
import re

import pytest
from matplotlib.colors import to_rgba

import course_utils
from course_utils import chips, kernels, plot, transformer
from course_utils.host import Missing
from tools import drawings, figures
from tools.books import ROOT, not_reference

DRAWN = list(figures.DRAWINGS.values())


def made(draw):
    """What ``draw`` gives; skipped where a compiler has no wheel."""
    try:
        return draw()
    except Missing as missing:
        if not not_reference():
            raise
        pytest.skip(str(missing))


@functools.cache
def figure(name):
    course_utils.start()
    return made(getattr(drawings, name))


def texts(name):
    return [text for ax in figure(name).axes for text in ax.texts]


def said(name):
    return "\n".join(text.get_text() for text in texts(name))


def boxes(name, face=None, hatch=None, size=None):
    """(x, y, width, height) of a drawing's boxes of one look, and size."""
    found = []
    for patch in figure(name).axes[0].patches:
        box = tuple(round(n, 6) for n in (
            patch.get_x(), patch.get_y(), patch.get_width(),
            patch.get_height()))
        if ((face is None or patch.get_facecolor() == to_rgba((face, 0.8)))
                and (hatch is None or patch.get_hatch() == hatch)
                and (size is None or box[2:] == size)):
            found.append(box)
    return found


@pytest.mark.parametrize("name", figures.FIGURES)
def test_figure_is_what_its_code_draws(name):
    drawn = made(figures.FIGURES[name])
    assert drawn.startswith(b"\x89PNG")
    if not not_reference():  # elsewhere fonts and versions differ
        stored = (figures.FOLDER / name).read_bytes()
        assert drawn == stored, "run: make figures"


def test_every_picture_has_code_and_is_shown():
    pages = "".join(path.read_text(encoding="utf-8") for path in [
        ROOT / "README.md", *(ROOT / "notebooks").glob("*.ipynb"),
        *(ROOT / "docs").glob("*.md")])
    shown = set(re.findall(r"figures/([\w.-]+)", pages))
    stored = {path.name for path in figures.FOLDER.iterdir()}
    assert stored == set(figures.FIGURES) == shown


def test_every_drawing_of_the_page_is_described():
    page = (ROOT / "docs" / "drawings.md").read_text(encoding="utf-8")
    alt = dict(re.findall(r"!\[([^\]]+)\]\(\.\./figures/([\w-]+)\.png\)",
                          page))
    assert set(alt.values()) == set(figures.DRAWINGS)
    assert min(map(len, alt)) > 60


@pytest.mark.parametrize("name", DRAWN)
def test_a_drawing_is_legible(name):
    drawn = figure(name)
    assert drawn.summary
    assert tuple(drawn.get_size_inches() * plot.DPI) == (1280, 720)
    drawn.draw_without_rendering()
    spots = []
    for text in [*drawn.texts, *texts(name)]:
        if text.get_text().strip():
            assert text.get_size() >= (13 if name == "course_map" else 14)
            box = text.get_window_extent()
            assert 0 <= box.x0 and box.x1 <= 1280, text
            assert 0 <= box.y0 and box.y1 <= 720, text
            spots.append((box.padded(-2), text.get_text()))
    for (a, one), (b, other) in itertools.combinations(spots, 2):
        assert not a.overlaps(b), (one, other)


def test_the_die_has_132_of_144_and_no_other_count_gives_the_peak():
    chip = chips.get("h100")
    site = (32, 47)
    on = boxes("h100", drawings.MATRIX, size=site)
    off = boxes("h100", hatch=drawings.OFF, size=site)
    assert (len(on), len(off)) == (132, 12)
    assert len({*on, *off}) == 144 == (
        drawings.GPCS * drawings.TPCS * drawings.SMS)
    flops = 4 * 1024 * 1.83e9
    assert 132 * flops == pytest.approx(chip.peak("bf16"), rel=1e-3)
    assert 144 * flops != pytest.approx(chip.peak("bf16"), rel=0.05)


def test_an_sm_is_counted_out():
    counts = [len(group.get_paths())
              for group in figure("sm").axes[0].collections]
    assert counts == [32, 16, 16, 512] * 4  # CUDA guide, cc 9.0; 1024 FLOP
    memories = boxes("sm", drawings.MEMORY)
    registers, shared = memories[:4], memories[4:]
    assert sum(box[2] for box in registers) == pytest.approx(
        sum(box[2] for box in shared))  # 256 KiB each
    assert shared[0][2] / shared[1][2] == pytest.approx(228 / 28)
    assert said("sm").count("16,384 registers") == 4


def test_sums_in_fp16_stick_where_the_spacing_says():
    np = pytest.importorskip("numpy")
    sums = drawings.dot_products(2**16)
    a, b = np.random.default_rng(0).random((2, 2**16)).astype(np.float16)
    exact = math.fsum(float(x) * float(y) for x, y in zip(a, b, strict=True))
    assert sums["exact"][-1] == pytest.approx(exact, rel=1e-12)
    assert sums["fp32"][-1] == pytest.approx(exact, rel=1e-5)
    # From 2048 on fp16 counts in twos, so what is below 1 adds nothing.
    assert sums["fp16"][-1] == 2048 and np.spacing(np.float16(2048)) == 2
    assert np.all(np.diff(sums["fp16"].astype(float)) >= 0)
    lines = figure("tensor_core").axes[1].lines
    assert [line.get_ydata()[-1] for line in lines] == [
        series[-1] for series in sums.values()]


def test_memories_are_to_scale():
    levels = chips.get("h100").levels()
    squares = [box[2] for box in boxes("memory", drawings.MEMORY)]
    held = [level.bytes * level.units for level in levels]
    assert [side**2 / squares[-1]**2 for side in squares] == pytest.approx(
        [size / held[-1] for size in held], rel=1e-3)
    pipes = [box[3] for box in boxes("memory", drawings.BLUE)]
    speeds = [level.bandwidth for level in levels[1:]]
    assert [pipe / pipes[0] for pipe in pipes] == pytest.approx(
        [speed / speeds[0] for speed in speeds], rel=1e-3)
    bars = [box[2] for box in boxes("memory", drawings.VECTOR)]
    assert bars[2] / bars[0] == pytest.approx(481 / 41.1, rel=1e-3)


@pytest.mark.parametrize("model", ["llama-3-8b", "gpt3-175b"])
def test_products_are_those_of_the_closed_form(model):
    config, tokens = transformer.published(model), 4096
    found = drawings.products(config, tokens)
    flops = config.layers * sum(2 * math.prod(s) for s in found.values())
    closed = tokens * (config.flops_per_token(tokens)
                       - 2 * config.vocab * config.d_model)
    assert flops == pytest.approx(closed, rel=1e-12)
    assert len(found) == (9 if config.gated else 8)


def test_the_bar_of_shares_is_whole():
    bar = [box for box in boxes("decoder", drawings.MATRIX) if box[1] == 600]
    assert len(bar) == 9
    assert sum(box[2] for box in bar) == pytest.approx(1220)
    assert bar[3][2] == bar[4][2] == 2 * bar[0][2]  # T = 2 D: T N H to D N H


def test_the_kernel_of_the_cluster_is_machine_code():
    found = made(drawings.exchange)
    assert all(found) and [len(ptx) for ptx in found] == [1, 1, 2, 2, 2]
    assert all(name in re.sub(r"\n +\.", ".", said("clusters"))
               for ptx in found for name in ptx)
    torch = pytest.importorskip("torch")
    code = kernels.build(
        kernels.from_source(drawings.EXCHANGE), torch.float32, torch.float32,
        1024, num_ctas=2, BLOCK=256).sass
    for op in ("UTMALDG", "SYNCS", "UCGABAR_ARV", "UCGABAR_WAIT"):
        assert op in code


def test_torch_compile_shows_both_graphs_and_both_languages():
    text = said("torch_compile")
    assert text.count("aten.mm(") == 3  # y; then dW and dX
    assert "triton_poi_fused_add_relu" in text
    assert "at::vec::clamp_min" in text
    assert re.search(r"L\['x'\].*512, 1024", text)


def test_the_map_shows_what_every_stage_hands_on():
    text = " ".join(said("course_map").split())
    for n in range(6):
        first = drawings.example.artefact(n).splitlines()[0]
        assert " ".join(first.split()) in text
