"""Claims about chips, settled by arithmetic on the sourced table."""

import math

import pytest

from course_utils import chips, memory

NVIDIA = [chips.get(name) for name in chips.names()
          if chips.get(name).vendor == "NVIDIA"]
QUARTER = 4  # an SM is four subpartitions, each with one warp scheduler


def tensor_peak(chip, sms):
    """FLOP/s of ``sms`` SMs, from the structure of one."""
    return sms * per_sm_and_cycle(chip.name) * chip.tensor_clock_hz


def per_sm_and_cycle(name):
    chip = chips.get(name)
    return chip.tensor_cores_per_sm * chip.tensor_flops_per_cycle


def test_an_h100_has_132_sms_and_its_die_144():  # 52
    sxm, pcie = chips.get("h100-sxm"), chips.get("h100-pcie")
    assert (sxm.sm_count, pcie.sm_count, sxm.full_die_sm_count) == (
        132, 114, 144)
    # 144 would have to be a tenth faster than what NVIDIA publishes.
    fits = [sms for sms in (144, 132, 114)
            if math.isclose(tensor_peak(sxm, sms), sxm.peak("bf16"),
                            rel_tol=1e-3)]
    assert fits == [132]


def test_an_sm_has_registers_and_a_unified_l1_of_its_own():  # 53, 59, 98, 127
    h100 = chips.get("h100")
    own = {level.name: level for level in h100.levels()}
    for name in ("registers", "L1/SMEM"):
        assert own[name].units == h100.sm_count
        assert own[name].bytes == 256 * 1024
    assert h100.smem_per_sm_bytes == 228 * 1024  # the most of it as SMEM
    assert h100.smem_per_block_bytes == 227 * 1024
    assert h100.smem_per_sm_bytes < h100.l1_smem_bytes


def test_the_split_of_l1_and_smem_takes_listed_sizes_only():  # 60, 128
    h100 = chips.get("h100")
    sizes = h100.smem_carveouts_bytes
    assert [size // 1024 for size in sizes] == [
        0, 8, 16, 32, 64, 100, 132, 164, 196, 228]
    assert max(sizes) == h100.smem_per_sm_bytes < h100.l1_smem_bytes


def test_nearer_memory_is_smaller_quicker_and_wider():  # 62
    for chip in (chips.get("a100"), chips.get("h100-sxm")):
        assert (chip.smem_latency_cycles <= chip.l1_latency_cycles
                < chip.l2_latency_cycles < chip.hbm_latency_cycles)
        assert (chip.l1_bandwidth > chip.l2_bandwidth_measured
                > chip.hbm_bandwidth)


def test_l2_answers_near_and_far_and_serves_every_sm():  # 94
    h100 = chips.get("h100")
    l2, = (level for level in h100.levels() if level.name == "L2")
    assert l2.units == 1 < h100.sm_count
    assert h100.l2_far_latency_cycles > 1.5 * h100.l2_latency_cycles


def test_8_matrix_units_of_a_v5p_against_528_tensor_cores():  # 95, 99
    tpu, gpu = chips.get("tpu-v5p"), chips.get("h100")
    assert tpu.cores == 2  # each called a TensorCore, each with four MXUs
    assert tpu.cores * tpu.mxus_per_core == 8
    assert gpu.sm_count * gpu.tensor_cores_per_sm == 528
    assert gpu.peak("bf16") > 2 * tpu.peak("bf16")  # not at equal FLOP/s


