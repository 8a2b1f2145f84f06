"""The queue: closed forms, an independent event loop, bad input."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_utils import simulate

TIMES = st.integers(1, 50)
COUNTS = st.integers(1, 40)


@given(TIMES, TIMES, COUNTS)
def test_free_running_is_bound_by_the_slower_side(host, kernel, n):
    run = simulate.queue(host, kernel, n)
    assert run.total_us == (host + n * kernel if kernel >= host
                            else n * host + kernel)
    assert run.returned_us == n * host
    # What is not work is idle: on the device, before and between kernels.
    gaps = run.calls[0].device_start + sum(
        b.device_start - a.device_end
        for a, b in zip(run.calls, run.calls[1:], strict=False))
    assert run.device_idle_us == gaps


@given(TIMES, TIMES, COUNTS)
def test_a_wait_after_every_call_adds_both_times(host, kernel, n):
    run = simulate.queue(host, kernel, n, sync_every=1)
    assert run.total_us == run.returned_us == n * (host + kernel)
    assert run.device_idle_us == n * host


def tick_by_tick(host, kernel, n, sync_every):
    """The same queue, one microsecond after another: when all is done."""
    issued = finished = now = calling = running = waiting = 0
    queue = []
    while finished < n:
        if not calling and issued < n and not waiting:
            calling = host
        if not running and queue:
            running = queue.pop(0)
        now += 1
        if running:
            running -= 1
            finished += not running
        if calling:
            calling -= 1
            if not calling:
                issued += 1
                queue.append(kernel)
                waiting = bool(sync_every) and issued % sync_every == 0
        if waiting and finished == issued:
            waiting = False
    return now


@settings(max_examples=200)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12),
       st.none() | st.integers(1, 5))
def test_it_agrees_with_a_clock_that_ticks(host, kernel, n, every):
    run = simulate.queue(host, kernel, n, sync_every=every)
    assert run.total_us == tick_by_tick(host, kernel, n, every)


@given(TIMES, TIMES, COUNTS, st.none() | st.integers(1, 6))
def test_order_is_kept_and_nothing_overlaps(host, kernel, n, every):
    run = simulate.queue(host, kernel, n, sync_every=every)
    for call in run.calls:
        assert call.host_end - call.host_start == host
        assert call.device_end - call.device_start == kernel
        assert call.device_start >= call.host_end
    for a, b in zip(run.calls, run.calls[1:], strict=False):
        assert b.host_start >= a.host_end and b.device_start >= a.device_end
    free = simulate.queue(host, kernel, n)
    assert run.total_us >= free.total_us  # waiting never helps


def test_times_stay_exact():
    run = simulate.queue(Fraction(1, 3), Fraction(2, 3), 3)
    assert run.total_us == Fraction(7, 3)
    assert simulate.queue(10, 20, 2).calls == (
        simulate.Call(0, 10, 10, 30), simulate.Call(10, 20, 30, 50))


def test_whole_numbers_of_numpy_are_whole_numbers():
    np = pytest.importorskip("numpy")
    run = simulate.queue(10, 20, np.int64(3), sync_every=np.int8(2))
    assert run == simulate.queue(10, 20, 3, sync_every=2)


def test_it_says_that_it_is_simulated():
    assert str(simulate.queue(10, 20, 8)) == (
        "8 kernels, simulated: returned after 80 us, finished after 170; "
        "device idle 10 us")


@pytest.mark.parametrize("name, value", [
    ("host_us", 0), ("host_us", -1), ("kernel_us", float("nan")),
    ("kernel_us", float("inf")), ("kernel_us", "20"), ("n", 0), ("n", 2.0),
    ("n", None), ("n", True), ("sync_every", 0), ("sync_every", 1.5)])
def test_bad_input_is_named(name, value):
    good = {"host_us": 10, "kernel_us": 20, "n": 8}
    with pytest.raises(ValueError, match=f"{name} is .*: give a"):
        simulate.queue(**good | {name: value})
