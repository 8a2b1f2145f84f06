"""The exercises of notebook 2: from operations to graph and IR."""

from __future__ import annotations

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
    hints=("Contracting means summed over: which letter is in both operands "
           "and not in the result?",
           'Show the "hlo" rung of the ladder of your einsum, and look for '
           "lhs_contracting_dims and rhs_contracting_dims."),
    why="The sum runs over f: dimension 1 of x and dimension 1 of y. No "
        "transpose is needed; a dot says which dimensions it sums.",
    wrong=((lambda right: (1, 0),
            "That is 'bf,fd->bd', where y has f first. Here y is 'df'."),
           (lambda right: (0, 0), "Those are b and d, which stay."),
           (lambda right: (0, 1), "The first number is for x, 'bf'.")),
)
def contracting() -> tuple[int, int]:
    """Over which dimension of x, and which of y, does
    jnp.einsum('bf,df->bd', x, y) sum? Counted from 0."""
    import jax
    import jax.numpy as jnp

    from course_utils import ir

    x, y = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((128, 256),
                                                           (16, 256)))
    text = ir.ladder(lambda x, y: jnp.einsum("bf,df->bd", x, y),
                     x, y)["hlo"].text
    left, right, first = (re.search(pattern, text)[1] for pattern in (
        r"lhs_contracting_dims=\{(\d)\}", r"rhs_contracting_dims=\{(\d)\}",
        r" dot\((\w)"))
    return ((int(left), int(right)) if first == "x"
            else (int(right), int(left)))


@exercise(
    "2.3",
    hints=("A print breaks the graph. What is there to compile before the "
           "first one, and after the last?",
           "Compile it with backend=keep, as above, call it, and count."),
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
    hints=("The slope of tanh at v is 1 - tanh(v)**2. What is the least the "
           "backward pass can do with?",
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
    backward if tanh takes the place of the ReLU?"""
    from course_utils import example, host, ir

    torch = host.need("torch", "AOTAutograd is its part")
    args = example.metas()[:3]
    memory = ir.ladder(lambda x, w, b: torch.tanh(x @ w + b), *args,
                       wrt="all").memory
    return memory["saved"] - memory["saved inputs"]
