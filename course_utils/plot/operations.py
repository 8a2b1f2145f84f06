"""What operations cost: shares of a count, and products to scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
    gives one); an op with matmul FLOPs is a product. In percent.
    """
    measures = {"FLOPs": lambda op: op.flops, "bytes": lambda op: op.bytes,
                "ops": lambda op: 1}
    rows, said = {}, []
    for name, of in measures.items():
        products = sum(of(op) for op in cost.ops if op.matmul)
        share = 100 * products / sum(map(of, cost.ops))
        rest = 100 - share
        said.append(f"{share:.1f} % products")
        rows[name] = ([(0, share, "products", f"{share:.1f} %"),
                       (share, rest, "everything else", f"{rest:.1f} %")], "")
    ax = chart(sentence(rows, said), title)
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
    flop = amount(2 * math.prod(sizes.values()), "FLOP")
    work = f"2 · {' · '.join(map(str, sizes.values()))}\n= {flop}"
    ax = canvas(sentence(rows, (
        f"sums over {_summed(letters)}, {flop}"
        for letters in rows.values())), title)
    for row, (formula, letters) in enumerate(rows.items()):
        middle, summed = 190 + 205 * row, _summed(letters)
        out, left, right = formula.replace("ᵀ", "").replace("=", "").split()
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
    return ax.figure


def _summed(letters: str) -> str:
    """The letters of an einsum that are not in its result."""
    ins, out = letters.split("->")
    return "".join(sorted({*ins} - {*out, ","}))


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
