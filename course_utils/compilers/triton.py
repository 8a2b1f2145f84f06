"""Triton: kernels compiled for chips that are not here, and PTX to SASS.

Every private name of Triton that the course uses is in this file (3.6 to
3.7.1). Nothing here needs a GPU, and no knob stays changed.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
import io
import itertools
import math
import re
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from course_utils._outside import outside
from course_utils.compilers import origins
from course_utils.compilers.cache import cached
from course_utils.compilers.rung import (
    Kernel,
    Rung,
    file_of,
    home_of,
    source,
)
from course_utils.compilers.text import steady
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
_ARITHMETIC = re.compile(
    r"= \"?(tt\.(?:dot\w*|reduce|scan)|math\.\w+"
    r"|arith\.(?:add|sub|mul|div|rem|max\w*|min\w*|neg)f)\b")
_OPERATION = re.compile(  # %result:count = op, and the rest of the line
    r"(?:(%[\w.$-]+)(?::(\d+))? = )?\"?([\w.]*)(.*)")
_SAME = re.compile(r"tt\.(addptr|splat|broadcast|expand_dims|reshape|trans|"
                   r"bitcast|advance|make_tensor_\w+)")  # as its first operand
_LOADS = re.compile(r"tt\.(load|atomic_\w+|descriptor_(load|gather|reduce))")
_STORES = re.compile(
    r"tt\.(store|atomic_\w+|descriptor_(store|scatter|reduce))")
_MEMORY = {  # of the interpreter: what it is, the places of its arguments
    "load": ("load", 0, 2, 1),  # pointers, other, mask
    "store": ("store", 0, 1, 2),  # pointers, values, mask
    "atomic_rmw": ("atomic", 1, 2, 3),  # pointers, values, mask
    "atomic_cas": ("atomic", 0, 1, None),  # pointers, values, no mask
}
_TAG = 56  # no address needs the bits from here on
_ALONE = threading.RLock()  # for what it patches, and its switches, are global


def _triton() -> Any:
    """Triton and the private parts used below, in one namespace."""
    triton = need("triton", "it compiles and runs the course's GPU kernels")
    # code_generator keeps for good the parts of triton.language it finds when
    # first imported: never let that be while interpret() has patched them.
    try:
        from triton.backends.nvidia.compiler import get_ptxas
        from triton.compiler import code_generator, compiler
        from triton.runtime import interpreter, jit
        return SimpleNamespace(
            package=triton, jit=jit, compiler=compiler, get_ptxas=get_ptxas,
            interpreter=interpreter, patch=interpreter._patch_lang,
            scope=interpreter._LangPatchScope,
            convert=interpreter._implicit_cvt,
            numpy_type=interpreter._get_np_dtype,
            patch_tensor=interpreter._patch_lang_tensor,
            generator=code_generator, memory=interpreter._interpreter,
            types=jit.type_canonicalisation_dict, ir=compiler.ir,
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
        raise TypeError(f"kernel is of type {type(kernel).__name__}: give the "
                        "@triton.jit function itself, made without "
                        "TRITON_INTERPRET.")
    parameters = kernel.signature.parameters
    own = {k: v for k, v in meta.items() if k in parameters}
    options = {k: v for k, v in meta.items() if k not in parameters}
    try:
        settings = _backend(target).parse_options(dict(options))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f"{kernel.__name__} with {options}: {error}.") from None
    known = [*parameters, *vars(settings)]
    for key in meta.keys() - set(known):
        raise ValueError(f"{kernel.__name__} knows no argument {key!r}; "
                         f"nearest: {_nearest(key, known)}.")
    try:
        bound = kernel.signature.bind(*args, **own)
    except TypeError as error:
        raise TypeError(f"{kernel.__name__}: {error}; its parameters are "
                        f"{', '.join(parameters)}.") from None
    bound.apply_defaults()
    values = {
        k: v.item() if type(v).__module__ == "numpy" and not v.shape else v
        for k, v in bound.arguments.items()}  # NumPy's numbers as ours
    examples = {p.name: values[p.name] if p.is_constexpr
                else _example(p.name, values[p.name]) for p in kernel.params}
    return values, examples, options


def _example(name: str, value: Any) -> Any:
    triton = _triton()
    if value is None or isinstance(value, Real):
        return value
    dtype = getattr(value, "dtype", value)
    if str(dtype).rpartition(".")[2] not in triton.types:
        kind = type(value).__name__ if dtype is value else dtype
        raise TypeError(f"{name} is of type {kind}, which no kernel takes "
                        "here: give a tensor, a torch dtype or a number.")
    return value if hasattr(value, "data_ptr") else triton.jit.MockTensor(
        dtype, getattr(value, "shape", None))  # at a multiple of 16 bytes


def _backend(target: str) -> Any:
    if target not in TARGETS:
        raise ValueError(f"Triton knows no target {target!r}; nearest: "
                         f"{_nearest(target, TARGETS)}.")
    compiler = _triton().compiler
    return compiler.make_backend(compiler.GPUTarget(*TARGETS[target]))


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), names, n=5, cutoff=0.5)
    return ", ".join(near or names)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Built(Kernel):
    """A kernel compiled for one target; nothing was run.

    ``rungs`` maps name to Rung, from "python" down to "sass" (disassembled
    from the binary) or "amdgcn" (the compiler's own text); ``.sass``, ...
    are their texts. On AMD ``registers`` are vector registers and ``spills``
    4 bytes a register; ``ops`` is the arithmetic of the TTIR. The bytes are
    those of each whole tensor that the kernel loads from or stores to.
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
    backend, here = _backend(target), file_of(kernel.fn)
    binder = triton.binder(kernel.signature, kernel.params, backend)
    bound, special, _ = binder(**examples)
    settings, signature, constants, hints = kernel._pack_args(
        backend, dict(options), bound, special, options)
    work = triton.compiler.ASTSource(kernel, signature, constants, hints)
    with _ALONE:
        # Triton's own key would miss a helper or a constant that changed.
        first = _first_ir(work, backend, settings)
        key = ("triton", target, steady(first), origins.mlir(first, here),
               home_of(kernel.fn), repr(settings),
               repr(triton.environment()))
        made = cached(
            key, lambda: _compile(work, backend.target, settings, target),
            fresh)
    rungs = {rung.name: replace(rung, raw=textwrap.dedent(rung.raw))
             for rung in source(kernel.fn)}
    loaded, stored = accesses(made.rungs["ttir"].raw, signature)
    return replace(made, rungs={**rungs, **made.rungs},
                   bytes_read=_bytes(loaded, values),
                   bytes_written=_bytes(stored, values))


def _bytes(names: Iterable[str] | None, values: Mapping[str, Any],
           ) -> int | None:
    """Bytes of these arguments; None where one came without a shape."""
    if names is None or not all(hasattr(values[n], "shape") for n in names):
        return None
    return sum(math.prod(values[n].shape) * values[n].dtype.itemsize
               for n in names)


def _first_ir(work: Any, backend: Any, settings: Any) -> str:
    """What the kernel and all it calls say today: TTIR before any pass."""
    ir = _triton().ir
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    return str(work.make_ir(
        backend.target, settings, backend.get_codegen_implementation(settings),
        backend.get_module_map(), context))


def _compile(work: Any, chip: Any, settings: Any, target: str) -> Built:
    triton, here = _triton(), file_of(work.fn.fn)
    made, seconds, log = _run_triton(work, chip, settings)
    code, version = made.asm, f"triton {triton.package.__version__}"
    rungs = {name: Rung(name, code[stage], language, version, seconds[stage],
                        places(code[stage], here))
             for stage, (name, language, places) in _RUNGS.items()
             if stage in code}
    if "cubin" in code:
        start = time.perf_counter()
        ptxas = triton.get_ptxas(chip.arch).version
        read = _read_back(code["cubin"], log, f"ptxas {ptxas}", here,
                          code["ptx"])
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


def _run_triton(work: Any, chip: Any, settings: Any,
                ) -> tuple[Any, dict[str, float], str]:
    """What Triton makes, the seconds of each stage, and what it prints."""
    triton = _triton()
    knobs, times, printed = triton.package.knobs, [], io.StringIO()
    with contextlib.ExitStack() as stack:
        for group in (knobs.cache, knobs.compilation, knobs.nvidia):
            stack.enter_context(group.scope())
        # An empty cache: a warm one would hide what the compiler does.
        knobs.cache.dir = stack.enter_context(tempfile.TemporaryDirectory())
        knobs.compilation.store_binary_only = False
        knobs.compilation.listener = lambda **seen: times.append(seen["times"])
        knobs.nvidia.dump_ptxas_log = True  # the one way to its -v report
        stack.enter_context(contextlib.redirect_stdout(printed))
        made = triton.compiler.compile(work, chip, vars(settings))
    seconds = {stage: us / 1e6 for stage, us in times[0].lowering_stages}
    seconds["ttir"] += times[0].ir_initialization / 1e6
    return made, seconds, printed.getvalue()


def reason(error: BaseException) -> str:
    """Why Triton or ptxas refuses a kernel, and at which of its lines.

    "" for an error that is not theirs: Triton's begins with a place, and that
    of a helper is in the cause; ptxas has it among its other words.
    """
    if not hasattr(error, "error_message"):
        return ""
    if not hasattr(error, "node"):
        said = re.search(r"(?:error|fatal) +: (.*)", str(error))
        return said[1] if said else ""
    inner, at = error, getattr(error.node, "lineno", 0)
    while not inner.error_message and hasattr(inner.__cause__,
                                              "error_message"):
        inner = inner.__cause__
    words = inner.error_message or inner.__cause__
    if not words:  # they stand in the place of the source
        return str(inner.src)
    line = ["", *(error.src or "").splitlines()][at].strip()
    return f"{words}, at line {at} of the kernel, {line}"


def accesses(ttir: str, signature: Mapping[str, str],
             ) -> list[tuple[str, ...] | None]:
    """Parameters a kernel loads from, and those it stores to.

    ``signature`` maps each to its type. None where the TTIR does not simply
    tell: a call, a pointer that a branch chooses or a loop exchanges.
    """
    unknown = [None, None]
    if re.search(r"\b(tt\.call|scf\.while)\b", ttir):
        return unknown
    names = [key for key, kind in signature.items() if kind != "constexpr"]
    roots: dict[str, str | None] = {}  # a pointer: the parameter it is from
    loops: dict[int, list[str | None]] = {}  # by indent: roots of the carried
    loaded, stored = set(), set()
    for indent, op, results, operands in _operations(ttir):
        used = [roots.get(value) for value in operands]
        if op == "tt.func":
            roots = {value: name for value, name in zip(
                operands, names, strict=True) if signature[name][0] == "*"}
        elif op == "scf.for":  # counter, bounds, then pairs: carried = first
            loops[indent] = used[5::2]
            roots |= zip(operands[4::2] + results, 2 * used[5::2],
                         strict=False)
        elif op == "scf.yield":  # a loop that carries nothing has none
            if (loops.pop(indent - 2, None) or used) != used:
                return unknown
        elif _SAME.fullmatch(op):
            roots[results[0]] = used[0]
        if _LOADS.fullmatch(op):
            loaded.add(used[0])
        if _STORES.fullmatch(op):
            stored.add(used[0])
    return [None if None in some else tuple(n for n in names if n in some)
            for some in (loaded, stored)]


def _operations(ttir: str) -> Iterator[tuple[int, str, list[str], list[str]]]:
    """(indent, op, its results, its operands) of each line."""
    for line in ttir.splitlines():
        name, count, op, rest = _OPERATION.match(line.strip()).groups()
        yield (len(line) - len(line.lstrip()), op,
               [f"{name}#{n}" for n in range(int(count or 1))],
               [value if "#" in value else value + "#0"
                for value in re.findall(r"%[\w.$-]+(?:#\d+)?", rest)])


def interpret(kernel: Any, grid: tuple[int, ...], args: Iterable[Any],
              note: Callable[..., None]) -> None:
    """Run ``kernel`` over ``grid`` in Python, on tensors in the CPU's memory.

    ``note(kind, program, tensors, addresses, shape, width, line, lane)`` is
    called before each load, store or atomic that has a lane with its mask
    on: which tensor arguments its pointers come from (1 the first, 0 none),
    addresses of those lanes (uint64, row by row), shape of the block, bytes a
    lane, line of the kernel's source, number of the first such lane. Raises
    what the kernel or ``note`` raises, and ValueError for types that come out
    wrong: bf16 and fp8.
    """
    with _ALONE:  # looked up inside: outside they may be another thread's
        triton = _triton()
        inner, language = triton.interpreter, triton.package.language
        builder, partial = inner.interpreter_builder, functools.partial
        function = functools.cache(partial(_interpreted, inner))

        def call(helper: Any, *args: Any, **kwargs: Any) -> Any:
            return function(helper.fn).rewrite()(*args, **kwargs)

        def seen(kind: str, tensors: list[int], addresses: Any, shape: tuple,
                 width: int, lane: int) -> None:
            note(kind, builder.grid_idx, tensors, addresses, shape, width,
                 _line(kernel.fn.__code__), lane)

        # Triton's own switch spoils every later compile; this is restored.
        scope = triton.scope()
        patch = scope.set_attr
        try:
            patch(inner, "_LangPatchScope", lambda: scope)  # if stopped, too
            triton.patch(SimpleNamespace(
                __globals__={"tl": language, "core": language.core}))
            patch(triton.jit.JITFunction, "__call__", call)
            patch(inner, "_implicit_cvt", partial(
                _tagged, triton.convert, itertools.count(1)))
            patch(inner, "_get_np_dtype", partial(_checked, triton.numpy_type))
            patch(inner, "_patch_lang_tensor", partial(
                _indexed, triton.patch_tensor))
            patch(inner.InterpreterBuilder, "create_dot", staticmethod(
                partial(_dot, inner.TensorHandle, builder.create_dot)))
            for name, how in _MEMORY.items():
                patch(triton.memory, name, _noted(
                    getattr(triton.memory, name), seen, *how))
            function(kernel.fn)[grid](*args)
        except inner.InterpreterError as error:
            raise (error.__cause__ or error) from None
        finally:
            scope.restore()


def _interpreted(inner: Any, fn: Callable) -> Any:
    """``fn`` as Triton's interpreter has it."""
    # In a copy of its globals: the rewriter leaves its imports behind, and
    # looks nowhere else for what a closure holds.
    names = fn.__globals__ | outside(fn)[0]
    copy = FunctionType(fn.__code__, names, fn.__name__, fn.__defaults__,
                        fn.__closure__)
    made = inner.InterpretedFunction(functools.update_wrapper(copy, fn))
    made.rewritten_fn = {}  # its own: Triton's would outlive the launch
    return made


def _line(code: CodeType) -> int:
    """Of a kernel's source, 1 its first; 0 if it is not running."""
    frame = sys._getframe(1)
    while frame and (frame.f_code.co_filename, frame.f_code.co_name) != (
            code.co_filename, code.co_name):
        frame = frame.f_back
    return frame.f_lineno - code.co_firstlineno + 1 if frame else 0


def _tagged(convert: Callable, numbers: Iterator[int], value: Any) -> Any:
    """An argument as the interpreter has it, an address with its number.

    In the top byte the number goes with whatever is computed from the
    address, also where two arguments share memory.
    """
    made = convert(int(value) if isinstance(value, bool) else value)
    if hasattr(value, "data_ptr"):
        made.handle.data |= next(numbers) << _TAG
    return made


def _indexed(patch: Callable, tensor: type, scope: Any) -> None:
    """A tensor as Triton patches it, but that NumPy 2.4 counts by, too.

    Triton 3.6 counts by ``int`` of an array, which no longer exists.
    """
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _checked(numpy_type: Callable, kind: Any) -> Any:
    """NumPy's type for Triton's ``kind``, if that comes out right."""
    if re.match("bf16|fp8", str(getattr(kind, "scalar", kind))):
        raise ValueError(
            f"The kernel computes in {kind}, in which the interpreter is "
            "wrong: take the type from a pointer (y_ptr.dtype.element_ty), "
            "or launch on a GPU.")
    return numpy_type(kind)


def _noted(call: Callable, seen: Callable[..., None], kind: str, at: int,
           value: int, mask: int | None) -> Callable:
    """``call``, which reads or writes memory, ``seen`` before it does."""
    import numpy as np

    def noted(*args: Any) -> Any:
        tags, addresses = args[at] >> _TAG, args[at] & (1 << _TAG) - 1
        # For a block pointer Triton gives a memoryview.
        on = np.asarray(args[mask] if mask else np.ones(tags.shape), bool)
        if on.any():
            seen(kind, np.unique(tags[on]).tolist(), addresses[on],
                 addresses.shape, args[value].dtype.itemsize,
                 int(on.argmax()))
        return call(*args[:at], addresses, *args[at + 1:])

    return noted


def _dot(handle: Callable, whole: Callable, a: Any, b: Any, d: Any,
         *rest: Any) -> Any:
    """a @ b + d, some rows at a time: too few for BLAS to share out.

    Its threads wait for each other by spinning, and with other work about
    that is 1000 times slower.
    """
    import numpy as np

    rows = max(1, 2**18 // (b.data.shape[-2] * b.data.shape[-1]))

    def part(block: Any, first: int) -> Any:
        return handle(block.data[..., first:first + rows, :], block.dtype)

    parts = [whole(part(a, first), b, part(d, first), *rest)
             for first in range(0, d.data.shape[-2], rows)]
    return handle(np.concatenate([part.data for part in parts], -2),
                  parts[0].dtype)
