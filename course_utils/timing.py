"""The time of one call, measured so that it means something. Floor 0."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from course_utils._whole import whole


def best(fn: Callable, *args: Any, repeats: int = 3) -> float:
    """Seconds of the fastest of ``repeats`` calls of ``fn(*args)``.

    One call before them pays for compiling and for touching memory first. A
    call ends when its result is there: JAX and CUDA return before that. The
    fastest is the one that the rest of the machine disturbed least.
    """
    return min(seen.ready for seen in _calls(fn, args, repeats))


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
    return min(_calls(fn, args, repeats), key=lambda w: w.returned)


def _calls(fn: Callable, args: tuple, repeats: int) -> list[Watch]:
    seen, repeats = [], whole("repeats", repeats)
    _finish(fn(*args))
    for _ in range(repeats):
        cpu, start = time.process_time(), time.perf_counter()
        result = fn(*args)
        returned = time.perf_counter() - start
        _finish(result)
        seen.append(Watch(returned, time.perf_counter() - start,
                          time.process_time() - cpu))
    return seen


def _finish(result: Any) -> None:
    if jax := sys.modules.get("jax"):  # else nothing here is of JAX
        jax.block_until_ready(result)  # the arrays in any pytree
    torch = sys.modules.get("torch")
    if torch and torch.accelerator.is_available():
        torch.accelerator.synchronize()
