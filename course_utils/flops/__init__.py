"""Count what a JAX or PyTorch function costs, op by op. Floor 1.

Nothing is computed: JAX functions are traced, torch functions run on fake
tensors. What is counted is the program as written, before any fusion; dead
code of a jaxpr is left out.

``matmul``: products and convolutions, 2 FLOPs a multiply-add (8 if complex, 4
if one side is), padded taps included: in JAX a transposed convolution of
stride 1 is one over a padded input, in torch each input meets the kernel. A
gradient pairs what its forward pairs (in JAX, unless that is padded beyond
its size). Attention counts all pairs of
positions, masked or not, from its products whatever back end runs it (by
FlopCounterMode's formula if called by a back end's name); factorizations and
FFTs (5 n log2 n, half if real) by their textbook counts, an inverse as a
solve for the identity. ``elementwise``: float arithmetic, max, min and
reductions (n - 1 each). ``transcendental``: one for each exp, log, tanh, erf,
sqrt, power. ``integer``: integer arithmetic, comparisons, selects; a sort is
n log2 n. A product of mixed types is of floats if any is. Complex: a sum is
2, a product 6, else its two parts. Moving data and drawing random bits are no
FLOPs. A loop is its body times its trips, a branch the dearest of its ways, a
kernel of Pallas its body times its programs; a recomputation counts.

Each op reads its inputs and writes its outputs once; views move nothing, a
gather only what it takes, a write into part of an array what it writes
(through a mask: all). What has no rule is in ``unknown``: iterative
factorizations, collectives, callbacks, sparse and quantized ops; so is a
result whose size hangs on values, which counts as for ones.
"""

from __future__ import annotations

import contextlib
import html
import importlib
import inspect
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from course_utils._front import front_end, leaves
from course_utils.flops._rules import KINDS, WHY, Op, array
from course_utils.host import Missing, need

__all__ = ["KINDS", "Cost", "Op", "compare", "count"]
Wrt = str | int | tuple[int, ...] | None


@dataclass(frozen=True)
class Cost:
    """What one call costs: FLOPs by kind (``total`` without ``integer``).

    ``params`` counts the parameters (a tied one once), None where a function
    does not say which arguments they are. ``unknown`` names what has no
    rule and is in no other number, or was guessed, saying how.
    ``intensity`` is FLOP per byte.
    """

    ops: tuple[Op, ...]
    params: int | None = None
    unknown: tuple[str, ...] = ()
    matmul, elementwise, transcendental, integer, bytes, total = (
        property(lambda self, of=of: sum(getattr(op, of) for op in self.ops))
        for of in (*KINDS, "bytes", "flops"))
    intensity = property(lambda self: self.total / max(self.bytes, 1))

    def table(self) -> Any:
        """A pandas DataFrame, one row an op."""
        return need("pandas", WHY).DataFrame(
            [asdict(op) | {"flops": op.flops} for op in self.ops],
            columns=[*Op.__dataclass_fields__, "flops"])

    def __str__(self) -> str:
        shown = (*KINDS, "total", "bytes", "params")
        lines = [f"{name:15}{getattr(self, name):>21,}" for name in shown
                 if getattr(self, name) is not None]
        lines.append(f"{'FLOP/byte':15}{self.intensity:>21.1f}")
        return "\n".join(lines + [f"unknown: {x}" for x in self.unknown])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


@contextlib.contextmanager
def _dice_kept() -> Iterator[None]:
    """Leave Python's and NumPy's random numbers as they are."""
    numpy = sys.modules.get("numpy")
    ours, theirs = random.getstate(), numpy and numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(ours)
        if theirs:
            numpy.random.set_state(theirs)


