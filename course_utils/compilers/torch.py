"""PyTorch's compilers: Dynamo, AOTAutograd and Inductor, for CPU and NVIDIA.

They run in a worker, on tensors that have a shape and no data, and so for
chips that are not here. Every private name of torch that the ladder needs
(2.9 to 2.13) is in this file. Floor 1.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import inspect
import io
import itertools
import linecache
import logging
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cloudpickle

from course_utils import chips, host
from course_utils.compilers import cache, triton, worker
from course_utils.compilers.rung import Kernel, Rung
from course_utils.host import Missing

TARGETS = ("cpu", "t4", "a100", "h100", "b200")
Rungs = tuple[tuple[Rung, ...], tuple[Kernel, ...]]

_X86 = platform.machine() in ("x86_64", "AMD64")
# One thread and AVX2: the same text on every x86-64 host.
_CONFIG = {
    "cpu": {"cpp.threads": 1, "cpp.cxx": (host.compiler(),), **(
        {"cpp.simdlen": 256, "cpp.vec_isa_ok": True, "cpp.march": "haswell"}
        if _X86 else {})},
    # Constants are folded by computing them, which takes the chip; and the
    # static launcher throws the PTX away.
    "gpu": {"joint_graph_constant_folding": False,
            "use_static_cuda_launcher": False}}
_ALWAYS = {"compile_threads": 1, "fx_graph_cache": False,
           "cpp_cache_precompile_headers": False}
_FILLS = ("copy_", "fill_", "zero_")  # they write without reading
_CPP = re.compile(r"(\w+) = async_compile\.cpp_pybinding\((\[.*?\]), "
                  r"r'''(.*?)'''\)", re.S)
_TRITON = re.compile(r"async_compile\.triton\('(\w+)', ('''.*?''')", re.S)


def works(target: str) -> str:
    """"" where this machine climbs all the way to ``target``, or why not."""
    try:
        _torch()
    except Missing as missing:
        return str(missing)
    return str(lacking(target) or "")


def lacking(target: str) -> Missing | None:
    """What keeps ``rungs`` from the machine code of ``target``, if anything.

    Without a C++ compiler the rungs above it still come.
    """
    if target != "cpu" and not importlib.util.find_spec("triton"):
        return Missing("triton", f"Inductor writes {target}'s kernels in it",
                       "On Linux: pip install triton")
    if target == "cpu" and not host.compiler():
        return Missing("A C++ compiler", "it turns Inductor's C++ into "
                       "machine code", "On Debian: apt install g++")
    if target == "cpu" and not shutil.which("objdump"):
        return Missing("objdump", "it disassembles the library that was built",
                       "On Debian: apt install binutils")
    return None


def rungs(fn: Callable, args: tuple, target: str, fresh: bool = False,
          ) -> Rungs:
    """Every representation of ``fn`` for ``target``, and its kernels.

    ``fn`` is a torch function or ``nn.Module``, compiled for inference; of
    tensors in ``args`` only shape, strides and dtype matter, so meta and fake
    ones do. Rungs: python (where there is a source), fx, aten, inductor, then
    assembly (cpu) or ptx and sass, where something was generated and nothing
    is ``lacking``. Kernels are in call order. Those of a GPU are compiled
    with the first configuration Inductor proposes: choosing among several
    takes timing, and so the chip; attention takes the path without flash
    attention for the same reason. Raises ValueError where ``fn`` does
    not become one graph, Missing without torch or triton.
    """
    _torch()
    if target not in TARGETS:
        raise ValueError(f"target={target!r} is not one Inductor compiles for "
                         f"here; it takes {', '.join(TARGETS)}.")
    absent = lacking(target)
    if absent and target != "cpu":
        raise absent
    code, packed = _code(fn), _packed(fn, args)
    # A worker for each target: torch remembers what its device can do.
    environment = {"ATEN_CPU_CAPABILITY": "avx2", "COURSE_TARGET": target,
                   "TRITON_DISABLE_LINE_INFO": "1"}  # it holds our paths
    found, kernels = cache.cached(
        ("torch", target, absent is None, packed),
        lambda: worker.call(
            "torch", f"{__name__}:_climb", packed,
            linecache.getlines(code.co_filename) if code else [], target,
            absent is None, environment=environment), fresh)
    try:
        source = inspect.getsource(code)
    except (OSError, TypeError):  # typed with exec, or written in C
        return found, kernels
    python = f"Python {platform.python_version()}"
    return (Rung("python", source, "python", python, 0.0), *found), kernels


def eager(fn: Callable, args: tuple) -> tuple[Kernel, ...]:
    """The ATen ops ``fn`` launches, one after another, without a compiler.

    Nothing is computed: arguments as for ``rungs``. Views launch nothing.
    """
    torch = _torch()
    from torch.utils._python_dispatch import TorchDispatchMode

    found: list[Kernel | None] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (),
                               kwargs: Any = None) -> Any:
            out = op(*args, **(kwargs or {}))
            found.append(_launched(op, (args, kwargs), out))
            return out

    packed = _packed(fn, args)
    log = logging.getLogger("torch._subclasses.fake_tensor")
    with (_shapes_only(), torch.no_grad(),
          mock.patch.object(log, "disabled", True)):
        fn, args = cloudpickle.loads(packed)
        try:
            with Recorder():
                fn(*args)
        except Exception as error:
            raise ValueError(_explained(fn, args, error)) from None
    return tuple(filter(None, found))


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise Missing("torch", "it traces and compiles PyTorch functions",
                      "pip install torch") from None
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
        raise Missing("torch 2.9 or newer", "the ladder reads Inductor's "
                      f"inside and this is {torch.__version__}",
                      "pip install 'torch>=2.9'")
    return torch


def _launched(op: Any, given: Any, out: Any) -> Kernel | None:
    """The kernel an ATen op launches; None for views and empty tensors."""
    name = op._schema.name.removeprefix("aten::")
    before, after = _tensors(given), _tensors(out)
    places = {t.untyped_storage()._cdata for t in before}
    if not op._schema.is_mutable:
        after = [t for t in after if t.untyped_storage()._cdata not in places]
        if not after or "empty" in name or name == "lift_fresh":
            return None
    read = before[1:] if name in _FILLS else before
    return Kernel(name, "library", "ATen", (name,), _bytes(read),
                  _bytes(after))


def _tensors(tree: Any) -> list[Any]:
    """The different tensors in nested arguments."""
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    return list({id(x): x for x in tree_leaves(tree)
                 if isinstance(x, Tensor)}.values())


def _bytes(tensors: list[Any]) -> int:
    """Bytes behind ``tensors``; a broadcast dimension is there once."""
    return sum(functools.reduce(
        lambda count, axis: count * (axis[0] if axis[1] else 1),
        zip(t.shape, t.stride(), strict=True), t.dtype.itemsize)
        for t in tensors)


def _explained(fn: Any, args: tuple, error: Exception) -> str:
    """One sentence for whatever a tracer or compiler threw."""
    told = f"{type(error).__name__}: {error}"
    patterns = (r"got \w+\(['\"](.*)['\"]\)", r"raised exception (.*)",
                r"Explanation: (.*)", r"\w+: (.*)")
    reason = next(found[1] for p in patterns if (found := re.search(p, told)))
    if re.search(r"[Dd]ata.?[Dd]ependent|_local_scalar_dense|nonzero", told):
        reason = ("its course depends on the values of a tensor, and only "
                  "shapes are known: use torch.where or torch.cond")
    shapes = ", ".join(
        f"{str(a.dtype).removeprefix('torch.')}{list(a.shape)}"
        if hasattr(a, "dtype") else repr(a) for a in args)
    name = getattr(fn, "__name__", type(fn).__name__)
    return f"{name}({shapes}) fails: {reason.strip(' .')}."


# How functions travel: by value, and of each tensor only the shape.

def _inner(fn: Any) -> Any:
    return _inner(fn.func) if isinstance(fn, functools.partial) else fn


def _code(fn: Any) -> Any:
    """The code object whose source is the function, if there is one."""
    fn = _inner(fn)
    return getattr(inspect.unwrap(getattr(type(fn), "forward", fn)),
                   "__code__", None)


def _packed(fn: Callable, args: tuple) -> bytes:
    import torch

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return super().reducer_override(value)
            return _tensor, (tuple(value.shape), value.stride(), value.dtype,
                             isinstance(value, torch.nn.Parameter))

    parts = map(type, fn.modules()) if isinstance(
        fn, torch.nn.Module) else [_inner(fn)]
    file = io.BytesIO()
    with contextlib.ExitStack() as stack:
        for name in {getattr(p, "__module__", "") for p in parts}:
            owner = sys.modules.get(name)
            path = getattr(owner, "__file__", None) or "-packages"
            if "-packages" not in path:  # the worker cannot import it
                cloudpickle.register_pickle_by_value(owner)
                stack.callback(cloudpickle.unregister_pickle_by_value, owner)
        try:
            Pickler(file).dump((fn, args))
        except Exception as error:
            raise ValueError("fn or its arguments cannot be sent to the "
                             f"compiler's process: {error}") from None
    return file.getvalue()


def _tensor(shape: Any, stride: Any, dtype: Any, parameter: bool) -> Any:
    import torch

    made = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    return torch.nn.Parameter(made, False) if parameter else made


def _shapes_only() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


# From here on: in the worker.

class _Done(BaseException):
    """Leaves a compiler that has given what we came for."""


@contextlib.contextmanager
def _patched(changes: list[tuple[Any, str, Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(
                mock.patch.object(owner, name, value, create=True))
        yield


def _climb(packed: bytes, lines: list[str], target: str, machine: bool,
           ) -> Rungs:
    torch = _torch()
    # cloudpickle calls the file of every function it carries by this name.
    linecache.cache["<dynamic-code>"] = (0, None, lines, "")
    start = time.perf_counter()
    with _shapes_only(), torch.no_grad():
        fn, args = cloudpickle.loads(packed)
        try:
            graph, inputs = _captured(torch, fn, args)
            fx = Rung("fx", _readable(graph), "python",
                      f"Dynamo, {_version(torch)}",
                      time.perf_counter() - start)
        except Exception as error:
            raise ValueError(_explained(fn, args, error)) from None
    try:
        rest, kernels = _lowered(torch, graph, inputs, target, machine)
    except worker.CompilerError:
        raise
    except Exception as error:
        raise ValueError(_explained(fn, args, error)) from None
    return (fx, *rest), kernels


def _version(torch: Any) -> str:
    return f"torch {torch.__version__.partition('+')[0]}"  # any build of it


def _readable(graph: Any) -> str:
    return graph.print_readable(print_output=False, include_stride=True,
                                include_device=True)


def _captured(torch: Any, fn: Any, args: tuple) -> tuple[Any, list[Any]]:
    """Dynamo's graph of ``fn``, whole or not at all, and its inputs."""
    seen: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.extend((graph, inputs))
        raise _Done

    torch._dynamo.reset()
    try:
        torch.compile(fn, backend=backend, fullgraph=True, dynamic=False)(
            *args)
    except _Done:
        return seen[0], seen[1]
    raise ValueError("it has no operation on a tensor")


