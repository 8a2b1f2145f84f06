"""chips: the table agrees with arithmetic, with XLA and with itself."""

import copy
import pickle
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from course_utils import chips

RAW = tomllib.loads(Path(chips.__file__).with_suffix(".toml").read_text(
    encoding="utf-8"))
NVIDIA = [n for n in chips.names() if chips.get(n).vendor == "NVIDIA"]
TENSOR = [n for n in chips.names() if chips.get(n).vendor != "Google"]
TPU = [n for n in chips.names() if chips.get(n).vendor == "Google"]


def entries():
    """Every (place, column, entry) of chips.toml."""
    for group in ("cc", "chips"):
        for name, block in RAW[group].items():
            for column, entry in block.items():
                if isinstance(entry, dict) and column != "absent":
                    yield f"{group}.{name}", column, entry


def rebuilt(chip, sms):
    return (sms * chip.tensor_cores_per_sm * chip.tensor_flops_per_cycle
            * chip.tensor_clock_hz)


def test_every_value_has_unit_source_grade_and_they_are_known():
    used, n = set(), 0
    for place, column, entry in entries():
        where = f"{place}.{column}"
        assert column in RAW["columns"], where
        assert set(entry) <= {"value", "source", "grade", "note"}, where
        assert entry["source"] in RAW["sources"], where
        assert entry["grade"] in RAW["grades"], where
        used.add(entry["source"])
        n += 1
    assert n > 400
    notes = " ".join(e.get("note", "") for _, _, e in entries())
    unused = set(RAW["sources"]) - used
    assert all(key in notes for key in unused), unused


def test_every_column_is_used_and_has_a_unit_unless_a_word():
    seen = {column for _, column, _ in entries()}
    assert seen == set(RAW["columns"])
    words = {c for _, c, e in entries() if isinstance(e["value"], str)}
    assert {c for c, (unit, _) in RAW["columns"].items() if not unit} == words


def test_recalled_values_are_shown_as_such():
    recalled = [(n, c) for n in chips.names()
                for c, v in chips.get(n).values.items() if v.grade == "R"]
    assert ("t4", "l1_latency_cycles") in recalled
    table = chips.table()
    for name, column in recalled:
        chip = chips.get(name)
        assert chip.values[column].note.startswith("recalled, not confirmed")
        assert "recalled" in str(chip.values[column])
        assert "recalled" in table.loc[name, column]


