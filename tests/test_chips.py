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
        assert chip.note(column).startswith("recalled, not confirmed")
        assert "recalled" in str(chip.values[column])
        assert "recalled" in table.loc[name, column]


@pytest.mark.parametrize("name", ["a100-40", "a100-80", "h100-sxm", "b200"])
def test_tensor_cores_times_clock_gives_the_dense_peak(name):
    chip = chips.get(name)
    assert chip.tensor_cores_per_sm == 4
    assert rebuilt(chip, chip.sm_count) == pytest.approx(
        chip.peak("bf16"), rel=0.005)


@pytest.mark.parametrize("name", TENSOR)
def test_no_chip_stores_a_sparse_peak_as_dense(name):
    chip = chips.get(name)
    assert rebuilt(chip, chip.sm_count) == pytest.approx(
        chip.peak("fp16"), rel=0.02)


@pytest.mark.parametrize("name", ["t4", "v100", "a100-80", "h100-sxm",
                                  "h100-pcie", "h200", "b200", "mi300x"])
def test_no_peak_exceeds_what_the_maximum_clock_allows(name):
    """The tensor clock may be derived from the peak; the maximum is not."""
    chip = chips.get(name)
    assert chip.tensor_clock_hz <= chip.clock_hz
    assert chip.peak("fp16") <= 1.001 * (
        chip.sm_count * chip.tensor_cores_per_sm
        * chip.tensor_flops_per_cycle * chip.clock_hz)


@pytest.mark.parametrize("name", TENSOR)
def test_lanes_times_clock_gives_the_fp32_peak(name):
    chip = chips.get(name)
    assert 2 * chip.sm_count * chip.fp32_lanes_per_sm * chip.clock_hz == (
        pytest.approx(chip.peak("fp32"), rel=0.05))


def test_the_full_die_does_not_give_the_published_peak():
    h100 = chips.get("h100")
    assert (h100.full_die_sm_count, h100.sm_count) == (144, 132)
    assert rebuilt(h100, 144) > 1.05 * h100.peak("bf16")


def test_ratios_between_dtypes_are_the_hardwares():
    for name in ("a100-40", "h100-sxm", "h100-pcie", "h200", "b200"):
        chip = chips.get(name)
        assert chip.peak("fp16") == pytest.approx(2 * chip.peak("tf32"), 0.01)
        assert chip.peak("int8") == pytest.approx(2 * chip.peak("fp16"), 0.01)
    assert chips.get("b200").peak("fp4") == 4 * chips.get("b200").peak("bf16")


def test_ridge():
    assert chips.get("h100").ridge("bf16") == pytest.approx(295, abs=1)
    assert chips.get("h200").ridge("bf16") == pytest.approx(206, abs=1)
    assert chips.get("h200").peak("bf16") == chips.get("h100").peak("bf16")


def test_b200_does_not_carry_the_gb200s_numbers():
    b200 = chips.get("b200")
    assert b200.peak("fp32") < 80e12 and b200.hbm_bandwidth < 8e12
    assert "GB200" in b200.note("hbm_bandwidth")
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
    assert re.fullmatch(r"sm_\d{2,3}", chip.sm) and chip.gfx is None


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
        assert "2.46" in chip.note("hbm_bandwidth")
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
    assert "60 MB" in h100.note("l2_bytes")
    table = h100.table()
    assert table.loc["sm_count", "value"] == 132
    assert set(table.columns) == {"unit", "meaning", "value", "source",
                                  "grade", "note"}
    assert chips.table().loc["h200", "hbm_bandwidth"] == h100.hbm_bandwidth * (
        4.8 / 3.35)
    assert "132" in str(h100) and "<td>132 SM" in h100._repr_html_()


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
