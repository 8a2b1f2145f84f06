"""One host thread that feeds kernels to one device. Floor 3."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from numbers import Real

from course_utils._whole import whole


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

    Python goes on at ``returned_us``, after its last call and wait. The device
    is done at ``total_us``; for ``device_idle_us`` until then it ran nothing.
    """

    kernel_us: float
    calls: tuple[Call, ...]
    returned_us: float

    @property
    def total_us(self) -> float:
        return self.calls[-1].device_end

    @property
    def device_idle_us(self) -> float:
        return self.total_us - len(self.calls) * self.kernel_us

    def __str__(self) -> str:
        return (f"{len(self.calls)} kernels, simulated: returned after "
                f"{self.returned_us:g} us, finished after {self.total_us:g};"
                f" device idle {self.device_idle_us:g} us")

    __repr__ = __str__


def queue(host_us: float, kernel_us: float, n: int,
          sync_every: int | None = None) -> Queue:
    """Exactly: a host thread issues ``n`` kernels to one in-order device.

    A call takes the host ``host_us``, then its kernel is in the queue; the
    device runs one at a time, each ``kernel_us``. The host goes on at once,
    except after every ``sync_every``-th call, when it waits for the device;
    None: never. Starting, waking up and copying cost nothing here.
    """
    for name, value in (("host_us", host_us), ("kernel_us", kernel_us)):
        if not (isinstance(value, Real) and isfinite(value) and value > 0):
            raise ValueError(f"{name} is {value!r}: give a time above 0.")
    n = whole("n", n)
    if sync_every is not None:
        sync_every = whole("sync_every", sync_every)
    calls: list[Call] = []
    host = device = 0
    for i in range(1, n + 1):
        start, host = host, host + host_us
        begin = max(host, device)
        device = begin + kernel_us
        calls.append(Call(start, host, begin, device))
        if sync_every and i % sync_every == 0:
            host = device
    return Queue(kernel_us, tuple(calls), host)
