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
outputs once; views move nothing, a gather only what it takes, a write into
part of an array the size of its update (a torch value as it is given).
"""

from __future__ import annotations

import contextlib
import copy
import html
import inspect
import logging
import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
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
    "params" (trainable parameters; argument 0 of a function without any),
    "all" (those and the float arguments) or argument numbers: forward and
    backward with a cotangent of ones. Raises ValueError or TypeError naming
    the argument. A torch fn, its ``self`` and its arguments are copied, with
    fake tensors; what it closes over is not: a module must be an argument.
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
             cost.bytes, "; without ".join(
                 ["the program as written", *cost.unknown]))]
    if _front_end(fn, args, {}) == "torch":
        # Without triton torch warns, of kernels that are not counted here.
        logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)
        from torch.utils.flop_counter import FlopCounterMode

        _torch_run(*call, counter := FlopCounterMode(display=False))
        n = counter.get_total_flops()
        why = "elementwise is 0" if n == cost.matmul else (
            "elementwise is 0; so is what has no formula (attention on CPU, "
            "mv, dot); complex counts as real")
        rows.append(("FlopCounterMode", n, n, None, None, why))
    else:
        program, arrays, _ = _jax_program(*call)
        low = need("jax", _WHY).jit(program).lower(*arrays)
        why = "a loop's body counts once, complex as real; other rules"
        for name, stage in ("lowered", low), ("compiled", low.compile()):
            found = stage.cost_analysis() or {}
            n = found.get("flops")
            rows.append((f"XLA {name}", None, n, found.get(
                "transcendentals", 0), found.get("bytes accessed"),
                "agrees" if n == ours else why))
            why += ", fused and merged"
    return need("pandas", _WHY).DataFrame(rows, columns=[
        "counter", "matmul", "flops", "transcendental", "bytes", "why"],
    ).convert_dtypes()


# --- arguments -------------------------------------------------------------
def _leaves(tree: Any) -> Iterator[Any]:
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
    kinds = {"torch" if isinstance(x, ours) else "jax"
             for x in _leaves([fn, args, kwargs])
             if isinstance(x, ours) or (hasattr(x, "dtype") and x is not fn)}
    if len(kinds) == 2:
        raise TypeError("args mix torch with JAX or NumPy arrays: pass one "
                        f"kind (here {_described(fn, args)})")
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


def _put(update: int, adds: bool = False) -> Callable:
    """Reads its other inputs; writes as much of ins[0] as the update has."""
    def rule(ins: list, outs: list, p: dict) -> Counter:
        n, add = ins[update].size, p.get("accumulate", adds)
        return _tally("elementwise", n * add, ins[0]) + Counter(
            bytes=_held(ins[1:]) + n * ins[0].itemsize)
    return rule


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
    """Along an axis, each output meets the whole kernel.

    Not so where the input has holes or in a gradient, which pairs the same
    elements as its forward: there the longest array is the padded one.
    """
    layouts = p["dimension_numbers"]
    macs = ins[1].shape[layouts[1][1]]
    macs *= math.prod(outs[0].shape[axis] for axis in layouts[2][:2])
    for *axes, hole in zip(*(layout[2:] for layout in layouts),
                           p["lhs_dilation"], strict=True):
        x, w, y = (a.shape[axis] for a, axis in zip(
            (*ins, *outs), axes, strict=True))
        shared = p["backward"] or hole > 1
        macs *= math.prod(sorted((x, w, y))[:2]) if shared else w * y
    return _tally("matmul", 2 * macs, ins[0])


def _product(ins: list, outs: list, p: dict) -> Counter:
    return _tally("matmul", 2 * outs[0].size * ins[0].shape[-1], ins[0])


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
    "lerp": _each("elementwise", 3), "addcmul addcdiv": _each(
        "elementwise", 2, lambda p: p.get("value", 1) != 1),
    "clamp": _each("elementwise", 0, lambda p: sum(
        p.get(bound) is not None for bound in ("min", "max"))),
    "where isnan isinf isfinite signbit logical_and logical_or logical_not "
    "logical_xor bitwise_and bitwise_or bitwise_xor bitwise_not shift_left "
    "shift_right_arithmetic": _each("integer"),
    "sum amax amin max min prod any all": _reduce("elementwise"),
    "mean": _reduce("elementwise", 1, 0),
    "var var_mean": _reduce("elementwise", 4, 0),
    "mm bmm mv dot vdot _scaled_mm _int_mm": _product,
    "addmm baddbmm addmv": _add_product,
    "convolution convolution_backward": _conv,
    "_unsafe_view empty empty_like empty_strided new_empty resize "
    "_efficientzerotensor": _view,
    "index gather index_select embedding": _take,
    "index_put": _put(-1), "scatter": _put(1), "scatter_add": _put(1, True),
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

    def program(*arrays: Any) -> Any:
        held = dict(enumerate(flat)) | dict(zip(live, arrays, strict=True))

        def call(of: dict) -> Any:
            args, kwargs = tree.unflatten((held | of).values())
            return fn(*args, **kwargs)

        def split(of: dict) -> tuple[list, list]:
            out = jax.tree.leaves(call(of))
            return [y for y in out if is_float(y)], [
                y for y in out if not is_float(y)]

        if wrt is None:
            return call({})
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
                p | {"backward": "transpose(" in at}, repeats)


def _inside(eqn: Any, name: str, at: str, repeats: int,
            unknown: list) -> Iterator[Op]:
    """A call, a scan times its length, the dearest branch of a cond."""
    p = eqn.params
    if name == "cond":
        every = [list(_walk(branch.jaxpr, f"{at}[{i}, the dearest branch]",
                            repeats, unknown))
                 for i, branch in enumerate(p["branches"])]
        yield from max(every, key=lambda ops: sum(op.flops for op in ops))
    elif name == "while":
        body = _walk(p["body_jaxpr"].jaxpr, at, 1, unknown)
        flops = sum(op.flops for op in body)
        unknown.append(f"{at} (trips not known; one is {flops:,} FLOPs)")
    else:
        inner = p.get("jaxpr") or p.get("call_jaxpr") or p.get("fun_jaxpr")
        yield from _walk(getattr(inner, "jaxpr", inner), at,
                         repeats * p.get("length", 1), unknown)


# --- torch: run on fake tensors ---------------------------------------------
def _torch(fn: Any, args: tuple, kwargs: dict, wrt: Any) -> Cost:
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.backends import mkldnn
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.module_tracker import ModuleTracker

    decompositions = need("torch._decomp", _WHY).decomposition_table
    ops, unknown, tracker = [], [], ModuleTracker()

    def tensors(tree):
        return [x for x in _leaves(tree) if isinstance(x, torch.Tensor)]

    def rule_of(func, space, name, args, kwargs):
        if func.is_view or torch.Tag.inplace_view in func.tags:
            return _view
        if space in ("aten", "prims") and name in _TORCH:
            return _TORCH[name]
        parts = decompositions.get(func) or (
            func._can_decompose() and func.decompose)
        if not parts:
            drawn = torch.Tag.nondeterministic_seeded in func.tags
            return _move if drawn else None
        start = len(ops)  # its work is the sum over what it is made of
        with counter:
            parts(*args, **kwargs)
        work = Counter({kind: sum(getattr(op, kind) for op in ops[start:])
                        for kind in KINDS})
        del ops[start:]
        return lambda ins, outs, p: work

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ins = tensors((args, kwargs := kwargs or {}))
            real = [x for x in ins if not isinstance(x, FakeTensor)]
            if any(isinstance(x, torch.nn.Parameter) for x in real) or (
                    real and real[0] is ins[0] and func._schema.is_mutable):
                raise ValueError("fn closes over a module, or writes to a "
                                 "tensor it closes over: pass it to fn as an "
                                 "argument")
            outs = tensors(out := func(*args, **kwargs))
            space, name = func._schema.name.split("::")
            name = name.rstrip("_")  # add_ is add in place
            rule = rule_of(func, space, name, args, kwargs) if outs else _view
            if rule is None:
                unknown.append(f"{space}.{name}")
                return out
            named = (a.name for a in func._schema.arguments)
            at = "backward" if torch._C._current_autograd_node() else max(
                tracker.parents - {"Global"}, key=len, default="")
            ops.extend(_op(
                name, at, [*map(_array, ins)], [*map(_array, outs)],
                [*map(id, ins)], rule,
                dict(zip(named, args, strict=False)) | kwargs))
            return out

    # LSTM and attention as the products they are made of, everywhere.
    with contextlib.ExitStack() as stack, sdpa_kernel(SDPBackend.MATH):
        stack.callback(mkldnn.set_flags, mkldnn.set_flags(_enabled=False)[0])
        params = _torch_run(
            fn, args, kwargs, wrt, counter := Count(), tracker)
    return Cost(tuple(ops), params, tuple(dict.fromkeys(unknown)))


def _torch_run(fn: Any, args: tuple, kwargs: dict, wrt: Any,
               *modes: Any) -> int | None:
    """Run fn on fake copies under modes; its number of parameters."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn import Module, Parameter
    from torch.overrides import TorchFunctionMode

    fake, memo = FakeTensorMode(allow_non_fake_inputs=True), {}

    class Copy(TorchFunctionMode):
        """Fake tensors where deepcopy copies a tensor or Parameter."""

        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func not in (torch.Tensor.__deepcopy__,
                            torch._C.TensorBase.clone):
                return func(*args, **(kwargs or {}))
            x = args[0]
            at = "cpu" if x.is_meta else x.device  # as constants in fn are
            with fake:
                y = torch.empty_strided(
                    x.shape, x.stride(), dtype=x.dtype, device=at)
            return y.requires_grad_(x.requires_grad)

    def inner(tree):
        """Tensors and module parameters in it, each once."""
        return list({id(t): t for x in _leaves(tree) for t in (
            x.parameters() if isinstance(x, Module) else [x])
            if isinstance(t, torch.Tensor)}.values())

    with contextlib.ExitStack() as stack:
        if wrt is not None:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
        with Copy():
            call, args, kwargs = copy.deepcopy(
                (getattr(fn, "_orig_mod", fn), args, kwargs), memo)
        params = [x for x in memo.values() if isinstance(x, Parameter)]
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
