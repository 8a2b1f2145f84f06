"""Figures: what was drawn is read back from the axes, and is legible."""

import io
import itertools
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from course_utils import plot
from course_utils.compilers.rung import Buffer
from course_utils.plot import base, course

pd = pytest.importorskip("pandas")
pytest.importorskip("matplotlib")
from matplotlib.text import Text  # noqa: E402

HLO = "\n".join(
    f"  fused_{i} = bf16[512,2048]{{1,0}} maximum(dot.{i}, $zero$)"
    for i in range(40))
ASM = "\tvfmadd231ps\tymm0, ymm1, ymm2\n\tvmaxps\tymm2, ymm2, ymm3\n" * 3
TRUNK = [("jaxpr", "c = max b 0.0"), ("StableHLO", HLO), ("HLO", HLO)]
TARGETS = {
    "cpu": [("LLVM IR", HLO), ("assembly", ASM)],
    "h100": [("PTX", HLO), ("SASS", "HGMMA.64x256x16.F32.BF16")],
    "tpu-v5e": [("LLO", "vmatmul.bf16")],
    "mi300x": [("LLVM IR", HLO), ("GCN", "v_mfma_f32_32x32x8_bf16")],
}
NAN = float("nan")
TABLE = pd.DataFrame(
    [("PyTorch eager, CPU", "linear", "library", "oneDNN", 5e6, 2e6),
     ("PyTorch eager, CPU", "relu", "library", "ATen", 2e6, 2e6),
     ("Inductor, CPU", "linear", "library", "oneDNN", 5e6, 2e6),
     ("Inductor, CPU", "a_name_too_wide", "compiler", "Inductor C++", 1e4, 0),
     ("XLA, TPU v5e", "fusion", "compiler", "XLA", 5e6, 2e6),
     ("Triton, H100", "matmul", "compiler", "Triton", NAN, NAN)],
    columns=["back end", "kernel", "author", "who", "bytes_read",
             "bytes_written"]).set_index(["back end", "kernel"])
SERIES = {"one by one": [(1, 1e-3), (2, 2e-3), (4, 4e-3)],
          "fused": [(1, 1e-3), (2, 1e-3), (4, 1.1e-3)]}
VALUES = [Buffer("x", "f32[8]", 1 << 20, "parameter", 0, 0, 0, 3),
          Buffer("dot." + "3" * 40, "f32[8]", 1 << 21, "output", 1, 0, 1, 1),
          Buffer("y", "f32[8]", 1 << 21, "output", 1, 0, 2, 3),
          Buffer("t", "f32[8]", 1 << 22, "temp", 2, 0, 1, 2),
          Buffer("u", "f32[8]", 1 << 20, "temp", 2, 1 << 22, 2, 3)]
DRAWN = {
    "map": lambda: plot.stage_map(3),
    "card": lambda: plot.card(3, HLO, ASM),
    "ladder": lambda: plot.ladder(TARGETS, TRUNK),
    "ladder_alone": lambda: plot.ladder({}, TRUNK * 3, lines=20),
    "ladder_no_trunk": lambda: plot.ladder({"cpu": TRUNK}),
    "backends": lambda: plot.backends(TABLE, minimum=7.1e6),
    "bars": lambda: plot.bars(["H100", "TPU v5e"], [3e12, 0], "B/s", "A"),
    "lines": lambda: plot.lines(SERIES, "s", "A", "operations", at=3),
    "buffers": lambda: plot.buffers(VALUES),
}
figures = pytest.mark.parametrize("name", DRAWN)


def texts(figure, monkeypatch):
    """Every text really drawn, with its extent in pixels."""
    found, draw = {}, Text.draw

    def record(self, renderer):
        if self.get_visible() and self.get_text().strip():
            found[self] = self.get_window_extent(renderer)
        draw(self, renderer)

    figure.draw_without_rendering()  # settles the layout
    with monkeypatch.context() as patch:
        patch.setattr(Text, "draw", record)
        figure.draw_without_rendering()
    return found


