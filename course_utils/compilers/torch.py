"""PyTorch's compilers: Dynamo, AOTAutograd and Inductor, for CPU and NVIDIA.

They run in a worker (``inductor``), on tensors that have a shape and no data,
and so for chips that are not here. This is the reader's side: what can be
compiled here, and how a function travels. Floor 1.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import io
import linecache
import logging
import platform
import re
import sys
import sysconfig
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle

from course_utils import host
from course_utils.compilers import cache, worker
from course_utils.compilers.rung import Kernel, Rung
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
_RANDOM = rb"[0-9a-f]{32}"  # what cloudpickle calls a class, in one run
_FOR_CODE = ("A C++ compiler", "objdump")  # the graphs come without


def works(target: str) -> str:
    """"" where this machine climbs all the way to ``target``, or why not."""
    return str(lacking(target) or "")


def lacking(target: str) -> host.Missing | None:
    """What keeps ``rungs`` from the machine code of ``target``, if anything.

    Without a C++ compiler or objdump the rungs above it still come.
    """
    cpu = target == "cpu"
    for found, *missing in (
            (host._present("torch"), "torch", "it traces and compiles PyTorch "
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
          ) -> tuple[tuple[Rung, ...], tuple[Kernel, ...]]:
    """Every representation of ``fn`` for ``target``, and its kernels.

    ``fn`` is a torch function or ``nn.Module``, compiled for inference; of
    tensors in ``args`` only shape, strides and dtype matter, so meta and fake
    ones do. Rungs: python and bytecode (where there are), fx, guards, aten,
    inductor, then assembly (cpu) or ptx and sass, where something was
    generated and nothing is ``lacking``. Kernels are in call order; a GPU's
    are compiled with the first configuration Inductor proposes, since
    choosing takes the chip. Raises ValueError where ``fn`` does not become
    one graph, Missing without torch or triton.
    """
    if target not in TARGETS:
        raise ValueError(f"target={target!r} is not one Inductor compiles for "
                         f"here; it takes {', '.join(TARGETS)}.")
    found, kernels = _called("climb", fn, args, target, fresh)
    return (*_own_code(fn), *found), kernels


def gradients(fn: Callable, args: tuple, wrt: str | tuple[int, ...],
              fresh: bool = False) -> tuple[tuple[Rung, ...], dict[str, int]]:
    """AOTAutograd's graphs, and the bytes kept for the backward.

    Rungs: python, bytecode, fx, guards, joint, forward, backward. Of "saved"
    bytes, "saved inputs" belong to inputs, or views of inputs.
    """
    found, saved = _called("differentiate", fn, args, wrt, fresh)
    return (*_own_code(fn), *found), saved


def breaks(fn: Callable, args: tuple) -> list[tuple[int, str, str]]:
    """Where Dynamo must stop in ``fn``, which runs: line, text, reason."""
    torch = host.need("torch", "Dynamo, which finds graph breaks, is its part")
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    found: dict[tuple[int, str, str], None] = {}

    def stopped(self: Any, *given: Any, **named: Any) -> None:
        told = named.get("reason", given[1] if len(given) > 1 else "")
        reason = re.search(r"Explanation: (.*)", told) or [told, told]
        text = linecache.getline(self.f_code.co_filename, self.lineno)
        found[self.lineno, text.strip(), reason[1].rstrip(".")] = None

    torch._dynamo.reset()
    logging.disable(logging.WARNING)
    try:
        with mock.patch.object(InstructionTranslatorBase, "log_graph_break",
                               stopped):
            torch.compile(_plain(fn), backend="eager", dynamic=False)(*args)
    except Exception:
        if not found:  # else it is what meta tensors do after a break
            raise
    finally:
        logging.disable(logging.NOTSET)
        torch._dynamo.reset()
    return list(found)


def _own_code(fn: Any) -> tuple[Rung, ...]:
    """The python and bytecode rungs, where ``fn`` has them."""
    fn, made = _plain(fn), io.StringIO()
    while isinstance(fn, functools.partial):
        fn = fn.func
    try:
        dis.dis(getattr(fn, "forward", fn), file=made)
    except TypeError:  # a builtin has none
        return source(fn)
    return (*source(fn), Rung("bytecode", made.getvalue(), "text",
                              f"dis, Python {platform.python_version()}", 0.0))


def eager(fn: Callable, args: tuple, fresh: bool = False,
          ) -> tuple[Kernel, ...]:
    """The ATen ops ``fn`` launches, one after another, without a compiler.

    Nothing is computed: arguments as for ``rungs``. Views launch nothing.
    """
    return _called("launches", fn, args, "cpu", fresh)


def _called(job: str, fn: Any, args: tuple, target: Any, fresh: bool) -> Any:
    """What ``inductor``'s ``job`` for ``target`` (or wrt) returns, cached."""
    absent = lacking(target if target in TARGETS else "cpu")
    if absent and absent.what not in _FOR_CODE:
        raise absent
    packed = _packed(_plain(fn), args)
    # What the CPU's compiler leaves in a process harms no other; but torch
    # remembers a GPU, so each has a process of its own.
    chip = target if target in TARGETS[1:] else "h100"
    return cache.cached(
        ("torch", job, target, not absent, re.sub(_RANDOM, b"", packed)),
        lambda: worker.call(
            "torch", f"course_utils.compilers.inductor:{job}", packed, target,
            not absent, environment={
                **_ENVIRONMENT, "CXX": host.compiler() or "",
                "COURSE_CHIP": chip}), fresh)


