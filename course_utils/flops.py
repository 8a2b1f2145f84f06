"""Count what a JAX or PyTorch function costs, op by op. Floor 1.

Nothing is computed: JAX functions are traced, torch functions run on fake
tensors. What is counted is the program as written, before any fusion (dead
code of a jaxpr left out). ``matmul``: products and convolutions, 2 FLOPs a
multiply-add (8 if complex), padded taps and dense attention included.
``elementwise``: float arithmetic, max, min and reductions (n - 1 each).
``transcendental``: one for each exp, log, tanh, erf, sqrt, power.
``integer``: integer arithmetic, comparisons, selects; a sort is n log2 n.
A complex number counts as its two parts outside products. Moving data and
drawing random bits are no FLOPs. Each op reads its inputs and writes its
outputs once; views move nothing, a gather or a write into part of an array
only that part.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import html
import inspect
import math
import re
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, NamedTuple

from course_utils.host import Missing, need

KINDS = ("matmul", "elementwise", "transcendental", "integer")
Wrt = str | int | tuple[int, ...] | None
_WHY = "counting FLOPs here needs it"


@dataclass(frozen=True)
class Op:
    """One op of a program; its FLOPs and bytes cover all ``repeats`` runs.

    ``path`` is where it stands (module, scope, loop); ``shapes`` are its
    inputs, then its outputs, as "bf16[512,1024]".
    """

    name: str
    path: str
    shapes: tuple[str, ...]
    matmul: int
    elementwise: int
    transcendental: int
    integer: int
    bytes: int
    repeats: int = 1
    flops = property(
        lambda self: self.matmul + self.elementwise + self.transcendental)


@dataclass(frozen=True)
class Cost:
    """What one call costs: FLOPs by kind (``total`` without ``integer``).

    ``params`` counts the parameters (a tied one once), None where a function
    does not say which arguments they are. ``unknown`` names what could not
    be counted and is in no other number. ``intensity`` is FLOP per byte.
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
        return need("pandas", _WHY).DataFrame(
            [asdict(op) | {"flops": op.flops} for op in self.ops])

    def __str__(self) -> str:
        shown = (*KINDS, "total", "bytes", "params")
        lines = [f"{name:15}{getattr(self, name):>21,}" for name in shown
                 if getattr(self, name) is not None]
        lines.append(f"{'FLOP/byte':15}{self.intensity:>21.1f}")
        return "\n".join(lines + [f"not counted: {x}" for x in self.unknown])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def count(fn: Callable, *args: Any, kwargs: dict | None = None,
          wrt: Wrt = None) -> Cost:
    """Count one call ``fn(*args, **kwargs)`` without running it.

    ``fn`` is a JAX function (arrays or jax.ShapeDtypeStruct) or a torch
    function or nn.Module (real or meta tensors). ``wrt`` None: forward only.
    "params" (trainable parameters, also of modules that fn closes over or
    names; argument 0 of a function without any), "all" (those and the float
    arguments) or argument numbers: forward and backward with a cotangent of
    ones. Raises ValueError or TypeError naming the argument. What a torch
    function reaches through arguments, closure, globals or ``self`` is
    replaced by fake copies; what it takes from a class or a Python module is
    the real one.
    """
    run = _torch if _front_end(fn, args, kwargs) == "torch" else _jax
    wrt = _check_wrt(wrt, len(args))
    try:
        cost = run(fn, args, kwargs or {}, wrt)
    except Missing:
        raise
    except Exception as error:
        why = (str(error).strip() or "no message").splitlines()[0][:200]
        raise ValueError(
            f"fn cannot be counted with {_described(fn, args)}: {why} "
            f"({type(error).__name__}). Check shapes and types, and that fn "
            "looks at no value.") from error
    if cost.unknown:
        warnings.warn("flops.count left out what it has no rule for: "
                      + "; ".join(cost.unknown), stacklevel=2)
    return cost


