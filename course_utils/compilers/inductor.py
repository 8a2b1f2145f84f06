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
import os
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
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx, config, cpp_builder, cpu_vec_isa
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import joint_graph
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.scheduler import Scheduler
from torch._inductor.utils import fresh_inductor_cache
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode, fake_tensor
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.traceback import preserve_node_meta
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from course_utils import chips, host
from course_utils.compilers import attention, moved
from course_utils.compilers import origins as links
from course_utils.compilers.rung import Compiled, Kernel, Rung, file_of
from course_utils.compilers.torch import told
from course_utils.compilers.xla import sass

_X86 = platform.machine() in ("x86_64", "AMD64")
# Each device decomposes these in its own way.
_BY_DEVICE = ("mm", "addmm", "bmm", "convolution_backward")
_CPP = re.compile(r"(\w+) = async_compile\.cpp_pybinding\(\[.*?\], "
                  r"r?'''(.*?)'''\)", re.S)
_INCLUDE = re.compile(r"^\s*#include.*", re.M)
_LINE = re.compile(r"\n *# (File:|No stacktrace) .*")  # cells have none here
_NAMED = re.compile(  # in Inductor's code a library's result, or a kernel
    r"\bout=(\w+)|\b(\w+) = \S+\.\S+\(|\b((?:cpp|triton)_\w+)")
_TRITON = re.compile(r"async_compile\.triton\('(\w+)', ('''.*?''')", re.S)


def climb(packed: bytes, target: str, machine: bool, wrt: Any,
          dtype: Any, lower: Any) -> Compiled:
    """The rungs from fx down, to machine code if ``machine``, and kernels.

    With ``wrt`` those of a training step: AOTAutograd's joint graph, the two
    halves it is cut into, and what Inductor makes of each; bytes saved.
    """
    start, saved, codes, kernels = time.perf_counter(), {}, {}, []
    places: dict[str, int] = {}
    with told(), _default(dtype):
        with (_arrived(packed) as (fn, args),
              torch.set_grad_enabled(wrt is not None)):
            file = file_of(fn)
            if wrt is not None:
                _ask_gradients(fn, args, wrt)
            graph, inputs, *rungs = _captured(
                _within(fn, lower), args, file, start)
            if wrt is None:
                parts = {"": graph}
            else:
                parts, made, saved = _cut(graph, inputs, target, file, start)
                rungs += made
                if not parts:
                    raise ValueError(
                        "no result is computed from what wrt names; of "
                        "constants and views AOTAutograd makes no graphs")
        with _pretending(target):
            for half, part in parts.items():
                part, inputs = _placed(half, part, inputs, target)
                made, found = _generated(half, part, inputs, file)
                rungs += made
                prefix = f"{half}/" if half else ""
                codes[prefix] = "".join(rung.raw for rung in made)
                begun = prefix.replace("/", "_") if target == "cpu" else ""
                for name, line in _begun(made[-1]).items():
                    name = begun + name  # both halves may have such a one
                    places[name] = line * (places.get(name, line) == line)
                kernels += [replace(k, name=prefix + k.name) for k in found]
            lower, used = [], {}
            if machine:
                below = _assembly if target == "cpu" else _sass
                lower, used = below(codes)
                lower = [replace(rung, origins=links.named(rung.raw, places))
                         for rung in lower]
    return Compiled((*rungs, *lower), kernels=tuple(
        replace(k, **used.get(k.name, {})) for k in kernels), memory=saved)


def _cut(graph: Any, inputs: list[Any], target: str, file: str, start: float,
         ) -> tuple[dict[str, Any], list[Rung], dict[str, int]]:
    """The halves of the joint graph, the rungs of all three, bytes saved.

    Nothing where there is no gradient. All is traced on the CPU, since
    shapes-only CUDA tensors that need gradients would end the process.
    """
    parts, rungs, saved = {}, [], {}

    def cut(joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any,
            ) -> Any:
        halves = partition(joint, inputs, num_fwd_outputs=num_fwd_outputs,
                           **options)
        parts.update(zip(("forward", "backward"), halves, strict=True))
        rungs.extend(_graph(name, graph, "AOTAutograd", file, start)
                     for name, graph in {"joint": joint, **parts}.items())
        saved.update(_saved(halves[0], num_fwd_outputs))
        raise _Done

    partition = compile_fx.min_cut_rematerialization_partition
    table = select_decomp_table()
    if target != "cpu":
        table = {op: made for op, made in table.items()
                 if moved.op_name(op) not in _BY_DEVICE}
    with (_pretending(target), config.patch(joint_graph_constant_folding=True),
          torch.enable_grad(), contextlib.suppress(_Done),
          mock.patch.object(
              compile_fx, "min_cut_rematerialization_partition", cut)):
        compile_fx.compile_fx(graph, inputs, _stop, decompositions=table)
    return parts, rungs, saved


