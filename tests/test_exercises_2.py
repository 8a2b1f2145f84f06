"""Notebook 2's exercises: their answers, from elsewhere, and mistakes."""

import inspect
import math
import operator
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


def power(x, n):
    for _ in range(n):
        x = x * x
    return x


def test_unrolled_as_jax_counts():
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((3, 3),) * 3]
    made = jax.make_jaxpr(layers)(*shapes)  # b a matrix: no broadcast
    assert EXERCISES["2.1"].solve() == len(made.eqns)


def test_contracting_by_numbers():
    import numpy as np

    x, y = np.random.default_rng(0).normal(size=(2, 3, 3))
    found = [(i, j, 0)  # no transpose behind it
             for left, right in ((x, y), (y, x)) for i in (0, 1)
             for j in (0, 1) if np.allclose(
                 np.tensordot(left, right, ((i,), (j,))),
                 np.einsum("fb,df->db", x, y))]
    assert [EXERCISES["2.2"].solve()] == found


def test_graphs_as_dynamo_explains_them(capsys):
    made = torch._dynamo.explain(steps)(torch.ones(2))
    assert EXERCISES["2.3"].solve() == made.graph_count
    assert capsys.readouterr().out.count("start") == 1  # solve is silent


def test_saved_for_tanh_is_the_result_in_bf16():
    assert EXERCISES["2.4"].solve() == 512 * 2048 * 2


def test_traces_are_as_many_as_types_of_arguments():
    import numpy as np

    values = (jax.numpy.ones(3), jax.numpy.zeros(3), jax.numpy.ones(3, int),
              1.0, 2.0, np.float32(2))
    kinds = {(a.shape, a.dtype, a.weak_type) for a in jax.make_jaxpr(
        lambda *a: a)(*values).in_avals}
    assert EXERCISES["2.6"].solve() == len(kinds)


def test_powers_as_dynamo_keeps_them():
    """One graph for each n, of as many products."""
    products = []

    def keep(graph, inputs):
        products.append(len(graph.graph.find_nodes(
            op="call_function", target=operator.mul)))
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(power, backend=keep)
    for n in (2, 3, 4, 5):
        compiled(torch.ones(2), n)
    assert products == [2, 3, 4, 5]
    assert EXERCISES["2.5"].solve() == len(products)


def test_kept_for_mish_by_the_slopes_themselves():
    """x, exp(x) and tanh(...) give the gradient, by hand; and x alone."""
    x = torch.linspace(-3, 3, 7, dtype=torch.float64, requires_grad=True)
    e = torch.exp(x)
    t = torch.tanh(torch.log1p(e))
    (x * t).sum().backward()
    by_hand = t + x * (1 - t**2) / (1 + e) * e
    assert torch.allclose(x.grad, by_hand.detach())
    assert EXERCISES["2.8"].solve() == (3 * 4.0, 4.0)


def test_shapes_until_equal_by_division():
    assert EXERCISES["2.9"].solve() == math.floor(3400 / 80) + 1


def test_whole_arrays_split_in_eight():
    import numpy as np

    parts = [np.split(np.empty(shape, np.int8), 8)[0].shape
             for shape in EXERCISES["2.7"].solve()]
    assert parts == [(1, 8192), (4096, 8192)]


@pytest.mark.parametrize("number, right", [
    ("2.6", 4), ("2.5", 4), ("2.8", (12, 4)), ("2.9", 43),
    ("2.7", ((8, 8192), (32768, 8192)))])
def test_the_right_answer_is_taken(number, right):
    assert exercises.check(number, right).correct


@pytest.mark.parametrize("number, answer, word", [
    ("2.6", 6, "Values do not count"), ("2.6", 5, "in value only"),
    ("2.6", 3, "np.float32"), ("2.6", 2, "the type does too"),
    ("2.5", 2, "how many operations"),
    ("2.5", 1, "number of products"), ("2.5", 8, "limit"),
    ("2.5", 14, "the products"), ("2.8", (4, 12), "first"),
    ("2.8", (16, 4), "counted twice"), ("2.8", (16, 4), "not its input"),
    ("2.8", (8, 4), "One too few"),
    ("2.8", (12, 0), "x itself"),
    ("2.8", (8, 0), "input counts"), ("2.8", (12, 12), "made again"),
    ("2.8", (48, 16), "takes 4 MiB"), ("2.9", 42, "still less"),
    ("2.9", 42.5, "whole"), ("2.9", 19, "once more"),
    ("2.9", 24, "first shape"),
    ("2.7", ((1, 8192), (4096, 8192)), "one chip's share"),
    ("2.7", ((1, 8192), (32768, 8192)), "split too"),
    ("2.7", ((8192, 8), (32768, 8192)), "a row of 8192"),
    ("2.7", ((8, 8192), (4096, 8192)), "one chip's part"),
    ("2.7", ((8, 8192), (4096, 65536)), "first dimension"),
    ("2.7", ((1, 65536), (32768, 8192)), "size 1"),
    ("2.1", 2, "each round"), ("2.1", 4, "Two operations"),
    ("2.1", 12, "writes nothing"),
    ("2.2", (0, 1, 0), "gives 'bd'"), ("2.2", (1, 0, 1), "left to transpose"),
    ("2.2", (0, 1, 1), "spares it"), ("2.2", (0, 0, 0), "f first"),
    ("2.2", (1, 1, 0), "f last"),
    ("2.3", 4, "no operation"), ("2.3", 3, "breaks"),
    ("2.3", 1, "print"), ("2.4", 2**20, "mask"), ("2.4", 2**21 / 1e6, "MB"),
    ("2.4", 2, "MiB"), ("2.4", 2**21 + 5 * 2**20, "X and W"),
    ("2.4", 2**22, "Once"), ("2.4", 0, "counts as saved")])
def test_typical_mistakes_are_told(number, answer, word):
    verdict = exercises.check(number, answer)
    assert not verdict.correct and word in verdict.text


@pytest.mark.parametrize("function", [layers, steps, power])
def test_the_notebook_asks_about_these_functions(function):
    import nbformat

    book = nbformat.read(ROOT / "notebooks/02_ops_to_ir.ipynb", 4)
    source = textwrap.dedent(inspect.getsource(function))
    assert any(f"```python\n{source}```" in cell.source
               for cell in book.cells)
