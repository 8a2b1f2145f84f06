"""The course's Triton kernels: launch one anywhere, compile one for any chip.

``vector_add`` and ``matmul_bias_relu`` are the kernels. Where triton is
missing they can be named and what was recorded of them be shown. Floor 2.
"""

from __future__ import annotations

import hashlib
import inspect
import linecache
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from course_utils.compilers import interpreter, recorded
from course_utils.compilers import triton as _compiler
from course_utils.compilers.triton import Built
from course_utils.host import Missing, need
from course_utils.kernels.trace import (
    Recorder,
    Trace,
    find_trace,
    keep_trace,
    operands,
)

_OWN = ("vector_add", "matmul_bias_relu")
_WHY = "a launch takes torch tensors"


def __getattr__(name: str) -> Any:
    """The course's kernels, imported when first named."""
    if name in _OWN:
        if _compiler.works("h100"):  # then it says why not
            return _compiler.uncompiled("course_utils._triton_kernels", name)
        from course_utils import _triton_kernels
        return getattr(_triton_kernels, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True, eq=False)
class Launch:
    """One run of a kernel over its grid.

    ``result`` is the tensor the kernel stored to, or a tuple where there are
    several or none (all that were given, where it is not known). ``where`` is
    "gpu", "interpreter", or "recorded": then nothing ran, and result is None.
    ``seconds`` is wall time of the call, a first compile included:
    interpreter time says nothing about a GPU. ``trace`` is None unless asked
    for; ``note`` says what was done differently from what was asked, "" for
    nothing.
    """

    name: str
    result: Any
    where: str
    seconds: float
    grid: tuple[int, ...]
    trace: Trace | None = None
    note: str = ""

    def difference(self, wanted: Any) -> float | str:
        """The largest absolute difference of ``result`` from ``wanted``, a
        tensor or array of its shape, in float64; "not run here" where
        nothing ran. Raises ValueError where the two do not compare."""
        if self.result is None:
            return "not run here"
        if isinstance(self.result, tuple):
            raise ValueError(f"{self.name} stored to {len(self.result)} "
                             "tensors: difference takes one result.")
        wanted = need("torch", _WHY).as_tensor(wanted).double().cpu()
        if wanted.shape != self.result.shape:
            raise ValueError(f"wanted has shape {tuple(wanted.shape)}, the "
                             f"result {tuple(self.result.shape)}: give one "
                             "value for each.")
        return float((self.result.double().cpu() - wanted).abs().max())

    def __str__(self) -> str:
        line = (f"{self.name}, grid {self.grid}: {self.where}, "
                f"{self.seconds:.3g} s")
        return f"{line}\n{self.note}" if self.note else line

    __repr__ = __str__


def build(kernel: Any, /, *args: Any, target: str = "h100",
          fresh: bool = False, **meta: Any) -> Built:
    """Compile ``kernel`` for a chip that need not be here.

    ``args`` stand for the arguments of a launch: tensors (device="meta" will
    do), anything with shape and dtype, torch dtypes (a pointer aligned to 16
    bytes), numbers; Triton specialises on them as a launch would (divisible
    by 16, equal to 1). ``meta``: constexprs by name, and options such as
    num_warps. ``fresh`` compiles again what a folder of earlier results has.
    Raises ValueError, also where Triton or ptxas refuses; TypeError, Missing.
    """
    name = getattr(kernel, "__name__", "kernel")
    with _compiler.explained(f"{name} does not compile for {target}"):
        return _compiler.build(kernel, args, meta, target, fresh)