def _ask_gradients(fn: Any, args: tuple, wrt: Any) -> None:
    """Make ``wrt`` the leaves of autograd, and nothing else."""
    module = getattr(fn, "func", getattr(fn, "__self__", fn))  # maybe bound
    if isinstance(module, torch.nn.Module):
        for p in module.parameters():
            p.requires_grad_(wrt in ("params", "all") and p.trained)
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
    return {"saved": moved.bytes_of(kept), "saved inputs": moved.bytes_of(
        [t for t in kept if t.untyped_storage()._cdata in given])}


def launches(packed: bytes, *given: Any) -> tuple[Kernel, ...]:
    """What eager PyTorch launches, for any target."""
    *_, dtype, lower = given
    found: list[Kernel | None] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (),
                               kwargs: Any = None) -> Any:
            out = op(*args, **(kwargs or {}))
            found.append(moved.launched(op, args, kwargs or {}, out))
            return out

    with (told(), _default(dtype), _arrived(packed) as (fn, args),
          Recorder()):
        _within(fn, lower)(*args)
    return tuple(filter(None, found))


@contextlib.contextmanager
def _default(dtype: Any) -> Iterator[None]:
    """In it tensors that are given no dtype have the reader's."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _within(fn: Any, lower: Any) -> Any:
    """``fn`` within the reader's autocast to ``lower``, if there is one."""
    def called(*args: Any) -> Any:
        with torch.autocast("cpu", lower):
            return fn(*args)
    return called if lower else fn


@contextlib.contextmanager
def _arrived(packed: bytes) -> Iterator[Any]:
    """The function and its arguments, whose tensors have no data."""
    layers = torch._C._functorch
    while layers.peek_interpreter_stack():  # what a failed trace left
        layers.pop_dynamic_layer_stack()
    with _without_data(), torch.no_grad():
        yield cloudpickle.loads(packed)


def _without_data() -> FakeTensorMode:
    """In it tensors have a shape; no shape may depend on their values."""
    shapes = ShapeEnv(allow_scalar_outputs=False,
                      allow_dynamic_output_shape_ops=False)
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes,
                          static_shapes=True)


class _Done(BaseException):
    """Leaves a compiler that has given what we came for."""


def _stop(*unused: Any, **options: Any) -> Any:
    raise _Done


def _rung(name: str, made: str, tool: str, start: float,
          origins: tuple[int, ...] = ()) -> Rung:
    """A rung of Python, begun at ``start``."""
    release = torch.__version__.partition("+")[0]  # of any build
    return Rung(name, made, "python", f"{tool}, torch {release}",
                time.perf_counter() - start, origins)


def _graph(name: str, graph: Any, tool: str, file: str, start: float) -> Rung:
    """The rung of a graph."""
    text = _LINE.sub("", graph.print_readable(
        print_output=False, include_stride=True, include_device=True))
    parts, lines, numbers = _printed(graph), {}, []
    for row in text.splitlines():
        if re.match(" *class ", row):
            lines = {n.name: _line(n, file) for n in next(parts).graph.nodes}
        node = re.match(r" *(\w*)(: \"| = )?", row)
        numbers.append(lines.get(node[1], 0) if node[2] else 0)
    return _rung(name, text, tool, start, tuple(numbers))


def _printed(graph: Any) -> Iterator[Any]:
    """A graph and those of its branches and bodies, as they are printed."""
    yield graph
    for part in graph.children():
        if isinstance(part, torch.fx.GraphModule):
            yield from _printed(part)


def _line(node: Any, file: str) -> int:
    """The line of ``file`` that caused a node of a graph, or 0."""
    frames = re.findall(r'File "(.*?)", line (\d+)',
                        node.meta.get("stack_trace") or "")
    return max(0, links.first(reversed(frames), file))


