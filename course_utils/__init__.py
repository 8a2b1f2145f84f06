"""course_utils: the small package that the five notebooks share.

Importing it costs nothing heavy: jax, torch, triton, matplotlib, pandas and
ipywidgets are imported where they are first needed, and each may be missing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from course_utils.host import Host, Missing, start

if TYPE_CHECKING:
    from course_utils import (
        chips,
        compilers,
        example,
        exercises,
        explore,
        flops,
        ir,
        kernels,
        memory,
        plot,
        simulate,
        timing,
        transformer,
    )

__version__ = "0.1.0"

__all__ = ["Host", "Missing", "chips", "compilers", "example", "exercises",
           "explore", "flops", "ir", "kernels", "memory", "plot", "simulate",
           "start", "timing", "transformer"]


def __getattr__(name: str) -> Any:
    """Import a module of the package when it is first named."""
    if name in __all__:
        return importlib.import_module(f"course_utils.{name}")
    raise AttributeError(f"module 'course_utils' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
