"""What Inductor's kernels and ATen's ops do, and the bytes they move.

With ``inductor`` it runs in a process of its own, on tensors without data.
Floor 1.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from dataclasses import replace
from typing import Any

import torch
from torch._inductor.dependencies import MemoryDep, StarDep
from torch._inductor.ir import MultiOutput
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from course_utils.compilers.rung import Kernel

_WHO = {  # whom ATen calls on a GPU
    r"(add|b|baddb|addb|_int_|_scaled_)?mm|linalg_solve_triangular|"
    r"triangular_solve": "cuBLAS",
    r"convolution(_backward)?|\w*cudnn\w*": "cuDNN", r"_fft_\w+": "cuFFT",
    r"_?linalg_(cholesky|eigh|inv|ldl|lu|qr|solve|svd)\w*|cholesky_\w+|"
    r"geqrf|ormqr": "cuSOLVER"}
_FILLS = ("copy_", "fill_", "zero_", "index_copy_", "index_fill_",
          "index_put_", "put_", "scatter_", "bernoulli_", "uniform_",
          "normal_", "exponential_", "random_")  # they write without reading
# Of their first tensor they read or, in place, write what an index names.
_INDEXED = re.compile(
    r"aten\.(_?embedding(_bag|_bag_forward_only)?|gather|index(_select)?|"
    r"nll_loss\w*_forward|take|(index_\w+|put|scatter\w*)_)\.")


def made_of(graph: Any, nodes: list[Any]) -> list[Any]:
    """The nodes of this graph that a scheduled piece does, in order."""
    return sorted({o for n in nodes for o in n.node.get_origins()
                   if o.op == "call_function"
                   and o.graph is graph.module.graph})


def kernel(graph: Any, name: str, nodes: list[Any], origins: list[Any],
           ) -> Kernel | None:
    """What one scheduled piece of Inductor's ``graph`` does and moves."""
    if not name:
        return _library(nodes[0].node, origins)
    gone = graph.removed_buffers | graph.inplaced_to_remove
    written = _touched(graph, [
        (dep, n) for n in nodes for dep in n.read_writes.writes])
    own: dict[str, int] = {}
    for at, size in written.items():
        own[_place(graph, at)] = own.get(_place(graph, at), 0) + size
    # That it depends on all of what it updates is only for the order.
    read = _touched(graph, [
        (dep, n) for n in nodes for dep in n.read_writes.reads
        if isinstance(dep, MemoryDep) or isinstance(dep, StarDep)
        and _place(graph, dep.name) not in own])
    return Kernel(name, "compiler", "Inductor", tuple(
        op_name(o.target) for o in origins if o.target is not operator.getitem
        and not getattr(o.target, "is_view", False)),
        # What it has written itself, it need not read.
        sum(max(0, size - own[_place(graph, at)]) if at in written else size
            for at, size in read.items()),
        sum(size for at, size in written.items() if at not in gone))


def _place(graph: Any, name: str) -> str:
    """The buffer that has another name after each update in place."""
    return graph.scheduler.mutation_real_name.get(name, name)


def _touched(graph: Any, deps: list[tuple[Any, Any]]) -> dict[str, int]:
    """Bytes that are loaded or stored, by the name of the buffer.

    Of one reached by an index, an element for each step of the loops of the
    node that has the dependency; through the same index, once.
    """
    sizes: dict[str, int] = {}
    seen = set()
    for dep, node in deps:
        size, through = dep.numbytes_hint(), None
        if indirect := isinstance(dep, MemoryDep) and dep.is_indirect():
            through = frozenset(d for d in node.read_writes.reads if not (
                isinstance(d, MemoryDep) and d.is_indirect()))
        if (dep, through) in seen:
            continue
        seen.add((dep, through))
        if indirect:
            steps = math.prod(itertools.chain(*node.get_ranges()))
            size = int(steps) * graph.get_dtype(dep.name).itemsize
        # A buffer read in two ways is still read once.
        whole = (int(graph.get_numel(_place(graph, dep.name)))
                 * graph.get_dtype(dep.name).itemsize)
        sizes[dep.name] = min(whole, sizes.get(dep.name, 0) + size)
    return sizes


