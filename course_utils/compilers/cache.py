"""A folder of compiled ladders, keyed by what went in and by versions."""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from course_utils import host

T = TypeVar("T")
_TOOLS = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin",
          "libtpu", "torch", "triton")


def folder() -> Path:
    """$COURSE_CACHE, or course_utils below the user's cache folder."""
    if chosen := os.environ.get("COURSE_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "course_utils"


@functools.cache
def _versions() -> tuple[Any, ...]:
    """What a result depends on besides its key: tools, chips, our code."""
    installed = [platform.machine(),  # a home may be shared
                 *((tool, host.version(tool)) for tool in _TOOLS)]
    helpers = [bool(host.compiler()), bool(host.tool("objdump"))]
    here = Path(__file__).parent
    own = [path.read_text(encoding="utf-8") for path in
           [*sorted(here.glob("*.py")), here.parent / "chips.toml"]]
    return *installed, *helpers, *own


def cached(key: tuple[Any, ...], make: Callable[[], T],
           fresh: bool = False) -> T:
    """What ``make`` returned the last time ``key`` was asked for.

    ``key`` is made of texts, bytes and numbers. ``fresh`` makes it again. A
    folder that cannot be written is no error: the work is only done again.
    """
    digest = hashlib.sha256(repr((key, _versions())).encode()).hexdigest()
    path = folder() / f"{digest[:32]}.pickle"
    if not fresh:
        try:
            return pickle.loads(path.read_bytes())
        except Exception:  # absent, half written or of another version
            pass
    value = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as half:
            made = Path(half, path.name)
            made.write_bytes(pickle.dumps(value))
            made.replace(path)  # readers see the whole file or none
    except OSError:
        pass
    return value
