"""The time of one call, measured so that it means something. Floor 0."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def best(fn: Callable, *args: Any, repeats: int = 3) -> float:
    """Seconds of the fastest of ``repeats`` calls of ``fn(*args)``.

    One call before them pays for compiling and for touching memory first. A
    call ends when its result is there: JAX and CUDA return before that. The
    fastest is the one that the rest of the machine disturbed least.
    """
    _check(repeats)
    _finish(fn(*args))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        _finish(fn(*args))
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@dataclass(frozen=True)
class Watch:
    """One call, in seconds from its start.

    ``returned`` is when Python had the result in hand, ``ready`` when the
    result was there: both wall time. ``cpu`` is the processor time until
    then, all threads of this process added up; a GPU's work is not in it.
    """

    returned: float
    ready: float
    cpu: float

    def __str__(self) -> str:
        return (f"returned after {self.returned * 1e3:.3g} ms, ready after "
                f"{self.ready * 1e3:.3g} ms, {self.cpu * 1e3:.3g} ms of CPU "
                "time")

    __repr__ = __str__


def watch(fn: Callable, *args: Any, repeats: int = 3) -> Watch:
    """When ``fn(*args)`` returns, when its result is ready, at what CPU time.

    One call before them warms up. Of ``repeats`` calls, the one that returned
    soonest: the rest of the machine disturbed it least.
    """
    _check(repeats)
    _finish(fn(*args))
    seen = []
    for _ in range(repeats):
        cpu, start = time.process_time(), time.perf_counter()
        result = fn(*args)
        returned = time.perf_counter() - start
        _finish(result)
        seen.append(Watch(returned, time.perf_counter() - start,
                          time.process_time() - cpu))
    return min(seen, key=lambda w: w.returned)


def _check(repeats: Any) -> None:
    if not isinstance(repeats, int) or repeats < 1:
        raise ValueError(f"repeats is {repeats!r}; it must be 1 or more.")


def _finish(result: Any) -> None:
    if hasattr(result, "block_until_ready"):
        result.block_until_ready()
    elif isinstance(result, tuple | list | dict):
        for part in result.values() if isinstance(result, dict) else result:
            _finish(part)
    elif getattr(result, "is_cuda", False):
        import torch

        torch.cuda.synchronize()