@figures
def test_legible(name, monkeypatch):
    figure = DRAWN[name]()
    assert figure.get_size_inches().tolist() == [12.8, 7.2]
    written, page = texts(figure, monkeypatch), figure.bbox
    assert len(written) > 3
    for text, box in written.items():
        assert box.width > 1, text
        assert box.x0 >= 0 and box.x1 <= page.x1, text
        assert box.y0 >= 0 and box.y1 <= page.y1, text
        mono = "Mono" in text.get_fontfamily()[0]
        assert text.get_size() >= (11 if mono else 14), text
    for (a, box_a), (b, box_b) in itertools.combinations(written.items(), 2):
        assert not box_a.overlaps(box_b), (a, b)


@figures
def test_png_is_opaque_and_the_same_twice(name):
    from matplotlib.image import imread

    first, second = DRAWN[name](), DRAWN[name]()
    before = repr(first)
    shown = plot.png(first)
    assert shown == plot.png(second)
    assert before == repr(first) == repr(second)  # drawing changes nothing
    said = re.fullmatch(r"<Picture ([0-9a-f]{8}): (\w.+)>", before, re.S)
    assert said[1] == plot.digest(first) and said[2] == first.summary
    pixels = imread(io.BytesIO(shown))
    assert pixels.shape[:2] == (720, 1280)
    assert pixels.shape[2] == 3 or pixels[..., 3].min() == 1
    assert (pixels[0, :, :3] == 1).all()  # white to the edge
    assert pixels[..., :3].min() < 0.2  # something dark is on it


def changed(rungs):
    return [(name, text.replace("b 0.0", "b 0.1")) for name, text in rungs]


ALIKE = {  # the same summary, another picture
    "card": (lambda: plot.card(3, "A", "B"), lambda: plot.card(3, "A", "C")),
    "card turned": (lambda: plot.card(3, "A", "B"),
                    lambda: plot.card(3, "B", "A")),
    "ladder": (lambda: plot.ladder({}, TRUNK),
               lambda: plot.ladder({}, changed(TRUNK))),
    "title": (lambda: plot.bars(["a"], [1], "B", "A"),
              lambda: plot.bars(["a"], [1], "B", "B")),
    "fifth digit": (lambda: plot.bars(["a"], [10_000], "B"),
                    lambda: plot.bars(["a"], [10_001], "B")),
    "point between": (
        lambda: plot.lines({"a": [(1, 1), (2, 3), (4, 4)]}, "s"),
        lambda: plot.lines({"a": [(1, 1), (2, 2), (4, 4)]}, "s")),
    "mark": (lambda: plot.lines(SERIES, "s", at=2),
             lambda: plot.lines(SERIES, "s", at=3)),
    "minimum": (lambda: plot.backends(TABLE, minimum=7e6),
                lambda: plot.backends(TABLE)),
    "author": (lambda: plot.backends(TABLE), lambda: plot.backends(
        TABLE.assign(author=["compiler"] + [*TABLE.author][1:]))),
    "who": (lambda: plot.backends(TABLE), lambda: plot.backends(
        TABLE.assign(who=["MKL"] + [*TABLE.who][1:]))),
    "offset": (lambda: plot.buffers(VALUES), lambda: plot.buffers(
        [*VALUES[:4], replace(VALUES[4], offset=1 << 23)])),
    "kind": (lambda: plot.buffers(VALUES), lambda: plot.buffers(
        [*VALUES[:4], replace(VALUES[4], kind="output")])),
}


@pytest.mark.parametrize("name", ALIKE)
def test_the_repr_stands_in_for_the_picture(name):
    one, other = (draw() for draw in ALIKE[name])
    assert one.summary.split("\n")[0] == other.summary.split("\n")[0]
    assert repr(one) != repr(other)


def test_an_artist_lost_or_moved_changes_the_repr():
    for draw in DRAWN.values():
        for kind in ("texts", "lines", "patches", "collections"):
            figure = draw()
            for artist in [*getattr(figure.axes[0], kind)][:3]:
                before = repr(figure)
                artist.remove()
                assert repr(figure) != before, (figure.summary, artist)


