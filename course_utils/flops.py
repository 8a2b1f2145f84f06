"""Count what a JAX or PyTorch function costs, op by op. Floor 1.

Nothing is computed: JAX functions are traced, torch functions run on fake
tensors. What is counted is the program as written, before any fusion (dead
code of a jaxpr left out). ``matmul``: products and convolutions, 2 FLOPs a
multiply-add (8 if complex), padded taps included; attention with all pairs
of positions, masked or not, from its products whatever back end runs it;
factorizations and FFTs (5 n log2 n, half if real) by their textbook counts.
``elementwise``: float arithmetic, max, min and reductions (n - 1 each).
``transcendental``: one for each exp, log, tanh, erf, sqrt, power.
``integer``: integer arithmetic, comparisons, selects; a sort is n log2 n.
Complex: a sum is 2, a product 6, else its two parts. Moving data and drawing
random bits are no FLOPs. A loop is its body times its trips, a branch the
dearest of its ways, a recomputation counts. Each op reads its inputs and
writes its outputs once; views move nothing, a gather only what it takes, a
write into part of an array what it writes (through a mask: all).
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
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import zip_longest
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
    the argument; warns of ``unknown``. A torch fn, its arguments and the
    modules it closes over are copied, with fake tensors, and left as they
    are. A custom torch op counts by its ``register_flop_formula``.
    """
    run = _torch if _front_end(fn, args, kwargs) == "torch" else _jax
    wrt = _check_wrt(wrt, len(args))
    try:
        ops, params, unknown = run(fn, args, kwargs or {}, wrt)
    except Missing:
        raise
    except Exception as error:
        why = (str(error).strip() or "no message").splitlines()[0][:200]
        raise ValueError(
            f"fn cannot be counted with {_described(fn, args)}: {why} "
            f"({type(error).__name__}). Check shapes and types, and that fn "
            "looks at no value.") from error
    cost = Cost(tuple(ops), params, tuple(dict.fromkeys(unknown)))
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
    ours, rows = cost.matmul + cost.elementwise, []
    if _front_end(fn, args, {}) == "torch":
        counter = _flop_counter().FlopCounterMode(display=False)
        _torch_run(*call, counter)
        n, why = counter.get_total_flops(), "elementwise is 0"
        if n != cost.matmul:
            why += ", so is what has no formula (mv, dot); complex is as real"
        rows.append(("FlopCounterMode", n, n, None, None, why))
    else:
        program, arrays, _ = _jax_program(*call)
        low = need("jax", _WHY).jit(program).lower(*arrays)
        why = "a loop's body counts once, complex as real; other rules"
        for name, stage in ("lowered", low), ("compiled", low.compile()):
            found = Counter(stage.cost_analysis())
            n, exps = found["flops"], found["transcendentals"]
            rows.append((f"XLA {name}", None, n, exps, found[
                "bytes accessed"], "agrees" if n == ours else why))
            why += ", fused and merged"
    why = "; without ".join(["the program as written", *cost.unknown])
    return need("pandas", _WHY).DataFrame([(
        "course_utils", cost.matmul, ours, cost.transcendental, cost.bytes,
        why), *rows], columns=["counter", "matmul", "flops", "transcendental",
                               "bytes", "why"]).convert_dtypes()


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
    if torch and not kinds and next(_closed(fn, set()), None) is not None:
        return "torch"
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
    strided = str(getattr(x, "layout", "")) == "torch.strided"
    steps = x.stride() if strided else (1,) * len(x.shape)
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
        n = ins[update].size
        if "indices" in p:  # torch's x[i, j] = y; a mask may be all true
            n, index = ins[0].size, [i.shape[::-1] for i in ins[1:-1]]
            if "bool" not in {i.dtype for i in ins[1:-1]}:
                n = math.prod(map(max, zip_longest(*index, fillvalue=1)))
                n *= math.prod(m for m, i in zip_longest(
                    ins[0].shape, p["indices"]) if i is None)
        return _tally("elementwise", n * p.get("accumulate", adds), ins[0]
                      ) + Counter(bytes=_held(ins[1:]) + n * ins[0].itemsize)
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
    """Where it is ragged, a row meets the matrix of its group alone."""
    ragged = p.get("ragged_dot_dimension_numbers")
    over = (ragged.dot_dimension_numbers if ragged else
            p["dimension_numbers"])[0][0]
    if not over:  # an outer product multiplies and adds nothing
        return _times(ins, outs, p)
    n = outs[0].size * math.prod(ins[0].shape[axis] for axis in over)
    if ragged and ragged.lhs_ragged_dimensions[0] in over:
        n //= max(ins[2].shape[-1], 1)
    return _tally("matmul", 2 * n, ins[0])


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