def _captured(fn: Any, args: tuple, file: str, start: float) -> list[Any]:
    """Dynamo's graph of ``fn``, whole or not at all, its inputs; rungs."""
    seen: list[Any] = []
    check = guards.CheckFunctionManager.__init__

    def backend(graph: Any, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            value = node.meta.get("example_value")
            if str(getattr(value, "device", "")).startswith("cuda"):
                # A build of torch without CUDA has stopped here already.
                raise ValueError("a graph with CUDA, from user code:"
                                 f"{node.meta.get('stack_trace')}")
        seen.extend((graph, inputs,
                     _graph("fx", graph, "Dynamo", file, start)))
        return _stop

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


def _steady(text: str) -> str:
    """Guards without paths, addresses and what our process is set to."""
    for pattern, replacement in (
            (r" *(, type=<[^>]*>)?(  # .*)?$", ""), (r", \d{9,}\)", ", ...)"),
            (r"DispatchKeySet\([^)]*\)", "DispatchKeySet(...)"),
            (r'"num_threads":\d+', '"num_threads":...')):
        text = re.sub(pattern, replacement, text, flags=re.M)
    return text


@contextlib.contextmanager
def _pretending(target: str) -> Iterator[None]:
    """In it torch and Triton find one ``target``, and nothing in a cache."""
    # A GPU's constants would be folded by computing them, on the chip.
    settings = {"cpp.threads": 1, "cpp.simdlen": 256 if _X86 else None,
                "joint_graph_constant_folding": target == "cpu"}
    with (fresh_inductor_cache(dir=os.environ.get("COURSE_SCRATCH")),
          torch.no_grad(), config.patch(settings),
          mock.patch.object(aot_autograd, "AOT_COUNTER", itertools.count()),
          contextlib.ExitStack() as stack):
        for change in _pretence(target):
            stack.enter_context(mock.patch.object(*change, create=True))
        if target != "cpu":
            major = int(chips.get(target).cc.partition(".")[0])
            stack.enter_context(attention.fused(major))
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

    def on_the_cpu(*device: Any) -> None:
        # Patterns are the same on any device, and traced with gradients,
        # which with shapes-only CUDA tensors would end the process.
        with mock.patch.object(cuda, "is_available", lambda: False):
            patterns(*(cpu for _ in device))  # torch 2.9 is given none

    return [
        (fake_tensor, "init_gpu_context", lambda device: None),
        (FakeTensorMode, "avoid_device_init", True),
        (proxy_tensor, "CONSTANT_NUMEL_LIMIT", 0),  # compute with none
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
        (GraphLowering, "constant_name", lambda self, name, device: name),
        (package.runtime.driver, "_active", driver),
        (joint_graph, "lazy_init", on_the_cpu)]


def _allow_cuda_views() -> None:
    """Let torch slice shapes-only CUDA tensors without a driver.

    Slicing makes a device current: lend CUDA the CPU's guard, an empty one.
    """
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    with contextlib.suppress(OSError, ValueError):
        registry = (ctypes.c_void_p * 2).in_dll(
            ctypes.CDLL(str(library)),
            "_ZN3c104impl26device_guard_impl_registryE")
        registry[1] = registry[0]  # 1 is CUDA, 0 the CPU


def _moved(graph: Any, inputs: list[Any]) -> list[Any]:
    """Move ``graph`` from CPU to GPU; its inputs there, without gradients."""
    gpu = torch.device("cuda", 0)

    def there(value: Any) -> Any:
        return ("cuda" if value == "cpu" else
                gpu if value == torch.device("cpu") else value)

    for part in graph.modules():  # branches and checkpoints are graphs too
        if not isinstance(part, torch.fx.GraphModule):
            continue
        for node in part.graph.nodes:
            node.args, node.kwargs = tree_map(there, (node.args, node.kwargs))
            if node.target in _device_constructors():
                node.kwargs = {**node.kwargs, "device": gpu}
            elif moved.op_name(node.target) == "lift_fresh_copy":
                # A constant, which is made on the CPU.
                with part.graph.inserting_after(node):
                    made = part.graph.call_function(
                        torch.ops.aten._to_copy.default, (node,),
                        {"device": gpu})
                made.meta = dict(node.meta)
                node.replace_all_uses_with(made)
                made.args = (node,)
        part.recompile()
    with _without_data():
        return tree_map_only(torch.Tensor, lambda x: torch.empty_strided(
            x.shape, x.stride(), dtype=x.dtype, device=gpu), inputs)


def _placed(half: str, graph: Any, inputs: list[Any], target: str,
            ) -> tuple[Any, list[Any]]:
    """A graph traced on the CPU, and its inputs, as they are on ``target``."""
    if half:
        inputs = [n.meta["val"] for n in graph.graph.find_nodes(
            op="placeholder")]
    if target == "cpu":
        return graph, inputs
    if any("autograd_grad" in str(n.target) for n in graph.graph.nodes):
        graph = _traced(graph, inputs, {})  # while it is on the CPU: see _cut
    inputs = _moved(graph, inputs)
    if half:  # nothing traces it again
        graph = _traced(graph, inputs, {
            op: made for op, made in select_decomp_table().items()
            if moved.op_name(op) in (*_BY_DEVICE, "_to_copy")})
    return graph, inputs


def _traced(graph: Any, inputs: list[Any], table: dict[Any, Any]) -> Any:
    """The graph as these inputs make it, decomposed by ``table``."""
    names = [n.name for n in graph.graph.find_nodes(op="placeholder")]
    # Kernels are named after the ops that were there before any decomposing:
    # the tracer must not put what it meets in their place.
    with (detect_fake_mode(inputs), preserve_node_meta(),
          mock.patch.object(proxy_tensor, "set_original_aten_op",
                            contextlib.nullcontext)):
        made = proxy_tensor.make_fx(torch.fx.Interpreter(graph).run, table)(
            *inputs)
    for node, name in zip(made.graph.find_nodes(op="placeholder"), names,
                          strict=True):
        node._rename(name)
        node.target = name
    return made


def _generated(half: str, graph: Any, inputs: list[Any], file: str,
               ) -> tuple[list[Rung], list[Kernel]]:
    """Inductor's rung, of an inference aten's too, and the kernels."""
    rungs: list[Rung] = []
    kernels: list[Kernel | None] = []
    pieces: list[tuple[str, list[Any], Any]] = []  # name, nodes, their graph
    start = time.perf_counter()

    def inner(module: Any, inputs: Any, **options: Any) -> Any:
        rungs.append(_graph("aten", module, "AOTAutograd", file, start))
        return compile_fx.compile_fx_inner(module, inputs, **options)

    def stop(self: Any) -> Any:
        code, lines = self.codegen()[0].value, {}
        for name, nodes, graph in pieces:
            nodes = [n for n in nodes if hasattr(n, "read_writes")]
            made_of = moved.made_of(graph, nodes)
            with V.set_graph_handler(graph):
                kernels.append(moved.kernel(graph, name, nodes, made_of))
            called = lines.setdefault(name or nodes[0].node.get_name(), {})
            called.setdefault(graph.name, []).append(next(filter(None, (
                _line(node, file) for node in reversed(made_of))), 0))
        rungs.append(_rung("-".join(filter(None, ("inductor", half))), code,
                           "Inductor", start, _caused(code, lines)))
        raise _Done

    def watched(owner: Any, method: str) -> Any:
        original = getattr(owner, method)

        def call(self: Any, first: Any, *rest: Any) -> Any:
            made = original(self, first, *rest)
            # A kernel is defined by its source and nodes, and gets a name; a
            # library's call is of one node.
            name, nodes = (made, rest[0]) if made else ("", [first])
            pieces.append((name, list(nodes), V.graph))
            return made
        return mock.patch.object(owner, method, call)

    with (mock.patch.object(GraphLowering, "compile_to_module", stop),
          watched(Scheduler, "codegen_extern_call"),
          watched(CppScheduling, "define_kernel"),
          watched(TritonScheduling, "define_kernel"),
          contextlib.suppress(_Done)):
        if half:
            *_, end = graph.graph.nodes
            # As compile_fx would: these leave with the strides they have.
            end.meta["user_visible_output_idxs"] = [
                at for at, node in enumerate(end.args[0]) if node is not None]
            compile_fx.compile_fx_inner(graph, inputs,
                                        is_backward=half == "backward")
        else:
            compile_fx.compile_fx(graph, inputs, inner)
    return rungs, list(filter(None, kernels))


def _caused(code: str, lines: dict[str, dict[Any, list[int]]],
            ) -> tuple[int, ...]:
    """For each line of Inductor's code that of what it makes, or 0.

    ``lines`` has for a kernel, or a library's result, the line of each call,
    by graph: the whole is None, a branch or a body a function of its name.
    """
    numbers, within, graph = [], None, None
    parts = {graph for calls in lines.values() for graph in calls}
    for row in code.splitlines():
        names = map("".join, _NAMED.findall(row))
        calls = next((lines[name] for name in names if name in lines), {})
        if "= async_compile." in row:  # the kernel's source follows
            every = {line for called in calls.values() for line in called}
            within = every.pop() if len(every) == 1 else 0
        elif row.startswith("'''"):
            within = None
        elif within is None and re.match("def |class ", row):
            name = re.split(r"\W", row)[1]
            graph = name if name in parts else None
        numbers.append(within if within is not None else
                       calls[graph].pop(0) if calls.get(graph) else 0)
    return tuple(numbers)


def _begun(rung: Rung) -> dict[str, int]:
    """The line of each kernel whose source is in Inductor's ``rung``."""
    rows = zip(rung.raw.splitlines(), rung.origins, strict=True)
    return {row.partition(" = ")[0]: line for row, line in rows
            if "= async_compile." in row}


# Machine code: rungs, and what each kernel uses, by its name.

def _assembly(codes: dict[str, str]) -> tuple[list[Rung], dict[str, Any]]:
    """Machine code of each generated C++ kernel, from the built library."""
    start, found, headers = time.perf_counter(), {}, {}
    for half, code in codes.items():
        for name, source in _CPP.findall(code):
            name = half.replace("/", "_") + name
            headers |= dict.fromkeys(_INCLUDE.findall(source))
            body = re.sub(r"\bkernel(?=\()", name, source, count=1)
            found[name] = (f"namespace of_{name} {{\n"
                           f"{_INCLUDE.sub('', body)}\n}}")
    if not found:
        return [], {}
    options = cpp_builder.CppTorchOptions(cpu_vec_isa.pick_vec_isa())
    with tempfile.TemporaryDirectory() as folder:
        # All in one file: most of the work is to read torch's headers.
        file = Path(folder, "kernels.cpp")
        file.write_text("\n".join((*headers, *found.values())),
                        encoding="utf-8")
        cpp_builder.CppBuilder("kernels", str(file), options, folder).build()
        listing = subprocess.run(
            ["objdump", "-d", "--no-show-raw-insn", "kernels.so"],
            cwd=folder, capture_output=True, text=True, check=True).stdout
    blocks = {name: block for block, name in re.findall(
        r"^([0-9a-f]+ <(\w+)>:\n(?:.+\n)*)", listing, re.M)}
    tool = subprocess.run([host.compiler(), "--version"], text=True,
                          capture_output=True).stdout.partition("\n")[0]
    return [Rung("assembly", "\n".join(blocks[name] for name in found), "asm",
                 f"{tool}; objdump", time.perf_counter() - start)], {}


def _sass(codes: dict[str, str]) -> tuple[list[Rung], dict[str, Any]]:
    """PTX and SASS of each generated Triton kernel, and what they use."""
    import triton as package

    start, ptx, below, used = time.perf_counter(), [], [], {}
    for half, code in codes.items():
        kernels = {}
        for name, source in _TRITON.findall(code):
            tuner = getattr(PyCodeCache.load(ast.literal_eval(source)), name)
            tuner.configs = tuner.configs[:1]
            tuner.precompile(warm_cache_only=True)
            kernels[name] = tuner.compile_results[0].kernel
        if kernels:
            ptx += [kernel.asm["ptx"] for kernel in kernels.values()]
            rung, found = sass(ptx[-len(kernels):])
            below.append(rung)
            for name, kernel in kernels.items():
                used[half + name] = {**found[name],
                                     "shared_bytes": kernel.metadata.shared}
    if not ptx:
        return [], {}
    taken = sum(rung.seconds for rung in below)
    return [Rung("ptx", "\n".join(ptx), "ptx", f"Triton {package.__version__}",
                 time.perf_counter() - start - taken),
            replace(below[0], raw="\n".join(rung.raw for rung in below),
                    seconds=taken)], used
