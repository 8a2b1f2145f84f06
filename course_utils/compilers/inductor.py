"""The worker's side of ``torch``: from a function to machine code.

It runs in a process of its own, where torch is made to believe in a chip that
is not here. With ``torch`` it holds every private name of PyTorch that the
ladder needs (2.9 to 2.13). Floor 1.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import itertools
import math
import operator
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cloudpickle
import torch
from torch._dynamo import guards
from torch._functorch import aot_autograd
from torch._inductor import compile_fx, config, cpp_builder, cpu_vec_isa
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.dependencies import MemoryDep
from torch._inductor.fx_passes import joint_graph
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.scheduler import Scheduler
from torch._inductor.utils import fresh_inductor_cache
from torch._subclasses import FakeTensorMode, fake_tensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from course_utils import chips, host
from course_utils.compilers.rung import Kernel, Rung
from course_utils.compilers.torch import told
from course_utils.compilers.xla import sass

Rungs = tuple[tuple[Rung, ...], tuple[Kernel, ...]]

_X86 = platform.machine() in ("x86_64", "AMD64")
_FILLS = ("copy_", "fill_", "zero_")  # they write without reading
_CPP = re.compile(r"(\w+) = async_compile\.cpp_pybinding\(\[.*?\], "
                  r"r'''(.*?)'''\)", re.S)
_LINE = re.compile(r"\n *# (File:|No stacktrace) .*")  # cells have none here
_TRITON = re.compile(r"async_compile\.triton\('(\w+)', ('''.*?''')", re.S)


def climb(packed: bytes, target: str, machine: bool) -> Rungs:
    """The rungs from fx down, to machine code if ``machine``; kernels."""
    start, lower, used = time.perf_counter(), (), {}
    with told():
        with _arrived(packed) as (fn, args):
            graph, inputs, *front = _captured(fn, args, start)
        with _pretending(target):
            if target != "cpu":
                inputs = _moved(graph, inputs)
            upper, kernels = _generated(graph, inputs)
            if machine:
                below = _assembly if target == "cpu" else _sass
                lower, used = below(upper[-1].raw)
    return (*front, *upper, *lower), tuple(
        replace(k, **used.get(k.name, {})) for k in kernels)


def differentiate(packed: bytes, wrt: Any, *unused: Any,
                  ) -> tuple[tuple[Rung, ...], dict[str, int]]:
    """AOTAutograd's joint, forward and backward graphs; bytes saved."""
    start, made, saved = time.perf_counter(), [], {}

    def cut(joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any,
            ) -> Any:
        halves = partition(joint, inputs, num_fwd_outputs=num_fwd_outputs,
                           **options)
        for name, graph in zip(("joint", "forward", "backward"),
                               (joint, *halves), strict=True):
            made.append(_rung(name, graph, "AOTAutograd", start))
        saved.update(_saved(halves[0], num_fwd_outputs))
        raise _Done

    partition = compile_fx.min_cut_rematerialization_partition
    with (told(), _arrived(packed) as (fn, args), _pretending("cpu"),
          torch.enable_grad(), contextlib.suppress(_Done), mock.patch.object(
              compile_fx, "min_cut_rematerialization_partition", cut)):
        _ask_gradients(fn, args, wrt)
        graph, inputs, *front = _captured(fn, args, start)
        compile_fx.compile_fx(graph, inputs)  # to the end: no backward
        depends = any(t.requires_grad for t in _tensors(fn(*args)))
        raise ValueError(
            "what depends on what wrt names is only views of arguments, and "
            "AOTAutograd makes no graphs where nothing is computed" if depends
            else "no result depends on what wrt names")
    return (*front, *made), saved


def _ask_gradients(fn: Any, args: tuple, wrt: Any) -> None:
    """Make ``wrt`` the leaves of autograd, and nothing else."""
    if isinstance(fn, torch.nn.Module):
        fn.requires_grad_(wrt in ("params", "all"))
    chosen = () if wrt == "params" else tree_leaves(
        args if wrt == "all" else [args[n] for n in wrt])
    for value in chosen:
        if isinstance(value, torch.Tensor) and (
                wrt != "all" or value.is_floating_point()):
            value.requires_grad_()