def _lowered(torch: Any, graph: Any, inputs: list[Any], target: str,
             machine: bool) -> Rungs:
    """The rungs below fx, and the kernels."""
    from torch._functorch import aot_autograd
    from torch._inductor import config
    from torch._inductor.utils import fresh_inductor_cache

    known = config.get_config_copy()
    first = (aot_autograd, "AOT_COUNTER", itertools.count())
    wanted = _ALWAYS | _CONFIG["cpu" if target == "cpu" else "gpu"]
    with (tempfile.TemporaryDirectory() as folder,
          fresh_inductor_cache(dir=folder), torch.no_grad(),
          config.patch({k: v for k, v in wanted.items() if k in known}),
          _patched([first, *_pretence(torch, target)])):
        if target != "cpu":
            inputs = _moved(torch, graph, inputs)
        upper, kernels = _generated(torch, graph, inputs)
        if machine:
            more = _assembly if target == "cpu" else _sass
            lower, kernels = more(upper[-1].raw, kernels)
            return (*upper, *lower), kernels
        return upper, kernels


def _pretence(torch: Any, target: str) -> list[tuple[Any, str, Any]]:
    """Changes after which torch and Triton find one ``target`` here."""
    from torch._inductor import cpu_vec_isa

    if target == "cpu":
        # Left to itself, Inductor compiles programs for 3 s to find out.
        only = [cpu_vec_isa.VecAVX2()]
        return [(cpu_vec_isa, "valid_vec_isa_list", lambda: only)][:_X86]
    import triton as package
    from torch._inductor import scheduler
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.runtime import triton_helpers
    from torch._subclasses import fake_tensor
    from triton.backends.compiler import GPUTarget

    _allow_cuda_views()
    chip = chips.get(target)
    major, minor = map(int, chip.cc.split("."))
    properties = SimpleNamespace(
        name=chip.title, gcnArchName="", major=major, minor=minor,
        warp_size=32, multi_processor_count=chip.sm_count,
        total_memory=chip.hbm_bytes, L2_cache_size=chip.l2_bytes,
        regs_per_multiprocessor=chip.registers_per_sm,
        max_threads_per_multi_processor=chip.max_threads_per_sm,
        max_threads_per_block=1024, shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=chip.smem_per_block_bytes,
        shared_memory_per_multiprocessor=chip.smem_per_sm_bytes)
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 10 * major + minor, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0))
    cuda, cpu = torch.cuda, torch.device("cpu")
    patterns = joint_graph.lazy_init
    return [
        (fake_tensor, "init_gpu_context", lambda device: None),
        (fake_tensor.FakeTensorMode, "avoid_device_init", True),
        (cuda, "is_available", lambda: True),
        (cuda, "device_count", lambda: 1),
        (cuda, "current_device", lambda: 0),
        (cuda, "_lazy_init", lambda: None),
        (cuda, "_get_device_properties", lambda index: properties),
        (cuda, "_exchange_device", lambda index: 0),
        (cuda, "_maybe_exchange_device", lambda index: 0),
        (cuda, "get_rng_state", lambda *_: torch.get_rng_state()),
        (cuda, "set_rng_state", lambda *_: None),
        (scheduler, "has_triton", lambda *_: True),
        (triton_helpers, "set_driver_to_gpu", lambda: None),
        (package.runtime.driver, "_active", driver),
        # Patterns are the same on any device, and traced with gradients,
        # which with shapes-only CUDA tensors would end the process.
        (joint_graph, "lazy_init", lambda *_: patterns(cpu))]


