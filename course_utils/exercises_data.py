"""The exercises: each a question, a function that computes the answer, hints.

To add one, write a function that computes the right answer (import what it
needs inside) and decorate it; its docstring is the question. The answer may
be a number, a text, a set, a tuple or a dict of these; where the reader hands
in a function, give ``judge``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Exercise:
    """``rel_tol`` is the relative error allowed in a number (0: exact).

    ``wrong`` pairs a typical mistake, as a function of the right answer,
    with a sentence that teaches. ``judge(answer, right)``, if given, decides
    instead: it returns "" for right, else a sentence saying what is wrong.
    """

    number: str
    question: str
    solve: Callable[[], Any]
    hints: tuple[str, ...]
    why: str
    rel_tol: float
    wrong: tuple[tuple[Callable[[Any], Any], str], ...]
    judge: Callable[[Any, Any], str] | None


EXERCISES: dict[str, Exercise] = {}

# Mistakes that any count of bytes or FLOPs invites.
HALF = (lambda right: right / 2, "Half of it: a multiply-add is two FLOPs.")
DOUBLE = (lambda right: right * 2,
          "Twice too much: is each value counted once?")
ELEMENTS = (lambda right: right / 2,
            "Half of it: that counts values; a bf16 value has two bytes.")
MIB = (lambda right: right * 1e6 / 2**20,
       "That is in MiB (2**20 bytes); the question asks for MB (10**6).")


def exercise(number: str, *, hints: tuple[str, ...], why: str,
             rel_tol: float = 0.0, wrong: tuple[Any, ...] = (),
             judge: Callable[[Any, Any], str] | None = None,
             ) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register the decorated function; ValueError if ``number`` is taken."""

    def register(solve: Callable[[], Any]) -> Callable[[], Any]:
        if number in EXERCISES:
            raise ValueError(f"exercise {number} is there twice: renumber.")
        question = " ".join((solve.__doc__ or "").split())
        EXERCISES[number] = Exercise(number, question, functools.cache(solve),
                                     hints, why, rel_tol, wrong, judge)
        return solve

    return register