def test_many_small_units_are_harder_to_fill():  # 100
    h100 = chips.get("h100")
    tiles = (512 // 128) * (2048 // 128)  # the running example's programs
    assert tiles < h100.sm_count  # so half the chip has no work at all
    full, over = (n / (math.ceil(n / h100.sm_count) * h100.sm_count)
                  for n in (h100.sm_count, h100.sm_count + 1))
    assert full == 1 and over < 0.51


def test_only_device_memory_holds_weights_and_their_gradients():  # 101, 133
    d = 4096  # one dense decoder layer: 4 d^2 of attention, 8 d^2 of MLP
    weights = 12 * d**2 * 2
    for chip in NVIDIA:
        *near, far = chip.levels()
        assert all(level.bytes * level.units < weights for level in near)
        assert 2 * weights < far.bytes


def test_an_sm_is_four_equal_quarters():  # 102, 124
    h100 = chips.get("h100")
    assert h100.tensor_cores_per_sm == QUARTER == h100.subpartitions_per_sm
    assert h100.fp32_lanes_per_sm / QUARTER == h100.warp_size
    assert h100.register_file_bytes / QUARTER == 64 * 1024


def test_most_flops_are_the_tensor_cores():  # 103
    h100 = chips.get("h100")
    tensor, vector = h100.peak("bf16"), h100.peak("fp32")
    assert round(100 * tensor / (tensor + vector), 1) == 93.7


def test_an_alu_issues_once_a_cycle_and_a_multiply_add_is_two():  # 105
    h100 = chips.get("h100")
    once = h100.sm_count * h100.fp32_lanes_per_sm * h100.clock_hz
    assert round(once / 1e12, 1) == 33.5
    assert 2 * once == pytest.approx(h100.peak("fp32"), rel=2e-3)


def test_int32_and_fp64_lanes_are_fewer_than_fp32_lanes():  # 106
    h100 = chips.get("h100")
    lanes = [getattr(h100, f"{kind}_lanes_per_sm") / QUARTER
             for kind in ("fp32", "int32", "fp64")]
    assert lanes == [32, 16, 16]
    both = [chip for chip in NVIDIA if "peak_fp64" in chip.values]
    assert len(both) > 2  # their peaks say the same, rounded as published
    for chip in both:
        by_peak = chip.peak("fp64") / (2 * chip.sm_count * chip.clock_hz)
        assert by_peak == pytest.approx(chip.fp64_lanes_per_sm, rel=0.02)
        assert chip.fp64_lanes_per_sm < chip.fp32_lanes_per_sm


def test_half_the_bits_twice_the_products():  # 108
    for name in ("h100", "b200", "l4", "rtx4090"):
        chip = chips.get(name)
        assert chip.peak("fp8") == pytest.approx(2 * chip.peak("bf16"),
                                                 rel=3e-3)
    h100 = chips.get("h100")
    assert round(h100.ridge("fp8") / h100.ridge("bf16"), 2) == 2
    assert 590 < h100.ridge("fp8") < 591


def test_tensor_cores_grew_with_each_generation():  # 109
    assert [per_sm_and_cycle(name) for name in ("v100", "a100", "h100",
            "b200")] == [1024, 2048, 4096, 8192]


def test_an_accumulator_is_half_the_register_file():  # 110
    b200 = chips.get("b200")
    accumulator = 128 * 256 * 4  # one tile, in fp32
    assert accumulator == b200.register_file_bytes / 2
    assert accumulator == b200.tmem_bytes / 2  # so TMEM holds two


def test_a_warp_is_32_threads_on_every_nvidia_chip():  # 115
    assert {chip.warp_size for chip in NVIDIA} == {32}
    assert chips.get("mi300x").warp_size == 64


def test_64_warps_are_resident_on_some_generations_only():  # 118
    most = {chip.name: chip.max_warps_per_sm for chip in NVIDIA}
    assert [most[n] for n in ("v100", "a100-80", "h100-sxm", "b200")] == [
        64] * 4
    assert most["t4"] == 32 and most["l4"] == most["rtx4090"] == 48


def test_many_warps_cover_the_latency_of_memory_and_one_does_not():  # 120-1
    h100 = chips.get("h100")
    in_flight = (h100.hbm_bandwidth * h100.hbm_latency_cycles
                 / h100.clock_hz)  # Little's law: bytes on their way
    line = h100.warp_size * 4  # one fp32 load a thread
    one, all_ = (h100.sm_count * warps * line
                 for warps in (1, h100.max_warps_per_sm))
    assert one < in_flight / 40 and all_ > in_flight


def test_tmem_stands_beside_smem_on_blackwell_only():  # 123
    names = [level.name for level in chips.get("h100").levels()]
    assert names == ["registers", "L1/SMEM", "L2", "HBM3"]
    assert [chip.name for chip in NVIDIA if "tmem_bytes" in chip.values] == [
        "b200"]
    b200 = chips.get("b200")
    assert (b200.tmem_bytes == b200.l1_smem_bytes
            == b200.register_file_bytes)  # no step of a ladder of sizes


def test_16384_registers_are_a_quarters_not_an_sms():  # 125
    h100 = chips.get("h100")
    assert 16_384 * 4 == 64 * 1024  # as the notes' own two numbers disagree
    assert h100.registers_per_sm == QUARTER * 16_384
    assert h100.registers_per_sm * 4 == h100.register_file_bytes == 256 * 1024


def test_a_thread_has_at_most_255_registers():  # 126
    h100 = chips.get("h100")
    assert h100.max_registers_per_thread == 255
    full = memory.occupancy(h100, 32, 255, 0)  # blocks of one warp
    assert (full.warps, full.limited_by) == (8, ("registers",))
    with pytest.raises(ValueError, match="256"):
        memory.occupancy(h100, 32, 256, 0)


def test_l2_is_50_mib_on_this_chip_and_not_on_others():  # 130
    sizes = {name: chips.get(name).l2_bytes / 2**20
             for name in ("a100", "h100-sxm", "h100-pcie", "b200")}
    assert sizes == {"a100": 40, "h100-sxm": 50, "h100-pcie": 50,
                     "b200": 126.5}


def test_the_16_fold_l2_divides_one_card_by_another():  # 132
    sxm, pcie = chips.get("h100-sxm"), chips.get("h100-pcie")
    published = 5.5e12  # Scaling Book, chapter 12; measured on the PCIe card
    assert round(published / sxm.hbm_bandwidth, 2) == 1.64
    assert round(published / pcie.hbm_bandwidth, 2) == 2.75
    for chip in (sxm, pcie):  # each card by its own memory
        assert chip.l2_bandwidth_measured > 2.4 * chip.hbm_bandwidth


def test_335_tb_are_the_sxm_cards():  # 134
    assert chips.get("h100-sxm").hbm_bandwidth == 3.35e12
    assert chips.get("h100-pcie").hbm_bandwidth == 2.0e12


def test_a_b200_does_not_reach_9_tb():  # 135
    wires, rate = 7680, 2 * 3996e6  # driver read-out, pytorch/ao PR 4002
    assert round(wires / 8 * rate / 1e12, 2) == 7.67
    assert chips.get("b200").hbm_bandwidth == pytest.approx(7.67e12, rel=5e-3)
