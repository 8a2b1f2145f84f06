"""Count what a JAX or PyTorch function costs, op by op. Floor 1.

Nothing is computed: JAX functions are traced, torch functions run on fake
tensors. What is counted is the program as written, before any fusion (dead
code of a jaxpr left out). ``matmul``: products and convolutions, 2 FLOPs a
multiply-add (8 if complex), padded taps and dense attention included.
``elementwise``: float arithmetic, max, min and reductions (n - 1 each).
``transcendental``: one for each exp, log, tanh, erf, sqrt, power.
``integer``: integer arithmetic, comparisons, selects; a sort is n log2 n.
Moving data and drawing random bits are no FLOPs. Each op reads its inputs and
writes its outputs once; views move nothing, a gather only what it takes.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import html
import importlib
import inspect
import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from course_utils.host import Missing

KINDS = ("matmul", "elementwise", "transcendental", "integer")
Wrt = str | int | tuple[int, ...] | None


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
        return _need("pandas").DataFrame(
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
    "params" (trainable parameters; argument 0 of a plain function), "all"
    (those and the float arguments) or argument numbers: forward and backward
    with a cotangent of ones. Raises ValueError or TypeError naming the
    argument. Modules given as fn or argument are counted on a fake copy; one
    that fn closes over is the real one, so pass it if fn trains it.
    """
    run = _torch if _front_end(fn, args, kwargs) == "torch" else _jax
    wrt = _check_wrt(wrt, len(args))
    try:
        cost = run(fn, args, kwargs or {}, wrt)
    except Missing:
        raise
    except Exception as error:
        why = next(iter(str(error).strip().splitlines()), "no message")[:200]
        raise ValueError(
            f"fn cannot be counted with {_described(fn, args)}: {why} "
            f"({type(error).__name__}). Check shapes and types, and that fn "
            "looks at no value.") from error
    if cost.unknown:
        warnings.warn("flops.count left out what it has no rule for: "
                      + "; ".join(cost.unknown), stacklevel=2)
    return cost


def compare(fn: Callable, *args: Any, kwargs: dict | None = None,
            wrt: Wrt = None) -> Any:
    """A DataFrame: our count beside XLA's or torch's FlopCounterMode.

    ``flops`` leaves transcendentals apart, as XLA does; ``why`` says what
    makes a row differ from ours. XLA compiles for the default device.
    """
    pandas, cost = _need("pandas"), count(fn, *args, kwargs=kwargs, wrt=wrt)
    ours, call = cost.matmul + cost.elementwise, (
        fn, args, kwargs or {}, _check_wrt(wrt, len(args)))
    rows = [("course_utils", cost.matmul, ours, cost.transcendental,
             cost.bytes, "the program as written")]
    shapes = " ".join(shape for op in cost.ops for shape in op.shapes)
    why = [f"we left out {what}" for what in cost.unknown]
    why += ["complex counts as real"] * bool(re.search(r"\bc\d", shapes))
    why += ["integers and comparisons count"] * bool(cost.integer)
    why += ["padded taps or groups of a convolution"] * any(
        "conv" in op.name and op.matmul for op in cost.ops)
    if _front_end(fn, args, kwargs) == "torch":
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
        low = _need("jax").jit(program).lower(*arrays)
        for stage, name in (low, "lowered"), (low.compile(), "compiled"):
            found = stage.cost_analysis() or {}
            found = found[0] if isinstance(found, list) else found
            n, also = found.get("flops"), (
                "its rules for single ops" if stage is low else
                "after fusing, converting, merging")
            rows.append((f"XLA {name}", None, n, found.get(
                "transcendentals", 0), found.get("bytes accessed"),
                "agrees" if n == ours else "; ".join(why or [also])))
    return pandas.DataFrame(rows, columns=[
        "counter", "matmul", "flops", "transcendental", "bytes", "why"],
    ).convert_dtypes()


