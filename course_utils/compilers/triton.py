"""Triton: kernels compiled for chips that are not here, and PTX to SASS.

Every private name of Triton that the course uses is in this file (3.6 to
3.7.1). Nothing here needs a GPU, and no knob stays changed.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
import inspect
import io
import math
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from course_utils.compilers import origins
from course_utils.compilers.cache import cached
from course_utils.compilers.rung import (
    Kernel,
    Rung,
    file_of,
    home_of,
    source,
)
from course_utils.compilers.worker import CompilerError
from course_utils.host import Missing, need

TARGETS = {  # (Triton's backend, its architecture, threads per warp)
    "t4": ("cuda", 75, 32), "a100": ("cuda", 80, 32), "l4": ("cuda", 89, 32),
    "rtx4090": ("cuda", 89, 32), "h100": ("cuda", 90, 32),
    "h200": ("cuda", 90, 32), "b200": ("cuda", 100, 32),
    "mi300x": ("hip", "gfx942", 64),
}
_RUNGS = {  # Triton's stage: (name, language, how it tells its origins)
    "ttir": ("ttir", "mlir", origins.mlir),
    "ttgir": ("ttgir", "mlir", origins.mlir),
    "llir": ("llvm-ir", "llvm", origins.llvm),
    "ptx": ("ptx", "ptx", origins.listing),
    "amdgcn": ("amdgcn", "amdgcn", origins.listing),
}
_ARITHMETIC = re.compile(r"= \"?(tt\.dot|tt\.reduce|math\.\w+|arith\."
                         r"(?:add|sub|mul|div|max\w*|min\w*|neg)f)\b")
_OPERATION = re.compile(  # %result:count = op, and the rest of the line
    r"(?:(%[\w.$-]+)(?::(\d+))? = )?\"?([\w.]+|\^|)(.*)")
_SAME = re.compile(r"tt\.(addptr|splat|broadcast|expand_dims|reshape|trans|"
                   r"bitcast|advance|make_tensor_\w+)")  # as its first operand


def _triton() -> Any:
    """Triton and the private parts used below, in one namespace."""
    triton = need("triton", "it compiles and runs the course's GPU kernels")
    # code_generator keeps for good the parts of triton.language it finds when
    # first imported: never let that be while interpreted() has patched them.
    try:
        from triton.backends.nvidia.compiler import get_ptxas
        from triton.compiler import code_generator, compiler
        from triton.runtime import interpreter, jit
        return SimpleNamespace(
            package=triton, jit=jit, compiler=compiler, get_ptxas=get_ptxas,
            interpreter=interpreter, patch=interpreter._patch_lang,
            generator=code_generator, memory=interpreter._interpreter,
            types=jit.type_canonicalisation_dict,
            binder=jit.create_function_from_signature,
            environment=jit.get_cache_invalidating_env_vars)
    except (ImportError, AttributeError) as error:
        raise Missing("A triton that this course knows", f"the inside of "
                      f"triton {triton.__version__} has changed ({error})",
                      "pip install 'triton>=3.6,<=3.7.1'") from None


@dataclass(frozen=True)
class Assembled:
    """PTX turned into machine code by NVIDIA's ptxas.

    ``registers`` per thread (the most of any kernel inside), ``spills`` bytes
    of spill stores and loads per thread, ``shared_bytes`` static shared
    memory per block; all three as ptxas -v reports them.
    """

    cubin: bytes
    sass: str
    registers: int
    spills: int
    shared_bytes: int
    tool: str
    origins: origins.Origins = ()


def assemble(ptx: str, arch: str) -> Assembled:
    """Machine code of ``ptx`` (from any compiler) for ``arch`` ("sm_90a").

    Takes the ptxas Triton would take, or its newer one where the first is
    older than the PTX. Raises CompilerError with ptxas' own words.
    """
    triton = _triton()
    if not (number := re.fullmatch(r"sm_(\d+)[af]?", arch)):
        raise ValueError(f'arch is {arch!r}: write it as in "sm_90a".')
    first = triton.get_ptxas(int(number[1]))
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "x.ptx"), Path(folder, "x.cubin")
        source.write_text(ptx, encoding="utf-8")
        for ptxas in (first, triton.package.knobs.nvidia.ptxas_blackwell):
            done = subprocess.run(
                [ptxas.path, "-v", f"--gpu-name={arch}", str(source), "-o",
                 str(binary)], capture_output=True, text=True)
            if "Unsupported .version" not in done.stderr:
                break
        if done.returncode:
            reason = done.stderr.replace(str(source), "").strip(", \n")
            raise CompilerError(f"ptxas {ptxas.version} refuses this PTX for "
                                f"{arch}: {reason[-500:]}")
        cubin = binary.read_bytes()
    return _read_back(cubin, done.stderr, f"ptxas {ptxas.version}")


def _read_back(cubin: bytes, log: str, tool: str, here: str = "",
               ptx: str = "") -> Assembled:
    """SASS by the nvdisasm that Triton ships, and what ptxas -v logged.

    ``here`` is the file that the SASS is linked back to, and ``ptx`` tells
    where it called helpers that are not in it.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(cubin)
        binary.flush()
        done = subprocess.run(
            [_triton().package.knobs.nvidia.nvdisasm.path, "-c", "-gi",
             "-ndf", binary.name],  # no data flow: the same text, sooner
            capture_output=True, text=True)
    if done.returncode:
        raise CompilerError(f"nvdisasm failed: {done.stderr[-500:]}")
    registers, spills, shared = (
        [0, *map(int, re.findall(rf"(\d+) {what}", log))] for what in
        ("registers", "bytes spill", "bytes smem"))
    sass, lines = origins.sass(done.stdout, here, origins.helpers(ptx, here))
    return Assembled(cubin, sass, max(registers), sum(spills), max(shared),
                     tool, lines)


