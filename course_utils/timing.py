"""The time of one call, measured so that it means something. Floor 0."""

from __future__ import annotations

import math
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from course_utils import host
from course_utils._front import front_end, uncompiled
from course_utils._whole import whole

if TYPE_CHECKING:
    import pandas as pd


def best(fn: Callable, *args: Any, repeats: int = 3) -> float:
    """Seconds of the fastest of ``repeats`` calls of ``fn(*args)``.

    One call before them pays for compiling and for touching memory first. A
    call ends when its result is there: JAX and CUDA return before that. The
    fastest is the one that the rest of the machine disturbed least.
    """
    return min(seen.ready for seen in _watched(fn, args, repeats))


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
    return min(_watched(fn, args, repeats), key=lambda w: w.returned)


def _watched(fn: Callable, args: tuple, repeats: int) -> list[Watch]:
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


@dataclass(frozen=True)
class Compilation:
    """What compiling ``function`` costs and what it brings, in seconds.

    ``capture`` is the way from Python to a graph alone, ``first`` a whole
    first call, ``again`` the same call later, ``others`` the first calls with
    other arguments, in order, and ``plain`` a call without the compiler.
    """

    function: str
    compiler: str  # "jax.jit" or "torch.compile", with its back end if not
    capture: float  # its default
    first: float
    again: float
    others: tuple[float, ...]
    plain: float

    @property
    def pays_after(self) -> float:
        """Calls of one shape until compiling has saved time; inf if never."""
        gain = self.plain - self.again
        return math.ceil((self.first - self.again) / gain) if (
            gain > 0) else math.inf

    def __str__(self) -> str:
        return (f"{self.function}, {self.compiler}: first call "
                f"{_short(self.first)}, then {_short(self.again)}; without "
                f"compiler {_short(self.plain)}")

    __repr__ = __str__


def compilation(fn: Callable, args: tuple, *others: tuple) -> Compilation:
    """Compile ``fn`` and time each step of it.

    Torch tensors anywhere in ``args`` choose torch.compile, anything else
    jax.jit; of what either has made already the inside is the plain one. Each
    of ``others`` is a tuple like ``args``, say of another shape. Both
    compilers forget what they made before, in this process and on disk, but
    for C++ headers, which Inductor makes ready once. On x86 it uses vectors of
    256 bits, as XLA does unless told otherwise. Where no C++ compiler is
    found, "aot_eager" takes its place: graphs, run op by op. Torch is held to
    one thread: two that wait for each other measure how busy the machine is.
    """
    for given in (args, *others):
        if not isinstance(given, tuple | list):
            raise TypeError(f"args and others are tuples of arguments, and "
                            f"this is a {type(given).__name__}: put it in "
                            "one, as (x,).")
    torch = sys.modules.get("torch")
    fn = uncompiled(fn)
    if torch and front_end(fn, args) == "torch":
        found = _with_torch(torch, fn, args, others)
    else:
        found = _with_jax(fn, args, others)
    return Compilation(getattr(fn, "__name__", type(fn).__name__), *found)


def table(seen: Iterable[Compilation]) -> pd.DataFrame:
    """Rows of function and compiler; the columns name their units.

    ``other 1 ms``, ``other 2 ms``... are the first calls with others, in
    order; NaN where there was none.
    """
    pd = host.need("pandas", "it is a table")
    return pd.DataFrame(
        {(c.function, c.compiler): {
            "capture ms": 1e3 * c.capture, "first ms": 1e3 * c.first,
            "again ms": 1e3 * c.again,
            **{f"other {n} ms": 1e3 * s for n, s in enumerate(c.others, 1)},
            "plain ms": 1e3 * c.plain, "pays after calls": c.pays_after}
         for c in seen}).T.rename_axis(["function", "compiler"])


def _short(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _with_jax(fn: Callable, args: tuple, others: tuple) -> tuple:
    jax = host.need("jax", "jax.jit is its part")
    fast = jax.jit(fn)
    if isinstance(fn, type(fast)):  # a jit already, with options
        fast, fn = fn, fn.__wrapped__
    jax.clear_caches()
    capture = _once(fast.trace, args)
    jax.clear_caches()
    return "jax.jit", capture, *_calls(fn, fast, args, others)


def _with_torch(torch: Any, fn: Callable, args: tuple, others: tuple,
                ) -> tuple:
    name, how = "torch.compile", {"options": {"fx_graph_cache": False}}
    if not host.compiler():
        name, how = "torch.compile, aot_eager", {"backend": "aot_eager"}
    elif platform.machine() in ("x86_64", "AMD64"):  # no search for AVX-512
        how["options"] |= {"cpp.vec_isa_ok": True, "cpp.simdlen": 256}
    from torch._inductor.utils import fresh_cache

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.compiler.reset()
        capture = _once(torch.compile(fn, backend="eager"), args)
        torch.compiler.reset()
        with tempfile.TemporaryDirectory() as folder, fresh_cache(dir=folder):
            return name, capture, *_calls(
                fn, torch.compile(fn, **how), args, others)
    finally:
        torch.set_num_threads(threads)


def _calls(fn: Callable, fast: Callable, args: tuple, others: tuple) -> tuple:
    """Seconds: first call, a later one, the first of each other, plain."""
    return (_once(fast, args), _steady(fast, args),
            tuple(_once(fast, other) for other in others), _steady(fn, args))


def _steady(fn: Callable, args: tuple) -> float:
    """Seconds of the best call among as many as fit into 0.4 s."""
    return best(fn, *args, repeats=max(3, min(
        200, int(0.4 / _once(fn, args)))))


def _once(fn: Callable, args: tuple) -> float:
    start = time.perf_counter()
    _finish(fn(*args))
    return time.perf_counter() - start
