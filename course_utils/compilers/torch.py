"""PyTorch's compilers: Dynamo, AOTAutograd and Inductor, for CPU and NVIDIA.

They run in a worker (``inductor``), on tensors that have a shape and no data,
and so for chips that are not here. This is the reader's side: what can be
compiled here, and how a function travels. Floor 1.
"""

from __future__ import annotations

import contextlib
import copyreg
import dis
import functools
import io
import logging
import platform
import re
import sys
import sysconfig
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle

from course_utils import host
from course_utils._front import uncompiled
from course_utils.compilers import cache, worker
from course_utils.compilers.rung import (
    Compiled,
    Kernel,
    Rung,
    _written,
    absent,
    file_of,
    source,
)

_ALONE = threading.RLock()  # what breaks() patches is all of Dynamo's
TARGETS = ("cpu", "t4", "a100", "h100", "b200")
_HOME = "<dynamic-code>"  # as cloudpickle calls the reader's file
# One thread and AVX2: the same text on every x86-64 host. The static launcher
# throws the PTX away, and line information holds our paths.
_ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "avx2", "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TRITON_DISABLE_LINE_INFO": "1",
    "TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER": "0", **(
        {"TORCHINDUCTOR_VEC_ISA_OK": "1", "TORCHINDUCTOR_CPP_MARCH": "haswell"}
        if platform.machine() in ("x86_64", "AMD64") else {})}
_MODULE = "namedtuple_"  # no module's: Dynamo does not import one so named
_RANDOM = rb"[0-9a-f]{32}"  # what cloudpickle calls a class, in one run
_USER = re.compile("from user code:|Original traceback:")  # frames follow
_FOR_CODE = ("A C++ compiler", "objdump")  # the graphs come without
_HINTS = (  # what a tracer says, and what it means to who wrote the function
    (r"[Dd]ata.?[Dd]ependent|DynamicOutputShape|_scalar_dense|capture_scalar|"
     r"\bnonzero\b|[Uu]nbacked|`tolist|no rule registered",
     "its course depends on the values of a tensor, and only shapes are "
     "known: use torch.where or torch.cond"),
    (r"autograd\.grad|torch/autograd/|\bbackward\(|not require grad",
     "it calls autograd itself: let it return the loss and give wrt=, or use "
     "torch.func.grad inside"),
    ("accelerator device|support for cuda|with CUDA|(NVIDIA|CUDA) "
     "driver|two (different )?devices",
     "it puts tensors on a GPU itself: leave that to target="))


