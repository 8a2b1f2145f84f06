"""The drawings the study notes refer to, made again from the course's data.

Each function returns a Figure. What is counted in it comes from ``chips``, a
compiler or NumPy; what is only schematic, or to scale, its last line says.
"""

from __future__ import annotations

import math
import re
import textwrap
from typing import TYPE_CHECKING, Any

from course_utils import chips, example, host, ir, kernels, transformer
from course_utils.plot.base import (
    BLUE,
    GREY,
    MONO,
    ORANGE,
    PALE,
    RED,
    SKY,
    YELLOW,
    amount,
    arrow,
    canvas,
    themed,
    write_excerpts,
)
from course_utils.plot.course import ARTEFACTS, STAGES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# One colour, one meaning: in every drawing, and always with a label.
MATRIX, VECTOR, MEMORY = ORANGE, YELLOW, SKY
OFF = "xxx"  # the hatch of what is there and switched off
# NVIDIA H100 whitepaper: the full GH100 has 8 GPCs of 9 TPCs of 2 SMs, and 6
# HBM stacks; the H100 SXM uses 5 of them. (Its SM count is in chips.toml.)
GPCS, TPCS, SMS, STACKS, STACKS_USED = 8, 9, 2, 6, 5
KIB, MIB = 2**10, 2**20


def part(ax: Axes, x: float, y: float, w: float, h: float, text: str = "",
         face: str = PALE, hatch: str = "", **style: Any) -> None:
    """A box with its name in the middle."""
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((x, y), w, h, facecolor=(face, 0.8), hatch=hatch,
                           edgecolor=GREY, linewidth=1.2))
    if text:
        ax.text(x + w / 2, y + h / 2, text, **{
            "ha": "center", "va": "center", "size": 14, **style})


def squares(ax: Axes, x: float, y: float, count: int, face: str) -> None:
    """``count`` squares, 32 in a row."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    ax.add_collection(PatchCollection(
        [Rectangle((x + i % 32 * 8.5, y + i // 32 * 8.5), 8.5, 8.5)
         for i in range(count)],
        facecolor=face, edgecolor=GREY, linewidth=0.5))


def say(ax: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Text that begins at (x, y), its top left corner."""
    ax.text(x, y, text, **{"size": 14, "va": "top", **style})


def badge(ax: Axes, x: float, y: float, n: int) -> None:
    """A number in a disc."""
    ax.plot(x, y, "o", color=BLUE, markersize=22, zorder=4)
    ax.text(x, y, n, size=14, color="white", weight="bold", ha="center",
            va="center", zorder=5)


def foot(ax: Axes, text: str) -> None:
    """The last line: what is to scale, what is schematic."""
    ax.text(30, 698, text, size=14, va="center", color=GREY)


@themed
def course_map() -> Figure:
    """The five stages, and what the running example is between them."""
    ax = canvas("; ".join(
        [f"the {ARTEFACTS[0]}"] + [f"{n}. {stage.name}: {stage.handed_on}"
                                   for n, stage in enumerate(STAGES, 1)]),
        "Y = ReLU(XW + b), from model to silicon")
    step, high, line = 105, 86, 378
    for n, name in enumerate(ARTEFACTS):
        y = 74 + n * step
        part(ax, 400, y, 850, high)
        say(ax, 412, y + high / 2, name.replace(" ", "\n", 1), va="center",
            weight="bold")
        text = re.sub(r"\n +(->|[\d,]+ FLOPs)", r"  \1", example.artefact(n))
        rows = [re.sub(" {2,}", "  ", row) for row in text.splitlines()
                if row.strip()]
        ops = [row for row in rows if re.match(
            r"(\w+\.)?(dot_general|add|max)", row)]
        for x, shown in ((546, ops or rows[:3]),
                         (902, [] if ops else rows[3:6])):
            say(ax, x, y + 9, "\n".join(shown), family=MONO, size=13)
        ax.plot([line, 400], [y + high / 2] * 2, color=BLUE)
        if n:
            stage, top = STAGES[n - 1], y + high / 2 - step
            arrow(ax, (line, top), (line, top + step), color=BLUE)
            badge(ax, 44, top + step / 2, n)
            say(ax, 68, top + 24, stage.name, size=16, weight="bold")
            say(ax, 68, top + 52, stage.question)
    return ax.figure


