"""Answers: right, blank, typically wrong, and of the wrong kind."""

import json
import math
from fractions import Fraction

import pytest

from course_utils import exercises, exercises_data
from course_utils.host import Missing

REAL = dict(exercises_data.EXERCISES)


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """An empty progress folder and a registry of this test's own."""
    monkeypatch.setenv("COURSE_PROGRESS", str(tmp_path / "progress"))
    monkeypatch.setattr(exercises, "_memory", {})
    monkeypatch.setattr(exercises, "_shown", {})
    kept = dict(exercises_data.EXERCISES)
    exercises_data.EXERCISES.clear()
    yield
    exercises_data.EXERCISES.clear()
    exercises_data.EXERCISES.update(kept)


def add(number="9.1", right=6_300_000, **options):
    options = {"hints": ("one", "two"), "why": "Because.", **options}

    def solve():
        """How many
        bytes?"""
        return right() if callable(right) else right

    exercises_data.exercise(number, **options)(solve)
    return number


@pytest.mark.parametrize("blank", [
    None, ..., "", " \n", (None, 2), [1, ...], (1, ("", 2))])
def test_blank_is_quiet_and_computes_nothing(blank, tmp_path):
    add(right=lambda: pytest.fail("solved though nothing was answered"))
    said = str(exercises.check("9.1", blank))
    assert said == "Not answered yet: 9.1 How many bytes?"
    assert not (tmp_path / "progress").exists()


@pytest.mark.parametrize(("right", "good", "bad"), [
    (27, [27, 27.0, Fraction(27)], [26, 28, 0, -27, math.nan, math.inf]),
    (0, [0, 0.0, -0.0], [1, 1e-9]),
    (6.5, [6.5, Fraction(13, 2)], [6, 7, -math.inf]),
    (1, [1, 1.0], [True, "1", (1,), {1}, 1j]),
    ("cuBLAS", [" cublas ", "CUBLAS"], ["oneDNN", 3, ("cuBLAS",)]),
    ("all-reduce", ["all_reduce", "All-Reduce"], ["allreduce"]),
    ((27, 54), [(27, 54), [27, 54]], [(27, 53), (54, 27), (27,), 27, {}]),
    (("add", 2), [("Add", 2.0)], [("add", "2"), (2, "add"), "add"]),
])
def test_kinds_of_answer(right, good, bad):
    add(right=right)
    for answer in good:
        verdict = exercises.check("9.1", answer)
        assert verdict.correct and str(verdict).startswith("Correct")
    for answer in bad:
        verdict = exercises.check("9.1", answer)
        assert not verdict.correct and str(verdict).startswith("Not yet")


class Hostile:
    """What a reader's own class may do when it is looked at."""

    def __repr__(self):
        raise RuntimeError("no repr")

    tolist = __eq__ = __repr__
    __hash__ = None


def everything():
    """Whatever a name can be bound to in a notebook, one of each kind."""
    torch = pytest.importorskip("torch")
    numpy = pytest.importorskip("numpy")
    return [10**400, -10**400, 10**5000, 1e308, 5e-324, Fraction(1, 3),
            b"27", range(3), object, print, Hostile(), {"a": 1}, "x" * 10**6,
            torch.empty(2, device="meta"), torch.ones(2, requires_grad=True),
            numpy.zeros((2, 2)), numpy.array("27"), numpy.datetime64("nat"),
            ((1, 2), 3), lambda: 1]


@pytest.mark.parametrize("right", [27, 6.5, "add", (27, 54), ("add", 2)])
def test_whatever_is_answered_gets_a_sentence(right):
    add(right=right, wrong=((lambda right: right, "That."),))
    for answer in everything():
        said = str(exercises.check("9.1", answer))
        assert said.startswith("Not yet: "), said[:300]
        assert len(said) < 300 and "\n" not in said


def test_numpy_numbers_count():
    numpy = pytest.importorskip("numpy")
    add(right=(27, 0.5))
    pair = (numpy.int64(27), numpy.float32(0.5))
    assert exercises.check("9.1", pair).correct
    assert exercises.check("9.1", numpy.array([27, 0.5])).correct
    assert not exercises.check("9.1", numpy.array([27, 0.6])).correct


def test_a_rounded_number_is_close_but_not_it():
    add(right=7_344_128)
    assert exercises.check("9.1", 7_344_128 * (1 + 1e-12)).correct
    assert "Close" in str(exercises.check("9.1", 7.344e6))
    assert "too high" in str(exercises.check("9.1", 7_344_128 * 1.002))
    assert "too low" in str(exercises.check("9.1", 7_344_128 * 0.998))


def test_an_exact_mistake_goes_before_a_close_answer():
    add(right=7_344_128, wrong=(
        (lambda right: right - 4096, "And the bias?"),))
    assert "bias" in str(exercises.check("9.1", 7_340_032))
    assert "Close" in str(exercises.check("9.1", 7_340_000))


@pytest.mark.parametrize("right, answer", [
    (58, 58.02), (58, 57.6), (521, 520.2), ((98, 672), (97.66, 672)),
    (7_344_128, 7_344_128.5)])
def test_a_count_that_is_not_whole_is_to_be_rounded(right, answer):
    add(right=right, wrong=((lambda right: right * 2, "Twice."),)
        if isinstance(right, int) else ())
    said = exercises.check("9.1", answer)
    assert "a whole number is asked for: round" in said.text
    if isinstance(right, int):  # a mistake is known, rounded or not
        assert exercises.check("9.1", 2 * right * 1.0002).text == "Twice."