def lacking(target: str) -> host.Missing | None:
    """What keeps ``compile`` from the machine code of ``target``, if anything.

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


def compile(fn: Callable, args: tuple, target: str,
            wrt: str | tuple[int, ...] | None = None, fresh: bool = False,
            ) -> Compiled:
    """Every representation of ``fn`` for ``target``, and its kernels.

    Of tensors in ``args`` only shape, strides and dtype matter; of torch's
    settings only the default dtype and autocast do. Rungs: python and bytecode
    (where there are), fx, guards, aten, inductor, then assembly (cpu) or ptx
    and sass, where something was generated; without a C++ compiler the last
    says why not. With ``wrt`` (argument numbers, "params"
    or "all") it is a training step: joint, forward, backward,
    inductor-forward and inductor-backward stand for aten and inductor, the
    kernels' names begin with "forward/" or "backward/", and of ``memory``'s
    "saved" bytes "saved inputs" belong to inputs, or views of inputs. A GPU's
    kernels have the first configuration Inductor proposes: choosing takes the
    chip. Raises ValueError where ``fn`` is not one graph, Missing without
    torch or triton.
    """
    if target not in TARGETS:
        raise ValueError(f"target={target!r} is not one Inductor compiles for "
                         f"here; it takes {', '.join(TARGETS)}.")
    fn = uncompiled(fn)
    made = _called("climb", fn, args, target, fresh, wrt)
    missing = lacking(target)
    last = (absent("assembly", missing),) if missing and any(
        kernel.author == "compiler" for kernel in made.kernels) else ()
    return replace(made, rungs=(*_own_code(fn), *made.rungs, *last))


def breaks(fn: Callable, args: tuple) -> list[dict[str, Any]]:
    """Where Dynamo stops in ``fn``, which runs: see ``ir.breaks``."""
    with _ALONE:
        return _breaks(fn, args)


def _breaks(fn: Callable, args: tuple) -> list[dict[str, Any]]:
    torch = host.need("torch", "Dynamo, which finds graph breaks, is its part")
    with _known():
        from torch._dynamo.convert_frame import ConvertFrameAssert
        from torch._dynamo.exc import Unsupported, UserError
        from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    found: list[tuple[list[Any], dict[str, Any]]] = []
    convert = ConvertFrameAssert.__call__
    disabled = logging.root.manager.disable  # by the reader

    def stop(why: str, cause: Any, code: Any, line: int, left: str) -> None:
        stack = getattr(cause, "real_stack", cause) or [
            traceback.FrameSummary(code.co_filename, line, code.co_name)]
        path = [(frame.filename, frame.lineno) for frame in stack]
        # What a function stops at, its caller, that followed it, has met.
        row = next((row for longer, row in found if len(longer) > len(path)
                    and longer[-len(path):] == path), None)
        if row is None:
            reason = re.search(r"Explanation: (.*)", why) or [why, why]
            row = {"line": stack[-1].lineno, "code": stack[-1].line,
                   "function": _resumed(stack[-1].name),
                   "reason": reason[1].rstrip(".")}
            found.append((path, row))
        if left and left not in row["reason"]:
            row["reason"] += f"; Python runs {left} {_resumed(code.co_name)}"

    def cut(self: Any, options: Any, reason: str = "", exc: Any = None,
            user_stack: Any = None) -> None:  # torch 2.9 gives the stack
        if not reason.startswith("Failed to handle"):  # converted hears that
            stop(reason, exc or user_stack, self.f_code, self.lineno,
                 "the rest of" if "skipping the rest" in reason else "")

    def converted(self: Any, frame: Any, *given: Any, **named: Any) -> Any:
        try:
            return convert(self, frame, *given, **named)
        except (Unsupported, UserError) as error:
            code = frame.f_code
            stop(str(error), error, code, code.co_firstlineno, "all of")
            raise

    torch._dynamo.reset()
    logging.disable(logging.ERROR)
    try:
        with (told(), mock.patch.object(ConvertFrameAssert, "__call__",
                                        converted),
              mock.patch.object(InstructionTranslatorBase, "log_graph_break",
                                cut)):
            torch.compile(uncompiled(fn), backend="eager",
                          dynamic=False)(*args)
    except ValueError as error:
        if not found or "meta tensor" not in str(error):  # it has no values
            raise
    finally:
        logging.disable(disabled)
        torch._dynamo.reset()
    return [row for _, row in found]


def _resumed(name: str) -> str:
    """The name of a function, also of what follows a break in it."""
    return re.sub(r"^torch_dynamo_resume_in_(.*)_at_\d+$", r"\1", name)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """What a tracer or compiler threw, as one line in a reader's words."""
    try:
        yield
    except (host.Missing, worker.CompilerError):
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        patterns = (r"got \w+\(['\"](.*)['\"]\)", r"raised exception (.*)",
                    r"Explanation: (.*)", r"\w+:\s*(.*)")
        said = next(f[1] for p in patterns if (f := re.search(p, text)))
        reason = next((words for pattern, words in _HINTS
                       if re.search(pattern, text)), said.strip(" .") or text)
        frames = re.findall(r'File "(.*?)", line (\d+), in (.+)',
                            "".join(_USER.split(text)[1:]))
        place = next((f" (line {line}, in {_resumed(name)})"
                      for file, line, name in reversed(frames)
                      if not _installed(Path(file).parent)), "")
        raise ValueError(reason + place) from None


def _own_code(fn: Any) -> tuple[Rung, ...]:
    """The python and bytecode rungs, where ``fn`` has them."""
    made = io.StringIO()
    try:
        dis.dis(_written(fn), file=made)
    except TypeError:  # a builtin has none
        return source(fn)
    return (*source(fn), Rung("bytecode", made.getvalue(), "text",
                              f"dis, Python {platform.python_version()}", 0.0))


def eager(fn: Callable, args: tuple) -> tuple[Kernel, ...]:
    """The ATen ops ``fn`` launches, one after another, without a compiler.

    Nothing is computed: arguments as for ``compile``. Views launch nothing.
    """
    return _called("launches", uncompiled(fn), args, "cpu", False)


def _called(job: str, fn: Any, args: tuple, target: str, fresh: bool,
            wrt: Any = None) -> Any:
    """What ``inductor``'s ``job`` returns, cached."""
    missing = lacking(target)
    if missing and missing.what not in _FOR_CODE:
        raise missing
    packed = _packed(fn, args)
    # What the CPU's compiler leaves in a process harms no other; but torch
    # remembers a GPU, so each has a process of its own.
    chip = target if target != "cpu" else "h100"
    given = target, not missing, wrt, *_state()
    with _known():
        return cache.cached(
            ("torch", job, *given, re.sub(_RANDOM, b"", packed)),
            lambda: worker.call(
                "torch", f"course_utils.compilers.inductor:{job}", packed,
                *given, environment={
                    **_ENVIRONMENT, "CXX": host.compiler() or "",
                    "COURSE_CHIP": chip}), fresh)


