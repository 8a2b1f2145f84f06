"""XLA: a JAX function to every representation, for chips present or absent.

Tracing happens in the reader's process, compiling in a worker, to which the
function travels as StableHLO. The private parts of jax and jaxlib that this
needs (tested with 0.10.2) are used here and nowhere else. Floor 1.
"""

from __future__ import annotations

import functools
import itertools
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
_PASS_FILE = re.compile(
    r"module_(\d+)\..*?\.(\d{4})\.(.+?)\.after_(.+?)(?:\.before_.+)?$")


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
    options = _jit_of(fn)[1].compiler_options_kvs
    done = cache.cached(
        ("xla", target, text.steady(module.raw), module.origins, home_of(fn),
         options),
        lambda: worker.call(
            "xla", f"{__name__}:_compile", module.raw, target, file_of(fn),
            dict(options), environment=_environment(target)), fresh)
    return replace(done, rungs=front + done.rungs)


def lacking(target: str) -> Missing | None:
    """What this machine lacks of the compiler for ``target``, if anything."""
    if not host.version("jax"):
        return Missing("jax", "it compiles JAX functions",
                       "Run: pip install jax")
    if target in TPU_TOPOLOGIES and not host.version("libtpu"):
        return Missing("libtpu", f"it holds the compiler for {target}",
                       "Run: pip install libtpu (Linux x86-64 only)")
    if target not in GPUS:
        return None
    plugin = (host.version("jax-cuda13-plugin")
              or host.version("jax-cuda12-plugin"))
    if not plugin:
        return Missing("The CUDA plugin of jax",
                       f"it holds XLA's compiler for {target}",
                       "Run: pip install jax-cuda13-plugin (Linux only)")
    if plugin.startswith(_NEEDS_THE_CHIP):
        return Missing("A newer CUDA plugin of jax",
                       f"version {plugin} compiles for {target} only where "
                       "that chip is", "Run, except on Colab: pip install "
                       "--upgrade jax jax-cuda13-plugin")
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

    platform = ("cpu" if target == "cpu" else
                "cuda" if target in GPUS else "tpu")
    here, tool = file_of(fn), f"jax {jax.__version__}"
    clock = [time.perf_counter()]
    traced = _jitted(fn, donate).trace(*args)
    # Without colours: a page has its own.
    jaxpr = traced.jaxpr.pretty_print(use_color=False)
    clock.append(time.perf_counter())
    lowered = traced.lower(lowering_platforms=(platform,))
    stablehlo = lowered.as_text(debug_info=True)
    clock.append(time.perf_counter())
    module = lowered.as_text(dialect="hlo", debug_info=True)
    clock.append(time.perf_counter())
    seconds = [end - start for start, end in itertools.pairwise(clock)]
    return (
        *source(fn),
        Rung("jaxpr", jaxpr, "jaxpr", tool, seconds[0],
             _places(traced.jaxpr, here)),
        Rung("stablehlo", stablehlo, "mlir", tool, seconds[1],
             origins.mlir(stablehlo, here)),
        Rung("hlo", module, "hlo", tool, seconds[2],
             origins.hlo(module, here)))


def gradient(fn: Callable, numbers: Sequence[int] | None) -> Callable:
    """A function that returns fn's value and its gradients.

    With respect to the arguments ``numbers``, or to all that are not static.
    """
    jax = host.need("jax", "it takes the gradient")
    jnp = jax.numpy
    inner, options = _jit_of(fn)
    static = options.static_argnums

    @functools.wraps(inner)
    def with_gradient(*values: Any) -> Any:
        chosen = [n for n in range(len(values)) if n not in static
                  ] if numbers is None else numbers

        def of(*given: Any) -> Any:
            whole = {**dict(enumerate(values)),
                     **dict(zip(chosen, given, strict=True))}
            return inner(*whole.values())

        out, pull = jax.vjp(of, *(values[n] for n in chosen))
        return out, pull(jax.tree.map(jnp.ones_like, out))

    return jax.jit(
        with_gradient, static_argnums=static, keep_unused=options.keep_unused,
        donate_argnums=options.donate_argnums,
        compiler_options=dict(options.compiler_options_kvs))


def _jit_of(fn: Callable) -> tuple[Callable, Any]:
    """What the reader's own jit wraps and its options; else ``fn`` and none.

    Told by the type: grad, vmap and functools.wraps copy its attributes.
    """
    import jax

    own = fn if isinstance(fn, type(jax.jit(len))) else jax.jit(fn)
    return own._fun, own._jit_info


def _jitted(fn: Any, donate: tuple[int, ...]) -> Any:
    """A jit of ``fn`` that has traced nothing, with the reader's options.

    JAX keeps the trace of a function it has seen, though a helper or a value
    that the function uses may have changed.
    """
    from jax._src import pjit, util

    inner, options = _jit_of(fn)
    if donate:
        options = options._replace(donate_argnums=donate)

    @functools.wraps(inner, updated=())
    def anew(*args: Any) -> Any:
        return inner(*args)

    anew.__name__ = util.fun_name(inner)
    return pjit._cpp_pjit(anew, options)


def _places(jaxpr: Any, here: str) -> origins.Origins:
    """The origins of a jaxpr, of which JAX tells the innermost frame alone."""
    noted = jaxpr.pretty_print(use_color=False, source_info=True)
    return origins.jaxpr(re.sub(
        rf" # {re.escape(here)}:(\d+)\b.*", r" # \1", noted))


