"""The exercises of notebook 3: from IR to executable."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

from course_utils.exercises_data.register import (
    ELEMENTS,
    MEBI,
    MEGA,
    exercise,
)


@exercise(
    "3.1",
    hints=("The product reads X and W, and writes Y: bf16[512, 2048].",
           "The addition reads Y and b and writes Y again; the ReLU reads "
           "and writes Y. Add up the three."),
    why="X, W and b are read once and Y is written three times and read "
        "twice: 15.7 MB, where 7.3 would do.",
    wrong=(ELEMENTS, MEGA, MEBI,
           (lambda right: right - 2048 * 2,
            "Nearly: the addition reads the bias too."),
           (lambda right: right - 4 * 512 * 2048 * 2,
            "That is the fused kernel. The three separate ones also write Y "
            "to memory and read it back, twice."),
           (lambda right: right - 2 * 512 * 2048 * 2,
            "The addition and the ReLU read Y and write Y: count both."),
           (lambda right: right * 2, "bf16 has two bytes, not four.")),
)
def eager_bytes() -> int:
    """How many bytes do the three eager kernels read and write together?"""
    import torch

    from course_utils import example, ir

    x, w, b = example.metas()[:3]
    table = ir.compare_backends(lambda x, w, b: torch.relu(x @ w + b),
                                x, w, b, backends=("eager",))
    return int((table.bytes_read + table.bytes_written).sum())


@exercise(
    "3.2",
    hints=('Ask for the passes of the same function with target="h100" and '
           "print how many fusions each leaves.",
           "Show the text after the pass where the count rises: are dot, add "
           "and maximum in one computation?"),
    why="On the GPU, Triton generates the product's code, and XLA gives it "
        "what comes after the product, too. The passes with fusion in their "
        "names found nothing left to do.",
    wrong=((lambda right: "fusion", "That is the CPU's. Ask for the H100's."),
           (lambda right: "fusion-wrapper",
            "That is the CPU's, for operations left alone. Ask for the "
            "H100's."),
           (lambda right: "priority-fusion",
            "On the H100 it ran and changed nothing here."),
           (lambda right: "dot-library-rewriter",
            "That is the CPU's, and it calls a library. Ask for the H100's."),
           *((lambda right, name=name: name,
              "That is the kernel's name, or its author's; the question is "
              "which pass made it.")
             for name in ("gemm_fusion_dot_general.1", "gemm-fusion",
                          "gemm_fusion_dot_general", "Triton",
                          "XLA (Triton)"))),
)
def fusing_pass() -> str:
    """Which pass made product, addition and ReLU one kernel on the H100?"""
    from course_utils import example, ir

    fn, args = example.function(), example.specs()[:3]

    def fuses(text: str) -> bool:
        bodies = text.split("\n}\n")
        return any(all(f" {op}(" in body for op in ("dot", "add", "maximum"))
                   for body in bodies if "ENTRY" not in body)

    return next(p.name for p in ir.passes(fn, *args, target="h100")
                if fuses(p.text))


@exercise(
    "3.3",
    hints=("Each of the 2 x 4 results is a sum of three products.",
           "It is written out as 3x3 is: one instruction for each "
           "multiply-add."),
    why="2 x 4 results of 3 multiply-adds each, and so small a product is "
        "still written out.",
    wrong=((lambda right: 2 * right,
            "Those are FLOPs: a multiply-add is two, and one instruction."),
           (lambda right: right // 3,
            "Those are the results; each is a sum of three products."),
           (lambda right: 0,
            "So small a product XLA still writes itself; run it."),
           (lambda right: 3 * 3 * 3,
            "Those are 3x3's. How many results are there here?"),
           (lambda right: 3 * 4,
            "Those are the numbers of the right matrix; each is used once "
            "for every row of the left one.")),
)
def emitted() -> int:
    """How many vfmadd does XLA emit for a 2x3 times a 3x4 matrix?"""
    import jax
    import jax.numpy as jnp

    from course_utils import ir

    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 3), (3, 4)))
    return ir.ladder(jnp.matmul, x, w).machine_code.count("vfmadd")


@exercise(
    "3.4",
    hints=("The tile needs 128 x 128 x 1024 multiply-adds.",
           "Divide by what one instruction does: 64 x 128 x 16."),
    why="128 x 128 x 1024 multiply-adds at 64 x 128 x 16 an instruction. "
        "Fewer stand in the code, because the loop over K runs many times.",
    wrong=((lambda right: right * 2,
            "Twice too many: 64 x 128 x 16 are multiply-adds, not FLOPs, and "
            "so is what the tile needs."),
           (lambda right: right * 64,
            "That is for all of Y; one instance makes one of its 64 tiles."),
           (lambda right: right / 8,
            "That is how often the loop over K runs; each turn executes "
            "several."),
           (lambda right: right / 2,
            "The tile has 128 rows, and one instruction does 64."),
           (lambda right: right / 64,
            "Two do the 128 rows, for 16 of the 1024 products in each sum."),
           (lambda right: right / 16,
            "That is how many stand in the code; the loop over K runs 16 "
            "times.")),
)
def hgmma_executed() -> int:
    """How many HGMMA.64x128x16 make a 128x128 tile of Y when K is 1024?"""
    return (128 * 128 * 1024) // (64 * 128 * 16)


@exercise(
    "3.5",
    hints=("Memory needed is argument + output + temp - alias.",
           "Every tile of the result needs a whole row of x. What happens "
           "to x if the result is written over it, tile by tile?"),
    why="The H100's kernel reads each row of x for many tiles, so it cannot "
        "write over x. The compiler makes the product elsewhere and adds a "
        "kernel that copies it into x: donating cost a copy and saved "
        "nothing. On the TPU and this CPU it saves all of x.",
    wrong=((lambda right: right + 2 * 1024 * 1024,
            "That is the size of x, and of alias. Look at temp, too."),),
)
def donated_operand() -> int:
    """By how many bytes does donating x lower the memory needed for
    relu(x @ w), both bf16[1024, 1024], on the H100?"""
    import jax
    import jax.numpy as jnp

    from course_utils import ir

    square = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    plain, given = (
        ir.ladder(lambda x, w: jax.nn.relu(x @ w), square, square,
                  target="h100", donate=donate).memory
        for donate in ((), (0,)))

    def needed(memory: dict[str, int]) -> int:
        return (memory["argument"] + memory["output"] + memory["temp"]
                - memory["alias"])

    return needed(plain) - needed(given)


@exercise(
    "3.6",
    hints=("Round both sizes up to a whole number of tiles.",
           "5 rows need one tile of 8; 130 columns need two tiles of 128."),
    why="One tile down and two across, 8 x 256 numbers of 4 bytes: more than "
        "three times what 5 x 130 numbers need.",
    wrong=((lambda right: 5 * 130 * 4, "That is without the padding."),
           (lambda right: right / 4, "Those are numbers; f32 has 4 bytes."),
           (lambda right: right / 2,
            "130 columns do not fit in one tile of 128.")),
)
def padded_bytes() -> int:
    """How many bytes does an f32[5, 130] occupy on a TPU v5e?"""
    import jax
    import jax.numpy as jnp

    from course_utils import ir

    spec = jax.ShapeDtypeStruct((5, 130), jnp.float32)
    return ir.ladder(lambda x: x + 1, spec,
                     target="tpu-v5e").memory["argument"]


@exercise(
    "3.7",
    hints=("Y is as large as before: 1,024 results of 8 x 128 numbers. How "
           "many pieces does each sum of 2,048 products come in?",
           "On v5e and v6e the bias is one addition, and joining n pieces is "
           "n - 1. On the TPU7x, what reaches the vector unit?"),
    why="Sixteen pieces of 128 products on the v5e, eight of 256 on the v6e, "
        "1,024 times each, the bias included. On the TPU7x the pieces are "
        "added where they lie, so its vector unit still adds only the bias.",
    wrong=((lambda right: (right[0], right[1], 2 * right[2]),
            "Two of three. On the TPU7x longer sums give no more results."),
           (lambda right: (right[0] // 2, right[1] // 2, right[2]),
            "Those are the counts for K = 1024; here it is 2048."),
           (lambda right: (right[0] - 1024, right[1] - 1024, right[2]),
            "Joining n pieces takes n - 1 additions, and then comes b.")),
)
def vector_additions() -> tuple[int, int, int]:
    """With X bf16[512, 2048] and W bf16[2048, 2048], how many vector
    additions do the programs for v5e, v6e and TPU7x execute?"""
    import math
    import re

    import jax
    import jax.numpy as jnp

    from course_utils import example, ir

    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16)
            for shape in ((512, 2048), (2048, 2048), (2048,))]

    def executed(target: str) -> int:
        text = ir.ladder(example.function(), *args, target=target)[
            "bundles"].text
        bounds = re.search(r"iteration_bounds: \(([^)]*)\)", text)[1]
        return math.prod(map(int, bounds.split(","))) * len(
            re.findall(r" vadd\.b?f", text))

    return executed("tpu-v5e"), executed("tpu-v6e"), executed("tpu7x")


def _own_product(answer: Any, _: Any) -> str:
    """"" if ``answer`` multiplies matrices and calls no library."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from course_utils import ir

    if not callable(answer):
        return "this asks for a function of x and w."
    x, w = np.random.default_rng(0).normal(size=(2, 64, 64)).astype("f4")
    got = np.asarray(jax.jit(answer)(x, w))
    if got.shape != (64, 64) or not np.allclose(got, x @ w, atol=1e-3):
        return "it compiles, but its result is not x @ w."
    spec = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    calls = [k.who for k in ir.ladder(answer, spec, spec).kernels
             if k.author == "library"]
    return f"right numbers, but it calls {calls[0]}." if calls else ""


