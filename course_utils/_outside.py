"""What a function takes from around it."""

from __future__ import annotations

import dis
import inspect
from types import FunctionType
from typing import Any


def outside(fn: FunctionType) -> tuple[dict[str, Any], dict[str, Any]]:
    """Variables of the functions around ``fn``, and globals, that it loads.

    By name; none where one of them has no value yet. A global that only has
    the name of an attribute is not among them, as it is in getclosurevars.
    """
    try:
        found = inspect.getclosurevars(fn)
    except ValueError:
        return {}, {}
    loaded = {i.argval for i in dis.get_instructions(fn)
              if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return dict(found.nonlocals), {
        name: value for name, value in found.globals.items() if name in loaded}
