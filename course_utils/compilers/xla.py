"""XLA: a JAX function to every representation, for chips present or absent.

Tracing happens in the reader's process, compiling in a worker, to which the
function travels as StableHLO. The private parts of jax and jaxlib that this
needs (tested with 0.10.2) are used here and nowhere else. Floor 1.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from course_utils import chips, host
from course_utils.compilers import cache, hlo, origins, text, triton, worker
from course_utils.compilers.rung import (
    Compiled,
    Pass,
    Rung,
    absent,
    file_of,
    home_of,
    source,
)
from course_utils.host import Missing

TPU_TOPOLOGIES = {  # names that libtpu accepts; the smallest of each
    "tpu-v4": "v4:2x2x1", "tpu-v5e": "v5e:2x2", "tpu-v5p": "v5p:2x2x1",
    "tpu-v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
GPUS = ("t4", "a100", "h100", "b200")
TARGETS = ("cpu", *GPUS, *TPU_TOPOLOGIES)

_NEEDS_THE_CHIP = ("0.7.", "0.8.")  # versions of jax whose XLA:GPU measures
# What XLA emits follows the host's vector width; AVX2 is the same everywhere.
_CPU_FLAGS = "--xla_cpu_max_isa=AVX2"
_SLOTS = "final_hlo-static-per-bundle-utilization"
_LLO_PASSES = f"(original|final_bundles|{_SLOTS})"  # of 70 that libtpu dumps
_SCHEDULED = "is_scheduled=true"
_PASS_FILE = re.compile(r"\.(\d{4})\.(.+?)\.after_(.+?)(?:\.before_(.+))?$")


def compile(fn: Callable, args: tuple, target: str,
            donate: tuple[int, ...] = (), fresh: bool = False) -> Compiled:
    """Every rung of the JAX function ``fn`` for ``target``.

    ``args`` are arrays or ``jax.ShapeDtypeStruct``; a sharding over an
    ``AbstractMesh`` in them compiles for that many chips. ``donate`` numbers
    the arguments whose buffers the result may take over.
    """
    if missing := lacking(target):
        raise missing
    front = _lower(fn, args, target, donate)
    module = next(rung for rung in front if rung.name == "stablehlo")
    done = cache.cached(
        ("xla", target, text.steady(module.raw), module.origins, home_of(fn)),
        lambda: worker.call(
            "xla", f"{__name__}:_compile", module.raw, target, file_of(fn),
            environment=_environment(target)), fresh)
    return replace(done, rungs=front + done.rungs)


def lacking(target: str) -> Missing | None:
    """What this machine lacks of the compiler for ``target``, if anything."""
    plugin = next(filter(None, (
        host.version(f"jax-cuda{n}-plugin") for n in (13, 12))), "")
    for lacks, *missing in (
            (not host.version("jax"), "jax", "it compiles JAX functions",
             "Run: pip install jax"),
            (target in TPU_TOPOLOGIES and not host.version("libtpu"),
             "libtpu", f"it holds the compiler for {target}",
             "Run: pip install libtpu (Linux x86-64 only)"),
            (target in GPUS and not plugin, "The CUDA plugin of jax",
             f"it holds XLA's compiler for {target}",
             "Run: pip install jax-cuda13-plugin (Linux only)"),
            (target in GPUS and plugin.startswith(_NEEDS_THE_CHIP),
             "A newer CUDA plugin of jax", f"version {plugin} compiles for "
             f"{target} only where that chip is", "Run, except on Colab: pip "
             "install --upgrade jax jax-cuda13-plugin")):
        if lacks:
            return Missing(*missing)
    return None


def _environment(target: str) -> dict[str, str]:
    if target not in TPU_TOPOLOGIES:
        return {"XLA_FLAGS": _CPU_FLAGS}
    # libtpu reads these once, at its first use.
    return {"LIBTPU_INIT_ARGS": " ".join((
        f"--xla_jf_dump_to={worker.SCRATCH}/llo",
        "--xla_jf_dump_llo_text=true", "--xla_jf_dump_hlo_text=false",
        f"--xla_jf_dump_llo_pass_label_regex={_LLO_PASSES}"))}


# In the reader's process: from Python to StableHLO.

def _lower(fn: Callable, args: tuple, target: str, donate: tuple[int, ...]
           ) -> tuple[Rung, ...]:
    import jax

    kind = "cpu" if target == "cpu" else (
        "cuda" if target in GPUS else "tpu")
    clock, here, rungs = time.perf_counter, file_of(fn), list(source(fn))

    def add(name: str, made: str, language: str, start: float,
            places: Callable[[str, str], origins.Origins]) -> None:
        seconds = clock() - start
        rungs.append(Rung(name, made, language, f"jax {jax.__version__}",
                          seconds, places(made, here)))

    start = clock()
    traced = _jitted(fn, donate).trace(*args)
    # Without colours: a page has its own.
    add("jaxpr", traced.jaxpr.pretty_print(use_color=False), "jaxpr", start,
        functools.partial(_places, traced.jaxpr))
    start = clock()
    lowered = traced.lower(lowering_platforms=(kind,))
    add("stablehlo", lowered.as_text(debug_info=True), "mlir", start,
        origins.mlir)
    start = clock()
    add("hlo", lowered.as_text(dialect="hlo", debug_info=True), "hlo", start,
        origins.hlo)
    return tuple(rungs)


def gradient(fn: Callable, numbers: Sequence[int] | None) -> Callable:
    """A function that returns fn's value and its gradients.

    With respect to the arguments ``numbers``, or to all that are not static.
    """
    import jax
    import jax.numpy as jnp

    inner, static = _without_jit(fn)

    @functools.wraps(fn)
    def with_gradient(*values: Any) -> Any:
        chosen = [n for n in range(len(values)) if n not in static
                  ] if numbers is None else numbers

        def of(*given: Any) -> Any:
            return inner(*({**dict(enumerate(values)), **dict(zip(
                chosen, given, strict=True))}.values()))

        out, pull = jax.vjp(of, *(values[n] for n in chosen))
        return out, pull(jax.tree.map(jnp.ones_like, out))

    return jax.jit(with_gradient, static_argnums=static) if static else (
        with_gradient)


def _without_jit(fn: Any) -> tuple[Callable, tuple[int, ...]]:
    """What the reader's own jit wraps, and its static arguments."""
    own = getattr(fn, "_jit_info", None)
    return (fn._fun, own.static_argnums) if own else (fn, ())


