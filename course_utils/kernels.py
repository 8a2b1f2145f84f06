"""The course's Triton kernels: launch one anywhere, compile one for any chip.

``vector_add`` and ``matmul_bias_relu`` are the kernels; they need triton only
when they are first named.
"""

from __future__ import annotations

import ast
import hashlib
import html
import inspect
import linecache
import operator
import re
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from course_utils.compilers import triton as _compiler
from course_utils.compilers.rung import Rung
from course_utils.host import need

_OWN = ("vector_add", "matmul_bias_relu")
_WRONG = r"bf(loat)?16|fp8|float8"  # types the interpreter computes wrongly
_WHY = "a launch takes torch tensors"
_LARGEST = (2**31 - 1, 65535, 65535)  # CUDA's limits of a grid in x, y, z


def __getattr__(name: str) -> Any:
    """The course's kernels, imported when first named."""
    if name in _OWN:
        need("triton", f"kernels.{name} is written in it")
        from course_utils import _triton_kernels
        return getattr(_triton_kernels, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _html(shown: Any) -> str:
    """A page shows an object as a terminal does."""
    return f"<pre>{html.escape(str(shown))}</pre>"


@dataclass(frozen=True, eq=False)
class Launch:
    """One run of a kernel over its grid.

    ``result`` is the tensor the kernel stores to, or a tuple where there are
    several (read off its source; all tensors where it shows no store).
    ``where`` is "gpu" or "interpreter"; ``seconds`` wall time of the call, a
    first compile included: interpreter time says nothing about a GPU.
    ``trace`` is None in this version; ``note`` says what was done differently
    from what was asked, "" for nothing.
    """

    name: str
    result: Any
    where: str
    seconds: float
    grid: tuple[int, ...]
    trace: None = None
    note: str = ""

    def __str__(self) -> str:
        line = (f"{self.name}, grid {self.grid}: {self.where}, "
                f"{self.seconds:.3g} s")
        return f"{line}\n{self.note}" if self.note else line

    __repr__, _repr_html_ = __str__, _html


@dataclass(frozen=True, eq=False)
class Built:
    """A kernel compiled for one target; nothing was run.

    ``rungs`` maps name to Rung, from "ttir" down to "sass" or "amdgcn".
    ``.sass``, ``.ptx``, ... are their texts; ``.target``, ``.num_warps`` and
    ``.num_stages`` say how; ``.kernel`` is a ``rung.Kernel``, and what it
    holds is here too: ``.registers`` and ``.spills`` (bytes) per thread,
    ``.shared_bytes`` per block (``compilers.triton.Resources``).
    """

    rungs: dict[str, Rung]
    resources: _compiler.Resources

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle ask before there is any
            raise AttributeError(name)
        if name in self.rungs:
            return self.rungs[name].text
        for part in (self.resources, self.resources.kernel):
            if hasattr(part, name):
                return getattr(part, name)
        raise AttributeError(f"This kernel has no {name!r}; its rungs are "
                             f"{', '.join(self.rungs)}.")

    def __str__(self) -> str:
        return (f"{self.name} for {self.target}: {self.num_warps} warps, "
                f"{self.registers} registers a thread, {self.spills} bytes "
                f"spilled, {self.shared_bytes} bytes of shared memory; "
                f"rungs {', '.join(self.rungs)}")

    __repr__, _repr_html_ = __str__, _html


def build(kernel: Any, /, *args: Any, target: str = "h100",
          fresh: bool = False, **meta: Any) -> Built:
    """Compile ``kernel`` for a chip that need not be here.

    ``args`` stand for the arguments of a launch: tensors (device="meta" will
    do), anything with shape and dtype, torch dtypes, numbers; Triton
    specialises on them as a launch would (divisible by 16, equal to 1).
    ``meta``: constexprs by name, and options such as num_warps. ``fresh``
    compiles again what a folder of earlier results has.
    """
    rungs, resources = _compiler.build(kernel, args, meta, target, fresh)
    return Built({rung.name: rung for rung in rungs}, resources)


def launch(kernel: Any, grid: Any, /, *args: Any, trace: bool = False,
           **meta: Any) -> Launch:
    """Run ``kernel`` on this machine's GPU, or else in Triton's interpreter.

    ``grid``: an int, a tuple of up to three, or a function from the arguments
    (a dict) to one. ``args`` and ``meta``: as in ``kernel[grid](...)``, with
    torch tensors on ``device()``. The interpreter gets bf16 wrong, so there
    bf16 tensors are widened to fp32 and rounded back, which ``.note`` says;
    bf16 or fp8 in any other form is refused.
    """
    torch = need("torch", _WHY)
    values, _ = _compiler.bind(kernel, args, meta)
    if trace:
        raise ValueError("trace must be False: this version of course_utils "
                         "does not record memory accesses yet.")
    where = device()
    tensors = {key: v for key, v in values.items()
               if _is_tensor(key, v, where)}
    size = _grid(grid, values)
    note, start = "", time.perf_counter()
    if where == "cuda":
        kernel[size](*args, **meta)
        torch.cuda.synchronize()
    else:
        _refuse(kernel, values)
        with torch.no_grad(), _compiler.interpreted() as interpret:
            wide, narrow = _widen(tensors)
            interpret(kernel)[size](**{**values, **wide})
            narrow()
        if wide:
            note = (f"The interpreter gets bf16 wrong: {', '.join(wide)} "
                    "ran in fp32, rounded to bf16 at the end.")
    seconds = time.perf_counter() - start
    stored = _compiler.accesses(kernel)[1] & tensors.keys() or set(tensors)
    results = tuple(v for key, v in tensors.items() if key in stored)
    return Launch(kernel.__name__, results[0] if len(results) == 1
                  else results, "gpu" if where == "cuda" else "interpreter",
                  seconds, size, None, note)


def device() -> str:
    """Where ``launch`` runs, so where its tensors live: "cuda" or "cpu"."""
    ready = need("torch", _WHY).cuda.is_available() and _compiler.has_driver()
    return "cuda" if ready else "cpu"


def linear_args(x: Any, w: Any, b: Any, y: Any) -> tuple[Any, ...]:
    """The arguments of ``matmul_bias_relu``: tensors, sizes, strides.

    ``x`` (M, K), ``w`` (K, N), ``b`` (N,), ``y`` (M, N), of any strides;
    "meta" tensors serve for ``build``. Raises ValueError on other shapes.
    """
    shapes = [tuple(t.shape) for t in (x, w, b, y)]
    m, k, n = (*shapes[0], *shapes[2]) if sum(map(len, shapes)) == 7 else (
        None, None, None)
    if shapes != [(m, k), (k, n), (n,), (m, n)]:
        raise ValueError(f"x, w, b, y have shapes {shapes}: they must be "
                         "(M, K), (K, N), (N,), (M, N).")
    return (x, w, b, y, m, n, k, *x.stride(), *w.stride(), *b.stride(),
            *y.stride())


def from_source(text: str) -> Any:
    """The kernel that ``text`` defines last; triton and tl are at hand.

    Python finds the source of a function by file name, so the text is filed
    under one made from its content; nothing is written to disk.
    """
    name = f"kernel_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    file = f"<{name}>"
    names = {"__name__": name, **_compiler.language()}
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    try:
        exec(compile(text, file, "exec"), names)
    except SyntaxError as error:
        raise ValueError(f"text is not Python: line {error.lineno}, "
                         f"{error.msg}.") from None
    made = [v for v in names.values()
            if _compiler.is_kernel(v) and v.fn.__module__ == name]
    if not made:
        raise ValueError("text defines no kernel: put @triton.jit on the "
                         "line above its def.")
    return made[-1]


def _is_tensor(name: str, value: Any, where: str) -> bool:
    """Whether it is a tensor where the launch will run; else say why not."""
    if isinstance(value, need("torch", _WHY).Tensor):
        if value.device.type != where:
            raise ValueError(f"{name} is on {value.device}, and this launch "
                             f"runs on {where}: make it with "
                             "device=kernels.device().")
        return True
    if hasattr(value, "__array__") or isinstance(value, list):
        raise TypeError(f"{name} is a {type(value).__module__} "
                        f"{type(value).__name__}: give a torch tensor, for "
                        "instance torch.as_tensor of it.")
    return False


def _grid(grid: Any, values: dict[str, Any]) -> tuple[int, ...]:
    """The grid as a tuple of one to three sizes that a GPU accepts."""
    size = grid(values) if callable(grid) else grid
    try:
        size = tuple(map(operator.index, size if hasattr(
            size, "__iter__") else (size,)))
    except TypeError:
        size = ()
    if not 1 <= len(size) <= 3 or not all(
            1 <= n <= top for n, top in zip(size, _LARGEST, strict=False)):
        raise ValueError(f"grid is {grid if size == () else size}: give one "
                         f"to three whole numbers from 1 to {_LARGEST}.")
    return size


def _refuse(kernel: Any, values: dict[str, Any]) -> None:
    """Stop what the interpreter would compute wrongly without a word."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))
    words = {getattr(node, "attr", getattr(node, "id", ""))
             for node in ast.walk(tree)}
    for word in sorted(w for w in words if re.match(_WRONG, w)):
        raise ValueError(f"{kernel.__name__} names {word}, in which the "
                         "interpreter is wrong: take the type from a pointer "
                         "(y_ptr.dtype.element_ty), or launch on a GPU.")
    for key, value in values.items():
        kind = str(getattr(value, "dtype", value))
        if re.search(_WRONG, kind) and kind != "torch.bfloat16":
            raise ValueError(f"{key} is {kind}, in which the interpreter is "
                             "wrong: use torch.float32, or launch on a GPU.")


def _widen(tensors: dict[str, Any]) -> tuple[dict[str, Any],
                                             Callable[[], None]]:
    """bf16 tensors as fp32, and what rounds them back into place.

    Whole storages are widened, so strides and overlaps stay as they were.
    """
    torch = need("torch", _WHY)
    storages, wide = {}, {}
    for key, tensor in tensors.items():
        if tensor.dtype == torch.bfloat16:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in storages:
                whole = torch.empty(0, dtype=tensor.dtype).set_(
                    storage, 0, (storage.nbytes() // 2,), (1,))
                storages[storage.data_ptr()] = whole, whole.float()
            wide[key] = storages[storage.data_ptr()][1].as_strided(
                tensor.shape, tensor.stride(), tensor.storage_offset())

    def narrow() -> None:
        for whole, copy in storages.values():
            whole.copy_(copy)

    return wide, narrow
