"""Kernels: compiled for chips that are not here, run without a GPU."""

import os
import pickle
import re
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from course_utils import ir, kernels  # noqa: E402
from course_utils.compilers import triton as compiler  # noqa: E402
from course_utils.compilers.worker import CompilerError  # noqa: E402
from tests.test_host import python, site_without  # noqa: E402

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
    same = kernels.build(kernels.vector_add, array, array, array,
                         np.int64(4096))
    assert same.rungs["ptx"].raw == even.rungs["ptx"].raw
    bare = kernels.build(kernels.vector_add, *[torch.float32] * 3, 4096)
    assert bare.rungs["ptx"].raw == even.rungs["ptx"].raw
    assert bare.bytes_read is None and same.bytes_read == 2 * array.nbytes
    for number in (np.bool_(True), np.float32(1), np.array(1)):
        one, other = (kernels.build(kernel("tl.store(x, n)"), array, array, n,
                                    B=1).ttir for n in (number, number.item()))
        assert one == other


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
    with pytest.raises(ValueError, match="y shares memory.*another dtype"):
        kernels.launch(double, 1, x, x.view(torch.int16), 3, B=4)


def test_result_is_what_the_kernel_stores_to():
    outer = kernels.from_source("""
@triton.jit
def put(p, i, v, n):
    tl.store(p + i, v, mask=i < n)
@triton.jit
def kernel(x, y, z, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    put(y, i, tl.load(x + i, mask=i < n) + 1, n)
    tl.atomic_add(z, tl.load(x))
""")
    x, (y, spare) = torch.ones(6), torch.zeros(2, 8)
    for _ in range(2):  # the second run changes nothing in y
        done = kernels.launch(outer, 4, x, y, spare, 6, B=2)
        assert [t is w for t, w in zip(done.result, (y, spare),
                                       strict=True)] == [True, True]
    assert y.tolist() == [2] * 6 + [0] * 2 and spare[0] == 8
    done = kernels.launch(kernels.vector_add, 1, x, x, x, 6, BLOCK_SIZE=8)
    assert x.tolist() == [2] * 6 and done.result is x
    assert done.difference([2] * 6) == 0
    none, other = torch.empty(0), torch.empty(0, dtype=torch.int32)
    done = kernels.launch(kernels.vector_add, 1, x, none, other, 0)
    assert done.result == ()  # every lane is masked off


def test_a_difference_is_of_one_result_and_of_equal_shapes():
    both = kernel("tl.store(x, 1.0)\ntl.store(y, 2.0)")
    x, y = torch.zeros(2, 4)
    none = kernels.launch(kernels.vector_add, 1, x, x, y, 0)
    two = kernels.launch(both, 1, x, y, 4, B=4)
    for done, count in ((none, 0), (two, 2)):
        with pytest.raises(ValueError, match=f"stored to {count} tensors"):
            done.difference(y)
    one = kernels.launch(kernels.vector_add, 1, x, x, y, 4)
    assert one.difference([2.0, 0, 0, 0.5]) == 0.5
    for wrong in (y[:, None], y[:1], 2.0, torch.stack([y, y])):
        with pytest.raises(ValueError, match=r"the result \(4,\)"):
            one.difference(wrong)


def test_a_launch_that_fails_changes_nothing():
    late = kernels.from_source("""
@triton.jit
def narrow(v):
    return v.to(tl.bfloat16)
@triton.jit
def kernel(x, y):
    tl.store(y, 7.0)
    tl.store(y, narrow(tl.load(x)))
""")
    x, y = torch.ones(4), torch.zeros(4)
    with pytest.raises(ValueError, match="computes in bf16"):
        kernels.launch(late, 1, x, y)
    assert y.tolist() == [0] * 4


USES = """
FACTOR = tl.constexpr(2)
@triton.constexpr_function
def size():
    return 8
@triton.jit
def inner(v):
    return v + 1.0
@triton.jit
def outer(v):
    return inner(v)
@triton.jit
def kernel(x, f: tl.constexpr):
    at = tl.arange(0, size())
    tl.store(x + at, f(outer(tl.load(x + at))) * FACTOR)
"""


@pytest.mark.parametrize("name, was, now", [
    ("FACTOR", "constexpr(2)", "constexpr(3)"), ("size", "8", "16"),
    ("inner", "v + 1.0", "v * 5.0"),
    ("outer", "return inner(v)", "return 2 * inner(v)")])
