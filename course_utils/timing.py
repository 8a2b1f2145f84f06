"""Wall time of one call, measured so that it means something. Floor 0."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def best(fn: Callable, *args: Any, repeats: int = 3) -> float:
    """Seconds of the fastest of ``repeats`` calls of ``fn(*args)``.

    One call before them pays for compiling and for touching memory first. A
    call ends when its result is there: JAX and CUDA return before that. The
    fastest is the one that the rest of the machine disturbed least.
    """
    if not isinstance(repeats, int) or repeats < 1:
        raise ValueError(f"repeats is {repeats!r}; it must be 1 or more.")
    _finish(fn(*args))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        _finish(fn(*args))
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _finish(result: Any) -> None:
    if hasattr(result, "block_until_ready"):
        result.block_until_ready()
    elif isinstance(result, tuple | list | dict):
        for part in result.values() if isinstance(result, dict) else result:
            _finish(part)
    elif getattr(result, "is_cuda", False):
        import torch

        torch.cuda.synchronize()