# --- arguments -------------------------------------------------------------
def _need(library: str) -> Any:
    try:
        return importlib.import_module(library)
    except ImportError:
        raise Missing(library, "counting FLOPs here needs it",
                      f"Run: pip install {library}") from None


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
    kinds = {"torch" if isinstance(x, ours) else "jax" for x in _leaves(
        (getattr(fn, "__self__", fn), args, kwargs))
        if isinstance(x, ours) or (hasattr(x, "dtype") and x is not fn)}
    if len(kinds) == 2:
        raise TypeError("args mix torch with JAX or NumPy arrays: pass one "
                        f"kind (here {_described(fn, args)})")
    return kinds.pop() if kinds else "jax"


def _check_wrt(wrt: Any, n: int) -> Any:
    """None, "params", "all" or a tuple of valid argument numbers."""
    numbers = tuple(wrt) if isinstance(wrt, list | tuple) else (wrt,)
    if wrt is None or numbers in (("params",), ("all",)):
        return wrt
    for i in numbers:
        if type(i) is not int or not 0 <= i < n:
            near = difflib.get_close_matches(str(i), ("params", "all"), 1, 0.3)
            raise ValueError(
                f"wrt={wrt!r} is not None, 'params', 'all' or numbers of the "
                f"{n} arguments (from 0)" + "".join(
                    f"; did you mean {name!r}?" for name in near))
    return numbers


def _described(fn: Any, args: tuple) -> str:
    """"x f32[3,4], w f32[5,6]", with the function's own argument names."""
    names = []
    with contextlib.suppress(TypeError, ValueError):
        names += list(inspect.signature(fn).parameters)[:len(args)]
    names += [f"argument {i}" for i in range(len(names), len(args))]
    return ", ".join(f"{name} " + (" ".join(
        str(_array(x)) for x in _leaves(arg) if hasattr(x, "dtype"))
        or repr(arg)[:40]) for name, arg in zip(names, args, strict=True))


