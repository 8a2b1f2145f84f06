"""Draw figures/ again: every picture of README and docs, from real output."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING

from tools.books import ROOT

if TYPE_CHECKING:
    from course_utils.ir import Ladder

FOLDER = ROOT / "figures"


def ladder() -> bytes:
    """The whole ladder: one line of Python down to four chips, as PNG."""
    import course_utils

    course_utils.start()
    import jax
    import jax.numpy as jnp
    import torch

    from course_utils import ir, kernels, plot

    shapes = ((512, 1024), (1024, 2048), (2048,), (512, 2048))
    x, w, b, _ = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)
    meta = [torch.empty(s, dtype=torch.bfloat16, device="meta")
            for s in shapes]

    def example(x, w, b):
        return jax.nn.relu(x @ w + b)

    cpu, h100, tpu = (ir.ladder(example, x, w, b, target=target)
                      for target in ("cpu", "h100", "tpu-v5e"))
    amd = ir.ladder(kernels.matmul_bias_relu, *kernels.linear_args(*meta),
                    target="mi300x")
    trunk = [first(cpu, 33, "python", "def example", "return"),
             first(cpu, 33, "jaxpr", "dot_general", "add", "max "),
             first(cpu, 33, "stablehlo", r"stablehlo\.dot", r"stablehlo\.add",
                   r"stablehlo\.max")]
    columns = {
        "x86 CPU": [
            first(cpu, 25, "hlo-optimized", r"add\(", r"maximum\(",
                  "kind=kCustom"),
            first(cpu, 25, "llvm-ir", "fadd", "fcmp", "select"),
            first(cpu, 25, "assembly", "vaddps", "vmaxps", "vmovups")],
        "H100": [
            first(h100, 25, "hlo-optimized", r"dot\(", r"add\(",
                  r"maximum\("),
            first(h100, 25, "ptx", "mma.sync", "add.rn", "max.NaN"),
            first(h100, 25, "sass", "HMMA", "HFMA2")],
        "TPU v5e": [
            first(tpu, 25, "hlo-optimized", r"convolution\(", r"add\(",
                  r"maximum\("),
            first(tpu, 25, "llo", "vmatmul", r"vadd\.f32", r"vmax\.f32"),
            first(tpu, 25, "bundles", "vmatmul", r"vadd\.f32",
                  r"vmax\.f32")],
        "MI300X, by hand": [
            first(amd, 25, "ttir", r"tt\.dot", r"arith\.addf", "maxnumf"),
            first(amd, 25, "llvm-ir", r"amdgcn\.mfma", "fadd", "maxnum"),
            first(amd, 25, "amdgcn", "v_mfma", "v_pk_add_f32|v_add_f32",
                  "v_max_f32|v_pk_max")]}
    return plot.png(plot.ladder(columns, trunk, lines=3,
                                title="One line of Python, rung by rung",
                                apart=["MI300X, by hand"]))


def first(made: Ladder, width: int, rung: str, *patterns: str
          ) -> tuple[str, str]:
    """A rung's name, and from its text the first find of each pattern."""
    rows = []
    for pattern in patterns:
        if hit := re.search(rf"(?:{pattern}).*", made[rung].text):
            row = re.sub(r"\s+", " ", hit[0])
            rows.append(row if len(row) <= width else row[:width - 1] + "…")
    return rung, "\n".join(rows)


def drawn(name: str) -> bytes:
    """A drawing of tools/drawings.py, as PNG."""
    import course_utils

    course_utils.start()
    from course_utils import plot
    from tools import drawings

    return plot.png(getattr(drawings, name)())


DRAWINGS = {
    "map": "course_map", "decoder": "decoder",
    "torch-compile": "torch_compile", "h100": "h100", "sm": "sm",
    "tensor-core": "tensor_core", "clusters": "clusters",
    "gpu-memory": "memory"}
FIGURES = {"ladder.png": ladder, **{
    f"{name}.png": functools.partial(drawn, function)
    for name, function in DRAWINGS.items()}}


def main() -> None:
    for name, draw in FIGURES.items():
        (FOLDER / name).write_bytes(draw())
        print(Path("figures", name))


if __name__ == "__main__":
    main()