def launch(kernel: Any, grid: Any, /, *args: Any, trace: bool = False,
           **meta: Any) -> Launch:
    """Run ``kernel`` on this machine's GPU, or else in Triton's interpreter.

    ``grid``: an int, a tuple of up to three, or a function from the arguments
    (a dict) to one. ``args`` and ``meta``: as in ``kernel[grid](...)``, with
    torch tensors on ``device()``. The interpreter gets bf16 wrong, so there
    bf16 tensors are widened to fp32 and rounded back, which ``.note`` says;
    bf16 or fp8 in any other form is refused. It works on copies: a launch
    that fails changes nothing.

    ``trace`` notes every memory access, in the interpreter also where there
    is a GPU, and raises ValueError for one outside the tensor whose pointer
    it was made from. Without triton the trace recorded for these shapes
    stands in, if there is one.
    """
    try:
        values, examples, options = _compiler.bind(kernel, args, meta)
    except Missing:
        if trace and (found := _recorded(kernel, grid, args, meta)):
            return found
        raise
    where = device()
    tensors = _tensors(values, examples, where)
    size = _grid(grid, values)
    note, seen, start = "", None, time.perf_counter()
    on_gpu = where == "cuda" and not trace
    if on_gpu:
        with _compiler.explained(f"{kernel.__name__} does not run here"):
            made = kernel[size](*values.values(), **options)
            need("torch", _WHY).cuda.synchronize()
    else:
        stored, note, seen = _interpret(kernel, size, values, tensors, trace)
    seconds = time.perf_counter() - start
    if on_gpu:
        _, stored = _compiler.accesses(made.asm["ttir"], made.src.signature)
    if seen:
        if where == "cuda":
            note = f"Traced in the interpreter, not on the GPU. {note}".strip()
        keep_trace(_key(kernel, size, values), seen)
    results = tuple(tensors[key] for key in (
        tensors if stored is None else stored))
    return Launch(kernel.__name__, results[0] if len(results) == 1
                  else results, "gpu" if on_gpu else "interpreter",
                  seconds, size, seen, note)


def device() -> str:
    """Where ``launch`` runs, so where its tensors live: "cuda" or "cpu"."""
    return "cuda" if need("torch", _WHY).cuda.is_available() else "cpu"


def linear_args(x: Any, w: Any, b: Any, y: Any) -> tuple[Any, ...]:
    """The arguments of ``matmul_bias_relu``: tensors, sizes, strides.

    ``x`` (M, K), ``w`` (K, N), ``b`` (N,), ``y`` (M, N): torch tensors of any
    strides; device="meta" will do for ``build``. Raises ValueError on other
    shapes, TypeError on anything else.
    """
    operands = x, w, b, y
    if not all(hasattr(t, "data_ptr") for t in operands):
        kinds = ", ".join(type(t).__name__ for t in operands)
        raise TypeError(f"x, w, b, y are of types {kinds}: give torch "
                        'tensors, with device="meta" where there is no data.')
    shapes = [tuple(t.shape) for t in operands]
    m, k = x.shape if x.dim() == 2 else (0, 0)
    n = b.numel()
    if shapes != [(m, k), (k, n), (n,), (m, n)]:
        raise ValueError(f"x, w, b, y have shapes {shapes}: they must be "
                         "(M, K), (K, N), (N,), (M, N).")
    return *operands, m, n, k, *(step for t in operands for step in t.stride())


def from_source(text: str) -> Any:
    """The kernel that ``text`` defines last; triton and tl are at hand.

    Python finds the source of a function by file name, so the text is filed
    under one made from its content; nothing is written to disk. Raises
    ValueError for a text without a kernel, TypeError for one that is not
    @triton.jit's alone.
    """
    triton = need("triton", "kernels are written in it")
    name = f"kernel_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    file = f"<{name}>"
    names = {"__name__": name, "triton": triton, "tl": triton.language}
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    exec(compile(text, file, "exec"), names)
    found = {}  # by the line at which each begins
    for value in names.values():
        fn = _compiler.python(value)
        if fn is not value and fn.__code__.co_filename == file:
            found.setdefault(fn.__code__.co_firstlineno, value)
    if not found:
        raise ValueError("text defines no kernel: put @triton.jit on the "
                         "line above its def.")
    last = found[max(found)]
    return _compiler.checked(last, _compiler.python(last).__name__)


def _tensors(values: dict[str, Any], examples: dict[str, Any], where: str,
             ) -> dict[str, Any]:
    """The tensors among the arguments; ValueError, TypeError if unfit."""
    tensors = {}
    for key, value in values.items():
        if examples[key] is not value:  # compiles, but holds no data for us
            raise TypeError(f"{key} is of type {type(value).__name__}: give "
                            "a torch tensor, as torch.as_tensor makes.")
        if hasattr(value, "data_ptr"):
            if value.device.type != where:
                raise ValueError(f"{key} is on {value.device}, and this "
                                 f"launch runs on {where}: make it with "
                                 "device=kernels.device().")
            tensors[key] = value
    return tensors


