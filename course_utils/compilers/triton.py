"""Triton: kernels compiled for chips that are not here, and PTX to SASS.

Every private name of Triton that the course uses is in this file (3.6 to
3.7.1) or, of its interpreter, in interpreter.py. Nothing here needs a GPU, and
no knob stays changed. Floor 1.
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
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from types import ModuleType, SimpleNamespace
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
_PTXAS_SECONDS = 300
ALONE = threading.RLock()  # for what it patches, and its switches, are global


def internals() -> Any:
    """Triton and the private parts that the course uses, in one namespace.

    Raises Missing where there is no triton, or one of another inside.
    """
    triton = need("triton", "it compiles and runs the course's GPU kernels")
    # code_generator keeps for good the parts of triton.language it finds when
    # first imported: never let that be while interpret() has patched them.
    try:
        from triton.backends.nvidia import compiler as nvidia
        from triton.compiler import code_generator, compiler
        from triton.runtime import interpreter, jit
        return SimpleNamespace(
            package=triton, jit=jit, compiler=compiler, nvidia=nvidia,
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
    triton = internals()
    if not (number := re.fullmatch(r"sm_(\d+)[af]?", arch)):
        raise ValueError(f'arch is {arch!r}: write it as in "sm_90a".')
    first = triton.nvidia.get_ptxas(int(number[1]))
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
            [internals().package.knobs.nvidia.nvdisasm.path, "-c", "-gi",
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


def python(kernel: Any) -> Any:
    """The function below all that Triton's decorators put around it."""
    while isinstance(kernel, internals().jit.KernelInterface):
        kernel = kernel.fn
    return kernel


def checked(kernel: Any, name: str = "kernel") -> Any:
    """``kernel``, if it is what @triton.jit makes; else TypeError."""
    if not isinstance(kernel, internals().jit.JITFunction):
        raise TypeError(
            f"{name} is of type {type(kernel).__name__}: give the @triton.jit "
            "function itself, with no @triton.autotune or @triton.heuristics "
            "around it, and made without TRITON_INTERPRET.")
    return kernel


def bind(kernel: Any, args: Sequence[Any], meta: Mapping[str, Any],
         target: str = "h100") -> tuple[dict[str, Any], ...]:
    """Arguments by name, defaults included; the same with stand-ins for
    tensors that are not there; and options.

    Raises TypeError or ValueError where they do not fit the kernel.
    """
    parameters = checked(kernel).signature.parameters
    backend = _backend(target)
    own = {k: v for k, v in meta.items() if k in parameters}
    options = {k: v for k, v in meta.items() if k not in parameters}
    try:
        settings = backend.parse_options(dict(options))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f"{kernel.__name__} with {options}: {error}.") from None
    known = [*parameters, *vars(settings)]
    for key in meta.keys() - set(known):
        raise ValueError(f"{kernel.__name__} knows no argument {key!r}; "
                         f"nearest: {_nearest(key, known)}.")
    values = {  # NumPy's numbers as Python's
        k: v.item() if type(v).__module__ == "numpy" and not v.shape else v
        for k, v in named(kernel.fn, args, own).items()}
    examples = {p.name: values[p.name] if p.is_constexpr
                else _example(p.name, values[p.name]) for p in kernel.params}
    return values, examples, options


def named(fn: Callable, args: Sequence[Any], own: Mapping[str, Any],
          ) -> dict[str, Any]:
    """Arguments of ``fn`` by name, defaults included; TypeError if unfit."""
    signature = inspect.signature(fn)
    try:
        bound = signature.bind(*args, **own)
    except TypeError as error:
        raise TypeError(f"{fn.__name__}: {error}; its parameters are "
                        f"{', '.join(signature.parameters)}.") from None
    bound.apply_defaults()
    return bound.arguments


def _example(name: str, value: Any) -> Any:
    triton = internals()
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
    compiler = internals().compiler
    if TARGETS[target][0] == "hip":
        need("torch", "Triton's AMD back end asks it how large a tensor is")
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
    triton = internals()
    values, examples, options = bind(kernel, args, meta, target)
    backend, here = _backend(target), file_of(kernel.fn)
    binder = triton.binder(kernel.signature, kernel.params, backend)
    bound, special, _ = binder(**examples)
    settings, signature, constants, hints = kernel._pack_args(
        backend, dict(options), bound, special, options)
    work = triton.compiler.ASTSource(kernel, signature, constants, hints)
    with ALONE:
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
    ir = internals().ir
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    return str(work.make_ir(
        backend.target, settings, backend.get_codegen_implementation(settings),
        backend.get_module_map(), context))


def _compile(work: Any, chip: Any, settings: Any, target: str) -> Built:
    triton, here = internals(), file_of(work.fn.fn)
    made, seconds, log = _run_triton(work, chip, settings)
    code, version = made.asm, f"triton {triton.package.__version__}"
    rungs = {name: Rung(name, code[stage], language, version, seconds[stage],
                        places(code[stage], here))
             for stage, (name, language, places) in _RUNGS.items()
             if stage in code}
    if "cubin" in code:
        start = time.perf_counter()
        ptxas = triton.nvidia.get_ptxas(chip.arch).version
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
    triton = internals()
    knobs, times, printed = triton.package.knobs, [], io.StringIO()
    with contextlib.ExitStack() as stack:
        for group in (knobs.cache, knobs.compilation, knobs.nvidia):
            stack.enter_context(group.scope())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        # An empty cache: a warm one would hide what the compiler does.
        knobs.cache.dir = folder
        # ptxas may work for ever; what is written for it would be left over.
        for module, name, own in (
                (tempfile, "NamedTemporaryFile", {"dir": folder}),
                (subprocess, "run", {"timeout": _PTXAS_SECONDS})):
            call = functools.partial(getattr(module, name), **own)
            stack.enter_context(mock.patch.object(
                triton.nvidia, module.__name__,
                SimpleNamespace(**vars(module) | {name: call})))
        knobs.compilation.store_binary_only = False
        knobs.compilation.listener = lambda **seen: times.append(seen["times"])
        knobs.nvidia.dump_ptxas_log = True  # the one way to its -v report
        stack.enter_context(contextlib.redirect_stdout(printed))
        try:
            made = triton.compiler.compile(work, chip, vars(settings))
        except subprocess.TimeoutExpired:
            raise CompilerError(
                f"ptxas took longer than {_PTXAS_SECONDS} s for {work.name}: "
                "give it smaller blocks.") from None
    seconds = {stage: us / 1e6 for stage, us in times[0].lowering_stages}
    seconds["ttir"] += times[0].ir_initialization / 1e6
    return made, seconds, printed.getvalue()


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """What Triton or ptxas throw as a ValueError of one sentence.

    ``what`` begins it: "vector_add does not compile for h100".
    """
    try:
        yield
    except (Missing, CompilerError):
        raise
    except (internals().package.TritonError, RuntimeError) as error:
        told = (reason(error) or str(error)).strip().partition("\n")[0]
        raise ValueError(f"{what}: {type(error).__name__}: "
                         f"{steady(told).rstrip('.: ')}.") from None


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