def _linalg(thirds: int, each: int = 0, at: int = 0) -> Callable:
    """thirds * n**3 / 3 to factor ins[at], each * n for a value solved."""
    def rule(ins: list, outs: list, p: dict) -> Counter:
        *batch, m, n = ins[at].shape
        k = min(m, n)  # LU of m by n; a cube where they are equal
        cube = 6 * m * n * k - 3 * (m + n) * k * k + 2 * k**3
        return _tally("matmul", math.prod(batch) * (
            thirds * cube // 6) + each * n * outs[0].size, ins[at])
    return rule


def _fft(ins: list, outs: list, p: dict) -> Counter:
    """5 n log2 n, half of it where one side is real."""
    real = [a for a in (*ins, *outs) if a.dtype[0] != "c"]
    x, half = (real or outs)[0], bool(real) and p.get("onesided", True)
    n = math.prod(p.get("fft_lengths") or [x.shape[d] for d in p["dim"]])
    return Counter(matmul=round(
        5 * x.size * math.log2(max(n, 1)) / (1 + half)))


def _product(ins: list, outs: list, p: dict) -> Counter:
    columns = ins[1].shape[1:][-1:]
    return _tally("matmul", 2 * ins[0].size * math.prod(columns), ins[0])


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


def _times(ins: list, outs: list, p: dict) -> Counter:
    """A product; of complex numbers, 4 products and 2 sums."""
    return _each("elementwise", 3 if outs[0].dtype[0] == "c" else 1)(
        ins, outs, p)


_COMMON = _table({
    "neg abs maximum minimum floor ceil round sign trunc relu reciprocal "
    "fmod remainder rem nextafter": _each("elementwise"),
    "mul square": _times,
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
    "argmax argmin": _reduce("integer"),
    "fft _fft_c2c _fft_r2c _fft_c2r": _fft,
    "cholesky linalg_cholesky_ex": _linalg(1), "linalg_inv_ex": _linalg(6),
    "lu linalg_lu_factor_ex linalg_lu _linalg_det _linalg_slogdet":
        _linalg(2), "triangular_solve linalg_solve_triangular": _linalg(0, 1),
    "_linalg_solve_ex": _linalg(2, 2), "linalg_lu_solve": _linalg(0, 2),
    "cholesky_solve": _linalg(0, 2, 1)})
_JAX = _COMMON | _table({
    "add_any max min": _each("elementwise"), "clamp": _each("elementwise", 2),
    "select_n is_finite and or xor not population_count clz eq_to lt_to le_to "
    "shift_left shift_right_logical shift_right_arithmetic": _each("integer"),
    "reduce_window_sum reduce_window_max reduce_window_min": _each(
        "elementwise", -1, lambda p: math.prod(p["window_dimensions"])),
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or "
    "reduce_xor": _reduce("elementwise"),
    "dot_general ragged_dot ragged_dot_general": _jax_dot,
    "conv_general_dilated": _jax_conv,
    "broadcast_in_dim reshape squeeze expand_dims bitcast_convert_type name "
    "optimization_barrier stop_gradient device_put pvary platform_index empty "
    "empty2 sharding_constraint": _view, "gather dynamic_slice slice": _take,
    "dynamic_update_slice": _put(1), "scatter": _put(2),
    "scatter-add scatter-sub scatter-mul scatter-min scatter-max":
        _put(2, True),
    "transpose convert_element_type concatenate pad rev split iota copy real "
    "imag conj complex reduce_precision random_bits random_wrap random_unwrap "
    "random_seed random_split random_fold_in threefry2x32 rng_bit_generator "
    "lu_pivots_to_permutation": _move})
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
    "addmm baddbmm addbmm addmv": _add_product,
    "triangular_solve": _linalg(0, 1, 1),
    "convolution convolution_backward": _conv,
    "_unsafe_view empty empty_like empty_strided new_empty resize "
    "_efficientzerotensor": _view,
    "index gather index_select embedding": _take,
    "index_put _unsafe_index_put": _put(-1), "scatter": _put(1),
    "scatter_add": _put(1, True),
    "copy zero fill zeros ones full arange zeros_like ones_like full_like "
    "new_zeros new_ones new_full": _fill,
    "clone _to_copy cat stack constant_pad_nd flip roll repeat tril triu "
    "convert_element_type iota scalar_tensor slice_backward select_backward "
    "rand rand_like randn randn_like randint randint_like randperm normal "
    "uniform bernoulli random exponential multinomial": _move})


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


