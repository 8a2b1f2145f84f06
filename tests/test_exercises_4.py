"""Notebook 4's exercises: right answers pass, typical mistakes teach."""

import pytest

from course_utils import exercises

pytestmark = pytest.mark.usefixtures("no_progress")


RIGHT = {  # by hand
    "4.1": (2e9 / 269e-6 / 1e9, 2e9 / 4.92e-3 / 1e9),
    "4.2": 100 * (40 + 60) - (40 + 100 * 60),
    "4.3": (98, 672),
}


@pytest.mark.parametrize("number", RIGHT)
def test_what_is_computed_is_what_one_works_out_by_hand(number):
    assert exercises.check(number, RIGHT[number]).correct


def test_rates_need_no_more_digits_than_the_clock_has():
    assert exercises.check("4.1", (7435, 407)).correct
    assert exercises.check("4.1", (7.4e3, 4.07e2)).correct
    assert not exercises.check("4.1", (7435, 420)).correct


@pytest.mark.parametrize("number, answer, taught", [
    ("4.1", (1e9 / 269e-6 / 1e9, 1e9 / 4.92e-3 / 1e9), "two FLOPs"),
    ("4.1", (2e9 / 4.92e-3 / 1e9, 2e9 / 269e-6 / 1e9), "other way round"),
    ("4.1", (2e9 / 269e-6, 2e9 / 4.92e-3), "in FLOP/s"),
    ("4.1", (2e9 / 269e-6 / 1e12, 2e9 / 4.92e-3 / 1e12), "in TFLOP/s"),
    ("4.1", (2e9 / 269e-6 / 1e9, 2e9 / 51.2e-3 / 1e9), "all threads"),
    ("4.2", 4000, "first call"),
    ("4.2", 10000, "one run"),
    ("4.2", 6040, "reads once"),
    ("4.2", 6000, "hidden"),
    ("4.3", (97, 672), "one more"),
    ("4.3", (97, 1024), "one more"),
    ("4.3", (98, 352), "masked off"),
    ("4.3", (98, 1024), "last block"),
])
def test_a_typical_mistake_gets_its_sentence(number, answer, taught):
    verdict = exercises.check(number, answer)
    assert verdict.word == "Not yet" and taught in verdict.text


@pytest.mark.parametrize("line, said", [
    ("offsets = pid + 4 * tl.arange(0, BLOCK_SIZE)", ""),
    ("  offsets = tl.arange(0, BLOCK_SIZE) * 4 + pid  # dealt out\n", ""),
    ("offsets = tl.arange(0, BLOCK_SIZE) * tl.num_programs(0) + pid", ""),
    ("lanes = tl.arange(0, BLOCK_SIZE)\noffsets = pid + 4 * lanes", ""),
    ("""
        step = tl.num_programs(0)
        if step == 4:
            offsets = pid + 4 * tl.arange(0, BLOCK_SIZE)
     """, ""),
    ("offsets = pid * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)", "neighbours"),
    ("offsets = 4 * pid + tl.arange(0, BLOCK_SIZE)",
     "program 0 stores to the elements 0, 1, 2"),
    ("offsets = 4 * tl.arange(0, BLOCK_SIZE)",
     "program 1 stores to the elements 0, 4, 8, ...; asked for are 1, 5, 9"),
    ("offsets = pid + 1000 + 4 * tl.arange(0, BLOCK_SIZE)", "elements none"),
    ("offsets = pid + 4 * tl.arange(0, BLOCK_SIZE", "never closed"),
    ("pid + 4", "a line of the kernel"), (4, "a line of the kernel"),
])
def test_a_line_of_offsets_is_judged_by_what_its_kernel_stores(line, said):
    pytest.importorskip("triton")
    verdict = exercises.check("4.4", line)
    assert verdict.correct is (not said) and said in verdict.text


def test_taking_every_fourth_narrows_the_loads_as_it_says():
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from course_utils import kernels
    from course_utils.exercises_data import stage4

    x, widths = torch.empty(2**16, device="meta"), []
    for line in ("offsets = pid * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)",
                 stage4.every_fourth()):
        kernel = kernels.from_source(stage4._EVERY_FOURTH.format(line))
        ptx = kernels.build(kernel, x, x, 2**16, BLOCK_SIZE=1024).ptx
        widths.append(("ld.global.v4.b32" in ptx, "ld.global.b32" in ptx))
    assert widths == [(True, False), (False, True)]


def test_without_triton_an_answer_is_not_called_wrong(monkeypatch):
    from course_utils import kernels
    from course_utils.exercises_data import EXERCISES
    from course_utils.host import Missing

    def refuse(text):
        raise Missing("triton", "kernels are written in it", "pip install it")

    monkeypatch.setattr(kernels, "from_source", refuse)
    EXERCISES["4.4"].solve.cache_clear()
    assert exercises.check("4.4", "offsets = 1").word == "Not checked"
