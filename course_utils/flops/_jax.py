"""JAX: walk the jaxpr of a call."""

from __future__ import annotations

import contextlib
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any

import jax
from jax.interpreters import partial_eval

from course_utils.flops import _rules as rules

_PLAIN_CALLS = frozenset(
    "jit pjit closed_call core_call remat checkpoint remat2 custom_jvp_call "
    "custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call composite".split())
_CALLS = _PLAIN_CALLS | frozenset(
    "pallas_call xla_pmap scan shard_map custom_linear_solve while cond"
    .split())
_ONES = "cotangent_of_ones"
_MOST_TRIPS = 100_000  # of a while whose test has to be run to count them
# What a gradient turned around may pass through before it meets a product.
_SAME = frozenset("rev reshape transpose squeeze expand_dims copy "
                  "broadcast_in_dim convert_element_type".split())
# JAX keeps what it traced of a function, and would not see that another,
# which that one calls, has changed since; in a context of its own it traces.
_context = jax.make_user_context()


def count(fn: Callable, args: tuple, kwargs: dict, wrt: Any) -> tuple:
    """(ops, parameters, unknown)."""
    program, arrays, wanted = _program(fn, args, kwargs, wrt)
    with _context(object()):
        traced = jax.make_jaxpr(program)(*arrays)
    rules.check_selected(wrt, wanted, any(
        _ONES in str(eqn.source_info.name_stack)
        for eqn in _live(traced.jaxpr, len(wanted)).eqns))
    # Dead are, for one, the gradients that nobody asked for.
    ops = [*_walk(_live(traced.jaxpr), _consts(traced), unknown := [])]
    params = sum(math.prod(x.shape) for x in wanted)
    return ops, params if wrt == "params" else None, unknown


def others(cost: Any, *call: Any) -> list[tuple]:
    """The rows of XLA's cost analysis for ``compare``."""
    program, arrays, _ = _program(*call)
    with _context(object()):
        low, rows = jax.jit(program).lower(*arrays), []
    why = ", ".join(rules.differences(cost.ops) or ["other rules"])
    for name, stage in ("lowered", low), ("compiled", low.compile()):
        found = Counter(stage.cost_analysis())
        n, exps = found["flops"], found["transcendentals"]
        rows.append((f"XLA {name}", None, n, exps, found["bytes accessed"],
                     "agrees" if n == cost.matmul + cost.elementwise else why))
        why += ", fused and merged"
    return rows


