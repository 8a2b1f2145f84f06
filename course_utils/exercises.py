"""Check an answer, hint, solution, progress. Floor 5.

An answer that is still ``None`` or ``...`` is quiet, so that Run All is
green. Progress stays on this machine: a small JSON file in the folder
COURSE_PROGRESS or the user's data folder, or memory if that is read-only.
"""

from __future__ import annotations

import html
import inspect
import json
import numbers
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_utils.exercises_data import EXERCISES, Exercise
from course_utils.host import Missing

_COLORS = {"Correct": "#009E73", "Not yet": "#D55E00"}
_memory: dict[str, list[str]] = {}  # exercise: events in their order
_shown: dict[str, int] = {}  # hints shown in this kernel


@dataclass(frozen=True)
class Verdict:
    """What the course says to an answer; its text begins with ``word``.

    ``word`` is "Correct", "Not yet", "Not answered yet", "Hint 1 of 2" or
    "Solution", and "Not checked" or "Not computed" where a library is
    missing. ``code`` is the Python that computed a solution.
    """

    word: str
    text: str
    code: str = ""

    @property
    def correct(self) -> bool:
        return self.word == "Correct"

    def __str__(self) -> str:
        return "\n".join(filter(None, [f"{self.word}: {self.text}",
                                       self.code]))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        code = self.code and ("<details><summary>computed by</summary><pre>"
                              f"{html.escape(self.code)}</pre></details>")
        return ('<div style="background:#fff;color:#000;padding:.4em 1em;'
                f"border-left:6px solid {_COLORS.get(self.word, '#666')}\">"
                f"<b>{self.word}</b>: {html.escape(self.text)}{code}</div>")


def check(number: str, answer: Any = None) -> Verdict:
    """Compare ``answer`` with the computed solution of exercise ``number``."""
    exercise = _find(number)
    if _blank(answer):
        return Verdict("Not answered yet", f"{number} {exercise.question}")
    try:
        right = exercise.solve()
    except (Missing, ImportError) as lack:
        return Verdict("Not checked", str(lack))
    try:
        fault = _fault(exercise, answer, right)
    except Exception as error:  # from the reader's own function or object
        fault = f"checking that raised {type(error).__name__}: {error}"
    _record(number, "wrong" if fault else "right")
    return (Verdict("Not yet", fault) if fault
            else Verdict("Correct", exercise.why))


def hint(number: str) -> Verdict:
    """The next hint of exercise ``number``; the last one stays."""
    exercise = _find(number)
    at = _shown[number] = min(_shown.get(number, 0) + 1, len(exercise.hints))
    _record(number, "hint")
    return Verdict(f"Hint {at} of {len(exercise.hints)}",
                   exercise.hints[at - 1])


def solution(number: str) -> Verdict:
    """The answer of exercise ``number``, why, and the code computing it."""
    exercise = _find(number)
    try:
        right = exercise.solve()
    except (Missing, ImportError) as lack:
        return Verdict("Not computed", str(lack))
    _record(number, "solution")
    return Verdict("Solution", f"{right}. {exercise.why}",
                   inspect.getsource(inspect.unwrap(exercise.solve)))


def _find(number: str) -> Exercise:
    if isinstance(number, str) and number in EXERCISES:
        return EXERCISES[number]
    raise KeyError(f"there is no exercise {number!r}; there are "
                   f"{', '.join(EXERCISES)}.")


def _blank(answer: Any) -> bool:
    """Nothing written yet, or a part still to be filled in."""
    if isinstance(answer, tuple | list):
        return any(map(_blank, answer))
    return answer is None or answer is ... or (
        isinstance(answer, str) and not answer.strip())


def _fault(exercise: Exercise, answer: Any, right: Any) -> str:
    """What is wrong with ``answer``, as a sentence; "" if nothing is."""
    if exercise.judge:
        return exercise.judge(answer, right)
    fault = _differ(answer, right, exercise.rel_tol)
    if not fault:
        return ""
    # An exact mistake first; then a right answer, or a mistake, rounded.
    for rel_tol in (1e-9, max(1e-3, exercise.rel_tol)):
        for mistake, teach in exercise.wrong:
            if not _differ(answer, mistake(right), rel_tol):
                return teach
        if not _differ(answer, right, 1e-3) and "whole number" not in fault:
            return "Close: the exact value is asked for."
    return fault


def _differ(answer: Any, right: Any, rel_tol: float = 1e-9) -> str:
    """How a text, a number or a tuple of them differs from the right one."""
    if hasattr(answer, "tolist"):  # an array's or a tensor's numbers
        answer = answer.tolist()
    shown = repr(answer)[:60]
    if isinstance(right, tuple):
        if not isinstance(answer, tuple | list) or len(answer) != len(right):
            return f"this asks for {len(right)} values; {shown} is not that."
        for at, pair in enumerate(zip(answer, right, strict=True), start=1):
            if fault := _differ(*pair, rel_tol):
                return f"value {at}: {fault}"
        return ""
    if isinstance(right, str):
        same = isinstance(answer, str) and _fold(answer) == _fold(right)
        return "" if same else f"{shown} is not it."
    if isinstance(answer, bool) or not isinstance(answer, numbers.Real):
        return f"this asks for a number; {shown} is none."
    if abs(answer - right) <= rel_tol * abs(right):
        return ""
    if isinstance(right, numbers.Integral) and abs(answer - right) < 1:
        return f"a whole number is asked for: round {shown} up or down."
    return f"{shown} is too {'low' if answer < right else 'high'}."


def _fold(text: str) -> str:
    return " ".join(text.casefold().replace("_", "-").split())


def _file() -> Path:
    folder = os.environ.get("COURSE_PROGRESS")
    return Path(folder or Path.home() / ".local/share/model-to-silicon",
                "progress.json")


def _book() -> dict[str, list[str]]:
    """What is known; a file that is not such a book is begun anew."""
    try:
        stored = json.loads(_file().read_text(encoding="utf-8"))
        return _memory | {number: [*map(str, events)]
                          for number, events in stored.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return dict(_memory)


def _record(number: str, event: str) -> None:
    """Note an event; once solved, the way it was solved stands."""
    book = _book()
    events = book.setdefault(number, [])
    if "right" in events:
        return
    events.append(event)
    _memory.update(book)
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        _file().write_text(json.dumps(book, indent=1), encoding="utf-8")
    except OSError:
        pass  # memory has it


@dataclass(frozen=True)
class Progress:
    """Rows of notebook, solved, of how many, at first try, still open."""

    rows: tuple[tuple[str, int, int, int, str], ...]

    def __str__(self) -> str:
        return "\n".join(f"{a:<10}{b:<8}{c:<14}{d}" for a, b, c, d in [
            ("notebook", "solved", "at first try", "open"),
            *((notebook, f"{done} of {of}", first, left or "none")
              for notebook, done, of, first, left in self.rows)])

    __repr__ = __str__


def progress() -> Progress:
    """What is solved, notebook by notebook."""
    book, rows = _book(), []
    for notebook in dict.fromkeys(n.split(".")[0] for n in EXERCISES):
        mine = [n for n in EXERCISES if n.split(".")[0] == notebook]
        done = [n for n in mine if "right" in book.get(n, ())]
        first = sum(book[n][0] == "right" for n in done)
        left = " ".join(n for n in mine if n not in done)
        rows.append((notebook, len(done), len(mine), first, left))
    return Progress(tuple(rows))
