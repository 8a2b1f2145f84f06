"""The exercises of notebook 2: from operations to graph and IR."""

from __future__ import annotations

import math
import re
from typing import Any

from course_utils.exercises_data.register import (
    MEBI,
    MEGA,
    exercise,
)


class _Writer:
    """A value that writes down every operation on it."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def _write(self, name: str) -> _Writer:
        self.lines.append(name)
        return self

    def __matmul__(self, other: Any) -> _Writer:
        return self._write("matmul")

    def __add__(self, other: Any) -> _Writer:
        return self._write("add")


@exercise(
    "2.1",
    hints=("Python runs the loop; a Note only sees what is done to it.",
           "Call layers(Note(\"x\"), Note(\"w\"), Note(\"b\")) and count."),
    why="Python ran the loop, and the Note saw four products and four "
        "additions. That there was a loop is written nowhere: it is unrolled.",
    wrong=((lambda right: right // 4,
            "That is how many the source shows. Python runs the loop, and "
            "each round does both again."),
           (lambda right: right // 2, "Two operations in each round."),
           (lambda right: right + 4,
            "The loop itself writes nothing: a Note knows no `for`.")),
)
def unrolled() -> int:
    """How many lines does a Note write down for `layers`?"""
    def layers(x: Any, w: Any, b: Any) -> Any:
        for _ in range(4):
            x = x @ w + b
        return x

    x = _Writer([])
    layers(x, x, x)
    return len(x.lines)


@exercise(
    "2.2",
    hints=("f is summed over. The dot puts the dimensions of its left operand "
           "first: whose dimension comes first in the result?",
           'Show the "hlo" rung of the ladder of your einsum, and look for '
           "lhs_contracting_dims, rhs_contracting_dims and transpose."),
    why="The result begins with d, so y goes left: its f is dimension 1, and "
        "that of x dimension 0. No transpose is needed; a dot says which "
        "dimensions it sums.",
    wrong=((lambda right: (right[1], right[0], 0),
            "That is with x on the left, which gives 'bd'. Which operand has "
            "the d?"),
           (lambda right: (right[0], right[1], 1),
            "Who stands left decides what comes first in the result. So "
            "nothing is left to transpose."),
           (lambda right: (right[1], right[0], 1),
            "A transpose behind the dot would do it, but JAX spares it: it "
            "swaps the operands."),
           (lambda right: (0, 0, 0),
            "That is 'fb,fd->db', where both have f first. Here y is 'df'."),
           (lambda right: (1, 1, 0),
            "That is 'bf,df->db', where both have f last. Here x is 'fb'.")),
)
def contracting() -> tuple[int, int, int]:
    """Of the dot in the HLO of jnp.einsum('fb,df->db', x, y): what are
    lhs_contracting_dims and rhs_contracting_dims, counted from 0, and how
    many transposes stand beside it?"""
    import jax
    import jax.numpy as jnp

    from course_utils import ir

    x, y = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((256, 128),
                                                           (16, 256)))
    text = ir.ladder(lambda x, y: jnp.einsum("fb,df->db", x, y),
                     x, y)["hlo"].text
    left, right = (int(re.search(rf"{side}_contracting_dims=\{{(\d)\}}",
                                 text)[1]) for side in ("lhs", "rhs"))
    return left, right, len(re.findall(r" transpose\(", text))


@exercise(
    "2.3",
    hints=("A print breaks the graph. What is there to compile before the "
           "first one, and after the last?",
           "Compile it with backend=look, as above, call it, and count. "
           "(Dynamo remembers what it compiled: define steps again first.)"),
    why="Three breaks cut the function in four, but a piece with no tensor "
        "operation is no graph: only the multiplication and the addition "
        "are left to compile.",
    wrong=((lambda right: 4,
            "Four pieces, but two of them hold no operation on a tensor."),
           (lambda right: 3, "That is the number of breaks."),
           (lambda right: 1, "Dynamo cannot put a print into a graph.")),
)
def graphs_made() -> int:
    """How many graphs does Dynamo make of `steps`?"""
    import contextlib
    import io

    from course_utils import host

    torch = host.need("torch", "Dynamo is its part")
    graphs = []

    def steps(x: Any) -> Any:
        print("start")
        x = x * 2
        print("middle")
        x = x + 1
        print("end")
        return x

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with contextlib.redirect_stdout(io.StringIO()):
        torch.compile(steps, backend=keep)(torch.ones(2))
    return len(graphs)


@exercise(
    "2.4",
    hints=("Which part of 1 - tanh(v)**2 has the forward computed already, "
           "and in which number type?",
           'Take the ladder with wrt="all" and subtract "saved inputs" from '
           '"saved".'),
    why="The slope of tanh follows from its result, so the backward needs "
        "all of Y in bf16: twice the bytes of a mask. For the ReLU a yes or "
        "no did.",
    wrong=((lambda right: right / 2,
            "That is a mask of one byte each, which is enough for a ReLU. "
            "The slope of tanh takes more than yes or no."),
           MEGA, MEBI,
           (lambda right: right + 2 * (512 * 1024 + 1024 * 2048),
            "That includes X and W, which are there anyway."),
           (lambda right: right * 2,
            "Once is enough: either the sum or its tanh."),
           (lambda right: 0,
            "The result leaves the function, but the backward pass needs it: "
            "it counts as saved.")),
)
def saved_for_tanh() -> int:
    """How many bytes besides X and W does the forward graph save for the
    backward if tanh takes the place of the ReLU? (The result counts if the
    backward needs it.)"""
    from course_utils import example, host, ir

    torch = host.need("torch", "AOTAutograd is its part")
    args = example.metas()[:3]
    memory = ir.ladder(lambda x, w, b: torch.tanh(x @ w + b), *args,
                       wrt="all").memory
    return memory["saved"] - memory["saved inputs"]


@exercise(
    "2.5",
    hints=("Dynamo's second graph of x * n had a symbol for n. Can a graph "
           "that has no loop hold `for _ in range(n)`?",
           "Compile it with backend=look, call it four times, count graphs."),
    why="The number of rounds decides how many products the graph holds, so "
        "n cannot stay open: each n is a guard, and a graph of its own.",
    wrong=((lambda right: 2,
            "So it was for x * n, where n is only multiplied. Here it decides "
            "how many operations there are."),
           (lambda right: 1, "One graph has one number of products."),
           (lambda right: 8, "That is the limit, and it is not reached."),
           (lambda right: 14, "Those are the products. How many graphs?")),
)
def powers_made() -> int:
    """How many graphs does Dynamo make of `power`, called with n = 2, 3, 4
    and 5?"""
    from course_utils import host

    torch = host.need("torch", "Dynamo is its part")
    graphs = []

    def power(x: Any, n: int) -> Any:
        for _ in range(n):
            x = x * x
        return x

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(power, backend=keep)
    for n in (2, 3, 4, 5):
        compiled(torch.ones(2), n)
    return len(graphs)


@exercise(
    "2.6",
    hints=("A trace is kept for a shape and a type. Which of the six are "
           "alike in both?",
           "jax.typeof(value) says what jit looks at. A ~ marks a weak type."),
    why="f32[3] twice, int32[3], a weak f32 (1.0 and 2.0 alike), and a strong "
        "one: np.float32(2) has chosen its type, a Python float has not.",
    wrong=((lambda right: right + 2,
            "Values do not count: zeros look like ones, and 2.0 like 1.0."),
           (lambda right: right + 1,
            "Two of them differ in value only, twice over."),
           (lambda right: right - 1,
            "Is np.float32(2) the same to JAX as 2.0? Think of what each "
            "becomes beside a bf16 array."),
           (lambda right: right - 2,
            "Shape is not all that counts: the type does too, and whether "
            "that type is weak.")),
)
def traces_made() -> int:
    """How often is f traced, for the six arguments jnp.ones(3), jnp.zeros(3),
    jnp.ones(3, int), 1.0, 2.0 and np.float32(2)?"""
    import jax
    import jax.numpy as jnp
    import numpy as np

    traces = []

    def f(x: Any) -> Any:
        traces.append(x)
        return x + 1

    fast = jax.jit(f)
    for value in (jnp.ones(3), jnp.zeros(3), jnp.ones(3, int), 1.0, 2.0,
                  np.float32(2)):
        fast(value)
    return len(traces)


@exercise(
    "2.7",
    hints=("A listing for one chip shows what that chip holds: a slice.",
           "Undo the division: multiply the dimension that was split."),
    why="Eight slices of [1, 8192] are [8, 8192], and eight of [4096, 8192] "
        "are [32768, 8192]. One chip's program shows only its share.",
    wrong=((lambda right: ((1, 8192), (4096, 8192)),
            "That is one chip's share, as printed: undo the split."),
           (lambda right: ((1, 8192), right[1]),
            "The first operand is split too: each chip has one of its rows."),
           (lambda right: ((8192, 8), right[1]),
            "Each chip has a row of 8192, and there are eight of them."),
           (lambda right: (right[0], (4096, 8192)),
            "4096 is one chip's part of the first dimension."),
           (lambda right: (right[0], (4096, 65536)),
            "It was the first dimension that was split."),
           (lambda right: ((1, 65536), right[1]),
            "The split ran along the first dimension, the one of size 1.")),
)
def whole_arrays() -> tuple[tuple[int, int], tuple[int, int]]:
    """Which whole arrays are behind bf16[1, 8192] and bf16[4096, 8192] on
    each of eight chips, both split in eight along their first dimension?"""
    from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

    split = NamedSharding(AbstractMesh((8,), ("chips",)),
                          PartitionSpec("chips"))

    def whole(part: tuple[int, int]) -> tuple[int, int]:
        return next((rows, part[1]) for rows in range(8, 2**16, 8)
                    if split.shard_shape((rows, part[1])) == part)

    return whole((1, 8192)), whole((4096, 8192))


@exercise(
    "2.8",
    hints=("What does each slope need, its input or its result: that of exp, "
           "of log1p, of tanh, and of a product? What two of them need is "
           "kept once.",
           'kept(mish, x), and the "saved" of ir.ladder(mish, x, wrt="all").'),
    why="Eager keeps x, the exponential and the tanh. The exponential is its "
        "own slope and the input of log1p, and is kept once. All of it "
        "follows from x by cheap operations, so the cut keeps only x.",
    wrong=((lambda right: right[::-1], "Eager's number comes first."),
           (lambda right: (right[0] + 4, right[1]),
            "Is one matrix counted twice? The result of exp is the input of "
            "log1p. Or one too many: tanh's slope needs its result, not its "
            "input."),
           (lambda right: (right[0] - 4, right[1]),
            "One too few for eager: x, the exponential and the tanh all "
            "wait."),
           (lambda right: (right[0], 0),
            "The backward must begin from something: x itself is saved."),
           (lambda right: (right[0] - 4, right[1] - 4),
            "The input counts too: it must not go before the backward is "
            "done."),
           (lambda right: (right[0], right[0]),
            "Which of these can be made again from x without a product?"),
           (lambda right: tuple(4 * n for n in right),
            "A matrix of 1024 x 1024 f32 takes 4 MiB.")),
)
def kept_for_mish() -> tuple[float, float]:
    """How many MiB does eager PyTorch keep for the backward of
    x * tanh(log1p(exp(x))), x f32[1024, 1024], and how many the cut?"""
    from course_utils import host, ir

    torch = host.need("torch", "autograd is its part")
    storages = {}

    def mish(x: Any) -> Any:
        return x * torch.tanh(torch.log1p(torch.exp(x)))

    def pack(t: Any) -> Any:
        storages[t.data_ptr()] = t.untyped_storage().nbytes()
        return t

    x = torch.rand(1024, 1024, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        mish(x)
    saved = ir.ladder(mish, x.detach(), wrt="all").memory["saved"]
    return sum(storages.values()) / 2**20, saved / 2**20


@exercise(
    "2.9",
    hints=("One line rises by 80 ms with each shape; the other lies flat.",
           "80 n > 1500 + 1900, and n is a whole number."),
    why="3,400 ms divided by 80 is 42.5: up to 42 shapes JAX has waited "
        "less, from 43 on torch.compile. Sequences of every length are that "
        "many; the batches of one training run are one or two.",
    wrong=((lambda right: right - 1,
            "At 42 shapes JAX has waited 3,360 ms, still less."),
           (lambda right: 42.5, "Shapes come whole."),
           (lambda right: math.floor(1500 / 80) + 1,
            "The second shape compiles once more, with a symbol."),
           (lambda right: math.floor(1900 / 80) + 1,
            "The first shape has its own compile, before the symbol.")),
)
def shapes_until_equal() -> int:
    """From how many different shapes on has torch.compile (1,500 ms, then
    1,900 ms, then none) waited less for its compiler than JAX (80 ms each)?
    """
    waits, shapes = {"jax": 0, "torch": 0}, 0
    while waits["torch"] >= waits["jax"]:
        shapes += 1
        waits["jax"] += 80
        waits["torch"] += {1: 1500, 2: 1900}.get(shapes, 0)
    return shapes
