"""Triton: kernels compiled for chips that are not here, and PTX to SASS.

Every private name of Triton that the course uses is in this file (3.6 to
3.7.1). Nothing here needs a GPU, and no knob stays changed.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import inspect
import io
import math
import re
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from course_utils.compilers.cache import cached
from course_utils.compilers.rung import Kernel, Rung
from course_utils.compilers.worker import CompilerError
from course_utils.host import Missing, need

TARGETS = {  # (Triton's backend, its architecture, threads per warp)
    "t4": ("cuda", 75, 32), "a100": ("cuda", 80, 32), "l4": ("cuda", 89, 32),
    "rtx4090": ("cuda", 89, 32), "h100": ("cuda", 90, 32),
    "h200": ("cuda", 90, 32), "b200": ("cuda", 100, 32),
    "mi300x": ("hip", "gfx942", 64),
}
_RUNGS = {  # Triton's stage: (name, language)
    "ttir": ("ttir", "mlir"), "ttgir": ("ttgir", "mlir"),
    "llir": ("llvm-ir", "llvm"), "ptx": ("ptx", "ptx"),
    "amdgcn": ("amdgcn", "amdgcn"),
}


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
            generator=code_generator,
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


def assemble(ptx: str, arch: str) -> Assembled:
    """Machine code of ``ptx`` (from any compiler) for ``arch`` ("sm_90a").

    Takes the ptxas Triton would take, or its newer one where the first is
    older than the PTX. Raises ValueError for a bad ``arch``, CompilerError
    with ptxas' own words when it refuses, Missing without triton.
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
    return Assembled(cubin, disassemble(cubin), *_usage(done.stderr),
                     f"ptxas {ptxas.version}")


def disassemble(cubin: bytes) -> str:
    """SASS of a cubin, by the nvdisasm that Triton ships."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [_triton().package.knobs.nvidia.nvdisasm.path, "-c", file.name],
            capture_output=True, text=True)
    if done.returncode:
        raise CompilerError(f"nvdisasm failed: {done.stderr[-500:]}")
    return done.stdout


def _usage(log: str) -> tuple[int, int, int]:
    """Registers, spill bytes and static shared bytes out of ptxas -v."""
    def numbers(pattern: str) -> list[int]:
        return [0, *map(int, re.findall(pattern, log))]

    return (max(numbers(r"Used (\d+) registers")),
            sum(numbers(r"(\d+) bytes spill")),
            max(numbers(r"(\d+) bytes smem")))


def language() -> dict[str, Any]:
    """The two names every kernel's source uses: triton and tl."""
    package = _triton().package
    return {"triton": package, "tl": package.language}


def has_driver() -> bool:
    """Whether a launch by Triton itself would find a GPU to run on."""
    package = _triton().package
    try:
        package.runtime.driver.active.get_current_target()
    except RuntimeError:
        return False
    return not package.knobs.runtime.interpret


def works(target: str) -> str:
    """"" where this machine compiles kernels for ``target``, or why not."""
    try:
        _backend(target)
    except Missing as missing:
        return str(missing)
    return ""


def is_kernel(value: Any) -> bool:
    """Whether ``value`` is what @triton.jit makes."""
    triton = _triton()
    return isinstance(value, (triton.jit.JITFunction,
                              triton.interpreter.InterpretedFunction))


