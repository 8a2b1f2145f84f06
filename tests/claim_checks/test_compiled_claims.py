"""Claims about machine code, settled by compiling for absent chips."""

import functools
import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("jax")

from course_utils import chips, example, ir, kernels  # noqa: E402
from course_utils.compilers import triton as compiler  # noqa: E402

TILED = """
@triton.jit
def tiled(x_ptr, w_ptr, y_ptr, M, N, K, B: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [M, K], [K, 1], [B, 64])
    w = tl.make_tensor_descriptor(w_ptr, [K, N], [N, 1], [64, B])
    y = tl.make_tensor_descriptor(y_ptr, [M, N], [N, 1], [B, B])
    m, n = tl.program_id(0) * B, tl.program_id(1) * B
    sums = tl.zeros((B, B), dtype=tl.float32)
    for k in range(0, K, 64):
        sums = tl.dot(x.load([m, k]), w.load([k, n]), sums)
    y.store([m, n], sums.to(tl.bfloat16))
"""
PEER = """
@triton.jit
def peer(x_ptr, y_ptr):
    i = tl.arange(0, 128)
    mine = tl.load(x_ptr + i)
    theirs = tl.inline_asm_elementwise('''
    {
    .shared .align 4 .b8 box[4];
    .reg .b32 here, there;
    mov.u32 here, box;
    mapa.shared::cluster.u32 there, here, 1;
    st.shared::cluster.b32 [there], $1;
    barrier.cluster.arrive;
    barrier.cluster.wait;
    ld.shared::cluster.b32 $0, [there];
    }
    ''', "=r,r", [mine], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(y_ptr + i, theirs)
"""
NORMALISE = """
@triton.jit
def normalise(x_ptr, y_ptr):
    i = tl.arange(0, 128)
    e = tl.exp(tl.load(x_ptr + i))
    tl.store(y_ptr + i, e / tl.sum(e))
"""
DIVERGE = """
.version 8.0
.target {arch}
.address_size 64
.visible .entry k(.param .u64 p)
{{
 .reg .pred %p; .reg .b32 %r<3>; .reg .b64 %d<4>;
 ld.param.u64 %d1, [p];
 mov.u32 %r1, %tid.x;
 mul.wide.u32 %d2, %r1, 4;
 add.u64 %d3, %d1, %d2;
 ld.global.u32 %r2, [%d3];
 setp.gt.s32 %p, %r2, 0;
 @%p bra ELSE;
LOOP: mul.lo.u32 %r2, %r2, %r2;
 setp.lt.s32 %p, %r2, 1000000;
 @%p bra LOOP;
 bra END;
ELSE: st.global.u32 [%d3+4096], %r2;
END: st.global.u32 [%d3], %r2;
 ret;
}}
"""


def found(pattern, text):
    return len(re.findall(pattern, text))


@functools.cache
def fused(target="h100", **meta):
    return kernels.build(kernels.matmul_bias_relu, *kernels.linear_args(
        *example.metas()), target=target, **meta)


@functools.cache
def add(size=1024, **meta):
    x = torch.empty(98432, device="meta")
    return kernels.build(kernels.vector_add, x, x, x, 98432,
                         BLOCK_SIZE=size, **meta)


@functools.cache
def tiled():
    return kernels.build(kernels.from_source(TILED), *[torch.bfloat16] * 3,
                         512, 2048, 1024, B=128)


@functools.cache
def ladder(target):
    return ir.ladder(example.function(), *example.specs()[:3], target=target)


def test_each_chip_has_instructions_of_its_own():  # 50
    code = {"cpu": ladder("cpu").machine_code,
            "h100": fused().sass, "tpu-v5e": ladder("tpu-v5e").machine_code,
            "mi300x": fused("mi300x").amdgcn}
    own = {"cpu": r"\bvmaxps\b", "h100": r"\bHGMMA\b",
           "tpu-v5e": r"\bvmatmul\b", "mi300x": r"\bv_mfma_"}
    for chip, word in own.items():
        assert [c for c, text in code.items() if found(word, text)] == [chip]


