"""PyTorch: run on fake tensors, under a mode that sees every op.

What an op costs and what it returns are worked out once for each set of
shapes and parameters: a layer like the one before it is quick.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import logging
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._decomp import decomposition_table
from torch._subclasses import fake_tensor
from torch.backends import mkldnn
from torch.nn import Module, Parameter
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from course_utils._front import leaves, levels
from course_utils.flops import _rules as rules
from course_utils.host import need

Tensor, Fake = torch.Tensor, fake_tensor.FakeTensor
_DEVICE, _STRIDED = torch.ops.prim.device.default, torch.strided
_OVERLOAD = torch._ops.OpOverload
_CONVS = {F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d,
          F.conv_transpose2d, F.conv_transpose3d}
_PLAIN = Tensor.__deepcopy__, torch._C.TensorBase.clone
_SHARED = {kind: lambda x, memo: x for kind in (  # no deepcopy makes these
    type(threading.Lock()), type(threading.RLock()), torch.Generator)}
_ONE = threading.RLock()  # threads share hooks, torch.cond and modules
_REFUSED = {  # part of torch's words: ours
    "uantized": "a quantized tensor has no form without data: pass the float "
                "model, or what .dequantize() makes",
    "uninitialized parameter": "a lazy module has no shapes yet: call it once",
    "DataDependentOutput": "fn, or what torch makes of it, reads a value out "
                           "of a tensor: pass it as a number",
    "new Tensor subclass": "fn makes a tensor of a class of its own: pass or "
                           "make plain ones (of CausalBias, is_causal)",
    "shape_env": "a shape hangs on values (jagged tensors): pass padded ones"}


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """No other thread counts; an error if fn itself waits for one that does.
    """
    if not _ONE.acquire(timeout=60):
        raise ValueError("another thread has been counting for a minute, and "
                         "one count has to end before the next begins")
    try:
        yield
    finally:
        _ONE.release()


def count(fn: Any, args: tuple, kwargs: dict, wrt: Any) -> tuple:
    """(ops, parameters, unknown)."""
    fake = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    counter = _Count(fake)
    with (_alone(), contextlib.ExitStack() as stack,
          sdpa_kernel(SDPBackend.MATH)):
        stack.callback(counter.restore)
        torch.clear_autocast_cache()  # of real weights; then of fake ones
        stack.callback(torch.clear_autocast_cache)
        # LSTM and attention as the products they are made of, everywhere.
        stack.callback(mkldnn.set_flags, mkldnn.set_flags(_enabled=False)[0])
        for hook in (modules.register_module_forward_pre_hook(counter.enter),
                     modules.register_module_forward_hook(
                         counter.leave, always_call=True)):
            stack.callback(hook.remove)
        stack.enter_context(mock.patch.object(torch, "cond", counter.cond))
        if gc.isenabled():  # a third of the time, for a graph that is held
            stack.callback(gc.enable)
            gc.disable()
        try:
            params = _run(fn, args, kwargs, wrt, fake, _Products(), counter)
        except Exception as error:
            said = [type(error).__name__, str(error), *(
                frame.filename for frame in traceback.extract_tb(
                    error.__traceback__)
                if "/torch/ao/" in frame.filename)]  # it reads its scales
            for words, why in _REFUSED.items():
                if any(words in text for text in said):
                    raise ValueError(why) from error
            raise
        if counter.restore():
            raise ValueError("fn makes the gradient of a tensor that is no "
                             "argument: pass it as an argument")
    return counter.ops, params, counter.unknown


def others(cost: Any, *call: Any) -> list[tuple]:
    """The row of torch's own counter for ``compare``."""
    counter, met = _flop_counter().FlopCounterMode(display=False), _Met()
    with _alone():
        _run(*call, fake_tensor.FakeTensorMode(allow_non_fake_inputs=True),
             met, counter)
    n, why = counter.get_total_flops(), ["elementwise is 0"]
    if n != cost.matmul:
        known = {op.__name__ for op in _flop_counter().flop_registry}
        ours = {op.name: op.matmul for op in cost.ops}
        none = {name for name in met.names - known if ours.get(
            name, name not in rules.TORCH)}
        why += [f"{name} is 0" for name in sorted(none)]
        why += rules.differences([op for op in cost.ops if op.name in known]
                                 ) or ["its own formulas"] * (not none)
    return [("FlopCounterMode", n, n, None, None, ", ".join(why))]