def _dearest(every: list) -> Any:
    """Of [(ops, ...)], the one of most FLOPs, its ops' paths saying so."""
    ops, *more = max(every, key=lambda way: sum(op.flops for op in way[0]))
    return [replace(op, path=f"{op.path}[the dearest branch]")
            for op in ops], *more


# --- JAX: walk the jaxpr ----------------------------------------------------
_CALLS = frozenset("jit pjit closed_call core_call remat checkpoint remat2 "
                   "custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr "
                   "custom_linear_solve shard_map scan while cond".split())
_ONES = "cotangent_of_ones"
_MOST_TRIPS = 10_000  # of a while whose test has to be run to count them


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
    return need("jax.interpreters.partial_eval", _WHY).dce_jaxpr(
        jaxpr, [False] * (n - last if last else 0) + [True] * (last or n))[0]


def _jax(fn: Callable, args: tuple, kwargs: dict, wrt: Any) -> tuple:
    program, arrays, wanted = _jax_program(fn, args, kwargs, wrt)
    traced, unknown = need("jax", _WHY).make_jaxpr(program)(*arrays), []
    _selected(wrt, wanted, any(
        _ONES in str(eqn.source_info.name_stack)
        for eqn in _live(traced.jaxpr, len(wanted)).eqns))
    consts = [lambda c=c: c for c in traced.consts]
    # Dead are, for one, the gradients that nobody asked for.
    ops = [*_walk(_live(traced.jaxpr), "", 1, unknown, consts)]
    params = sum(math.prod(x.shape) for x in wanted)
    return ops, params if wrt == "params" else None, unknown