MIB, GB = 2**20, 10**9
# Copied by hand from the sources, not from chips.toml: peaks in 10**12, then
# whole memories in bytes, then bandwidths in 10**9 B/s. Dense peaks only.
PUBLISHED = {
    "t4": dict(fp32=8.1, fp16=65, int8=130, int4=260, l2=4 * MIB,
               hbm=16 * GB, hbm_bandwidth=320),
    "v100": dict(fp32=15.7, fp16=125, l2=6 * MIB, hbm=16 * GB,
                 hbm_bandwidth=900, l1_bandwidth=13_800,
                 l2_bandwidth_measured=2_310, hbm_bandwidth_measured=897),
    "a100-40": dict(fp64=9.7, fp64_tensor=19.5, fp32=19.5, tf32=156,
                    fp16=312, bf16=312, int8=624, l2=40 * MIB, hbm=40 * GB,
                    hbm_bandwidth=1_555, nvlink_bandwidth=600),
    "a100-80": dict(fp64=9.7, fp64_tensor=19.5, fp32=19.5, tf32=156,
                    fp16=312, bf16=312, int8=624, l2=40 * MIB, hbm=80 * GB,
                    hbm_bandwidth=2_039, nvlink_bandwidth=600,
                    l1_bandwidth=19_200, l2_bandwidth_measured=5_400,
                    hbm_bandwidth_measured=1_730),
    "l4": dict(fp32=30.3, tf32=60, fp16=121, bf16=121, fp8=242.5, int8=242.5,
               l2=48 * MIB, hbm=24 * GB, hbm_bandwidth=300),
    "h100-sxm": dict(fp32=67, tf32=494.7, fp16=989.4, bf16=989.4, fp8=1978.9,
                     int8=1978.9, l2=50 * MIB, hbm=80 * GB,
                     hbm_bandwidth=3_350, nvlink_bandwidth=900,
                     l1_bandwidth=132 * 126 * 1.98,
                     l2_bandwidth_measured=8_300,
                     hbm_bandwidth_measured=3_010),
    "h100-pcie": dict(fp32=51, tf32=378, fp16=756.5, bf16=756.5, fp8=1513,
                      int8=1513, l2=50 * MIB, hbm=80 * GB,
                      hbm_bandwidth=2_000, nvlink_bandwidth=600,
                      l2_bandwidth_measured=6_900,
                      hbm_bandwidth_measured=1_990),
    "h200": dict(fp32=67, tf32=494.7, fp16=989.4, bf16=989.4, fp8=1978.9,
                 int8=1978.9, l2=60 * MIB, hbm=141 * GB, hbm_bandwidth=4_800,
                 nvlink_bandwidth=900, l1_bandwidth=132 * 126 * 1.98,
                 l2_bandwidth_measured=9_700, hbm_bandwidth_measured=3_890),
    "b200": dict(fp64=37, fp32=75, tf32=1125, fp16=2250, bf16=2250, fp8=4500,
                 fp6=4500, fp4=9000, int8=4500, l2=126.5 * MIB, hbm=180 * GB,
                 hbm_bandwidth=7_700, nvlink_bandwidth=1_800,
                 l2_bandwidth_measured=21_200),
    "rtx4090": dict(fp32=82.6, tf32=82.6, fp16=165.2, fp16_acc16=330.3,
                    bf16=165.2, fp8=330.3, fp8_acc16=660.6, int8=660.6,
                    l2=72 * MIB, hbm=24 * GB, hbm_bandwidth=1_008),
    "mi300x": dict(fp64=81.7, fp64_tensor=163.4, fp32=163.4,
                   fp32_tensor=163.4, tf32=653.7, fp16=1307.4, bf16=1307.4,
                   fp8=2614.9, int8=2614.9, l2=4 * MIB, hbm=192 * GB,
                   infinity_cache=256 * MIB, l2_bandwidth=34_400,
                   infinity_cache_bandwidth=17_200, hbm_bandwidth=5_300,
                   l2_bandwidth_measured=27_000,
                   hbm_bandwidth_measured=4_000),
    "tpu-v4": dict(bf16=275, int8=275, hbm=32 * 1024 * MIB,
                   hbm_bandwidth=1_200, ici_bandwidth=6 * 90),
    "tpu-v5e": dict(bf16=197, int8=393, int4=788, hbm=16 * 1024 * MIB,
                    hbm_bandwidth=819, ici_bandwidth=400),
    "tpu-v5p": dict(bf16=459, int8=918, fp8=459, int4=1840,
                    hbm=95 * 1024 * MIB, hbm_bandwidth=2_765,
                    ici_bandwidth=1_200),
    "tpu-v6e": dict(bf16=918, int8=1836, fp8=918, int4=3680,
                    hbm=32 * 1024 * MIB, hbm_bandwidth=1_638,
                    ici_bandwidth=800),
    "tpu7x": dict(bf16=2307, fp8=4614, hbm=192 * 1024 * MIB,
                  hbm_bandwidth=7_380, ici_bandwidth=1_200),
}


@pytest.mark.parametrize("name", chips.names())
def test_the_table_says_what_the_sources_say(name):
    """A chip that is new in chips.toml is copied here a second time."""
    want, have = {}, {}
    for short, value in PUBLISHED[name].items():
        if short in ("l2", "hbm", "infinity_cache"):
            want[f"{short}_bytes"] = value
        elif short.endswith(("bandwidth", "measured")):
            want[short] = value * 1e9
        else:
            want[f"peak_{short}"] = value * 1e12
    for column, value in chips.get(name).values.items():
        if column.startswith("peak_") or "bandwidth" in column or (
                column in ("l2_bytes", "hbm_bytes", "infinity_cache_bytes")):
            have[column] = value.value
    assert have == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("name", ["a100-40", "a100-80", "h100-sxm", "b200"])
def test_tensor_cores_times_clock_gives_the_dense_peak(name):
    chip = chips.get(name)
    assert chip.tensor_cores_per_sm == 4
    assert rebuilt(chip, chip.sm_count) == pytest.approx(
        chip.peak("bf16"), rel=0.005)


# FLOP per tensor core and cycle, and clock, known apart from the peak: a
# value of the table that is derived from the peak could not contradict it.
APART = {"h100-sxm": (1024, 1.83e9, 0.002), "b200": (2048, 1.8353e9, 0.015),
         "l4": (256, 2.04e9, 0.005), "rtx4090": (256 / 2, 2.52e9, 0.005)}


