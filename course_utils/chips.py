"""One sourced table of chips; no hardware number lives anywhere else. Floor 0.

Values stand in ``chips.toml`` with unit, source and grade, and read as
attributes: ``get("h100").sm_count``; ``get("h100").peak("bf16")``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from html import escape
from importlib import resources
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from course_utils import host

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Value:
    """One number or word of the table, with where it is from."""

    unit: str
    meaning: str
    value: int | float | str | tuple[int, ...]
    source: str
    grade: str
    note: str = ""

    def __str__(self) -> str:
        form = {int: ",", float: ".5g"}.get(type(self.value), "")
        recalled = " (recalled)" if self.grade == "R" else ""
        return f"{self.value:{form}} {self.unit}".strip() + recalled


class Level(NamedTuple):
    """``units`` memories of ``bytes`` each; ``bandwidth`` of all in B/s:
    the published peak, else the measured one, else None."""

    name: str
    bytes: int
    units: int
    bandwidth: float | None


@dataclass(frozen=True)
class Chip:
    """A chip: every column of chips.toml it has is an attribute.

    ``cc`` is NVIDIA's compute capability ("9.0"), ``gfx`` AMD's target name.
    """

    name: str
    title: str
    vendor: str
    cc: str | None
    gfx: str | None
    absent: Mapping[str, str] = field(compare=False, repr=False)
    values: Mapping[str, Value] = field(compare=False, repr=False)

    def __getattr__(self, name: str) -> Any:
        return self._value(name).value

    def __reduce__(self) -> tuple[Any, ...]:
        return get, (self.name,)

    def peak(self, dtype: Any) -> float:
        """Dense peak in FLOP/s (op/s for integers); fp32 and fp64: vector.

        ``dtype`` is a name ("bf16", "bfloat16") or a dtype of JAX, NumPy or
        torch; ValueError names those the chip has.
        """
        name = getattr(dtype, "name", getattr(dtype, "__name__", dtype))
        name = str(name).rpartition(".")[2].strip().lower()
        short = _data()["dtypes"].get(name, name)
        peaks = {n.removeprefix("peak_"): v.value
                 for n, v in self.values.items() if n.startswith("peak_")}
        if short not in peaks:
            why = self.absent.get(short, "the table has none")
            raise ValueError(f"dtype {dtype!r} has no peak on {self.name}: "
                             f"{why}; use one of {', '.join(peaks)}")
        return peaks[short]

    def ridge(self, dtype: Any) -> float:
        """FLOP per byte of device memory from which the peak can bind."""
        return self.peak(dtype) / self.hbm_bandwidth

    def source(self, name: str) -> str:
        return self._value(name).source

    def _value(self, name: str) -> Value:
        if name not in self.values:
            raise AttributeError(f"name: {self.name} has no value {name!r}"
                                 f"{_near(name, self.values)}")
        return self.values[name]

    def levels(self) -> list[Level]:
        """The memories, small to large by one unit; ties: nearest first."""
        has = {name: value.value for name, value in self.values.items()}
        rows = [Level(name, has[size], has.get(units, 1),
                      next((has[b] for b in bandwidths if b in has), None))
                for name, size, units, bandwidths in _data()["levels"]
                if size in has]
        rows[-1] = rows[-1]._replace(name=self.memory_type)  # "HBM3"
        return sorted(rows, key=lambda level: level.bytes)

    def __str__(self) -> str:
        return "\n".join([self.title, *(
            f"  {n:24} {v}  [{v.grade}]" for n, v in self.values.items())])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{n}<td>{v}<td>{v.grade}<td>{escape(v.source)}"
            f"<td>{escape(v.note)}" for n, v in self.values.items())
        return f"<b>{self.title}</b><table>{rows}</table>"


def get(name: str | Chip) -> Chip:
    """The chip of that name; "h100" is "h100-sxm", "a100" is "a100-80"."""
    if isinstance(name, Chip):
        return name
    if not isinstance(name, str):
        raise TypeError(f"name must be a str such as 'h100', got {name!r}")
    known = {alias: chip for chip, entry in _data()["chips"].items()
             for alias in (chip, *entry.get("aliases", ()))}
    key = name.strip().lower().replace(" ", "-").replace("_", "-")
    if key not in known:
        raise ValueError(f"name {name!r} is not a chip of the table"
                         f"{_near(key, known)}. All: {', '.join(names())}")
    return _chip(known[key])


def names() -> list[str]:
    return list(_data()["chips"])


def table() -> pandas.DataFrame:
    """One row a chip, one column a field; recalled values say so."""
    pandas = host.need("pandas", "a table of chips is a DataFrame")
    return pandas.DataFrame({n: {
        f: str(v) if v.grade == "R" else v.value
        for f, v in get(n).values.items()} for n in names()}, dtype=object).T


def _near(name: str, known: Mapping[str, Any]) -> str:
    near = get_close_matches(name, known, 3, 0.4)
    return f"; nearest: {', '.join(near)}" if near else ""


@cache
def _data() -> dict[str, Any]:
    file = resources.files("course_utils") / "chips.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


@cache
def _chip(name: str) -> Chip:
    data = _data()
    own = data["chips"][name]
    if cc := own.get("cc"):
        own = {**data["cc"]["all"], **data["cc"][cc], **own}
    values = {}
    for column, (unit, meaning) in data["columns"].items():
        if entry := own.get(column):
            value, source = entry["value"], data["sources"][entry["source"]]
            values[column] = Value(
                unit, meaning, tuple(value) if isinstance(value, list)
                else value, source, entry["grade"], entry.get("note", ""))
    return Chip(name, own["title"], own["vendor"], cc, own.get("gfx"),
                # every reader shares this chip
                MappingProxyType(own.get("absent", {})),
                MappingProxyType(values))