def works(target: str) -> str:
    """"" where this machine compiles kernels for ``target``, or why not."""
    try:
        _backend(target)
    except Missing as missing:
        return str(missing)
    return ""


@dataclass(frozen=True)
class Uncompiled:
    """A kernel on a machine without triton: its Python, to know it by."""

    fn: Callable

    @property
    def __name__(self) -> str:
        return self.fn.__name__


def uncompiled(module: str, name: str) -> Uncompiled:
    """The kernel ``name`` of ``module``, read with no triton to compile it."""
    stub, language = ModuleType("triton"), ModuleType("triton.language")
    stub.jit, stub.language, language.constexpr = lambda fn: fn, language, int
    spec = importlib.util.find_spec(module)
    loaded = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {"triton": stub,
                                       "triton.language": language}):
        spec.loader.exec_module(loaded)
    return Uncompiled(getattr(loaded, name))


def is_kernel(value: Any) -> bool:
    """Whether ``value`` is what @triton.jit makes."""
    return isinstance(value, _triton().jit.JITFunction)


def bind(kernel: Any, args: Sequence[Any], meta: Mapping[str, Any],
         target: str = "h100") -> tuple[dict[str, Any], ...]:
    """Arguments by name, defaults included; the same with stand-ins for
    tensors that are not there; and options.

    Raises TypeError or ValueError where they do not fit the kernel.
    """
    if not is_kernel(kernel):
        raise TypeError(f"kernel is a {type(kernel).__name__}, not a "
                        "@triton.jit function made without TRITON_INTERPRET.")
    backend = _backend(target)
    parameters = inspect.signature(kernel.fn).parameters
    known = [*parameters, *vars(backend.parse_options({}))]
    for key in meta.keys() - set(known):
        raise ValueError(f"{kernel.__name__} knows no argument {key!r}; "
                         f"nearest: {_nearest(key, known)}.")
    own = {k: v for k, v in meta.items() if k in parameters}
    try:
        bound = inspect.signature(kernel.fn).bind(*args, **own)
    except TypeError as error:
        raise TypeError(f"{kernel.__name__}: {error}; its parameters are "
                        f"{', '.join(parameters)}.") from None
    bound.apply_defaults()
    values = {k: v.item() if isinstance(v, Real) and hasattr(v, "item") else v
              for k, v in bound.arguments.items()}  # NumPy's numbers as ours
    examples = {k: v if "constexpr" in str(parameters[k].annotation)
                else _example(k, v) for k, v in values.items()}
    return values, examples, {k: meta[k] for k in meta if k not in own}


def _example(name: str, value: Any) -> Any:
    triton = _triton()
    if value is None or isinstance(value, Real):
        return value
    dtype = getattr(value, "dtype", value)
    if str(dtype).rpartition(".")[2] not in triton.types:
        kind = type(value).__name__ if dtype is value else dtype
        raise TypeError(f"{name} is of type {kind}, which Triton does not "
                        "take: give a tensor, a torch dtype or a number.")
    return value if hasattr(value, "data_ptr") else triton.jit.MockTensor(
        dtype, getattr(value, "shape", None))  # at a multiple of 16 bytes


