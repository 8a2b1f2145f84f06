"""Memory: traffic against a slow cache, occupancy against NVIDIA's header."""

import itertools
import math
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_utils import chips, kernels, memory
from course_utils.kernels.trace import Access, Operand, Trace

KINDS = ("load", "store", "atomic")


def trace(accesses, sizes, grid, itemsize=2):
    """A Trace of (program, kind, tensor, offsets), tensors of one axis."""
    return Trace("f", tuple(
        Access((program, 0, 0), kind, tensor, (len(offsets),), offsets[0],
               np.array(offsets, np.int64) - offsets[0], itemsize)
        for program, kind, tensor, offsets in accesses),
        {name: Operand((size,), (1,), "float16", itemsize, n)
         for n, (name, size) in enumerate(sizes.items())}, (grid,))


def slow(t, at_once, size):
    """The same cache, one sector at a time, by time stamps: bytes read from
    and written to HBM, by tensor."""
    sets = size // (128 * 16)
    begin, free = {}, 0
    for name, operand in t.tensors.items():
        if any(a.tensor == name for a in t.accesses):
            begin[name] = free
            last = max(a.offsets.max() for a in t.accesses
                       if a.tensor == name)
            free += math.ceil((last + 1) * operand.itemsize / 256) * 256
    queues = {p: [a for a in t.accesses if a.program == p]
              for p in t.programs}
    order = []
    for start in range(0, len(t.programs), at_once):
        wave = [queues[p] for p in t.programs[start:start + at_once]]
        order += [a for step in itertools.zip_longest(*wave)
                  for a in step if a]
    used, have, dirty, moved, now = {}, set(), {}, {}, 0
    for a in order:
        sectors = {int(begin[a.tensor] + o * a.itemsize) // 32
                   for o in a.offsets}
        now += 1
        for line in sorted({s // 4 for s in sectors}):
            wanted = {s for s in sectors if s // 4 == line}
            now += 1
            alike = [n for n in used if n % sets == line % sets]
            if line not in used and len(alike) == 16:
                victim = min(alike, key=used.get)
                del used[victim]
                for s in range(4 * victim, 4 * victim + 4):
                    have.discard(s)
                    if owner := dirty.pop(s, None):
                        moved[owner, 1] = moved.get((owner, 1), 0) + 32
            used[line] = now
            for s in wanted:
                if a.kind != "store" and s not in have:
                    moved[a.tensor, 0] = moved.get((a.tensor, 0), 0) + 32
                have.add(s)
                if a.kind != "load":
                    dirty[s] = a.tensor
    for owner in dirty.values():
        moved[owner, 1] = moved.get((owner, 1), 0) + 32
    return moved


ACCESSES = st.lists(st.tuples(
    st.integers(0, 6), st.sampled_from(KINDS), st.sampled_from("xyz"),
    st.lists(st.integers(0, 3000), min_size=1, max_size=40)),
    min_size=1, max_size=25)


@settings(max_examples=60, deadline=None)
@given(ACCESSES, st.sampled_from([1, 2, 5]))
def test_traffic_is_that_of_a_slow_cache(accesses, sets):
    t = trace(accesses, dict.fromkeys("xyz", 3001), 7)
    got = memory.traffic(t, "h100", "one by one", 2048 * sets)
    want = slow(t, 1, 2048 * sets)
    for name in "xyz":
        assert got.moved["HBM", name] == (
            want.get((name, 0), 0), want.get((name, 1), 0))
    sectors = {(a.tensor, int(o) * 2 // 32) for a in t.accesses
               for o in a.offsets if a.kind != "store"}
    stored = {(a.tensor, int(o) * 2 // 32) for a in t.accesses
              for o in a.offsets if a.kind != "load"}
    whole = memory.traffic(t, "h100")
    # Everything fits an H100: what is read is read once at most, and not
    # at all where the kernel itself wrote it; what is written, once.
    assert sum(w for (level, _), (_, w) in whole.moved.items()
               if level == "HBM") == 32 * len(stored)
    assert 32 * len(sectors - stored) <= whole.read("HBM") <= 32 * len(
        sectors)
    if not stored:
        assert whole.read("HBM") == 32 * len(sectors) <= got.read("HBM")
    issued = sum(32 * len({int(o) * 2 // 32 for o in a.offsets})
                 for a in t.accesses if a.kind != "store")
    assert whole.read("L2") == got.read("L2") == issued


@settings(max_examples=30, deadline=None)
@given(ACCESSES, st.integers(1, 8))
def test_waves_take_turns(accesses, sms):
    t = trace(accesses, dict.fromkeys("xyz", 3001), 7)
    got = memory.traffic(t, replace_sms(sms), "waves", 4096)
    want = slow(t, sms, 4096)
    assert want == {
        (name, way): m[way] for (level, name), m in got.moved.items()
        if level == "HBM" for way in (0, 1) if m[way]}


def replace_sms(count):
    """An H100 with ``count`` SMs."""
    h100 = chips.get("h100")
    return replace(h100, values={**h100.values, "sm_count": replace(
        h100.values["sm_count"], value=count)})


def test_a_tiny_cache_reads_again():
    rows = [(p, "load", "x", list(range(start, start + 512)))
            for p in range(4) for start in range(0, 8192, 512)]
    t = trace(rows, {"x": 8192}, 4)
    fits = memory.traffic(t, "h100", "one by one")
    tiny = memory.traffic(t, "h100", "one by one", l2_bytes=8192)
    assert fits.moved["HBM", "x"] == (16384, 0) and fits.reuse == 4
    assert tiny.moved["HBM", "x"] == (65536, 0) and tiny.reuse == 1
    # Taking turns, all want the same bytes at the same time.
    assert memory.traffic(t, l2_bytes=8192).moved["HBM", "x"] == (16384, 0)
    assert (fits.hit_rate, tiny.hit_rate) == (0.75, 0)


def test_what_is_not_read_has_no_reuse():
    t = trace([(0, "store", "x", list(range(16)))], {"x": 16, "y": 8}, 1)
    got = memory.traffic(t)
    assert got.table().loc["HBM"].to_numpy().tolist() == [[0, 32], [0, 0]]
    assert (got.reuse, got.hit_rate, got.hbm_bytes) == (math.inf, 1, 32)
    assert got.levels == ("L2", "HBM") and len(got.assumptions) == 5
    assert "132 at a time" in got.assumptions[0]
    assert "52,428,800" in got.assumptions[2]


def traced(m, n, k, block, group, dtype="bfloat16"):
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    x, w, b, y = (torch.randn(s, device=kernels.device()).to(
        getattr(torch, dtype)) for s in ((m, k), (k, n), (n,), (m, n)))
    return kernels.launch(
        kernels.matmul_bias_relu, (m // block) * (n // block),
        *kernels.linear_args(x, w, b, y), trace=True, BLOCK_M=block,
        BLOCK_N=block, BLOCK_K=block, GROUP=group).trace


@pytest.mark.parametrize("group, loads", [(1, 90), (3, 54), (9, 90), (2, 63)])
def test_grouped_order_loads_fewer_blocks(group, loads):
    """Triton's matmul tutorial: 9x9 blocks, the first 9 of the output."""
    size = 9 * 16
    t = traced(size, size, size, 16, group)
    nine = [a for p in t.programs[:9] for a in t.of(p)]
    blocks = {(a.tensor, a.base) for a in nine if a.tensor in (
        "x_ptr", "w_ptr")}
    assert len(blocks) == loads
    # And that is what HBM gives: 9 SMs, a cache that holds all of it.
    got = memory.traffic(replace(t, accesses=tuple(nine)))
    read = (got.moved["HBM", "x_ptr"][0] + got.moved["HBM", "w_ptr"][0])
    assert read == loads * 16 * 16 * 2


def test_each_input_is_read_once_where_it_fits():
    t = traced(128, 256, 192, 32, 2)
    got = memory.traffic(t, "h100")
    for name, tensor in t.tensors.items():
        out = name == "y_ptr"
        assert got.moved["HBM", name] == (
            (0, tensor.bytes) if out else (tensor.bytes, 0))
    issued = t.table().bytes_issued
    assert got.read("L2") == issued.sum() - t.tensors["y_ptr"].bytes
    assert got.l2_bytes == issued.sum()
    assert got.reuse == pytest.approx(got.read("L2") / sum(
        t.tensors[n].bytes for n in ("x_ptr", "w_ptr", "b_ptr")))
    small = memory.traffic(t, "h100", "one by one", l2_bytes=16384)
    assert small.read("HBM") > 2 * got.read("HBM")
    assert slow(t, 1, 16384)["w_ptr", 0] == small.moved["HBM", "w_ptr"][0]


def test_tensors_that_share_memory_share_the_cache():
    pytest.importorskip("triton")
    torch = pytest.importorskip("torch")
    x = torch.ones(1024, device=kernels.device())
    apart = [x.clone() for _ in range(3)]
    for args, read in (((x, x, x), 4096), (apart, 8192)):
        done = kernels.launch(kernels.vector_add, 1, *args, 1024, trace=True)
        got = memory.traffic(done)  # its trace
        assert got.read("HBM") == read
        assert got.moved["HBM", "output_ptr"] == (0, 4096)
        assert got.moved["L2", "x_ptr"] == (4096, 0)


# -- occupancy ---------------------------------------------------------------

CASES = [(256, 32, 0), (256, 64, 0), (128, 128, 32768), (128, 255, 49152),
         (256, 128, 98304), (1024, 64, 0), (1024, 65, 0), (64, 32, 0),
         (384, 168, 65536), (128, 40, 1), (32, 8, 12288), (224, 92, 0),
         (96, 80, 1000), (1, 1, 0), (33, 255, 0), (1024, 32, 49152)]
CHIPS = ["t4", "v100", "a100", "l4", "h100", "b200"]
ORACLE = """
#include <cstdio>
#include "cuda_occupancy.h"
int main() {
  int cc, sub, threads, regs, smem;
  int W, B, R, RB, S, SB, SR, T;
  while (scanf("%d %d %d %d %d %d %d %d %d %d %d %d %d", &cc, &sub, &W, &B,
               &R, &RB, &S, &SB, &SR, &T, &threads, &regs, &smem) == 13) {
    cudaOccDeviceProp p;
    p.computeMajor = cc; p.computeMinor = sub; p.maxThreadsPerBlock = 1024;
    p.maxThreadsPerMultiprocessor = T; p.regsPerBlock = RB;
    p.regsPerMultiprocessor = R; p.warpSize = 32;
    p.sharedMemPerBlock = 49152; p.sharedMemPerMultiprocessor = S;
    p.numSms = 1; p.sharedMemPerBlockOptin = SB;
    p.reservedSharedMemPerBlock = SR;
    cudaOccFuncAttributes a;
    a.maxThreadsPerBlock = 1024; a.numRegs = regs; a.sharedSizeBytes = 0;
    a.partitionedGCConfig = PARTITIONED_GC_OFF;
    a.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    a.maxDynamicSharedSizeBytes = SB; a.numBlockBarriers = 1;
    cudaOccDeviceState s;
    s.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
    cudaOccResult r;
    int e = cudaOccMaxActiveBlocksPerMultiprocessor(&r, &p, &a, &s, threads,
                                                    smem);
    printf("%d\\n", e ? -1 : r.activeBlocksPerMultiprocessor);
  }
}
"""


def test_occupancy_is_that_of_nvidias_header(tmp_path):
    """CPU-only C++ that Triton's wheel brings; it never saw our table."""
    triton = pytest.importorskip("triton")
    header = (Path(triton.__file__).parent / "backends/nvidia/include")
    if not shutil.which("g++") or not (header / "cuda_occupancy.h").exists():
        pytest.skip("needs g++ and cuda_occupancy.h")
    (tmp_path / "o.cpp").write_text(ORACLE)
    subprocess.run(["g++", "-w", f"-I{header}", "o.cpp", "-o", "o"],
                   cwd=tmp_path, check=True)
    rows, ours = [], []
    for name, case in itertools.product(CHIPS, CASES):
        c = chips.get(name)
        if case[2] > c.smem_per_block_bytes:
            continue
        rows.append((*map(int, c.cc.split(".")), c.max_warps_per_sm,
                     c.max_blocks_per_sm, c.registers_per_sm,
                     c.max_registers_per_block, c.smem_per_sm_bytes,
                     c.smem_per_block_bytes, c.smem_reserved_bytes,
                     c.max_threads_per_sm, *case))
        ours.append(memory.occupancy(name, *case).blocks)
    out = subprocess.run(
        [tmp_path / "o"], input="\n".join(" ".join(map(str, row))
                                          for row in rows),
        capture_output=True, text=True, check=True).stdout.split()
    assert len(out) == len(rows) > 80
    for row, header_says, blocks in zip(rows, out, ours, strict=True):
        assert int(header_says) == blocks, row


@pytest.mark.parametrize("chip, case, blocks, limit", [
    ("h100", (32, 8, 12 * 1024), 17, "shared"),  # 19 without the 1 KiB
    ("a100", (224, 92, 0), 2, "registers"),  # 3 without grants by quarters
    ("t4", (64, 32, 0), 16, "warps blocks"),
    ("b200", (1024, 65, 0), 0, "registers"),  # cannot be launched
    ("h100", (256, 32, 0), 8, "warps registers"),
    ("a100", (128, 128, 32 * 1024), 4, "registers shared"),
    ("h100", (128, 32, 227 * 1024), 1, "shared"),
    ("h100", (128, 32, 228 * 1024), 0, "shared"),
])
def test_published_occupancies(chip, case, blocks, limit):
    got = memory.occupancy(chip, *case)
    assert got.blocks == blocks and " ".join(got.limited_by) == limit
    warps = -(-case[0] // 32) * blocks
    assert got.warps == warps
    assert got.fraction == warps / chips.get(chip).max_warps_per_sm


# -- roofline, lanes ---------------------------------------------------------

def test_roofline():
    c = chips.get("a100")
    ridge = c.peak("bf16") / c.hbm_bandwidth
    for factor, bound in ((0.5, "memory"), (2, "compute")):
        p = memory.roofline("a100", "bf16", factor * ridge * 1e9, 1e9)
        assert p.intensity == pytest.approx(factor * p.ridge)
        assert p.bound == bound and p.ridge == pytest.approx(ridge)
        assert p.seconds == pytest.approx(max(
            factor * ridge * 1e9 / 312e12, 1e9 / c.hbm_bandwidth))
        assert p.flops_per_second == pytest.approx(
            min(1, factor) * c.peak("bf16"))
    assert f"{bound}-bound" in str(p) and "312 TFLOP/s" in str(p)
    # V100 PCIe, gpu-benches README: 109 GFLOP/s measured at 1/8 FLOP/B,
    # which its peak bandwidth bounds from above.
    assert 109e9 < memory.roofline(
        "v100", "fp32", 1, 8).flops_per_second < 1.1 * 109e9


WARP = np.arange(32)


@pytest.mark.parametrize("addresses, sectors, efficiency", [
    (4 * WARP, 4, 1),  # CUDA Best Practices 10.2.1.1
    (4 * WARP + 4, 5, 0.8),  # 10.2.1.2, misaligned
    (8 * WARP, 8, 0.5),  # 10.2.1.4, stride two
    (4 * WARP[::-1], 4, 1), (4 * WARP[:20:2], 3, 10 * 4 / 96),
    (128 * WARP, 32, 1 / 8), ([], 0, 1), ([96], 1, 1 / 8),
    (np.zeros(32), 1, 1 / 8), (4 * WARP.reshape(4, 8), 4, 1),
])
def test_coalescing(addresses, sectors, efficiency):
    got = memory.coalescing(addresses)
    assert (got.sectors, got.efficiency) == (sectors, efficiency)


def test_coalescing_of_other_widths():
    assert memory.coalescing(2 * WARP, 2).sectors == 2
    assert memory.coalescing(16 * WARP, 16).sectors == 16
    assert memory.coalescing([30], 4).sectors == 2  # across a border


@pytest.mark.parametrize("addresses, passes", [
    (4 * WARP, 1), (8 * WARP, 2), (128 * WARP, 32), (132 * WARP, 1),
    (np.zeros(32), 1), ([], 0), (4 * (WARP // 2), 1), (12 * WARP, 1),
    ([0, 128, 4], 2)])
def test_bank_conflicts(addresses, passes):
    assert memory.bank_conflicts(addresses) == passes


@pytest.mark.parametrize("call, words", [
    (lambda t: memory.traffic(t, "mi300x"), "chip mi300x has no L2 that"),
    (lambda t: memory.traffic(t, "tpu-v5e"), "chip tpu-v5e has no L2 that"),
    (lambda t: memory.traffic(t, schedule="wave"), "'waves' or 'one by one'"),
    (lambda t: memory.traffic(t, l2_bytes=100), "l2_bytes is 100.* 2048"),
    (lambda t: memory.traffic(t, l2_bytes=0), "l2_bytes is 0: give a whole"),
    (lambda t: memory.traffic(t, l2_bytes=1e6), "l2_bytes is 1000000.0"),
    (lambda t: memory.traffic(None), "NoneType has no trace: launch with tr"),
    (lambda t: memory.traffic(kernels.Launch("f", None, "gpu", 0.1, (1,))),
     "Launch has no trace"),
    (lambda t: memory.occupancy("mi300x", 64, 8), "NVIDIA's GPUs only"),
    (lambda t: memory.occupancy("h100", 0, 8), "threads is 0: h100-sxm take"),
    (lambda t: memory.occupancy("h100", 32, 256), "registers is 256.*255"),
    (lambda t: memory.occupancy("h100", 32, 8, -1), "shared is -1"),
    (lambda t: memory.roofline("h100", "bf16", 0, 1), "must be above 0"),
    (lambda t: memory.roofline("t4", "bf16", 1, 1), "dtype 'bf16' has no"),
])
def test_bad_input_gets_one_sentence(call, words):
    t = trace([(0, "load", "x", [0])], {"x": 1}, 1)
    with pytest.raises(ValueError, match=words) as caught:
        call(t)
    assert "\n" not in str(caught.value)