def derived(chip):
    return "calc" in (chip.values["tensor_clock_hz"].grade,
                      chip.values["tensor_flops_per_cycle"].grade)


@pytest.mark.parametrize("name", TENSOR)
def test_no_chip_stores_a_sparse_peak_as_dense(name):
    chip = chips.get(name)
    cores = chip.sm_count * chip.tensor_cores_per_sm
    if name in APART:
        flops, clock, rel = APART[name]
        assert cores * flops * clock == pytest.approx(chip.peak("fp16"), rel)
    elif derived(chip):  # h100-pcie: no clock known but the maximum
        highest = cores * 1024 * chip.clock_hz
        assert 0.85 * highest < chip.peak("fp16") < highest
    else:
        assert rebuilt(chip, chip.sm_count) == pytest.approx(
            chip.peak("fp16"), rel=0.02)


@pytest.mark.parametrize("name", ["t4", "v100", "a100-80", "h100-sxm",
                                  "h100-pcie", "h200", "b200", "mi300x"])
def test_the_tensor_clock_is_no_higher_than_the_maximum(name):
    assert chips.get(name).tensor_clock_hz <= chips.get(name).clock_hz


@pytest.mark.parametrize("name", TENSOR)
def test_lanes_times_clock_gives_the_fp32_peak(name):
    chip = chips.get(name)
    assert 2 * chip.sm_count * chip.fp32_lanes_per_sm * chip.clock_hz == (
        pytest.approx(chip.peak("fp32"), rel=0.05))


def test_the_full_die_does_not_give_the_published_peak():
    h100 = chips.get("h100")
    assert (h100.full_die_sm_count, h100.sm_count) == (144, 132)
    assert rebuilt(h100, 144) > 1.05 * h100.peak("bf16")


# Times the 16-bit rate with fp32 accumulate; what differs is named.
RATIOS = {"tf32": 1 / 2, "fp8": 2, "int8": 2, "fp6": 2, "fp4": 4, "int4": 4,
          "fp16": 1, "bf16": 1, "fp16_acc16": 2, "fp8_acc16": 4}
UNLIKE = {("tpu-v4", "int8"): 1, ("tpu-v5p", "fp8"): 1, ("tpu-v6e", "fp8"): 1,
          ("rtx4090", "int8"): 4}  # GeForce halves only fp32 accumulate


@pytest.mark.parametrize("name", chips.names())
def test_ratios_between_dtypes_are_the_hardwares(name):
    chip = chips.get(name)
    base = chip.peak("fp16" if chip.vendor != "Google" else "bf16")
    own = {c.removeprefix("peak_") for c in chip.values if "peak_" in c}
    for dtype in own - {"fp32", "fp64", "fp64_tensor", "fp32_tensor"}:
        ratio = UNLIKE.get((name, dtype), RATIOS[dtype])
        assert chip.peak(dtype) / base == pytest.approx(ratio, 0.01), dtype


def test_ridge():
    assert chips.get("h100").ridge("bf16") == pytest.approx(295, abs=1)
    assert chips.get("h200").ridge("bf16") == pytest.approx(206, abs=1)
    assert chips.get("h200").peak("bf16") == chips.get("h100").peak("bf16")


def test_b200_does_not_carry_the_gb200s_numbers():
    b200 = chips.get("b200")
    assert b200.peak("fp32") < 80e12 and b200.hbm_bandwidth < 8e12
    assert "GB200" in b200.values["hbm_bandwidth"].note
    assert b200.tmem_bytes == 128 * 512 * 4


@pytest.mark.parametrize("name", NVIDIA)
def test_limits_of_an_sm_fit_together(name):
    chip = chips.get(name)
    assert chip.max_warps_per_sm * chip.warp_size == chip.max_threads_per_sm
    assert (chip.smem_per_sm_bytes - chip.smem_reserved_bytes
            == chip.smem_per_block_bytes)
    assert chip.smem_carveouts_bytes[-1] == chip.smem_per_sm_bytes
    assert chip.smem_per_sm_bytes < chip.l1_smem_bytes
    assert 4 * chip.registers_per_sm == chip.register_file_bytes
    assert chip.sm_count < chip.full_die_sm_count
    assert re.fullmatch(r"\d{1,2}\.\d", chip.cc) and chip.gfx is None


