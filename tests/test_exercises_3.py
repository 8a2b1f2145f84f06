"""Notebook 3's deeper exercises: right answers pass, mistakes teach."""

import pytest

from course_utils import exercises, exercises_data, host

pytestmark = pytest.mark.usefixtures("no_progress")

M, K, N = 512, 2048, 2048  # of 3.9; a vector register holds 8 x 128
TILES = M * N // (8 * 128)
RIGHT = {  # by hand
    # One addition for each piece but the first, and one for the bias.
    "3.9": (TILES * (K // 128), TILES * (K // 256), TILES // 2),
    # dX = (dY where XW + b > 0) W^T, each operand once, in bf16.
    "3.10": 2 * (2 * 512 * 2048 + 1024 * 2048 + 512 * 1024),
}


@pytest.mark.skipif(not host.version("libtpu"), reason="needs libtpu")
@pytest.mark.parametrize("number", RIGHT)
def test_what_is_compiled_is_what_one_works_out_by_hand(number):
    assert exercises.check(number, RIGHT[number]).correct


@pytest.mark.skipif(not host.version("libtpu"), reason="needs libtpu")
@pytest.mark.parametrize("number, answer, taught", [
    ("3.9", (16384, 8192, 1024), "no more results"),
    ("3.9", (8192, 4096, 512), "K = 1024"),
    ("3.9", (15360, 7168, 512), "then comes b"),
    ("3.10", 1048576, "also reads"),
    ("3.10", 7340032, "XW + b besides dY"),
    ("3.10", 8388608, "also writes"),
    ("3.10", 9437184 / 2, "two bytes"),
])
def test_a_typical_mistake_gets_its_sentence(number, answer, taught):
    verdict = exercises.check(number, answer)
    assert verdict.word == "Not yet" and taught in verdict.text


@pytest.mark.parametrize("number", RIGHT)
def test_hints_do_not_give_the_answer_away(number):
    told = " ".join(exercises_data.EXERCISES[number].hints)
    for value in (RIGHT[number] if number == "3.9" else (RIGHT[number],)):
        assert str(value) not in told and f"{value:,}" not in told
