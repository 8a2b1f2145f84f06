"""Which elements a kernel reads and writes, access by access. Floor 1."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from course_utils.host import need

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

_WHY = "a trace is arrays of offsets"
Program = tuple[int, int, int]


@dataclass(frozen=True)
class Operand:
    """A tensor argument; ``strides`` and ``start`` count elements.

    Operands with the same ``storage`` share memory, in which this one's
    first element is number ``start``.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    storage: int = 0
    start: int = 0

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, eq=False, repr=False)
class Access:
    """One load, store or atomic of one program: a whole block of elements.

    ``shape`` is that of the block, ``itemsize`` the tensor's own (also where
    the interpreter widened it), ``line`` the line of the kernel's source, 1
    its first, 0 unknown. Elements are ``base`` + ``pattern`` (int64, shared
    by alike accesses): those whose mask is on, row by row.
    """

    program: Program
    kind: str  # "load", "store" or "atomic"
    tensor: str
    shape: tuple[int, ...]
    base: int
    pattern: np.ndarray
    itemsize: int
    line: int = 0

    @property
    def offsets(self) -> np.ndarray:
        """Elements from the tensor's first, masked lanes left out, int64."""
        return self.base + self.pattern

    @property
    def lanes(self) -> int:
        """Lanes of the block, masked ones included."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """What the access asks for: its lanes with mask on, times itemsize."""
        return self.pattern.size * self.itemsize

    def __repr__(self) -> str:
        return (f"{self.kind} {self.tensor} {list(self.shape)} from element "
                f"{self.base}, {self.pattern.size} of {self.lanes} lanes, "
                f"program {self.program}, line {self.line}")


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """Every access of one launch, in the order the interpreter ran them.

    An access whose lanes are all masked off touches no memory and is left
    out. ``grid`` is the launch's, ``tensors`` maps a parameter to its
    Operand.
    """

    name: str
    accesses: tuple[Access, ...]
    tensors: Mapping[str, Operand]
    grid: tuple[int, ...]

    @property
    def programs(self) -> tuple[Program, ...]:
        """All programs in the order a GPU numbers them: x fastest."""
        x, y, z = (*self.grid, 1, 1)[:3]
        return tuple((i, j, k) for k in range(z) for j in range(y)
                     for i in range(x))

    def of(self, program: int | Sequence[int]) -> tuple[Access, ...]:
        """The accesses of one program, a number or (x, y, z), in order."""
        want = program if isinstance(program, Sequence) else (program,)
        want = (*want, 0, 0)[:3]
        if want not in self.programs:
            raise ValueError(f"program {program} is not of the grid "
                             f"{self.grid}, which starts at 0.")
        return tuple(a for a in self.accesses if a.program == want)

    def table(self) -> pd.DataFrame:
        """A row for each tensor and kind; unique_bytes counts each once."""
        np, pd = need("numpy", _WHY), need("pandas", "it is a table")
        groups: dict[tuple[str, str], list[Access]] = {}
        for access in self.accesses:
            groups.setdefault((access.tensor, access.kind), []).append(access)
        rows = {}
        for (tensor, kind), group in groups.items():
            alike = {(a.base, id(a.pattern)): a for a in group}.values()
            low = min(int(a.offsets.min()) for a in alike)
            high = max(int(a.offsets.max()) for a in alike)
            touched = np.zeros(high - low + 1, bool)
            for access in alike:
                touched[access.offsets - low] = True
            rows[tensor, kind] = {
                "accesses": len(group),
                "elements": sum(a.pattern.size for a in group),
                "bytes_issued": sum(a.bytes for a in group),
                "unique_bytes": int(touched.sum()) * group[0].itemsize}
        order = sorted(rows, key=lambda row: [*self.tensors].index(row[0]))
        index = pd.MultiIndex.from_tuples(order, names=["tensor", "kind"])
        return pd.DataFrame([rows[row] for row in order], index)

    def __str__(self) -> str:
        issued = sum(a.bytes for a in self.accesses)
        return (f"{self.name}, grid {self.grid}: {len(self.accesses):,} "
                f"accesses, {issued:,} bytes issued")

    __repr__ = __str__

    def data(self) -> dict[str, Any]:
        """Plain lists, for JSON; ``from_data`` reads them."""
        np = need("numpy", _WHY)
        patterns = {id(a.pattern): a.pattern for a in self.accesses}
        number = {key: n for n, key in enumerate(patterns)}
        return {
            "name": self.name, "grid": self.grid,
            "tensors": {k: asdict(t) for k, t in self.tensors.items()},
            # Steps, not offsets: mostly ones, which gzip folds to nothing.
            "patterns": [np.diff(p).tolist() for p in patterns.values()],
            "accesses": [[a.program, a.kind, a.tensor, a.shape, a.base,
                          number[id(a.pattern)], a.line]
                         for a in self.accesses]}


def from_data(data: Mapping[str, Any]) -> Trace:
    """The Trace of which ``data`` was made."""
    np = need("numpy", _WHY)
    tensors = {k: Operand(**{**t, "shape": tuple(t["shape"]),
                             "strides": tuple(t["strides"])})
               for k, t in data["tensors"].items()}
    patterns = [np.cumsum([0, *steps], dtype=np.int64)
                for steps in data["patterns"]]
    return Trace(data["name"], tuple(
        Access(tuple(program), kind, tensor, tuple(shape), base, patterns[n],
               tensors[tensor].itemsize, line)
        for program, kind, tensor, shape, base, n, line in data["accesses"]),
        tensors, tuple(data["grid"]))


def operands(tensors: Mapping[str, Any]) -> dict[str, Operand]:
    """An Operand for each torch tensor."""
    storages: dict[int, int] = {}
    return {key: Operand(
        tuple(t.shape), t.stride(), str(t.dtype).rpartition(".")[2],
        t.itemsize, storages.setdefault(
            t.untyped_storage()._cdata, len(storages)), t.storage_offset())
        for key, t in tensors.items()}


class Recorder:
    """Collects the accesses of one run of kernel ``name``.

    ``inner`` are the tensors the interpreter works on, perhaps widened;
    ``outer`` the caller's own.
    """

    def __init__(self, name: str, inner: Mapping[str, Any],
                 outer: Mapping[str, Any]) -> None:
        self.name, self.tensors = name, operands(outer)
        self.accesses: list[Access] = []
        self.patterns: dict[bytes, Any] = {}
        self.inner = {key: t for key, t in inner.items() if t.numel()}

    def add(self, kind: str, program: Program, addresses: np.ndarray,
            shape: tuple[int, ...], width: int, line: int) -> None:
        """Note one access before it happens; ``addresses`` in bytes, of the
        lanes whose mask is on, each of ``width`` bytes."""
        low, high = int(addresses.min()), int(addresses.max())
        what = f"line {line} of {self.name}, program {program}, {kind}"
        tensor = next(self._holding(low, high + width), None)
        if tensor is None:
            raise ValueError(f"{what}: these addresses are in no tensor. "
                             "Mask the lanes beyond its end.")
        first, itemsize = (self.inner[tensor].data_ptr(),
                           self.inner[tensor].itemsize)
        if width != itemsize:
            raise ValueError(f"{what} of {tensor}: it takes {width} bytes, "
                             f"an element has {itemsize}. A trace counts "
                             "elements: cast the value, not the pointer.")
        offsets = (addresses.astype("int64") - first) // itemsize
        base = int(offsets[0])
        offsets -= base
        pattern = self.patterns.setdefault(offsets.tobytes(), offsets)
        pattern.setflags(write=False)
        self.accesses.append(Access(
            program, kind, tensor, shape, base, pattern,
            self.tensors[tensor].itemsize, line))

    def _holding(self, low: int, end: int) -> Iterator[str]:
        """Tensors with these bytes, then those whose storage has them."""
        for key, t in self.inner.items():
            if (t.data_ptr() <= low and end
                    <= t[(-1,) * t.dim()].data_ptr() + t.itemsize):
                yield key
        for key, t in self.inner.items():
            storage = t.untyped_storage()
            start = storage.data_ptr()
            if start <= low and end <= start + storage.nbytes():
                yield key

    def trace(self, grid: tuple[int, ...]) -> Trace:
        return Trace(self.name, tuple(self.accesses), self.tensors, grid)