class _Met(TorchDispatchMode):
    """The names of the ops that run, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not _DEVICE and not getattr(func, "is_view", False):
            self.names.add(func.__name__.partition(".")[0].rstrip("_"))
        return func(*args, **(kwargs or {}))


def _flop_counter() -> Any:
    # Without triton torch warns, of kernels that are not counted here.
    logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)
    return need("torch.utils.flop_counter", rules.WHY)


def _closed(fn: Any) -> list[Module]:
    """The modules that fn, or a function it calls, takes from around it."""
    if isinstance(fn, Module):
        return []
    found = [x for level in levels(fn) for x in level]
    if any(isinstance(x, torch.optim.Optimizer) for x in found):
        raise ValueError("fn closes over an optimizer: pass it and its model "
                         "as arguments")  # it would hold no copies
    return [x for x in found if isinstance(x, Module)]


# --- running fn on copies ----------------------------------------------------
def _bare(x: Tensor, fake: fake_tensor.FakeTensorMode) -> Tensor:
    """x as a fake tensor; from meta as on the CPU, as constants in fn are."""
    if x.layout is not _STRIDED:
        return fake.from_tensor(x)
    return Fake(fake, torch.empty_strided(
        x.shape, x.stride(), dtype=x.dtype, device="meta",
        requires_grad=x.requires_grad), torch.device(
            "cpu" if x.is_meta else x.device))


class _Copy(TorchFunctionMode):
    """Fake tensors where deepcopy copies tensors."""

    def __init__(self, fake: fake_tensor.FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _PLAIN:
            return _bare(args[0], self.fake)
        return func(*args, **(kwargs or {}))


def _inner(tree: Any) -> list[Tensor]:
    """Tensors and module parameters in it, each once."""
    return list({id(t): t for x in leaves(tree) for t in (
        x.parameters() if isinstance(x, Module) else [x])
        if isinstance(t, Tensor)}.values())


def _run(fn: Any, args: tuple, kwargs: dict, wrt: Any,
         fake: fake_tensor.FakeTensorMode, *modes: Any) -> int | None:
    """Run fn on fake copies under modes; its number of parameters."""
    with contextlib.ExitStack() as stack:
        if wrt is not None:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
        modules = _closed(fn)
        owned = [x for x in _inner((fn, args, kwargs, modules))
                 if isinstance(x, Parameter)]
        memo = {id(x): _bare(x, fake) for x in owned if type(x) is Parameter}
        for x in memo.values():  # deepcopy can do this too, ten times slower
            x._is_param = True
        with _Copy(fake), mock.patch.dict(copy._deepcopy_dispatch, _SHARED):
            call, args, kwargs = copy.deepcopy(
                (getattr(fn, "_orig_mod", fn), args, kwargs), memo)
            for module in modules:  # they are their copies for the time
                stack.callback(vars(module).update, dict(vars(module)))
                copied = copy.deepcopy(module, memo)
                stack.callback(vars(module).clear)
                vars(module).update(vars(copied))
        params = [x for x in memo.values() if isinstance(x, Parameter)]
        owned += [x for x in memo.get(id(memo), ())  # what it copied itself
                  if isinstance(x, Parameter)]
        everything = _inner((params, args, kwargs))
        chosen = {None: (), "params": params or args[:1], "all": everything}
        chosen = chosen[wrt] if wrt in chosen else [args[i] for i in wrt]
        wanted = [x for x in _inner(chosen)
                  if (x.is_floating_point() or x.is_complex())
                  and (x.requires_grad or not isinstance(x, Parameter))]
        rules.check_selected(wrt, wanted, True)
        chosen = {id(x) for x in wanted}
        for x in everything if wrt is not None else ():
            x.requires_grad_(id(x) in chosen)
        for mode in (fake, torch.compiler.set_stance("force_eager"), *modes):
            stack.enter_context(mode)
        out = call(*args, **kwargs)
        if wrt is not None:
            for x in wanted:
                x.grad = None
            out = [y for y in _inner(out) if y.requires_grad]
            # Not autograd.grad: FlopCounterMode's hooks do not allow it.
            torch.autograd.backward(
                out, [torch.ones_like(y) for y in out], inputs=wanted)
        rules.check_selected(
            wrt, wanted, any(x.grad is not None for x in wanted))
    # Of those that lie in the same memory in the same way, one counts.
    places = {(x.untyped_storage()._cdata, x.storage_offset(), x.shape,
               x.stride()) if x.layout is _STRIDED else id(x): x
              for x in owned or (wanted if wrt == "params" else [])}
    return sum(x.numel() for x in places.values()) if places else None


# --- counting ----------------------------------------------------------------
def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor,
              bias: Tensor | None = None) -> Tensor:
    half = torch.einsum("...i,oij->...oj", input1, weight)
    z = torch.einsum("...oj,...j->...o", half, input2)
    return z if bias is None else z + bias


def _complex(conv: Callable, input: Tensor, weight: Tensor,
             bias: Tensor | None = None, *how: Any, **named: Any) -> Tensor:
    """Four real convolutions: torch makes three, and more sums, of it."""
    a, b, c, d = (conv(x, w, None, *how, **named) for x in (
        input.real, input.imag) for w in (weight.real, weight.imag))
    z = torch.complex(a - d, b + c)
    return z if bias is None else z + bias.reshape(-1, *[1] * (
        weight.dim() - 2))


class _Products(TorchFunctionMode):
    """Attention and the like as the products they are made of."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **kwargs)
        if func in _CONVS and _tensors((args, kwargs))[0].is_complex():
            return _complex(func, *args, **kwargs)
        return (_bilinear if func is F.bilinear else func)(*args, **kwargs)


