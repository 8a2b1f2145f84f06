"""The ladder: every representation of one function for a chosen target.

``ladder`` climbs from Python to machine code with the real compiler of each
rung; ``compare_backends`` asks every back end for its kernels; ``passes``
lists what XLA changed on the way. Floor 2.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import linecache
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course_utils import host
from course_utils._front import front_end, leaves, name_of, outside
from course_utils.compilers import (
    progress,
    recorded,
    torch,
    triton,
    worker,
    xla,
)
from course_utils.compilers import text as _text
from course_utils.compilers.rung import (
    Buffer,
    Compiled,
    Kernel,
    Pass,
    Rung,
    file_of,
    source,
)
from course_utils.host import Missing

if TYPE_CHECKING:
    import pandas as pd

_TARGETS = {"JAX": xla.TARGETS, "torch": torch.TARGETS,
            "Triton": tuple(triton.TARGETS)}
_COMPILERS = {"JAX": "XLA", "torch": "Inductor", "Triton": "Triton"}
_BACKENDS = {"JAX": ("cpu", "h100", "tpu-v5e"),
             "torch": ("eager", "cpu", "h100"), "Triton": ("h100", "mi300x")}
_ELSEWHERE = {("JAX", "mi300x"): "needs XLA's ROCm build",
              ("torch", "mi300x"): "needs torch's ROCm build",
              ("Triton", "cpu"): "runs there in the interpreter only"}
_WORKS = {"JAX": xla.lacking, "torch": torch.lacking,
          "Triton": triton.works}
_HINTS = (  # to what JAX says first
    ("abstract array|Shapes must be|static arg", " Give it arrays, and bind "
     "anything else (a size, a name) with functools.partial."),
    ("for the specified backend", " What calls back into Python, as a debug "
     "print does, compiles for the cpu only."),
    ("pallas_call on platform", " Without that chip a Pallas kernel climbs "
     "for the TPUs alone."),
    ("TracerArrayConversion", " NumPy computes with values, which tracing "
     "does not know: use jax.numpy."),
    (r"^\w*(Tracer|Concretization)", " Its Python control flow depends on an "
     "array's value, which tracing does not know: use jax.lax.cond or "
     "jnp.where, or bind a plain number with functools.partial."))
_MACHINE_CODE = ("assembly", "sass", "amdgcn", "bundles")
_ENDINGS = {"python": "py", "mlir": "mlir", "hlo": "hlo", "llvm": "ll",
            "asm": "s", "ptx": "ptx", "sass": "sass", "cpp": "cpp"}


@dataclass(frozen=True)
class Ladder:
    """Every rung of one function for one target, top to bottom.

    Iterating gives the rungs; ``ladder["stablehlo"]`` one of them.
    ``kernels`` are in the order of the schedule. ``memory`` maps "argument",
    "output", "alias" and "temp" to bytes, and ``buffers`` says what lives
    where and when, where the compiler tells (XLA does). ``recorded`` says
    where a recording comes from, and is "" for what this machine compiled.
    ``file`` is the one the function is written in.
    """

    function: str
    front_end: str
    target: str
    rungs: tuple[Rung, ...] = field(repr=False)
    kernels: tuple[Kernel, ...] = ()
    memory: dict[str, int] = field(default_factory=dict)
    buffers: tuple[Buffer, ...] = field(default=(), repr=False)
    recorded: str = ""
    file: str = field(default="", repr=False)

    def __iter__(self) -> Iterator[Rung]:
        return iter(self.rungs)

    def __len__(self) -> int:
        return len(self.rungs)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(rung.name for rung in self.rungs)

    def __getitem__(self, name: str) -> Rung:
        for rung in self.rungs:
            if rung.name == name:
                return rung
        raise KeyError(
            f"{self.function} on {self.target} has no rung {name!r}; it has "
            f"{', '.join(self.names)}.{_nearest(name, self.names)}")

    @property
    def machine_code(self) -> str:
        """Text of the last rung a chip could run; "" if libraries do all."""
        return next((rung.text for rung in reversed(self.rungs)
                     if rung.name in _MACHINE_CODE and rung.tool), "")

    def diff(self, a: str, b: str) -> Rung:
        """Lines that differ between rungs ``a`` and ``b``, ids hidden."""
        before, after = (_text.without_ids(self[name].text,
                                           self[name].language).splitlines()
                         for name in (a, b))
        lines = difflib.unified_diff(before, after, a, b, lineterm="", n=1)
        return Rung(f"{a} -> {b}", "\n".join(lines), "diff", "difflib", 0.0)

    def origin(self, name: str, wanted: str = "") -> pd.DataFrame:
        """Lines of the rung ``name``, and the Python line that caused each.

        Those that match the regular expression ``wanted``, by their number in
        the rung's text. What a library's helper did counts for the line that
        called it. ``python`` is 0 where the compiler does not say: a jaxpr
        where a helper of another file did it, XLA's code but where a kernel
        begins, by the operation the kernel is known by. Raises ValueError for
        a rung that keeps no such links.
        """
        pd = host.need("pandas", "the links come as its table")
        rung, found = self[name], _text.pattern(wanted)
        if not any(rung.origins):
            linked = [r.name for r in self if any(r.origins)]
            raise ValueError(
                f"the compiler keeps no Python lines in the rung {name!r}; "
                f"it does in {', '.join(linked) or 'none of this ladder'}.")
        lines = _text.follow(rung.raw, rung.origins, rung.text)
        return pd.DataFrame(
            [(at, row.strip(), line,
              linecache.getline(self.file, line).strip())
             for at, (row, line) in enumerate(zip(
                 rung.text.splitlines(), lines, strict=True), 1)
             if found.search(row)],
            columns=["line", "text", "python", "code"]).set_index("line")

    def save(self, folder: str | Path) -> Path:
        """Write every rung's ``raw`` text into ``folder``, and return it.

        Raises ValueError where a file has that name.
        """
        folder = Path(folder)
        if folder.is_file():
            raise ValueError(f"folder={str(folder)!r} is a file: give the "
                             "name of a folder, which need not be there.")
        folder.mkdir(parents=True, exist_ok=True)
        for number, rung in enumerate(self.rungs):
            ending = _ENDINGS.get(rung.language, "txt")
            name = f"{number:02d}-{rung.name}.{ending}"
            (folder / name).write_text(rung.raw, encoding="utf-8")
        return folder

    def table(self) -> pd.DataFrame:
        """One row a rung: its tool, lines and characters."""
        pd = host.need("pandas", "a ladder's table is one")
        return pd.DataFrame(
            [(r.name, r.tool, len(r.text.splitlines()), len(r.text))
             for r in self.rungs],
            columns=["rung", "tool", "lines", "characters"]
        ).set_index("rung")

    def _head(self) -> str:
        head = f"{self.function} on {self.target}, {self.front_end}"
        return f"{head}\n{self.recorded}" if self.recorded else head

    def __str__(self) -> str:
        return "\n".join([self._head(), *(
            f"{r.name:14} {len(r.text.splitlines()):7,} lines  {r.tool}"
            if r.tool else f"{r.name:14} {r.text.strip()}"
            for r in self.rungs)])

    def _repr_html_(self) -> str:
        parts = [_text.folded(
            f"{r.name}: {len(r.text.splitlines()):,} lines, by {r.tool}"
            if r.tool else f"{r.name}: missing here",
            _text.html(r.text[:8000], r.language)) for r in self.rungs]
        return _text.html(self._head(), "text") + "".join(parts)


def ladder(fn: Callable, *args: Any, target: str = "cpu",
           wrt: str | int | Sequence[int] | None = None,
           donate: int | Sequence[int] = (), fresh: bool = False,
           **meta: Any) -> Ladder:
    """Every representation of ``fn`` on the way to ``target``.

    ``fn`` is a JAX function (``args`` arrays or ``jax.ShapeDtypeStruct``), a
    torch function or module (real or meta tensors), or a Triton kernel
    (``meta`` holds its constexprs, ``num_warps`` and ``num_stages``).

    ``wrt`` takes the gradient along: "all" or numbers of arguments, in JAX
    with a cotangent of ones. In torch also "params"; AOTAutograd's forward
    and backward graphs are compiled each: "forward/" or "backward/" begins
    the names of their kernels, and ``memory`` has the bytes kept between them
    ("saved", "saved inputs"). ``donate`` (JAX) numbers arguments whose
    buffers the result may take over. ``fresh`` compiles again what the cache
    has.

    Where this machine lacks the compiler, a recording of the same function
    and arguments is shown if there is one (``.recorded`` says from where),
    else ``Missing`` is raised; a ``ValueError`` says what does not fit.
    """
    front = _front_end(fn, args)
    _known(front, target)
    if front != "Triton" and meta:
        raise TypeError(f"ladder() got {', '.join(meta)}: keyword arguments "
                        "beyond its own are for Triton kernels; bind those "
                        f"of {name_of(fn)} with functools.partial.")
    if (donate != () and front != "JAX"
            or wrt is not None and front == "Triton"):
        raise ValueError(f"wrt and donate do not fit a {front} function: "
                         "donate is for JAX, wrt for JAX and torch.")
    donate = _numbers("donate", donate, args)
    if wrt not in (None, "all", "params" if front == "torch" else "all"):
        wrt = _numbers("wrt", wrt, args, ', or "all"')
    made, whence = _compiled(front, fn, args, target, fresh, wrt, donate, meta)
    return Ladder(name_of(fn), front, target, made.rungs, made.kernels,
                  made.memory, made.buffers, whence, file_of(_python(fn)))


def passes(fn: Callable, *args: Any, target: str = "cpu",
           changed: bool = True, fresh: bool = False) -> list[Pass]:
    """XLA's passes over the JAX function ``fn``, in order.

    Each holds the HLO after it. Only those that changed the module, unless
    ``changed`` is False.
    """
    front = _front_end(fn, args)
    if front != "JAX":
        raise ValueError(f"fn is a {front} function; passes() shows those of "
                         "XLA, which compiles JAX functions.")
    _known(front, target)
    made, _ = _compiled(front, fn, args, target, fresh, None, (), {})
    return [p for p in made.passes if p.changed or not changed]


def breaks(fn: Callable, *args: Any) -> pd.DataFrame:
    """Where Dynamo stops in the torch function ``fn``: one row a break.

    One row for each time it meets what it cannot follow: the line, its code,
    the function that is in, and Dynamo's reason, which says so where it gives
    up the function or the rest of it. (``torch._dynamo.explain`` counts
    graphs instead: a break in a helper cuts its caller too, and one before
    the first operation cuts nothing.) ``fn`` runs once on ``args``, which have
    values: a branch goes the way they say. What torch.compile made before in
    this process is forgotten.
    """
    pd = host.need("pandas", "breaks returns its table")
    if (front := _front_end(fn, args, "torch")) != "torch":
        raise ValueError(f"fn is a {front} function; breaks() asks Dynamo, "
                         "which traces torch functions.")
    with _explained(fn, args):
        found = torch.breaks(fn, args)
    return pd.DataFrame(found, columns=["line", "code", "function", "reason"]
                        ).set_index("line")


def compare_backends(fn: Callable, *args: Any, label: str = "",
                     backends: Sequence[str] | None = None,
                     **meta: Any) -> pd.DataFrame:
    """The kernels every back end makes of ``fn``: who wrote each, its bytes.

    A JAX function goes to XLA for cpu, h100 and tpu-v5e; a torch function to
    eager, Inductor for cpu and for h100; a Triton kernel to h100 and mi300x.
    ``backends`` chooses others ("eager", or any target); ``label`` is put
    before each name. One row a kernel; ``bytes_read`` and ``bytes_written``
    count every operand once and every result once. A back end that this
    machine lacks gets one row, whose author is "missing", that says why.
    """
    pd = host.need("pandas", "compare_backends returns its table")
    front = _front_end(fn, args)
    chosen = (backends,) if isinstance(backends, str) else tuple(
        backends or [b for b in _BACKENDS[front] if b != "eager" or not meta])
    if "eager" in chosen and meta:
        raise ValueError(f"eager takes no {', '.join(meta)}: it shows the "
                         "forward pass alone; leave that or eager out.")
    for backend in chosen:
        if (front, backend) != ("torch", "eager"):
            _known(front, backend)
    rows = []
    for backend in chosen:
        compiler = "" if backend == "eager" else _COMPILERS[front]
        name = ", ".join(filter(None, (label, compiler, backend)))
        try:
            if backend == "eager":
                with _explained(fn, args):
                    found = torch.eager(fn, args)
            else:
                found = ladder(fn, *args, target=backend, **meta).kernels
        except Missing as missing:
            rows.append((name, "", "missing", str(missing), "", None, None))
            continue
        rows += [(name, k.name, k.author, k.who,
                  ", ".join(dict.fromkeys(k.ops)), k.bytes_read,
                  k.bytes_written) for k in found]
    return pd.DataFrame(rows, columns=[
        "back end", "kernel", "author", "who", "ops", "bytes_read",
        "bytes_written"]).set_index(["back end", "kernel"])


def targets() -> pd.DataFrame:
    """Front end x target: "works", "recorded", or why not, on this machine."""
    pd = host.need("pandas", "targets returns a table")
    every = list(dict.fromkeys(sum(_TARGETS.values(), ())))
    return pd.DataFrame(
        {front: [_state(front, target) for target in every]
         for front in _TARGETS}, index=every).rename_axis("target")


def _state(front: str, target: str) -> str:
    if target not in _TARGETS[front]:
        return _ELSEWHERE.get((front, target), "no compiler for it")
    why = str(_WORKS[front](target) or "")
    if why and target in recorded.targets():
        return f"recorded examples; {why}"
    return why or "works"


def _compiled(front: str, fn: Callable, args: tuple, target: str, fresh: bool,
              wrt: Any, donate: tuple[int, ...], meta: dict[str, Any],
              ) -> tuple[Compiled, str]:
    """What the front end's compiler makes, or what was recorded of it."""
    name = _recording(fn, args, target, wrt, donate, meta)
    try:
        with _explained(fn, args, target):
            if front == "JAX":
                whole = fn if wrt is None else xla.gradient(
                    fn, None if wrt == "all" else wrt)
                made = xla.compile(whole, args, target, donate, fresh)
            elif front == "Triton":
                built = triton.build(fn, args, meta, target, fresh)
                made = Compiled(tuple(built.rungs.values()), kernels=(built,))
            else:
                made = torch.compile(fn, args, target, wrt, fresh)
    except Missing:
        if name and (found := recorded.find(
                name, source(_python(fn))[0].origins[0])):
            return found
        raise
    if name:
        recorded.keep(name, target, made)
    return made, ""


