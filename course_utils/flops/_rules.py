"""What an op costs: a rule for each, in tables shared by both front ends.

A rule takes the inputs, outputs and parameters of an op. It returns how much
of each kind there is, and "bytes" where it moves other than all of its inputs
and outputs.
"""

from __future__ import annotations

import functools
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, NamedTuple

KINDS = ("matmul", "elementwise", "transcendental", "integer")
WHY = "counting FLOPs here needs it"


@dataclass(frozen=True)
class Op:
    """One op of a program; its FLOPs and bytes cover all ``repeats`` runs.

    ``path`` is where it stands (module, scope, loop), ``line`` the nearest
    line of your own code, as "model.py:12" or "<cell>:3", "" where that is
    not known; ``shapes`` are its inputs, then its outputs, as
    "bf16[512,1024]".
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
    line: str = field(default="", compare=False)
    flops = property(
        lambda self: self.matmul + self.elementwise + self.transcendental)


class Array(NamedTuple):
    """``nbytes`` is what it stores: less than its shape if broadcast."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    nbytes: int
    size = property(lambda self: math.prod(self.shape))

    def __str__(self) -> str:
        short = re.sub("(f)loat|(c)omplex|(i)nt", r"\1\2\3", self.dtype)
        return f"{short}[{','.join(map(str, self.shape))}]"


def array(x: Any) -> Array:
    """Of an aval, array or tensor; a stride of 0 stores one element."""
    strided = str(getattr(x, "layout", "")) == "torch.strided"
    steps = x.stride() if strided else (1,) * len(x.shape)
    held = (n for n, step in zip(x.shape, steps, strict=True) if step or not n)
    itemsize = getattr(x.dtype, "itemsize", 0)
    return Array(tuple(x.shape), str(x.dtype).removeprefix("torch."),
                 itemsize, math.prod(held) * itemsize)


def ops_of(name: str, ins: list[Array], outs: list[Array], keys: list,
           rule: Callable, p: dict, path: str = "", line: str = "",
           repeats: int = 1) -> list[Op]:
    """The op, if it does anything; x * x (equal ``keys``) reads x once."""
    once = [a if key not in keys[i + 1:] else a._replace(nbytes=0)
            for i, (a, key) in enumerate(zip(ins, keys, strict=True))]
    work = Counter({**move(once, outs, p), **rule(once, outs, p)})
    counts = [work[kind] * repeats for kind in (*KINDS, "bytes")]
    op = Op(name, path, tuple(map(str, (*ins, *outs))), *counts, repeats, line)
    return [op] if any(counts) else []


def dearest(every: list) -> Any:
    """Of [(ops, ...)], the one of most FLOPs (then integers, then bytes), its
    ops' paths saying so."""
    ops, *more = max(every, key=lambda way: [
        sum(getattr(op, of) for op in way[0])
        for of in ("flops", "integer", "bytes")])
    return [replace(op, path=f"{op.path}[the dearest branch]")
            for op in ops], *more


def differences(ops: Any) -> list[str]:
    """What these ops hold that XLA and torch count in another way."""
    return [words for words, has in {
        "a loop's body counts once": lambda op: op.repeats > 1,
        "complex is as real": lambda op: "fft" not in op.name and (
            "c64[" in op.shapes[-1] or "c128[" in op.shapes[-1]),
        "integers count as floats": lambda op: op.integer,
        "convolutions count their own way (padded taps, groups, gradients)":
            lambda op: "conv" in op.name and op.matmul,
        "FFTs and factorizations have other formulas": lambda op:
            op.matmul and re.search(
                "fft|chol|lu|solve|linalg", op.name),
    }.items() if any(map(has, ops))]


def check_selected(wrt: Any, wanted: list, reached: bool) -> None:
    if wrt is not None and not wanted:
        raise ValueError(f"wrt={wrt!r} selects no floating-point array")
    if wrt is not None and not reached:
        raise ValueError(f"nothing fn returns depends on wrt={wrt!r}: return "
                         "an array made from it, with gradients on")


# --- source lines -----------------------------------------------------------
_CELL = re.compile(r"ipykernel_\d+.\d+\.py$|^<ipython-input")


@functools.cache
def shown(file: str) -> str:
    """The name of a file of the user's, "" if Python's, a front end's, ours.

    A notebook cell, whose file differs from run to run, is "<cell>".
    """
    homes = [os.path.dirname(sys.modules[name].__file__) + os.sep for name in (
        "os", "torch", "jax", "jaxlib", __package__) if name in sys.modules]
    theirs = [home for home in homes if file.startswith(home)]
    if "site-packages" in file.removeprefix(max(theirs, key=len, default="")):
        theirs = []  # another library, which lies in Python's own folder
    return ("<cell>" if _CELL.search(file) else
            "" if theirs or file[:1] == "<" else os.path.basename(file))


