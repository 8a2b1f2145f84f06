"""Text of compilers, made steady from run to run and fit to be read.

Floor 1. ``canonical`` folds what differs between two runs of the same
compile; ``html`` and ``excerpt`` show a text on a page.
"""

from __future__ import annotations

import functools
import html as _html
import re
from collections.abc import Iterator, Sequence
from typing import Any

_PAGE = ("background:#f7f7f7;color:#111;border-left:4px solid #0072b2;"
         "padding:8px 12px;margin:4px 0;font-family:monospace;"
         "font-size:13px;line-height:1.35;overflow-x:auto;"
         "white-space:pre;text-align:left")
_PYGMENTS = ("python", "cpp", "diff")  # languages it colours well itself
_ATTRIBUTES = (", metadata=", ", backend_config=", ", frontend_attributes=")
_TABLE = re.compile(
    r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(?:.+\n)*\n?",
    re.M)
_VALUES = (re.compile(r'(dense<"0x)[0-9A-F]{2000,}(?=">)'),
           re.compile(r"(constant\(\{)[^=]{4000,}?(?=\}\))"))
_STEADY = tuple((needle, re.compile(pattern, re.M), replacement) for
                needle, pattern, replacement in (
    # A word that must be there, which is quick to see, and what it betrays.
    # Where debug information says the source lies.
    (".file", r'(\.file\s+\d+) "[^"]*"( "[^"]*")?', r'\1 "<source>"'),
    (".py:", r"(//|;) \S+\.py(:\d+:\d+)", r"\1 <source>\2"),
    (".asci", r'(\.asciz|\.ascii)(\s+)"/[^"]*"', r'\1\2"<source>"'),
    ("!DIFile", r"!DIFile\([^)]*\)", "!DIFile(<source>)"),
    (".debug_", r"(\.section\s+\.debug_\w+)\s*\{[^}]*\}",  # paths, in bytes
     r"\1 { <debug> }"),
    ("offset=", r" *; string offset=\d+", ""),  # moves with path lengths
    # The file of a notebook cell, and any temporary file of ours.
    ("ipykernel_", r"(/[\w.-]+)*/ipykernel_\d+/\d+\.py", "<cell>"),
    ("<", r"<ipython-input-[\w-]+>|<dynamic-code>", "<cell>"),
    ("/site-packages/", r"(/[\w.+-]+)*/site-packages/", ""),
    ("/course_utils/", r"(/[\w.+-]+)*/(course_utils/)", r"\2"),
    ("/tmp", r"(/[\w.+-]+)*/tmp[\w-]*(/[\w.+-]+)*/", "<temporary>/"),
    ("#loc", r"^#loc.*\n", ""),
    ("loc(", r' loc\((?:#loc\d*|unknown|callsite\([^()]*\)|"[^"]*"'
     r'(?:\([^()]*\))?)\)', ""),
    # Addresses of Python objects, and functions named by them.
    ("at 0x", r"\bat 0x[0-9a-f]+", "at 0x..."),
    ("___unnamed", r"(___unnamed_scope)_\d+_c\d+", r"\1"),  # torch 2.11
))


def canonical(raw: str) -> str:
    """``raw`` without what changes from run to run.

    Cell paths become ``<cell>``, addresses ``0x...``; of HLO the metadata,
    back-end configurations and source tables are dropped, and of a captured
    array of more than about 1 kB its values.
    """
    text = raw
    for values in _VALUES:
        text = values.sub(r"\1...", text)
    if text.startswith("HloModule"):
        text = _TABLE.sub("", text)
        for attribute in _ATTRIBUTES:
            text = dropped(text, attribute)
        text = re.sub(r"\n{3,}", "\n\n", text)
    return steady(text).strip("\n") + "\n"


def steady(text: str) -> str:
    """``text`` with paths, addresses and ids folded, and nothing dropped."""
    for needle, pattern, replacement in _STEADY:
        if needle in text:
            text = pattern.sub(replacement, text)
    return text


def without_ids(text: str, language: str) -> str:
    """``text`` with the numbers of its values hidden: %sin for sin.1."""
    if language == "hlo":  # before optimization its names come without %
        text = re.sub(r"(?<![\w%.-])([A-Za-z_][\w-]*(?:\.\d+)+)(?![\w.-])",
                      r"%\1", text)
    return re.sub(r"%([A-Za-z_][\w-]*?)?[._]?\d[._\d]*(?![\w-])", r"%\1",
                  text)


def pattern(wanted: str) -> re.Pattern[str]:
    """The regular expression ``wanted``; ValueError where it is none."""
    try:
        return re.compile(wanted)
    except re.error as error:
        raise ValueError(
            f"wanted={wanted!r} is no regular expression ({error}): write "
            "a bracket, a dot or a star itself with \\ before it.") from None


def follow(raw: str, numbers: Sequence[int], kept: str) -> tuple[int, ...]:
    """``numbers``, one for each line of ``raw``, for what was kept of it.

    ``kept`` is ``raw`` after ``canonical`` or ``steady``; 0 for a line that
    neither left as it was.
    """
    if len(raw.splitlines()) == len(kept.splitlines()):
        return tuple(numbers)
    rows = [_bare(row) for row in raw.splitlines()]
    found, at = [], 0
    for row in map(_bare, kept.splitlines()):
        here = next((n for n in range(at, len(rows)) if rows[n] == row), None)
        found.append(0 if here is None else numbers[here])
        at = at if here is None else here + 1
    return tuple(found)