def test_what_a_kernel_uses_is_taken_as_it_is_now(name, was, now):
    changed, other = (kernels.from_source(text) for text in (
        USES, USES.replace(was, now)))
    names, theirs = changed.fn.__globals__, other.fn.__globals__
    f = names["inner"]
    before = kernels.build(changed, ONE, f=f).ttir
    names[name] = theirs[name]
    after = kernels.build(changed, ONE, f=f).ttir
    assert before != after == kernels.build(other, ONE, f=f).ttir
    x, y = torch.ones(2, 16)
    kernels.launch(changed, 1, x, f=f)
    kernels.launch(other, 1, y, f=f)
    assert torch.equal(x, y)


def test_functions_of_one_name_given_to_a_kernel_are_told_apart():
    add, times = (kernels.from_source(text).fn.__globals__["inner"] for text in
                  (USES, USES.replace("v + 1.0", "v * 5.0")))
    add.__module__ = times.__module__ = add.module = times.module = "cell"
    one, other = (kernels.build(kernels.from_source(USES), ONE, f=f).ttir
                  for f in (add, times))
    assert (one.count("arith.addf"), other.count("arith.addf")) == (2, 1)


NONSENSE = ("tl.store(y, tl.inline_asm_elementwise('nonsense $0, $1;', "
            "'=f,f', [tl.load(x)], tl.float32, True, 1))")


@pytest.mark.parametrize("body, words", [
    (NONSENSE, "PTXASError: .*'nonsense'"),
    ("tl.store(x, nowhere)", r"NameError.*nowhere.*, at line 2 of the kernel"),
    ("tl.store(x, tl.arange(0, 3))", "power of 2"),
])
@pytest.mark.parametrize("call", [kernels.build, ir.ladder])
def test_a_kernel_that_is_refused_says_why_and_leaves_nothing(
        call, body, words, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ValueError, match=words) as told:
        call(kernel(body), ONE, ONE, 4, B=4, target="h100")
    said = str(told.value)
    assert said.startswith("kernel") and " does not compile" in said
    assert "\n" not in said and str(tmp_path) not in said
    assert not [*tmp_path.iterdir()] and capfd.readouterr().out == ""


def test_a_ptxas_that_does_not_end_is_an_error(monkeypatch):
    monkeypatch.setattr(compiler, "_PTXAS_SECONDS", 0.001)
    with pytest.raises(CompilerError, match="ptxas took longer than 0.001 s"):
        kernels.build(kernels.vector_add, ONE, ONE, ONE, 4, fresh=True)


def test_a_build_stopped_in_ptxas_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    written = []

    def stop(*_, **__):  # Ctrl-C while ptxas runs
        written.extend(tmp_path.rglob("*.ptx"))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(subprocess, "run", stop)
        kernels.build(kernels.vector_add, ONE, ONE, ONE, 4, fresh=True)
    assert written and not [*tmp_path.iterdir()]


def scaled(factor):
    @triton.jit
    def helper(v):
        return v * factor

    @triton.jit
    def scale(x):
        tl.store(x, helper(tl.load(x)))

    return scale


def test_a_kernel_may_use_what_its_closure_holds():
    x = torch.ones(1)
    for factor in (3, 5):
        scale = scaled(tl.constexpr(factor))
        kernels.launch(scale, 1, x)
        assert f"{factor}.000000e+00" in kernels.build(scale, x).ttir
    assert x.item() == 15


def test_parameters_may_be_called_as_those_of_a_launch():
    own = kernels.from_source("@triton.jit\ndef own(grid, warmup, kernel):\n"
                              "    tl.store(grid, warmup + kernel)\n")
    done = kernels.launch(own, 1, torch.zeros(1), 2, 3)
    assert done.result.item() == 5


def test_a_product_is_the_same_in_pieces():
    """The interpreter's is cut by rows where one is large: here by 8."""
    sizes = {"BLOCK_M": 32, "BLOCK_N": 256, "BLOCK_K": 128, "GROUP": 1}
    x, w, b = (torch.randint(-3, 4, s).float() for s in (
        (30, 128), (128, 256), (256,)))
    done = kernels.launch(kernels.matmul_bias_relu, 1, *kernels.linear_args(
        x, w, b, torch.empty(30, 256)), trace=True, **sizes)
    assert done.difference(torch.relu(x @ w + b)) == 0


def test_threads_take_turns():
    """What is patched while one interprets must not reach the others."""
    x, made = torch.ones(64), []

    def work(number):
        for _ in range(2):
            done = kernels.launch(kernels.vector_add, 1, x, x, x.clone(), 64)
            code = kernels.build(kernels.vector_add, x, x, x, number,
                                 fresh=True)
            made.append((done.difference(x + x), "FADD" in code.sass))

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [(0, True)] * 4