def _grid(grid: Any, values: dict[str, Any]) -> tuple[int, ...]:
    """The grid as a tuple of one to three sizes."""
    size = grid(values) if callable(grid) else grid
    size = tuple(size) if isinstance(size, (tuple, list)) else (size,)
    if not 1 <= len(size) <= 3 or not all(
            isinstance(n, Integral) and n >= 1 for n in size):
        raise ValueError(f"grid is {size}: give one to three whole numbers, "
                         "each at least 1.")
    return tuple(map(int, size))


def _interpret(kernel: Any, size: tuple[int, ...], values: dict[str, Any],
               tensors: dict[str, Any], trace: bool,
               ) -> tuple[list[str] | None, str, Trace | None]:
    """Names of the tensors stored to (None if not known), a note on what ran
    in fp32, a trace."""
    torch = need("torch", _WHY)
    inner, storages = _copies(tensors)
    recorder = trace and Recorder(kernel.__name__, inner, tensors)
    names, stored = [None, *inner], set()

    def note(kind: str, program: Any, numbers: list[int], *rest: Any) -> None:
        used = {names[n] for n in numbers}
        if kind != "load":
            stored.update(used)
        if recorder:
            recorder.add(kind, program, used, *rest)

    with torch.no_grad():
        interpreter.interpret(kernel, size, {**values, **inner}.values(), note)
        for whole, copy in storages:
            whole.copy_(copy)
    wide = ", ".join(k for k in inner if inner[k].dtype != tensors[k].dtype)
    said = (f"The interpreter gets bf16 wrong: {wide} ran in fp32, rounded "
            "to bf16 at the end.") if wide else ""
    return (None if None in stored else [k for k in inner if k in stored],
            said, recorder.trace(size) if recorder else None)


def _copies(tensors: dict[str, Any],
            ) -> tuple[dict[str, Any], Collection[tuple[Any, Any]]]:
    """A copy of each tensor on the CPU, bf16 as fp32; storages and copies.

    Whole storages are copied, so strides and overlaps stay as they were.
    """
    torch = need("torch", _WHY)
    copies, storages = {}, {}
    for key, operand in operands(tensors).items():
        tensor, number = tensors[key], operand.storage
        if number not in storages:
            whole = tensor.new_empty(0).set_(tensor.untyped_storage())
            dtype = (torch.float32 if tensor.dtype == torch.bfloat16
                     else tensor.dtype)
            storages[number] = whole, whole.to("cpu", dtype, copy=True)
        whole, copy = storages[number]
        if whole.dtype != tensor.dtype:
            raise ValueError(f"{key} shares memory with a tensor of another "
                             "dtype: give it a copy, or launch on a GPU.")
        copies[key] = copy.as_strided(tensor.shape, tensor.stride(),
                                      tensor.storage_offset())
    return copies, storages.values()


def _key(kernel: Any, size: tuple[int, ...], values: Mapping[str, Any],
         ) -> str:
    """Names the recording of a trace: it depends on shapes, not on data."""
    tensors = {k: v for k, v in values.items() if hasattr(v, "data_ptr")}
    return recorded.key(
        inspect.getsource(kernel.fn), "trace", size,
        sorted({**values, **operands(tensors)}.items()))


def _recorded(kernel: Any, grid: Any, args: tuple[Any, ...],
              meta: Mapping[str, Any]) -> Launch | None:
    """The recorded trace of such a launch, where there is no triton."""
    if not isinstance(kernel, _compiler.Uncompiled):
        return None
    values = _compiler.named(kernel.fn, args, {
        k: v for k, v in meta.items()
        if k in inspect.signature(kernel.fn).parameters})
    size = _grid(grid, values)
    found = find_trace(_key(kernel, size, values))
    return found and Launch(
        kernel.__name__, None, "recorded", 0.0, size, found[0],
        f"Nothing ran here, for triton is missing: {found[1]}.")