def _backend(target: str) -> Any:
    if target not in TARGETS:
        raise ValueError(f"Triton knows no target {target!r}; nearest: "
                         f"{_nearest(target, TARGETS)}.")
    compiler = _triton().compiler
    return compiler.make_backend(compiler.GPUTarget(*TARGETS[target]))


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, names, n=5, cutoff=0.5)
    return ", ".join(near or names)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Built(Kernel):
    """A kernel compiled for one target; nothing was run.

    ``rungs`` maps name to Rung, from "python" down to "sass" (disassembled
    from the binary) or "amdgcn" (the compiler's own text); ``.sass``, ...
    are their texts. On AMD ``registers`` are vector registers and ``spills``
    4 bytes a register; ``ops`` is the arithmetic of the TTIR.
    """

    target: str
    rungs: dict[str, Rung]

    def __getattr__(self, name: str) -> str:
        rungs = vars(self).get("rungs", {})  # none yet while unpickled
        if name in rungs:
            return rungs[name].text
        raise AttributeError(f"This kernel has no {name!r}; its rungs are "
                             f"{', '.join(rungs)}.")


def build(kernel: Any, args: Sequence[Any], meta: Mapping[str, Any],
          target: str = "h100", fresh: bool = False) -> Built:
    """See ``kernels.build``. All rungs come from one compile."""
    triton = _triton()
    values, examples, options = bind(kernel, args, meta, target)
    backend = _backend(target)
    binder = triton.binder(kernel.signature, kernel.params, backend)
    bound, special, _ = binder(**examples)
    settings, signature, constants, hints = kernel._pack_args(
        backend, dict(options), bound, special, options)
    work = triton.compiler.ASTSource(kernel, signature, constants, hints)
    key = ("triton", target, kernel.cache_key, repr(special), repr(settings),
           repr(triton.environment()), home_of(kernel.fn))
    made = cached(key, lambda: _compile(work, target, vars(settings)), fresh)
    rungs = {rung.name: replace(rung, raw=textwrap.dedent(rung.raw))
             for rung in source(kernel.fn)}
    loaded, stored = accesses(made.rungs["ttir"].raw, signature)
    return replace(made, rungs={**rungs, **made.rungs},
                   bytes_read=_bytes(loaded, values),
                   bytes_written=_bytes(stored, values))


def ladder(kernel: Any, args: Sequence[Any], target: str,
           meta: Mapping[str, Any], fresh: bool = False,
           ) -> tuple[tuple[Rung, ...], Kernel]:
    """The rungs of ``build``, and the kernel it made."""
    built = build(kernel, args, meta, target, fresh)
    return tuple(built.rungs.values()), built


def _bytes(names: Iterable[str] | None, values: Mapping[str, Any],
           ) -> int | None:
    """Bytes of these arguments; None where one came without a shape."""
    if names is None or not all(hasattr(values[n], "shape") for n in names):
        return None
    return sum(math.prod(values[n].shape) * values[n].dtype.itemsize
               for n in names)


def _compile(work: Any, target: str, options: Mapping[str, Any]) -> Built:
    triton = _triton()
    knobs = triton.package.knobs
    times, printed = [], io.StringIO()
    with contextlib.ExitStack() as stack:
        for group in (knobs.cache, knobs.compilation, knobs.nvidia):
            stack.enter_context(group.scope())
        # An empty cache: a warm one would hide what the compiler does.
        knobs.cache.dir = stack.enter_context(tempfile.TemporaryDirectory())
        knobs.compilation.store_binary_only = False
        knobs.compilation.listener = lambda **seen: times.append(seen["times"])
        knobs.nvidia.dump_ptxas_log = True  # the one way to its -v report
        stack.enter_context(contextlib.redirect_stdout(printed))
        made = triton.compiler.compile(
            work, triton.compiler.GPUTarget(*TARGETS[target]), options)
    code = made.asm
    seconds = {key: us / 1e6 for key, us in times[0].lowering_stages}
    seconds["ttir"] += times[0].ir_initialization / 1e6
    version = f"triton {triton.package.__version__}"
    here = file_of(work.fn.fn)
    rungs = {name: Rung(name, code[stage], language, version, seconds[stage],
                        places(code[stage], here))
             for stage, (name, language, places) in _RUNGS.items()
             if stage in code}
    if "cubin" in code:
        start = time.perf_counter()
        ptxas = triton.get_ptxas(TARGETS[target][1]).version
        read = _read_back(code["cubin"], printed.getvalue(), f"ptxas {ptxas}",
                          here, code["ptx"])
        rungs["sass"] = Rung("sass", read.sass, "sass", read.tool,
                             seconds["cubin"] + time.perf_counter() - start,
                             read.origins)
        used = read.registers, read.spills
    else:
        registers, spilled = (
            int(re.search(rf"\.vgpr_{what}:\s+(\d+)", code["amdgcn"])[1])
            for what in ("count", "spill_count"))
        used = registers, 4 * spilled
    ops = dict.fromkeys(_ARITHMETIC.findall(code["ttir"]))
    return Built(
        work.name, "compiler", "Triton", tuple(ops), None, None, *used,
        made.metadata.shared, target=target, rungs=rungs)


