"""Notebook 2's exercises: their answers, from elsewhere, and mistakes."""

import inspect
import textwrap

import pytest

from course_utils import exercises
from course_utils.exercises_data import EXERCISES
from tools.books import ROOT

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")


pytestmark = pytest.mark.usefixtures("no_progress", "empty_cache")


def layers(x, w, b):
    for _ in range(4):
        x = x @ w + b
    return x


def steps(x):
    print("start")
    x = x * 2
    print("middle")
    x = x + 1
    print("end")
    return x


def test_unrolled_as_jax_counts():
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((3, 3),) * 3]
    made = jax.make_jaxpr(layers)(*shapes)  # b a matrix: no broadcast
    assert EXERCISES["2.1"].solve() == len(made.eqns)


def test_contracting_by_numbers():
    import numpy as np

    x, y = np.random.default_rng(0).normal(size=(2, 3, 3))
    found = [(i, j) for i in (0, 1) for j in (0, 1) if np.allclose(
        np.tensordot(x, y, ((i,), (j,))), np.einsum("bf,df->bd", x, y))]
    assert [EXERCISES["2.2"].solve()] == found


def test_graphs_as_dynamo_explains_them(capsys):
    made = torch._dynamo.explain(steps)(torch.ones(2))
    assert EXERCISES["2.3"].solve() == made.graph_count
    assert capsys.readouterr().out.count("start") == 1  # solve is silent


def test_saved_for_tanh_is_the_result_in_bf16():
    assert EXERCISES["2.4"].solve() == 512 * 2048 * 2


@pytest.mark.parametrize("number, answer, word", [
    ("2.1", 2, "each round"), ("2.1", 4, "Two operations"),
    ("2.1", 12, "writes nothing"), ("2.2", (1, 0), "bf,fd->bd"),
    ("2.2", (0, 0), "stay"), ("2.2", (0, 1), "first number"),
    ("2.3", 4, "no operation"), ("2.3", 3, "breaks"),
    ("2.3", 1, "print"), ("2.4", 2**20, "mask"), ("2.4", 2**21 / 1e6, "MB"),
    ("2.4", 2, "MiB"), ("2.4", 2**21 + 5 * 2**20, "X and W"),
    ("2.4", 2**22, "Once"), ("2.4", 0, "counts as saved")])
def test_typical_mistakes_are_told(number, answer, word):
    verdict = exercises.check(number, answer)
    assert not verdict.correct and word in verdict.text


@pytest.mark.parametrize("function", [layers, steps])
def test_the_notebook_asks_about_these_functions(function):
    import nbformat

    book = nbformat.read(ROOT / "notebooks/02_ops_to_ir.ipynb", 4)
    source = textwrap.dedent(inspect.getsource(function))
    assert any(f"```python\n{source}```" in cell.source
               for cell in book.cells)