# --- rules ------------------------------------------------------------------
def _held(arrays: list[Array]) -> int:
    return sum(a.nbytes for a in arrays)


def is_real(a: Array) -> bool:
    """Whether it holds floats (or complex numbers): no integers, no truth."""
    return a.dtype[0] in "bfc" and a.dtype != "bool"


def _tally(kind: str, n: int, like: Array, parts: int = 2) -> Counter:
    """n operations in this dtype, each of ``parts`` real ones if complex."""
    if not is_real(like):
        return Counter(integer=n)
    return Counter({kind: n * (parts if like.dtype[0] == "c" else 1)})


def _macs(n: int, *arrays: Array) -> Counter:
    """n multiply-adds of the first two: 8 FLOPs if complex, 4 if one is."""
    parts = math.prod(1 + (a.dtype[0] == "c") for a in arrays[:2])
    return _tally("matmul", 2 * n * parts, max(arrays, key=is_real), 1)


def _each(kind: str, times: int = 1, more: Callable = lambda p: 0) -> Callable:
    """``times`` for each output, and as often again as ``more`` says."""
    return lambda ins, outs, p: _tally(
        kind, (times + more(p)) * outs[0].size, outs[0])


def _reduce(kind: str, per_input: int = 1, per_output: int = -1,
            parts: int = 2) -> Callable:
    return lambda ins, outs, p: _tally(kind, max(
        0, per_input * ins[0].size + per_output * outs[0].size),
        max(ins[0], outs[0], key=is_real), parts)  # dtype= makes floats


def _moves(held: Callable) -> Callable:
    return lambda ins, outs, p: Counter(bytes=held(ins, outs))


move = _moves(lambda ins, outs: _held(ins) + _held(outs))
view = _moves(lambda ins, outs: 0)
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
        each = p.get("accumulate", adds) * (1 + (p.get("alpha", 1) != 1))
        return _tally("elementwise", n * each, ins[0]) + Counter(
            bytes=_held(ins[1:]) + n * ins[0].itemsize)
    return rule


def _fill_rows(ins: list, outs: list, p: dict) -> Counter:
    """As many elements of ins[0] as its rows hold that ins[1] names."""
    n = ins[0].size // _line(ins, p) * ins[1].size
    return Counter(bytes=_held(ins[1:]) + n * ins[0].itemsize)


def _line(ins: list, p: dict) -> int:
    """Length of the axis an op runs along."""
    axis = p.get("axis", p.get("dimension", p.get("dim", -1)))
    return max(ins[0].shape[axis], 1) if ins[0].shape else 1


def _power(ins: list, outs: list, p: dict) -> Counter:
    """x**3 is two products, x**-1 one division, x**0.5 a transcendental."""
    y = p.get("y", p.get("exponent"))
    if not isinstance(y, int | float) or y % 1 or not 0 < abs(y) < 64:
        return _each("transcendental")(ins, outs, p)
    n = int(abs(y)).bit_length() + int(abs(y)).bit_count() - 2
    return _tally("elementwise", n * outs[0].size, outs[0], 6) + _tally(
        "elementwise", (y < 0) * outs[0].size, outs[0])


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
    return _macs(n, *ins[:2], *outs)


def _jax_conv(ins: list, outs: list, p: dict) -> Counter:
    """Along an axis each output meets the whole kernel; where the input has
    holes, each input does.

    Gradients are convolutions too, and pair what their forward pairs. Their
    layouts tell: in that of a kernel, which is the output, features come
    first. All others meet the kernel once for each input or each output,
    whichever are fewer: gradients of inputs, and layouts seldom used.
    """
    lhs, rhs, out = p["dimension_numbers"]
    macs = ins[1].shape[rhs[1]]
    macs *= math.prod(outs[0].shape[axis] for axis in out[:2])
    last = len(lhs) - 1
    of_kernel = lhs[1] == rhs[1] == 0
    plain = lhs[0] == 0 and rhs[:2] in ((0, 1), (last, last - 1), (0, last))
    for *axes, hole in zip(lhs[2:], rhs[2:], out[2:], p["lhs_dilation"],
                           strict=True):
        x, w, y = (a.shape[axis] for a, axis in zip(
            (*ins, *outs), axes, strict=True))
        if of_kernel and out[0] in (0, last):  # of the gradient of an input
            macs *= math.prod(sorted((x, w, y))[:2])
        elif of_kernel:
            macs *= y * w if hole == 1 else x * min(w, y)
        elif plain:
            macs *= w * (y if hole == 1 else x)
        else:
            macs *= w * min(x, y)
    return _macs(macs, *ins, *outs)