def bind(kernel: Any, args: Sequence[Any], meta: Mapping[str, Any],
         target: str = "h100") -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments by parameter name (defaults included), and options.

    Raises TypeError or ValueError naming what is missing, given twice, too
    many, or known neither as a parameter nor as an option of the target.
    """
    if not is_kernel(kernel):
        hint = (": pass its .fn and choose the block sizes yourself"
                if hasattr(kernel, "fn") else "")
        raise TypeError(f"kernel is a {type(kernel).__name__}, not a "
                        f"@triton.jit function{hint}.")
    backend = _backend(target)
    signature = inspect.signature(kernel.fn)
    known = [*signature.parameters, *vars(backend.parse_options({}))]
    for key in meta.keys() - set(known):
        raise ValueError(f"{kernel.__name__} knows no argument {key!r}; "
                         f"nearest: {_nearest(key, known)}.")
    own = {k: v for k, v in meta.items() if k in signature.parameters}
    try:
        bound = signature.bind(*args, **own)
    except TypeError as error:
        raise TypeError(f"{kernel.__name__}: {error}; its parameters are "
                        f"{', '.join(signature.parameters)}.") from None
    bound.apply_defaults()
    return bound.arguments, {k: v for k, v in meta.items() if k not in own}


def _backend(target: str) -> Any:
    if target not in TARGETS:
        raise ValueError(f"Triton knows no target {target!r}; nearest: "
                         f"{_nearest(target, TARGETS)}.")
    compiler = _triton().compiler
    return compiler.make_backend(compiler.GPUTarget(*TARGETS[target]))


def _nearest(name: str, names: Sequence[str] | Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, names, n=5, cutoff=0.5)
    return ", ".join(near or names)


def accesses(kernel: Any) -> tuple[set[str], set[str]]:
    """Parameters in the addresses a kernel loads from, and stores to.

    Pointers, and the sizes and strides beside them. Read off its source:
    followed through assignments to load, store and atomic_*, not into helpers.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))
    origin = {key: {key} for key in inspect.signature(kernel.fn).parameters}
    loaded: set[str] = set()
    stored: set[str] = set()

    def called(node: ast.AST) -> str:
        return getattr(getattr(node, "func", None), "attr", "")

    def roots(node: ast.AST | None) -> set[str]:
        if isinstance(node, ast.Name):
            return origin.get(node.id, set())
        if node is None or called(node) == "load":
            return set()  # a loaded value is data, no longer a pointer
        return set().union(*map(roots, ast.iter_child_nodes(node)))

    # Twice: the start of a loop may use what its end assigns.
    for node in [*ast.walk(tree), *ast.walk(tree)]:
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            for target in getattr(node, "targets", None) or [node.target]:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name):
                        origin.setdefault(part.id, set()).update(
                            roots(node.value))
        elif called(node) in ("load", "store") or "atomic_" in called(node):
            found = roots(node.func).union(*map(roots, node.args[:1]))
            loaded |= found if called(node) != "store" else set()
            stored |= found if called(node) != "load" else set()
    return loaded, stored


@dataclass(frozen=True)
class Resources:
    """How a kernel was compiled, and what it asks of its chip.

    ``kernel.registers`` are per thread (AMD: vector registers), ``.spills``
    bytes per thread stored and loaded for want of registers (AMD: 4 for each
    register spilled), ``.shared_bytes`` per block, ``.ops`` the arithmetic of
    its TTIR; ``.bytes_*`` are None where an argument came without a shape.
    """

    target: str
    num_warps: int
    num_stages: int
    kernel: Kernel


def build(kernel: Any, args: Sequence[Any], meta: Mapping[str, Any],
          target: str = "h100", fresh: bool = False,
          ) -> tuple[tuple[Rung, ...], Resources]:
    """Compile ``kernel`` for ``target``, specialised as a launch would be.

    ``args``: tensors (device="meta" will do), anything with shape and dtype,
    torch dtypes (a pointer aligned to 16 bytes), numbers. ``meta``:
    constexprs by name and options (num_warps, num_stages). Rungs: ttir,
    ttgir, llvm-ir, then ptx and sass, or amdgcn; all from one compile. Raises
    ValueError, TypeError, Missing, or Triton's CompilationError.
    """
    triton = _triton()
    values, options = bind(kernel, args, meta, target)
    if not isinstance(kernel, triton.jit.JITFunction):
        raise ValueError("kernel was defined while TRITON_INTERPRET was set, "
                         "so it cannot be compiled: unset it and restart.")
    backend = _backend(target)
    examples = {p.name: values[p.name] if p.is_constexpr
                else _example(values[p.name], triton) for p in kernel.params}
    binder = triton.binder(kernel.signature, kernel.params, backend)
    bound, special, _ = binder(**examples)
    settings, signature, constants, hints = kernel._pack_args(
        backend, dict(options), bound, special, options)
    source = triton.compiler.ASTSource(kernel, signature, constants, hints)
    key = ("triton", target, kernel.cache_key, repr(special), repr(settings),
           repr(triton.environment()))
    rungs, options, ops, used = cached(
        key, lambda: _compile(source, target, vars(settings)), fresh)
    loaded, stored = accesses(kernel)
    moved = [_bytes([v for k, v in values.items() if k in names])
             for names in (loaded - stored, stored)]
    return rungs, Resources(target, *options, Kernel(
        kernel.__name__, "compiler", "Triton", ops, *moved, *used))