def test_excerpts_are_verbatim_or_visibly_cut():
    figure = plot.ladder(TARGETS, TRUNK, lines=3)
    mono = [t.get_text().splitlines() for t in figure.axes[0].texts
            if "Mono" in t.get_fontfamily()[0]]
    sources = {line.strip() for line in HLO.splitlines()}
    assert ["c = max b 0.0"] in mono and ["vmatmul.bf16"] in mono
    cut = [t for t in mono if t[-1] == "…"]
    assert cut and all(len(t) == 3 for t in cut)
    for line in (line for t in mono for line in t if "fused" in line):
        assert any(source.startswith(line.rstrip("…")) for source in sources)
        assert line in sources or line.endswith("…")
    assert not any(t.get_parse_math() for t in figure.axes[0].texts)


def test_ladder_takes_rung_objects():
    rungs = [SimpleNamespace(name="PTX", text="ret;")] * 2
    shown = [t.get_text() for t in plot.ladder(rungs).axes[0].texts]
    assert shown.count("PTX") == 2 and shown.count("ret;") == 2


@pytest.mark.parametrize("n", range(1, 6))
def test_map_lights_its_stage_only(n):
    [ax] = plot.stage_map(n).axes
    white = [t.get_text() for t in ax.texts if t.get_color() == "white"]
    assert white[0] == str(n)
    assert " ".join(white[1].split()) == course.STAGES[n - 1].name
    lit = base.OKABE_ITO[5]
    assert sum(t.get_color() == lit for t in ax.lines
               if t.get_marker() == "o") == 2


def test_stages_hand_on_what_the_next_receives():
    for n, (a, b) in enumerate(itertools.pairwise(course.STAGES), start=1):
        left, right = plot.card(n, "", ""), plot.card(n + 1, "", "")
        assert f"handed on: {a.handed_on}" in shown(left)
        assert f"received: {a.handed_on}" in shown(right)
        assert a.name in left.summary and b.name in right.summary
    assert all(3 <= len(s.question.split()) <= 5 for s in course.STAGES)


def shown(figure):
    return [t.get_text() for t in figure.axes[0].texts]


def test_backends_draws_the_bytes_of_the_table():
    [ax] = plot.backends(TABLE, minimum=7.1e6).axes
    ends = {}
    for bar in ax.patches:
        y = round(bar.get_y() + bar.get_height() / 2)
        assert bar.get_x() == ends.get(y, 0)  # stacked without a gap
        ends[y] = bar.get_x() + bar.get_width()
    names = [t.get_text() for t in ax.get_yticklabels()]
    both = TABLE.bytes_read + TABLE.bytes_written
    assert {names[y]: x for y, x in ends.items()} == both.groupby(
        level=0).sum().to_dict()
    assert len(ax.patches) == len(TABLE)
    fills = {(bar.get_facecolor(), bar.get_hatch()) for bar in ax.patches}
    assert len(fills) == 2 and len({hatch for _, hatch in fills}) == 2
    said = [t.get_text().strip() for t in ax.texts]
    assert "11 MB, 2 kernels" in said and "7 MB, 1 kernel" in said
    assert "at least 0 B, 1 kernel, Triton" in said
    assert said.count("oneDNN") == 2
    assert "7.01 MB, 2 kernels, Inductor C++" in said  # too wide for its bar
    assert [line.get_xdata()[0] for line in ax.lines] == [7.1e6]
    [legend] = ax.figure.legends
    assert {t.get_text() for t in legend.get_texts()} == {
        "compiler", "library"}


def named(ax):
    """For each row from the top, its (bar, name on it) and its label."""
    rows = {}
    for text in ax.texts:
        rows.setdefault(text.get_position()[1], []).append(text)
    for bar in ax.patches:
        y = bar.get_y() + bar.get_height() / 2
        yield bar, rows[round(y)]


