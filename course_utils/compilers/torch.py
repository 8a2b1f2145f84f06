"""PyTorch's compilers: Dynamo, AOTAutograd and Inductor, for CPU and NVIDIA.

They run in a worker (``inductor``), on tensors that have a shape and no data,
and so for chips that are not here. This is the reader's side: what can be
compiled here, and how a function travels. Floor 1.
"""

from __future__ import annotations

import contextlib
import functools
import io
import linecache
import os
import platform
import re
import sys
import sysconfig
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from course_utils import host
from course_utils.compilers import cache, inductor, worker
from course_utils.compilers.rung import Kernel
from course_utils.compilers.xla import source

TARGETS = ("cpu", "t4", "a100", "h100", "b200")
# One thread and AVX2: the same text on every x86-64 host. The static launcher
# throws the PTX away, and line information holds our paths.
_ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "avx2", "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TRITON_DISABLE_LINE_INFO": "1",
    "TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER": "0", **(
        {"TORCHINDUCTOR_VEC_ISA_OK": "1", "TORCHINDUCTOR_CPP_MARCH": "haswell"}
        if platform.machine() in ("x86_64", "AMD64") else {})}
_FOR_CODE = ("A C++ compiler", "objdump")  # the graphs come without


def works(target: str) -> str:
    """"" where this machine climbs all the way to ``target``, or why not."""
    return str(lacking(target) or "")


def lacking(target: str) -> host.Missing | None:
    """What keeps ``rungs`` from the machine code of ``target``, if anything.

    Without a C++ compiler or objdump the rungs above it still come.
    """
    cpu, torch = target == "cpu", host._present("torch") or "0.0"
    recent = [*map(int, re.findall(r"\d+", torch)[:2])] >= [2, 9]
    for found, *missing in (
            (recent, "torch 2.9 or newer", "it traces and compiles PyTorch "
             "functions", "Run: pip install 'torch>=2.9'"),
            (cpu or host._present("triton"), "triton", "Inductor writes "
             f"{target}'s kernels in it", "On Linux: pip install triton"),
            (not cpu or host.compiler(), _FOR_CODE[0], "it turns Inductor's "
             "C++ into machine code", "On Debian: apt install g++"),
            (not cpu or host.tool("objdump"), _FOR_CODE[1], "it disassembles "
             "the library that was built", "On Debian: apt install binutils")):
        if not found:
            return host.Missing(*missing)
    return None


def rungs(fn: Callable, args: tuple, target: str, fresh: bool = False,
          ) -> inductor.Rungs:
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
    if target not in TARGETS:
        raise ValueError(f"target={target!r} is not one Inductor compiles for "
                         f"here; it takes {', '.join(TARGETS)}.")
    found, kernels = _called("climb", fn, args, target, fresh)
    return (*source(_plain(fn)), *found), kernels


def eager(fn: Callable, args: tuple, fresh: bool = False,
          ) -> tuple[Kernel, ...]:
    """The ATen ops ``fn`` launches, one after another, without a compiler.

    Nothing is computed: arguments as for ``rungs``. Views launch nothing.
    """
    return _called("launches", fn, args, "cpu", fresh)


def _called(job: str, fn: Any, args: tuple, target: str, fresh: bool) -> Any:
    """What ``inductor``'s function ``job`` returns, cached."""
    absent = lacking(target)
    if absent and absent.what not in _FOR_CODE:
        raise absent
    packed, lines = _packed(_plain(fn), args)
    # What the CPU's compiler leaves in a process harms no other; but torch
    # remembers a GPU, so each has a process of its own.
    chip = "h100" if target == "cpu" else target
    return cache.cached(
        ("torch", job, target, not absent, packed, repr(lines)),
        lambda: worker.call(
            "torch", f"{inductor.__name__}:{job}", packed, lines, target,
            not absent, environment={
                **_ENVIRONMENT, "CXX": host.compiler() or "",
                "COURSE_CHIP": chip}), fresh)