def test_an_executable_comes_with_schedule_and_buffers():  # 51
    cpu = ladder("cpu")
    assert "is_scheduled=true" in cpu["hlo-optimized"].text
    assert len(cpu.kernels) > 1 and cpu.memory["temp"] > 0
    assert {b.kind for b in cpu.buffers} == {"parameter", "output", "temp"}


def test_one_instruction_multiplies_and_adds_a_whole_tile():  # 55
    # wgmma names the fp32 accumulator first: it is read and written.
    assert found(r"wgmma\.mma_async\S+m64n128k16\.f32\.bf16\.bf16",
                 fused().ptx) == 8
    assert not found(r"\bF(FMA|MUL)\b", fused().sass)


def test_a_cluster_is_asked_for_and_has_a_barrier():  # 64
    one, two = fused().ptx, fused(num_ctas=2).ptx
    assert ".reqnctapercluster" in two and ".reqnctapercluster" not in one
    assert "UCGABAR" in peer().sass  # the hardware's barrier of a cluster


@functools.cache
def peer():
    return kernels.build(kernels.from_source(PEER), torch.int32, torch.int32,
                         num_ctas=2)


def test_a_block_reaches_its_neighbours_shared_memory():  # 65
    assert found(r"mapa\.shared::cluster", peer().ptx) == 1
    assert found(r"(ld|st)\.shared::cluster", peer().ptx) == 2
    assert peer().registers > 0  # ptxas made a binary of it


def test_copies_and_products_run_while_the_threads_go_on():  # 63, 66
    ptx = fused().ptx
    for word in (r"cp\.async\.cg\.shared\.global", r"cp\.async\.wait_group",
                 r"wgmma\.mma_async", r"wgmma\.wait_group"):
        assert found(word, ptx)


def test_tma_moves_a_tile_by_one_instruction():  # 67
    assert found(r"cp\.async\.bulk\.tensor\.2d\.shared", tiled().ptx)
    assert found(r"\bUTMALDG\.2D", tiled().sass)
    assert not found("UTMALDG", fused().sass)  # pointers: no descriptor
    assert "tcgen05" not in tiled().ptx  # nothing to do with TMEM


def test_a_transaction_barrier_counts_bytes_too():  # 68
    ptx = tiled().ptx
    for word in (r"mbarrier\.init", r"mbarrier\.arrive\.expect_tx",
                 r"mbarrier\.try_wait", r"mbarrier::complete_tx::bytes"):
        assert found(word, ptx)


def test_offsets_are_numbers_and_the_sum_is_a_pointer():  # 78
    ttir = add().ttir
    assert found(r"%offsets\w* = \S+ .*: tensor<1024xi32>", ttir)
    assert found(r"tt\.addptr %x\S*, %offsets\S* : tensor<1024x!tt\.ptr<f32>>",
                 ttir)


def test_you_write_blocks_and_the_compiler_picks_threads():  # 77
    assert not found(r"thread|warp|shared|register", add().python)
    assert found(r"sizePerThread|threadsPerWarp", add().ttgir)


def test_a_load_lands_in_registers_and_passes_shared_memory():  # 85
    assert found(r"ld\.global\.v4\.b32 +\{ ?%r\d+", add().ptx)
    assert add().shared_bytes == 0
    assert fused().shared_bytes > 64_000  # tiles of tl.dot are staged there


def test_a_store_writes_from_registers_and_skips_masked_lanes():  # 86
    assert found(r"@%p\d+ st\.global\.v4\.b32 \[.*\], \{ %r\d+", add().ptx)


def test_nothing_goes_to_local_memory():  # 87
    for built in (add(), fused()):
        assert built.spills == 0
        assert not found(r"\b(st|ld)\.local", built.ptx)
        assert not found(r"\b(STL|LDL)\b", built.sass)