def products(config: transformer.Config, tokens: int
             ) -> dict[str, tuple[int, int, int, int]]:
    """The matrix products of one dense layer over ``tokens`` tokens.

    Each (count, rows, depth, columns): 2 x all four is its FLOPs.
    """
    d, f, size = config.d_model, config.d_ff, config.head_size
    heads, kv = config.heads, config.key_heads
    mlp = ("gate", "up") if config.gated else ("up",)
    return {"Q": (1, tokens, d, heads * size), "K": (1, tokens, d, kv * size),
            "V": (1, tokens, d, kv * size),
            "QKᵀ": (heads, tokens, size, tokens),
            "AV": (heads, tokens, tokens, size),
            "O": (1, tokens, heads * size, d),
            **{name: (1, tokens, d, f) for name in mlp},
            "down": (1, tokens, f, d)}


@themed
def decoder() -> Figure:
    """One decoder layer: its products, what lies between, their FLOPs."""
    tokens, config = 8192, transformer.published("llama-3-8b")
    made = products(config, tokens)
    flops = {name: 2 * math.prod(shape) for name, shape in made.items()}
    share = {name: n / sum(flops.values()) for name, n in flops.items()}
    ax = canvas(
        f"One layer of {config.name} over {tokens:,} tokens. " + ", ".join(
            f"{name} {part:.0%}" for name, part in share.items())
        + f" of {amount(sum(flops.values()), 'FLOP')}; between them norms, "
        "softmax, SiLU and two additions.",
        f"A decoder layer is {len(made)} matrix products, and what joins them")
    spots = {"RMSNorm": (84, 194, 116), "Q": (240, 124, 156),
             "K": (240, 194, 156), "V": (240, 264, 156),
             "QKᵀ": (480, 159, 156), "softmax": (680, 159, 104),
             "AV": (824, 194, 156), "O": (1010, 194, 156),
             "RMSNorm ": (84, 433, 116), "gate": (240, 398, 156),
             "up": (240, 468, 156), "SiLU(gate) x up": (470, 433, 170),
             "down": (696, 433, 156)}
    for name, (x, y, w) in spots.items():
        shape = made.get(name)
        part(ax, x, y, w, 60, name.strip() + (
            "" if not shape else f"\n{shape[0]} heads" if shape[0] > 1
            else f"\n{shape[2]:,} x {shape[3]:,}"),
            MATRIX if shape else PALE)
    for wire in ("RMSNorm>Q", "RMSNorm>K", "RMSNorm>V", "Q>QKᵀ", "K>QKᵀ",
                 "QKᵀ>softmax", "softmax>AV", "V>AV", "AV>O", "RMSNorm >gate",
                 "RMSNorm >up", "gate>SiLU(gate) x up", "up>SiLU(gate) x up",
                 "SiLU(gate) x up>down"):
        (x, y, w), (to, at, _) = map(spots.get, wire.split(">"))
        arrow(ax, (x + w, y + 30), (to - 22, y + 30), (to - 22, at + 30),
              (to - 1, at + 30))
    for path in (
            ((30, 224), (82, 224)), ((1166, 224), (1205, 224)),
            ((56, 224), (56, 96), (1220, 96), (1220, 207)),
            ((1220, 241), (1220, 350), (56, 350), (56, 463), (82, 463)),
            ((852, 463), (905, 463)), ((935, 463), (1010, 463)),
            ((56, 463), (56, 552), (920, 552), (920, 480))):
        arrow(ax, *path)
    for x, y in ((1220, 224), (920, 463)):
        ax.plot(x, y, "o", color="white", markeredgecolor=GREY, markersize=24)
        ax.text(x, y, "+", size=18, ha="center", va="center")
    say(ax, 640, 74, "added again")
    say(ax, 1018, 438, f"to the next of the\n{config.layers} layers")
    say(ax, 30, 266, f"{tokens:,} tokens\nx {config.d_model:,}")
    left = 30
    say(ax, 30, 570, "share of the FLOPs", weight="bold")
    for name, portion in share.items():
        wide = 1220 * portion
        part(ax, left, 600, wide, 40, name if wide > 40 else "", MATRIX)
        say(ax, left + wide / 2, 646, name if wide < 40 else f"{portion:.0%}",
            ha="center")
        left += wide
    foot(ax, f"{config.name}, forward. In a box: the shape of its weights. "
         "QKᵀ and AV are counted whole, the masked half included.")
    return ax.figure