def _bare(row: str) -> str:
    for attribute in _ATTRIBUTES:
        row = dropped(row, attribute)
    return steady(row)


def dropped(text: str, attribute: str) -> str:
    """Remove every ``attribute{...}``, minding nested and quoted braces."""
    parts, end = [], 0
    while (start := text.find(attribute + "{", end)) >= 0:
        parts.append(text[end:start])
        end = closing(text, start + len(attribute)) + 1
    return "".join(parts) + text[end:]


def closing(text: str, opening: int) -> int:
    """Index of what closes the brace or parenthesis at ``opening``."""
    depth, quoted, at = 0, False, opening
    while at < len(text):
        char = text[at]
        if char == "\\" and quoted:
            at += 1
        elif char == '"':
            quoted = not quoted
        elif not quoted:
            depth += (char in "({") - (char in ")}")
            if depth == 0:
                return at
        at += 1
    return at


def excerpt(text: str, wanted: str | None, lines: int, width: int) -> str:
    """At most ``lines`` lines of ``text``, each at most ``width`` columns.

    ``wanted`` is a regular expression; with it only the lines it finds are
    kept, and a long one is cut to the part round what was found. Ellipses
    mark what was left out.
    """
    rows, last, out = text.expandtabs(4).splitlines(), -1, []
    for number, row in enumerate(rows):
        if wanted and not re.search(wanted, row):
            continue
        if lines == 0:
            break
        if number > last + 1:
            out.append("...")
        row = re.sub(r"(?<=\S) {3,}", "  ", row)  # columns of a listing
        found = re.search(wanted, row) if wanted else None
        out.append(_cut(row, found.start() if found else 0, width))
        last, lines = number, lines - 1
    if last + 1 < len(rows):
        out.append("...")
    return "\n".join(out) + "\n"


def _cut(row: str, at: int, width: int) -> str:
    """``row`` in ``width`` columns, the column ``at`` among them."""
    if len(row) <= width:
        return row
    start = max(0, min(at - width // 4, len(row) - width))
    if start == 0:
        return row[:width - 3] + "..."
    end = start + width
    tail = "..." if end < len(row) else ""
    return "..." + row[start + 3:end - len(tail)] + tail


def html(text: str, language: str, marked: str | None = None) -> str:
    """``text`` as HTML with inline styles, every name escaped.

    What the regular expression ``marked`` finds stands out.
    """
    try:
        from pygments import format as formatted
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import get_lexer_by_name
    except ImportError:
        return plain(text)
    words = (get_lexer_by_name(language).get_tokens(text)
             if language in _PYGMENTS else _words(text, marked))
    formatter = HtmlFormatter(noclasses=True, nowrap=True, style=_style())
    return f'<pre style="{_PAGE}">{formatted(words, formatter)}</pre>'


def plain(text: str) -> str:
    """``text`` as HTML without colours, which would weigh ten times more."""
    return f'<pre style="{_PAGE}">{_html.escape(text)}</pre>'


def _words(text: str, marked: str | None) -> Iterator[tuple[Any, str]]:
    """(kind, word) from start to end of any IR or assembly.

    Not by a lexer of Pygments: one would wait for ever where ``marked`` finds
    an empty word.
    """
    from pygments import token

    rules = [
        (marked or "", token.Generic.Strong),
        (r"\.\.\.\n|//.*|/\*.*?\*/", token.Comment),
        (r'"(?:[^"\\\n]|\\.)*"', token.String),
        (r"[%@$][\w.$-]+", token.Name.Variable),
        (r"\b(?:bf16|[fiu]\d+|pred|tensor|c64)\b", token.Keyword.Type),
        (r"\b(?:ROOT|ENTRY|HloModule|module|func\.func|return)\b",
         token.Keyword),
        (r"\b(?:0x[0-9a-fA-F]+|\d+(?:\.\d+(?:e[+-]?\d+)?)?)\b",
         token.Number),
        (r"[A-Za-z_][\w.-]*|\s+|.", token.Text)]
    rules = [(re.compile(rule, re.M), kind) for rule, kind in rules]
    at = 0
    while at < len(text):
        word, kind = next(
            (found[0], kind) for rule, kind in rules
            if (found := rule.match(text, at)) and found[0])
        yield kind, word
        at += len(word)


@functools.cache
def _style() -> Any:
    from pygments.style import Style
    from pygments.token import Comment, Generic, Keyword, Name, Number, String

    return type("Course", (Style,), {"styles": {
        Comment: "#666", String: "#7a4a00", Name.Variable: "#00507a",
        Name.Function: "#00507a", Keyword: "bold #111",
        Keyword.Type: "#8a2f6b", Number: "#006b4f",
        Generic.Strong: "bold #111 bg:#ffe08a", Generic.Deleted: "#a33",
        Generic.Inserted: "#006b4f"}})


def folded(title: str, body: str) -> str:
    """HTML of ``body`` folded below ``title``; opens without JavaScript."""
    return (f"<details><summary>{_html.escape(title)}</summary>"
            f"{body}</details>")
