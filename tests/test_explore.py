"""Sliders: the panel, the controls and what a change does, in process."""

import io

import pytest

from course_utils import explore, plot

pytest.importorskip("matplotlib")


def draw(n=2, kind="square"):
    """n squared or cubed, as a bar and in words."""
    value = n ** {"square": 2, "cube": 3}[kind]
    return plot.bars([kind], [value], ""), f"{value} <exactly>"


CONTROLS = {"n": (2, 4), "kind": ["square", "cube"]}


@pytest.fixture
def shown(monkeypatch):
    """What show() displays, in order."""
    import IPython.display

    seen = []
    monkeypatch.setattr(IPython.display, "display",
                        lambda item, **options: seen.append(item))
    monkeypatch.delenv("COURSE_STATIC", raising=False)
    return seen


@pytest.mark.parametrize(("spec", "grid"), [
    ((1, 4), [1, 2, 3, 4]), ((0, 10, 4), [0, 4, 8]),
    ((0.0, 0.3, 0.1), [0.0, 0.1, 0.2, 0.3]), (range(2, 9, 3), [2, 5, 8]),
    (["a", "b"], ["a", "b"]), (True, [False, True]),
])
def test_values(spec, grid):
    assert explore.values("n", spec) == grid


@pytest.mark.parametrize("spec", [
    (4, 1), (1, 2, 5), [], "abc", 3, range(5, 6), None, {}])
def test_bad_control(spec):
    for call in (explore.show, explore.live):
        with pytest.raises(ValueError, match="control n is"):
            call(draw, n=spec)


@pytest.mark.parametrize("spec", [
    range(3, 0, -1), [3, 1, 2], [0.5, 2], (0, 1, 0.1), ["a", 2], (1, 1000),
    [1, 1]])
def test_every_control_reaches_all_its_values(spec):
    pytest.importorskip("ipywidgets")
    seen = []

    def note(n=None):
        seen.append(n)
        return plot.bars(["n"], [1], "")

    control, *_ = explore.live(note, n=spec).children
    assert list(control.options) == explore.values("n", spec)
    for value in control.options[-3:][::-1]:
        control.value = value
        assert seen[-1] == value


def test_misspelt_control():
    with pytest.raises(TypeError, match="'kinds'"):
        explore.show(draw, kinds=["square", "cube"])


def test_every_control_has_its_widget_and_starts_at_draws_default():
    widgets = pytest.importorskip("ipywidgets")

    def many(a=3, b=0.5, c="y", d=16, e=True, f=9):
        return plot.bars(["x"], [a], "")

    box = explore.live(many, a=(1, 5), b=(0, 1, 0.25), c=["x", "y"],
                       d=[8, 16], e=False, f=range(3, 10, 3))
    *controls, said, picture = box.children
    assert [type(c) for c in controls] == [
        widgets.SelectionSlider, widgets.SelectionSlider, widgets.Dropdown,
        widgets.SelectionSlider, widgets.Checkbox, widgets.SelectionSlider]
    assert [c.value for c in controls] == [3, 0.5, "y", 16, True, 9]
    assert controls[5].options == (3, 6, 9)
    assert not any(c.continuous_update for c in controls
                   if hasattr(c, "continuous_update"))
    assert picture.layout.height == "540px"


def test_moving_a_slider_changes_picture_and_words():
    pytest.importorskip("ipywidgets")
    n, kind, said, picture = explore.live(draw, **CONTROLS).children
    seen = {}
    for value in explore.values("n", CONTROLS["n"]):
        for choice in explore.values("kind", CONTROLS["kind"]):
            n.value, kind.value = value, choice
            right = value ** (2 if choice == "square" else 3)
            assert said.value == (f"n = {value}, kind = {choice}: "
                                  f"{right} &lt;exactly&gt;")
            assert bytes(picture.value) == plot.png(draw(value, choice)[0])
            seen[bytes(picture.value)] = right
    assert len(seen) == 6


