"""A whole number that the reader gave, checked in one place. Floor 0."""

from numbers import Integral
from typing import Any


def whole(name: str, value: Any, least: int = 1) -> int:
    """``value`` (NumPy's too) as an int; ValueError if none, or too small."""
    if (isinstance(value, bool) or not isinstance(value, Integral)
            or value < least):
        raise ValueError(f"{name} is {value!r}: give a whole number, {least} "
                         "or more.")
    return int(value)
