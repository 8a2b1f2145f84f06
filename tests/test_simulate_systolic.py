"""The systolic array: its product, its cycles and which cell works when."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_utils import chips, simulate

SMALL = st.integers(1, 6)


def ints(rng, *shape):
    return rng.integers(-99, 99, shape)


@settings(deadline=None, max_examples=60)
@given(SMALL, SMALL, SMALL, st.integers(0, 99))
def test_product_and_cycles_whatever_the_shape(m, k, n, seed):
    rng = np.random.default_rng(seed)
    a, b = ints(rng, m, k), ints(rng, k, n)
    made = simulate.systolic(a, b, size=6)
    assert made.result.dtype == np.int64
    assert (made.result == a @ b).all()
    assert made.busy.sum() == m * k * n  # each multiply-add once
    assert made.cycles == m + k + n - 2  # the last value has that far to go
    assert made.utilisation == m * k * n / (36 * (m + k + n - 2))


def test_each_cell_starts_when_value_and_sum_meet():
    """Cell (k, n) is k + n steps from the corner, and works m cycles."""
    made = simulate.systolic(np.ones((3, 4)), np.ones((4, 2)), size=4)
    want = np.add.outer(np.arange(4), np.arange(2))
    assert (made.first == want).all() and (made.last == want + 2).all()
    assert made.busy.tolist() == [
        ((want <= t) & (t < want + 3)).sum() for t in range(made.cycles)]


def test_floats_are_summed_from_the_top():
    """The order of a partial sum's way down, not that of a @ b."""
    a, b = np.array([[1e16, 1.0, -1e16]]), np.ones((3, 1))
    assert simulate.systolic(a, b, 3).result.item() == (1e16 + 1.0) - 1e16
    swapped = simulate.systolic(a[:, [0, 2, 1]], b, 3)
    assert swapped.result.item() == 1.0


def test_scaling_book_eight_cycles_for_eight_rows():
    """Chapter 2: a full array takes bf16[8,128] @ [128,128] in 8 cycles."""
    b = np.ones((128, 128))
    cycles = [simulate.systolic(np.ones((rows, 128)), b).cycles
              for rows in (8, 16, 24)]
    assert np.diff(cycles).tolist() == [8, 8]
    assert cycles[0] == 8 + 254  # and this long where the array is empty


def test_rebuilds_the_published_peak_of_a_v5e():
    """A full array does size**2 multiply-adds a cycle, on every unit."""
    v5e = chips.get("tpu-v5e")
    full = simulate.systolic(np.ones((300, 128)), np.ones((128, 128)))
    rate = full.busy.max() * 2 * v5e.mxus_per_core * v5e.cores * v5e.clock_hz
    assert rate == pytest.approx(v5e.peak("bf16"), rel=0.01)


@pytest.mark.parametrize("make", [
    lambda torch, jnp, x: torch.tensor(x, dtype=torch.bfloat16),
    lambda torch, jnp, x: torch.tensor(x, requires_grad=True),
    lambda torch, jnp, x: torch.tensor(x).to(torch.float8_e4m3fn),
    lambda torch, jnp, x: jnp.array(x, jnp.bfloat16),
    lambda torch, jnp, x: x, lambda torch, jnp, x: np.array(x, np.float16)],
    ids=["bf16", "with gradient", "fp8", "jax bf16", "list", "fp16"])
def test_arrays_of_any_maker_and_type(make):
    torch = pytest.importorskip("torch")
    jnp = pytest.importorskip("jax.numpy")
    a, b = [[1.5, -2.0]], [[3.0, 0.5], [0.25, 4.0]]
    made = simulate.systolic(make(torch, jnp, a), make(torch, jnp, b), 2)
    assert made.result.tolist() == [[4.0, -7.25]]


@pytest.mark.parametrize("a, b", [
    ([[2**62, 2**62]], [[1], [1]]), ([[-2**63, 0]], [[1], [0]]),
    ([[2**31, 2**31]], [[2**31], [2**31]]),
    (np.array([[2**63, 0]], np.uint64), [[1], [0]])])
def test_sums_that_int64_cannot_hold_are_refused(a, b):
    with pytest.raises(ValueError, match="floats if their sums pass int64"):
        simulate.systolic(a, b, 2)
    floats = np.array(a, float)
    assert simulate.systolic(floats, b, 2).result == floats @ b


@given(st.lists(st.integers(-2**61, 2**61), min_size=2, max_size=2))
def test_the_largest_sums_that_fit_are_exact(pair):
    b = np.array([[1], [1]])
    assert simulate.systolic([pair], b, 2).result.item() == sum(pair)


@pytest.mark.parametrize("a", [[[1j]], [["1"]], [[None]], [[2**70]]])
def test_what_is_no_real_number_is_named(a):
    with pytest.raises(ValueError, match="of .* give real numbers"):
        simulate.systolic(a, [[1]])


@pytest.mark.parametrize("size", [0, 2.5, "8", None, True])
def test_a_bad_size_is_named(size):
    with pytest.raises(ValueError, match="size is .*: give a whole number"):
        simulate.systolic([[1]], [[1]], size)


def test_frames():
    made = simulate.systolic(np.ones((1, 2)), np.ones((2, 2)), size=2)
    assert made.frames(0, 1, 2).split() == [
        "cycle", "0", "cycle", "1", "cycle", "2",
        "#.", ".#", "..", "..", "#.", ".#"]
    assert "simulated 2x2 array: 3 cycles, 33.3%" in str(made)


@pytest.mark.parametrize("a, b, size, says", [
    ((2, 3), (2, 3), 4, r"\(2, 3\) and \(2, 3\).*\(M, K\) and \(K, N\)"),
    ((2,), (2, 3), 4, "must be"),
    ((0, 3), (3, 3), 4, "empty"),
    ((2, 5), (5, 3), 4, "b is 5x3 and size is 4: cut b into tiles"),
    ((2, 3), (3, 5), 4, "b is 3x5"),
    ((2, 3), (3, 0), 4, "b is 3x0"),
])
def test_what_does_not_fit_is_named(a, b, size, says):
    with pytest.raises(ValueError, match=says):
        simulate.systolic(np.ones(a), np.ones(b), size)