def _jitted(fn: Any, donate: tuple[int, ...]) -> Any:
    """A jit of ``fn`` that has traced nothing.

    JAX keeps the trace of a function it has seen, though a helper or a value
    that the function uses may have changed. The reader's own jit keeps its
    options.
    """
    import jax
    from jax._src import pjit, util

    inner, static = _without_jit(fn)

    @functools.wraps(inner, updated=())
    def anew(*args: Any) -> Any:
        return inner(*args)

    anew.__name__ = util.fun_name(inner)
    if inner is not fn and not donate:
        return pjit._cpp_pjit(anew, fn._jit_info)
    return jax.jit(anew, donate_argnums=donate, static_argnums=static)


def _places(jaxpr: Any, plain: str, here: str) -> origins.Origins:
    """The origins of a printed jaxpr, which is printed once more for them."""
    from jax._src import source_info_util

    def line(source: Any, *_: Any) -> str:
        frames = source.traceback.frames if source.traceback else ()
        return str(max(0, origins.first(
            ((f.file_name, f.line_num) for f in frames), here)))

    with mock.patch.object(source_info_util, "summarize", line):
        found = origins.jaxpr(jaxpr.pretty_print(
            use_color=False, source_info=True))
    return found if len(found) == len(plain.splitlines()) else ()


# In the worker: from StableHLO to machine code.

def _compile(module: str, target: str, here: str) -> Compiled:
    """Compile StableHLO text. Runs in the worker; called by ``compile``."""
    folder, llo = (Path(os.environ["COURSE_SCRATCH"], name)
                   for name in ("xla", "llo"))
    try:
        start = time.perf_counter()
        executable = _run_xla(module, _devices(target), folder)
        return _collect(executable, target, folder, llo, here,
                        time.perf_counter() - start)
    finally:
        for path in (folder, llo):  # tens of MB
            shutil.rmtree(path, ignore_errors=True)


def _devices(target: str) -> list:
    import jax
    from jax.experimental import topologies

    if target == "cpu":
        return jax.devices("cpu")
    if target in GPUS:
        return topologies.get_topology_desc(
            platform="cuda", topology_name="", topology="1x1x1",
            target_config=_gpu_target_config(target)).devices
    return topologies.get_topology_desc(
        platform="tpu", topology_name=TPU_TOPOLOGIES[target]).devices


def _run_xla(module: str, devices: list, folder: Path) -> Any:
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir
    from jaxlib import _jax

    partitions = int(re.search(r"mhlo.num_partitions = (\d+)",
                               module).group(1))
    if partitions > len(devices):
        raise ValueError(
            f"the arguments are sharded over {partitions} devices, and this "
            f"topology has {len(devices)}: use a smaller mesh.")
    chosen = tuple(devices[:partitions])
    options = compiler.get_compile_options(
        num_replicas=1, num_partitions=partitions,
        device_assignment=[[device.id for device in chosen]],
        backend=None,
        env_options_overrides={"xla_dump_to": str(folder),
                               "xla_dump_hlo_pass_re": ".*",
                               "xla_dump_disable_metadata": True})
    with mlir.make_ir_context():
        return compiler.backend_compile_and_load(
            chosen[0].client, ir.Module.parse(module),
            _jax.DeviceList(chosen), options, [])


