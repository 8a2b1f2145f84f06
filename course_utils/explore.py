"""Sliders in front of a pure ``draw(**params) -> Figure``. Floor 5.

A static panel of chosen settings comes first, an ordinary picture that
teaches without a kernel; live controls follow where ipywidgets is installed
and COURSE_STATIC is not 1. A control is a bool (checkbox), a list with a text
in it (menu), or a list of numbers, a range or (min, max[, step]) (sliders);
it starts at draw's own default.
"""

from __future__ import annotations

import html
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_utils import plot

if TYPE_CHECKING:
    from ipywidgets import VBox
    from matplotlib.figure import Figure

Draw = Callable[..., Any]  # gives a Figure, or a Figure and its read-out
_VIEW = "application/vnd.jupyter.widget-view+json"


def values(name: str, spec: Any) -> list[Any]:
    """Every value the control ``name`` can take; ValueError if none."""
    if isinstance(spec, bool):
        return [False, True]
    if isinstance(spec, tuple):
        low, high, step = (*spec, 1)[:3]
        count = int((high - low) / step + 1e-9) + 1
        spec = [round(low + i * step, 10) for i in range(count)]
    if not isinstance(spec, list | range) or len(spec) < 2:
        raise ValueError(f"control {name} is {spec!r}; give a bool, or two "
                         "or more values as a list, range or "
                         "(min, max[, step]).")
    return list(spec)


def _start(draw: Draw, controls: Mapping[str, Any]) -> dict[str, Any]:
    """Where each control begins; TypeError for a name draw lacks."""
    signature, start = inspect.signature(draw), {}
    signature.bind_partial(**controls)
    for name, spec in controls.items():
        grid, own = values(name, spec), signature.parameters[name].default
        start[name] = own if own in grid else grid[0]
    return start


def _ends(draw: Draw, controls: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Three settings along the first control."""
    start, name = _start(draw, controls), next(iter(controls))
    grid = values(name, controls[name])
    last = len(grid) - 1
    return [{**start, name: grid[at]} for at in sorted({0, last // 2, last})]


def _run(draw: Draw, params: Mapping[str, Any]) -> tuple[Figure, str, str]:
    """The figure, its setting in words, and its read-out."""
    drawn = draw(**params)
    figure, text = drawn if isinstance(drawn, tuple) else (
        drawn, getattr(drawn, "summary", ""))
    return figure, ", ".join(f"{k} = {v}" for k, v in params.items()), text


@plot.themed
def panel(draw: Draw, settings: Sequence[Mapping[str, Any]]) -> Figure:
    """``draw`` at each setting, one below the other, as one Figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    wide, strip, high = plot.SIZE[0] * plot.DPI, 56, 0
    runs = [_run(draw, params) for params in settings]
    for figure, _, _ in runs:
        figure.set_dpi(wide / figure.get_figwidth())
        high += strip + round(figure.bbox.height)
    page = plot.new("\n".join(f"{at}: {text}" for _, at, text in runs),
                    (plot.SIZE[0], high / plot.DPI))
    page.tiles, y = [figure for figure, _, _ in runs], high
    for figure, at, _ in runs:
        page.text(0.02, (y - 32) / high, at, size=18, weight="bold",
                  color=plot.OKABE_ITO[5], va="center")
        (tile := FigureCanvasAgg(figure)).draw()
        y -= strip + round(figure.bbox.height)
        page.figimage(tile.buffer_rgba(), 0, y, origin="upper")
    return page


def _control(name: str, spec: Any, value: Any) -> Any:
    import ipywidgets as widgets

    same, grid = {"value": value, "description": name}, values(name, spec)
    if isinstance(spec, bool):
        return widgets.Checkbox(**same)
    if any(isinstance(choice, str) for choice in grid):
        return widgets.Dropdown(options=grid, **same)
    return widgets.SelectionSlider(options=grid, continuous_update=False,
                                   **same)


def live(draw: Draw, **controls: Any) -> VBox:
    """Controls above a read-out and a picture, redrawn on each change."""
    import ipywidgets as widgets

    # A fixed size keeps the page from jumping while a picture is replaced.
    picture = widgets.Image(layout={"width": "960px", "height": "540px"})
    said, boxes = widgets.HTML(), {}

    def redraw(_: Any = None) -> None:
        params = {name: box.value for name, box in boxes.items()}
        try:
            figure, at, text = _run(draw, params)
            picture.value = plot.png(figure)
        except Exception as error:  # the last good picture stays
            at, text = "Not drawn", f"{params} gives: {error}"
        said.value = html.escape(f"{at}: {text}")

    for name, value in _start(draw, controls).items():
        boxes[name] = _control(name, controls[name], value)
        boxes[name].observe(redraw, "value")
    redraw()
    return widgets.VBox([*boxes.values(), said, picture])


def show(draw: Draw, *, settings: Sequence[Mapping[str, Any]] | None = None,
         **controls: Any) -> None:
    """Display the static panel with its read-outs, then live controls."""
    from IPython.display import display

    settings = settings or _ends(draw, controls)
    page = panel(draw, settings)
    display(page)
    print(page.summary)
    try:
        if os.environ.get("COURSE_STATIC") == "1":
            return
        box = live(draw, **controls)
    except ImportError:  # no ipywidgets: the panel has to do
        return
    # The plain text is what a page without a kernel shows.
    display({_VIEW: {"version_major": 2, "version_minor": 0,
                     "model_id": box.model_id},
             "text/plain": f"Live in Jupyter: {', '.join(controls)}"},
            raw=True)