def _plain(value: Any) -> Any:
    """The function or module that torch.compile wrapped; else ``value``."""
    import torch

    if isinstance(value, torch.nn.Module):
        return getattr(value, "_orig_mod", value)
    if (isinstance(value, types.FunctionType)
            and not getattr(value, "_torchdynamo_disable", False)):
        return getattr(value, "_torchdynamo_orig_callable", value)
    return value


# How a function travels. Two runs of one script, wherever it lies, send the
# same, or the cache would miss; two functions that differ never do.

def _packed(fn: Any, args: tuple) -> tuple[bytes, inductor.Lines]:
    """``fn`` and ``args`` pickled, and the lines of source they come from."""
    pickler = _Pickler(file := io.BytesIO())
    with contextlib.ExitStack() as stack:
        for module in filter(_own, list(sys.modules.values())):
            cloudpickle.register_pickle_by_value(module)
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        try:
            pickler.dump((fn, args))
        except Exception as error:
            raise ValueError("fn or its arguments cannot be sent to the "
                             f"compiler's process: {error}") from None
    return file.getvalue(), dict(pickler.files.values())


def _own(module: Any) -> bool:
    """Whether a module is the reader's: neither installed nor Python's."""
    name = str(getattr(module, "__name__", ""))
    top = sys.modules.get(name.partition(".")[0])
    places = [*getattr(top, "__path__", ())] or [getattr(top, "__file__", "")]
    return (sys.modules.get(name) is module and bool(places[0])
            and top.__name__ not in ("course_utils", "__main__")
            and not _installed(os.path.dirname(places[0])))


@functools.cache
def _installed(folder: str) -> bool:
    """Whether pip or Python itself put things into ``folder``."""
    return (folder.startswith(sysconfig.get_path("stdlib"))
            or any(Path(folder).glob("*.dist-info")))


class _Pickler(cloudpickle.Pickler):
    """By value what is the reader's own, and of a tensor only its shape."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.files: dict[str, tuple[str, dict[int, str]]] = {}

    def reducer_override(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.Tensor):
            return inductor.tensor, _shape(value)
        if isinstance(value, types.ModuleType) and _own(value):
            return types.ModuleType, (value.__name__,), {
                name: item for name, item in vars(value).items()
                if not name.startswith("__")}
        if (inner := _plain(value)) is not value:
            return inductor.itself, (inner,)
        made = super().reducer_override(value)
        if made is NotImplemented and type(value) in self.dispatch_table:
            made = self.dispatch_table[type(value)](value)
        if not isinstance(made, tuple):
            return made
        return made[0], self._steady(value, made[1]), *made[2:]

    def _steady(self, value: Any, given: tuple) -> tuple:
        """What ``value`` is built from, the same in every run."""
        if isinstance(value, types.CodeType):
            paths = value.co_filename, "<dynamic-code>"
            return tuple(self._file(value) if g in paths else g for g in given)
        if isinstance(value, (type, TypeVar)):  # it has a random id
            return tuple(None if re.fullmatch("[0-9a-f]{32}", str(g)) else g
                         for g in given)
        if isinstance(value, types.FunctionType):
            # Paths, and the name by which Dynamo would import its module.
            for name in ("__file__", "__path__", "__name__"):
                given[1].pop(name, None)
        return given

    def _file(self, code: types.CodeType) -> str:
        """The name that the file of ``code`` gets; its lines are kept."""
        file = code.co_filename
        if file not in self.files:
            name = os.path.basename(file) if os.path.exists(file) else "<cell>"
            if name in dict(self.files.values()):
                letter = chr(ord("a") + len(self.files))  # no cell's number
                name = f"<{name.strip('<>')} {letter}>"
            self.files[file] = name, {}
        name, lines = self.files[file]
        lines |= {line: linecache.getline(file, line)
                  for *_, line in code.co_lines() if line}
        return name


def _shape(tensor: Any) -> tuple:
    """What travels of a tensor, for ``inductor.tensor``."""
    import torch
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if tensor.layout != torch.strided or is_traceable_wrapper_subclass(tensor):
        raise ValueError(
            f"the {type(tensor).__name__} of shape {list(tensor.shape)} and "
            f"layout {tensor.layout} is not dense, as the ladder needs: pass "
            "its .to_dense().")
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype,
            isinstance(tensor, torch.nn.Parameter))