def _program(fn: Callable, args: tuple, kwargs: dict,
             wrt: Any) -> tuple[Callable, list, list]:
    """A function of the arrays alone, the arrays, those differentiated."""
    flat, tree = jax.tree.flatten((args, kwargs))
    owner = [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    owner += [-1] * (len(flat) - len(owner))
    live = [i for i, x in enumerate(flat) if hasattr(x, "dtype")]
    chosen = {None: (), "params": (0,), "all": {*owner}}.get(wrt, wrt)

    def is_float(x: Any) -> bool:
        return hasattr(x, "dtype") and jax.numpy.issubdtype(
            x.dtype, jax.numpy.inexact)

    wanted = [i for i in live if owner[i] in chosen and is_float(flat[i])]
    rules.check_selected(wrt, wanted, True)

    def program(*arrays: Any) -> Any:
        held = dict(enumerate(flat)) | dict(zip(live, arrays, strict=True))

        def split(of: dict) -> tuple[list, list]:
            args, kwargs = tree.unflatten((held | of).values())
            out = jax.tree.leaves(fn(*args, **kwargs))
            return [y for y in out if is_float(y)], [
                y for y in out if not is_float(y)]

        if wrt is None:
            return split({})
        floats, pull, others = jax.vjp(
            split, {i: held[i] for i in wanted}, has_aux=True)
        with jax.named_scope(_ONES):  # behind a barrier, they stay visible
            ones = [jax.lax.optimization_barrier(jax.numpy.ones_like(y))
                    for y in floats]
        return floats, others, pull(ones)

    return program, [flat[i] for i in live], [flat[i] for i in wanted]


def _live(jaxpr: Any, last: int = 0) -> Any:
    """The jaxpr without what its results (the last few) do not need."""
    n = len(jaxpr.outvars)
    return partial_eval.dce_jaxpr(
        jaxpr, [False] * (n - last if last else 0) + [True] * (last or n))[0]


# --- values that no argument decides -----------------------------------------
def _nothing() -> None:
    """The value of what an argument decides."""


def _consts(jaxpr: Any) -> list[Callable]:
    """Functions that return the constants a closed jaxpr holds."""
    return [lambda c=c: c for c in getattr(jaxpr, "consts", ())]


def _part(jaxpr: Any, wanted: list[bool]) -> Any:
    """What ``wanted`` results need, of the same inputs: nothing is printed.

    An error where it is not to be run: a callback, a loop, a large array.
    """
    quiet = jaxpr.replace(eqns=[eqn for eqn in jaxpr.eqns if not eqn.effects])
    part, _ = partial_eval.dce_jaxpr(quiet, wanted, instantiate=True)
    for eqn in part.eqns:
        if eqn.primitive.name in _PLAIN_CALLS:
            inner = getattr(_body(eqn.params), "jaxpr", _body(eqn.params))
            _part(inner, [True] * len(inner.outvars))
        elif eqn.primitive.name not in rules.JAX or any(
                v.aval.size > 1000 for v in (*eqn.invars, *eqn.outvars)):
            raise ValueError(f"{eqn.primitive.name} is not to be run")
    return part


def _value(jaxpr: Any, inputs: list[Callable], atom: Any) -> Any:
    """What ``atom`` is, None where an argument decides it.

    ``inputs`` say so of the constants and arguments of jaxpr.
    """
    with contextlib.suppress(Exception):  # a tracer, an axis: no number
        part = _part(jaxpr.replace(outvars=[atom]), [True])
        read = {id(v) for eqn in part.eqns for v in eqn.invars} | {id(atom)}
        known = [of() if id(v) in read else None for v, of in zip(
            [*part.constvars, *part.invars], inputs, strict=True)]
        n = len(part.constvars)
        return jax.core.eval_jaxpr(part, known[:n], *known[n:])[0]


def _trips(p: dict, inputs: list[Callable]) -> int:
    """How often a while runs: it is run, on what its test needs alone.

    An error where that is not known.
    """
    test, body = p["cond_jaxpr"], p["body_jaxpr"]
    known = [of() for of in inputs]
    n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    live = _needed(p, [False] * len(body.jaxpr.outvars))
    goes_on, step = _part(test.jaxpr, [True]), _part(body.jaxpr, live)

    def carried(values: Any) -> list:
        values = iter(values)
        return [next(values) if needed else None for needed in live]

    trips, *_ = jax.lax.while_loop(
        lambda at: (at[0] < _MOST_TRIPS) & jax.core.eval_jaxpr(
            goes_on, test.consts, *known[:n], *at[1:])[0],
        lambda at: [at[0] + 1, *carried(jax.core.eval_jaxpr(
            step, body.consts, *known[n:m], *at[1:]))],
        [0, *carried(compress(known[m:], live))])
    return int(trips)


def _needed(p: dict, wanted: list[bool]) -> list[bool]:
    """What a while carries for ``wanted`` of it, and for its test."""
    test, body = p["cond_jaxpr"].jaxpr, p["body_jaxpr"].jaxpr
    more = partial_eval.dce_jaxpr(test, [True])[1][p["cond_nconsts"]:]
    while any(map(operator.gt, more, wanted)):  # that needs more, and so on
        wanted = [*map(operator.or_, more, wanted)]
        more = partial_eval.dce_jaxpr(body, wanted)[1][p["body_nconsts"]:]
    return wanted


# --- the walk ----------------------------------------------------------------
def _line(eqn: Any) -> str:
    """Of the user's frames between an op and this file, the innermost."""
    for frame in getattr(eqn.source_info.traceback, "frames", ()):
        if frame.file_name == __file__:
            break
        if name := rules.shown(frame.file_name):
            return f"{name}:{frame.line_num}"
    return ""


def _backward(eqn: Any, outer: bool) -> bool:
    """Whether an op is of a gradient and not a forward made again."""
    stack = eqn.source_info.name_stack.stack
    return not any(x.name == "rematted_computation" for x in stack) and (
        outer or any(x.name == "transpose" and type(x).__name__ == "Transform"
                     for x in stack))


@dataclass(frozen=True)
class _Place:
    """Where a walk is: in a jaxpr that runs ``repeats`` times.

    ``line`` is that of a call into JAX's own code, which may have been traced
    before for another caller; "" asks each op. ``backward``: in a gradient.
    """

    path: str = ""
    line: str = ""
    repeats: int = 1
    backward: bool = False

    def at(self, eqn: Any) -> _Place:
        name, path = eqn.primitive.name, [
            self.path, str(eqn.source_info.name_stack)]
        if name in _CALLS:
            path.append(eqn.params.get("name", name))
        return _Place("/".join(filter(None, path)), self.line or _line(eqn),
                      self.repeats, _backward(eqn, self.backward))


def _walk(jaxpr: Any, inputs: list, unknown: list,
          place: _Place = _Place()) -> Iterator[rules.Op]:
    """The ops of a jaxpr; adds to unknown. ``inputs``: see ``_value``."""
    behind = {}  # who reads a broadcast or reshape reads what is behind it
    turned = set()  # kernels that a gradient reversed (twice is not at all)
    n = len(jaxpr.constvars) + len(jaxpr.invars)
    value = partial(_value, jaxpr, inputs + [_nothing] * (n - len(inputs)))
    read = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | {
        *map(id, jaxpr.outvars)}
    for eqn in jaxpr.eqns:
        name, p, here = eqn.primitive.name, eqn.params, place.at(eqn)
        if name in _SAME and (id(eqn.invars[0]) in turned) != (
                name == "rev" and here.backward):
            turned.add(id(eqn.outvars[0]))
        if name in _CALLS:
            p = p | {"wanted": [id(v) in read for v in eqn.outvars]}
            yield from _inside(
                name, p, [partial(value, v) for v in eqn.invars], unknown,
                here)
        elif name not in rules.JAX or (
                name == "scatter" and p["update_jaxpr"]):  # applies it
            unknown.append(name)
        else:
            ins = [(a := rules.array(v.aval))._replace(
                nbytes=0 if hasattr(v, "val") else  # a literal
                behind.get(id(v), a.nbytes)) for v in eqn.invars]
            if rules.JAX[name] is rules.view:
                behind |= {id(v): a.nbytes for v, a in zip(
                    eqn.outvars, ins, strict=False)}
            yield from rules.ops_of(
                name, ins, [rules.array(v.aval) for v in eqn.outvars],
                [*map(id, eqn.invars)], rules.JAX[name], p | {
                    "backward": here.backward, "turned": any(
                        id(v) in turned for v in eqn.invars[1:2])},
                here.path, here.line, here.repeats)


def _inside(name: str, p: dict, inputs: list, unknown: list,
            here: _Place) -> Iterator[rules.Op]:
    """A call, a loop times its trips, the dearest branch of a cond."""
    def walk(inner: Any, inputs: list, times: int = 1) -> Iterator[rules.Op]:
        inputs = _consts(inner) + inputs
        inner = getattr(inner, "jaxpr", inner)
        source = str(inner.debug_info.func_src_info)
        own = not source or rules.shown(source.partition(" at ")[2])
        return _walk(inner, inputs, unknown, replace(
            here, line="" if own else here.line,
            repeats=here.repeats * times))

    if name == "cond":
        every = [[[*walk(way, inputs[1:])]] for way in p["branches"]]
        yield from rules.dearest(every)[0]
    elif name == "while":
        yield from _while(p, inputs, unknown, here, walk)
    elif name == "shard_map":
        yield from walk(p["jaxpr"], [], math.prod(
            p["mesh"].shape[axis] for axis in p.get(
                "newly_manual_axes", p.get("manual_axes"))))
    elif name == "custom_linear_solve":
        yield from walk(p["jaxprs"].solve, [])
    elif name == "pallas_call":
        grid = p["grid_mapping"].grid
        if all(isinstance(n, int) for n in grid):
            yield from walk(p["jaxpr"], [], math.prod(grid))
        else:
            unknown.append(
                f"{name} {here.line} (how many programs is not known)")
    else:
        times = p.get("length", p.get("global_axis_size", 1))
        if name == "scan":  # of its inputs, these are the same each time
            inputs = inputs[:p["num_consts"]]
        yield from walk(_body(p), inputs, times)


def _body(p: dict) -> Any:
    """The jaxpr of a call."""
    return next(p[name] for name in (
        "jaxpr", "call_jaxpr", "fun_jaxpr", "call") if p.get(name))


def _while(p: dict, inputs: list, unknown: list, here: _Place,
           walk: Callable) -> Iterator[rules.Op]:
    """Its test and body, less what only carries that nobody reads need."""
    n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    body, held = p["body_jaxpr"], inputs[n:m]
    body = body.replace(jaxpr=partial_eval.dce_jaxpr(
        body.jaxpr, _needed(p, p["wanted"]), instantiate=True)[0])
    try:
        trips = _trips(p, inputs)
    except Exception:  # of None nothing is worked out
        trips = None
    if trips is None or trips == _MOST_TRIPS:
        one = sum(op.flops for op in walk(body, held)) // max(here.repeats, 1)
        most = f": more than {_MOST_TRIPS:,}" * bool(trips)
        runs = f"; the loop runs {here.repeats:,} times" * (here.repeats > 1)
        unknown.append(f"{here.path} {here.line}".strip() + (
            f" (trips not known{most}; one is {one:,} FLOPs{runs})"))
    else:
        yield from walk(p["cond_jaxpr"], inputs[:n], trips + 1)
        yield from walk(body, held, trips)
