"""Triton's interpreter: a kernel run in Python, each access seen. Floor 1.

The private names of it that the course uses are in ``triton.internals``.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

from course_utils._front import outside
from course_utils.compilers.triton import ALONE, internals

_MEMORY = {  # what it is, the places of its arguments
    "load": ("load", 0, 2, 1),  # pointers, other, mask
    "store": ("store", 0, 1, 2),  # pointers, values, mask
    "atomic_rmw": ("atomic", 1, 2, 3),  # pointers, values, mask
    "atomic_cas": ("atomic", 0, 1, None),  # pointers, values, no mask
}
_TAG = 56  # no address needs the bits from here on


def interpret(kernel: Any, grid: tuple[int, ...], args: Iterable[Any],
              note: Callable[..., None]) -> None:
    """Run ``kernel`` over ``grid`` in Python, on tensors in the CPU's memory.

    ``note(kind, program, tensors, addresses, shape, width, line, lane)`` is
    called before each load, store or atomic that has a lane with its mask
    on: which tensor arguments its pointers come from (1 the first, 0 none),
    addresses of those lanes (uint64, row by row), shape of the block, bytes a
    lane, line of the kernel's source, number of the first such lane. Raises
    what the kernel or ``note`` raises, and ValueError for types that come out
    wrong: bf16 and fp8.
    """
    with ALONE:  # looked up inside: outside they may be another thread's
        triton = internals()
        inner, language = triton.interpreter, triton.package.language
        builder, partial = inner.interpreter_builder, functools.partial
        function = functools.cache(partial(_interpreted, inner))

        def call(helper: Any, *args: Any, **kwargs: Any) -> Any:
            return function(helper.fn).rewrite()(*args, **kwargs)

        def seen(kind: str, tensors: list[int], addresses: Any, shape: tuple,
                 width: int, lane: int) -> None:
            note(kind, builder.grid_idx, tensors, addresses, shape, width,
                 _line(kernel.fn.__code__), lane)

        # Triton's own switch spoils every later compile; this is restored.
        scope = triton.scope()
        patch = scope.set_attr
        try:
            patch(inner, "_LangPatchScope", lambda: scope)  # if stopped, too
            triton.patch(SimpleNamespace(
                __globals__={"tl": language, "core": language.core}))
            patch(triton.jit.JITFunction, "__call__", call)
            patch(inner, "_implicit_cvt", partial(
                _tagged, triton.convert, itertools.count(1)))
            patch(inner, "_get_np_dtype", partial(_checked, triton.numpy_type))
            patch(inner, "_patch_lang_tensor", partial(
                _indexed, triton.patch_tensor))
            patch(inner.InterpreterBuilder, "create_dot", staticmethod(
                partial(_dot, inner.TensorHandle, builder.create_dot)))
            for name, how in _MEMORY.items():
                patch(triton.memory, name, _noted(
                    getattr(triton.memory, name), seen, *how))
            function(kernel.fn)[grid](*args)
        except inner.InterpreterError as error:
            raise (error.__cause__ or error) from None
        finally:
            scope.restore()


def _interpreted(inner: Any, fn: Callable) -> Any:
    """``fn`` as Triton's interpreter has it."""
    # In a copy of its globals: the rewriter leaves its imports behind, and
    # looks nowhere else for what a closure holds.
    names = fn.__globals__ | outside(fn)[0]
    copy = FunctionType(fn.__code__, names, fn.__name__, fn.__defaults__,
                        fn.__closure__)
    made = inner.InterpretedFunction(functools.update_wrapper(copy, fn))
    made.rewritten_fn = {}  # its own: Triton's would outlive the launch
    return made


def _line(code: CodeType) -> int:
    """Of a kernel's source, 1 its first; 0 if it is not running."""
    frame = sys._getframe(1)
    while frame and (frame.f_code.co_filename, frame.f_code.co_name) != (
            code.co_filename, code.co_name):
        frame = frame.f_back
    return frame.f_lineno - code.co_firstlineno + 1 if frame else 0


def _tagged(convert: Callable, numbers: Iterator[int], value: Any) -> Any:
    """An argument as the interpreter has it, an address with its number.

    In the top byte the number goes with whatever is computed from the
    address, also where two arguments share memory.
    """
    made = convert(int(value) if isinstance(value, bool) else value)
    if hasattr(value, "data_ptr"):
        made.handle.data |= next(numbers) << _TAG
    return made


def _indexed(patch: Callable, tensor: type, scope: Any) -> None:
    """A tensor as Triton patches it, but that NumPy 2.4 counts by, too.

    Triton 3.6 counts by ``int`` of an array, which no longer exists.
    """
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _checked(numpy_type: Callable, kind: Any) -> Any:
    """NumPy's type for Triton's ``kind``, if that comes out right."""
    if re.match("bf16|fp8", str(getattr(kind, "scalar", kind))):
        raise ValueError(
            f"The kernel computes in {kind}, in which the interpreter is "
            "wrong: take the type from a pointer (y_ptr.dtype.element_ty), "
            "or launch on a GPU.")
    return numpy_type(kind)


def _noted(call: Callable, seen: Callable[..., None], kind: str, at: int,
           value: int, mask: int | None) -> Callable:
    """``call``, which reads or writes memory, ``seen`` before it does."""
    import numpy as np

    def noted(*args: Any) -> Any:
        tags, addresses = args[at] >> _TAG, args[at] & (1 << _TAG) - 1
        # For a block pointer Triton gives a memoryview.
        on = np.asarray(args[mask] if mask else np.ones(tags.shape), bool)
        if on.any():
            seen(kind, np.unique(tags[on]).tolist(), addresses[on],
                 addresses.shape, args[value].dtype.itemsize,
                 int(on.argmax()))
        return call(*args[:at], addresses, *args[at + 1:])

    return noted


def _dot(handle: Callable, whole: Callable, a: Any, b: Any, d: Any,
         *rest: Any) -> Any:
    """a @ b + d, some rows at a time: too few for BLAS to share out.

    Its threads wait for each other by spinning, and with other work about
    that is 1000 times slower.
    """
    import numpy as np

    rows = max(1, 2**18 // (b.data.shape[-2] * b.data.shape[-1]))

    def part(block: Any, first: int) -> Any:
        return handle(block.data[..., first:first + rows, :], block.dtype)

    parts = [whole(part(a, first), b, part(d, first), *rest)
             for first in range(0, d.data.shape[-2], rows)]
    return handle(np.concatenate([part.data for part in parts], -2),
                  parts[0].dtype)