def _gpu_target_config(target: str) -> str:
    """XLA's GpuTargetConfig of a chip, from the chip table."""
    chip = chips.get(target)
    major, minor = str(chip.cc).split(".")
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * 1024,  # what CUDA gives unasked
        "shared_memory_per_block_optin": chip.smem_per_block_bytes,
        "shared_memory_per_core": chip.smem_per_sm_bytes,
        "threads_per_core_limit": chip.max_threads_per_sm,
        "core_count": chip.sm_count,
        "fpus_per_core": chip.fp32_lanes_per_sm,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": int(chip.hbm_bandwidth),
        "l2_cache_size": chip.l2_bytes,
        "clock_rate_ghz": chip.clock_hz / 1e9,
        "device_memory_size": chip.hbm_bytes,
        "registers_per_core_limit": chip.registers_per_sm,
        "registers_per_block_limit": 65536}
    body = "\n".join(f"  {name}: {value}" for name, value in fields.items())
    return (f"gpu_device_info {{\n{body}\n  cuda_compute_capability "
            f"{{ major: {major} minor: {minor} }}\n}}\n"
            'platform_name: "CUDA"\n'
            "dnn_version_info { major: 9 minor: 10 patch: 0 }\n"
            f'device_description_str: "{target}"\n')


def _collect(executable: Any, target: str, folder: Path, llo: Path,
             here: str, seconds: float) -> Compiled:
    optimized = executable.hlo_modules()[0].to_string()
    tool, lines = _tool(target), origins.hlo(optimized, here)
    code = _cpu_code(folder) if target == "cpu" else []
    kernels = hlo.kernels(optimized, set(re.findall(  # what it emitted itself
        r'^define .*@"?([\w.-]+)"?\(', code[0].raw, re.M)) if code else None)
    names, used = [_symbol(kernel.name) for kernel in kernels], {}
    if target in GPUS:
        code, used = _gpu_code(folder, target, names)
    elif target != "cpu":
        code, used = _tpu_code(llo, tool), _tpu_slots(llo)
    kernels = tuple(replace(kernel, **used.get(name, {}))
                    for kernel, name in zip(kernels, names, strict=True))
    if calls := hlo.library_calls(optimized, kernels):
        code.append(Rung("library", calls, "hlo", tool, 0.0))
    # Code has no places of its own: where it names a kernel, the kernel's.
    heads = [re.match(r" +(?:ROOT )?%?([\w.-]+) = ", row)
             for row in optimized.splitlines()]
    made = {_symbol(head[1]): line
            for head, line in zip(heads, lines, strict=True)
            if head and line and _symbol(head[1]) in names}
    rungs = [Rung("hlo-optimized", optimized, "hlo", tool, seconds, lines),
             *(replace(rung, origins=origins.named(rung.raw, made))
               for rung in code)]
    stats = executable.get_compiled_memory_stats()
    assigned, lives = ("".join(_read(folder, f"*{name}.txt")[:1])
                       for name in ("buffer-assignment", "live-range"))
    return Compiled(
        tuple(rungs), _passes(folder), kernels,
        hlo.buffers(assigned, lives or assigned),  # jax 0.7: in one file
        {name: getattr(stats, f"{name}_size_in_bytes")
         for name in ("argument", "output", "alias", "temp")})


def _symbol(name: str) -> str:
    """The name of a kernel as PTX has it: fusion_1 for fusion.1."""
    return re.sub(r"[.-]", "_", name)


def _tool(target: str) -> str:
    if target in TPU_TOPOLOGIES:
        return f"XLA:TPU of libtpu {host.version('libtpu')}"
    return f"XLA of jaxlib {host.version('jaxlib')}"


def _read(folder: Path, pattern: str) -> list[str]:
    return [file.read_text() for file in sorted(folder.glob(pattern))]


def _passes(folder: Path) -> tuple[Pass, ...]:
    """Every pass that XLA dumped, in order, marked where it changed HLO."""
    found = {}
    for file in folder.glob("*.txt"):
        if match := _PASS_FILE.search(file.stem):
            found[int(match.group(1))] = (*match.groups()[1:3], file)
    passes, before = [], ""
    for number in sorted(found):
        pipeline, name, file = found[number]
        after = text.canonical(file.read_text())
        if _SCHEDULED in after and before and _SCHEDULED not in before:
            name = "scheduling"  # it happens between two pipelines
        passes.append(Pass(name, pipeline, after,
                           bool(before) and after != before))
        before = after
    return tuple(passes)