def _recording(fn: Any, args: tuple, target: str, wrt: Any,
               donate: tuple[int, ...], meta: dict[str, Any]) -> str:
    """The name of a recording of this, "" where none can be trusted.

    It goes by the source of ``fn`` and the shapes of ``args``: nothing may be
    bound to the one, nor lie folded in the other. A line may have two lambdas.
    """
    inner = _python(fn)
    if (not inspect.isfunction(inner) or hasattr(inner, "__wrapped__")
            or inner.__name__ == "<lambda>"):
        return ""
    if not (python := source(inner)):
        return ""
    raw = python[0].raw
    defaults = [p.default for p in inspect.signature(inner).parameters.values()
                if p.default is not p.empty]
    told = (
        all(re.search(rf"= ?{re.escape(repr(value))}(?!\w)", raw)
            for value in defaults)
        and all(hasattr(value, "__name__") for value in leaves(
            outside(inner)))
        and all(_is_array(a) or isinstance(a, (int, float, str)) for a in args)
        and all(a.is_contiguous() for a in args if hasattr(a, "is_contiguous"))
    )
    return recorded.key(raw, target, [_describe(a) for a in args], wrt, donate,
                        sorted(meta.items())) if told else ""


def _numbers(what: str, given: Any, args: tuple, more: str = "",
             ) -> tuple[int, ...]:
    """``given`` as a tuple of the numbers of arguments, checked."""
    numbers = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    if not all(isinstance(n, int) and 0 <= n < len(args) for n in numbers):
        raise ValueError(f"{what}={given!r} does not fit: give numbers of "
                         f"arguments, from 0 to {len(args) - 1}{more}.")
    return numbers


