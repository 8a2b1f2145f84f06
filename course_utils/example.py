"""The running example and what each stage hands on of it. Floor 4.

``artefact(n)`` is what stage n hands on: notebook n's card ends with it, and
notebook n + 1's begins with it, byte for byte.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import textwrap
from collections import Counter
from typing import Any

from course_utils import flops, host, ir, kernels, memory

SHAPES = {"X": (512, 1024), "W": (1024, 2048), "b": (2048,), "Y": (512, 2048)}
TILE = 128  # rows and columns of Y that a program makes, by default
GRID = (math.prod(-(-n // TILE) for n in SHAPES["Y"]),)


def specs() -> tuple[Any, ...]:
    """X, W, b and Y as jax.ShapeDtypeStruct, bf16."""
    jax = host.need("jax", "the running example is a JAX function")
    return tuple(jax.ShapeDtypeStruct(shape, jax.numpy.bfloat16)
                 for shape in SHAPES.values())


def function() -> Any:
    """The running example, as the notebooks write it."""
    jax = host.need("jax", "the running example is a JAX function")

    def example(x, w, b):
        return jax.nn.relu(x @ w + b)

    return example


def metas() -> list[Any]:
    """X, W, b and Y as torch tensors without data, bf16."""
    torch = host.need("torch", "a Triton kernel's arguments are its tensors")
    return [torch.empty(shape, dtype=torch.bfloat16, device="meta")
            for shape in SHAPES.values()]


def artefact(n: int) -> str:
    """What stage ``n`` hands on, a few lines; 0 is the model itself."""
    if n not in range(len(_ARTEFACTS)):
        raise ValueError(f"n is a stage, 0 (the model) to "
                         f"{len(_ARTEFACTS) - 1}; got {n!r}.")
    return _ARTEFACTS[n]()


def _model() -> str:
    sizes = (f"{name}: bf16{list(shape)}" for name, shape in SHAPES.items())
    source = inspect.getsource(function).split("\n\n")[1]
    return "\n".join([textwrap.dedent(source), "", *sizes])


def _operations() -> str:
    cost = flops.count(function(), *specs()[:3])
    return "\n".join(f"{op.name}\n{op.flops:15,} FLOPs {op.bytes:12,} B"
                     for op in cost.ops)


def _program() -> str:
    text = ir.ladder(function(), *specs()[:3], target="cpu")["stablehlo"].text
    found = re.findall(r"(stablehlo\.\w+).*?(tensor<[^>]*>)\n", text)
    return "\n".join(f"{op}\n  -> {kind}" for op, kind in found)


def _executable() -> str:
    made = ir.ladder(kernels.matmul_bias_relu,
                     *kernels.linear_args(*metas()), target="h100")
    kernel, code = made.kernels[0], made["sass"].text
    lines = [f"{kernel.name}: {kernel.registers} registers,",
             f"{kernel.shared_bytes:,} B of shared memory"]
    for wanted in ("UTMALDG|LDGSTS|LDG", "HGMMA", "FADD|HADD2", "FMNMX|HMNMX2",
                   "STG"):
        found = Counter(re.findall(rf"\b((?:{wanted})\S*) ", code))
        lines += [f"{n:4} x {name}" for name, n in found.most_common(1)]
    return "\n".join(lines)


@functools.cache
def launch() -> kernels.Launch:
    """The hand-written kernel run once on zeros, its accesses traced."""
    torch = host.need("torch", "a launch takes torch tensors")
    tensors = [torch.zeros(shape, dtype=torch.bfloat16,
                           device=kernels.device())
               for shape in SHAPES.values()]
    return kernels.launch(
        kernels.matmul_bias_relu, GRID, *kernels.linear_args(*tensors),
        trace=True)


def _execution() -> str:
    trace = launch().trace
    lines = [f"{trace.name}: {len(trace.programs)} programs"]
    for number, program in enumerate(trace.programs):
        if 6 <= number < len(trace.programs) - 1:
            lines += ["..."] * (number == 6)
            continue
        stored = [a for a in trace.of(program) if a.kind == "store"]
        rows, columns = zip(*(divmod(int(at), SHAPES["Y"][1])
                              for access in stored
                              for at in (access.offsets.min(),
                                         access.offsets.max())),
                            strict=True)
        lines.append(f"program {number:2}: y[{min(rows)}:{max(rows) + 1}, "
                     f"{min(columns)}:{max(columns) + 1}]")
    return "\n".join(lines)


def _traffic() -> str:
    moved = memory.traffic(launch().trace, "h100").moved
    lines = []
    for level, ways in (("HBM", ("HBM -> L2", "L2 -> HBM")),
                        ("L2", ("L2 -> SMs", "SMs -> L2"))):
        for (at, name), amounts in moved.items():
            lines += [f"{way} {name.removesuffix('_ptr')} {amount:12,} B"
                      for way, amount in zip(ways, amounts, strict=True)
                      if amount and at == level]
    return "\n".join(lines)


_ARTEFACTS = (_model, _operations, _program, _executable, _execution,
              _traffic)
