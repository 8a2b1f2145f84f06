"""Whose a function is, JAX's or torch's, and what it takes from around it.

Told without importing either. Floor 0.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from types import CodeType, FunctionType
from typing import Any

_PACKAGES = {"jax": "JAX", "jaxlib": "JAX", "torch": "torch"}


def front_end(fn: Callable, args: Any, otherwise: str = "JAX") -> str:
    """"JAX" or "torch", by fn and its arguments; else by what the code of fn
    names; else by what the functions named there name, and so on.

    ``otherwise`` where nothing tells, and beyond the first names where NumPy
    arrays are among the arguments. TypeError where fn and arguments mix both.
    """
    numpy = any(type(x).__module__ == "numpy" for x in leaves(args))
    for depth, level in enumerate(levels(fn, args)):
        found = {_PACKAGES[p] for x in level for p in _homes(x) & {*_PACKAGES}}
        if len(found) > 1 and not depth:
            raise TypeError(f"{name_of(fn)} and its arguments mix torch and "
                            "JAX: give all of one kind.")
        if len(found) == 1:
            return found.pop()
        if depth and numpy:
            break
    return otherwise


def levels(*trees: Any) -> Iterator[list[Any]]:
    """The leaves of ``trees``, then what functions among them take from
    around them or by default, what functions among those do, and so on."""
    level, seen = [*leaves(trees)], set()
    while level:
        yield level
        functions = {id(f): f for f in level if inspect.isfunction(f)
                     and id(f) not in seen}
        seen |= functions.keys()
        level = [x for f in functions.values() for x in leaves(
            (outside(f), f.__defaults__, f.__kwdefaults__))]


def leaves(tree: Any) -> Iterator[Any]:
    """What lists, dicts, dataclasses, partials and bound methods hold, in
    order, each container once."""
    todo, seen = [tree], {}  # which keeps what it names alive
    while todo:
        tree = todo.pop()
        if isinstance(tree, functools.partial):
            held = [tree.func, tree.args, tree.keywords]
        elif inspect.ismethod(tree):
            held = [tree.__self__, tree.__func__]
        elif is_dataclass(tree) and not isinstance(tree, type):
            held = [getattr(tree, of.name, None) for of in fields(tree)]
        elif isinstance(tree, dict | list | tuple):
            held = [*(tree.values() if isinstance(tree, dict) else tree)]
        else:
            yield tree
            continue
        if id(tree) not in seen:
            seen[id(tree)] = tree
            todo += reversed(held)


def outside(fn: FunctionType) -> tuple[dict[str, Any], dict[str, Any]]:
    """Variables of the functions around ``fn``, and globals, that it loads.

    By name; those that have no value yet are left out, and so are globals of
    a framework's own code, as in the function that vmap makes.
    """
    around, names = {}, {}
    for variable, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (),
                              strict=True):
        try:
            around[variable] = cell.cell_contents
        except ValueError:
            continue
    if not _packages(fn.__globals__.get("__name__")) & {*_PACKAGES}:
        names = {i.argval: fn.__globals__[i.argval]
                 for code in _codes(fn.__code__)
                 for i in dis.get_instructions(code)
                 if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")
                 and i.argval in fn.__globals__}
    return around, names


def uncompiled(fn: Any) -> Any:
    """The function or module that torch.compile wrapped; else ``fn``."""
    if hasattr(fn, "_orig_mod"):  # which has its forward's attributes, too
        return fn._orig_mod
    inner = getattr(fn, "_torchdynamo_orig_callable", fn)
    # functools.wraps gives a wrapper of it that name, too.
    return inner if getattr(fn, "__wrapped__", inner) is inner else fn


def name_of(fn: Any) -> str:
    inner = fn.func if isinstance(fn, functools.partial) else fn
    return getattr(inner, "__name__", type(inner).__name__)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of the functions inside it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _homes(x: Any) -> set[str]:
    """The packages that an object, its classes or a module are of."""
    return _packages(*(c.__module__ for c in type(x).__mro__), (
        x.__name__ if inspect.ismodule(x) else getattr(x, "__module__", "")))


def _packages(*modules: Any) -> set[str]:
    return {str(module).partition(".")[0] for module in modules}