@contextlib.contextmanager
def _explained(fn: Callable, args: tuple, target: str = "",
               ) -> Iterator[None]:
    """What a tracer or compiler throws becomes one sentence.

    Who has to wait reads what for.
    """
    whither = f" for {target}" if target else ""
    try:
        with progress.line(f"compiling {name_of(fn)}{whither} ..."):
            yield
    except (Missing, worker.CompilerError):
        raise
    except Exception as error:
        raise ValueError(_explain(fn, args, error)) from None


def _explain(fn: Callable, args: tuple, error: Exception) -> str:
    given = [_describe(a) for a in args]
    try:
        inner = getattr(fn, "forward", _python(fn))
        bound = inspect.signature(inner).bind_partial(*args).arguments
        given = [f"{name}: {_describe(a)}" for name, a in bound.items()]
    except (TypeError, ValueError):
        pass
    told = triton.reason(error) or str(error)
    first = next(iter(told.strip().splitlines()), "").rstrip(".: ")
    what = ": ".join(filter(None, (type(error).__name__, first)))
    hint = next((h for words, h in _HINTS if re.search(words, what)), "")
    return (f"{name_of(fn)}({', '.join(given)}) does not compile: "
            f"{_text.steady(what)}.{hint}")


def _is_kernel(fn: Any) -> bool:
    return isinstance(fn, triton.Uncompiled) or type(
        fn).__module__.startswith("triton.")