@themed
def h100() -> Figure:
    """The die: every SM site, those switched on, L2 and HBM around."""
    chip = chips.get("h100")
    full, on = chip.full_die_sm_count, chip.sm_count
    rate = chip.tensor_cores_per_sm * chip.tensor_flops_per_cycle
    peaks = [f"{n} SMs x {rate:,} FLOP x {chip.tensor_clock_hz / 1e9:.2f} "
             f"GHz = {n * rate * chip.tensor_clock_hz / 1e12:.0f} TFLOPS"
             for n in (on, full)]
    ax = canvas(
        f"H100 SXM: {full} sites for SMs in {GPCS} GPCs, {on} switched on; "
        f"{chip.l2_bytes / MIB:.0f} MiB of L2, {STACKS_USED} of {STACKS} "
        f"HBM stacks. {peaks[0]}, as published; {peaks[1]}, which no H100 "
        "has.", f"H100: {full} sites for SMs, {on} of them switched on")
    part(ax, 150, 80, 980, 500, face="white")
    for i in range(STACKS):
        x, y = 30 if i % 2 else 1150, 80 + i // 2 * 170
        used = i < STACKS_USED
        part(ax, x, y, 100, 160, f"{chip.memory_type}\n" + amount(
            chip.hbm_bytes / STACKS_USED, "B") if used else "not\nused",
             MEMORY if used else "white",
             bbox={"fc": "none" if used else "white", "ec": "none"},
             hatch="" if used else OFF)
    for half in (0, 1):
        part(ax, 166 + half * 480, 290, 468, 80, "L2 cache, "
             f"{chip.l2_bytes / 2 / MIB:.0f} MiB", MEMORY, size=16)
    dark = (full - on) // SMS  # TPCs; which, differs from chip to chip
    for gpc in range(GPCS):
        x, y = 166 + gpc % 4 * 240, 92 + gpc // 4 * 290
        part(ax, x, y, 228, 186)
        say(ax, x + 8, y + 5, f"GPC {gpc}")
        for tpc in range(TPCS):
            off = tpc == TPCS - 1 and gpc < dark
            for sm in range(SMS):
                part(ax, x + 8 + tpc % 3 * 72 + sm * 34,
                     y + 31 + tpc // 3 * 51, 32, 47,
                     face="white" if off else MATRIX, hatch=OFF * off)
    part(ax, 150, 598, 28, 28, face=MATRIX)
    say(ax, 188, 602, "an SM that is on; two are a TPC")
    part(ax, 500, 598, 28, 28, face="white", hatch=OFF)
    say(ax, 538, 602, "off: which ones differs from chip to chip; an H100 "
        f"PCIe has {chips.get('h100-pcie').sm_count} on")
    say(ax, 150, 640, f"{peaks[0]}: the published peak.   With {full}: "
        f"{peaks[1].rpartition('= ')[2]}.")
    foot(ax, "Counts are exact; places and sizes are schematic.")
    return ax.figure