STOPPED = """
import sys, torch
from course_utils import kernels
x = torch.ones(8)
def stop(frame, event, arg):  # Ctrl-C while things are being patched
    if event == "call" and frame.f_code.co_name == "_patch_lang_tensor":
        sys.setprofile(None)
        raise KeyboardInterrupt
sys.setprofile(stop)
try:
    kernels.launch(kernels.vector_add, 1, x, x, x.clone(), 8)
except KeyboardInterrupt:
    print("stopped")
print("FADD" in kernels.build(kernels.vector_add, x, x, x, 8, fresh=True).sass)
"""


def test_a_launch_stopped_while_it_patches_leaves_triton_as_it_was():
    done = subprocess.run([sys.executable, "-c", STOPPED], text=True,
                          capture_output=True)
    assert done.stdout.split() == ["stopped", "True"], done.stderr


def test_a_number_that_is_true_or_false():
    chosen = kernels.from_source("""
@triton.jit
def chosen(x, y, first, B: tl.constexpr):
    i = tl.arange(0, B)
    if first:
        tl.store(y + i, tl.load(x + i))
    else:
        tl.store(y + i, tl.load(x + i) * 2)
""")
    x = torch.ones(8)
    for first, right in (True, x), (False, 2 * x):
        assert kernels.launch(chosen, 1, x, torch.zeros(8), first, B=8
                              ).difference(right) == 0


def test_a_name_that_triton_cannot_take():
    kernel = kernels.from_source("""
@triton.jit
def 더(x):
    tl.store(x, 1.0)
""")
    with pytest.raises(ValueError, match="invalid function identifier"):
        ir.ladder(kernel, torch.ones(8), target="h100")


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
    with pytest.raises(ValueError, match="nowhere"):
        kernels.build(broken, x, x, 4, B=4)
    with pytest.raises(Exception, match="nowhere"):
        kernels.launch(broken, 1, x, x, 4, B=4)
    assert state() == before and triton.JITFunction.__call__ is call


FLOWS = """
@triton.jit
def helper(p, i):
    return tl.load(p + i)
@triton.jit(noinline=True)
def away(p):
    tl.store(p, 1.0)
@triton.jit
def gather(x, y, i, n, B: tl.constexpr):
    to = y + tl.load(i + tl.arange(0, B))
    for _ in range(n):
        tl.store(to, helper(x, tl.arange(0, B)))
        to += B
@triton.jit
def swap(x, y, i, n, B: tl.constexpr):
    p, q, r = x, y, i
    for _ in range(n):
        tl.store(p, 1)
        p, q, r = q, p, r + B
    tl.store(r, tl.load(r) + tl.load(i))
@triton.jit
def choose(x, y, i, n, B: tl.constexpr):
    if n > 5:
        p = x + tl.load(i)
        tl.store(y, 1.0)
    else:
        p = y + 0
    tl.atomic_add(p, 1.0)
@triton.jit
def shuffle(x, y, i, n, B: tl.constexpr):
    at = tl.arange(0, B)
    tl.store(y + at, tl.gather(tl.load(x + at), at, 0))
@triton.jit
def pick(x, y, i, n, B: tl.constexpr):
    p = x
    if n > 5:
        p = y
    tl.store(p, 1.0)
@triton.jit
def after(x, y, i, n, B: tl.constexpr):
    for j in range(n):
        tl.store(y + j, 1.0)
    s = 1.0
    if n > 5:
        s = tl.load(x)
    tl.store(y, s)
@triton.jit
def address(x, y, i, n, B: tl.constexpr):
    tl.store(y, tl.load(tl.load(i).to(tl.pointer_type(tl.float32))))
@triton.jit
def call(x, y, i, n, B: tl.constexpr):
    away(y)
@triton.jit
def moved(x, y, i, n, B: tl.constexpr):
    s = 0
    while s < n:
        tl.store(y, 1.0)
        y += s
        s += 1
"""


@pytest.mark.parametrize("name, loaded, stored", [
    ("gather", "xi", "y"), ("swap", None, None), ("choose", None, None),
    ("shuffle", "x", "y"), ("pick", "", None), ("after", "x", "y"),
    ("address", None, "y"),
    ("call", None, None), ("moved", None, None),
])
def test_accesses_are_followed_through_the_ttir(name, loaded, stored):
    text = FLOWS.partition("@triton.jit\ndef gather")[0]
    own = re.search(rf"@triton.jit\ndef {name}\((?:.|\n )*", FLOWS)[0]
    f, i = (torch.float32, torch.int64) if name != "swap" else [
        torch.int32] * 2
    built = kernels.build(kernels.from_source(text + own), f, f, i, 17, B=16)
    signature = {"x": "*", "y": "*", "i": "*", "n": "i32", "B": "constexpr"}
    found = compiler.accesses(built.rungs["ttir"].raw, signature)
    assert [f if f is None else "".join(f) for f in found] == [loaded, stored]