def reason(error: BaseException) -> str:
    """Why Triton refuses a kernel, and at which of its lines.

    "" for an error that is not Triton's: its own begins with a place, and
    that of a helper is in the cause.
    """
    if not hasattr(error, "error_message"):
        return ""
    inner, at = error, getattr(error.node, "lineno", 0)
    while not inner.error_message and hasattr(inner.__cause__,
                                              "error_message"):
        inner = inner.__cause__
    return (f"{inner.error_message or inner.__cause__}, at line {at} of the "
            f"kernel, {(error.src or '').splitlines()[at - 1].strip()}")


def accesses(ttir: str, signature: Mapping[str, str],
             ) -> list[tuple[str, ...] | None]:
    """Parameters a kernel loads from, and those it stores to.

    ``signature`` maps each to its type. None where the TTIR does not simply
    tell: a call, a pointer that a branch chooses or a loop exchanges.
    """
    unknown = [None, None]
    names = [key for key, kind in signature.items() if kind != "constexpr"]
    if re.search(r"\b(tt\.call|scf\.while)\b", ttir):
        return unknown
    roots: dict[str, str | None] = {}  # a pointer: the parameter it is from
    loops: dict[int, list[str | None]] = {}  # by indent: roots of the carried
    loaded, stored = set(), set()
    for line in ttir.splitlines():
        indent = len(line) - len(line.lstrip())
        name, count, op, rest = _OPERATION.match(line.strip()).groups()
        found = [v if "#" in v else v + "#0"
                 for v in re.findall(r"%[\w.$-]+(?:#\d+)?", rest)]
        used = [roots.get(v) for v in found]
        results = [None] * int(count or 1)
        if op == "tt.func":
            if len(found) != len(names):
                return unknown
            roots = {v: n for v, n in zip(found, names, strict=True)
                     if signature[n].startswith("*")}
        elif op == "scf.for":  # counter, bounds, then pairs: carried = first
            loops[indent] = results = used[5::2]
            roots |= zip(found[4::2], results, strict=True)
        elif op == "scf.yield" and loops.pop(indent - 2, used) != used:
            return unknown
        elif op == "^":
            roots |= dict.fromkeys(found)
        elif _SAME.fullmatch(op):
            results = used[:1]
        if re.search("load|gather|atomic|descriptor_reduce", op):
            loaded.add(used[0])
        if re.search("store|scatter|atomic|descriptor_reduce", op):
            stored.add(used[0])
        roots |= {f"{name}#{n}": root for n, root in enumerate(results)}
    return [None if None in some else tuple(n for n in names if n in some)
            for some in (loaded, stored)]