def _python(fn: Any) -> Any:
    """The Python function of a Triton kernel; else ``fn`` itself."""
    return fn.fn if _is_kernel(fn) else fn


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _describe(value: Any) -> str:
    if not _is_array(value):
        return (repr(value) if isinstance(value, (int, float, str))
                else type(value).__name__)
    over = getattr(getattr(value, "sharding", None), "spec", None)
    split = f" over {tuple(over)}" if over is not None else ""
    return f"{value.dtype}[{','.join(map(str, value.shape))}]{split}"


def _front_end(fn: Callable, args: tuple, otherwise: str = "JAX") -> str:
    """"JAX", "torch" or "Triton", told without importing any of them.

    ``otherwise`` where neither arguments nor the names in the code tell.
    """
    if _is_kernel(fn):
        return "Triton"
    if not callable(fn):
        raise TypeError(f"fn is a {type(fn).__name__}, not a function: pass "
                        "the function itself, not its result.")
    if inspect.iscoroutinefunction(getattr(fn, "forward", fn)):
        raise TypeError(f"{name_of(fn)} is an async function, of which a call "
                        "computes nothing: write it with def alone.")
    return front_end(fn, args, otherwise)


def _known(front: str, target: str) -> None:
    if target in _TARGETS[front]:
        return
    elsewhere = [f for f, known in _TARGETS.items() if target in known]
    more = f" ({' and '.join(elsewhere)} can)" if elsewhere else ""
    raise ValueError(
        f"target={target!r} is not one that a {front} function compiles for"
        f"{more}; it takes {', '.join(_TARGETS[front])}."
        f"{_nearest(target, _TARGETS[front])}")


def _nearest(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(str(name), known, n=2, cutoff=0.4)
    return f" Did you mean {' or '.join(near)}?" if near else ""

