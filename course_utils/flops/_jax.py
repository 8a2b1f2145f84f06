"""JAX: walk the jaxpr of a call."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import compress
from typing import Any

import jax
from jax.interpreters import partial_eval

from course_utils.flops import _rules as rules

_CALLS = frozenset("jit pjit closed_call core_call remat checkpoint remat2 "
                   "custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr "
                   "custom_vmap_call composite pallas_call xla_pmap scan "
                   "shard_map custom_linear_solve while cond".split())
_ONES = "cotangent_of_ones"
_MOST_TRIPS = 10_000  # of a while whose test has to be run to count them
_MOST = f"more than {_MOST_TRIPS:,}"


def count(fn: Callable, args: tuple, kwargs: dict, wrt: Any) -> tuple:
    """(ops, parameters, unknown)."""
    program, arrays, wanted = _program(fn, args, kwargs, wrt)
    traced, unknown = jax.make_jaxpr(program)(*arrays), []
    rules.check_selected(wrt, wanted, any(
        _ONES in str(eqn.source_info.name_stack)
        for eqn in _live(traced.jaxpr, len(wanted)).eqns))
    # Dead are, for one, the gradients that nobody asked for.
    ops = [*_walk(_live(traced.jaxpr), "", "", 1, unknown, _held(traced))]
    unknown = [f"{n} times {what}" if n > 1 and "trips" in what else what
               for what, n in Counter(unknown).items()]
    params = sum(math.prod(x.shape) for x in {  # one array twice is tied
        id(x) if isinstance(x, jax.Array) else (i,): x
        for i, x in enumerate(wanted)}.values())
    return ops, params if wrt == "params" else None, unknown


def others(cost: Any, *call: Any) -> list[tuple]:
    """The rows of XLA's cost analysis for ``compare``."""
    program, arrays, _ = _program(*call)
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


def _held(jaxpr: Any) -> list[Callable]:
    """Functions that return the constants a closed jaxpr holds."""
    return [lambda c=c: c for c in getattr(jaxpr, "consts", ())]


def _reader(jaxpr: Any, inputs: list) -> Callable:
    """A function: the value of a variable, KeyError where arguments decide it.

    ``inputs``: for the first variables of jaxpr, functions that do the same.
    Only numbers and short lists of integers are worked out, and only by ops
    that have a rule: no products, no callbacks.
    """
    values = dict(zip(map(id, [*jaxpr.constvars, *jaxpr.invars]), inputs,
                      strict=False))
    by = {id(v): eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def value(atom: Any) -> Any:
        if hasattr(atom, "val"):
            return atom.val
        if id(atom) not in values:
            eqn = by[id(atom)]
            name, ins = eqn.primitive.name, eqn.invars
            if any(v.aval.size > (1 if rules.is_real(rules.array(
                    v.aval)) else 1000) for v in (*ins, atom)):
                raise KeyError
            if inner := _called(name, eqn.params):
                read = _reader(getattr(inner, "jaxpr", inner), _held(
                    inner) + [partial(value, v) for v in ins])
                made = [partial(read, v) for v in getattr(
                    inner, "jaxpr", inner).outvars]
            elif name in rules.JAX:
                made = eqn.primitive.bind(*map(value, ins), **eqn.params)
                made = [lambda x=x: x for x in (
                    made if eqn.primitive.multiple_results else [made])]
            else:
                raise KeyError
            values.update(zip(map(id, eqn.outvars), made, strict=True))
        return values[id(atom)]()
    return value


def _called(name: str, p: dict) -> Any:
    """The jaxpr of a plain call, None of anything else."""
    if name not in _CALLS or {"length", "mesh", "grid_mapping",
                              "global_axis_size"} & p.keys():
        return None
    return p.get("jaxpr") or p.get("call_jaxpr") or p.get("fun_jaxpr")


def _trips(p: dict, inputs: list) -> int:
    """How often a while runs; of its body, what its test needs is run."""
    test, body = p["cond_jaxpr"], p["body_jaxpr"]
    n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    carry = inputs[m:]
    for trips in range(_MOST_TRIPS):
        if not _reader(test.jaxpr, _held(test) + inputs[:n] + carry)(
                test.jaxpr.outvars[0]):
            return trips
        after = _reader(body.jaxpr, _held(body) + inputs[n:m] + carry)
        carry = [partial(after, v) for v in body.jaxpr.outvars]
    raise KeyError(_MOST)


def _line(eqn: Any) -> str:
    """Of the user's frames between an op and this file, the innermost."""
    for frame in getattr(eqn.source_info.traceback, "frames", ()):
        if frame.file_name == __file__:
            break
        if name := rules.shown(frame.file_name):
            return f"{name}:{frame.line_num}"
    return ""


def _walk(jaxpr: Any, path: str, line: str, repeats: int, unknown: list,
          inputs: list) -> Iterator[rules.Op]:
    """The ops of a jaxpr that runs ``repeats`` times; adds to unknown.

    ``line`` is that of a call into JAX's own code, which may have been
    traced before for another caller; "" asks each op.
    """
    behind = {}  # who reads a broadcast or reshape reads what is behind it
    read = {*map(id, jaxpr.outvars)} | {
        id(v) for eqn in jaxpr.eqns for v in eqn.invars}
    value = _reader(jaxpr, inputs)
    for eqn in jaxpr.eqns:
        name, p = eqn.primitive.name, eqn.params
        scope, here = str(eqn.source_info.name_stack), line or _line(eqn)
        at = "/".join(filter(None, (path, scope)))
        if name in _CALLS:
            at = "/".join(filter(None, (at, p.get("name", name))))
            p = p | {"wanted": [id(v) in read for v in eqn.outvars]}
            yield from _inside(name, p, at, here, repeats, unknown, [
                partial(value, v) for v in eqn.invars])
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
                [*map(id, eqn.invars)], rules.JAX[name], p, at, here, repeats)


