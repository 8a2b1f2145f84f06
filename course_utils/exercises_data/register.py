"""The exercises: each a question, a function that computes the answer, hints.

To add one, write a function that computes the right answer (import what it
needs inside) and decorate it; its docstring is the question. The answer may
be a number, a text or a tuple of these; where the reader hands in a function,
give ``judge``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Exercise:
    """What the notebook asks, and how an answer is judged.

    ``wrong`` pairs a typical mistake, as a function of the right answer,
    with a sentence that teaches. ``judge(answer, right)``, if given, decides
    instead: it returns "" for right, else a sentence saying what is wrong.
    A number is right within ``rel_tol`` of itself: loosely, where the
    question's own numbers are measured or rounded.
    """

    number: str
    question: str
    solve: Callable[[], Any]
    hints: tuple[str, ...]
    why: str
    wrong: tuple[tuple[Callable[[Any], Any], str], ...]
    judge: Callable[[Any, Any], str] | None
    rel_tol: float = 1e-9


EXERCISES: dict[str, Exercise] = {}

# Mistakes that any count of bytes or FLOPs invites.
DOUBLE = (lambda right: right * 2,
          "Twice too much: is each value counted once?")
ELEMENTS = (lambda right: right / 2,
            "Half of it: that counts values; a bf16 value has two bytes.")
MEGA = (lambda right: right / 1e6,
        "That is in MB (10**6 bytes); the question asks for bytes.")
MEBI = (lambda right: right / 2**20,
        "That is in MiB (2**20 bytes); the question asks for bytes.")


def exercise(number: str, *, hints: tuple[str, ...], why: str,
             wrong: tuple[Any, ...] = (),
             judge: Callable[[Any, Any], str] | None = None,
             rel_tol: float = 1e-9,
             ) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register the decorated function; ValueError if ``number`` is taken."""

    def register(solve: Callable[[], Any]) -> Callable[[], Any]:
        if number in EXERCISES:
            raise ValueError(f"exercise {number} is there twice: renumber.")
        question = " ".join((solve.__doc__ or "").split())
        EXERCISES[number] = Exercise(number, question, functools.cache(solve),
                                     hints, why, wrong, judge, rel_tol)
        return solve

    return register