def op_name(op: Any) -> str:
    """"add" of aten.add.Tensor."""
    return getattr(op, "__name__", str(op)).partition(".")[0]


def _library(node: Any, origins: list[Any]) -> Kernel | None:
    """A routine Inductor calls; None for a check, a result that is picked, a
    branch or a loop, whose kernels are listed themselves."""
    origin = node.get_origin_node() or next(reversed(origins), None)
    if (origin is None or isinstance(node, MultiOutput)
            or isinstance(origin.target, HigherOrderOperator)):
        return None
    args, kwargs, out = tree_map_only(
        torch.fx.Node, lambda n: n.meta.get("val"),
        (origin.args, origin.kwargs, origin))
    op = origin.target
    if node.get_mutation_names() and isinstance(op, OpOverload):
        # It is done in place, in a copy that another kernel has made.
        packet = getattr(torch.ops.aten, op_name(op) + "_", None)
        op = getattr(packet, op._overloadname, op)
    kernel = launched(op, args, kwargs, out)
    if kernel and getattr(node.get_device(), "type", "") == "cuda":
        who = next((who for names, who in _WHO.items()
                    if re.fullmatch(names, kernel.name)), "ATen")
        return replace(kernel, who=who)
    return kernel


def launched(op: Any, args: tuple, kwargs: dict[str, Any], out: Any,
             ) -> Kernel | None:
    """The kernel an op launches; None for views, checks, empty tensors."""
    name = op_name(op)
    given, schema = _tensors((args, kwargs)), getattr(op, "_schema", None)
    places = {t.untyped_storage()._cdata for t in given}
    in_place = schema and any(r.alias_info for r in schema.returns)
    made = [] if in_place else [
        t for t in _tensors(out)
        if t.untyped_storage()._cdata not in places]
    known = schema.arguments if schema else ()  # a higher-order op has none
    named = dict(zip((a.name for a in known), args, strict=False)) | kwargs
    written = made + _tensors([named.get(a.name) for a in known if a.is_write])
    if (not written or "empty" in name or getattr(op, "is_view", False)
            or torch.Tag.inplace_view in getattr(op, "tags", ())):
        return None
    fills = name in _FILLS and not (
        named.get("accumulate") or named.get("reduce"))
    unread = _tensors([named.get(a.name) for a in known if a.is_out
                       or a.is_write and fills])
    read = [] if re.match(r"new_|\w+_like$", name) else [
        t for t in given if not any(t is u for u in unread)]
    table = given[0] if _INDEXED.match(str(op)) else None
    spared = 0 if table is None else _spared(name, table, named)
    return Kernel(name, "library", "ATen", (name,), *(
        bytes_of(tensors) - spared * any(t is table for t in tensors)
        for tensors in (read, written)))


def _spared(name: str, table: Any, named: dict[str, Any]) -> int:
    """Bytes of ``table`` that the index of an op does not name."""
    index = next(named[key] for key in ("indices", "index", "target")
                 if key in named)
    rank = max(1, table.dim())
    if not isinstance(index, list | tuple):
        index = ([None] * (named.get("dim", 0) % rank) + [index]
                 if re.match("index|_?embedding", name)  # of whole rows
                 else [index] * rank)
    chosen = [at for at in index if at is not None]
    if any(at.dtype in (torch.bool, torch.uint8) for at in chosen):
        return 0  # a mask may name it all
    steps = math.prod(torch.broadcast_shapes(*(at.shape for at in chosen)))
    whole = (size for at, size in itertools.zip_longest(index, table.shape)
             if at is None)
    return max(0, bytes_of([table]) - (
        steps * math.prod(whole) * table.dtype.itemsize))


def _tensors(tree: Any) -> list[Any]:
    """The different tensors in nested arguments."""
    return list({id(x): x for x in tree_leaves(tree)
                 if isinstance(x, torch.Tensor)}.values())


def bytes_of(tensors: list[Any]) -> int:
    """Bytes behind ``tensors``; a broadcast dimension is there once."""
    return sum(t.dtype.itemsize * math.prod(
        size for size, step in zip(t.shape, t.stride(), strict=True) if step)
        for t in tensors)
