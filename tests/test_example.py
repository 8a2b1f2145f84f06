"""The running example: one line through five notebooks, handed on as it is."""

import itertools
import re

import nbformat
import pytest

from course_utils import example
from tools.books import notebooks


def test_a_stage_that_is_not():
    with pytest.raises(ValueError, match="n is a stage, 0"):
        example.artefact(6)


def test_the_model_is_the_function_that_runs():
    jax = pytest.importorskip("jax")
    names = {"jax": jax}
    exec(example.artefact(0).partition("\n\n")[0], names)
    shape = jax.eval_shape(names["example"], *example.specs()[:3])
    assert shape.shape == example.SHAPES["Y"]
    for name, spec in zip(example.SHAPES, example.specs(), strict=True):
        assert f"{name}: bf16{[*spec.shape]}" in example.artefact(0)


def test_the_operations_cost_what_the_formula_says():
    pytest.importorskip("jax")
    (m, k), (_, n) = example.SHAPES["X"], example.SHAPES["W"]
    text = example.artefact(1)
    assert f"{2 * m * k * n:,} FLOPs" in text
    assert text.count(f"{m * n:,} FLOPs") == 2
    assert f"{2 * (m * k + k * n + m * n):,} B" in text


def test_every_artefact_fits_its_panel():
    """30 rows at most, and no row so long that the card would cut it."""
    pytest.importorskip("jax"), pytest.importorskip("torch")
    for n in range(6):
        rows = example.artefact(n).splitlines()
        assert 2 < len(rows) <= 22, n
        assert max(map(len, rows)) <= 40, n


def cards():
    """(received, handed on) from the card that each notebook has stored."""
    for path in notebooks():
        found = [re.search(r"\nreceived:\n(.*)\nhanded on:\n(.*)>$", text,
                           re.S)
                 for cell in nbformat.read(path, as_version=4).cells
                 for out in cell.get("outputs", ())
                 if "\nhanded on:\n" in (text := out.get("data", {}).get(
                     "text/plain", ""))]
        assert len(found) == 1, f"{path.stem} has {len(found)} cards"
        yield found[0].groups()


def test_what_one_notebook_hands_on_the_next_receives():
    stored = [*cards()]
    assert len(stored) == 5
    for (_, given), (taken, _) in itertools.pairwise(stored):
        assert given == taken and len(given) > 40
    every = [stored[0][0], *(given for _, given in stored)]
    assert len(set(every)) == 6
    assert every == [example.artefact(n) for n in range(6)]
