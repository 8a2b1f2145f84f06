"""What memory does with a kernel's accesses: traffic, occupancy, roofline.

Counted and computed, nothing timed. What is assumed of the chip is said by
``Traffic.assumptions``; its numbers come from ``chips``. Floor 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from course_utils import chips
from course_utils._whole import whole
from course_utils.host import need
from course_utils.kernels.trace import Trace, traced

if TYPE_CHECKING:
    import pandas as pd

    from course_utils.kernels import Launch

SECTOR, LINE = 32, 128  # bytes an L2 fetches and bytes a tag stands for
WAYS = 16  # places a line may stand in; NVIDIA does not publish it
_EVERY = SECTOR * 8  # where tensors begin: a multiple of 256 bytes
_BANKS, _BANK = 32, 4  # of shared memory: how many, bytes a cycle of each
_WHY = "addresses are arrays"


@dataclass(frozen=True)
class Traffic:
    """Bytes a launch moves, simulated under ``assumptions``.

    ``moved`` maps (level, tensor) to bytes (read, written): "L2" is what
    passes between the SMs and the L2 cache (of ``cache_bytes``), "HBM" what
    passes between the L2 cache and the chip's memory.
    """

    chip: str
    kernel: str
    cache_bytes: int
    moved: Mapping[tuple[str, str], tuple[int, int]]
    assumptions: tuple[str, ...]

    @property
    def levels(self) -> tuple[str, ...]:
        """From the SMs outwards."""
        return tuple(dict.fromkeys(level for level, _ in self.moved))

    def read(self, level: str) -> int:
        return sum(r for (name, _), (r, _) in self.moved.items()
                   if name == level)

    def _both(self, level: str) -> int:
        return sum(sum(both) for (name, _), both in self.moved.items()
                   if name == level)

    @property
    def l2_bytes(self) -> int:
        return self._both("L2")

    @property
    def hbm_bytes(self) -> int:
        return self._both("HBM")

    @property
    def hit_rate(self) -> float:
        """Share of the bytes the SMs read that the L2 already had."""
        return 1 - self.read("HBM") / (self.read("L2") or 1)

    @property
    def reuse(self) -> float:
        """Bytes the SMs read for each byte read from HBM; inf if none is."""
        fetched = self.read("HBM")
        return self.read("L2") / fetched if fetched else math.inf

    def table(self) -> pd.DataFrame:
        """Bytes read and written, a row for each level and tensor."""
        pd = need("pandas", "it is a table")
        index = pd.MultiIndex.from_tuples(self.moved, names=["level",
                                                             "tensor"])
        return pd.DataFrame([*self.moved.values()], index,
                            ["read", "written"])

    def __str__(self) -> str:
        return (f"{self.kernel} on {self.chip}, simulated: L2 "
                f"{self.l2_bytes / 1e6:.2f} MB, HBM "
                f"{self.hbm_bytes / 1e6:.2f} MB, reuse {self.reuse:.2f}")


def traffic(trace: Trace | Launch, chip: str | chips.Chip = "h100",
            schedule: str = "waves", l2_bytes: int | None = None) -> Traffic:
    """Replay ``trace``, or a launch's, through the L2 cache of ``chip``,
    sector by sector.

    ``schedule``: "waves" runs a program on each SM, access by access in turn,
    then the next; "one by one" runs a program to its end before the next.
    ``l2_bytes`` tries another size of cache. Raises ValueError for a chip
    without one L2 for all SMs.
    """
    trace, c = traced(trace), chips.get(chip)
    if "l2_units" in c.values or not {"l2_bytes", "sm_count"} <= {*c.values}:
        raise ValueError(f"chip {c.name} has no L2 that all its SMs share: "
                         "use an NVIDIA one.")
    resident = {"waves": c.sm_count, "one by one": 1}
    if schedule not in resident:
        raise ValueError(f"schedule is {schedule!r}: use "
                         f"{' or '.join(map(repr, resident))}.")
    at_once = resident[schedule]
    size = c.l2_bytes if l2_bytes is None else whole(
        "l2_bytes", l2_bytes, LINE * WAYS)  # at least one set
    names = [*trace.tensors]
    asked = [[0, 0] for _ in names]
    moved = _replay(_requests(trace, at_once, asked), len(names),
                    size // (LINE * WAYS))
    return Traffic(c.name, trace.name, size, {
        (level, name): (SECTOR * counts[0], SECTOR * counts[1])
        for level, of_all in (("L2", asked), ("HBM", moved))
        for name, counts in zip(names, of_all, strict=True)}, (
        f"Programs start in the order of their numbers, {at_once} at a time; "
        "those running take turns, one access each.",
        f"A block asks for each {SECTOR}-byte sector it touches once; there "
        "is no L1: every access goes to the L2.",
        f"The L2 is {size:,} bytes in lines of {LINE}, {WAYS} ways, the "
        "least recently used line leaves, any SM reaches all of it.",
        "A store fetches nothing; what was written goes to HBM when its line "
        "leaves or the kernel ends. The cache starts empty.",
        f"Tensors lie one after another, each from a multiple of {_EVERY} "
        "bytes."))


def _requests(trace: Trace, at_once: int, asked: list[list[int]],
              ) -> Iterator[tuple[list[int], list[int], int, str]]:
    """Accesses in the order the chip makes them: lines, a bit for each
    sector wanted of them, number of the tensor, kind.

    Counts in ``asked`` the sectors read and written, for each tensor.
    """
    np = need("numpy", _WHY)
    number = {program: n for n, program in enumerate(trace.programs)}
    step: dict[Any, int] = {}
    order = []
    for n, access in enumerate(trace.accesses):
        program = number[access.program]
        step[program] = step.get(program, -1) + 1
        order.append((program // at_once, step[program], program, n))
    names = {name: n for n, name in enumerate(trace.tensors)}
    begins = _layout(trace)
    known: dict[tuple[int, int, int], tuple[Any, list[int], int]] = {}
    for *_, n in sorted(order):
        a = trace.accesses[n]
        base = begins[a.tensor] + a.base * a.itemsize
        key = id(a.pattern), a.itemsize, base % LINE
        if key not in known:  # lines from the base's, and sectors in each
            touched = np.unique(
                (a.pattern * a.itemsize + base % LINE) // SECTOR)
            lines, where = np.unique(touched // (LINE // SECTOR),
                                     return_inverse=True)
            bits = np.zeros(lines.size, np.int64)
            np.bitwise_or.at(bits, where, 1 << touched % (LINE // SECTOR))
            known[key] = lines, bits.tolist(), touched.size
        lines, bits, count = known[key]
        tensor = names[a.tensor]
        asked[tensor][0] += count * (a.kind != "store")
        asked[tensor][1] += count * (a.kind != "load")
        yield (lines + base // LINE).tolist(), bits, tensor, a.kind


def _layout(trace: Trace) -> dict[str, int]:
    """The address of each tensor's first element, in bytes."""
    ends: dict[int, int] = {}  # of each storage, as far as it is touched
    far = {id(a.pattern): int(a.pattern.max()) for a in trace.accesses}
    for a in trace.accesses:
        t = trace.tensors[a.tensor]
        last = t.start + a.base + far[id(a.pattern)]
        ends[t.storage] = max(ends.get(t.storage, 0), (last + 1) * t.itemsize)
    begins, free = {}, 0
    for storage, end in sorted(ends.items()):
        begins[storage] = free
        free = -(-(free + end) // _EVERY) * _EVERY
    return {name: begins.get(t.storage, 0) + t.start * t.itemsize
            for name, t in trace.tensors.items()}


def _replay(requests: Iterator[tuple[list[int], list[int], int, str]],
            tensors: int, sets: int) -> list[list[int]]:
    """Sectors read from and written to HBM, for each tensor."""
    moved = [[0, 0] for _ in range(tensors)]
    # Of each set, its lines, longest unused first: sectors that are here,
    # sectors that HBM must still be told of, the tensor they belong to.
    cache: list[dict[int, list[int]]] = [{} for _ in range(sets)]
    for lines, wanted, tensor, kind in requests:
        for line, want in zip(lines, wanted, strict=True):
            held = cache[line % sets]
            entry = held.pop(line, None)
            if entry is None:
                if len(held) == WAYS:
                    _, dirty, owner = held.pop(next(iter(held)))
                    moved[owner][1] += dirty.bit_count()
                entry = [0, 0, tensor]
            held[line] = entry
            if kind != "store":
                moved[tensor][0] += (want & ~entry[0]).bit_count()
            entry[0] |= want
            if kind != "load":
                entry[1:] = entry[1] | want, tensor
    for held in cache:
        for _, dirty, owner in held.values():
            moved[owner][1] += dirty.bit_count()
    return moved


@dataclass(frozen=True)
class Occupancy:
    """Blocks and warps an SM holds at once; ``fraction`` of its most warps.

    ``limited_by``: "warps", "blocks", "registers", "shared", what ran out.
    """

    chip: str
    blocks: int
    warps: int
    fraction: float
    limited_by: tuple[str, ...]

    def __str__(self) -> str:
        return (f"{self.chip}: {self.blocks} blocks, {self.warps} warps an "
                f"SM, {self.fraction:.1%}, limited by "
                f"{' and '.join(self.limited_by)}")


def occupancy(chip: str | chips.Chip, threads: int, registers: int,
              shared: int = 0) -> Occupancy:
    """Blocks of ``threads`` with ``registers`` a thread and ``shared`` bytes
    that fit on an SM, by the rules of NVIDIA's cuda_occupancy.h.

    0 blocks: it cannot be launched. ValueError for what no kernel can ask.
    """
    c = chips.get(chip)
    if "register_alloc_unit" not in c.values:
        raise ValueError(f"chip {c.name}: the rules are known for NVIDIA's "
                         "GPUs only.")
    for name, value, low, high in (
            ("threads", threads, 1, c.max_threads_per_block),
            ("registers", registers, 0, c.max_registers_per_thread),
            ("shared", shared, 0, c.smem_per_sm_bytes)):
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}: {c.name} takes {low} to "
                             f"{high}.")
    warps = -(-threads // c.warp_size)
    # Each quarter of an SM has a quarter of the registers, for whole warps.
    quarters = c.subpartitions_per_sm
    a_warp = _up(max(registers, 1) * c.warp_size, c.register_alloc_unit)
    fitting = c.registers_per_sm // quarters // a_warp * quarters
    too_many = a_warp * _up(warps, quarters) > c.max_registers_per_block
    a_block = _up(shared + c.smem_reserved_bytes, c.smem_alloc_unit_bytes)
    limits = {
        "warps": c.max_warps_per_sm // warps,
        "blocks": c.max_blocks_per_sm,
        "registers": 0 if too_many else fitting // warps,
        "shared": (0 if shared > c.smem_per_block_bytes
                   else c.smem_per_sm_bytes // (a_block or 1))}
    blocks = min(limits.values())
    return Occupancy(
        c.name, blocks, blocks * warps, blocks * warps / c.max_warps_per_sm,
        tuple(name for name, most in limits.items() if most == blocks))


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclass(frozen=True)
class Point:
    """A kernel under a roofline: ``seconds`` is the least it can take.

    ``intensity`` and ``ridge`` in FLOP per byte of device memory; below the
    ridge ``bound`` is "memory", above "compute".
    """

    chip: str
    dtype: str
    flops: float
    bytes: float
    ridge: float
    seconds: float

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes

    @property
    def bound(self) -> str:
        return "memory" if self.intensity < self.ridge else "compute"

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.seconds

    def __str__(self) -> str:
        return (f"{self.intensity:.4g} FLOP/B, ridge {self.ridge:.4g}: "
                f"{self.bound}-bound, at best {self.seconds * 1e6:.3g} us, "
                f"{self.flops_per_second / 1e12:.4g} TFLOP/s on {self.chip}")


def roofline(chip: str | chips.Chip, dtype: Any, flops: float,
             bytes: float) -> Point:
    """Work of ``flops`` and ``bytes`` of device memory against the chip's
    published peaks; ValueError for a ``dtype`` it has none for."""
    c = chips.get(chip)
    if not (flops > 0 and bytes > 0):
        raise ValueError(f"flops and bytes are {flops} and {bytes}: both "
                         "must be above 0.")
    seconds = max(flops / c.peak(dtype), bytes / c.hbm_bandwidth)
    name = str(getattr(dtype, "__name__", dtype)).rpartition(".")[2]
    return Point(c.name, name, flops, bytes, c.ridge(dtype), seconds)


@dataclass(frozen=True)
class Coalescing:
    """``sectors`` one warp's access touches; ``efficiency`` is the share of
    their bytes that a lane asked for (1.0 where none did)."""

    sectors: int
    efficiency: float


def coalescing(addresses: Any, itemsize: int = 4) -> Coalescing:
    """Sectors of 32 bytes that a warp touches at these byte ``addresses``.

    One for each lane that is on, in any order, of ``itemsize`` bytes.
    """
    np = need("numpy", _WHY)
    asked = np.unique(np.asarray(addresses, np.int64).reshape(-1, 1)
                      + np.arange(itemsize))
    sectors = np.unique(asked // SECTOR).size
    return Coalescing(sectors, asked.size / (SECTOR * sectors)
                      if sectors else 1.0)


def bank_conflicts(addresses: Any) -> int:
    """Passes shared memory needs for one warp's 4-byte accesses; 1: none.

    ``addresses`` in bytes, one for each lane that is on. Neighbouring words
    lie in neighbouring banks; lanes that want one word share a pass.
    """
    np = need("numpy", _WHY)
    words = np.unique(np.asarray(addresses, np.int64).ravel() // _BANK)
    return int(np.bincount(words % _BANKS).max(initial=0))
