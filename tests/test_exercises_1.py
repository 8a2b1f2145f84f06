"""The exercises of notebook 1: right, typically wrong, and independent."""

import pytest

from course_utils import exercises

pytest.importorskip("jax")


pytestmark = pytest.mark.usefixtures("no_progress")


# Worked by hand, without the package.
D = 4096
RIGHT = {
    "1.1": 2 + 2 + 1,  # forward; dW1, dW2; the gradient between the layers
    "1.2": 2 * 2 * 4 * 16 * 1024 * 1024 * 64,
    "1.3": 6 * 12_879_925_248 * 1e12,  # active: read in a published table
    # T where 4 T D = 2 (2 D**2 + 2 D**2 / 4 + 3 D * 14336)
    "1.4": (2 * D + D / 2 + 3 * 14336) / 2,
    "1.5": 2 * (2 * 32 * 8192 * 8192 * 128),
    "1.6": 64 * (4 * D * D + 3 * D * 16384) + 2 * 32000 * D,
    "1.7": 3.2856e24 / (2.79e6 * 3600 * 1.513e15),
    "1.8": 7,  # (16 x 17.18e9 - 18.4e9) / 33.55e9 = 7.6
}


@pytest.mark.parametrize("number", RIGHT)
def test_the_right_answer_is_accepted(number):
    verdict = exercises.check(number, RIGHT[number])
    assert verdict.correct, verdict


def test_a_checkpointed_layer_does_as_much_again():
    """1.5, by counting what jax recomputes with that policy, at T = 2D."""
    import jax
    import jax.numpy as jnp

    from course_utils import flops

    d, n, t = 64, 4, 128

    def layer(x, wq, wk, wv, wo, gate, up, down):
        q, k, v = ((x @ w).reshape(t, n, d // n) for w in (wq, wk, wv))
        scores = jax.nn.softmax(jnp.einsum("tnh,snh->nts", q, k), -1)
        x = x + jnp.einsum("nts,snh->tnh", scores, v).reshape(t, d) @ wo
        return x + (jax.nn.silu(x @ gate) * (x @ up)) @ down

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (
        (t, d), *[(d, d)] * 4, (d, 4 * d), (d, 4 * d), (4 * d, d))]
    kept = jax.checkpoint(layer, policy=(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable))
    more = flops.count(kept, *args, wrt="all").matmul - flops.count(
        layer, *args, wrt="all").matmul
    assert more == 4 * t * t * d
    assert RIGHT["1.5"] == 4 * 8192 * 8192 * D  # the same, at its sizes


def test_three_digits_are_enough_where_the_question_has_three():
    assert exercises.check("1.6", 17.4e9).correct
    assert exercises.check("1.7", 0.2162).correct
    assert not exercises.check("1.7", 0.2168).correct
    assert exercises.check("1.3", 7.74e22).correct
    assert exercises.check("1.3", 6 * 12.9e9 * 1e12).correct


@pytest.mark.parametrize("number", RIGHT)
def test_blank_is_quiet(number):
    assert exercises.check(number, None).word == "Not answered yet"


@pytest.mark.parametrize("number, answer, teaches", [
    ("1.1", 6, "X is data"), ("1.1", 4, "Layer 1 learns too"),
    ("1.1", 3, "backward pass alone"), ("1.1", 2, "forward pass alone"),
    ("1.1", 7, "too high"),
    ("1.2", RIGHT["1.2"] // 2, "multiply-adds"),
    ("1.2", RIGHT["1.2"] * 2 * 4, "b and k"),
    ("1.2", RIGHT["1.2"] * 64, "h is in both"),
    ("1.2", 2 * 2 * 4 * 16 * 1024**2, "h is not in the result"),
    ("1.2", 2 * 2 * 4 * 1024**2 * 64, "g is in one"),
    ("1.2", 2 * 16 * 1024**2 * 64, "eight pairs"),
    ("1.3", 6 * 46_702_792_704e12, "all the parameters"),
    ("1.3", 2 * 12_879_925_248e12, "forward pass"),
    ("1.3", 6 * 12_879_925_248, "one token's"),
    ("1.4", 32768, "8D"), ("1.4", 24576, "6D"), (
        "1.4", 53248, "both QK^T and AV"),
    ("1.4", 106_496, "no cheaper"), ("1.4", 26_112, "70B"),
    ("1.4", 19_456, "three matrices"),
    ("1.4", 6.5, "units of D"), ("1.4", 29696, "8 heads, not 32"),
    ("1.4", 26_625, "Close"), ("1.3", 6 * 14e21, "too high"),
    ("1.3", 6 * 46.7e21, "all the parameters"), ("1.1", 4.5, "whole number"),
    ("1.3", 2.57e22, "forward pass"), ("1.3", 7.8e10, "one token's"),
    ("1.5", 2 * 32 * 8192**2 * 128, "one of QK^T and AV"),
    ("1.5", 12 * 8192**2 * 4096, "forward and backward"),
    ("1.5", 2 * 16 * D * D * 8192 + 4 * 8192**2 * D, "whole layer"),
    ("1.5", 4 * 8192 * 4096, "one token"), ("1.5", 4 * 8192**2 * 128, "head"),
    ("1.6", 16e9, "rounds 4096"), ("1.6", 13.15e9, "two matrices"),
    ("1.6", 17.31e9, "there twice"), ("1.6", 17.18e9, "parameters too"),
    ("1.6", 272.6e6, "one layer"),
    ("1.7", 0.217, "the book's"), ("1.7", 21.62, "As a fraction"),
    ("1.7", 0.0721, "forward pass"), ("1.7", 3.921, "A token meets 37"),
    ("1.7", 778.4, "3,600 seconds"), ("1.7", 4.625, "other way round"),
    ("1.8", 8, "the weights lie there too"), ("1.8", 3, "int8"),
    ("1.8", 15, "Both"), ("1.8", 61, "There are 8"), ("1.8", 0, "One chip"),
    ("1.8", 7.6, "whole number"),
])
def test_a_typical_mistake_gets_its_sentence(number, answer, teaches):
    verdict = exercises.check(number, answer)
    assert verdict.word == "Not yet" and teaches in verdict.text


@pytest.mark.parametrize("number", RIGHT)
def test_hints_and_solution(number):
    assert exercises.hint(number).word == "Hint 1 of 2"
    assert exercises.hint(number).word == "Hint 2 of 2"
    said = exercises.solution(number)
    assert said.word == "Solution" and "def " in said.code