def _saved(forward: Any, results: int) -> dict[str, int]:
    """Bytes the forward graph keeps for the backward; of them, inputs."""
    *_, end = forward.graph.nodes
    given = {n.meta["val"].untyped_storage()._cdata
             for n in forward.graph.find_nodes(op="placeholder")
             if isinstance(n.meta.get("val"), torch.Tensor)}
    kept = [n.meta["val"] for n in end.args[0][results:]]
    return {"saved": _bytes(kept), "saved inputs": _bytes(
        [t for t in kept if t.untyped_storage()._cdata in given])}


def launches(packed: bytes, *unused: Any) -> tuple[Kernel, ...]:
    """What eager PyTorch launches, for any target."""
    found: list[Kernel | None] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (),
                               kwargs: Any = None) -> Any:
            out = op(*args, **(kwargs or {}))
            found.append(_launched(op, args, kwargs or {}, out))
            return out

    with told(), _arrived(packed) as (fn, args), Recorder():
        fn(*args)
    return tuple(filter(None, found))


@contextlib.contextmanager
def _arrived(packed: bytes) -> Iterator[Any]:
    """The function and its arguments, whose tensors have no data."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        yield cloudpickle.loads(packed)


class _Done(BaseException):
    """Leaves a compiler that has given what we came for."""


def _rung(name: str, made: Any, tool: str, start: float) -> Rung:
    """A rung of Python, from text or a graph, begun at ``start``."""
    if not isinstance(made, str):
        made = _LINE.sub("", made.print_readable(
            print_output=False, include_stride=True, include_device=True))
    release = torch.__version__.partition("+")[0]  # of any build
    return Rung(name, made, "python", f"{tool}, torch {release}",
                time.perf_counter() - start)


def _captured(fn: Any, args: tuple, start: float) -> list[Any]:
    """Dynamo's graph of ``fn``, whole or not at all, its inputs; rungs."""
    seen: list[Any] = []
    check = guards.CheckFunctionManager.__init__

    def backend(graph: Any, inputs: Any) -> Any:
        seen.extend((graph, inputs, _rung("fx", graph, "Dynamo", start)))
        return stop

    def stop(*unused: Any) -> Any:
        raise _Done

    def guarded(self: Any, *given: Any, **named: Any) -> None:
        check(self, *given, **named)
        seen.append(_rung("guards", _steady(str(self.guard_manager)),
                          "Dynamo", start))

    torch._dynamo.reset()
    with mock.patch.object(guards.CheckFunctionManager, "__init__", guarded):
        try:
            torch.compile(fn, backend=backend, fullgraph=True,
                          dynamic=False)(*args)
        except _Done:
            return seen
    raise ValueError("it has no operation on a tensor")


def _steady(guards: str) -> str:
    """Guards without paths, addresses and what our process is set to."""
    for pattern, replacement in (
            (r" *(, type=<[^>]*>)?(  # .*)?$", ""), (r", \d{9,}\)", ", ...)"),
            (r"DispatchKeySet\([^)]*\)", "DispatchKeySet(...)"),
            (r'"num_threads":\d+', '"num_threads":...')):
        guards = re.sub(pattern, replacement, guards, flags=re.M)
    return guards


@contextlib.contextmanager
def _pretending(target: str) -> Iterator[None]:
    """In it torch and Triton find one ``target``, and nothing in a cache."""
    # A GPU's constants would be folded by computing them, on the chip.
    settings = {"cpp.threads": 1, "cpp.simdlen": 256 if _X86 else None,
                "joint_graph_constant_folding": target == "cpu"}
    with (fresh_inductor_cache(), torch.no_grad(), config.patch(settings),
          mock.patch.object(aot_autograd, "AOT_COUNTER", itertools.count()),
          contextlib.ExitStack() as stack):
        for change in _pretence(target):
            stack.enter_context(mock.patch.object(*change, create=True))
        yield


def _pretence(target: str) -> list[tuple[Any, str, Any]]:
    """What is changed in torch and Triton for that."""
    if target == "cpu":
        # Left to itself, Inductor compiles programs for 3 s to find out.
        only = [cpu_vec_isa.VecAVX2()]
        return [(cpu_vec_isa, "valid_vec_isa_list", lambda: only)
                ] if _X86 else []
    import triton as package
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
        (torch._inductor.scheduler, "has_triton", lambda *_: True),
        (triton_helpers, "set_driver_to_gpu", lambda: None),
        (package.runtime.driver, "_active", driver),
        # Patterns are the same on any device, and traced with gradients,
        # which with shapes-only CUDA tensors would end the process.
        (joint_graph, "lazy_init", lambda *_: patterns(cpu))]