# In the worker: from StableHLO to machine code.

def _compile(module: str, target: str, here: str, options: dict[str, Any],
             ) -> Compiled:
    """Compile StableHLO text. Runs in the worker; called by ``compile``."""
    folder, llo = (Path(os.environ["COURSE_SCRATCH"], name)
                   for name in ("xla", "llo"))
    try:
        start = time.perf_counter()
        executable = _run_xla(module, _devices(target), {
            **options, "xla_dump_to": str(folder),
            "xla_dump_hlo_pass_re": ".*", "xla_dump_disable_metadata": True})
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


def _run_xla(module: str, devices: list, options: dict[str, Any]) -> Any:
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
    settings = compiler.get_compile_options(
        num_replicas=1, num_partitions=partitions,
        device_assignment=[[device.id for device in chosen]],
        backend=None, env_options_overrides=options)
    with mlir.make_ir_context():
        return compiler.backend_compile_and_load(
            chosen[0].client, ir.Module.parse(module),
            _jax.DeviceList(chosen), settings, [])


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
    module = executable.hlo_modules()[0].to_string()
    tool, lines, used = _tool(target), origins.hlo(module, here), {}
    if target == "cpu":
        code = _cpu_code(folder)
        kernels = hlo.kernels(module, generated={*re.findall(
            r'^define .*@"?([\w.-]+)"?\(', code[0].raw, re.M)})
    else:
        kernels = hlo.kernels(module)
    symbols = [_symbol(kernel.name) for kernel in kernels]
    if target in GPUS:
        code, used = _gpu_code(folder, target, symbols)
    elif target in TPU_TOPOLOGIES:
        code, used = _tpu_code(llo, tool), _tpu_slots(llo)
    kernels = tuple(replace(kernel, **used.get(symbol, {}))
                    for kernel, symbol in zip(kernels, symbols, strict=True))
    if calls := hlo.library_calls(module, kernels):
        code.append(Rung("library", calls, "hlo", tool, 0.0))

    # Code has no places of its own: where it names a kernel, the kernel's.
    rows = (re.match(r" +(?:ROOT )?%?([\w.-]+) = ", row)
            for row in module.splitlines())
    starts = {_symbol(row[1]): line for row, line in
              zip(rows, lines, strict=True) if row and line}
    made = {name: starts[name] for name in symbols if name in starts}
    rungs = [Rung("hlo-optimized", module, "hlo", tool, seconds, lines),
             *(replace(rung, origins=origins.named(rung.raw, made))
               for rung in code)]

    stats = executable.get_compiled_memory_stats()
    assigned, lives = ("".join(_read(folder, f"*{name}.txt")[:1])
                       for name in ("buffer-assignment", "live-range"))
    return Compiled(
        tuple(rungs), _passes(folder, module), kernels,
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


def _passes(folder: Path, module: str) -> tuple[Pass, ...]:
    """Every pass over ``module`` that XLA dumped, marked where it changed it.

    XLA may go on with a clone of the module, whose passes it numbers anew;
    modules of other names are single kernels'.
    """
    found = sorted(
        (int(match[1]), int(match[2]), match[3], match[4], file.read_text())
        for file in folder.glob("*.txt")
        if (match := _PASS_FILE.match(file.stem)))
    head, passes, before = module.partition(",")[0], [], ""
    for _, _, pipeline, name, made in found:
        if made.partition(",")[0] != head:
            continue
        after = text.canonical(made)
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
    """LLVM IR, PTX and SASS, and what each of ``names`` uses.

    Kernels stand in the order of ``names``: XLA's own, by threads, varies.
    """
    launched, dynamic = _launched(folder)
    order = [launched.get(name, name) for name in names]

    def place(code: str) -> tuple[int, str]:
        defined = re.findall(r"(?:\.entry |define [^@]*@)(\w+)", code)
        return min((order.index(name) for name in defined if name in order),
                   default=len(order)), code

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
    for kernel in used:  # ptxas knows of the static part alone
        used[kernel]["shared_bytes"] += dynamic.get(kernel, 0)
    return [*rungs, machine], {
        name: used[kernel] for name, kernel in zip(names, order, strict=True)
        if kernel in used}


def _launched(folder: Path) -> tuple[dict[str, str], dict[str, int]]:
    """The kernel of each operation that launches one (two may share it), and
    the bytes of shared memory that a launch of it asks for."""
    operations, kernels = ("".join(_read(folder, f"*thunk_{name}.txt"))
                           for name in ("metadata", "sequence"))
    rows = re.findall(r"^ *0*(\d+): k\w*Kernel +\[.*?\] (\w+) grid"
                      r"(?:.*shared_memory: (\d+))?", kernels, re.M)
    by_number = {number: kernel for number, kernel, _ in rows}
    found: dict[str, set[str]] = {}
    for name, number in re.findall(
            r'profile_annotation: "(.*)"\s+thunk_id: (\d+)', operations):
        if number in by_number:
            found.setdefault(_symbol(name), set()).add(by_number[number])
    return ({name: its.pop() for name, its in found.items() if len(its) == 1},
            {kernel: int(shared or 0) for _, kernel, shared in rows})


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
        files.sort(key=lambda file: (-file.stat().st_size,
                                     _program(file, label)))
        parts = [f"// {_program(file, label)}\n{file.read_text()}"
                 for file in files]
        if parts:
            rungs.append(Rung(name, "\n".join(parts), name, tool, 0.0))
    return rungs
