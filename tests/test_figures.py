"""figures/: every picture is what its code draws today, and is used."""

import re

import pytest

from tools import figures
from tools.books import ROOT, not_reference


@pytest.mark.parametrize("name", figures.FIGURES)
def test_figure_is_what_its_code_draws(name):
    drawn = figures.FIGURES[name]()
    stored = (figures.FOLDER / name).read_bytes()
    assert drawn.startswith(b"\x89PNG")
    if not not_reference():  # elsewhere fonts and versions differ
        assert drawn == stored, "run: make figures"


def test_every_picture_has_code_and_is_shown():
    pages = "".join(path.read_text(encoding="utf-8") for path in [
        ROOT / "README.md", *(ROOT / "notebooks").glob("*.ipynb")])
    shown = set(re.findall(r"figures/([\w.-]+)", pages))
    stored = {path.name for path in figures.FOLDER.iterdir()}
    assert stored == set(figures.FIGURES) == shown
