"""From a line of an IR back to the line of Python that caused it. Floor 1.

Each function takes a text with the locations its compiler keeps, and the
reader's file, and gives one number for each line of the text: a line of that
file, 0 where the compiler does not say. What a library's helper made counts
for the line in the file that called it: of the frames of a call the innermost
that lies in the file.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

Origins = tuple[int, ...]
_SHARED = re.compile(r"\bcall @([\w.]+)|\bjaxpr=(\w+)"
                     r"|\b(?:to_apply|body|condition)=%?([\w.-]+)")
_HEAD = re.compile(r"\s*func\.func private @([\w.]+)| *(?:let )?(\w+) = \{ "
                   r"lambda|%?([\w.-]+) (?:\(.*\) -> .* )?\{$")
_END = re.compile(r" {0,2}\}|.*\} in( |$)")
_TRACING = os.path.join(os.path.dirname(__file__), "xla.py")


def first(frames: Iterable[tuple[str, str | int]], file: str) -> int:
    """The line of the first of (path, line) that lies in ``file``, or 0.

    -1 where they first leave the function being traced: what called that
    caused nothing.
    """
    for path, line in frames:
        if _read(path) == file:
            return int(line)
        if _read(path) == _TRACING:
            return -1
    return 0


@functools.cache
def _read(path: str) -> str:
    """``path`` with its letters beyond ASCII, which compilers write as bytes:
    HLO, PTX and SASS in octal, MLIR and LLVM in hexadecimal."""
    return re.sub(
        rb"\\([23][0-7]{2}|[89A-F][0-9A-F])",
        lambda byte: bytes([int(byte[1], 8 if len(byte[1]) == 3 else 16)]),
        path.encode()).decode(errors="replace")


def jaxpr(text: str) -> Origins:
    """Of a jaxpr whose equations end in ``# line``; what is inside them
    without a line of its own has theirs."""
    numbers, around = [], [(-1, 0)]
    for row in text.splitlines():
        bare = row.lstrip()
        indent = len(row) - len(bare) + bare.startswith("]")
        while around[-1][0] >= indent:
            around.pop()
        own = re.search(r" # (\d+)$", row)
        numbers.append(int(own[1] if own else 0) or around[-1][1])
        around.append((indent - bare.startswith("]"), numbers[-1]))
    return _called(text, numbers)


def mlir(text: str, file: str) -> Origins:
    """Of StableHLO, TTIR or TTGIR with locations."""
    table = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.M))

    @functools.cache
    def line(place: str) -> int:
        parts = re.findall(r'"([^"]*)":(\d+)|(#loc\d*)', place)
        return next(filter(None, (
            line(table.get(name, "")) if name else first([(path, at)], file)
            for path, at, name in parts)), 0)

    numbers, below = [], {}
    for row in reversed(text.splitlines()):
        indent = len(row) - len(row.lstrip())
        if place := re.search(r" loc\(([^%]*)\)$", row):
            # An op with a body has its place where that closes.
            below[indent] = max(0, line(place[1]))
        numbers.append(0 if row.startswith("#") else below.get(indent, 0))
    return _called(text, numbers[::-1])


def hlo(text: str, file: str) -> Origins:
    """Of HLO with its metadata and tables of stack frames."""
    tables = {head: dict(re.findall(r"(\d+) (.*)\n", body))
              for head, body in re.findall(
                  r"^(FileNames|FileLocations|StackFrames)\n((?:.+\n)*)", text,
                  re.M)}
    lines, none = {}, None
    for key, row in tables.get("StackFrames", {}).items():
        frame = _fields(row)
        parent = int(frame.get("parent_frame_id", 0))
        none = parent if none is None else none  # jaxlib counts from 1 or 0
        at = _fields(tables["FileLocations"][frame["file_location_id"]])
        path = tables["FileNames"][at["file_name_id"]].strip('"')
        lines[key] = (first([(path, at["line"])], file)
                      or lines.get(str(parent - none), 0))
    numbers = []
    for row in text.splitlines():
        # Of two alike, in what two lines call, one is left, with a caller's.
        shared = re.search(r' constant\(.*op_name="[^"]*\)"', row)
        frame = None if shared else re.search(r"stack_frame_id=(\d+)", row)
        older = re.findall(r'source_file="([^"]*)" source_line=(\d+)', row)
        numbers.append(max(0, lines.get(frame[1], 0) if frame
                           else first(older, file)))
    return _called(text, numbers)


def _fields(row: str) -> dict[str, str]:
    """Of a row of such a table: {file_location_id=1 parent_frame_id=1}."""
    return dict(re.findall(r"(\w+)=(\d+)", row))


def _called(text: str, numbers: Sequence[int]) -> Origins:
    """What has no place of its own has that of the only line that calls the
    function it is in, however deep, and a fusion that of the last of its
    operations."""
    rows, homes, calls, name = text.splitlines(), [], {}, ""
    for at, row in enumerate(rows):
        if head := _HEAD.match(row):
            name = next(filter(None, head.groups()))
        homes.append(name)
        for names in _SHARED.findall(row):
            calls.setdefault("".join(names), []).append(at)
        if _END.match(row):
            name = ""

    @functools.cache
    def here(name: str) -> int:
        lines = {numbers[at] or here(homes[at]) for at in calls.get(name, ())
                 if homes[at] != name}
        return lines.pop() if len(lines) == 1 else 0

    whole, last = [], {}
    for row, number, name in zip(rows, numbers, homes, strict=True):
        if _HEAD.match(row) or name and _END.match(row):
            number = 0  # the compiler has that of the first of the callers
        elif fused := re.search(r"\bcalls=%?([\w.-]+)", row):
            number = number or last.get(fused[1], 0)
        whole.append(number or here(name))
        last[name] = number or last.get(name, 0)
    return tuple(whole)


def llvm(text: str, file: str) -> Origins:
    """Of LLVM IR with debug information."""
    nodes = dict(re.findall(r"^(!\d+) = (?:distinct )?!(DI.*)$", text, re.M))

    @functools.cache
    def line(key: str) -> int:
        def of(name: str, node: str) -> str:
            found = re.search(rf'\b{name}: "?([^,")]+)', nodes.get(node, ""))
            return found[1] if found else ""

        place = of("file", of("scope", key))
        path = os.path.join(of("directory", place), of("filename", place))
        return first([(path, of("line", key) or 0)], file) or (
            line(of("inlinedAt", key)) if of("inlinedAt", key) else 0)

    found = (re.search(r"!dbg (!\d+)", row) for row in text.splitlines())
    return tuple(line(place[1]) if place else 0 for place in found)


def listing(text: str, file: str) -> Origins:
    """Of PTX or AMD's assembly: the comment of each ``.loc`` has all frames.

    >>> # .loc 2 43 17  // standard.py:43:17 @[ kernel.py:34:25 ]
    """
    numbers, now, frames = [], 0, _frames(text, file)
    for row in text.splitlines():
        if row.lstrip().startswith(".loc"):
            now = first(frames(row), file)
        code = re.match(r"\s+(\.loc\s|[@\w{])", row)
        numbers.append(now if code else 0)
    return tuple(numbers)


def _frames(text: str, file: str) -> Callable[[str], list[tuple[str, str]]]:
    """What gives (path, line) of each frame of a ``.loc`` in ``text``.

    Its comment has names without folders: the innermost file has its number
    besides, the outermost is the kernel's own, and between them a name that
    several files have tells none.
    """
    paths = {number: _read(os.path.join(*re.findall(r'"([^"]*)"', names)))
             for number, names in re.findall(
                 r'^\s*\.file\s+(\d+)\s+(".*)', text, re.M)}
    named: dict[str, set[str]] = {}
    for path in (file, *paths.values()):
        named.setdefault(os.path.basename(path), set()).add(path)

    def frames(row: str) -> list[tuple[str, str]]:
        found = []
        for name, line in re.findall(r"(?:[/;] |\[ )(\S.*?):(\d+):\d+", row):
            path, *more = named.get(name, ("",))
            found.append(("" if more else path, line))
        if found:
            found[-1] = file, found[-1][1]
            found[0] = paths.get(row.split()[1], ""), found[0][1]
        return found

    return frames


def helpers(ptx: str, file: str) -> dict[tuple[str, str], int]:
    """Lines of libraries that PTX inlined, each where one line called it."""
    calls: dict[tuple[str, str], set[int]] = {}
    frames = _frames(ptx, file)
    for row in re.findall(r"^\s*\.loc\s.*", ptx, re.M):
        if places := frames(row):
            calls.setdefault(places[0], set()).add(first(places, file))
    return {place: min(lines) for place, lines in calls.items()
            if len(lines) == 1}


def sass(text: str, file: str, inlined: Mapping[tuple[str, str], int],
         ) -> tuple[str, Origins]:
    """SASS without the notes of ``nvdisasm -gi``, and its origins."""
    rows, numbers, now = [], [], 0
    for row in text.splitlines(keepends=True):
        if "//## File" in row:
            frames = [(_read(path), line) for path, line in re.findall(
                r'"([^"]*)", line (\d+)', row)]
            now = first(frames, file) or inlined.get(frames[0], 0)
            continue
        now = now * (not row.startswith("//-"))  # a section begins
        rows.append(row)
        numbers.append(now if "/*" in row else 0)
    return "".join(rows), tuple(numbers)


def named(text: str, lines: Mapping[str, int]) -> Origins:
    """Of code without places: only where one of the names in ``lines`` first
    stands. A name's "_" may be written "." or "-"."""
    if not lines:
        return ()
    left = dict(lines)
    names = "|".join(name.replace("_", "[._-]") for name in lines)
    wanted = re.compile(rf"(?<![\w.])(?:{names})(?!\w|\.\d)")
    found = (wanted.search(row) for row in text.splitlines())
    return tuple(left.pop(re.sub(r"[.-]", "_", name[0]), 0) if name else 0
                 for name in found)