def test_bytes_and_rungs_of_the_example():
    built = kernels.build(kernels.matmul_bias_relu, *example())
    assert built.bytes_read == 2 * (512 * 1024 + 1024 * 2048 + 2048)
    assert built.bytes_written == 2 * 512 * 2048
    assert list(built.rungs) == ["python", "ttir", "ttgir", "llvm-ir", "ptx",
                                 "sass"]
    assert built.python.startswith("@triton.jit\ndef matmul_bias_relu(")
    with pytest.raises(AttributeError, match="no 'sas'; its rungs are pyth"):
        built.sas  # noqa: B018
    assert pickle.loads(pickle.dumps(built)).sass == built.sass


HIDDEN = """
import importlib.abc, sys
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ImportError(name)
if hook:
    sys.meta_path.insert(0, Hide())
else:
    sys.modules["triton"] = None
from course_utils import kernels, Missing
from course_utils.compilers import interpreter, triton
for use in (lambda: kernels.build(kernels.vector_add),
            lambda: kernels.build(1), lambda: kernels.launch(1, 1),
            lambda: kernels.from_source(""),
            lambda: triton.build(1, (), {}, "h100"),
            lambda: triton.assemble("", "sm_90a"),
            lambda: interpreter.interpret(1, (1,), (), print)):
    try:
        use()
    except Missing as missing:
        print(missing.what)
try:
    kernels.launch(kernels.vector_add, 1, trace=True)
except TypeError as error:
    print(error)
print(triton.works("h100")[:17], kernels.device())
"""


@pytest.mark.parametrize("hook", [True, False])
def test_without_triton_it_imports_and_says_what_is_missing(hook):
    done = subprocess.run(
        [sys.executable, "-c", f"hook = {hook}\n{HIDDEN}"], cwd=ROOT,
        check=True, capture_output=True, text=True)
    *missing, unfit, last = done.stdout.splitlines()
    assert missing == ["triton"] * 7
    assert unfit.startswith("vector_add: missing a required argument: 'x_ptr'")
    assert last.startswith("triton is missing ")


def test_without_torch_a_chip_that_needs_it_says_so(tmp_path):
    out, _ = python("""
import numpy as np
from course_utils import Missing, ir, kernels
x = np.zeros(64, np.float32)
args = kernels.vector_add, x, x, x, 64
for use in (lambda: kernels.build(*args, target="mi300x"),
            lambda: ir.ladder(*args, target="mi300x"),
            lambda: kernels.launch(args[0], 1, *args[1:]),
            lambda: kernels.launch(args[0], 1, *args[1:], trace=True)):
    try:
        use()
    except Missing as missing:
        print(missing.what)
print("torch is missing" in ir.targets().Triton["mi300x"])
print("FADD" in kernels.build(*args).sass)
""", "-S", PYTHONPATH=site_without(tmp_path, ("torch",)))
    assert out.split() == ["torch"] * 4 + ["True"] * 2


PLAIN = "@triton.jit\ndef {name}(x):\n    tl.store(x, {value})\n"
TUNED = "@triton.autotune([], key=[])\n"
GUESSED = "@triton.heuristics({})\n"


@pytest.mark.parametrize("before", ["", PLAIN.format(name="a", value=1.0)])
@pytest.mark.parametrize("wrapped", [
    TUNED, GUESSED, TUNED + GUESSED, GUESSED + TUNED])
def test_a_text_whose_kernel_is_wrapped_says_so(before, wrapped):
    text = before + wrapped + PLAIN.format(name="b", value=2.0)
    with pytest.raises(TypeError, match="b is of type .*@triton.auto") as told:
        kernels.from_source(text)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("after", [
    PLAIN.format(name="a", value=3.0),  # again: its name stands first
    PLAIN.format(name="c", value=3.0) + "last = b\n",
    PLAIN.format(name="c", value=3.0)
    + "from course_utils.kernels import matmul_bias_relu\n"])
def test_from_source_takes_the_kernel_defined_last(after):
    text = "".join(PLAIN.format(name=n, value=v)
                   for n, v in (("a", 1.0), ("b", 2.0))) + after
    x = torch.zeros(1, device=kernels.device())
    kernels.launch(kernels.from_source(text), 1, x)
    assert x.item() == 3


ONE = torch.ones(4)