def _allow_cuda_views() -> None:
    """Let a torch built without CUDA slice shapes-only CUDA tensors.

    Slicing makes a device current: lend CUDA the CPU's guard, an empty one.
    """
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    with contextlib.suppress(OSError, ValueError):
        guards = (ctypes.c_void_p * 2).in_dll(
            ctypes.CDLL(str(library)),
            "_ZN3c104impl26device_guard_impl_registryE")
        guards[1] = guards[1] or guards[0]  # 1 is CUDA, 0 the CPU


def _moved(graph: Any, inputs: list[Any]) -> list[Any]:
    """Move ``graph`` from CPU to GPU; its inputs there, without gradients."""
    gpu = torch.device("cuda", 0)

    def there(value: Any) -> Any:
        return gpu if value in ("cpu", torch.device("cpu")) else value

    for node in graph.graph.nodes:
        node.args, node.kwargs = tree_map(there, (node.args, node.kwargs))
        if node.target in _device_constructors():
            node.kwargs = {**node.kwargs, "device": gpu}
    graph.recompile()
    with FakeTensorMode():
        return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype,
                                    device=gpu) for x in inputs]


def _generated(graph: Any, inputs: list[Any]) -> Rungs:
    """The aten and inductor rungs, and the kernels."""
    made: list[Any] = []
    seen: list[tuple[str, list[Any]]] = []  # kernel's name, what is in it
    start = time.perf_counter()

    def inner(module: Any, inputs: Any, **options: Any) -> Any:
        made.append(_rung("aten", module, "AOTAutograd", start))
        return compile_fx.compile_fx_inner(module, inputs, **options)

    def stop(self: Any) -> Any:
        made.append(_rung("inductor", self.codegen()[0].value, "Inductor",
                          start + made[0].seconds))
        made.extend(filter(None, (_kernel(self, *each) for each in seen)))
        raise _Done

    def watched(owner: Any, name: str) -> Any:
        original = getattr(owner, name)

        def call(self: Any, *given: Any) -> Any:  # source, nodes ... or node
            result = original(self, *given)
            seen.append((result or "", list(given[1]) if result
                         else [given[0]]))
            return result
        return mock.patch.object(owner, name, call)

    with (mock.patch.object(GraphLowering, "compile_to_module", stop),
          watched(Scheduler, "codegen_extern_call"),
          watched(CppScheduling, "define_kernel"),
          watched(TritonScheduling, "define_kernel"),
          contextlib.suppress(_Done)):
        compile_fx.compile_fx(graph, inputs, inner_compile=inner)
    return tuple(made[:2]), tuple(made[2:])


# Kernels: what each is made of, and what it moves.

def _kernel(graph: Any, name: str, nodes: list[Any]) -> Kernel | None:
    """What one scheduled piece of Inductor's ``graph`` does and moves."""
    nodes = [n for n in nodes if hasattr(n, "read_writes")]
    order = {node: at for at, node in enumerate(graph.module.graph.nodes)}
    origins = sorted({o for n in nodes for o in n.node.get_origins()
                      if o.op == "call_function"},
                     key=lambda o: order.get(o, 0))
    if not name:
        return _library(nodes[0].node, origins)
    writes = {dep for n in nodes for dep in n.read_writes.writes}
    within = {dep.name for dep in writes}
    # What is loaded; other dependencies may be there only for the order.
    reads = {dep for n in nodes for dep in n.read_writes.reads
             if isinstance(dep, MemoryDep) and dep.name not in within}
    gone = graph.removed_buffers | graph.inplaced_to_remove

    def moved(deps: set[Any]) -> int:
        sizes: dict[str, int] = {}
        for dep in deps:
            sizes[dep.name] = sizes.get(dep.name, 0) + dep.numbytes_hint()
        # A buffer read in two ways is still read once.
        return sum(min(size, int(graph.get_numel(name))
                       * graph.get_dtype(name).itemsize)
                   for name, size in sizes.items())

    return Kernel(name, "compiler", "Inductor", tuple(
        _op(o.target) for o in origins if o.target is not operator.getitem
        and not getattr(o.target, "is_view", False)),
        moved(reads), moved({dep for dep in writes if dep.name not in gone}))


def _op(op: Any) -> str:
    """"add" of aten.add.Tensor."""
    return getattr(op, "__name__", str(op)).partition(".")[0]