@contextlib.contextmanager
def interpreted(note: Callable[..., None] = lambda *access: None,
                ) -> Iterator[Callable[[Any], Any]]:
    """Gives ``interpret``: ``interpret(kernel)[grid](...)`` runs in Python.

    ``note(kind, program, tensors, addresses, shape, width, line, lane)`` is
    called before each load, store or atomic that has a lane with its mask
    on: which tensor arguments its pointers come from (1 the first, 0 none),
    addresses of those lanes (uint64, row by row), shape of the block, bytes a
    lane, line of the kernel's source, number of the first such lane. Triton's
    own switch spoils every later compile; these patches last only as long as
    the ``with``. Raises what the kernel or ``note`` raises, and ValueError
    for types that come out wrong: bf16 and fp8.
    """
    triton = _triton()
    interpreter, jit = triton.interpreter, triton.jit.JITFunction
    language, memory = triton.package.language, triton.memory
    kind_of, running = interpreter._get_np_dtype, []
    numpy = need("numpy", "the interpreter computes with it")
    convert, tensors, tag = interpreter._implicit_cvt, [], 56

    @functools.cache
    def interpret(fn: Any) -> Any:
        # In a copy of its globals: the rewriter leaves its imports behind.
        copy = FunctionType(fn.__code__, dict(fn.__globals__), fn.__name__,
                            fn.__defaults__, fn.__closure__)
        run = interpreter.InterpretedFunction(
            functools.update_wrapper(copy, fn))
        run.rewritten_fn = {}  # its own: Triton's outlives the with
        return run

    def start(kernel: Any) -> Any:
        running[:], tensors[:] = [kernel.fn.__code__], []
        return interpret(kernel.fn)

    def line() -> int:
        """Of the kernel's source, 1 its first; 0 if it is not running."""
        frame, code = sys._getframe(2), running[0]
        while frame and (frame.f_code.co_filename, frame.f_code.co_name) != (
                code.co_filename, code.co_name):
            frame = frame.f_back
        return frame.f_lineno - code.co_firstlineno + 1 if frame else 0

    def tagged(value: Any) -> Any:
        # No address needs its top byte: there the number of the argument
        # goes with whatever is computed from it, also where two share memory.
        made = convert(value)
        if hasattr(value, "data_ptr"):
            tensors.append(value)
            made.handle.data |= numpy.uint64(len(tensors) << tag)
        return made

    def checked(kind: Any) -> Any:
        if re.match("bf16|fp8", str(getattr(kind, "scalar", kind))):
            raise ValueError(
                f"The kernel computes in {kind}, in which the interpreter is "
                "wrong: take the type from a pointer (y_ptr.dtype.element_ty)"
                ", or launch on a GPU.")
        return kind_of(kind)

    def noting(name: str, kind: str, at: int, value: int,
               mask: int | None) -> None:
        call = getattr(memory, name)

        def noted(*args: Any) -> Any:
            tags, where = args[at] >> tag, args[at] & (1 << tag) - 1
            # For a block pointer Triton gives a memoryview.
            on = (numpy.ones(where.shape, bool) if mask is None
                  else numpy.asarray(args[mask], bool))
            if on.any():
                note(kind, interpreter.interpreter_builder.grid_idx,
                     numpy.unique(tags[on]).tolist(), where[on], where.shape,
                     args[value].dtype.itemsize, line(), int(on.argmax()))
            return call(*args[:at], where, *args[at + 1:])

        scope.set_attr(memory, name, noted)

    builder = interpreter.InterpreterBuilder
    whole_dot = builder.create_dot

    def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        # In pieces too small for BLAS to share among threads, which wait for
        # each other by spinning: with other work about, 1000 times slower.
        m, n, k = *d.data.shape[-2:], a.data.shape[-1]
        rows = math.gcd(m, max(1, 2**18 // (n * k)))

        def cut(handle: Any) -> Any:
            *batch, high, wide = handle.data.shape
            return interpreter.TensorHandle(handle.data.reshape(
                *batch, high // rows, rows, wide), handle.dtype)

        every = interpreter.TensorHandle(b.data[..., None, :, :], b.dtype)
        made = whole_dot(self, cut(a), every, cut(d), *rest)
        made.data = made.data.reshape(d.data.shape)
        return made

    scope = triton.patch(SimpleNamespace(
        __globals__={"tl": language, "core": language.core}))
    scope.set_attr(jit, "__call__", lambda self, *args, **kwargs: (
        interpret(self.fn).rewrite()(*args, **kwargs)))
    scope.set_attr(interpreter, "_get_np_dtype", checked)
    scope.set_attr(interpreter, "_implicit_cvt", tagged)
    scope.set_attr(builder, "create_dot", dot)
    noting("load", "load", 0, value=2, mask=1)  # pointers, mask, other
    noting("store", "store", 0, value=1, mask=2)  # pointers, value, mask
    noting("atomic_rmw", "atomic", 1, value=2, mask=3)  # operation first
    noting("atomic_cas", "atomic", 0, value=1, mask=None)
    try:
        yield start
    except interpreter.InterpreterError as error:
        raise (error.__cause__ or error) from None
    finally:
        scope.restore()