@pytest.mark.parametrize("name", ["t4", "a100", "h100", "b200"])
def test_what_a_gpu_target_config_needs_is_there(name):
    chip = chips.get(name)
    for column in ("sm_count", "clock_hz", "l2_bytes", "hbm_bytes",
                   "hbm_bandwidth", "smem_per_sm_bytes",
                   "smem_per_block_bytes", "registers_per_sm",
                   "max_registers_per_block", "max_threads_per_sm",
                   "max_threads_per_block", "max_blocks_per_sm",
                   "max_warps_per_sm", "fp32_lanes_per_sm", "warp_size"):
        assert getattr(chip, column) > 0
    assert re.fullmatch(r"\d+\.\d", chip.cc)


def test_occupancy_header_of_triton_agrees(tmp_path):
    """NVIDIA's own header, compiled here, against our limits by cc."""
    from course_utils import host
    triton = pytest.importorskip("triton")
    compiler = host.compiler()
    include = Path(triton.__file__).parent / "backends/nvidia/include"
    if not compiler or not (include / "cuda_occupancy.h").exists():
        pytest.skip("needs a C++ compiler and Triton's CUDA headers")
    source = tmp_path / "occupancy.cpp"
    source.write_text("""
#include <cstdio>
#include <cstdlib>
#include "cuda_occupancy.h"
int main(int, char **a) {
  cudaOccDeviceProp p;
  p.computeMajor = atoi(a[1]); p.computeMinor = atoi(a[2]);
  int blocks, unit, regs, barriers;
  if (cudaOccMaxBlocksPerMultiprocessor(&blocks, &p)) return 1;
  if (cudaOccSMemAllocationGranularity(&unit, &p)) return 2;
  if (cudaOccRegAllocationGranularity(&regs, &p)) return 3;
  cudaOccFuncAttributes f;
  f.numBlockBarriers = 1;
  if (cudaOccMaxBlocksPerSMBlockBarrierLimit(&barriers, blocks, &p, &f))
    return 4;
  std::printf("%d %d %d %d", blocks, unit, regs, barriers);
  for (size_t size = 0; !cudaOccAlignUpShmemSizeVoltaPlus(&size, &p); ++size)
    std::printf(" %zu", size);
}""")
    binary = tmp_path / "occupancy"
    subprocess.run([compiler, "-w", f"-I{include}", str(source), "-o",
                    str(binary)], check=True)
    for name in NVIDIA:
        chip = chips.get(name)
        out = subprocess.run([str(binary), *chip.cc.split(".")], check=True,
                             capture_output=True, text=True).stdout
        assert [int(x) for x in out.split()] == [
            chip.max_blocks_per_sm, chip.smem_alloc_unit_bytes,
            chip.register_alloc_unit, chip.max_barriers_per_sm,
            *chip.smem_carveouts_bytes], name


@pytest.mark.parametrize("name", TPU)
def test_jax_agrees_on_tpus(name):
    info = pytest.importorskip("jax._src.pallas.mosaic.tpu_info")
    chip = chips.get(name)
    version = getattr(info.ChipVersion,
                      "TPU_" + name.replace("tpu", "").strip("-").upper())
    jax = info._get_tpu_info_impl(version, chip.cores)
    parts = version.num_physical_tensor_cores_per_chip
    assert jax.num_mxus == chip.mxus_per_core
    assert jax.mxu_column_size == chip.mxu_side
    assert jax.vmem_capacity_bytes == chip.vmem_bytes
    assert jax.smem_capacity_bytes == chip.scalar_smem_bytes
    assert (jax.num_lanes, jax.num_sublanes) == (chip.vpu_lanes,
                                                 chip.vpu_sublanes)
    assert parts * jax.bf16_ops_per_second == pytest.approx(
        chip.peak("bf16"), rel=0.005)
    assert parts * jax.hbm_capacity_bytes == pytest.approx(
        chip.hbm_bytes, rel=0.01)
    bandwidth = parts * jax.mem_bw_bytes_per_second
    if name == "tpu-v5p":  # the disagreement the note tells
        assert "2.46" in chip.values["hbm_bandwidth"].note
        assert bandwidth == pytest.approx(2.46e12)
    else:
        assert bandwidth == pytest.approx(chip.hbm_bandwidth, rel=0.03)