def _example() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The running example and its arguments, for JAX."""
    import jax
    import jax.numpy as jnp

    shapes = ((512, 1024), (1024, 2048), (2048,))
    return (lambda x, w, b: jax.nn.relu(x @ w + b),
            tuple(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes))


@exercise(
    "3.1",
    hints=("The product reads X and W, and writes Y: bf16[512, 2048].",
           "The addition reads Y and b and writes Y again; the ReLU reads "
           "and writes Y. Add up the three."),
    why="X, W and b are read once and Y is written three times and read "
        "twice: 15.7 MB, where 7.3 would do.",
    wrong=(ELEMENTS, MIB,
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

    from course_utils import ir

    x, w, b = (torch.empty(s.shape, dtype=torch.bfloat16, device="meta")
               for s in _example()[1])
    table = ir.compare_backends(lambda x, w, b: torch.relu(x @ w + b),
                                x, w, b, backends=("eager",))
    return int((table.bytes_read + table.bytes_written).sum())


@exercise(
    "3.2",
    hints=("The addition and the ReLU are in one kernel when one fused "
           "computation holds both add( and maximum(.",
           "Three passes raise the count. One wraps the product, one wraps "
           "each lonely convert; what does the third do?"),
    why="dot-library-rewriter only wraps the product for YNNPACK, and "
        "fusion-wrapper only gives each lonely operation a kernel of its own.",
)
def fusing_pass() -> str:
    """Which pass made the kernel that holds add and maximum?"""
    import re

    from course_utils import ir

    fn, args = _example()
    body = re.compile(r"\{\n((?:  .*\n)*?)  ROOT .* convert\(%max")
    return next(p.name for p in ir.passes(fn, *args, target="cpu")
                if any(" add(" in lines and "parameter(2)" not in lines
                       for lines in body.findall(p.text)))


@exercise(
    "3.3",
    hints=("Memory needed is argument + output + temp - alias.",
           "Every tile of the result needs a whole row of x. What happens "
           "to x if the result is written over it, tile by tile?"),
    why="The product reads each row of x many times, so it cannot write over "
        "x. The compiler makes it elsewhere and adds a second kernel that "
        "copies it into x: donating cost a copy and saved nothing.",
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
    "3.4",
    hints=("The tile needs 128 x 128 x 1024 multiply-adds.",
           "Divide by what one instruction does: 64 x 128 x 16."),
    why="128 x 128 x 1024 multiply-adds at 64 x 128 x 16 an instruction. "
        "Fewer stand in the code, because the loop over K runs many times.",
    wrong=(HALF, DOUBLE,
           (lambda right: right / 16,
            "That is how many stand in the code; the loop over K runs 16 "
            "times.")),
)
def hgmma_executed() -> int:
    """How many HGMMA.64x128x16 make a 128x128 tile of Y when K is 1024?"""
    return (128 * 128 * 1024) // (64 * 128 * 16)


@exercise(
    "3.5",
    hints=("Round both sizes up to a whole number of tiles.",
           "3 rows need one tile of 8; 130 columns need two tiles of 128."),
    why="One tile down and two across, 8 x 256 numbers of 4 bytes: 5.25 "
        "times what 3 x 130 numbers need.",
    wrong=((lambda right: 3 * 130 * 4, "That is without the padding."),
           (lambda right: right / 4, "Those are numbers; f32 has 4 bytes."),
           (lambda right: right / 2,
            "130 columns do not fit in one tile of 128.")),
)
def padded_bytes() -> int:
    """How many bytes does an f32[3, 130] occupy in tiles of 8x128?"""
    rows, columns = (-(-size // tile) * tile
                     for size, tile in ((3, 8), (130, 128)))
    return rows * columns * 4


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
    "3.6",
    hints=("Multiply x[:, :, None] with w[None] and sum the middle axis? XLA "
           "recognises that as a product too, and calls the library.",
           "Add up 64 outer products, column k of x with row k of w, in a "
           "Python loop: tracing unrolls it."),
    why="XLA calls a library for what its rules recognise as a product; a "
        "long chain of multiplies and adds they do not recognise, so it "
        "generates code. Whether that code is fast is another question.",
    judge=_own_product,
)
def own_product() -> str:
    """A function of x and w, both f32[64, 64], that returns x @ w without a
    library call on the CPU."""
    return "lambda x, w: sum(x[:, k:k + 1] * w[k] for k in range(64))"


@exercise(
    "3.7",
    hints=("Each chip needs all of W for its rows of Y, and has a quarter.",
           "What collects the quarters so that every chip has them all?"),
    why="An all-gather brings the quarters of W together on every chip: 4.2 "
        "MB written, and the fusion stays whole.",
    wrong=((lambda right: (right[0], right[1] // 4),
            "That is what each chip starts with, and what it reads."),
           (lambda right: ("all-reduce", 512 * 2048 * 2),
            "No sums are partial here: each chip has whole rows of X."),
           (lambda right: ("all-reduce", right[1]),
            "Nothing is added up here; what is missing on each chip?")),
)
def fsdp_collective() -> tuple[str, int]:
    """Which collective appears when X and W are both sharded by rows over
    four v5e chips, and how many bytes does it write on each?"""
    import jax
    from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

    from course_utils import ir

    fn, args = _example()
    mesh = AbstractMesh((4,), ("chips",))
    split = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(
        mesh, PartitionSpec(*axes)))
        for a, axes in zip(args, (["chips"], ["chips"], []), strict=True)]
    made = ir.ladder(fn, *split, target="tpu-v5e").kernels
    return next((k.ops[0], k.bytes_written) for k in made
                if "all-" in k.ops[0])


@exercise(
    "3.8",
    hints=("One thread's registers times 32, rounded up to 256, is what a "
           "warp takes.",
           "The kernel's registers a thread are in the table of the ladder: "
           "nvidia.kernels[0].registers."),
    why="A block takes its registers for as long as it runs. This kernel "
        "keeps a 128x128 tile of f32 in them, and few blocks fit.",
    wrong=((lambda right: right * 4, "Those are warps; a block has four."),
           (lambda right: right + 1, "A block fits whole or not at all.")),
)
def blocks_by_registers() -> int:
    """How many blocks of our Triton kernel fit on an SM of the H100 if
    registers were the only limit?"""
    import torch

    from course_utils import chips, kernels

    x, w, b = _example()[1]
    meta = [torch.empty(shape, dtype=torch.bfloat16, device="meta")
            for shape in (x.shape, w.shape, b.shape, (512, 2048))]
    made = kernels.build(kernels.matmul_bias_relu,
                         *kernels.linear_args(*meta), target="h100")
    warp = -(-made.registers * 32 // 256) * 256
    return chips.get("h100").registers_per_sm // (warp * made.num_warps)
