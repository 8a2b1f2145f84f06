"""timing: the fastest of the calls asked for, each waited for."""

import collections
import dataclasses
import math
import os
from pathlib import Path

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

    spent = []  # by each thread's own clock: no other process moves these

    def burn():
        start = time.thread_time()
        hashlib.pbkdf2_hmac(  # which lets other threads run
            "sha256", b"x", b"y", 150_000)
        spent.append(time.thread_time() - start)

    def both():
        spent.clear()
        threads = [threading.Thread(target=burn) for _ in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]

    two = timing.watch(both, repeats=1)
    assert len(spent) == 2 and min(spent) > 0.01
    assert two.cpu == pytest.approx(sum(spent), rel=0.1, abs=0.02)
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
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", ASYNC, switch], check=True, text=True,
        capture_output=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert [float(n) < 0.5 for n in done.stdout.split()] == early


class Clocked:
    """A clock that only the calls below move, and no other code."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def takes(self, *seconds, result=None):
        """A function whose calls take these seconds; the last one stays."""
        left = list(seconds)

        def call(*args):
            self.now += left.pop(0) if len(left) > 1 else left[0]
            return result
        return call


def row(**changed):
    return dataclasses.replace(timing.Compilation(
        "f", "jax.jit", 0.5, 2.0, 0.25, (1.5, 1.75), 0.5), **changed)


def test_compiling_pays_where_the_two_sums_cross():
    seen = row()
    compiled = [seen.first + n * seen.again for n in range(20)]
    plain = [seen.plain * (n + 1) for n in range(20)]
    first = next(n for n in range(20) if plain[n] >= compiled[n]) + 1
    assert seen.pays_after == first == 7
    assert row(again=0.5).pays_after == row(again=1).pays_after == math.inf


def test_a_compilation_says_what_it_costs_and_brings():
    assert str(row()) == (
        "f, jax.jit: first call 2 s, then 250 ms; without compiler 500 ms")


def test_the_table_says_its_units():
    pd = pytest.importorskip("pandas")
    shown = timing.table([row(), row(compiler="torch.compile", others=())])
    assert shown.index.tolist() == [("f", "jax.jit"), ("f", "torch.compile")]
    assert shown.loc["f", "jax.jit"].to_dict() == {
        "capture ms": 500, "first ms": 2000, "again ms": 250,
        "other 1 ms": 1500, "other 2 ms": 1750, "plain ms": 500,
        "pays after calls": 7}
    assert pd.isna(shown.loc[("f", "torch.compile"), "other 1 ms"])


def test_each_step_has_its_own_time(monkeypatch):
    """A compiler of known times stands in for jax.jit."""
    clock, made = Clocked(monkeypatch), []

    class Jitted:
        def __init__(self, fn):
            self.calls = clock.takes(7, 2, 1, 5, 4, 0.5)
            made.append(fn)

        def trace(self, *args):
            clock.now += 3

        def __call__(self, *args):
            self.calls = (clock.takes(len(args[0])) if len(args[0]) > 1
                          else self.calls)
            return self.calls(*args)

    monkeypatch.setattr(jax, "jit", Jitted)
    plain = clock.takes(6, 1)
    seen = timing.compilation(plain, ("a",), ("bb",), ("ccc",))
    assert seen == timing.Compilation(
        "call", "jax.jit", 3, 7, 0.5, (2, 3), 1)
    assert made == [plain]


def test_of_a_jit_the_plain_call_is_that_of_its_function():
    f, ran = counting(jax.numpy)
    seen = timing.compilation(jax.jit(f), (jax.numpy.ones(3),))
    assert ran.count((3,)) > 5  # two traces, then without jit
    assert seen.function == "f"
    ran.clear()
    fixed = jax.jit(lambda n, x: f(x) * len(range(n)), static_argnums=0)
    timing.compilation(fixed, (2, jax.numpy.ones(3)))
    assert len(ran) > 5


def test_of_a_compiled_function_the_plain_call_is_that_inside():
    torch = pytest.importorskip("torch")
    ran = []

    class Shift(torch.nn.Module):
        def forward(self, x):
            if not torch.compiler.is_compiling():
                ran.append(x.shape)
            return x + 1

    shift = Shift()
    for given in torch.compile(shift), torch.compile(shift.forward):
        ran.clear()
        seen = timing.compilation(given, (torch.ones(3),))
        assert len(ran) > 3
        assert seen.function in ("Shift", "forward")


def counting(library):
    """A function of an array, and the shapes with which Python ran it."""
    ran = []

    def f(x):
        ran.append(tuple(x.shape))
        return library.tanh(x) + 1
    return f, ran


def test_jax_traces_anew_for_the_graph_and_for_each_shape():
    f, ran = counting(jax.numpy)
    ones = [(jax.numpy.ones(n),) for n in (3, 4, 5)]
    f(*ones[0])
    seen = timing.compilation(f, *ones)
    assert ran[1:5] == [(3,), (3,), (4,), (5,)]  # then runs without jit
    assert seen.compiler == "jax.jit" and seen.function == "f"
    assert len(seen.others) == 2 and seen.again < min(seen.others)


@pytest.mark.parametrize("compiler, name", [
    ("g++", "torch.compile"), (None, "torch.compile, aot_eager")])
def test_torch_compiles_for_a_shape_then_for_all(monkeypatch, compiler, name):
    torch = pytest.importorskip("torch")
    if compiler and not timing.host.compiler():
        pytest.skip("no C++ compiler here")
    if not compiler:
        monkeypatch.setattr(timing.host, "compiler", lambda: None)
    threads = torch.get_num_threads()
    seen = timing.compilation(
        lambda x: torch.tanh(x) + 1, *((torch.ones(n),) for n in (3, 4, 5)))
    assert (seen.function, seen.compiler) == ("<lambda>", name)
    assert 0 < seen.capture and seen.again < seen.first
    assert seen.others[1] < seen.others[0]  # the third finds a graph ready
    assert torch.get_num_threads() == threads


def test_inductor_builds_all_of_it_again_the_second_time(monkeypatch):
    torch = pytest.importorskip("torch")
    if not timing.host.compiler():
        pytest.skip("no C++ compiler here")
    folders, built, calls = [], [], timing._calls

    def watched(*args):
        folders.append(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
        assert not [*folders[-1].rglob("*.so")]
        found = calls(*args)
        built.append(len([*folders[-1].rglob("*.so")]))
        return found

    monkeypatch.setattr(timing, "_calls", watched)
    before = dict(os.environ)
    for _ in range(2):
        timing.compilation(lambda x: torch.sin(x) + 1, (torch.ones(3),))
    assert 0 < built[0] == built[1] and len({*folders}) == 2
    assert not any(folder.exists() for folder in folders)
    assert dict(os.environ) == before


def test_arguments_come_in_a_tuple():
    x = jax.numpy.ones(3)
    for args in ((x,), ((x,), x)):
        with pytest.raises(TypeError, match=r"put it in one, as \(x,\)"):
            timing.compilation(jax.numpy.sin, *args)


def test_a_tensor_anywhere_in_the_arguments_chooses_torch(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(timing, "_with_torch", lambda *a: (
        "torch", 1, 1, 1, (), 1))
    for args in ((torch.ones(2),), ({"w": [torch.ones(2)]},), (1, (
            torch.ones(2),))):
        assert timing.compilation(lambda *a: 0, args).compiler == "torch"
    assert timing.compilation(lambda x: x, (1.0,)).compiler == "jax.jit"