@pytest.mark.parametrize("call, error, words", [
    (lambda k: kernels.build(k, ONE, ONE, ONE, 4, target="h10"),
     ValueError, "^Triton knows no target 'h10'; nearest: h100"),
    (lambda k: kernels.build(k, ONE, ONE, ONE, 4, BLOCK_SIZ=4),
     ValueError, "'BLOCK_SIZ'; nearest: BLOCK_SIZE"),
    (lambda k: kernels.launch(k, 1, ONE, ONE, ONE),
     TypeError, "vector_add: missing.*'n_elements'; its parameters are x_ptr"),
    (lambda k: kernels.launch(k, 1, *[ONE] * 9), TypeError, "too many"),
    (lambda k: kernels.build(k, ONE, [1.0], ONE, 4),
     TypeError, "y_ptr is of type list"),
    (lambda k: kernels.build(k, ONE, ONE, ONE, "4"),
     TypeError, "n_elements is of type str"),
    (lambda k: kernels.build(k, ONE, ONE, ONE.to(torch.complex64), 4),
     TypeError, "output_ptr is of type torch.complex64"),
    (lambda k: kernels.launch(k, 1, ONE, [1.0], ONE, 4),
     TypeError, "y_ptr is of type list"),
    (lambda k: kernels.launch(k, 1, ONE, torch.float32, ONE, 4),
     TypeError, "y_ptr is of type dtype"),
    (lambda k: kernels.launch(k, 1, ONE, ONE, ONE, 4, x_ptr=ONE),
     TypeError, "multiple values for argument 'x_ptr'"),
    (lambda k: kernels.launch(k, 0, ONE, ONE, ONE, 4), ValueError, "grid is"),
    (lambda k: kernels.launch(k, "1", ONE, ONE, ONE, 4), ValueError, "grid"),
    (lambda k: kernels.launch(k, 1, ONE.numpy(), ONE, ONE, 4),
     TypeError, "x_ptr is of type ndarray"),
    (lambda k: kernels.launch(k, 1, ONE, ONE, meta(4), 4),
     ValueError, "output_ptr is on meta"),
    (lambda k: kernels.launch(kernel("tl.store(y, tl.load(x + 4))"), 1, ONE,
                              ONE, 4, B=4, trace=True),
     ValueError, r"line 3 of kernel, program \(0, 0, 0\), load: these"),
    (lambda k: kernels.launch(print, 1, ONE), TypeError, "@triton.jit func"),
    (lambda k: kernels.build(triton.autotune([], key=[])(k), ONE),
     TypeError, "of type Autotuner: give the @triton.jit function itself"),
    (lambda k: kernels.launch(
        kernel("tl.store(y, tl.load(x).to(tl.bfloat16))"), 1, ONE, ONE, 4,
        B=4), ValueError, "computes in bf16"),
    (lambda k: kernels.launch(k, 1, *[ONE.to(torch.float8_e5m2)] * 3, 4),
     ValueError, "computes in fp8"),
    (lambda k: kernels.from_source("def f(x):\n  pass"),
     ValueError, "put @triton.jit"),
    (lambda k: kernels.build(k, ONE, ONE, ONE, 4, num_warps=3),
     ValueError, "vector_add with {'num_warps': 3}: .*power"),
    (lambda k: kernels.launch(k, 1, ONE, ONE, ONE, 4, num_warps="4"),
     ValueError, "vector_add with {'num_warps': '4'}"),
    (lambda k: kernels.linear_args(meta(2, 3), meta(4, 5), meta(5),
                                   meta(2, 5)), ValueError, r"\(M, K\)"),
    (lambda k: kernels.linear_args(meta(), meta(), meta(), meta()),
     ValueError, r"\(M, K\)"),
    (lambda k: kernels.linear_args(ONE, ONE, ONE.numpy(), ONE),
     TypeError, "types Tensor, Tensor, ndarray, Tensor: give torch tensors"),
])
def test_bad_input_gets_one_sentence(call, error, words):
    before = ONE.clone()
    with pytest.raises(error, match=words) as caught:
        call(kernels.vector_add)
    said = str(caught.value)
    assert "\n" not in said and re.search(r"[^.]\.$", said)
    assert torch.equal(ONE, before)


@pytest.mark.gpu
def test_launch_runs_on_the_gpu():
    x = torch.randn(10_000, device="cuda")
    done = kernels.launch(kernels.vector_add, lambda a: triton.cdiv(
        a["n_elements"], a["BLOCK_SIZE"]), x, x, torch.empty_like(x), 10_000)
    assert done.where == "gpu" and torch.equal(done.result, x + x)
    with pytest.raises(ValueError, match="x_ptr is on cpu"):
        kernels.launch(kernels.vector_add, 1, ONE, ONE, ONE, 4)