def _library(node: Any, origins: list[Any]) -> Kernel | None:
    """A routine Inductor calls; None for a check, or a result it picks."""
    origin = node.get_origin_node() or next(reversed(origins), None)
    if (origin is None or _op(origin.target) == "with_effects"
            or type(node).__name__ == "MultiOutput"):
        return None
    args, kwargs, out = tree_map_only(
        torch.fx.Node, lambda n: n.meta.get("val"),
        (origin.args, origin.kwargs, origin))
    kernel = _launched(origin.target, args, kwargs, out)
    blas = (kernel and kernel.name in ("mm", "addmm", "bmm", "baddbmm")
            and node.get_device().type == "cuda")
    return replace(kernel, who="cuBLAS") if blas else kernel


def _launched(op: Any, args: tuple, kwargs: dict[str, Any], out: Any,
              ) -> Kernel | None:
    """The kernel an op launches; None for views, checks, empty tensors."""
    name = _op(op)
    given, schema = _tensors((args, kwargs)), getattr(op, "_schema", None)
    places = {t.untyped_storage()._cdata for t in given}
    made = [t for t in _tensors(out)
            if t.untyped_storage()._cdata not in places]
    known = schema.arguments if schema else ()  # a higher-order op has none
    named = dict(zip((a.name for a in known), args, strict=False)) | kwargs
    written = made + _tensors([named.get(a.name) for a in known if a.is_write])
    if (not written or "empty" in name or name == "lift_fresh"
            or torch.Tag.inplace_view in getattr(op, "tags", ())):
        return None
    unread = _tensors([named.get(a.name) for a in known if a.is_out
                       or a.is_write and name in _FILLS])
    read = [t for t in given if not any(t is u for u in unread)]
    return Kernel(name, "library", "ATen", (name,), _bytes(read),
                  _bytes(written))


def _tensors(tree: Any) -> list[Any]:
    """The different tensors in nested arguments."""
    return list({id(x): x for x in tree_leaves(tree)
                 if isinstance(x, torch.Tensor)}.values())


def _bytes(tensors: list[Any]) -> int:
    """Bytes behind ``tensors``; a broadcast dimension is there once."""
    return sum(t.dtype.itemsize * math.prod(
        size for size, step in zip(t.shape, t.stride(), strict=True) if step)
        for t in tensors)


# Machine code: rungs, and what each kernel uses, by its name.

def _assembly(code: str) -> tuple[tuple[Rung, ...], dict[str, Any]]:
    """Machine code of each generated C++ kernel, from the built library."""
    start, parts = time.perf_counter(), []
    options = cpp_builder.CppTorchOptions(cpu_vec_isa.pick_vec_isa())
    with tempfile.TemporaryDirectory() as folder:
        for name, source in _CPP.findall(code):  # without Python's bindings
            file = Path(folder, f"{name}.cpp")
            file.write_text(source, encoding="utf-8")
            cpp_builder.CppBuilder(name, str(file), options, folder).build()
            parts.append(subprocess.run(
                ["objdump", "-d", "-j.text", "--no-show-raw-insn",
                 "--disassemble=kernel", f"{name}.so"], cwd=folder,
                capture_output=True, text=True, check=True).stdout)
    tool = subprocess.run([host.compiler(), "--version"], text=True,
                          capture_output=True).stdout.partition("\n")[0]
    return (Rung("assembly", "\n".join(parts), "asm", f"{tool}; objdump",
                 time.perf_counter() - start),)[:len(parts)], {}


def _sass(code: str) -> tuple[tuple[Rung, ...], dict[str, Any]]:
    """PTX and SASS of each generated Triton kernel, and what they use."""
    import triton as package

    start, kernels = time.perf_counter(), {}
    for name, source in _TRITON.findall(code):
        tuner = getattr(PyCodeCache.load(ast.literal_eval(source)), name)
        tuner.configs = tuner.configs[:1]
        tuner.precompile(warm_cache_only=True)
        kernels[name] = tuner.compile_results[0].kernel
    if not kernels:
        return (), {}
    ptx = [kernel.asm["ptx"] for kernel in kernels.values()]
    above = Rung("ptx", "\n".join(ptx), "ptx", f"Triton {package.__version__}",
                 time.perf_counter() - start)
    below, used = sass(ptx)
    for name, kernel in kernels.items():
        used[name]["shared_bytes"] = kernel.metadata.shared
    return (above, below), used