def _plain(fn: Any) -> Any:
    """The function or module that torch.compile wrapped; else ``fn``."""
    return getattr(fn, "_torchdynamo_orig_callable",
                   getattr(fn, "_orig_mod", fn))


# How a function travels: by value, since the worker knows no cell and may
# know another version of a module that lies beside the notebook.

def _packed(fn: Any, args: tuple) -> bytes:
    with contextlib.ExitStack() as stack:
        for module in filter(_own, list(sys.modules.values())):
            cloudpickle.register_pickle_by_value(module)
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        try:
            _Pickler(file := io.BytesIO()).dump((fn, args))
        except Exception as error:
            raise ValueError("fn or its arguments cannot be sent to the "
                             f"compiler's process: {error}") from None
    return file.getvalue()


def _own(module: Any) -> bool:
    """Whether a module is the reader's: neither installed nor Python's."""
    name, file = (getattr(module, a, None) for a in ("__name__", "__file__"))
    return (bool(file) and sys.modules.get(name) is module
            and name.partition(".")[0] not in ("course_utils", "__main__")
            and not _installed(Path(file).parent))


@functools.cache
def _installed(folder: Path) -> bool:
    """Whether pip or Python itself put ``folder`` where it is."""
    return (str(folder) == sysconfig.get_path("stdlib")
            or any(folder.glob("*.dist-info"))
            or folder != folder.parent and _installed(folder.parent))


class _Pickler(cloudpickle.Pickler):
    """It takes of a tensor only what ``_tensor`` needs."""

    def reducer_override(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.Tensor):
            if value.layout != torch.strided:
                raise ValueError(
                    f"the tensor of shape {list(value.shape)} and layout "
                    f"{value.layout} is not dense, as the ladder needs: pass "
                    "its .to_dense().")
            return _tensor, (
                tuple(value.shape), value.stride(), value.dtype,
                isinstance(value, torch.nn.Parameter))
        made = super().reducer_override(value)
        if isinstance(value, types.FunctionType) and isinstance(made, tuple):
            # Paths, and the name by which Dynamo would import its module.
            for name in ("__file__", "__path__", "__name__"):
                made[1][1].pop(name, None)
        return made


def _tensor(shape: Any, stride: Any, dtype: Any, parameter: bool) -> Any:
    """A tensor of this shape; in the worker it has no data."""
    import torch

    made = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    return torch.nn.Parameter(made, False) if parameter else made