def _cpu_code(folder: Path) -> list[Rung]:
    rungs = [Rung("llvm-ir", "\n".join(_read(folder, "*ir-with-opt.ll")),
                  "llvm", _tool("cpu"), 0.0)]
    objects = sorted(folder.glob("*.o"))
    if not objects:  # libraries do it all
        return rungs
    if (objdump := host.tool("objdump")) is None:
        return [*rungs, absent("assembly", Missing(
            "objdump", "it disassembles what XLA compiled for this CPU",
            "On Debian and Ubuntu: apt-get install binutils"))]
    start, listings = time.perf_counter(), []
    for file in objects:
        listing = subprocess.run(
            [objdump, "-d", "--no-show-raw-insn", str(file)],
            capture_output=True, text=True, check=True).stdout
        listings.append(listing[listing.find("\n0"):].strip("\n") + "\n")
    rungs.append(Rung("assembly", "\n".join(listings), "asm", "objdump",
                      time.perf_counter() - start))
    return rungs


def _gpu_code(folder: Path, target: str, names: list[str]
              ) -> tuple[list[Rung], dict[str, dict[str, int]]]:
    """LLVM IR, PTX and SASS, and what each kernel uses by its name.

    Kernels stand in the order of ``names``: XLA's own, by threads, varies.
    """
    def place(code: str) -> int:
        defined = re.findall(r"(?:\.entry |define [^@]*@)(\w+)", code)
        return min((names.index(name) for name in defined if name in names),
                   default=len(names))

    ptx = sorted((code for code in _read(folder, "*.ptx") if ".entry" in code),
                 key=place)
    if not ptx:  # every kernel is a library's
        return [], {}
    llvm = sorted(_read(folder, "*ir-with-opt.ll"), key=place)
    rungs = [Rung("llvm-ir", "\n".join(llvm), "llvm", _tool(target), 0.0),
             Rung("ptx", "\n".join(ptx), "ptx", _tool(target), 0.0)]
    try:
        machine, used = sass(ptx)
    except Missing as missing:  # triton brings ptxas
        return [*rungs, absent("sass", missing)], {}
    return [*rungs, machine], used


def sass(ptx: list[str]) -> tuple[Rung, dict[str, dict[str, int]]]:
    """Machine code of PTX, one kernel a text, and what each kernel uses."""
    start = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # nvdisasm takes 0.5 s
        made = dict(zip(
            (re.search(r"\.entry (\w+)", code)[1] for code in ptx),
            pool.map(lambda code: triton.assemble(code, re.search(
                r"^\.target (\w+)", code, re.M)[1]), ptx), strict=True))
    return Rung("sass", "\n".join(code.sass for code in made.values()), "sass",
                next(iter(made.values())).tool,
                time.perf_counter() - start), {
        name: {"registers": code.registers, "spills": code.spills,
               "shared_bytes": code.shared_bytes}
        for name, code in made.items()}


def _tpu_slots(folder: Path) -> dict[str, dict[str, Any]]:
    """Bundles and slot use of each kernel, by its name.

    libtpu writes a row a bundle: how many of each slot's units it uses.
    """
    used = {}
    for file in folder.glob(f"*-{_SLOTS}.txt"):
        head, _, body = file.read_text().partition("== UTILIZATION:\n")
        rows = [row.split() for row in body.splitlines() if row]
        slots = re.search(r"^(\w.*,.*)$", head, re.M)[1].split(", ")
        busy = {slot: sum(n != "0" for n in column) / len(rows) for
                slot, column in zip(slots, zip(*rows, strict=True),
                                    strict=True)}
        used[_symbol(_program(file, _SLOTS))] = {
            "bundles": len(rows), "slots": busy}
    return used


def _program(file: Path, label: str) -> str:
    """The name in a file of libtpu's, which begins with a clock."""
    return re.sub(rf"^[0-9]+-|-[0-9]+-{label}$", "", file.stem)


def _tpu_code(folder: Path, tool: str) -> list[Rung]:
    """LLO and final bundles of every fusion, the largest program first."""
    rungs = []
    for name, label in (("llo", "original"), ("bundles", "final_bundles")):
        files = [file for file in folder.glob(f"*-{label}.txt")
                 if "schedule-analysis" not in file.name]
        files.sort(key=lambda file: -file.stat().st_size)
        parts = [f"// {_program(file, label)}\n{file.read_text()}"
                 for file in files]
        if parts:
            rungs.append(Rung(name, "\n".join(parts), name, tool, 0.0))
    return rungs