def check_names(figure, names):
    """Each bar's name is on it, or at the end of its row; all on the page."""
    [ax] = figure.axes
    figure.draw_without_rendering()
    for (bar, texts), name in zip(named(ax), names, strict=True):
        place = bar.get_window_extent()
        on_it = [t for t in texts if place.contains(
            t.get_window_extent().x0, place.y0 + 1) and place.contains(
            t.get_window_extent().x1, place.y0 + 1)]
        said = [t.get_text().replace("\n", "") for t in on_it]
        assert name in said or name in texts[-1].get_text(), name
    for text in ax.texts:
        assert text.get_window_extent().x1 <= figure.bbox.x1, text


@pytest.mark.parametrize("shares", [
    [1, 1, 1, 1], [8, 1, 1, 8], [1000, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0],
    [9, 3, 3, 3], [1, 2, 4, 8]])
def test_every_kernel_is_named_however_narrow(shares):
    rows = [(place, str(n), "library", who, share * 1e6, 0)
            for place in ("a", "b", "c, of a longer name")
            for n, (who, share) in enumerate(zip(
                ("ATen", "Inductor (C++)", "XLA (Triton)", "YNNPACK"),
                shares if place != "b" else reversed(shares), strict=True))]
    table = pd.DataFrame(rows, columns=["back end", *TABLE.reset_index()
                                        .columns[1:]])
    check_names(plot.backends(table.set_index(["back end", "kernel"])),
                [*table.who])