@_dice_kept()
def count(fn: Callable, *args: Any, kwargs: dict | None = None,
          wrt: Wrt = None) -> Cost:
    """Count one call ``fn(*args, **kwargs)`` without running it.

    ``fn`` is a JAX function (arrays or jax.ShapeDtypeStruct) or a torch
    function or nn.Module (real or meta tensors). ``wrt`` None: forward only.
    "params" (trainable parameters; argument 0 of a function without any),
    "all" (those and the float arguments) or argument numbers: forward and
    backward with a cotangent of ones. Raises ValueError or TypeError naming
    the argument; warns of ``unknown``. A torch fn, its arguments and the
    modules it closes over are copied, without data, and left as they are;
    what else fn or a hook keeps (a global cache, a list) keeps fake tensors.
    A custom torch op counts by its ``register_flop_formula``.
    """
    front = _front_end(fn, args, kwargs)
    wrt = _check_wrt(wrt, len(args))
    try:
        ops, params, unknown = front.count(fn, args, kwargs or {}, wrt)
    except Missing:
        raise
    except Exception as error:
        why = (str(error).strip() or "no message").splitlines()[0][:200]
        raise ValueError(
            f"fn cannot be counted with {_described(fn, args)}: {why} "
            f"({type(error).__name__}). Check shapes and types, that fn "
            "looks at no value, and that what it differentiates is an "
            "argument.") from error
    cost = Cost(tuple(ops), params, tuple(dict.fromkeys(unknown)))
    if cost.unknown:
        warnings.warn("flops.count left out or guessed what it has no rule "
                      "for: " + "; ".join(cost.unknown), stacklevel=3)
    return cost


@_dice_kept()
def compare(fn: Callable, *args: Any, wrt: Wrt = None) -> Any:
    """A DataFrame: our count beside XLA's or torch's FlopCounterMode.

    ``flops`` leaves transcendentals apart, as XLA does; ``why`` says what
    makes a row differ from ours. XLA compiles for the default device.
    """
    cost = count(fn, *args, wrt=wrt)
    why = "; without ".join(["the program as written", *cost.unknown])
    rows = _front_end(fn, args, None).others(
        cost, fn, args, {}, _check_wrt(wrt, len(args)))
    return need("pandas", WHY).DataFrame([(
        "course_utils", cost.matmul, cost.matmul + cost.elementwise,
        cost.transcendental, cost.bytes, why), *rows], columns=[
            "counter", "matmul", "flops", "transcendental", "bytes",
            "why"]).convert_dtypes()


# --- arguments -------------------------------------------------------------
def _front_end(fn: Any, args: tuple, kwargs: Any) -> Any:
    """The module that counts such a call, for JAX or for torch."""
    if not callable(fn) or not isinstance(kwargs, dict | None):
        what, bad = ("kwargs", kwargs) if callable(fn) else ("fn", fn)
        raise TypeError(f"{what} is a {type(bad).__name__}: pass fn, a "
                        "function or module, its arguments, kwargs as a dict")
    name = front_end(fn, (args, kwargs)).lower()
    need(name, WHY)
    if name == "torch" and any(
            hasattr(x, "dtype") and type(x).__module__ == "numpy"
            for x in leaves([args, kwargs])):
        raise TypeError("args mix torch with NumPy arrays: pass one kind "
                        f"(here {_described(fn, args)})")
    return importlib.import_module(f"{__name__}._{name}")


def _check_wrt(wrt: Any, n: int) -> Any:
    """None, "params", "all" or a tuple of valid argument numbers."""
    numbers = tuple(wrt) if isinstance(wrt, list | tuple) else (wrt,)
    if wrt is None or numbers in (("params",), ("all",)):
        return wrt
    if not all(type(i) is int and 0 <= i < n for i in numbers):
        raise ValueError(f"wrt={wrt!r} is not None, 'params', 'all' or "
                         f"numbers of the {n} arguments (from 0)")
    return numbers


def _described(fn: Any, args: tuple) -> str:
    """"x f32[3,4], w f32[5,6]", with the function's own argument names."""
    names = [f"argument {i}" for i in range(len(args))]
    with contextlib.suppress(TypeError, ValueError):
        own = list(inspect.signature(fn).parameters)[:len(args)]
        names[:len(own)] = own
    return ", ".join(f"{name} " + (" ".join(
        str(array(x)) for x in leaves(arg) if hasattr(x, "dtype"))
        or " ".join(repr(arg).split())[:40])
        for name, arg in zip(names, args, strict=True))
