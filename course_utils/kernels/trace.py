"""Which elements a kernel reads and writes, access by access. Floor 2."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from course_utils import host
from course_utils.compilers import recorded
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

    def places(self) -> np.ndarray:
        """Which element lies at each place from the first on, numbered row
        by row, int64; -1 where memory holds none of them."""
        np = need("numpy", _WHY)
        span = 1 + sum((n - 1) * step for n, step in zip(
            self.shape, self.strides, strict=True))
        table = np.full(max(span, 0), -1)
        np.lib.stride_tricks.as_strided(
            table, self.shape, [8 * step for step in self.strides])[
                ...] = np.arange(math.prod(self.shape)).reshape(self.shape)
        return table


@dataclass(frozen=True, eq=False, repr=False)
class Access:
    """One load, store or atomic of one program: a whole block of elements.

    ``shape`` is that of the block, ``itemsize`` the tensor's own (also where
    the interpreter widened it), ``line`` the line of the kernel's source, 1
    its first, 0 unknown. Elements are ``base`` + ``pattern`` (int64, shared
    by alike accesses): those whose mask is on, row by row, the first of them
    in lane number ``lane``.
    """

    program: Program
    kind: str  # "load", "store" or "atomic"
    tensor: str
    shape: tuple[int, ...]
    base: int
    pattern: np.ndarray
    itemsize: int
    line: int = 0
    lane: int = 0

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
    out; the others are of the tensor whose pointer they were made from.
    ``grid`` is the launch's, ``tensors`` maps a parameter to its Operand.
    """

    name: str
    accesses: tuple[Access, ...]
    tensors: Mapping[str, Operand]
    grid: tuple[int, ...]

    @property
    def _sizes(self) -> Program:
        return (*self.grid, 1, 1)[:3]

    @property
    def programs(self) -> tuple[Program, ...]:
        """All programs in the order a GPU numbers them: x fastest."""
        x, y, z = map(range, self._sizes)
        return tuple((i, j, k) for k in z for j in y for i in x)

    def program(self, number: int | Sequence[int]) -> Program:
        """(x, y, z) of a program given by a number or by (x, y, z)."""
        want = number if isinstance(number, Sequence) else (number,)
        want = (*want, 0, 0)[:3]
        if not all(n in range(size)
                   for n, size in zip(want, self._sizes, strict=True)):
            raise ValueError(f"program {number} is not of the grid "
                             f"{self.grid}, which starts at 0.")
        return want

    def of(self, program: int | Sequence[int]) -> tuple[Access, ...]:
        """The accesses of one program, a number or (x, y, z), in order."""
        want = self.program(program)
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
            touched = np.zeros(1 + max(
                a.base + int(a.pattern.max()) for a in alike), bool)
            for access in alike:
                touched[access.offsets] = True
            rows[tensor, kind] = (
                len(group), sum(a.pattern.size for a in group),
                sum(a.bytes for a in group),
                int(touched.sum()) * group[0].itemsize)
        order = sorted(rows, key=lambda row: [*self.tensors].index(row[0]))
        return pd.DataFrame(
            [rows[row] for row in order],
            pd.MultiIndex.from_tuples(order, names=["tensor", "kind"]),
            ["accesses", "elements", "bytes_issued", "unique_bytes"])

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
                          number[id(a.pattern)], a.line, a.lane]
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
               tensors[tensor].itemsize, *where)
        for program, kind, tensor, shape, base, n, *where in data["accesses"]),
        tensors, tuple(data["grid"]))


def find_trace(name: str) -> tuple[Trace, str] | None:
    """The recorded trace called ``name`` and where it comes from, if any."""
    data = recorded.read(f"{name}.trace.gz")
    return data and (from_data(data), data["provenance"])


def keep_trace(name: str, trace: Trace) -> None:
    """Record ``trace``, if COURSE_RECORD says that we are recording."""
    if recorded.recording():
        recorded.write(f"{name}.trace.gz", {
            "provenance": recorded.provenance(
                f"triton {host.version('triton')}, in its interpreter"),
            **trace.data()})  # its tensors stay in their order


def operands(tensors: Mapping[str, Any]) -> dict[str, Operand]:
    """An Operand for each torch tensor."""
    storages: dict[Any, int] = {}  # views of one memory have one object
    return {key: Operand(
        tuple(t.shape), t.stride(), str(t.dtype).rpartition(".")[2],
        t.itemsize, storages.setdefault(t.untyped_storage(), len(storages)),
        t.storage_offset()) for key, t in tensors.items()}


def traced(run: Any) -> Trace:
    """The trace of a launch, or ``run`` itself; ValueError for neither."""
    trace = getattr(run, "trace", run)
    if not isinstance(trace, Trace):
        raise ValueError(f"{type(run).__name__} has no trace: launch with "
                         "trace=True.")
    return trace


class Recorder:
    """Collects the accesses of one run of kernel ``name``.

    ``inner`` are the tensors the interpreter works on, perhaps widened;
    ``outer`` the caller's own.
    """

    def __init__(self, name: str, inner: Mapping[str, Any],
                 outer: Mapping[str, Any]) -> None:
        self.name, self.inner = name, inner
        self.tensors = operands(outer)
        self.places = {key: t.places() for key, t in self.tensors.items()}
        self.accesses: list[Access] = []
        self.patterns: dict[bytes, Any] = {}

    def add(self, kind: str, program: Program, tensors: set[str | None],
            addresses: np.ndarray, shape: tuple[int, ...], width: int,
            line: int, lane: int) -> None:
        """Note one access before it happens, by pointers of ``tensors``;
        ``addresses`` in bytes, of the lanes whose mask is on (``lane`` is
        the first), each of ``width`` bytes."""
        what = f"line {line} of {self.name}, program {program}, {kind}"
        tensor, *more = tensors
        if more or tensor is None:
            raise ValueError(f"{what}: its pointers come from no single "
                             "tensor, by which a trace counts: pass one.")
        first, itemsize = (self.inner[tensor].data_ptr(),
                           self.inner[tensor].itemsize)
        if width != itemsize:
            raise ValueError(f"{what} of {tensor}: it takes {width} bytes, "
                             f"an element has {itemsize}. A trace counts "
                             "elements: cast the value, not the pointer.")
        offsets = (addresses.astype("int64") - first) // itemsize
        places = self.places[tensor]
        if (offsets.min() < 0 or offsets.max() >= places.size
                or (places[offsets] < 0).any()):
            raise ValueError(f"{what}: these addresses are not in {tensor}. "
                             "Mask the lanes beyond its end.")
        base = int(offsets[0])
        offsets -= base
        pattern = self.patterns.setdefault(offsets.tobytes(), offsets)
        pattern.setflags(write=False)
        self.accesses.append(Access(
            program, kind, tensor, shape, base, pattern,
            self.tensors[tensor].itemsize, line, lane))

    def trace(self, grid: tuple[int, ...]) -> Trace:
        return Trace(self.name, tuple(self.accesses), self.tensors, grid)