def _state() -> tuple[Any, Any]:
    """What the reader has set that changes a graph: the dtype of what has
    none, and that of autocast, on whichever device, or None."""
    import torch

    return torch.get_default_dtype(), next((
        torch.get_autocast_dtype(device) for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)), None)


@contextlib.contextmanager
def _known() -> Iterator[None]:
    """In it a private name that torch has no longer is Missing."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise host.Missing(
            "A torch that this course knows", "the inside of torch "
            f"{host.version('torch')} is another ({error})",
            "Run: pip install 'torch>=2.9,<=2.13.0'") from None


# How a function travels: by value, since the worker knows no cell and may
# know another version of a module that lies beside the notebook.

def _packed(fn: Any, args: tuple) -> bytes:
    with contextlib.ExitStack() as stack:
        for module in filter(_own, list(sys.modules.values())):
            cloudpickle.register_pickle_by_value(module)
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        pickler = _Pickler(file := io.BytesIO())
        pickler.home = file_of(fn)
        try:
            pickler.dump((fn, args))
        except Exception as error:
            said = str(error).partition("\n")[0]
            raise ValueError("fn or its arguments cannot be sent to the "
                             f"compiler's process: {said}") from None
    return file.getvalue()


def _own(module: Any) -> bool:
    """Whether a module is the reader's: neither installed nor Python's, nor
    one that travels by value anyway."""
    name, file = (getattr(module, a, None) for a in ("__name__", "__file__"))
    return (bool(file) and sys.modules.get(name) is module
            and name.partition(".")[0] not in ("course_utils", "__main__")
            and name not in cloudpickle.list_registry_pickle_by_value()
            and not _installed(Path(file).parent))


@functools.cache
def _installed(folder: Path) -> bool:
    """Whether pip or Python itself put ``folder`` where it is."""
    return (str(folder) == sysconfig.get_path("stdlib")
            or any(folder.glob("*.dist-info"))
            or folder != folder.parent and _installed(folder.parent))


class _Pickler(cloudpickle.Pickler):
    """It takes of a tensor only what ``_tensor`` needs, of a file only
    whether it is ``home``, where the function is written."""

    home = ""

    def reducer_override(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.Tensor):
            return _tensor, _layout(value)
        if isinstance(value, types.FunctionType | torch.nn.Module) and (
                plain := uncompiled(value)) is not value:  # compiled: Dynamo
            return _same, (plain,)  # would see through it all the same
        if type(value).__module__.startswith("triton.runtime."):
            raise ValueError("it calls a Triton kernel, which is compiled by "
                             "itself: give ladder that kernel")
        if (isinstance(value, torch.nn.Module)
                and torch.nn.utils.parametrize.is_parametrized(value)):
            return copyreg.__newobj__, (type(value),), vars(value)
        if isinstance(value, types.CodeType):
            # A path would be another in each run. cloudpickle 3.1 gives all
            # code one, which would make a helper's lines the function's.
            make, parts = self.dispatch_table[types.CodeType](value)
            file = _HOME if value.co_filename == self.home else "<elsewhere>"
            return make, tuple(file if part in (_HOME, value.co_filename)
                               else part for part in parts)
        made = super().reducer_override(value)
        if isinstance(value, types.FunctionType) and isinstance(made, tuple):
            for name in ("__file__", "__path__"):
                made[1][1].pop(name, None)
            made[1][1]["__name__"] = _MODULE
            if "_torchdynamo_orig_callable" in vars(value):
                # functools.wraps gave it all that a compiled function has.
                make, parts, (own, slots), *rest = made
                theirs = vars(value.__wrapped__)
                own = {k: v for k, v in own.items() if theirs.get(k) is not v}
                made = make, parts, (own, slots), *rest
        return made


def _same(value: Any) -> Any:
    return value


def _layout(value: Any) -> tuple[Any, ...]:
    """What ``_tensor`` makes its like of; ValueError where it is not plain."""
    import torch
    from torch._subclasses import FakeTensor

    if (type(value) not in (torch.Tensor, torch.nn.Parameter, FakeTensor)
            or value.layout != torch.strided or value.is_nested
            or value.is_quantized):
        raise ValueError(
            f"a {type(value).__name__} of {value.dtype} and {value.layout} is "
            "not plain: pass what its .dequantize(), .to_dense() or "
            ".to_padded_tensor(0.0) makes")
    return (tuple(value.shape), value.stride(), value.dtype,
            value.requires_grad if isinstance(value, torch.nn.Parameter)
            else None)


def _tensor(shape: Any, stride: Any, dtype: Any, trained: bool | None) -> Any:
    """A tensor of this shape; in the worker it has no data.

    ``trained``: of a parameter, whether it is to have a gradient.
    """
    import torch

    made = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    if trained is None:
        return made
    made = torch.nn.Parameter(made, False)  # until gradients are asked for
    made.trained = trained
    return made
