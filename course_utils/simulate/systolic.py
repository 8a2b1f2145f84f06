"""A weight-stationary systolic array, cycle by cycle: a model. Floor 3.

Each cell holds one weight. Every cycle a value of ``a`` moves one cell to
the right, a partial sum one cell down, and each cell that has a value does one
multiply-add. Row k of the array gets its values k cycles late, so that both
meet. Loading the weights is not counted. After the Scaling Book, chapter 2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from course_utils import host
from course_utils._whole import whole

if TYPE_CHECKING:
    from numpy import ndarray


@dataclass(frozen=True, eq=False)
class Systolic:
    """One product on a ``size`` x ``size`` array: a simulation, not a chip.

    ``result`` is (M, N). ``cycles`` run from the first multiply-add to the
    last; ``busy[t]`` cells work in cycle t; ``first`` and ``last``, each
    (K, N), are the cycles in which a cell begins and ends its work.
    """

    size: int
    result: ndarray = field(repr=False)
    busy: ndarray = field(repr=False)
    first: ndarray = field(repr=False)
    last: ndarray = field(repr=False)

    @property
    def cycles(self) -> int:
        return len(self.busy)

    @property
    def utilisation(self) -> float:
        """Multiply-adds done, of those ``size**2`` cells could have done."""
        return float(self.busy.sum()) / (self.size**2 * self.cycles)

    def frames(self, *cycles: int) -> str:
        """The cells that work (#) in each of these cycles, side by side."""
        grids = [[f"{f'cycle {t}':10}"] + [
            f"{''.join('#' if cell else '.' for cell in row):10}"
            for row in (self.first <= t) & (t <= self.last)] for t in cycles]
        return "\n".join("  ".join(row).rstrip()
                         for row in zip(*grids, strict=True))

    def __str__(self) -> str:
        return (f"simulated {self.size}x{self.size} array: {self.cycles} "
                f"cycles, {self.utilisation:.1%} of the cells' time used")


def systolic(a: Any, b: Any, size: int = 128) -> Systolic:
    """Multiply ``a`` (M, K) by ``b`` (K, N); K and N are at most ``size``.

    Arrays or tensors of any real type; sums are int64 or float64. ValueError
    says which shape does not fit, or what int64 cannot hold.
    """
    np = host.need("numpy", "the array is simulated with it")
    size = whole("size", size)
    a, b = (np.asarray(x.tolist() if hasattr(x, "detach") else x)
            for x in (a, b))  # NumPy knows no bf16 tensor, but its numbers
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or not a.size:
        raise ValueError(f"a and b have shapes {a.shape} and {b.shape}: they "
                         "must be (M, K) and (K, N), none of them empty.")
    (m, k), n = a.shape, b.shape[1]
    if not 1 <= n <= size or k > size:
        raise ValueError(f"b is {k}x{n} and size is {size}: cut b into tiles "
                         "that fit the array and add up the results.")
    kinds = {a.dtype.kind, b.dtype.kind}
    if (ints := kinds <= {*"biu"}) and 2**63 <= k * (
            abs(a.astype(object)).max() * abs(b.astype(object)).max()) or (
            not kinds <= {*"biufV"}):  # V: bf16 and the like
        raise ValueError(f"a and b are of {a.dtype} and {b.dtype}: give real "
                         "numbers, floats if their sums pass int64.")
    a, b = (x.astype("int64" if ints else "float64") for x in (a, b))
    result = np.zeros((m, n), a.dtype)
    value, total = np.zeros((2, k, n), a.dtype)  # in each cell
    row = np.full((k, n), -1)  # which row of a the value is from; -1: none
    first, last, busy = np.full((k, n), -1), np.full((k, n), -1), []
    for t in range(m + k + n - 2):
        value[:, 1:], row[:, 1:] = value[:, :-1].copy(), row[:, :-1].copy()
        entering = t - np.arange(k)
        row[:, 0] = np.where((0 <= entering) & (entering < m), entering, -1)
        value[:, 0] = a[row[:, 0], np.arange(k)]
        live = row >= 0
        total[1:], total[0] = total[:-1].copy(), 0
        total += np.where(live, value * b, 0)
        done = live[-1]
        result[row[-1, done], np.flatnonzero(done)] = total[-1, done]
        first[live & (first < 0)] = last[live] = t
        busy.append(live.sum())
    return Systolic(size, result, np.array(busy), first, last)