def _allow_cuda_views() -> None:
    """Let a torch built without CUDA slice shapes-only CUDA tensors.

    Slicing first makes the tensor's device current. A CUDA build without a
    driver has a guard for this that does nothing; lend a CPU build its own.
    """
    import ctypes

    import torch

    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    with contextlib.suppress(OSError, ValueError):
        guards = (ctypes.c_void_p * 2).in_dll(
            ctypes.CDLL(str(library)),
            "_ZN3c104impl26device_guard_impl_registryE")
        guards[1] = guards[1] or guards[0]  # 1 is CUDA, 0 the CPU


def _moved(torch: Any, graph: Any, inputs: list[Any]) -> list[Any]:
    """Move ``graph`` from CPU to GPU; its inputs there, without gradients."""
    from torch.utils._device import _device_constructors
    from torch.utils._pytree import tree_map

    gpu = torch.device("cuda", 0)

    def there(value: Any) -> Any:
        return gpu if value in ("cpu", torch.device("cpu")) else value

    for node in graph.graph.nodes:
        node.args, node.kwargs = tree_map(there, (node.args, node.kwargs))
        if node.target in _device_constructors():
            node.kwargs = {**node.kwargs, "device": gpu}
    graph.recompile()
    with _shapes_only():
        return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype,
                                    device=gpu)
                if isinstance(x, torch.Tensor) else x for x in inputs]