@themed
def sm() -> Figure:
    """One SM: four quarters, and the memory they share."""
    chip = chips.get("h100")
    quarters = chip.subpartitions_per_sm
    cores = chip.tensor_cores_per_sm // quarters
    macs = cores * chip.tensor_flops_per_cycle // 2
    lanes = {kind: getattr(chip, f"{kind}_lanes_per_sm") // quarters
             for kind in ("fp32", "int32", "fp64")}
    words = chip.registers_per_sm // quarters
    held = chip.register_file_bytes // quarters
    ax = canvas(
        f"An H100 SM has {quarters} equal quarters, each with a warp "
        f"scheduler, {words:,} registers ({held // KIB} KiB), "
        + ", ".join(f"{n} {kind} lanes" for kind, n in lanes.items())
        + f" and a tensor core of {macs} multiply-adds a cycle; they share "
        f"{chip.l1_smem_bytes // KIB} KiB of L1 and shared memory.",
        f"An SM: {quarters} equal quarters around one shared memory")
    unit = 272 / held  # pixels a byte
    for i in range(quarters):
        x, left = 30 + i * 310, 39 + i * 310
        part(ax, x, 78, 290, 416, face="white")
        part(ax, left, 88, 272, 38, "scheduler: 1 warp a cycle")
        part(ax, left, 136, held * unit, 56, f"{words:,} registers\n"
             f"{held // KIB} KiB", MEMORY)
        y = 200
        for kind, n in lanes.items():
            say(ax, left, y, f"{n} {kind} lanes")
            squares(ax, left, y + 26, n, VECTOR)
            y += 41
        say(ax, left, y, f"tensor core: {macs}", weight="bold")
        squares(ax, left, y + 26, macs, MATRIX)
    whole, most = chip.l1_smem_bytes, chip.smem_per_sm_bytes
    part(ax, 39, 508, most * unit, 56, f"shared memory: up to {most // KIB} "
         "KiB, as the kernel asks", MEMORY)
    part(ax, 39 + most * unit, 508, (whole - most) * unit, 56, "L1 cache",
         MEMORY)
    say(ax, 49 + whole * unit, 526, f"{whole // KIB} KiB")
    part(ax, 39, 578, whole * unit, 36,
         "TMA: copies tiles between shared and global memory by itself")
    say(ax, 30, 632, "A small square is one operation a cycle; a multiply-add"
        " counts as one.")
    foot(ax, "Squares are counted and memories to scale: the registers hold "
         f"{chip.register_file_bytes // KIB} KiB, as much as the memory "
         "below them.")
    return ax.figure


@themed
def tensor_core() -> Figure:
    """fp16 in, exact products, and what the accumulator's format costs."""
    np = host.need("numpy", "the sums are computed")
    half, single = np.finfo(np.float16), np.finfo(np.float32)
    sums = dot_products(2**16)
    exact, wide, narrow = (series[-1] for series in sums.values())
    off = [abs(float(v) / exact - 1) for v in (wide, narrow)]
    bits = half.nmant + 1
    ax = canvas(
        f"fp16 times fp16: {bits} and {bits} significant bits give at most "
        f"{2 * bits}, and fp32 keeps {single.nmant + 1}, so products are "
        f"exact. Of {2**16:,} products added one by one, fp32 keeps the sum "
        f"to {off[0]:.0e}, fp16 stops at {narrow:,.0f}, {off[1]:.0%} short.",
        "Tensor core: multiply in fp16, add in fp32")
    rows = ((110, "A", half, MEMORY), (180, "B", half, MEMORY),
            (330, "A x B", single, MATRIX), (480, "+ C = D", single, MATRIX))
    for y, name, kind, face in rows:
        x = 150
        say(ax, 30, y + 8, name, size=16, weight="bold")
        for n, what, fill in ((1, "", "white"), (kind.nexp, "exp.",
                              "white"), (kind.nmant, "fraction", face)):
            part(ax, x, y, n * 14, 40, f"{n} {what}" * bool(what), fill)
            x += n * 14
        say(ax, x + 8, y + 10, f"fp{kind.bits}")
    say(ax, 150, 238, f"each counts {bits} bits with the hidden one: a\n"
        f"product needs at most {2 * bits}")
    say(ax, 150, 388, f"fp32 counts {single.nmant + 1}: every product is "
        "exact\n(no overflow: the exponents fit too)")
    say(ax, 150, 538, "each addition rounds the sum, at most\nby "
        f"{single.eps / 2:.0e} of it in fp32, by {half.eps / 2:.0e} in fp16")
    for y in (235, 385):
        arrow(ax, (80, y), (80, y + 75), color=BLUE)
    chart = ax.figure.add_axes((0.585, 0.185, 0.33, 0.62))
    ax.text(750, 108, f"sum of {2**16:,} products, each below 1", size=16)
    step = 2**9
    for (name, series), style in zip(sums.items(), (
            {"color": SKY, "lw": 9}, {"color": "black", "ls": "--"},
            {"color": RED, "marker": "s", "markevery": 16}), strict=True):
        at = np.arange(step, 2**16 + 1, step)
        chart.plot(at, series[at - 1], label=name, **style)
    chart.set(xlabel="products added", xlim=(0, 2**16 * 1.02), ylim=(0, None))
    chart.set_xticks([0, 2**15, 2**16], ["0", f"{2**15:,}", f"{2**16:,}"])
    chart.set_yticks([narrow, exact], [f"{narrow:,.0f}", f"{exact:,.0f}"])
    chart.text(2**10, exact, "exact (wide) and fp32\naccumulator (dashes)",
               size=14, va="top")
    chart.text(2**16, narrow * 1.2, f"fp16 accumulator: {off[1]:.0%} short,\n"
               f"for after {narrow:,.0f} its next\nnumber is "
               f"{narrow + np.spacing(narrow):,.0f}", size=14, ha="right")
    foot(ax, "Bits are to scale. The sums are computed with NumPy, one "
         "product at a time; real units add several at once.")
    return ax.figure