def test_every_buffer_is_named_however_short():
    names = ["maximum_convert_fusion", "x.1", "w" * 40, "a_b", "dot.1"]
    values = [replace(VALUES[0], name=name, first=n, last=n, allocation=n // 2)
              for n, name in enumerate(names)]
    check_names(plot.buffers(values), names)
    check_names(plot.buffers([*values, replace(VALUES[0], last=99,
                                               allocation=7)]), [*names, "x"])


def test_a_back_end_that_is_missing_has_a_row_that_says_so():
    gone = pd.DataFrame(
        [("XLA, TPU v5e", "", "missing", "libtpu is missing: " + 40 * "why ",
          None, None)], columns=["back end", *TABLE.reset_index().columns[1:]])
    gone = gone.set_index(["back end", "kernel"])
    for table, bars in ((gone, 0), (pd.concat([TABLE[:4], gone]), 4)):
        [ax] = plot.backends(table).axes
        assert len(ax.patches) == bars
        assert ax.texts[-1].get_text().strip() == "not on this machine"
        assert "XLA, TPU v5e: not on this machine" in ax.figure.summary


def test_an_author_keeps_its_fill_in_every_table():
    alone = plot.backends(TABLE[TABLE.author == "library"]).axes[0]
    both = plot.backends(TABLE).axes[0]
    assert alone.patches[0].get_hatch() == both.patches[0].get_hatch()


def test_lines_draw_every_point_and_the_mark():
    [ax] = plot.lines(SERIES, "s", at=3).axes
    *drawn, mark = ax.lines
    for line, points in zip(drawn, SERIES.values(), strict=True):
        drawn_points = zip(line.get_xdata(), line.get_ydata(), strict=True)
        assert [*drawn_points] == points
    assert len({line.get_marker() for line in drawn}) == 2
    assert set(mark.get_xdata()) == {3}
    assert ax.get_xscale() == ax.get_yscale() == "log"


def test_buffers_share_a_row_where_they_share_memory():
    [ax] = plot.buffers(VALUES).axes
    spans = [(bar.get_x() + 0.5, bar.get_x() + bar.get_width() - 0.5)
             for bar in ax.patches]
    assert spans == [(v.first, v.last) for v in VALUES]
    rows = [round(bar.get_y() + bar.get_height() / 2) for bar in ax.patches]
    assert rows == [0, 1, 1, 2, 3]
    labels = [t.get_text() for t in ax.get_yticklabels()]
    assert labels[1:] == [
        "allocation 1: 2.097 MB", "allocation 2: 4.194 MB\nfrom byte 0",
        "allocation 2: 1.049 MB\nfrom byte 4,194,304"]


def test_bars_and_amounts():
    [ax] = plot.bars(["a", "b"], [1, 2.5e12], "B/s").axes
    assert [bar.get_width() for bar in ax.patches] == [1, 2.5e12]
    assert [t.get_text() for t in ax.texts] == ["1 B/s", "2.5 TB/s"]
    assert plot.amount(4_194_304, "B") == "4.194 MB"
    assert plot.amount(0.00123, "s") == "1.23 ms"


def test_equal_labels_are_bars_of_their_own():
    [ax] = plot.bars(["a", "a", "b"], [2, 1, 3], "B").axes
    assert [round(bar.get_y() + 0.35) for bar in ax.patches] == [0, 1, 2]
    assert [bar.get_width() for bar in ax.patches] == [2, 1, 3]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["a", "a", "b"]


def test_axes_name_their_unit():
    [ax] = plot.lines(SERIES, "s", xlabel="operations").axes
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("operations", "time")
    [ax] = plot.lines(SERIES, "FLOP/s").axes
    assert ax.get_ylabel() == "FLOP/s"


def test_a_short_excerpt_is_written_large():
    def size(text):
        return max(t.get_size() for t in plot.card(3, text, "a").axes[0].texts
                   if "Mono" in t.get_fontfamily()[0])

    ten = "\n".join(["stablehlo.add"] * 10)
    assert size(ten) >= 28 > size("wide " * 6) > size(HLO) == 14


def test_lines_stand_out_on_white():
    def luminance(code):
        parts = [int(code[i:i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4
                   for p in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    assert len(set(base.OKABE_ITO)) == 8
    for color, *_ in base.LINES:
        assert 1.05 / (luminance(color) + 0.05) >= 3


@pytest.mark.parametrize(("call", "said"), [
    (lambda: plot.stage_map(6), "n is a stage, 1 to 5; got 6"),
    (lambda: plot.card("3", "", ""), "n is a stage"),
    (lambda: plot.stage_map([]), r"got \[\]"),
    (lambda: plot.buffers([]), "0 rows"),
    (lambda: plot.ladder({}), "0 rows"),
    (lambda: plot.ladder(dict.fromkeys("abcde", TRUNK)), "5 columns"),
    (lambda: plot.ladder({"cpu": TRUNK * 2}), "6 rows"),
    (lambda: plot.bars([], [], "B"), "0 rows"),
    (lambda: plot.lines({}, "s"), "0 lines"),
    (lambda: plot.buffers([replace(VALUES[0], allocation=n)
                           for n in range(27)]), "27 rows"),
])
def test_bad_input(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_the_readers_style_does_not_reach_our_figures():
    import matplotlib

    plain = plot.png(plot.bars(["a"], [1], "B"))
    with matplotlib.rc_context({"font.size": 4, "axes.facecolor": "black",
                                "figure.facecolor": "none",
                                "lines.linewidth": 9}):
        assert plot.png(plot.bars(["a"], [1], "B")) == plain
    assert matplotlib.rcParams["font.size"] == 10


SHOW = """
import sys
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
shell = InteractiveShell.instance()
if {inline}:
    from IPython.core.pylabtools import select_figure_formats
    select_figure_formats(shell, {{"png"}}, bbox_inches="tight")
from course_utils import plot
from course_utils.plot import base, course
with capture_output() as said:
    shell.run_cell("from course_utils import plot; plot.stage_map(3)")
import base64
[out] = said.outputs
png = base64.b64decode(out.data["image/png"])
assert out.data["text/plain"][9:17].encode() in png
assert int.from_bytes(png[16:20], "big") == 1280, png[:24]
assert int.from_bytes(png[20:24], "big") == 720, png[:24]
assert out.data["text/plain"].split(": ")[1] == "Stage 3 of 5"
assert set(out.data) == {{"image/png", "text/plain"}}
assert "matplotlib.pyplot" not in sys.modules
"""


@pytest.mark.parametrize("inline", [False, True])
def test_a_cell_shows_one_png_and_needs_no_pyplot(inline):
    code = SHOW.format(inline=inline)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_without_matplotlib():
    code = ("import sys; sys.modules['matplotlib'] = None\n"
            "from course_utils import Missing, plot\n"
            "try: plot.stage_map(1)\n"
            "except Missing as lack: assert 'pip install' in str(lack)\n"
            "else: raise SystemExit('drew without matplotlib')")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