@exercise(
    "3.8",
    hints=("Multiply x[:, :, None] with w[None] and sum the middle axis? XLA "
           "recognises that as a product too, and calls the library.",
           "Add up 64 outer products, column k of x with row k of w, in a "
           "Python loop: tracing unrolls it."),
    why="XLA calls a library for what its rules recognise as a product, and "
        "yours they did not recognise, so it generated code. Whether that "
        "code is fast is another question.",
    judge=_own_product,
)
def own_product() -> Callable[..., Any]:
    """A function of x and w, both f32[64, 64], that returns x @ w without a
    library call on the CPU."""
    def outer_products(x: Any, w: Any) -> Any:
        return sum(x[:, k:k + 1] * w[k] for k in range(64))

    return outer_products


@exercise(
    "3.9",
    hints=("In the listing, find the kernel that writes as many bytes as X "
           "has.",
           "A product alone would read two operands. This one makes its left "
           "operand first, from two."),
    why="Without dX the third kernel is gone and the others stay as they "
        "were. It read W, dY and, for the ReLU, XW + b, and wrote dX. The "
        "count adds up operands, wherever they lie: the 2.1 MB of XW + b "
        "lie in VMEM and never reach HBM.",
    wrong=((lambda right: 512 * 1024 * 2,
            "That is what its kernel writes. It also reads."),
           (lambda right: right - 512 * 2048 * 2,
            "The kernel reads XW + b besides dY: the ReLU's way back is "
            "inside."),
           (lambda right: right - 512 * 1024 * 2,
            "That is what its kernel reads. It also writes."),
           ELEMENTS, MEGA, MEBI),
)
def without_dx() -> int:
    """How many fewer bytes do the kernels of step read and write on a TPU
    v5e, operands counted wherever they lie, if it returns no dx?"""
    import jax

    from course_utils import example, ir

    fn, args = example.function(), example.specs()

    def step(x: Any, w: Any, b: Any, dy: Any) -> tuple[Any, ...]:
        y, back = jax.vjp(fn, x, w, b)
        dx, dw, db = back(dy)
        return y, dx, w - 0.01 * dw, b - 0.01 * db

    def shorter(*values: Any) -> tuple[Any, ...]:
        y, _, *rest = step(*values)
        return y, *rest

    def moved(function: Callable[..., Any]) -> int:
        made = ir.ladder(function, *args, target="tpu-v5e", donate=(1, 2))
        return sum(k.bytes_read + k.bytes_written for k in made.kernels)

    return moved(step) - moved(shorter)