def compare(fn: Callable, *args: Any, wrt: Wrt = None) -> Any:
    """A DataFrame: our count beside XLA's or torch's FlopCounterMode.

    ``flops`` leaves transcendentals apart, as XLA does; ``why`` says what
    makes a row differ from ours. XLA compiles for the default device.
    """
    cost, call = count(fn, *args, wrt=wrt), (
        fn, args, {}, _check_wrt(wrt, len(args)))
    ours = cost.matmul + cost.elementwise
    rows = [("course_utils", cost.matmul, ours, cost.transcendental,
             cost.bytes, "the program as written")]
    why = [f"we left out {what}" for what in cost.unknown]
    why += ["complex counts as real"] * bool(re.search(r"\bc\d", str(
        [op.shapes for op in cost.ops])))
    if _front_end(fn, args, {}) == "torch":
        from torch.utils.flop_counter import FlopCounterMode

        _torch_run(*call, counter := FlopCounterMode(display=False))
        n = counter.get_total_flops()
        why += ["no formula, no FLOPs (attention on CPU, mv, dot)"]
        rows.append(("FlopCounterMode", n, n, None, None, "; ".join(
            ["elementwise is 0", *why * (n != cost.matmul)])))
    else:
        why += ["a loop's body counts once"] * any(
            op.repeats != 1 for op in cost.ops)
        program, arrays, _ = _jax_program(*call)
        low = need("jax", _WHY).jit(program).lower(*arrays)
        for stage, name, also in (
                (low, "lowered", "its rules for single ops"),
                (low.compile(), "compiled", "after fusing, merging")):
            found = stage.cost_analysis() or {}
            n = found.get("flops")
            rows.append((f"XLA {name}", None, n, found.get(
                "transcendentals", 0), found.get("bytes accessed"),
                "agrees" if n == ours else "; ".join(why or [also])))
    return need("pandas", _WHY).DataFrame(rows, columns=[
        "counter", "matmul", "flops", "transcendental", "bytes", "why"],
    ).convert_dtypes()


# --- arguments -------------------------------------------------------------
def _leaves(tree: Any) -> Iterator[Any]:
    if is_dataclass(tree) and not isinstance(tree, type):
        tree = [getattr(tree, field.name) for field in fields(tree)]
    if isinstance(tree, dict | list | tuple):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(item)
    else:
        yield tree


def _front_end(fn: Any, args: tuple, kwargs: Any) -> str:
    if not callable(fn) or not isinstance(kwargs, dict | None):
        what, bad = ("kwargs", kwargs) if callable(fn) else ("fn", fn)
        raise TypeError(f"{what} is a {type(bad).__name__}: pass fn, a "
                        "function or module, its arguments, kwargs as a dict")
    torch = sys.modules.get("torch")
    ours = (torch.Tensor, torch.nn.Module) if torch else ()
    given = [fn, getattr(fn, "__self__", fn), args, kwargs]
    while isinstance(fn, functools.partial):
        given, fn = [*given, fn.func, fn.args, fn.keywords], fn.func
    kinds = {"torch" if isinstance(x, ours) else "jax" for x in _leaves(given)
             if isinstance(x, ours) or (hasattr(x, "dtype") and x is not fn)}
    if len(kinds) == 2:
        raise TypeError("args mix torch with JAX or NumPy arrays: pass one "
                        f"kind (here {_described(fn, args)})")
    if not kinds and torch:  # no array given: does fn name anything of torch?
        with contextlib.suppress(TypeError):  # not a Python function
            names = inspect.getclosurevars(fn)
            given += [names.nonlocals, names.globals]
        kinds = {"torch" for x in _leaves(given) if isinstance(x, ours)
                 or x is torch or "torch" == str(
                     getattr(x, "__module__", "")).partition(".")[0]}
    return "torch" if "torch" in kinds else "jax"


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
        str(_array(x)) for x in _leaves(arg) if hasattr(x, "dtype"))
        or repr(arg)[:40]) for name, arg in zip(names, args, strict=True))


def _selected(wrt: Any, wanted: list, reached: bool) -> None:
    if wrt is not None and not wanted:
        raise ValueError(f"wrt={wrt!r} selects no floating-point array")
    if wrt is not None and not reached:
        raise ValueError(f"nothing fn returns depends on wrt={wrt!r}: return "
                         "an array made from it, with gradients on")


