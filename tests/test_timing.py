"""timing: the fastest of the calls asked for, each waited for."""

import collections
import dataclasses

import pytest

from course_utils import timing

jax = pytest.importorskip("jax")  # what it waits for is JAX's, once imported


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


def test_arrays_are_waited_for_in_whatever_jax_knows():
    """In a dataclass that was registered, a named tuple, a Partial."""
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Step:
        loss: object
        state: object

    waited, pair = [], collections.namedtuple("Pair", "a b")
    for wrap in (lambda r: Step(1.0, {"w": r}), lambda r: pair(None, r),
                 lambda r: jax.tree_util.Partial(max, r)):
        timing.watch(lambda x, wrap=wrap: wrap(Late(x)), waited, repeats=1)
    assert len(waited) == 6


def test_a_device_of_torch_is_waited_for_whatever_came_back(monkeypatch):
    torch = pytest.importorskip("torch")
    waits = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize",
                        lambda: waits.append(1))
    timing.best(lambda: None, repeats=2)
    assert len(waits) == 3


def test_repeats_may_be_a_number_of_numpy():
    np = pytest.importorskip("numpy")
    assert timing.best(int, repeats=np.int64(2)) >= 0


@pytest.mark.parametrize("repeats", [0, -1, 1.5, None, "3", True])
def test_bad_repeats_is_named_before_anything_runs(repeats):
    with pytest.raises(ValueError, match="repeats is .*number, 1 or more"):
        timing.best(lambda: pytest.fail("it ran"), repeats=repeats)


class Slow:
    """Ready three seconds after it was returned, at one of CPU time."""

    def __init__(self, clock):
        self.clock = clock

    def block_until_ready(self):
        self.clock["wall"] += 3
        self.clock["cpu"] += 1


def test_watch_separates_return_ready_and_processor_time(monkeypatch):
    clock, calls = {"wall": 0, "cpu": 0}, iter([9, 2, 0.5, 4])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock["wall"])
    monkeypatch.setattr(timing.time, "process_time", lambda: clock["cpu"])

    def call():
        clock["wall"] += next(calls)
        return Slow(clock)

    assert timing.watch(call) == timing.Watch(0.5, 3.5, 1)
    assert str(timing.Watch(0.0002, 0.25, 0.5)) == (
        "returned after 0.2 ms, ready after 250 ms, 500 ms of CPU time")
    with pytest.raises(ValueError, match="repeats is 0: give a whole"):
        timing.watch(call, repeats=0)


def test_processor_time_is_of_all_threads_and_not_of_sleep():
    import hashlib
    import threading
    import time

    def burn():  # hashing lets other threads run
        hashlib.pbkdf2_hmac("sha256", b"x", b"y", 150_000)

    def both():
        threads = [threading.Thread(target=burn) for _ in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]

    one, two = timing.watch(burn), timing.watch(both)
    assert 1.5 < two.cpu / one.cpu < 2.7
    asleep = timing.watch(time.sleep, 0.2, repeats=1)
    assert asleep.cpu < 0.1 < 0.19 < asleep.ready


ASYNC = """
import sys
import jax
import jax.numpy as jnp
from course_utils import timing
jax.config.update("jax_cpu_enable_async_dispatch", sys.argv[1] == "on")
x = jnp.ones((1500, 1500))
for seen in timing.watch(jnp.dot, x, x), timing.watch(jnp.sin, x):
    print(seen.returned / seen.ready)
"""


@pytest.mark.parametrize("switch, early", [
    ("on", [True, False]),  # a sine counts no FLOPs, so XLA calls it cheap
    ("off", [False, False])])
def test_jax_on_a_cpu_returns_early_unless_told_not_to(switch, early):
    import os
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", ASYNC, switch], check=True, text=True,
        capture_output=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert [float(n) < 0.5 for n in done.stdout.split()] == early