def _gathered(answer: Any, right: tuple[str, int]) -> str:
    """"" for all-gather, however it is spelt, and its bytes."""
    if not isinstance(answer, tuple | list) or len(answer) != 2 or (
            not isinstance(answer[1], numbers.Real)):
        return "this asks for two values, a name and a number of bytes."
    name, size = answer
    plain = "".join(filter(str.isalpha, str(name))).lower()
    if plain == "allreduce":
        return ("no sums are partial here, so nothing is added up. What is "
                "missing on each chip?")
    if not plain.endswith(right[0].replace("-", "")):
        return f"value 1: {str(name)[:60]!r} is not it."
    told = {right[1] // 4: "that is what each chip starts with, and reads.",
            right[1] * 3 // 4: "that is what arrives; the quarter that was "
                               "there is written too."}
    return "" if size == right[1] else told.get(
        size, f"value 2: {str(size)[:60]} is not it.")


@exercise(
    "3.10",
    hints=("Each chip needs all of W for its rows of Y, and has a quarter.",
           "What collects the quarters so that every chip has them all?"),
    why="An all-gather brings the quarters of W together on every chip: 4.2 "
        "MB written, and the fusion stays whole.",
    judge=_gathered,
)
def fsdp_collective() -> tuple[str, int]:
    """Which collective appears when X and W are both sharded by rows over
    four v5e chips, and how many bytes does it write on each?"""
    import jax
    from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

    from course_utils import example, ir

    fn, args = example.function(), example.specs()[:3]
    mesh = AbstractMesh((4,), ("chips",))
    split = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(
        mesh, PartitionSpec(*axes)))
        for a, axes in zip(args, (["chips"], ["chips"], []), strict=True)]
    made = ir.ladder(fn, *split, target="tpu-v5e").kernels
    return next((k.ops[0], k.bytes_written) for k in made
                if "all-" in k.ops[0])