@pytest.mark.parametrize("rel_tol", [1e-9, 1e-3, 0.01, 0.1])
def test_a_mistake_is_known_as_loosely_as_the_right_answer(rel_tol):
    add(right=(7435.0, 406.5), rel_tol=rel_tol, wrong=(
        (lambda right: (right[0] / 2, right[1] / 2), "Two FLOPs."),))
    half = (3717.5 * (1 + 0.9 * rel_tol), 203.25 * (1 - 0.9 * rel_tol))
    assert exercises.check("9.1", half).text == "Two FLOPs."
    assert not exercises.check("9.1", (3717.5 * (1.002 + rel_tol), 203.25)
                               ).text == "Two FLOPs."


def test_typical_mistakes_teach():
    add(wrong=(
        exercises_data.ELEMENTS, exercises_data.DOUBLE, exercises_data.MEGA,
        exercises_data.MEBI))
    assert "two bytes" in str(exercises.check("9.1", 3_150_000))
    assert "twice" in str(exercises.check("9.1", 12_600_000)).lower()
    assert "in MB" in str(exercises.check("9.1", 6.3))
    assert "in MiB" in str(exercises.check("9.1", 6.3e6 / 2**20))
    other = str(exercises.check("9.1", 1))
    assert other == "Not yet: 1 is too low."


def test_a_function_is_judged_by_running_it():
    def judge(answer, right):
        return "" if answer(3) == right(3) else "f(3) is off."

    add(right=lambda: lambda x: x + 1, judge=judge)
    assert exercises.check("9.1", lambda x: 1 + x).correct
    assert "f(3) is off" in str(exercises.check("9.1", lambda x: x))
    said = str(exercises.check("9.1", lambda x: 1 // 0))
    assert said.startswith("Not yet") and "ZeroDivisionError" in said


def test_hints_come_one_by_one_and_the_solution_shows_its_code():
    add(right=41)
    heads = [exercises.hint("9.1").word for _ in range(3)]
    assert heads == ["Hint 1 of 2", "Hint 2 of 2", "Hint 2 of 2"]
    told = exercises.solution("9.1")
    assert "41. Because." in told.text and "def solve" in told.code


def test_html_is_escaped():
    add(right="<b>")
    said = exercises.check("9.1", "<script>")
    assert "<script>" not in said._repr_html_()
    assert "&lt;script&gt;" in said._repr_html_()


def test_what_the_machine_lacks_is_said_not_raised():
    def lack():
        raise Missing("jax", "the answer needs it", "Run: pip install jax")

    add(right=lack)
    said = str(exercises.check("9.1", 3))
    assert said.startswith("Not checked") and "pip install jax" in said
    assert "pip install jax" in str(exercises.solution("9.1"))


def test_unknown_and_doubled_numbers():
    add("9.1")
    add("9.3")
    for call in (exercises.check, exercises.hint, exercises.solution):
        with pytest.raises(KeyError, match=r"'9\.2'; there are 9\.1, 9\.3"):
            call("9.2")
        for number in (["9.1"], 9.1, None, {}):
            with pytest.raises(KeyError, match="there is no exercise"):
                call(number)
    with pytest.raises(ValueError, match=r"9\.1 is there twice"):
        add("9.1")


def test_progress_survives_a_restart_and_keeps_the_score(tmp_path):
    for number in ("9.1", "9.2", "9.3", "10.1"):
        add(number, right=5)
    exercises.check("9.1", 5)
    exercises.check("9.2", 4)
    exercises.check("9.2", 5)
    exercises.hint("9.3")
    exercises._memory.clear()  # a new kernel
    assert exercises.progress().rows == (
        ("9", 2, 3, 1, "9.3"), ("10", 0, 1, 0, "10.1"))
    exercises.check("9.1", 4)  # after solving, nothing is lost
    assert exercises.progress().rows[0][1:4] == (2, 3, 1)
    [file] = (tmp_path / "progress").iterdir()
    assert json.loads(file.read_text())["9.2"] == ["wrong", "right"]
    assert "2 of 3" in str(exercises.progress())


def test_unwritable_or_broken_progress_falls_back_to_memory(
        tmp_path, monkeypatch):
    add(right=5)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COURSE_PROGRESS", str(tmp_path / "file"))
    assert exercises.check("9.1", 5).correct
    assert exercises.progress().rows == (("9", 1, 1, 1, ""),)


@pytest.mark.parametrize("text", [
    "{not json", "", b"\xff\xfe", "[]", "null", "3", '"9.1"', '[["9.1"]]',
    '{"9.1": null}', '{"9.1": 5}', '{"9.2": [[]], "9.1": [{}, null]}'])
def test_an_unreadable_progress_file_is_begun_anew(text, tmp_path):
    add(right=5)
    add("9.2", right=5)
    file = tmp_path / "progress" / "progress.json"
    file.parent.mkdir()
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert exercises.progress().rows == (("9", 0, 2, 0, "9.1 9.2"),)
    assert exercises.check("9.1", 5).correct
    exercises.hint("9.1")
    assert exercises.progress().rows[0][1] == 1
    exercises._memory.clear()
    assert exercises.progress().rows[0][1] == 1


@pytest.mark.parametrize("number", REAL)
def test_every_exercise_of_the_course(number):
    exercise = REAL[number]
    exercises_data.EXERCISES[number] = exercise
    assert exercise.question.endswith((".", "?", ")")) and exercise.hints
    right = exercise.solve()
    assert exercises.check(number, right).correct
    for mistake, teach in exercise.wrong:
        assert exercises.check(number, mistake(right)).text == teach