def _reader(jaxpr: Any, inputs: list) -> Callable:
    """A function: the value of a variable, KeyError where arguments decide it.

    ``inputs``: for the first variables of jaxpr, functions that do the same.
    """
    values = dict(zip(map(id, [*jaxpr.constvars, *jaxpr.invars]), inputs,
                      strict=False))
    by = {id(v): eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def value(atom: Any) -> Any:
        if hasattr(atom, "val"):
            return atom.val
        if id(atom) not in values:
            eqn = by[id(atom)]
            made = eqn.primitive.bind(*map(value, eqn.invars), **eqn.params)
            made = made if eqn.primitive.multiple_results else [made]
            values.update({id(v): lambda x=x: x for v, x in zip(
                eqn.outvars, made, strict=True)})
        return values[id(atom)]()
    return value


def _trips(p: dict, inputs: list) -> int:
    """How often a while runs; of its body, what its test needs is run."""
    test, body = p["cond_jaxpr"].jaxpr, p["body_jaxpr"].jaxpr
    n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    carry = inputs[m:]
    for trips in range(_MOST_TRIPS):
        if not _reader(test, inputs[:n] + carry)(test.outvars[0]):
            return trips
        after = _reader(body, inputs[n:m] + carry)
        carry = [partial(after, v) for v in body.outvars]
    raise KeyError


def _walk(jaxpr: Any, path: str, repeats: int, unknown: list,
          inputs: list) -> Iterator[Op]:
    """The ops of a jaxpr that runs ``repeats`` times; adds to unknown."""
    behind = {}  # who reads a broadcast or reshape reads what is behind it
    value = _reader(jaxpr, inputs)
    for eqn in jaxpr.eqns:
        name, p = eqn.primitive.name, eqn.params
        scope = str(eqn.source_info.name_stack)
        at = "/".join(filter(None, (path, scope)))
        if name in _CALLS:
            at = "/".join(filter(None, (at, p.get("name", name))))
            yield from _inside(name, p, at, repeats, unknown, [
                partial(value, v) for v in eqn.invars])
        elif name not in _JAX:
            unknown.append(name)
        else:
            ins = [(a := _array(v.aval))._replace(
                nbytes=0 if hasattr(v, "val") else  # a literal
                behind.get(id(v), a.nbytes)) for v in eqn.invars]
            if _JAX[name] is _view:
                behind |= {id(v): a.nbytes for v, a in zip(
                    eqn.outvars, ins, strict=False)}
            yield from _op(
                name, at, ins, [_array(v.aval) for v in eqn.outvars],
                [*map(id, eqn.invars)], _JAX[name],
                p | {"backward": "transpose(" in at}, repeats)


def _inside(name: str, p: dict, at: str, repeats: int, unknown: list,
            inputs: list) -> Iterator[Op]:
    """A call, a loop times its trips, the dearest branch of a cond."""
    def walk(inner: Any, inputs: list, trips: int = 1) -> Iterator[Op]:
        inner = getattr(inner, "jaxpr", inner)
        return _walk(inner, at, repeats * trips, unknown, inputs)

    if name == "cond":
        every = [[[*walk(way, inputs[1:])]] for way in p["branches"]]
        yield from _dearest(every)[0]
    elif name == "while":
        n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        try:
            trips = _trips(p, inputs)
            yield from walk(p["cond_jaxpr"], inputs[:n], trips + 1)
            yield from walk(p["body_jaxpr"], inputs[n:m], trips)
        except (KeyError, RecursionError):
            one = sum(op.flops // op.repeats for op in walk(
                p["body_jaxpr"], inputs[n:m]) if op.repeats)
            unknown.append(f"{at} (trips not known; one is {one:,} FLOPs)")
    elif name == "shard_map":
        yield from walk(p["jaxpr"], [], p["mesh"].size)
    elif name == "custom_linear_solve":
        yield from walk(p["jaxprs"].solve, [])
    else:
        inner = p.get("jaxpr") or p.get("call_jaxpr") or p.get("fun_jaxpr")
        yield from walk(inner, inputs[:p.get("num_consts")], p.get(
            "length", 1))


# --- torch: run on fake tensors ---------------------------------------------
def _torch(fn: Any, args: tuple, kwargs: dict, wrt: Any) -> tuple:
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.backends import mkldnn
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.module_tracker import ModuleTracker

    decompositions = need("torch._decomp", _WHY).decomposition_table
    functional, ops, unknown = torch.nn.functional, [], []
    tracker, of_device = ModuleTracker(), torch.ops.prim.device.default

    def tensors(tree):
        return [x for x in _leaves(tree) if isinstance(x, torch.Tensor)]

    def inside(call, args, kwargs):
        """The ops a call is made of, and what it returns."""
        start = len(ops)
        with counter:
            out = call(*args, **kwargs)
        parts, ops[start:] = ops[start:], []
        return parts, out

    def rule_of(func, space, name, args, kwargs, out):
        if func.is_view or torch.Tag.inplace_view in func.tags:
            return _view
        if any(x.layout is not torch.strided for x in tensors((args, out))):
            return None
        if space in ("aten", "prims") and name in _TORCH:
            return _TORCH[name]
        parts = decompositions.get(func) or (
            func._can_decompose() and func.decompose)
        formula = _flop_counter().flop_registry.get(func._overloadpacket)
        if parts:
            made = inside(parts, args, kwargs)[0]
            work = Counter({kind: sum(getattr(op, kind) for op in made)
                            for kind in KINDS})
        elif formula and space != "aten":
            work = Counter(matmul=formula(*args, **kwargs, out_val=out))
        else:
            return None
        return lambda ins, outs, p: work

    class Products(torch.overrides.TorchFunctionMode):
        """Attention and bilinear forms as the products they are made of."""

        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is functional.scaled_dot_product_attention:
                with sdpa_kernel(SDPBackend.MATH):
                    return func(*args, **(kwargs or {}))
            if func is not functional.bilinear:
                return func(*args, **(kwargs or {}))
            x, y, weight, bias = (*args, None)[:4]
            half = torch.einsum("...i,oij->...oj", x, weight)
            z = torch.einsum("...oj,...j->...o", half, y)
            return z if bias is None else z + bias

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if func is of_device and isinstance(args[0], FakeTensor):
                return args[0].fake_device  # asked most of all, so briefly
            if func is torch.ops.higher_order.cond:
                parts, out = _dearest([
                    inside(way, args[3], {}) for way in args[1:3]])
                ops.extend(parts)
                return out
            if not isinstance(func, torch._ops.OpOverload):
                unknown.append(str(func))
                return func(*args, **kwargs)
            ins = tensors((args, kwargs))
            real = [x for x in ins if not isinstance(x, FakeTensor)]
            if any(isinstance(x, torch.nn.Parameter) for x in real) or (
                    real and real[0] is ins[0] and func._schema.is_mutable):
                raise ValueError("fn reaches a module, or writes to a tensor, "
                                 "that is no argument: pass it as an argument")
            outs = tensors(out := func(*args, **kwargs))
            space, name = func._schema.name.split("::")
            name = name.rstrip("_")  # add_ is add in place
            rule = rule_of(func, space, name, args, kwargs, out) if (
                outs or func._schema.is_mutable) else _view
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
            fn, args, kwargs, wrt, Products(), counter := Count(), tracker)
    return ops, params, unknown