def dot_products(count: int) -> dict[str, Any]:
    """Running sums of fp16 products: exact, in fp32, in fp16.

    Each an array of ``count``. Factors are uniform in [0, 1), rounded to
    fp16; an accumulator is rounded to its format after each addition.
    """
    np = host.need("numpy", "the sums are computed")
    a, b = np.random.default_rng(0).random((2, count)).astype(np.float16)
    products = a.astype(np.float32) * b.astype(np.float32)  # exact
    narrow, total = np.empty(count, np.float16), 0.0
    for i, product in enumerate(products.tolist()):
        narrow[i] = total = float(np.float16(total + product))
    return {"exact": np.cumsum(products, dtype=np.float64),
            "fp32": np.cumsum(products, dtype=np.float32), "fp16": narrow}


@themed
def memory() -> Figure:
    """The memories of an H100: areas, widths and bars to scale."""
    chip = chips.get("h100")
    levels = chip.levels()
    delays = (None, chip.l1_latency_cycles, chip.l2_latency_cycles,
              chip.hbm_latency_cycles)
    said = [f"{level.name}: {amount(level.bytes * level.units, 'B')}"
            + f", {amount(level.bandwidth or 0, 'B/s')}, {delay} cycles"
            * bool(delay) for level, delay in zip(levels, delays, strict=True)]
    ax = canvas("H100, near to far. " + "; ".join(said) + ".",
                "GPU memory: the farther, the larger, slower and narrower")
    spots, middle = ((30, 190), (320, 190), (610, 190), (900, 350)), 330
    area = 290**2 / levels[-1].bytes  # square pixels a byte
    pipe = 150 / max(level.bandwidth or 0 for level in levels)
    for (x, w), level, delay in zip(spots, levels, delays, strict=True):
        total = level.bytes * level.units
        part(ax, x, 84, w, 408, face="white")
        say(ax, x + 10, 94, level.name, weight="bold", size=16)
        say(ax, x + 10, 124, amount(total, "B") + (
            f"\n= {level.units} x {level.bytes // KIB} KiB"
            if level.units > 1 else f"\n= {level.bytes / MIB:.0f} MiB"
            if level.name == "L2" else ""))
        side = (total * area)**0.5
        part(ax, x + (w - side) / 2, middle - side / 2 + 5 * (side > 99),
             side, side, face=MEMORY)
        if delay:
            high = level.bandwidth * pipe
            part(ax, x - 100, middle - high / 2, 100, high, face=BLUE)
            ax.text(x - 50, middle - high / 2 - 8, size=14, ha="center",
                    s=f"{level.bandwidth / 1e12:.3g} TB/s")
            part(ax, x, 546, delay * 0.66, 30, face=VECTOR)
            say(ax, x, 580, f"{delay:.0f} cycles")
    say(ax, 30, 546, "a load comes back\nafter about", weight="bold")
    say(ax, 30, 624, "Area of a square: bytes in all. Width of a pipe: bytes "
        "a second, to all SMs together.\nLength of a bar: cycles "
        "that one load waits, measured; in a large array a load waits longer.")
    foot(ax, f"All to scale. TB/s: L1 and L2 from measurements, "
         f"{levels[-1].name} as published.")
    return ax.figure


