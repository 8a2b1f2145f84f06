"""Kernels: compiled for chips that are not here, run without a GPU."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from course_utils import kernels  # noqa: E402
from course_utils.compilers import triton as compiler  # noqa: E402
from course_utils.compilers.worker import CompilerError  # noqa: E402

ROOT = Path(__file__).parents[1]
BLOCKS = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16, "GROUP": 2}
HEADER = "@triton.jit\ndef kernel(x, y, n, B: tl.constexpr):\n"


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COURSE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def example(m=512, n=2048, k=1024):
    return kernels.linear_args(meta(m, k), meta(k, n), meta(n), meta(m, n))


def kernel(body):
    return kernels.from_source(HEADER + textwrap.indent(body, "    "))


def without_relu():
    text = kernels.matmul_bias_relu.src
    assert text.count("tl.maximum(accumulator + b[None, :], 0.0)") == 1
    return kernels.from_source("@triton.jit\n" + text.replace(
        "tl.maximum(accumulator + b[None, :], 0.0)",
        "accumulator + b[None, :]"))


def tiles(m, n):
    return -(-m // BLOCKS["BLOCK_M"]) * -(-n // BLOCKS["BLOCK_N"])


@pytest.mark.parametrize("target, rung, matrix, maximum", [
    ("h100", "sass", r"\bHGMMA\b", r"\bFMNMX"),
    ("b200", "sass", r"\bUTCHMMA\b", r"\bFMNMX"),
    ("mi300x", "amdgcn", r"\bv_mfma_f32\w*bf16", r"\bv_max_f32"),
])
def test_machine_code_multiplies_and_deleting_relu_removes_max(
        target, rung, matrix, maximum):
    whole = kernels.build(kernels.matmul_bias_relu, *example(), target=target)
    linear = kernels.build(without_relu(), *example(), target=target)
    for built, has_max in ((whole, True), (linear, False)):
        code = built.rungs[rung].raw
        assert list(built.rungs)[-1] == rung
        assert re.search(matrix, code)
        assert bool(re.search(maximum, code)) is has_max
        assert ("arith.maxnumf" in built.ops) is has_max
        assert "tt.dot" in built.ops and built.target == target
        assert built.registers > 0 and built.shared_bytes >= 2 * 64 * 256
    if target == "b200":
        assert "tcgen05.mma" in whole.ptx


def test_doubling_a_block_changes_the_machine_code():
    def built(size):
        x = meta(4096, dtype=torch.float32)
        return kernels.build(kernels.vector_add, x, x, x, 4096,
                             target="h100", BLOCK_SIZE=size)
    one, two = built(1024), built(2048)

    def loads(built):  # 128 bits, so four floats, a thread and instruction
        return len(re.findall(r"\bLDG\.E\.128\b", built.rungs["sass"].raw))

    # 4 warps of 32 threads: 1024 floats of x and y are 2 x 2 loads each.
    assert (loads(one), loads(two)) == (4, 8)
    assert one.spills == 0 and one.shared_bytes == 0
    assert one.bytes_read == 2 * 4096 * 4 and one.bytes_written == 4096 * 4


def test_registers_are_those_cuobjdump_reads_from_the_binary(tmp_path):
    built = kernels.build(kernels.matmul_bias_relu, *example(), target="h100")
    made = compiler.assemble(built.rungs["ptx"].raw, "sm_90a")
    (tmp_path / "x.cubin").write_bytes(made.cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    listing = subprocess.run([tool, "-res-usage", tmp_path / "x.cubin"],
                             capture_output=True, text=True, check=True)
    registers = int(re.search(r"REG:(\d+)", listing.stdout)[1])
    assert made.registers == registers
    assert "HGMMA" in made.sass and made.spills == 0
    assert abs(built.registers - registers) <= 16  # Triton adds a ptxas flag


def test_too_few_registers_are_seen_as_spills():
    x = meta(2**15, dtype=torch.float32)
    built = kernels.build(kernels.vector_add, x, x, x, 2**15,
                          BLOCK_SIZE=8192, maxnreg=32)
    assert built.registers <= 32 and built.spills > 0


def test_assemble_takes_newer_ptx_and_reports_what_ptxas_says():
    x = meta(64, dtype=torch.float32)
    ptx = kernels.build(kernels.vector_add, x, x, x, 64).rungs["ptx"].raw
    old = compiler.assemble(ptx, "sm_90a")
    new = compiler.assemble(re.sub(r"\.version \d\.\d", ".version 8.8", ptx),
                            "sm_90a")
    assert old.cubin.startswith(b"\x7fELF") and new.cubin[:4] == b"\x7fELF"
    assert "FADD" in new.sass
    with pytest.raises(CompilerError, match="sm_90a.*nonsense"):
        compiler.assemble(ptx.replace("ret;", "nonsense;"), "sm_90a")
    with pytest.raises(ValueError, match="arch is 'h100'"):
        compiler.assemble(ptx, "h100")


def test_specialises_as_a_launch_would():
    x = meta(4096, dtype=torch.float32)
    even = kernels.build(kernels.vector_add, x, x, x, 4096)
    odd = kernels.build(kernels.vector_add, x, x, x, 4097)

    def hints(built):
        head = re.search(r"tt\.func.*", built.rungs["ttir"].raw)[0]
        return head.count("tt.divisibility = 16")

    assert (hints(even), hints(odd)) == (4, 3)
    array = np.empty(4096, np.float32)
    same = kernels.build(kernels.vector_add, array, array, array, 4096)
    assert same.rungs["ptx"].raw == even.rungs["ptx"].raw
    bare = kernels.build(kernels.vector_add, *[torch.float32] * 3, 4096)
    assert bare.rungs["ptx"].raw == even.rungs["ptx"].raw
    assert bare.bytes_read is None and same.bytes_read == 2 * array.nbytes


@pytest.mark.parametrize("dtype, note", [
    (torch.float32, ""), (torch.float16, ""), (torch.bfloat16, "bf16")])
@pytest.mark.parametrize("m, n, k", [(37, 71, 53), (16, 32, 16), (1, 1, 1)])
def test_launch_equals_torch(dtype, note, m, n, k):
    torch.manual_seed(0)
    on = kernels.device()
    x, w, b = (torch.randn(s, device=on).to(dtype)
               for s in ((k, m), (k, 2 * n), (n,)))
    x, w = x.T, w[:, ::2]  # neither is contiguous
    y = torch.full((m, n), -1, dtype=dtype, device=on)
    done = kernels.launch(kernels.matmul_bias_relu, tiles(m, n),
                          *kernels.linear_args(x, w, b, y), **BLOCKS)
    want = torch.relu(x.double() @ w.double() + b.double())
    close = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
    assert done.result is y and y.dtype == dtype
    torch.testing.assert_close(y.double(), want, rtol=close[dtype], atol=1e-4)
    if done.where == "interpreter":
        assert (note in done.note) and bool(note) == bool(done.note)
    assert done.grid == (tiles(m, n),) and done.trace is None


def test_bf16_in_place_and_in_overlapping_views():
    double = kernel("""
        i = tl.arange(0, B)
        tl.store(y + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)
    """)
    x = torch.tensor([1.0, -3.5, 7.25, 9.0], dtype=torch.bfloat16)
    kernels.launch(double, 1, x, x[1:], 3, B=4)
    assert x.tolist() == [1, 2, -7, 14.5]


FRESH = """
import torch, triton, triton.language as tl
from course_utils import kernels
@triton.jit
def clamp(v):
    return tl.maximum(v, tl.zeros((4,), tl.float32))