def test_an_error_is_one_sentence_and_the_last_picture_stays():
    pytest.importorskip("ipywidgets")

    def fragile(n=1):
        if n == 2:
            raise ValueError("two <is> too many")
        return plot.bars(["n"], [n], "")

    n, said, picture = explore.live(fragile, n=(1, 3)).children
    before = bytes(picture.value)
    n.value = 2
    assert "two &lt;is&gt; too many" in said.value
    assert bytes(picture.value) == before
    n.value = 3
    assert said.value == "n = 3: n: 3" and bytes(picture.value) != before


def test_panel_shows_every_setting_in_its_place():
    from matplotlib.image import imread

    settings = [{"n": n} for n in (1, 3, 6)]
    page = explore.panel(draw, settings)
    assert page.summary.splitlines() == [
        f"n = {n}: {n * n} <exactly>" for n in (1, 3, 6)]
    assert [t.get_text() for t in page.texts] == ["n = 1", "n = 3", "n = 6"]
    pixels = imread(io.BytesIO(plot.png(page)))[..., :3]
    assert pixels.shape[:2] == (3 * (720 + 56), 1280)
    for i, params in enumerate(settings):
        alone = imread(io.BytesIO(plot.png(draw(**params)[0])))[..., :3]
        tile = pixels[i * 776 + 56:(i + 1) * 776]
        # As large as by itself; each file has its own 256 colours.
        assert abs(tile - alone).mean() < 0.002
        assert (abs(tile - alone) > 0.2).mean() < 0.002


def test_the_panels_repr_stands_in_for_its_pictures():
    def silent(n=1, y=0):
        return plot.lines({"a": [(1, 1), (2, y + 1), (3, n)]}, "s")

    def page(**params):
        return explore.panel(silent, [{"n": 1}, params])

    same, other = page(n=2, y=0), page(n=2, y=1)
    assert same.summary.splitlines()[0] == other.summary.splitlines()[0]
    assert repr(same).split(":")[0] != repr(other).split(":")[0]
    assert repr(same) == repr(page(n=2, y=0))


def test_a_readers_own_figure_of_any_shape_fits():
    from matplotlib.figure import Figure

    page = explore.panel(lambda n=1: Figure((4, 2 * n)), [{"n": 1}, {"n": 2}])
    assert page.bbox.height == 56 + 640 + 56 + 1280
    assert [image.oy for image in page.images] == [56 + 1280, 0]


def test_show_is_panel_first_then_live_controls(shown, capsys):
    pytest.importorskip("ipywidgets")
    explore.show(draw, **CONTROLS)
    page, live = shown
    assert page.summary.count("\n") == 2  # three settings of the first
    assert "n = 4, kind = square: 16 <exactly>" in capsys.readouterr().out
    assert live["text/plain"] == "Live in Jupyter: n, kind"
    assert live[explore._VIEW]["model_id"]


def test_one_control_is_sampled_evenly(shown):
    explore.show(draw, n=(1, 10))
    assert [line.split(":")[0] for line in shown[0].summary.splitlines()] == [
        "n = 1", "n = 5", "n = 10"]
    shown.clear()
    explore.show(draw, n=(1, 2))
    assert [line.split(":")[0] for line in shown[0].summary.splitlines()] == [
        "n = 1", "n = 2"]
    shown.clear()
    explore.show(draw, n=(1, 2), settings=[{"n": 5}])
    assert shown[0].summary == "n = 5: 25 <exactly>"


def test_static_only_when_asked_or_without_ipywidgets(shown, monkeypatch):
    monkeypatch.setenv("COURSE_STATIC", "1")
    explore.show(draw, **CONTROLS)
    monkeypatch.delenv("COURSE_STATIC")
    monkeypatch.setitem(__import__("sys").modules, "ipywidgets", None)
    explore.show(draw, **CONTROLS)
    assert len(shown) == 2 and shown[0].summary == shown[1].summary
