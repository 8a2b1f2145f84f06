"""The exercises of notebook 1: right, typically wrong, and independent."""

import pytest

from course_utils import exercises

pytest.importorskip("jax")


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_PROGRESS", str(tmp_path / "progress"))
    monkeypatch.setattr(exercises, "_memory", {})
    monkeypatch.setattr(exercises, "_shown", {})


# Worked by hand, without the package.
D = 4096
RIGHT = {
    "1.1": 2 + 2 + 1,  # forward; dW1, dW2; the gradient between the layers
    "1.2": 2 * 2 * 4 * 8 * 1024 * 1024 * 64,
    "1.3": 6 * 12_879_925_248 * 1e12,  # active: read in a published table
    # T where 4 T D = 2 (2 D**2 + 2 D**2 / 4 + 3 D * 14336)
    "1.4": (2 * D + D / 2 + 3 * 14336) / 2,
}


@pytest.mark.parametrize("number", RIGHT)
def test_the_right_answer_is_accepted(number):
    verdict = exercises.check(number, RIGHT[number])
    assert verdict.correct, verdict


def test_three_digits_are_enough_where_the_question_has_three():
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
    ("1.2", 2 * 2 * 4 * 8 * 1024**2, "h is not in the result"),
    ("1.2", 2 * 2 * 4 * 1024**2 * 64, "g is in one"),
    ("1.3", 6 * 46_702_792_704e12, "all the parameters"),
    ("1.3", 2 * 12_879_925_248e12, "forward pass"),
    ("1.3", 6 * 12_879_925_248, "one token's"),
    ("1.4", 32768, "8D"), ("1.4", 24576, "6D"), ("1.4", 53248, "causal"),
    ("1.4", 6.5, "units of D"), ("1.4", 29696, "8 heads, not 32"),
    ("1.4", 26_625, "Close"), ("1.3", 6 * 14e21, "too high"),
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