EXCHANGE = """
@triton.jit
def exchange(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, (n,), (1,), (BLOCK,))
    at = tl.program_id(0) * BLOCK
    got = tl.inline_asm_elementwise('''{
        .shared .align 4 .b32 slot[128];
        .reg .b32 mine, theirs, other;
        mov.u32 mine, %tid.x; mov.u32 other, slot;
        mad.lo.u32 mine, mine, 4, other;
        mov.u32 other, %cluster_ctarank; xor.b32 other, other, 1;
        mapa.shared::cluster.u32 theirs, mine, other;
        st.shared::cluster.b32 [theirs], $1;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        ld.shared.b32 $0, [mine];
        }''', "=r,r", [x.load([at])], tl.float32, is_pure=False, pack=1)
    tl.store(y_ptr + at + tl.arange(0, BLOCK), got)
"""
# What is drawn of a cluster: what happens, and its PTX.
STEPS = (
    ("the chip starts both blocks at once, in one GPC",
     r"\.reqnctapercluster \d+"),
    ("the TMA copies a tile into each block's\nshared memory",
     r"\bcp\.async\.bulk\.tensor\S*"),
    ("an mbarrier counts the bytes that have\narrived; threads wait on it",
     r"\bmbarrier\.(?:arrive\.expect_tx|try_wait)\S*"),
    ("a thread writes into the other block's\nshared memory (DSMEM)",
     r"\b(?:mapa|st)\.shared::cluster\S*"),
    ("both blocks meet at the cluster's barrier",
     r"\bbarrier\.cluster\.(?:arrive|wait)\.\w+"))


def exchange() -> list[list[str]]:
    """The PTX instructions of each of STEPS, of a kernel in a cluster of 2.

    Its blocks load a tile each and swap it; compiled for the H100, not run.
    """
    torch = host.need("torch", "its dtypes stand for the kernel's tensors")
    made = kernels.build(kernels.from_source(EXCHANGE), torch.float32,
                         torch.float32, 1024, num_ctas=2, BLOCK=256)
    return [list(dict.fromkeys(re.findall(pattern, made.ptx)))
            for _, pattern in STEPS]


def folded(name: str) -> str:
    """A long instruction in rows, broken before a dot."""
    return textwrap.fill(name.replace(".", " ."), 50,
                         subsequent_indent="   ").replace(" .", ".")


@themed
def clusters() -> Figure:
    """Two blocks of a cluster, and the instructions between them."""
    found = exchange()
    ax = canvas("A cluster: two blocks on two SMs. " + " ".join(
        f"{n}. {what}: {', '.join(ptx)}." for n, ((what, _), ptx)
        in enumerate(zip(STEPS, found, strict=True), 1)).replace("\n", " "),
        "Thread block cluster: blocks that reach each other's memory")
    part(ax, 30, 80, 600, 470)
    badge(ax, 56, 104, 1)
    say(ax, 80, 95, "one GPC", weight="bold")
    for x, block in ((48, 0), (372, 1)):
        part(ax, x, 130, 240, 406, face="white")
        say(ax, x + 20, 136, "an SM")
        part(ax, x + 20, 164, 200, 70, f"threads of block {block}", VECTOR)
        part(ax, x + 20, 296, 200, 110, face=MEMORY)
        say(ax, x + 54, 314, "shared memory")
        part(ax, x + 90, 354, 120, 40, "mbarrier", "white")
        part(ax, x + 20, 464, 200, 56, "TMA")
        arrow(ax, (x + 56, 592), (x + 56, 524), color=BLUE)
        arrow(ax, (x + 56, 462), (x + 56, 410), color=BLUE)
        arrow(ax, (x + 150, 462), (x + 150, 398), color=BLUE)
        badge(ax, x + 56, 440, 2)
        badge(ax, x + 150, 440, 3)
    arrow(ax, (268, 316), (390, 316), color=BLUE)
    arrow(ax, (392, 346), (270, 346), color=BLUE)
    badge(ax, 330, 331, 4)
    ax.plot([268, 392], [199, 199], color=RED, ls="--", lw=4)
    badge(ax, 330, 199, 5)
    part(ax, 30, 594, 600, 50, "global memory: HBM behind L2", MEMORY, size=16)
    y = 88
    for n, ((what, _), ptx) in enumerate(zip(STEPS, found, strict=True), 1):
        rows = [folded(name) for name in ptx]
        head = what.count("\n") * 24 + 32
        badge(ax, 672, y + 12, n)
        say(ax, 700, y, what)
        say(ax, 700, y + head, "\n".join(rows), family=MONO, color=BLUE)
        y += head + 24 * len("\n".join(rows).splitlines()) + 22
    foot(ax, "Schematic. In blue the PTX of a kernel compiled for the H100; "
         "that of 4 and 5 was written by hand, the rest by Triton.")
    return ax.figure