def _line() -> str:
    """Of the user's frames between an op and ``_run``, the innermost."""
    frame = sys._getframe(2)
    while frame and frame.f_code is not _run.__code__:
        if name := rules.shown(frame.f_code.co_filename):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in leaves(tree) if isinstance(x, Tensor)]


def _plain(x: Any) -> bool:
    """Whether a fake tensor is all that its shape and device say."""
    return (isinstance(x, Fake) and x.constant is None
            and x.layout is _STRIDED and not (
                x.is_conj() or x.is_neg() or x._is_zerotensor()))


class _Seen(NamedTuple):
    """What is known of an op of these shapes and parameters.

    ``ops`` gives what it counts as, by path and line. ``results``, None if
    it has to run each time, tell of each tensor that it returns which input
    it is, or the shape, strides and so on of a new one.
    """

    ops: Callable | None
    unknown: str
    results: list | None = None
    alone: bool = False  # one tensor, not a list of one


def _given(x: Tensor) -> Iterator[Tensor]:
    """The tensors that a backward pass through x would give a gradient."""
    if x.requires_grad and (x.is_leaf or x.retains_grad):
        yield x
    nodes = {x.grad_fn} - {None}
    while new := nodes and {after for node in nodes
                            for after, _ in node.next_functions} - {None}:
        nodes = new
        yield from (n.variable for n in new if hasattr(n, "variable"))