def _flop_counter() -> Any:
    # Without triton torch warns, of kernels that are not counted here.
    logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)
    return need("torch.utils.flop_counter", _WHY)


def _closed(fn: Any, seen: set) -> Iterator[Any]:
    """The modules fn closes over or names among its file's globals."""
    if isinstance(fn, sys.modules["torch"].nn.Module):
        yield fn
        return
    for wrapped in "_torchdynamo_orig_callable", "func":  # compiled, partial
        fn = getattr(fn, wrapped, fn)
    if inspect.isfunction(fn) and fn not in seen:
        seen.add(fn)
        with contextlib.suppress(ValueError):  # a name not yet given
            found = inspect.getclosurevars(fn)
            named = {} if fn.__module__.startswith("torch") else found.globals
            for x in _leaves([found.nonlocals, named]):
                yield from _closed(x, seen)


def _torch_run(fn: Any, args: tuple, kwargs: dict, wrt: Any,
               *modes: Any) -> int | None:
    """Run fn on fake copies under modes; its number of parameters."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn import Module, Parameter

    fake, memo = FakeTensorMode(allow_non_fake_inputs=True), {}
    plain = torch.Tensor.__deepcopy__, torch._C.TensorBase.clone

    class Copy(torch.overrides.TorchFunctionMode):
        """Fake tensors where deepcopy copies a tensor or Parameter."""

        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func not in plain:
                return func(*args, **(kwargs or {}))
            x = args[0]
            if x.layout is not torch.strided:
                return fake.from_tensor(x)
            at = "cpu" if x.is_meta else x.device  # as constants in fn are
            with fake:
                return torch.empty_strided(
                    x.shape, x.stride(), dtype=x.dtype, device=at,
                    requires_grad=x.requires_grad)

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
            for module in _closed(fn, set()):  # its copy's for the time
                stack.callback(vars(module).update, dict(vars(module)))
                copied = copy.deepcopy(module, memo)
                stack.callback(vars(module).clear)
                vars(module).update(vars(copied))
        params = [x for x in memo.values() if isinstance(x, Parameter)]
        everything = inner((params, args, kwargs))
        chosen = {None: (), "params": params or args[:1], "all": everything}
        chosen = chosen[wrt] if wrt in chosen else [args[i] for i in wrt]
        wanted = [x for x in inner(chosen)
                  if (x.is_floating_point() or x.is_complex())
                  and (x.requires_grad or not isinstance(x, Parameter))]
        _selected(wrt, wanted, True)
        chosen = {id(x) for x in wanted}
        for x in everything if wrt is not None else ():
            x.requires_grad_(id(x) in chosen)
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