def test_a_program_is_a_block_of_warps():  # 89
    for warps in (4, 8):
        asked = re.search(r"\.reqntid (\d+)", add(num_warps=warps).ptx)
        assert int(asked[1]) == 32 * warps


def test_a_new_block_size_is_a_new_kernel():  # 90
    assert "tensor<1024xf32>" in add().ttir
    assert "tensor<2048xf32>" in add(2048).ttir
    assert add().sass != add(2048).sass


def test_relu_and_sums_are_vector_instructions():  # 107
    assert found(r"\b(FMNMX|HMNMX2)\b", fused().sass)
    made = kernels.build(kernels.from_source(NORMALISE), torch.float32,
                         torch.float32)
    assert found(r"\bFADD\b", made.sass)  # the sum
    assert found(r"\bMUFU\.EX2\b", made.sass)  # exp: special function unit
    assert "HGMMA" not in made.sass


def test_blackwells_new_memory_is_tmem():  # 111, 123
    b200 = fused("b200").ptx
    for word in ("alloc", "mma", "ld", "dealloc"):
        assert found(rf"tcgen05\.{word}\b", b200)
    assert "tcgen05" not in fused().ptx
    assert chips.get("b200").tmem_bytes == 128 * 512 * 4  # lanes, columns


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_diverging_threads_meet_again_at_a_barrier(arch):  # 97, 113
    sass = compiler.assemble(DIVERGE.format(arch=arch), arch).sass
    assert found(r"\bBSSY\b", sass) and found(r"\bBSYNC\b", sass)
    assert found(r"@!?P\d BRA", sass)  # a mask decides who goes


def test_a_thread_may_hold_several_elements():  # 116
    threads = 4 * 32
    wide = found(r"\bLDG\.E\.128\b", add().sass)  # of x and of y
    assert wide * 4 / 2 == 1024 / threads == 8


def test_32_elements_are_one_warp_and_one_add():  # 104, 114, 117
    sass = add(32, num_warps=1).sass
    assert found(r"\bFADD\b", sass) == 1
    ptx = add(32, num_warps=1).ptx
    assert ".reqntid 32" in ptx and "%tid.x" in ptx  # each knows its number


def test_tensor_cores_read_shared_memory_not_hbm():  # 129, 136
    sass = fused().sass
    assert found(r"\bLDGSTS\b", sass)  # global to shared
    products = re.findall(r"\bHGMMA\.\S+ (.*?);", sass)
    assert products and all("gdesc[" in p for p in products)  # shared


def test_llo_is_the_tpus_alone():  # 39
    names = {t: ladder(t).names for t in ("cpu", "h100", "tpu-v5e")}
    assert [t for t in names if "llo" in names[t]] == ["tpu-v5e"]
    assert [t for t in names if "llvm-ir" in names[t]] == ["cpu", "h100"]
    upper = {n[:n.index("hlo-optimized") + 1] for n in names.values()}
    assert len(upper) == 1


def test_llo_schedules_the_copies():  # 40
    llo = ladder("tpu-v5e")["llo"].text
    for word in (r"dma\.hbm_to_vmem", r"\bvsync", r"\bvmatpush",
                 r"\bvmatmul\S+mxu[0-3]", r"\bvpop"):
        assert found(word, llo)


def test_a_bundle_starts_several_instructions():  # 41
    bundles = ladder("tpu-v5e")["bundles"].text
    together = [line for line in bundles.splitlines()
                if "vmatmul" in line and ";;" in line]
    assert len(together) > 100


def test_stablehlo_is_the_same_for_every_chip_and_short():  # 35
    made = [ladder(t) for t in ("cpu", "h100", "tpu-v5e")]
    assert len({one["stablehlo"].text for one in made}) == 1

    def size(one, rung):
        return len(one[rung].text.splitlines())

    for one, low in zip(made, ("llvm-ir", "llvm-ir", "llo"), strict=True):
        assert size(one, low) > 10 * size(one, "stablehlo")