def ladder(kernel: Any, args: Sequence[Any], target: str,
           meta: Mapping[str, Any], fresh: bool = False,
           ) -> tuple[tuple[Rung, ...], Kernel]:
    """The rungs of ``build`` and what it says of the kernel."""
    rungs, resources = build(kernel, args, meta, target, fresh)
    return rungs, resources.kernel


def _example(value: Any, triton: Any) -> Any:
    """What Triton specialises on: tensors and numbers as they are."""
    if type(value).__name__ == "dtype" and type(value).__module__ == "torch":
        return triton.jit.MockTensor(value)
    if hasattr(value, "data_ptr") or not hasattr(value, "shape"):
        return value
    return triton.jit.MockTensor(value.dtype, value.shape)


def _bytes(values: Sequence[Any]) -> int | None:
    """Bytes of all tensors; None where one came without a shape."""
    tensors = [v for v in values if not isinstance(v, int | float | None)]
    if not all(hasattr(v, "shape") for v in tensors):
        return None
    return sum(math.prod(v.shape) * v.dtype.itemsize for v in tensors)


def _compile(source: Any, target: str, options: Mapping[str, Any],
             ) -> tuple[tuple[Any, ...], ...]:
    """Rungs; warps, stages; ops; registers, spills, shared bytes."""
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
            source, triton.compiler.GPUTarget(*TARGETS[target]), options)
    seconds = {k: us / 1e6 for k, us in times[0].lowering_stages}
    seconds["ttir"] += times[0].ir_initialization / 1e6
    version = f"triton {triton.package.__version__}"
    rungs = [Rung(name, made.asm[stage], language, version, seconds[stage])
             for stage, (name, language) in _RUNGS.items()
             if stage in made.asm]
    if "cubin" in made.asm:
        start = time.perf_counter()
        sass = disassemble(made.asm["cubin"])
        seconds["cubin"] += time.perf_counter() - start
        ptxas = triton.get_ptxas(TARGETS[target][1]).version
        rungs.append(Rung("sass", sass, "sass", f"ptxas {ptxas}",
                          seconds["cubin"]))
        registers, spills, _ = _usage(printed.getvalue())
    else:
        registers, spilled = (
            int(re.search(rf"\.vgpr_{what}:\s+(\d+)", made.asm["amdgcn"])[1])
            for what in ("count", "spill_count"))
        spills = 4 * spilled
    ops = re.findall(r"= \"?(tt\.dot|tt\.reduce|math\.\w+|arith\."
                     r"(?:add|sub|mul|div|max\w*|min\w*|neg)f)\b",
                     made.asm["ttir"])
    return (tuple(rungs), (made.metadata.num_warps, made.metadata.num_stages),
            tuple(dict.fromkeys(ops)),
            (registers, spills, made.metadata.shared))


@contextlib.contextmanager
def interpreted() -> Iterator[Callable[[Any], Any]]:
    """Inside, ``interpret(kernel)[grid](...)`` runs a kernel in Python.

    Triton's own switch must be set before its import and spoils every later
    compile. Here its patches last only as long as the ``with``: kernels,
    their helpers and triton.language work compiled before and after.
    """
    triton = _triton()
    interpreter, jit = triton.interpreter, triton.jit.JITFunction
    language, call = triton.package.language, jit.__call__
    known: dict[Any, Any] = {}

    def interpret(kernel: Any) -> Any:
        if kernel.fn not in known:
            names = kernel.fn.__globals__
            before = set(names)
            run = interpreter.InterpretedFunction(kernel.fn)
            run.rewritten_fn = {}  # its own: Triton's outlives the with
            run.rewrite()
            added = [n for n in names if n not in before]
            known[kernel.fn] = run, names, added
        return known[kernel.fn][0]

    scope = triton.patch(SimpleNamespace(
        __globals__={"tl": language, "core": language.core}))
    jit.__call__ = lambda self, *args, **kwargs: (
        interpret(self).rewrite()(*args, **kwargs))
    try:
        yield interpret
    finally:
        jit.__call__ = call
        scope.restore()
        for _, names, added in known.values():
            for name in added:  # the rewriter leaves its imports behind
                names.pop(name, None)