def test_levels_are_sorted_and_end_in_device_memory():
    for name in chips.names():
        levels = chips.get(name).levels()
        sizes = [size for _, size, _, _ in levels]
        assert sizes == sorted(sizes) and len(levels) >= 3
        assert levels[-1].bandwidth == chips.get(name).hbm_bandwidth
    by_name = {level.name: level for level in chips.get("b200").levels()}
    assert by_name["TMEM"].units == 148 and by_name["L2"].units == 1
    xcds = {level.name: level for level in chips.get("mi300x").levels()}
    assert xcds["L2"].units * xcds["L2"].bytes == 32 * 2**20


def test_computed_values_are_what_their_notes_say():
    for name in ("h100-sxm", "h200"):
        chip = chips.get(name)
        assert chip.l1_bandwidth == pytest.approx(
            chip.sm_count * chip.l1_bytes_per_cycle * chip.clock_hz, rel=1e-3)
    assert {c for _, c, e in entries() if e["source"] == "CALC"} == {
        "l1_bandwidth", "tensor_clock_hz", "tensor_flops_per_cycle",
        "fp32_lanes_per_sm"}


def test_names_and_aliases():
    assert chips.get("h100") is chips.get("H100-SXM")
    assert chips.get("a100").name == "a100-80"
    assert chips.get("RTX 4090").name == "rtx4090"
    assert chips.get(chips.get("t4")).title == "NVIDIA T4"
    assert len(chips.names()) == len(set(chips.names())) == 16


@pytest.mark.parametrize("bad, error, says", [
    (lambda: chips.get("h10"), ValueError, "nearest: h100"),
    (lambda: chips.get(100), TypeError, "name must be"),
    (lambda: chips.get("t4").peak("bf16"), ValueError, "no bf16 tensor core"),
    (lambda: chips.get("a100").peak("fp8"), ValueError, "Hopper"),
    (lambda: chips.get("t4").peak("FP61"), ValueError, "'FP61' .* fp32, fp16"),
    (lambda: chips.get("t4").peak([]), ValueError, r"dtype \[\] has no peak"),
    (lambda: chips.get("t4").ridge(None), ValueError, "dtype None"),
    (lambda: chips.get("t4").hbm_bandwith, AttributeError, "hbm_bandwidth"),
    (lambda: chips.get("t4").source("l2_byte"), AttributeError, "l2_bytes"),
    (lambda: chips.get("tpu-v5e").sm_count, AttributeError, "sm_count"),
])
def test_bad_input_is_named(bad, error, says):
    with pytest.raises(error, match=says):
        bad()


def test_source_and_note_and_tables():
    h100 = chips.get("h100")
    assert "H100 whitepaper" in h100.source("sm_count")
    assert "60 MB" in h100.values["l2_bytes"].note
    page = h100._repr_html_()
    assert "60 MB" in page and "H100 whitepaper" in page
    assert chips.table().loc["h200", "hbm_bandwidth"] == h100.hbm_bandwidth * (
        4.8 / 3.35)
    assert "132" in str(h100) and "<td>132 SM" in page


def test_every_name_of_a_dtype_serves():
    b200 = chips.get("b200")
    for name in ("bf16", "BF16", " bfloat16 ", "torch.bfloat16"):
        assert b200.peak(name) == b200.peak_bf16
    np, fp8 = pytest.importorskip("numpy"), "float8_e4m3fn"
    assert b200.peak(np.float16) == b200.peak(np.dtype("float16"))
    for module in ("torch", "jax.numpy"):
        library = pytest.importorskip(module)
        assert b200.peak(library.bfloat16) == b200.peak_bf16
        assert b200.peak(getattr(library, fp8)) == b200.peak_fp8
        assert b200.ridge(library.int8) == b200.ridge("int8")


def test_no_reader_can_change_the_table():
    for name in chips.names():
        chip = chips.get(name)
        assert all(isinstance(v.value, int | float | str | tuple)
                   for v in chip.values.values())
        for mapping in (chip.values, chip.absent):
            with pytest.raises(TypeError):
                mapping["sm_count"] = 1


def test_chips_travel_to_workers():
    h100 = chips.get("h100")
    assert pickle.loads(pickle.dumps(h100)) is h100
    assert copy.deepcopy(h100) is h100 and hash(h100)


def test_chips_needs_nothing_heavy():
    code = ("import sys; from course_utils import chips; "
            "chips.get('h100').ridge('bf16'); "
            "print([m for m in ('pandas', 'numpy', 'jax') "
            "if m in sys.modules])")
    assert subprocess.run([sys.executable, "-c", code], text=True,
                          capture_output=True, check=True).stdout == "[]\n"