class _Count(TorchDispatchMode):
    """Gathers ``ops`` and ``unknown``."""

    supports_higher_order_operators = True
    _should_skip_dynamo = classmethod(lambda cls: False)  # a slow wrapper

    def __init__(self, fake: fake_tensor.FakeTensorMode) -> None:
        super().__init__()
        self.fake, self.ops, self.unknown, self.seen = fake, [], [], {}
        self.names, self.running = {}, [""]  # paths of modules
        self.guessed = False  # what the op at hand returns
        self.outside: dict[int, tuple] = {}  # tensors of no argument
        self.thread, self.torch_cond = threading.get_ident(), torch.cond

    def restore(self) -> bool:
        """Take back gradients given to tensors that are no argument."""
        given = [(x, grad) for x, grad in self.outside.values()
                 if isinstance(x.grad, Fake)]
        for x, grad in given:
            x.grad = grad
        return bool(given)

    def enter(self, module: Module, args: Any) -> None:
        if threading.get_ident() != self.thread:
            return
        if module not in self.names:
            self.names |= {part: f"{type(module).__name__}.{name}".strip(".")
                           for name, part in module.named_modules()}
        self.running.append(self.names[module])

    def leave(self, *_: Any) -> None:
        if threading.get_ident() == self.thread:
            self.running.pop()

    def cond(self, pred: Any, true_fn: Callable, false_fn: Callable,
             operands: Any = ()) -> Any:
        """torch.cond: runs both ways, goes on with the dearer."""
        if threading.get_ident() != self.thread:
            return self.torch_cond(pred, true_fn, false_fn, operands)
        parts, out = rules.dearest([
            self.parts(way, operands, {}) for way in (true_fn, false_fn)])
        self.ops += parts
        return out

    def higher(self, func: Any, args: Any, kwargs: dict) -> Any:
        """An operator on functions; of a loop, says what one turn is."""
        if func is torch.ops.higher_order.while_loop:
            _, body, carried, *more = args
            with self:
                one, _ = self.parts(body, (*carried, *sum(more, ())), {})
            n = sum(op.flops for op in one)
            self.unknown.append(
                f"while_loop (trips not known; one is {n:,} FLOPs)")
            return carried
        out = func(*args, **kwargs)
        if formula := _flop_counter().flop_registry.get(func):
            ins, outs = _tensors((args, kwargs)), _tensors(out)
            work = Counter(matmul=formula(*args, **kwargs, out_val=out))
            self.ops += rules.ops_of(
                func.name(), *([*map(rules.array, of)] for of in (ins, outs)),
                [*map(id, ins)], lambda ins, outs, p: work, {},
                self.running[-1], _line())
        else:
            self.unknown.append(str(func))
        return out

    def parts(self, call: Callable, args: Any, kwargs: dict) -> tuple:
        """The ops a call is made of, taken out again, and its result."""
        start, out = len(self.ops), call(*args, **kwargs)
        parts, self.ops[start:] = self.ops[start:], []
        return parts, out

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _DEVICE and isinstance(args[0], Fake):
            return args[0].fake_device  # asked most of all, so briefly
        kwargs = kwargs or {}
        if func is torch.ops.higher_order.cond:
            with self:
                return self.cond(*args)
        if not isinstance(func, _OVERLOAD):  # an operator on functions
            return self.higher(func, args, kwargs)
        with torch._C.DisableTorchFunction():
            ins: list[Tensor] = []
            key = func, self.key(args, ins)
            if kwargs:
                key += self.key(kwargs.items(), ins)
            ids = [*map(id, ins)]
            if len(ids) > 1 and len(set(ids)) < len(ids):
                key += tuple(map(ids.index, ids))  # x * x reads x once
            real = [x for x in ins if not isinstance(x, Fake)]
            if real and (any(isinstance(x, Parameter) for x in real) or (
                    real[0] is ins[0] and func._schema.is_mutable)):
                raise ValueError("fn reaches a module, or writes to a tensor, "
                                 "that is no argument: pass it as an argument")
            for x in real:
                self.outside |= {id(y): (y, y.grad) for y in _given(x)
                                 if id(y) not in self.outside}
            seen = self.seen.get(key)
            if seen is None:
                self.seen[key], out = self.learn(func, args, kwargs, ins)
                seen = self.seen[key]
            elif seen.results is None:
                out = self.run(func, args, kwargs)
            else:
                out = self.again(seen, func, args, kwargs, ins)
            if seen.unknown:
                self.unknown.append(seen.unknown)
            if seen.ops:
                self.ops += seen.ops("backward", "") if (
                    torch._C._current_autograd_node()) else seen.ops(
                        self.running[-1], _line())
            return out

    def key(self, tree: Any, ins: list[Tensor]) -> tuple:
        """All that an op's count depends on; ``ins`` gathers its tensors."""
        found = []
        for x in tree:
            if isinstance(x, Tensor):
                ins.append(x)
                fake = isinstance(x, Fake)
                found.append((
                    x.shape, x.dtype, x.layout is _STRIDED and x.stride(),
                    fake and x.fake_device, fake and id(x.constant)))
            elif isinstance(x, list | tuple):
                found.append(self.key(x, ins))
            else:  # 1, 1.0 and True are equal
                found.append((type(x), x))
        return tuple(found)

    def run(self, func: Any, args: Any, kwargs: dict) -> Any:
        """What func returns; of ones, where its shape hangs on values."""
        try:
            return func(*args, **kwargs)
        except fake_tensor.DynamicOutputShapeException:
            self.guessed = True
            with torch._C._DisableTorchDispatch():
                ones = tree_map_only(Tensor, lambda x: torch.ones(
                    x.shape, dtype=x.dtype), (args, kwargs))
                out = func(*ones[0], **ones[1])
            return tree_map_only(Tensor, self.fake.from_tensor, out)

    def learn(self, func: Any, args: Any, kwargs: dict,
              ins: list[Tensor]) -> tuple[_Seen, Any]:
        """An op that comes for the first time, and what it returns."""
        self.guessed = False
        out, schema = self.run(func, args, kwargs), func._schema
        outs, ops, unknown, guessed = _tensors(out), [], "", self.guessed
        space, name = schema.name.split("::")
        name = name.rstrip("_")  # add_ is add in place
        rule = self.rule(func, space, name, args, kwargs, out) if (
            outs or schema.is_mutable) else rules.view
        if rule is None:
            unknown = f"{space}.{name}"
        else:
            named = (a.name for a in schema.arguments)
            ops = rules.ops_of(
                name, [*map(rules.array, ins)], [*map(rules.array, outs)],
                [*map(id, ins)], rule,
                dict(zip(named, args, strict=False)) | kwargs)
        if guessed:
            shapes = " ".join(str(rules.array(y)) for y in outs)
            unknown = (f"{space}.{name} (how much it returns hangs on values;"
                       f" counted as for ones, {shapes})")
        seen = _Seen(ops and functools.cache(lambda path, line: [
            replace(op, path=path, line=line) for op in ops]), unknown)
        flat = out if isinstance(out, list | tuple) else [out]
        if torch.Tag.inplace_view in func.tags or not all(
                map(_plain, (*ins, *flat))):
            return seen, out
        ids = [*map(id, ins)]
        return seen._replace(alone=flat is not out, results=[
            ids.index(id(y)) if id(y) in ids else (
                y.shape, y.stride(), y.dtype, y.fake_device, dict(vars(y)))
            for y in flat]), out

    def again(self, seen: _Seen, func: Any, args: Any, kwargs: dict,
              ins: list[Tensor]) -> Any:
        """What the op returned when it came before, made anew."""
        made, views = [], None
        if func.is_view:
            with fake_tensor.in_kernel_invocation_manager(self.fake):
                views = func(*args, **kwargs)
            views = [views] if isinstance(views, Tensor) else views
        for i, how in enumerate(seen.results):
            if isinstance(how, int):
                made.append(ins[how])
                continue
            shape, strides, dtype, device, attributes = how
            with torch._C._DisableTorchDispatch():
                y = views[i] if views else torch.empty_strided(
                    shape, strides, dtype=dtype, device="meta")
                y = Tensor._make_subclass(Fake, y, dispatch_device=True,
                                          device_for_backend_keys=device)
            vars(y).update(attributes)
            made.append(y)
        return made[0] if seen.alone else made

    def rule(self, func: Any, space: str, name: str, args: Any, kwargs: dict,
             out: Any) -> Callable | None:
        composite = func._can_decompose()  # such a view may be a copy
        if func.is_view and not composite or (
                torch.Tag.inplace_view in func.tags):
            return rules.view
        if any(x.layout is not _STRIDED
               for x in _tensors((args, kwargs, out))):
            return None
        if space in ("aten", "prims") and name in rules.TORCH:
            return rules.TORCH[name]
        parts = decomposition_table.get(func) or (
            composite and func.decompose)
        formula = _flop_counter().flop_registry.get(func._overloadpacket)
        if parts:
            with self:
                made = self.parts(parts, args, kwargs)[0]
            if not made:
                return rules.view
            work = Counter({kind: sum(getattr(op, kind) for op in made)
                            for kind in rules.KINDS})
        elif formula:
            work = Counter(matmul=formula(*args, **kwargs, out_val=out))
        else:
            return None
        return lambda ins, outs, p: work