# --- rules: inputs, outputs, parameters of an op -> how much of each kind,
# and "bytes" where it moves other than all its inputs and outputs -----------
class _Array(NamedTuple):
    """``nbytes`` is what it stores: less than its shape if broadcast."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    nbytes: int
    size = property(lambda self: math.prod(self.shape))

    def __str__(self) -> str:
        short = re.sub("(f)loat|(c)omplex|(i)nt", r"\1\2\3", self.dtype)
        return f"{short}[{','.join(map(str, self.shape))}]"


def _array(x: Any) -> _Array:
    """Of an aval, array or tensor; a stride of 0 stores one element."""
    steps = x.stride() if hasattr(x, "is_sparse") else (1,) * len(x.shape)
    held = (n for n, step in zip(x.shape, steps, strict=True) if step or not n)
    itemsize = getattr(x.dtype, "itemsize", 0)
    return _Array(tuple(x.shape), str(x.dtype).removeprefix("torch."),
                  itemsize, math.prod(held) * itemsize)


def _held(arrays: list[_Array]) -> int:
    return sum(a.nbytes for a in arrays)


def _tally(kind: str, n: int, like: _Array) -> Counter:
    """n operations in this dtype, as real operations under their kind."""
    if "int" in like.dtype or like.dtype == "bool":
        return Counter(integer=n)
    real = 1 if like.dtype[0] != "c" else 4 if kind == "matmul" else 2
    return Counter({kind: n * real})


def _each(kind: str, times: int = 1, more: Callable = lambda p: 0) -> Callable:
    """``times`` for each output, and as often again as ``more`` says."""
    return lambda ins, outs, p: _tally(
        kind, (times + more(p)) * outs[0].size, outs[0])


def _reduce(kind: str, per_input: int = 1, per_output: int = -1) -> Callable:
    return lambda ins, outs, p: _tally(kind, max(
        0, per_input * ins[0].size + per_output * outs[0].size), ins[0])


def _moves(held: Callable) -> Callable:
    return lambda ins, outs, p: Counter(bytes=held(ins, outs))


_move = _moves(lambda ins, outs: _held(ins) + _held(outs))
_view = _moves(lambda ins, outs: 0)
_take = _moves(lambda ins, outs: _held(ins[1:]) + 2 * _held(outs))
_fill = _moves(lambda ins, outs: _held(ins[1:]) + _held(outs))


def _put(size: int | Callable, adds: bool = False) -> Callable:
    """Writes, or adds to, as much of ins[0] as ins[size] has."""
    def rule(ins: list, outs: list, p: dict) -> Counter:
        n = size(ins, p) if callable(size) else ins[size].size
        add = bool(p.get("accumulate", adds))
        work = _tally("elementwise", n * add, ins[0])
        work["bytes"] = _held(ins[1:]) + n * ins[0].itemsize * (1 + add)
        return work
    return rule


def _rows(ins: list, p: dict) -> int:
    """Elements in the rows of ins[0] that an index of one axis names."""
    return ins[0].size // _line(ins, p) * ins[1].size


def _indexed(ins: list, p: dict) -> int:
    """Elements of ins[0] at p["indices"]; at a mask, it could be all."""
    from torch import bool as mask
    from torch import broadcast_shapes
    index = [i for i in p["indices"] if i is not None]
    if any(i.dtype == mask for i in index):
        return ins[0].size
    axes = zip(ins[0].shape, p["indices"], strict=False)
    over = math.prod(n for n, i in axes if i is not None)
    shape = broadcast_shapes(*(i.shape for i in index))
    return ins[0].size // max(over, 1) * math.prod(shape)


def _line(ins: list, p: dict) -> int:
    """Length of the axis an op runs along."""
    axis = p.get("axis", p.get("dimension", p.get("dim", -1)))
    return max(ins[0].shape[axis], 1) if ins[0].shape else 1


def _power(ins: list, outs: list, p: dict) -> Counter:
    """x**3 is two products, x**-1 one division, x**0.5 a transcendental."""
    y = p.get("y", p.get("exponent"))
    if not isinstance(y, int | float) or y != int(y) or not 0 < abs(y) < 64:
        return _each("transcendental")(ins, outs, p)
    n = int(abs(y)).bit_length() + int(abs(y)).bit_count() - 2 + (y < 0)
    return _each("elementwise", n)(ins, outs, p)


def _jax_dot(ins: list, outs: list, p: dict) -> Counter:
    over = p["dimension_numbers"][0][0]
    if not over:  # an outer product multiplies and adds nothing
        return _each("elementwise")(ins, outs, p)
    return _tally("matmul", 2 * outs[0].size * math.prod(
        ins[0].shape[axis] for axis in over), ins[0])


def _jax_conv(ins: list, outs: list, p: dict) -> Counter:
    """A gradient pairs the same elements as its forward, padding included."""
    lhs, rhs, out = p["dimension_numbers"]
    macs = math.prod(outs[0].shape[d] for d in out[:2]) * ins[1].shape[rhs[1]]
    # JAX makes the weights' gradient by swapping batch and features in both
    # operands, which makes their layouts the same.
    of_weights = p["backward"] and lhs == rhs
    of_input = p["backward"] and lhs != rhs
    for a, b, c, stride, hole in zip(lhs[2:], rhs[2:], out[2:], p[
            "window_strides"], p["lhs_dilation"], strict=True):
        x, w, y = ins[0].shape[a], ins[1].shape[b], outs[0].shape[c]
        if hole > 1:  # spread out with holes, which are no operands
            macs *= x * (y if of_weights else w)
        else:
            macs *= w * (x if of_input and stride == 1 else y)
    return _tally("matmul", 2 * macs, ins[0])


def _product(ins: list, outs: list, p: dict) -> Counter:
    over = ins[0].shape[-1:]
    if (len(ins[0].shape), len(outs[0].shape)) == (3, 2):  # addbmm
        over = ins[0].shape[::2]  # sums its batch too
    return _tally("matmul", 2 * outs[0].size * math.prod(over), ins[0])


def _add_product(ins: list, outs: list, p: dict) -> Counter:
    """beta * ins[0] + alpha * (ins[1] @ ins[2])."""
    alpha, beta, n = p.get("alpha", 1), p.get("beta", 1), outs[0].size
    adds = n * (beta != 0) + n * (alpha != 1) + ins[0].size * (
        beta not in (0, 1))
    return _product(ins[1:], outs, p) + _tally("elementwise", adds, ins[1])


def _conv(ins: list, outs: list, p: dict) -> Counter:
    """Forward, or backward for what output_mask asks: (x, weight, bias)."""
    mask = p.get("output_mask")
    x, weight = ins[1:3] if mask else ins[:2]
    y = ins[0] if mask else outs[0]
    macs = (x if p["transposed"] else y).size * math.prod(weight.shape[1:])
    if mask:
        macs *= mask[0] + mask[1]
        adds = (y.size - y.shape[1]) * mask[2]
    else:
        adds = y.size * (p["bias"] is not None)
    return _tally("matmul", 2 * macs, x) + _tally("elementwise", adds, x)


def _table(rows: dict[str, Any]) -> dict[str, Any]:
    return {name: rule for names, rule in rows.items()
            for name in names.split()}


_COMMON = _table({
    "neg abs maximum minimum floor ceil round sign square trunc relu mul "
    "reciprocal fmod remainder rem nextafter": _each("elementwise"),
    "add sub": _each("elementwise", 1, lambda p: p.get("alpha", 1) != 1),
    "div": _each("elementwise", 1, lambda p: bool(p.get("rounding_mode"))),
    "exp exp2 expm1 log log1p log2 log10 tanh sin cos tan asin acos atan "
    "atan2 sinh cosh asinh acosh atanh erf erfc erfinv erf_inv sqrt rsqrt "
    "cbrt lgamma digamma logistic sigmoid": _each("transcendental"),
    "eq ne lt le gt ge": _each("integer"), "pow integer_pow": _power,
    "cumsum cumprod cummax cummin": lambda ins, outs, p: _tally(
        "elementwise", ins[0].size - ins[0].size // _line(ins, p), ins[0]),
    "sort topk top_k": lambda ins, outs, p: Counter(
        integer=ins[0].size * math.ceil(math.log2(_line(ins, p)))),
    "argmax argmin": _reduce("integer")})
_JAX = _COMMON | _table({
    "add_any max min": _each("elementwise"), "clamp": _each("elementwise", 2),
    "select_n is_finite and or xor not population_count clz shift_left "
    "shift_right_logical shift_right_arithmetic": _each("integer"),
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or "
    "reduce_xor": _reduce("elementwise"),
    "dot_general": _jax_dot, "conv_general_dilated": _jax_conv,
    "broadcast_in_dim reshape squeeze expand_dims bitcast_convert_type name "
    "optimization_barrier stop_gradient device_put pvary "
    "sharding_constraint": _view, "gather dynamic_slice slice": _take,
    "dynamic_update_slice": _put(1), "scatter": _put(2),
    "scatter-add scatter-sub scatter-mul scatter-min scatter-max":
        _put(2, True),
    "transpose convert_element_type concatenate pad rev split iota copy real "
    "imag conj complex reduce_precision random_bits random_wrap random_unwrap "
    "random_seed random_fold_in threefry2x32 rng_bit_generator": _move})
_TORCH = _COMMON | _table({
    "clamp_min clamp_max fmax fmin": _each("elementwise"),
    "hardtanh": _each("elementwise", 2), "lerp": _each("elementwise", 3),
    "clamp": _each("elementwise", 0, lambda p: sum(
        p.get(bound) is not None for bound in ("min", "max"))),
    "rsub": _COMMON["sub"], "addcmul addcdiv": _each(
        "elementwise", 2, lambda p: p.get("value", 1) != 1),
    "where isnan isinf isfinite signbit logical_and logical_or logical_not "
    "logical_xor bitwise_and bitwise_or bitwise_xor bitwise_not shift_left "
    "shift_right_arithmetic": _each("integer"),
    "sum amax amin max min prod any all": _reduce("elementwise"),
    "mean": _reduce("elementwise", 1, 0),
    "var var_mean": _reduce("elementwise", 4, 0),
    "mm bmm mv dot vdot _scaled_mm _int_mm _grouped_mm": _product,
    "addmm baddbmm addmv addbmm": _add_product,
    "convolution convolution_backward": _conv,
    "_unsafe_view empty empty_like empty_strided new_empty resize "
    "_efficientzerotensor": _view,
    "index gather index_select embedding": _take,
    "index_put": _put(_indexed), "index_fill index_copy": _put(_rows),
    "index_add": _put(_rows, True), "scatter": _put(1),
    "scatter_add": _put(1, True),
    "copy zero fill zeros ones full arange zeros_like ones_like full_like "
    "new_zeros new_ones new_full": _fill,
    "clone _to_copy cat stack constant_pad_nd flip roll repeat tril triu "
    "convert_element_type iota scalar_tensor slice_backward select_backward":
        _move})


def _op(name: str, path: str, ins: list[_Array], outs: list[_Array],
        keys: list[int], rule: Callable, p: dict, repeats: int = 1
        ) -> list[Op]:
    """The op, if it does anything; x * x (equal ``keys``) reads x once."""
    once = [a if key not in keys[i + 1:] else a._replace(nbytes=0)
            for i, (a, key) in enumerate(zip(ins, keys, strict=True))]
    work = Counter({**_move(once, outs, p), **rule(once, outs, p)})
    counts = [work[kind] * repeats for kind in (*KINDS, "bytes")]
    op = Op(name, path, tuple(map(str, (*ins, *outs))), *counts, repeats)
    return [op] if any(counts) else []


# --- JAX: walk the jaxpr ----------------------------------------------------
_CALLS = frozenset("jit pjit closed_call core_call remat checkpoint remat2 "
                   "custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr "
                   "scan while cond".split())


def _jax_program(fn: Callable, args: tuple, kwargs: dict,
                 wrt: Any) -> tuple[Callable, list, list]:
    """A function of the arrays alone, the arrays, those differentiated."""
    jax = need("jax", _WHY)
    flat, tree = jax.tree.flatten((args, kwargs))
    owner = [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    owner += [-1] * (len(flat) - len(owner))
    live = [i for i, x in enumerate(flat) if hasattr(x, "dtype")]
    chosen = {None: (), "params": (0,), "all": {*owner}}.get(wrt, wrt)

    def is_float(x: Any) -> bool:
        return hasattr(x, "dtype") and jax.numpy.issubdtype(
            x.dtype, jax.numpy.inexact)

    wanted = [i for i in live if owner[i] in chosen and is_float(flat[i])]
    _selected(wrt, wanted, True)

    def call(values: dict) -> Any:
        args, kwargs = jax.tree.unflatten(tree, [
            values.get(i, x) for i, x in enumerate(flat)])
        return fn(*args, **kwargs)

    def program(*arrays: Any) -> Any:
        held = dict(zip(live, arrays, strict=True))
        if wrt is None:
            return call(held)

        def split(of: dict) -> tuple[list, list]:
            out = jax.tree.leaves(call(held | of))
            return [y for y in out if is_float(y)], [
                y for y in out if not is_float(y)]

        floats, pull, others = jax.vjp(
            split, {i: held[i] for i in wanted}, has_aux=True)
        ones = [jax.numpy.ones_like(y) for y in floats]
        _selected(wrt, wanted, any(_live(jax.make_jaxpr(pull)(ones))[1]))
        return floats, others, pull(ones)

    return program, [flat[i] for i in live], [flat[i] for i in wanted]


def _live(traced: Any) -> tuple[Any, list[bool]]:
    """The jaxpr without dead code, and which of its inputs it needs."""
    tools = need("jax.interpreters.partial_eval", _WHY)
    return tools.dce_jaxpr(
        traced.jaxpr, [True] * len(traced.jaxpr.outvars))[:2]


def _jax(fn: Callable, args: tuple, kwargs: dict, wrt: Any) -> Cost:
    program, arrays, wanted = _jax_program(fn, args, kwargs, wrt)
    traced, unknown = need("jax", _WHY).make_jaxpr(program)(*arrays), []
    # Dead are, for one, the gradients that nobody asked for.
    ops = tuple(_walk(_live(traced)[0], "", 1, unknown))
    params = sum(math.prod(x.shape) for x in wanted)
    return Cost(ops, params if wrt == "params" else None,
                tuple(dict.fromkeys(unknown)))


def _walk(jaxpr: Any, path: str, repeats: int, unknown: list) -> Iterator[Op]:
    """The ops of a jaxpr that runs ``repeats`` times; adds to unknown."""
    behind = {}  # who reads a broadcast or reshape reads what is behind it
    for eqn in jaxpr.eqns:
        name, p = eqn.primitive.name, eqn.params
        scope = str(eqn.source_info.name_stack)
        at = "/".join(filter(None, (path, scope)))
        if name in _CALLS:
            at = "/".join(filter(None, (at, p.get("name", name))))
            yield from _inside(eqn, name, at, repeats, unknown)
        elif name not in _JAX:
            unknown.append(name)
        else:
            ins = [_array(v.aval) for v in eqn.invars]
            ins = [a._replace(nbytes=0 if hasattr(v, "val") else  # a literal
                              behind.get(id(v), a.nbytes))
                   for v, a in zip(eqn.invars, ins, strict=True)]
            if _JAX[name] is _view:
                behind |= {id(v): a.nbytes for v, a in zip(
                    eqn.outvars, ins, strict=False)}
            yield from _op(
                name, at, ins, [_array(v.aval) for v in eqn.outvars],
                [id(v) for v in eqn.invars], _JAX[name],
                p | {"backward": "transpose(" in at.rpartition(
                    "rematted_computation")[2]}, repeats)


def _inside(eqn: Any, name: str, at: str, repeats: int,
            unknown: list) -> Iterator[Op]:
    """A call, a loop times its trips, the dearest branch of a cond."""
    p = eqn.params
    if name == "cond":
        every = [list(_walk(branch.jaxpr, f"{at}[{i}, the dearest branch]",
                            repeats, unknown))
                 for i, branch in enumerate(p["branches"])]
        yield from max(every, key=lambda ops: sum(op.flops for op in ops))
    elif name == "while":
        trips = _trips(eqn)
        body, test = p["body_jaxpr"].jaxpr, p["cond_jaxpr"].jaxpr
        if trips is None:
            flops = sum(op.flops for op in _walk(body, at, 1, unknown))
            unknown.append(f"{at} (trips not known; one is {flops:,} FLOPs)")
        else:
            yield from _walk(test, at, repeats * (trips + 1), unknown)
            yield from _walk(body, at, repeats * trips, unknown)
    else:
        inner = p.get("jaxpr") or p.get("call_jaxpr") or p.get("fun_jaxpr")
        yield from _walk(getattr(inner, "jaxpr", inner), at,
                         repeats * p.get("length", 1), unknown)


def _trips(eqn: Any) -> int | None:
    """Trips of ``while i < n: i += step``, all signed integer literals."""
    p = eqn.params
    test, body = p["cond_jaxpr"].jaxpr, p["body_jaxpr"].jaxpr
    if [e.primitive.name for e in test.eqns] != ["lt"] or p["cond_nconsts"]:
        return None
    i, n = test.eqns[0].invars
    at = test.invars.index(i) if i in test.invars else -1
    made = [e for e in body.eqns if body.outvars[at] in e.outvars]
    if at < 0 or not made or made[0].primitive.name != "add":
        return None
    start = eqn.invars[p["body_nconsts"] + at]
    old, step = made[0].invars
    if (old is not body.invars[p["body_nconsts"] + at]
            or i.aval.dtype.kind != "i"
            or not all(hasattr(v, "val") for v in (start, n, step))):
        return None
    first, last, by = (int(v.val) for v in (start, n, step))
    trips = len(range(first, last, by)) if by > 0 else 0
    beyond = 2 ** (8 * i.aval.dtype.itemsize - 1)  # there i wraps around
    return trips if by > 0 and first + trips * by < beyond else None


# --- torch: run on fake tensors ---------------------------------------------
def _torch(fn: Any, args: tuple, kwargs: dict, wrt: Any) -> Cost:
    import torch
    from torch.backends import mkldnn
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.modules import module as hooks
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    decompositions = need("torch._decomp", _WHY).decomposition_table
    ops, unknown, entered, names = [], [], [], {}

    def tensors(tree):
        return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]

    def enter(module, _):
        if id(module) not in names:
            kind = type(module).__name__
            names.update((id(m), f"{kind}.{name}".rstrip("."))
                         for name, m in module.named_modules())
        entered.append(names[id(module)])

    def leave(*_):
        entered.pop()

    def inside(call, args, kwargs):
        """The sum over what a composite op is made of, as its rule."""
        start = len(ops)
        with counter:
            call(*args, **kwargs)
        work = Counter({kind: sum(getattr(op, kind) for op in ops[start:])
                        for kind in KINDS})
        del ops[start:]
        return lambda ins, outs, p: work

    def rule_of(func, space, name, args, kwargs):
        if func.is_view or torch.Tag.inplace_view in func.tags:
            return _view
        if space in ("aten", "prims") and name in _TORCH:
            return _TORCH[name]
        if func in decompositions:
            return inside(decompositions[func], args, kwargs)
        if func._can_decompose():
            return inside(func.decompose, args, kwargs)
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        return _move if drawn else None

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs := kwargs or {}))
            outs, ins = tensors(out), tensors((args, kwargs))
            space, name = func._schema.name.split("::")
            name = name.rstrip("_")  # add_ is add in place
            rule = rule_of(func, space, name, args, kwargs) if outs else _view
            if rule is None:
                unknown.append(f"{space}.{name}")
                return out
            named = (a.name for a in func._schema.arguments)
            at = "backward" if torch._C._current_autograd_node() else (
                entered or [""])[-1]
            ops.extend(_op(
                name, at, [*map(_array, ins)], [*map(_array, outs)],
                [*map(id, ins)], rule,
                dict(zip(named, args, strict=False)) | kwargs))
            return out

    counter = Count()
    with contextlib.ExitStack() as stack:
        for handle in (hooks.register_module_forward_pre_hook(enter),
                       hooks.register_module_forward_hook(
                           leave, always_call=True)):
            stack.callback(handle.remove)
        # LSTM and attention as the products they are made of, everywhere.
        stack.callback(mkldnn.set_flags, mkldnn.set_flags(_enabled=False)[0])
        params = _torch_run(fn, args, kwargs, wrt, counter,
                            sdpa_kernel(SDPBackend.MATH))
    return Cost(tuple(ops), params, tuple(dict.fromkeys(unknown)))


def _torch_run(fn: Any, args: tuple, kwargs: dict, wrt: Any,
               *modes: Any) -> int | None:
    """Run fn on fake copies under modes; its number of parameters."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake, Parameter = FakeTensorMode(allow_non_fake_inputs=True), (
        torch.nn.Parameter)

    def inner(tree):
        """Tensors and module parameters in it, each once."""
        return list({id(t): t for x in _leaves(tree) for t in (
            x.parameters() if isinstance(x, torch.nn.Module) else [x])
            if isinstance(t, torch.Tensor)}.values())

    with contextlib.ExitStack() as stack:
        if wrt is not None:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
        (call, args, kwargs), params = _torch_copies(fake, (fn, args, kwargs))
        everything = inner((params, args, kwargs))
        chosen = {None: (), "params": params or args[:1], "all": everything}
        chosen = chosen[wrt] if wrt in chosen else [args[i] for i in wrt]
        wanted = [x for x in inner(chosen)
                  if (x.is_floating_point() or x.is_complex())
                  and (x.requires_grad or not isinstance(x, Parameter))]
        _selected(wrt, wanted, True)
        for x in everything if wrt is not None else ():
            x.requires_grad_(any(x is w for w in wanted))
        for mode in (fake, torch.compiler.set_stance("force_eager"), *modes):
            stack.enter_context(mode)
        out = call(*args, **kwargs)
        if wrt is not None:
            for x in wanted:
                x.grad = None
            out = [y for y in inner(out) if y.requires_grad]
            # Not autograd.grad: FlopCounterMode's hooks do not allow it.
            torch.autograd.backward(
                out, [torch.ones_like(y) for y in out], inputs=wanted)
        _selected(wrt, wanted, any(x.grad is not None for x in wanted))
    params = params or (wanted if wrt == "params" else [])
    return sum(p.numel() for p in params) if params else None