def _pool(axes: int, each: int = 0, backward: bool = False) -> Callable:
    """One for each element of a window, and ``each`` for a window."""
    def rule(ins: list, outs: list, p: dict) -> Counter:
        y, x = (ins[0], outs[0]) if backward else (outs[0], ins[0])
        if window := p.get("kernel_size"):
            n = y.size * math.prod(window) ** (axes // len(window))
        else:  # adaptive: where k does not divide m, windows overlap
            n = math.prod(y.shape[:-axes]) * math.prod(
                m + k - math.gcd(m, k) for m, k in zip(
                    x.shape[-axes:], y.shape[-axes:], strict=True))
        return _tally("elementwise", n + each * y.size, y)
    return rule


def _linalg(thirds: int, each: int = 0, at: int = 0) -> Callable:
    """thirds * n**3 / 3 to factor ins[at], each * n for a value solved."""
    def rule(ins: list, outs: list, p: dict) -> Counter:
        *batch, m, n = ins[at].shape
        k = min(m, n)  # LU of m by n; a cube where they are equal
        cube = 6 * m * n * k - 3 * (m + n) * k * k + 2 * k**3
        return _tally("matmul", math.prod(batch) * (
            thirds * cube // 6) + each * n * outs[0].size, ins[at], 4)
    return rule


def _fft(ins: list, outs: list, p: dict) -> Counter:
    """5 n log2 n, half of it where one side is real."""
    real = [a for a in (*ins, *outs) if a.dtype[0] != "c"]
    x, half = (real or outs)[0], bool(real) and p.get("onesided", True)
    n = math.prod(p.get("fft_lengths") or [x.shape[d] for d in p["dim"]])
    return Counter(matmul=round(
        5 * x.size * math.log2(max(n, 1)) / (1 + half)))


def _product(ins: list, outs: list, p: dict) -> Counter:
    n = ins[0].size * math.prod(ins[1].shape[1:][-1:])
    if len(ins[0].shape) == 3 > len(ins[1].shape):  # each column, one group's
        n //= max(ins[0].shape[0], 1)
    return _macs(n, *ins[:2], *outs)


def _add_product(ins: list, outs: list, p: dict) -> Counter:
    """beta * ins[0] + alpha * (ins[1] @ ins[2]); of two vectors all pairs."""
    outer = len(ins[1].shape) == len(ins[2].shape) == 1
    alpha, beta, n = p.get("alpha", 1), p.get("beta", 1), outs[0].size
    adds = n * (beta != 0) + n * (alpha != 1) + ins[0].size * (
        beta not in (0, 1))
    return (_times if outer else _product)(ins[1:], outs, p) + _tally(
        "elementwise", adds, ins[1])


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
    return _macs(macs, x, weight) + _tally("elementwise", adds, x)


def _table(rows: dict[str, Any]) -> dict[str, Any]:
    return {name: rule for names, rule in rows.items()
            for name in names.split()}


def _times(ins: list, outs: list, p: dict) -> Counter:
    """A product; of complex numbers, 4 products and 2 sums."""
    return _tally("elementwise", outs[0].size, outs[0], 6)


def _running(each: int = 1, kind: str = "elementwise",
             parts: int = 2) -> Callable:
    """A result for each element, less the first of each line."""
    return lambda ins, outs, p: _tally(kind, each * (
        ins[0].size - ins[0].size // _line(ins, p)),
        max(ins[0], outs[0], key=is_real), parts)


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
    "cumsum cummax cummin": _running(), "cumprod": _running(parts=6),
    "cumlogsumexp logcumsumexp": lambda ins, outs, p: _running(3)(
        ins, outs, p) + _running(2, "transcendental")(ins, outs, p),
    "sort topk top_k": lambda ins, outs, p: Counter(
        integer=ins[0].size * math.ceil(math.log2(_line(ins, p)))),
    "argmax argmin": _reduce("integer"),
    "fft _fft_c2c _fft_r2c _fft_c2r": _fft,
    "cholesky linalg_cholesky_ex": _linalg(1), "linalg_inv_ex": _linalg(8),
    "lu linalg_lu_factor_ex linalg_lu _linalg_det _linalg_slogdet":
        _linalg(2), "triangular_solve linalg_solve_triangular": _linalg(0, 1),
    "_linalg_solve_ex": _linalg(2, 2), "linalg_lu_solve": _linalg(0, 2),
    "cholesky_solve": _linalg(0, 2, 1)})
JAX = _COMMON | _table({
    "add_any max min": _each("elementwise"), "clamp": _each("elementwise", 2),
    "select_n is_finite and or xor not population_count clz eq_to lt_to le_to "
    "shift_left shift_right_logical shift_right_arithmetic": _each("integer"),
    "reduce_window_sum reduce_window_max reduce_window_min": _each(
        "elementwise", -1, lambda p: math.prod(p["window_dimensions"])),
    "select_and_scatter_add": lambda ins, outs, p: _tally(
        "elementwise", math.prod(p["window_dimensions"]) * ins[0].size,
        ins[0]),  # finds the place of each maximum, adds there
    "reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_xor":
        _reduce("elementwise"),
    "reduce_prod": _reduce("elementwise", parts=6),
    "dot_general ragged_dot ragged_dot_general": _jax_dot,
    "conv_general_dilated": _jax_conv,
    "broadcast_in_dim reshape squeeze expand_dims bitcast_convert_type name "
    "optimization_barrier stop_gradient device_put pvary platform_index empty "
    "empty2 sharding_constraint axis_index program_id num_programs freeze "
    "debug_print debug_callback": view, "new_ref": move,
    "get": _moves(lambda ins, outs: 2 * _held(outs)),
    "swap": _fill, "gather dynamic_slice slice": _take,
    "dynamic_update_slice": _put(1), "scatter": _put(2),
    "scatter-add scatter-sub scatter-mul scatter-min scatter-max":
        _put(2, True),
    "transpose convert_element_type concatenate pad rev split tile iota copy "
    "stack unstack real imag conj complex reduce_precision random_bits "
    "random_wrap random_unwrap random_seed random_split random_fold_in "
    "threefry2x32 rng_bit_generator lu_pivots_to_permutation": move})
TORCH = _COMMON | _table({
    "clamp_min clamp_max fmax fmin": _each("elementwise"),
    "lerp": _each("elementwise", 3), "addcmul addcdiv": _each(
        "elementwise", 2, lambda p: p.get("value", 1) != 1),
    "clamp": _each("elementwise", 0, lambda p: sum(
        p.get(bound) is not None for bound in ("min", "max"))),
    "where isnan isinf isfinite signbit logical_and logical_or logical_not "
    "logical_xor bitwise_and bitwise_or bitwise_xor bitwise_not shift_left "
    "shift_right_arithmetic": _each("integer"),
    "sum amax amin max min any all": _reduce("elementwise"),
    "prod": _reduce("elementwise", parts=6),
    "mean": _reduce("elementwise", 1, 0),
    "var var_mean": _reduce("elementwise", 4, 0),
    "mm bmm mv dot vdot _scaled_mm _int_mm _grouped_mm "
    "_scaled_grouped_mm": _product,
    "addmm baddbmm addbmm addmv addr": _add_product,
    "avg_pool2d _adaptive_avg_pool2d": _pool(2),
    "avg_pool3d _adaptive_avg_pool3d": _pool(3),
    "max_pool2d_with_indices adaptive_max_pool2d": _pool(2, -1),
    "max_pool3d_with_indices adaptive_max_pool3d": _pool(3, -1),
    "avg_pool2d_backward _adaptive_avg_pool2d_backward": _pool(2, 1, True),
    "avg_pool3d_backward _adaptive_avg_pool3d_backward": _pool(3, 1, True),
    "max_pool2d_with_indices_backward max_pool3d_with_indices_backward "
    "adaptive_max_pool2d_backward adaptive_max_pool3d_backward":
        lambda ins, outs, p: _tally("elementwise", ins[0].size, ins[0]),
    "triangular_solve": _linalg(0, 1, 1),
    "convolution convolution_backward": _conv,
    "_unsafe_view empty empty_like empty_strided new_empty resize "
    "_efficientzerotensor _new_zeros_with_same_feature_meta": view,
    "index gather index_select embedding take narrow_copy": _take,
    "index_put _unsafe_index_put": _put(-1),
    "scatter slice_scatter select_scatter": _put(1),
    "scatter_add scatter_reduce": _put(1, True), "index_copy": _put(2),
    "index_add": _put(2, True), "index_fill": _fill_rows,
    "copy copy_to zero fill zeros ones full arange zeros_like ones_like "
    "full_like new_zeros new_ones new_full": _fill,
    "clone _to_copy cat stack constant_pad_nd flip roll repeat tril triu "
    "convert_element_type iota scalar_tensor slice_backward select_backward "
    "rand rand_like randn randn_like randint randint_like randperm normal "
    "uniform bernoulli random exponential multinomial": move})
