"""The objects every compiler of the course gives back. Floor 1."""

from __future__ import annotations

import functools
import inspect
import platform
from dataclasses import dataclass, field
from typing import Any

from course_utils.compilers import text as _text
from course_utils.host import Missing

FOLDED_BYTES = 64_000  # a page shows this much of a rung, folded


class _Shown:
    """What has a name, a text, its language and its tool can be shown."""

    def show(self, wanted: str | None = None, lines: int = 12,
             width: int = 100) -> Excerpt:
        """The lines that match the regular expression ``wanted``.

        Without it, the first ``lines`` lines. The whole text is folded below.
        """
        _text.pattern(wanted or "")
        return Excerpt(self, wanted, lines, width)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.show()._repr_html_()


@dataclass(frozen=True)
class Rung(_Shown):
    """One representation of a function, as a real tool wrote it.

    ``raw`` is what the tool wrote; ``text`` the same with what changes from
    run to run folded (cell paths, addresses, ids); ``language`` says how to
    colour it; ``seconds`` is the wall time it took. ``origins`` holds, for
    each line of ``raw``, the line of the reader's file that caused it: of a
    library's helper the line that called it, 0 where the compiler does not
    say; it is empty where the compiler keeps none. A rung that this machine
    cannot make has no ``tool``, and its text says why.
    """

    name: str
    raw: str = field(repr=False)
    language: str
    tool: str
    seconds: float
    origins: tuple[int, ...] = field(default=(), repr=False)

    @functools.cached_property
    def text(self) -> str:
        return _text.canonical(self.raw)


def absent(name: str, missing: Missing) -> Rung:
    """A rung that this machine cannot make, and that says why."""
    return Rung(name, str(missing), "text", "", 0.0)


def _written(fn: Any) -> Any:
    """What holds the code of ``fn``: without its wrappers, or a method."""
    while isinstance(fn, functools.partial) or hasattr(fn, "__wrapped__"):
        fn = fn.func if isinstance(fn, functools.partial) else fn.__wrapped__
    if not (inspect.isroutine(fn) or inspect.isclass(fn)):
        fn = getattr(fn, "forward", type(fn).__call__)  # module or callable
    return fn


def file_of(fn: Any) -> str:
    """The file in which ``fn`` is written, "" where it has no code."""
    code = getattr(_written(fn), "__code__", None)
    return code.co_filename if code else ""


def home_of(fn: Any) -> str:
    """``file_of``, the same for any cell: its file is another in each run."""
    file = file_of(fn)
    return "<cell>" if _text.steady(file) == "<cell>" else file


def source(fn: Any) -> tuple[Rung, ...]:
    """The Python rung, or none where the function has no source."""
    try:
        lines, start = inspect.getsourcelines(_written(fn))
    except (OSError, TypeError):
        return ()
    return (Rung("python", "".join(lines), "python",
                 f"Python {platform.python_version()}", 0.0,
                 tuple(range(start, start + len(lines)))),)


@dataclass(frozen=True)
class Pass(_Shown):
    """The HLO after one pass of XLA, and whether the pass changed it."""

    name: str
    pipeline: str
    text: str = field(repr=False)
    changed: bool
    language = "hlo"

    @property
    def tool(self) -> str:
        return f"pass {self.name} of {self.pipeline}"


@dataclass(frozen=True)
class Excerpt:
    """A few lines of a rung, and the rest of it folded below."""

    rung: Rung | Pass
    wanted: str | None
    lines: int
    width: int

    def __str__(self) -> str:
        return _text.excerpt(self.rung.text, self.wanted, self.lines,
                             self.width)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        rung, whole = self.rung, self.rung.text
        if not rung.tool:
            return _text.plain(whole)
        count = len(whole.splitlines())
        title = f"{rung.name}: all {count:,} lines, by {rung.tool}"
        if len(whole) > FOLDED_BYTES:
            title += f" (the first {FOLDED_BYTES // 1000} kB here)"
        return (_text.html(str(self), rung.language, self.wanted)
                + _text.folded(title, _text.plain(whole[:FOLDED_BYTES])))


@dataclass(frozen=True)
class Buffer:
    """A value's place in memory, and when it is needed.

    ``kind`` is "parameter", "output" or "temp"; values with the same
    ``allocation`` share memory. ``first`` and ``last`` number the steps of
    the schedule between which the value lives; ``bytes`` is its size.
    """

    name: str
    shape: str
    bytes: int
    kind: str
    allocation: int
    offset: int
    first: int
    last: int


@dataclass(frozen=True)
class Kernel:
    """One unit of device work in a compiled function.

    ``author`` is "compiler" where the code was generated for this function
    and "library" where a ready-made routine is called; ``who`` names either
    ("XLA", "Inductor", "oneDNN", "cuBLAS"). ``ops`` are the operations inside,
    ``bytes_read`` and ``bytes_written`` what it moves if every operand is
    read once and every result written once: of one that is only sliced or
    gathered from what is taken, of one updated in place the update. None
    where no shape is known.
    ``registers`` and ``spills`` (bytes) are per thread, ``shared_bytes`` per
    block. On a TPU ``bundles`` counts its instructions, each once, however
    often a loop runs it, and ``slots`` maps a unit ("MXU", "VALU", "VLOAD",
    "VSTORE", ...) to the share of the bundles in which it is busy.
    """

    name: str
    author: str
    who: str
    ops: tuple[str, ...]
    bytes_read: int | None
    bytes_written: int | None
    registers: int | None = None
    spills: int | None = None
    shared_bytes: int | None = None
    bundles: int | None = None
    slots: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Compiled:
    """What one compile gave; ``memory`` is a Ladder's."""

    rungs: tuple[Rung, ...]
    passes: tuple[Pass, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    memory: dict[str, int] = field(default_factory=dict)
