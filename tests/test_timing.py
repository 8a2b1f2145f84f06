"""timing: the fastest of the calls asked for, each waited for."""

import pytest

from course_utils import timing


def test_best_is_the_fastest_after_one_call_for_warming(monkeypatch):
    now, naps = [0], iter([1, 50, 10, 30])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def nap():
        now[0] += next(naps)

    assert timing.best(nap) == 10  # not the first, which was to warm up
    assert next(naps, None) is None


class Late:
    """A result that is there only after a wait, as JAX's are."""

    def __init__(self, waited):
        self.waited = waited

    def block_until_ready(self):
        self.waited.append(self)


@pytest.mark.parametrize("wrap", [
    lambda r: r, lambda r: (r, 1), lambda r: [r], lambda r: {"y": (None, r)}])
def test_a_call_ends_when_its_result_is_there(wrap):
    waited = []
    timing.best(lambda x: wrap(Late(x)), waited, repeats=2)
    assert len(waited) == 3


@pytest.mark.parametrize("repeats", [0, -1, 1.5, None, "3"])
def test_bad_repeats_is_named_before_anything_runs(repeats):
    with pytest.raises(ValueError, match="repeats is .* 1 or more"):
        timing.best(lambda: pytest.fail("it ran"), repeats=repeats)
