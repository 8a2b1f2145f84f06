"""The exercises of notebook 5: right, typically wrong, and independent."""

import pytest

from course_utils import chips, exercises
from course_utils.exercises_data import EXERCISES

MINE = [number for number in EXERCISES if number.startswith("5.")]


pytestmark = pytest.mark.usefixtures("no_progress")


def test_there_are_four():
    assert MINE == ["5.1", "5.2", "5.3", "5.4"]


@pytest.mark.parametrize("number", MINE)
def test_right_is_right_and_each_mistake_gets_its_sentence(number):
    exercise = EXERCISES[number]
    right = exercise.solve()
    assert exercises.check(number, right).correct
    for mistake, teach in exercise.wrong:
        assert mistake(right) != right
        assert exercises.check(number, mistake(right)).text == teach


@pytest.mark.parametrize("number, answer, says", [
    ("5.1", 60, "the die"), ("5.1", 116, "two FLOPs"),
    ("5.1", 30.3e12 / (128 * 2 * 2.04e9), "a whole number is asked for"),
    ("5.1", 30.3e12 / (128 * 2.04e9), "two FLOPs"),
    ("5.2", 296, "rule of thumb"), ("5.2", 520, "One row short"),
    ("5.3", 54, "GROUP=3"), ("5.3", 90, "GROUP=1"),
    ("5.4", 255, "two blocks"), ("5.4", 512, "no thread"),
])
def test_what_readers_will_write(number, answer, says):
    said = exercises.check(number, answer)
    assert not said.correct and says in said.text


def test_the_l4_reports_58_sms():
    """By a published device read-out, not by the peak."""
    assert EXERCISES["5.1"].solve() == chips.get("l4").sm_count == 58


def test_ridge_rows_solves_the_equation():
    """1/B = 1/ridge - 1/K - 1/N, but for the bias and the ReLU."""
    ridge = chips.get("h100").ridge("bf16")
    closed = 1 / (1 / ridge - 1 / 1024 - 1 / 2048)
    assert EXERCISES["5.2"].solve() == pytest.approx(closed, abs=2)


def test_blocks_are_those_of_a_traced_launch():
    torch, kernels = pytest.importorskip("torch"), pytest.importorskip(
        "course_utils.kernels")
    pytest.importorskip("triton")
    x, w, y = torch.ones(3, 144, 144)
    made = kernels.launch(
        kernels.matmul_bias_relu, 9,
        *kernels.linear_args(x, w, torch.ones(144), y), trace=True,
        BLOCK_M=16, BLOCK_N=16, BLOCK_K=16, GROUP=2)
    blocks = {(a.tensor, int(a.offsets[0])) for a in made.trace.accesses
              if a.tensor in ("x_ptr", "w_ptr")}
    assert len(blocks) == EXERCISES["5.3"].solve()


def test_registers_by_hand():
    """NVIDIA's rule: a warp gets whole 256s of its quarter's 16,384."""
    fit = [r for r in range(1, 256) if 16384 // (-(-32 * r // 256) * 256) >= 4]
    assert EXERCISES["5.4"].solve() == max(fit) == 128