def _generated(torch: Any, graph: Any, inputs: list[Any]) -> Rungs:
    """The aten and inductor rungs, and the kernels."""
    import torch._inductor.codegen.triton as gpu
    from torch._inductor import compile_fx, scheduler
    from torch._inductor import graph as lowering
    from torch._inductor.codegen.cpp import CppScheduling

    made: list[Any] = []
    seen: list[tuple[str, list[Any]]] = []
    start = time.perf_counter()

    def add(name: str, text: str, tool: str) -> None:
        spent = time.perf_counter() - start - sum(r.seconds for r in made)
        made.append(Rung(name, text, "python", f"{tool}, {_version(torch)}",
                         spent))

    def inner(module: Any, inputs: Any, **options: Any) -> Any:
        add("aten", _readable(module), "AOTAutograd")
        return compile_fx.compile_fx_inner(module, inputs, **options)

    def stop(self: Any) -> Any:
        add("inductor", self.codegen()[0].value, "Inductor")
        made.extend(filter(None, (_kernel(self, *each) for each in seen)))
        raise _Done

    def recorded(owner: Any) -> tuple[Any, str, Callable]:
        define = owner.define_kernel

        def wrapped(self: Any, source: str, nodes: Any, *rest: Any) -> str:
            name = define(self, source, nodes, *rest)
            seen.append((name, list(nodes)))
            return name
        return owner, "define_kernel", wrapped

    call = scheduler.Scheduler.codegen_extern_call

    def extern(self: Any, node: Any) -> None:
        seen.append(("", [node]))
        call(self, node)

    with contextlib.suppress(_Done), _patched([
            (lowering.GraphLowering, "compile_to_module", stop),
            (scheduler.Scheduler, "codegen_extern_call", extern),
            recorded(CppScheduling), recorded(gpu.TritonScheduling)]):
        compile_fx.compile_fx(graph, inputs, inner_compile=inner)
    return tuple(made[:2]), tuple(made[2:])