def _torch_copies(fake: Any, call: tuple) -> tuple[tuple, list]:
    """Copies of fn, args and kwargs on fake tensors, and their parameters.

    A function is made anew over copies of what it closes over or names.
    """
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._pytree import tree_map

    memo, spaces, begun = {}, {}, set()

    class Copy(TorchFunctionMode):
        """Where deepcopy would copy a tensor or a Parameter's data."""

        def __torch_function__(self, func, types, args=(), kwargs=None):
            x = args[0] if args else None
            if func not in (torch.Tensor.__deepcopy__,
                            torch._C.TensorBase.clone):
                return func(*args, **(kwargs or {}))
            if x.is_meta or x.is_inference():
                with fake:  # on the CPU, where constants in fn are
                    y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
            else:
                y = fake.from_tensor(x.detach())
            return y.requires_grad_(x.requires_grad)

    def holds(x, depth=2):
        """Whether a tensor or module is in x, its attributes or theirs."""
        return any(isinstance(v, (torch.Tensor, torch.nn.Module)) or (
            depth and isinstance(getattr(v, "__dict__", 0), dict)
            and not isinstance(v, (types.ModuleType, types.FunctionType))
            and holds(vars(v), depth - 1)) for v in _leaves(x))

    def names(code):
        return {*code.co_names}.union(*(names(c) for c in code.co_consts
                                        if isinstance(c, types.CodeType)))

    def function(f):
        space, old = f.__globals__, f.__closure__ or ()
        ours = not space.get("__name__", "").startswith("torch.")
        if not (ours or old):
            return f
        new = [memo.setdefault(id(c), types.CellType()) for c in old]
        if ours:
            space = spaces.setdefault(id(space), dict(space))
        g = memo[id(f)] = types.FunctionType(
            f.__code__, space, f.__name__, shadow(f.__defaults__), (*new,))
        g.__kwdefaults__ = shadow(f.__kwdefaults__)
        g.__dict__.update(vars(f))
        for cell, was in zip(new, old, strict=True):
            with contextlib.suppress(ValueError):  # still empty
                cell.cell_contents = shadow(was.cell_contents)
        for name in names(f.__code__) & space.keys() if ours else ():
            space[name] = shadow(f.__globals__[name])
        return g

    def shadow(x):
        if isinstance(x, torch.nn.Module):
            x = getattr(x, "_orig_mod", x)  # as before torch.compile
        if isinstance(x, types.FunctionType):
            x = getattr(x, "_torchdynamo_orig_callable", x)
        if id(x) in memo:
            return memo[id(x)]
        if isinstance(x, types.FunctionType):
            return function(x)
        if isinstance(x, types.MethodType):
            return types.MethodType(shadow(x.__func__), shadow(x.__self__))
        if isinstance(x, functools.partial):
            return functools.partial(
                shadow(x.func), *shadow(x.args), **shadow(x.keywords))
        if type(x) in (dict, list, tuple):
            return memo.setdefault(id(x), tree_map(shadow, x))
        if not holds(x):
            return x
        if id(x) not in begun:  # first the functions in it: hooks, say
            begun.add(id(x))
            for value in _leaves(getattr(x, "__dict__", None)):
                shadow(value)
        with Copy():
            return copy.deepcopy(x, memo)

    return tuple(map(shadow, call)), [
        x for x in memo.values() if isinstance(x, torch.nn.Parameter)]
