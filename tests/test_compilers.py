"""The plumbing of course_utils.compilers: text, HLO, worker, cache."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from course_utils.compilers import cache, hlo, text, worker
from course_utils.compilers.rung import Rung

MODULE = """\
HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[2]{0})}

FileNames
1 "/tmp/ipykernel_77/123.py"

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%fused (p: f32[8,4], q: f32[4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %q = f32[4]{0} parameter(1)
  %b = f32[8,4]{1,0} broadcast(%q), dimensions={1}
  %s = f32[8,4]{1,0} add(%p, %b), metadata={op_name="jit(f)/{odd}"}
  ROOT %m = f32[8,4]{1,0} maximum(%s, %s)
}

ENTRY %main (x: f32[8,3], w: f32[3,4], b: f32[4]) -> f32[8,4] {
  %x = f32[8,3]{1,0} parameter(0)
  %w = f32[3,4]{1,0} parameter(1)
  %b.1 = f32[4]{0} parameter(2)
  %copy-start = (f32[3,4]{1,0}, f32[3,4]{1,0}, u32[]) copy-start(%w)
  %copy-done = f32[3,4]{1,0} copy-done(%copy-start)
  %dot.1 = f32[8,4]{1,0} dot(%x, %copy-done), lhs_contracting_dims={1}
  ROOT %r = f32[8,4]{1,0} fusion(%dot.1, %b.1), kind=kLoop, calls=%fused, \
backend_config={"a":{"b":"}"}}
}
"""


def test_canonical_folds_what_changes():
    steady = text.canonical(MODULE)
    for gone in ("FileNames", "ipykernel", "metadata", "backend_config",
                 "{odd}"):
        assert gone not in steady
    assert "calls=%fused" in steady and "maximum(%s, %s)" in steady
    a = text.canonical("<function f at 0x7f11>  # /tmp/ipykernel_1/2.py")
    b = text.canonical("<function f at 0x7fab>  # /tmp/ipykernel_9/8.py")
    assert a == b and "<cell>" in a


def test_canonical_keeps_what_does_not():
    code = "  24:\tvmovss 0x3f800000(%rax),%xmm1\n"
    assert text.canonical(code) == code


def test_excerpt_marks_gaps_and_cuts():
    body = "\n".join(f"line {n} " + "x" * n for n in range(60))
    shown = text.excerpt(body, "line (3|4|50) ", 5, 40)
    rows = shown.splitlines()
    assert rows[0] == rows[3] == rows[-1] == "..."
    assert rows[1].startswith("line 3") and rows[4].endswith("...")
    assert max(map(len, rows)) == 40


def test_html_escapes_every_name():
    rung = Rung("<img onerror=1>", "<script>alert(1)</script>", "hlo",
                "<b>", 0.0)
    page = rung._repr_html_()
    for raw in ("<script", "<img", "<b>"):
        assert raw not in page
    assert "script" in page


def test_kernels_of_an_hlo_module():
    library, fused = hlo.kernels(MODULE, generated={"r"})
    assert (library.author, library.who) == ("library", "Eigen")
    assert library.bytes_read == 8 * 3 * 4 + 3 * 4 * 4  # through the copy
    assert fused.ops == ("add", "maximum")
    assert fused.bytes_read == 8 * 4 * 4 + 4 * 4
    assert fused.bytes_written == 8 * 4 * 4
    emitted, _ = hlo.kernels(MODULE, generated={"dot.1_kernel", "r"})
    assert emitted.author == "compiler"


@pytest.mark.parametrize("shape, size", [
    ("bf16[512,2048]{1,0:T(8,128)(2,1)S(1)}", 512 * 2048 * 2),
    ("f32[]", 4), ("pred[7]", 7), ("s4[8]", 4), ("f8e4m3fn[16]", 16),
    ("c64[2]", 16), ("(f32[2]{0}, bf16[4]{0})", 16), ("f32[0,5]", 0)])
def test_shape_bytes(shape, size):
    assert hlo.shape_bytes(shape) == size


def test_worker_stays_and_keeps_its_environment():
    first = worker.call("xla", "os:getpid")
    assert first == worker.call("xla", "os:getpid") != os.getpid()
    other = worker.call("xla", "os:getpid", environment={"A": "1"})
    assert other != first
    assert worker.call("xla", "os:getenv", "A", environment={"A": "1"}) == "1"
    assert worker.call("xla", "os:getenv", "JAX_PLATFORMS") == "cpu"


def test_worker_that_dies_is_an_error_and_is_replaced():
    first = worker.call("xla", "os:getpid")
    with pytest.raises(worker.CompilerError, match="died .*os:abort"):
        worker.call("xla", "os:abort")
    assert worker.call("xla", "os:getpid") != first


def test_worker_has_a_time_out():
    start = time.monotonic()
    with pytest.raises(worker.CompilerError, match="longer than 1 s"):
        worker.call("xla", "time:sleep", 60, timeout=1)
    assert time.monotonic() - start < 20


def test_worker_raises_what_the_function_raised():
    with pytest.raises(FileNotFoundError):
        worker.call("xla", "os:listdir", "/no/such/folder")


def test_worker_ends_with_its_parent():
    code = ("from course_utils.compilers import worker\n"
            "print(worker.call('xla', 'os:getpid'), flush=True)\n"
            "import os; os._exit(1)")  # no atexit
    out = subprocess.run([sys.executable, "-c", code], capture_output=True,
                         text=True, cwd=os.getcwd())
    child = int(out.stdout)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("the worker outlived the process that started it")


def test_cache_returns_remakes_and_survives_damage(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path))
    made = []

    def make():
        made.append(1)
        return len(made)

    assert cache.cached(("k", 1), make) == cache.cached(("k", 1), make) == 1
    assert cache.cached(("k", 2), make) == 2
    assert cache.cached(("k", 1), make, fresh=True) == 3
    for file in tmp_path.iterdir():
        file.write_bytes(b"half")
    assert cache.cached(("k", 1), make) == 4


def test_cache_in_a_folder_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "file" / "below"))
    assert cache.cached(("k",), lambda: 5) == 5


def test_debug_strings_do_not_move_with_the_folder():
    listing = ('\t.file\t1 "{0}" "k.py"\n\t.asciz\t"{0}/course_utils"'
               '      ; string offset={1}\n\t.asciz\t"kernel"  ; string '
               'offset={2}\n')
    a = text.canonical(listing.format("/tmp/fresh/clone", 26, 54))
    b = text.canonical(listing.format("/somebody/else", 26, 50))
    assert a == b and '"kernel"' in a


def test_no_rung_of_a_triton_kernel_holds_the_folder_it_lies_in():
    pytest.importorskip("triton")
    from course_utils import ir, kernels

    torch = pytest.importorskip("torch")
    x = torch.empty(2048, device="meta")
    made = ir.ladder(kernels.vector_add, x, x, x, 2048, target="h100")
    folder = str(Path(kernels.__file__).parent).encode()
    for rung in made:
        held = bytes(int(byte) for byte in re.findall(
            r"\.b8 (\d+)", rung.text))  # DWARF spells its strings in bytes
        assert folder not in held + rung.text.encode(), rung.name
    assert folder in bytes(int(byte) for byte in re.findall(
        r"\.b8 (\d+)", made["ptx"].raw))
