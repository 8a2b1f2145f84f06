"""What operations cost: shares of a count, and products to scale."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from course_utils._whole import whole
from course_utils.plot.base import (
    BLUE,
    PALE,
    RED,
    amount,
    box,
    canvas,
    chart,
    legible,
    segments,
    sentence,
    themed,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@themed
def shares(cost: Any, title: str = "What products are of the whole") -> Figure:
    """Products against everything else, by FLOPs, by bytes and by op.

    ``cost`` has ``ops``, each with matmul, flops and bytes (``flops.count``
    gives one); an op with matmul FLOPs is a product. In percent; a measure
    that is 0, as the FLOPs of a copy, is left out.
    """
    measures = {"FLOPs": lambda op: op.flops, "bytes": lambda op: op.bytes,
                "ops": lambda op: 1}
    rows = {}
    for name, of in measures.items():
        if total := sum(map(of, cost.ops)):
            share = 100 * sum(of(op) for op in cost.ops if op.matmul) / total
            rest = 100 - share
            rows[name] = ([(0, share, "products", f"{share:.1f} %"), (
                share, rest, "everything else", f"{rest:.1f} %")], "")
    ax = chart(sentence(rows, (f"{parts[0][3]} products"
                               for parts, _ in rows.values())), title)
    ax.set(xlabel="percent of the total", xlim=(0, 100))
    segments(ax, rows)
    return ax.figure


@themed
def products(rows: Mapping[str, str], title: str = "", **sizes: int) -> Figure:
    """Matrix products to scale, the dimension that each sums in red.

    ``rows`` maps a formula ("dW = Xᵀ dY") to its einsum ("mk,mn->kn": each
    matrix as stored, not transposed); ``sizes`` are the letters' lengths.
    """
    legible("products", len(rows), 3)
    sizes = {letter: whole(letter, size) for letter, size in sizes.items()
             if letter in {*"".join(rows.values())}}
    ax, said = canvas("", title), []
    for row, (formula, letters) in enumerate(rows.items()):
        letters = letters.replace(" ", "")
        (out, left, right), summed = _names(formula, letters, sizes)
        mine = [n for letter, n in sizes.items() if letter in letters]
        flop = amount(2 * math.prod(mine), "FLOP")
        said.append(f"sums over {summed}, {flop}")
        work = f"2 · {' · '.join(map(str, mine))}\n= {flop}"
        middle = 190 + 205 * row
        ax.text(30, middle - 34, formula, size=26, weight="bold", va="center")
        ax.text(30, middle + 10, f"summed over {summed}", color=RED,
                size=18, va="center", weight="bold")
        ax.text(30, middle + 56, work, va="center")
        for x, name, edges, sign in zip(
                (440, 765, 1105), (left, right, out),
                letters.replace("->", ",").split(","), "×= ", strict=True):
            _matrix(ax, x, middle, edges, summed, sizes)
            ax.text(x, middle, name, size=20, ha="center", va="center")
            ax.text(x + 155, middle, sign, size=30, ha="center", va="center")
    ax.figure.summary = sentence(rows, said)
    return ax.figure


def _names(formula: str, letters: str, sizes: Mapping[str, int],
           ) -> tuple[list[str], str]:
    """The matrices of "C = A B", and the letter that its einsum sums over."""
    names, edges = re.findall(r"[^\s=ᵀ]+", formula), {*letters} - {*",->"}
    if len(names) != 3 or not edges <= sizes.keys() or not re.fullmatch(
            r"(\w)(?!\1)\w,(\w)(?!\2)\w->(\w)(?!\3)\w", letters) or any(
            letters.count(edge) != 2 for edge in edges):
        raise ValueError(
            f"rows has {formula!r}: {letters!r}, sizes {[*sizes]}: give a "
            "product of two matrices as 'C = A B': 'mk,kn->mn', and the "
            "length of each letter.")
    return names, min(edges - {*letters.partition("->")[2]})


def _matrix(ax: Axes, x: float, y: float, edges: str, summed: str,
            sizes: Mapping[str, int]) -> None:
    """A rectangle about (x, y), its height the first letter of ``edges`` and
    its width the second; an edge that is summed over is thick and red."""
    h, w = (200 * sizes[edge] / max(sizes.values()) for edge in edges)
    left, top = x - w / 2, y - h / 2
    box(ax, left, top, w, h, face=PALE, edge=BLUE)
    for edge, end, at, turn in (
            (edges[0], (left, top + h), (left - 9, y, "right", "center"), 90),
            (edges[1], (left + w, top), (x, top - 8, "center", "bottom"), 0)):
        on = edge in summed
        ax.plot((left, end[0]), (top, end[1]), color=RED if on else BLUE,
                linewidth=7 if on else 2)
        ax.text(*at[:2], f"{edge} = {sizes[edge]}", ha=at[2], va=at[3],
                rotation=turn, color=RED if on else "black",
                weight="bold" if on else "normal")
