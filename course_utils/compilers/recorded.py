"""What was recorded where the compilers were, for machines that lack them.

A recording is found by what was compiled (the function's own source, its
arguments, the target), never by name alone, and says when, with which tools
and by which command it was made. Floor 1.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import os
import platform
import textwrap
from dataclasses import asdict, fields
from datetime import date
from pathlib import Path
from typing import Any

from course_utils.compilers.rung import (
    Buffer,
    Compiled,
    Kernel,
    Pass,
    Rung,
    absent,
)
from course_utils.compilers.text import follow, steady
from course_utils.host import Missing

FOLDER = Path(__file__).parent.parent / "recorded"
COMMAND = "make record"
_LARGEST = 1_200_000  # characters; of a larger rung only the name is kept


def key(source: str, target: str, *rest: Any) -> str:
    """Names a recording: the source without comments, and all the rest."""
    try:  # unparse: what ast.dump writes differs with Python's version
        tree = ast.unparse(ast.parse(textwrap.dedent(source)))
    except SyntaxError:  # a string that begins left of the def it is in
        tree = source.strip()
    whole = repr((tree, target, *rest)).encode()
    return hashlib.sha256(whole).hexdigest()[:16]


def find(name: str, start: int = 0) -> tuple[Compiled, str] | None:
    """The recording called ``name`` and where it comes from, if any.

    ``start`` is the line at which the function begins today.
    """
    if (data := read(f"{name}.json.gz")) is None:
        return None
    then = data["rungs"][0]["origins"]  # of its Python
    moved = {line: line - then[0] + start for line in then}
    return Compiled(
        tuple(Rung(**{
            **rung, "tool": rung["tool"] and f"{rung['tool']}, {data['when']}",
            "origins": tuple(moved.get(n, 0) for n in rung["origins"])
        }) for rung in data["rungs"]),
        tuple(Pass(**p) for p in data["passes"]),
        tuple(Kernel(**{**k, "ops": tuple(k["ops"])})
              for k in data["kernels"]),
        tuple(Buffer(**b) for b in data["buffers"]),
        data["memory"]), data["provenance"]


def targets() -> set[str]:
    """The targets that have recordings."""
    index = FOLDER / "index.json"
    return set(json.loads(index.read_text())) if index.exists() else set()


def keep(name: str, target: str, made: Compiled) -> None:
    """Record ``made``, if COURSE_RECORD says that we are recording."""
    if not recording() or target == "cpu":
        return
    tools = ", ".join(sorted({rung.tool for rung in made.rungs if rung.tool}))
    write(f"{name}.json.gz", {
        "when": f"recorded {date.today()}",
        "provenance": provenance(
            f"{tools} on {platform.machine()} {platform.system()}"),
        "rungs": [_steady(rung) for rung in made.rungs],
        "passes": [asdict(p) for p in made.passes if p.changed],
        "kernels": [{f.name: getattr(kernel, f.name) for f in fields(Kernel)}
                    for kernel in made.kernels],
        "buffers": [asdict(buffer) for buffer in made.buffers],
        "memory": made.memory})
    index = FOLDER / "index.json"
    index.write_text(json.dumps(sorted(targets() | {target})) + "\n")


def _steady(rung: Rung) -> dict[str, Any]:
    if len(rung.raw) > _LARGEST:
        rung = absent(rung.name, Missing(
            f"The rung {rung.name}", f"of its {len(rung.raw):,} characters a "
            "recording keeps none", f"Compile it with {rung.tool}."))
    kept = steady(rung.raw)
    return {**asdict(rung), "raw": kept, "origins": rung.origins and follow(
        rung.raw, rung.origins, kept)}


def recording() -> bool:
    """Whether what is made now is to be kept: COURSE_RECORD says so."""
    return "COURSE_RECORD" in os.environ


def provenance(tools: str) -> str:
    """When, by which command and with which ``tools`` it is recorded."""
    return f"recorded {date.today()} by `{COMMAND}` with {tools}"


def read(file: str) -> dict[str, Any] | None:
    """What ``file`` of the folder holds, None where it is not there."""
    path = FOLDER / file
    return json.loads(gzip.decompress(path.read_bytes())) if (
        path.exists()) else None


def write(file: str, data: dict[str, Any]) -> None:
    """Put ``data`` into ``file`` of the folder; the same twice is the same."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / file).write_bytes(
        gzip.compress(json.dumps(data).encode(), mtime=0))