def _inside(name: str, p: dict, at: str, line: str, repeats: int,
            unknown: list, inputs: list) -> Iterator[rules.Op]:
    """A call, a loop times its trips, the dearest branch of a cond."""
    def walk(inner: Any, inputs: list, trips: int = 1) -> Iterator[rules.Op]:
        inputs = _held(inner) + inputs
        inner = getattr(inner, "jaxpr", inner)
        source = str(inner.debug_info.func_src_info)
        own = not source or rules.shown(source.partition(" at ")[2])
        return _walk(inner, at, "" if own else line, repeats * trips,
                     unknown, inputs)

    grid = getattr(p.get("grid_mapping"), "grid", ())
    if name == "cond":
        every = [[[*walk(way, inputs[1:])]] for way in p["branches"]]
        yield from rules.dearest(every)[0]
    elif name == "while":
        yield from _while(p, walk, f"{at} {line}".strip(), repeats, unknown,
                          inputs)
    elif name == "shard_map":
        yield from walk(p["jaxpr"], [], math.prod(
            p["mesh"].shape[axis] for axis in p.get(
                "newly_manual_axes", p.get("manual_axes"))))
    elif name == "custom_linear_solve":
        yield from walk(p["jaxprs"].solve, [])
    elif not all(isinstance(n, int) for n in grid):
        unknown.append(f"{name} {line} (how many programs is not known)")
    else:
        inner = p.get("jaxpr") or p.get("call_jaxpr") or p.get(
            "fun_jaxpr") or p.get("call")
        times = p.get("length", p.get("global_axis_size", math.prod(grid)))
        if name == "scan":  # of its inputs, these are the same each time
            inputs = inputs[:p["num_consts"]]
        yield from walk(inner, [] if grid else inputs, times)


def _while(p: dict, walk: Callable, at: str, repeats: int, unknown: list,
           inputs: list) -> Iterator[rules.Op]:
    """Its test and body, less what only carries that nobody reads need."""
    n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    body, live = p["body_jaxpr"], p["wanted"]
    used = partial_eval.dce_jaxpr(p["cond_jaxpr"].jaxpr, [True])[1][n:]
    while any(found := [u and not v for u, v in zip(used, live, strict=True)]):
        live = [*map(any, zip(live, found, strict=True))]
        needed, used = partial_eval.dce_jaxpr(body.jaxpr, live)
        used = used[m - n:]
    needed, used = partial_eval.dce_jaxpr(body.jaxpr, live)
    held = _held(body) + [*compress(inputs[n:m], used)]
    try:
        trips = _trips(p, inputs)
    except Exception as error:  # an argument, a tracer, an axis: no number
        known = [*walk(needed, held)]
        one = sum(op.flops for op in known) // max(repeats, 1)
        most = f": {error.args[0]}" if _MOST in error.args else ""
        unknown.append(f"{at} (trips not known{most}; one is {one:,} FLOPs" + (
            f"; the loop runs {repeats:,} times)" if repeats > 1 else ")"))
    else:
        yield from walk(p["cond_jaxpr"], inputs[:n], trips + 1)
        yield from walk(needed, held, trips)