def _kernel(graph: Any, name: str, nodes: list[Any]) -> Kernel | None:
    """What one scheduled piece of Inductor's ``graph`` does and moves."""
    nodes = [n for n in nodes if hasattr(n, "read_writes")]
    order = {node: at for at, node in enumerate(graph.module.graph.nodes)}
    origins = sorted({o for n in nodes for o in n.node.get_origins()
                      if o.op == "call_function"},
                     key=lambda o: order.get(o, 0))
    if not name:
        return _library(nodes[0].node, origins)
    reads = set().union(*(n.read_writes.reads for n in nodes))
    writes = set().union(*(n.read_writes.writes for n in nodes))
    gone = graph.removed_buffers | graph.inplaced_to_remove

    def moved(deps: set[Any], without: Any) -> int:
        sizes: dict[str, int] = {}
        for dep in deps:
            if type(dep).__name__ != "WeakDep" and dep.name not in without:
                sizes[dep.name] = sizes.get(dep.name, 0) + dep.numbytes_hint()
        # A buffer read in two ways is still read once.
        return sum(min(size, int(graph.get_numel(name))
                       * graph.get_dtype(name).itemsize)
                   for name, size in sizes.items())

    language = "C++" if name.startswith("cpp") else "Triton"
    return Kernel(name, "compiler", f"Inductor ({language})",
                  tuple(_op(o) for o in origins
                        if not getattr(o.target, "is_view", False)),
                  moved(reads, {d.name for d in writes}), moved(writes, gone))


def _op(node: Any) -> str:
    """"add" of a node that calls aten.add.Tensor."""
    return (str(node.target).split(".") + [str(node.target)])[1]


def _library(node: Any, origins: list[Any]) -> Kernel | None:
    """A routine Inductor calls; None where it only picks a result of one."""
    if type(node).__name__ == "MultiOutput":
        return None
    origin = node.get_origin_node() or origins[-1]
    op, routine = _op(origin), str(node.python_kernel_name)
    if "mkldnn" in routine or "onednn" in routine:
        who = "oneDNN (mkldnn)"
    elif op in ("mm", "addmm", "bmm", "baddbmm"):
        on_cpu = node.get_device().type == "cpu"
        who = "ATen" if on_cpu else "cuBLAS"
    else:
        who = f"ATen {op}"
    given = [n.meta.get("val") for n in origin.all_input_nodes]
    return Kernel(op, "library", who, (op,), _bytes(_tensors(given)),
                  _bytes(_tensors(origin.meta["val"])))


def _assembly(code: str, kernels: tuple[Kernel, ...]) -> Rungs:
    """Machine code of each generated C++ kernel, from the built library."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache as build

    start, parts = time.perf_counter(), []
    for name, types, source in _CPP.findall(code):
        try:
            made = build.load_pybinding(ast.literal_eval(types), source)
        except Exception as error:
            raise worker.CompilerError(f"{host.compiler()} refuses Inductor's "
                                       f"C++: {str(error)[-500:]}") from None
        library = Path(made.__self__.__file__)
        shutil.copy(library, library.with_name(name))
        parts.append(subprocess.run(
            ["objdump", "-d", "-j.text", "--no-show-raw-insn",
             "--disassemble=kernel", name], cwd=library.parent, check=True,
            capture_output=True, text=True).stdout)
    tool = subprocess.run([host.compiler(), "--version"], text=True,
                          capture_output=True).stdout.partition("\n")[0]
    return (Rung("assembly", "\n".join(parts), "asm", f"{tool}; objdump",
                 time.perf_counter() - start),)[:len(parts)], kernels


def _sass(code: str, kernels: tuple[Kernel, ...]) -> Rungs:
    """PTX and SASS of each generated Triton kernel, and what they use."""
    import triton as package
    from torch._inductor.codecache import PyCodeCache

    start, ptx, made, used = time.perf_counter(), [], [], {}
    for name, source in _TRITON.findall(code):
        tuner = getattr(PyCodeCache.load(ast.literal_eval(source)), name)
        tuner.configs = tuner.configs[:1]
        tuner.precompile(warm_cache_only=True)
        kernel = tuner.compile_results[0].kernel
        ptx.append(kernel.asm["ptx"])
        arch = re.search(r"\.target (sm_\w+)", ptx[-1])[1]
        made.append(triton.assemble(ptx[-1], arch))
        used[name] = {"registers": made[-1].registers,
                      "spills": made[-1].spills,
                      "shared_bytes": kernel.metadata.shared}
    if not made:
        return (), kernels
    spent = time.perf_counter() - start
    return (Rung("ptx", "\n".join(ptx), "ptx",
                 f"Triton {package.__version__}", spent),
            Rung("sass", "\n".join(m.sass for m in made), "sass",
                 made[0].tool, 0.0)), tuple(
        replace(k, **used.get(k.name, {})) for k in kernels)