def cut(text: str, pattern: str, most: int = 48) -> str:
    """The lines with ``pattern``: no types, overloads or deletions."""
    rows = [re.sub(r': "[^"]*"|;  .*|torch\.ops\.|(?<=aten\.)(\w+)\.\w+',
                   r"\1", row).strip()
            for row in text.splitlines() if re.search(pattern, row)]
    return "\n".join(row if len(row) <= most else row[:most - 1] + "…"
                     for row in rows)


@themed
def torch_compile() -> Figure:
    """What passes between the parts of torch.compile, from the real thing."""
    torch = host.need("torch", "its compiler is drawn")

    def torch_example(x, w, b):
        return torch.relu(x @ w + b)

    inputs = example.metas()[:3]
    made = ir.ladder(torch_example, *inputs, wrt="all")
    gpu, cpu = (ir.ladder(torch_example, *inputs, target=target)[
        "inductor"].text for target in ("h100", "cpu"))
    code = [" ".join(found) for found in re.findall(
        r"((?:LOAD|BINARY)\w*) .*?\((.*)\)", made["bytecode"].text)]
    guards = re.findall(r"TENSOR_MATCH: .*?(L\['\w'\]), .*?(torch\.\w+), "
                        r".*?(size=\[[\d, ]*\])", made["guards"].text)
    rows = (
        ("Python", made["python"].text, "bytecode, by CPython", "\n".join(
            "   ".join(code[i:i + 2]) for i in range(0, len(code), 2))),
        ("FX graph", cut(made["fx"].text, r" = .*[@+(]"),
         "guards: where one fails, all is compiled again",
         "\n".join(map("  ".join, guards))),
        ("forward graph, and what it saves", cut(
            made["forward"].text, r"aten\.(mm|add|relu)|return"),
         "backward graph", cut(made["backward"].text,
                               r"aten\.(where|sum|mm)")),
        ("Triton for the H100, the product from a library", cut(
            gpu, r"extern_kernels\.mm\(|^def triton|maximum|tl\.store"),
         "C++ for the CPU, the product from a library", cut(
             cpu, r"extern_kernels\.addmm\(|cpp_fused\w* = |clamp_min")))
    tools = ("", "Dynamo follows the bytecode, on shapes",
             "AOTAutograd differentiates, in ATen ops",
             "Inductor fuses and writes kernels")
    ax = canvas(". ".join(f"{tool}: {a}; {b}" for tool, (a, _, b, _) in zip(
        tools, rows, strict=True)).removeprefix(": "),
                "torch.compile: what passes from part to part")
    excerpts = []
    for i, (tool, row) in enumerate(zip(tools, rows, strict=True)):
        y = 74 + i * 157
        for x, name, text in ((30, *row[:2]), (650, *row[2:])):
            part(ax, x, y, 600, 126)
            say(ax, x + 10, y + 5, name, weight="bold")
            excerpts.append((x + 10, y + 28, 590, text))
        if i:
            arrow(ax, (330, y - 31), (330, y - 2), color=BLUE)
            say(ax, 360, y - 26, tool, weight="bold", color=BLUE)
    write_excerpts(ax, 96, 4, (14, 12), excerpts)
    foot(ax, "Real excerpts for the running example, trimmed; Inductor's are "
         "of the forward pass alone.")
    return ax.figure