# --- rules: inputs, outputs, parameters of an op -> how much of each kind ---
class _Array(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    size = property(lambda self: math.prod(self.shape))

    def __str__(self) -> str:
        short = re.sub("(f)loat|(c)omplex|(i)nt", r"\1\2\3", self.dtype)
        return f"{short}[{','.join(map(str, self.shape))}]"


def _array(x: Any) -> _Array:
    """Of an aval, array or tensor; a stride of 0 stores one element."""
    steps = x.stride() if hasattr(x, "is_sparse") else (1,) * len(x.shape)
    held = (n for n, step in zip(x.shape, steps, strict=True) if step or not n)
    return _Array(tuple(x.shape), str(x.dtype).removeprefix("torch."),
                  math.prod(held) * getattr(x.dtype, "itemsize", 0))


def _tally(kind: str, n: int, like: _Array, if_complex: int = 2) -> Counter:
    """n operations in this dtype, as real operations under their kind."""
    if "int" in like.dtype or like.dtype == "bool":
        return Counter(integer=n)
    return Counter({kind: n * if_complex ** like.dtype.startswith("c")})


def _contract(macs: int, like: _Array) -> Counter:
    return _tally("matmul", 2 * macs, like, 4)


def _each(kind: str, times: int = 1, if_complex: int = 2) -> Callable:
    return lambda ins, outs, p: _tally(
        kind, times * outs[0].size, outs[0], if_complex)


def _reduce(kind: str, per_input: int = 1, per_output: int = -1) -> Callable:
    return lambda ins, outs, p: _tally(kind, max(
        0, per_input * ins[0].size + per_output * outs[0].size), ins[0])


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
    return _each("elementwise", n, 6)(ins, outs, p)


def _jax_dot(ins: list, outs: list, p: dict) -> Counter:
    over = p["dimension_numbers"][0][0]
    if not over:  # an outer product multiplies and adds nothing
        return _each("elementwise", 1, 6)(ins, outs, p)
    return _contract(outs[0].size * math.prod(
        ins[0].shape[axis] for axis in over), ins[0])


def _jax_conv(ins: list, outs: list, p: dict) -> Counter:
    lhs, rhs, out = p["dimension_numbers"]
    macs = math.prod(outs[0].shape[d] for d in out[:2]) * ins[1].shape[rhs[1]]
    # Transposed (or a gradient), it meets holes or leaves taps out: pairs of
    # the two shorter sides are real.
    holes = p["backward"] or any(d > 1 for d in p["lhs_dilation"])
    for i, k, o in zip(lhs[2:], rhs[2:], out[2:], strict=True):
        sides = ins[0].shape[i], ins[1].shape[k], outs[0].shape[o]
        macs *= math.prod(sorted(sides)[:2] if holes else sides[1:])
    return _contract(macs, ins[0])


def _product(ins: list, outs: list, p: dict) -> Counter:
    over = ins[0].shape[-1:]
    if (len(ins[0].shape), len(outs[0].shape)) == (3, 2):  # addbmm
        over = ins[0].shape[::2]  # sums its batch too
    return _contract(outs[0].size * math.prod(over), ins[0])


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
    return _contract(macs, x) + _tally("elementwise", adds, x)


def _table(rows: dict[str, Any]) -> dict[str, Any]:
    return {name: rule for names, rule in rows.items()
            for name in names.split()}


# A rule is a function, or a word for what only moves data; see _op.
_COMMON = _table({
    "add sub neg abs maximum minimum floor ceil round sign square trunc relu "
    "reciprocal fmod remainder rem": _each("elementwise"),
    "mul": _each("elementwise", 1, 6), "div": _each("elementwise", 1, 11),
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
    "add_any max min nextafter": _each("elementwise"),
    "clamp": _each("elementwise", 2),
    "select_n is_finite and or xor not population_count clz shift_left "
    "shift_right_logical shift_right_arithmetic": _each("integer"),
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or "
    "reduce_xor": _reduce("elementwise"),
    "dot_general": _jax_dot, "conv_general_dilated": _jax_conv,
    "broadcast_in_dim reshape squeeze expand_dims bitcast_convert_type name "
    "optimization_barrier stop_gradient device_put pvary "
    "sharding_constraint": "view", "gather dynamic_slice slice": "take",
    "dynamic_update_slice": "put", "scatter": "put last",
    "scatter-add scatter-sub scatter-mul": "accumulate",
    "transpose convert_element_type concatenate pad rev split iota copy real "
    "imag conj complex reduce_precision random_bits random_wrap random_unwrap "
    "random_seed random_fold_in threefry2x32 rng_bit_generator": "move"})
_TORCH = _COMMON | _table({
    "rsub clamp_min clamp_max": _each("elementwise"),
    "hardtanh": _each("elementwise", 2),
    "where isnan isinf logical_and logical_or logical_not logical_xor "
    "bitwise_and bitwise_or bitwise_xor bitwise_not": _each("integer"),
    "sum amax amin max min prod any all": _reduce("elementwise"),
    "mean": _reduce("elementwise", 1, 0),
    "var var_mean": _reduce("elementwise", 4, 0),
    "mm bmm mv dot vdot _scaled_mm _int_mm _grouped_mm": _product,
    "addmm baddbmm addmv addbmm": _add_product,
    "convolution convolution_backward": _conv,
    "_unsafe_view empty empty_like empty_strided new_empty": "view",
    "index gather index_select embedding": "take",
    "scatter index_copy": "put last",
    "index_put scatter_add index_add": "accumulate",
    "clone copy _to_copy cat stack constant_pad_nd zeros ones full arange "
    "zeros_like ones_like full_like new_zeros new_ones new_full zero fill "
    "flip roll repeat tril triu convert_element_type iota scalar_tensor "
    "slice_backward select_backward": "move"})


def _op(name: str, path: str, ins: list[_Array], outs: list[_Array],
        keys: list[int], rule: Any, p: dict, repeats: int = 1) -> list[Op]:
    """The op, if it does anything; x * x (equal ``keys``) reads x once."""
    read = list(dict(zip(keys, (a.nbytes for a in ins), strict=True)).values())
    written = sum(a.nbytes for a in outs)
    moved = {"view": 0, "take": sum(read[1:]) + 2 * written,
             "put": sum(read[1:] + read[1:2]),
             "put last": sum(read[1:] + read[-1:]),
             "accumulate": sum(read[1:] + 2 * read[-1:]),
             }.get(rule if isinstance(rule, str) else "", sum(read) + written)
    work = rule(ins, outs, p) if callable(rule) else Counter()
    if rule == "accumulate" and p.get("accumulate", True):
        work = _tally("elementwise", ins[-1].size, ins[0])
    op = Op(name, path, tuple(map(str, (*ins, *outs))),
            *(work[kind] * repeats for kind in KINDS),
            moved * repeats, repeats)
    return [op] if any((*work.values(), moved)) else []


# --- JAX: walk the jaxpr ----------------------------------------------------
_CALLS = frozenset("jit pjit closed_call core_call remat checkpoint remat2 "
                   "custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr "
                   "scan while cond".split())


def _jax_program(fn: Callable, args: tuple, kwargs: dict,
                 wrt: Any) -> tuple[Callable, list, list]:
    """A function of the arrays alone, the arrays, those differentiated."""
    jax, np = _need("jax"), _need("numpy")
    flat, tree = jax.tree.flatten((args, kwargs))
    owner = [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    owner += [-1] * (len(flat) - len(owner))
    live = [i for i, x in enumerate(flat) if hasattr(x, "dtype")]
    chosen = {None: (), "params": (0,), "all": {*owner}}.get(wrt, wrt)
    wanted = [i for i in live if owner[i] in chosen
              and jax.numpy.issubdtype(flat[i].dtype, np.inexact)]
    if wrt is not None and not wanted:
        raise ValueError(f"wrt={wrt!r} selects no floating-point array")

    def call(values: dict) -> Any:
        leaves = [values.get(i, x) for i, x in enumerate(flat)]
        args, kwargs = jax.tree.unflatten(tree, leaves)
        return fn(*args, **kwargs)

    def one(y: Any) -> Any:
        if jax.numpy.issubdtype(y.dtype, np.inexact):
            return jax.numpy.ones_like(y)
        return np.zeros(y.shape, jax.dtypes.float0)

    def program(*arrays: Any) -> Any:
        held = dict(zip(live, arrays, strict=True))
        if wrt is None:
            return call(held)
        out, pull = jax.vjp(
            lambda *xs: call(held | dict(zip(wanted, xs, strict=True))),
            *(held[i] for i in wanted))
        return out, pull(jax.tree.map(one, out))

    return program, [flat[i] for i in live], [flat[i] for i in wanted]


def _jax(fn: Callable, args: tuple, kwargs: dict, wrt: Any) -> Cost:
    jax = _need("jax")
    program, arrays, wanted = _jax_program(fn, args, kwargs, wrt)
    jaxpr, unknown = jax.make_jaxpr(program)(*arrays).jaxpr, []
    partial_eval = _need("jax.interpreters.partial_eval")
    if hasattr(partial_eval, "dce_jaxpr"):  # gradients nobody asked for
        keep = [True] * len(jaxpr.outvars)
        jaxpr = partial_eval.dce_jaxpr(jaxpr, keep)[0]
    ops = tuple(_walk(jaxpr, "", 1, unknown))
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
            if _JAX[name] == "view":
                behind |= {id(v): a.nbytes for v, a in zip(
                    eqn.outvars, ins, strict=False)}
            yield from _op(
                name, at, ins, [_array(v.aval) for v in eqn.outvars],
                [id(v) for v in eqn.invars], _JAX[name],
                p | {"backward": "transpose(" in at}, repeats)


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
    """Trips of ``while i < n: i += step`` where all three are literals."""
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
    if old is not body.invars[p["body_nconsts"] + at] or not all(
            hasattr(v, "val") for v in (start, n, step)):
        return None
    return len(range(int(start.val), int(n.val), int(step.val)))


# --- torch: run on fake tensors ---------------------------------------------
def _torch(fn: Any, args: tuple, kwargs: dict, wrt: Any) -> Cost:
    import torch
    from torch.backends import mkldnn
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.modules import module as hooks
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    decompositions = _need("torch._decomp").decomposition_table
    ops, unknown, entered, names, made_by = [], [], [], {}, {}

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

    def path():
        """The module we are in; of a backward op, that of its forward op."""
        if node := torch._C._current_autograd_node():
            return f"backward {made_by.get(node._sequence_nr(), '')}".rstrip()
        here = entered[-1] if entered else ""
        # The first op at a number is the one whose autograd node took it.
        made_by.setdefault(torch.autograd._get_sequence_nr() - 1, here)
        return here

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
        if func.is_view:
            return "view"
        if space in ("aten", "prims") and name in _TORCH:
            return _TORCH[name]
        if func in decompositions:
            return inside(decompositions[func], args, kwargs)
        if func._can_decompose():
            return inside(func.decompose, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return "move"
        pointwise = torch.Tag.pointwise in func.tags
        return _each("elementwise") if pointwise else None

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs := kwargs or {}))
            outs, ins = tensors(out), tensors((args, kwargs))
            space, name = func._schema.name.split("::")
            name = name.rstrip("_")  # add_ is add in place
            rule = rule_of(func, space, name, args, kwargs) if outs else "view"
            if rule is None:
                unknown.append(f"{space}.{name}")
                return out
            named = (a.name for a in func._schema.arguments)
            ops.extend(_op(
                name, path(), [_array(x) for x in ins],
                [_array(x) for x in outs], [id(x) for x in ins], rule,
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
    from torch.utils._pytree import tree_leaves, tree_map

    fake, memo = FakeTensorMode(allow_non_fake_inputs=True), {}
    Module, Tensor, Parameter = torch.nn.Module, torch.Tensor, (
        torch.nn.Parameter)

    def shadow(x):
        if isinstance(x, Module):
            for tensor in (*x.parameters(), *x.buffers()):
                shadow(tensor)  # deepcopy finds them in memo, ties kept
            return copy.deepcopy(x, memo)
        if not isinstance(x, Tensor) or id(x) in memo:
            return memo.get(id(x), x)
        with fake:
            y = fake.from_tensor(x.detach()) if not x.is_meta else (
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype))
        memo[id(x)] = (Parameter(y, x.requires_grad) if isinstance(
            x, Parameter) else y.requires_grad_(x.requires_grad))
        return memo[id(x)]

    def inner(tree):
        """Tensors and module parameters in it, each once."""
        return list({id(t): t for x in tree_leaves(tree) for t in (
            x.parameters() if isinstance(x, Module) else [x])
            if isinstance(t, Tensor)}.values())

    fn = getattr(fn, "_orig_mod", fn)  # before torch.compile
    home = getattr(fn, "__self__", None)  # model.method is the model's
    owner = home if isinstance(home, Module) else fn
    call, args, kwargs = tree_map(shadow, (owner, args, kwargs))
    modules = [x for x in tree_leaves((call, args, kwargs))
               if isinstance(x, Module)]
    if owner is not fn:
        call = getattr(call, fn.__name__)
    params, everything = inner(modules), inner((modules, args, kwargs))
    chosen = {None: (), "params": modules or args[:1], "all": everything}
    chosen = chosen[wrt] if wrt in chosen else [args[i] for i in wrt]
    wanted = [x for x in inner(chosen)
              if (x.is_floating_point() or x.is_complex())
              and (x.requires_grad or not isinstance(x, Parameter))]
    if wrt is not None and not wanted:
        raise ValueError(f"wrt={wrt!r} selects no floating-point tensor")
    for x in everything if wrt is not None else ():
        x.requires_grad_(any(x is w for w in wanted))
    with contextlib.ExitStack() as stack:
        for mode in (fake, torch.compiler.set_stance("force_eager"), *modes):
            stack.enter_context(mode)
        out = call(*args, **kwargs)
        if wrt is not None:
            out = [y for y in inner([out]) if y.requires_grad]
            ones = [torch.ones_like(y) for y in out]
            torch.autograd.grad(out, wanted, ones, allow_unused=True)
    if not modules and wrt == "params":
        params = wanted
    known = modules or wrt == "params"
    return sum(p.numel() for p in params) if known else None
