"""One host thread that feeds kernels to one device. Floor 3."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import TYPE_CHECKING

from course_utils.host import need

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Call:
    """One kernel: when the host issues it, when the device runs it (us)."""

    host_start: float
    host_end: float
    device_start: float
    device_end: float


@dataclass(frozen=True)
class Queue:
    """What a simulated run of ``queue`` gave; all times in microseconds.

    ``returned_us`` is when Python goes on after its last call and wait,
    ``total_us`` when the device has finished. Until then each side is idle
    whenever it neither issues nor runs: ``host_idle_us``, ``device_idle_us``.
    """

    host_us: float
    kernel_us: float
    sync_every: int | None
    depth: int | None
    calls: tuple[Call, ...]
    returned_us: float

    @property
    def total_us(self) -> float:
        return self.calls[-1].device_end

    @property
    def host_idle_us(self) -> float:
        return self.total_us - len(self.calls) * self.host_us

    @property
    def device_idle_us(self) -> float:
        return self.total_us - len(self.calls) * self.kernel_us

    def table(self) -> DataFrame:
        """One row a call, times in microseconds."""
        pd = need("pandas", "a table is one of its DataFrames")
        return pd.DataFrame(list(map(vars, self.calls))).rename_axis("call")

    def __str__(self) -> str:
        return (f"{len(self.calls)} kernels, simulated: returned after "
                f"{self.returned_us:g} us, finished after {self.total_us:g};"
                f" device idle {self.device_idle_us:g} us")

    __repr__ = __str__


def queue(host_us: float, kernel_us: float, n: int,
          sync_every: int | None = None, depth: int | None = None) -> Queue:
    """Exactly: a host thread issues ``n`` kernels to one in-order device.

    A call takes the host ``host_us``, then its kernel is in the queue; the
    device runs one at a time, each ``kernel_us``. The host goes on at once,
    except after every ``sync_every``-th call, when it waits for the device,
    and before a call that would put more than ``depth`` kernels into the
    queue, unfinished ones counted. None: never. Starting, waking up and
    copying cost nothing here.
    """
    for name, value in (("host_us", host_us), ("kernel_us", kernel_us)):
        if not (isinstance(value, Real) and isfinite(value) and value > 0):
            raise ValueError(f"{name} is {value!r}: give a time above 0.")
    for name, value in (("n", n), ("sync_every", sync_every),
                        ("depth", depth)):
        if value is None and name != "n":
            continue
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}: give a whole number, 1 "
                             "or more.")
    calls: list[Call] = []
    host = device = 0
    for i in range(1, n + 1):
        if depth and i > depth:
            host = max(host, calls[i - 1 - depth].device_end)
        start, host = host, host + host_us
        begin = max(host, device)
        device = begin + kernel_us
        calls.append(Call(start, host, begin, device))
        if sync_every and i % sync_every == 0:
            host = device
    return Queue(host_us, kernel_us, sync_every, depth, tuple(calls), host)