@triton.jit
def total(x, y, n, B: tl.constexpr):
    i = tl.arange(0, B)
    v = clamp(tl.load(x + i, mask=i < n, other=0.0))
    tl.store(y, tl.sum(v, axis=0) + tl.cdiv(n, B) + min(n, 1))
def run():
    y = torch.zeros(1)
    kernels.launch(total, 1, torch.tensor([1.0, -2.0, 4.0]), y, 3, B=4)
    return y.item()
names = set(globals()) | {"names", "before"}
before = dict(vars(tl)), dict(vars(tl.core)), dict(vars(tl.standard))
assert run() == 7.0
after = dict(vars(tl)), dict(vars(tl.core)), dict(vars(tl.standard))
for b, a in zip(before, after):
    assert all(a[k] is v for k, v in b.items())
assert set(globals()) - names <= {"after", "b", "a"}
code = [kernels.build(total, torch.zeros(3), torch.zeros(1), 3, B=4,
                      target=t, fresh=True) for t in ("h100", "mi300x")]
assert "FADD" in code[0].sass and "v_add_f32" in code[1].amdgcn
assert run() == 7.0
"""


def test_interpret_compile_interpret_in_a_fresh_process(tmp_path):
    (tmp_path / "fresh.py").write_text(FRESH)
    subprocess.run([sys.executable, tmp_path / "fresh.py"], check=True,
                   env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_leaves_environment_and_knobs_as_they_were():
    def state():
        groups = ("cache", "compilation", "nvidia", "amd", "runtime")
        return dict(os.environ), [
            dict(vars(getattr(triton.knobs, group))) for group in groups]
    before, call = state(), triton.JITFunction.__call__
    x = torch.ones(4)
    kernels.build(kernels.vector_add, x, x, x, 4, fresh=True)
    kernels.launch(kernels.vector_add, 1, x, x, torch.empty(4), 4)
    broken = kernel("tl.store(y, tl.load(x) + nowhere)")
    with pytest.raises(triton.CompilationError, match="nowhere"):
        kernels.build(broken, x, x, 4, B=4)
    with pytest.raises(Exception, match="nowhere"):
        kernels.launch(broken, 1, x, x, 4, B=4)
    assert state() == before and triton.JITFunction.__call__ is call


def test_accesses_are_read_off_the_source():
    loaded, stored = ({name for name in names if name.endswith("_ptr")}
                      for names in compiler.accesses(kernels.matmul_bias_relu))
    assert loaded == {"x_ptr", "w_ptr", "b_ptr"} and stored == {"y_ptr"}
    gather = kernel("""
        at = tl.load(n + tl.arange(0, B))
        to = y + at
        for _ in range(2):
            tl.atomic_add(to, tl.load(x + at))
            to += B
    """)
    loaded, stored = compiler.accesses(gather)
    assert {"n", "x", "y"} <= loaded and stored - {"B"} == {"y"}


def test_without_triton_it_imports_and_says_what_is_missing():
    code = ("import sys; sys.modules['triton'] = None\n"
            "from course_utils import kernels, Missing\n"
            "for use in (lambda: kernels.vector_add, lambda: "
            "kernels.build(1), lambda: kernels.from_source('')):\n"
            "    try: use()\n"
            "    except Missing as e: print(e.what)\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True,
                          capture_output=True, text=True)
    assert done.stdout.split() == ["triton"] * 3


ONE = torch.ones(4)


@pytest.mark.parametrize("call, error, words", [
    (lambda k: kernels.build(k, ONE, ONE, ONE, 4, target="h10"),
     ValueError, "no target 'h10'; nearest: h100"),
    (lambda k: kernels.build(k, ONE, ONE, ONE, 4, BLOCK_SIZ=4),
     ValueError, "'BLOCK_SIZ'; nearest: BLOCK_SIZE"),
    (lambda k: kernels.launch(k, 1, ONE, ONE, ONE),
     TypeError, "vector_add: missing.*'n_elements'; its parameters are x_ptr"),
    (lambda k: kernels.launch(k, 1, *[ONE] * 9), TypeError, "too many"),
    (lambda k: kernels.launch(k, 1, ONE, ONE, ONE, 4, x_ptr=ONE),
     TypeError, "multiple values for argument 'x_ptr'"),
    (lambda k: kernels.launch(k, 0, ONE, ONE, ONE, 4), ValueError, "grid is"),
    (lambda k: kernels.launch(k, (1, 70000), ONE, ONE, ONE, 4),
     ValueError, "grid is .*70000"),
    (lambda k: kernels.launch(k, "1", ONE, ONE, ONE, 4), ValueError, "grid"),
    (lambda k: kernels.launch(k, 1, ONE.numpy(), ONE, ONE, 4),
     TypeError, "x_ptr is a numpy ndarray"),
    (lambda k: kernels.launch(k, 1, ONE, ONE, meta(4), 4),
     ValueError, "output_ptr is on meta"),
    (lambda k: kernels.launch(k, 1, ONE, ONE, ONE, 4, trace=True),
     ValueError, "trace must be False"),
    (lambda k: kernels.launch(print, 1, ONE), TypeError, "not a @triton.jit"),
    (lambda k: kernels.launch(
        kernel("tl.store(y, tl.load(x).to(tl.bfloat16))"), 1, ONE, ONE, 4,
        B=4), ValueError, "names bfloat16"),
    (lambda k: kernels.launch(k, 1, *[ONE.to(torch.float8_e5m2)] * 3, 4),
     ValueError, "x_ptr is torch.float8_e5m2"),
    (lambda k: kernels.from_source("def f(x):\n  pass"),
     ValueError, "put @triton.jit"),
    (lambda k: kernels.from_source("@triton.jit\ndef f(:"),
     ValueError, "line 2"),
    (lambda k: kernels.linear_args(meta(2, 3), meta(4, 5), meta(5),
                                   meta(2, 5)), ValueError, r"\(M, K\)"),
])
def test_bad_input_gets_one_sentence(call, error, words):
    before = ONE.clone()
    with pytest.raises(error, match=words) as caught:
        call(kernels.vector_add)
    assert "\n" not in str(caught.value) and torch.equal(ONE, before)


@pytest.mark.gpu
def test_launch_runs_on_the_gpu():
    x = torch.randn(10_000, device="cuda")
    done = kernels.launch(kernels.vector_add, lambda a: triton.cdiv(
        a["n_elements"], a["BLOCK_SIZE"]), x, x, torch.empty_like(x), 10_000)
    assert done.where == "gpu" and torch.equal(done.result, x + x)
    with pytest.raises(ValueError, match="x_ptr is on cpu"):
        kernels.launch(kernels.vector_add, 1, ONE, ONE, ONE, 4)
