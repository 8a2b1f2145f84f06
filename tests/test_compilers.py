"""The plumbing of course_utils.compilers: text, HLO, worker, cache."""

import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from course_utils.compilers import (
    cache,
    hlo,
    origins,
    progress,
    text,
    worker,
    xla,
)
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


def test_numbers_of_lines_follow_what_is_kept():
    numbers = range(1, len(MODULE.splitlines()) + 1)
    kept = text.canonical(MODULE)
    followed = text.follow(MODULE, numbers, kept)
    raw = MODULE.splitlines()
    for line, number in zip(kept.splitlines(), followed, strict=True):
        assert raw[number - 1].startswith(line.partition("{")[0].strip("\n"))
    assert followed[-2] == len(raw) - 1  # metadata was dropped from it
    assert text.follow("a\nb at 0x12\n", (7, 8), "b at 0x...\n") == (8,)


FRAMES = """\
HloModule jit_f

FileNames
1 "/lib/helper.py"
2 "/home/f.py"

FileLocations
1 {file_name_id=2 function_name_id=1 line=5 end_line=5 column=1}
2 {file_name_id=1 function_name_id=2 line=99 end_line=99 column=1}

StackFrames
1 {file_location_id=1%s}
2 {file_location_id=2 parent_frame_id=%d}

inner {
  p = f32[2] parameter(0)
  ROOT m = f32[2] maximum(p, p)
}

ENTRY main {
  a = f32[2] parameter(0), metadata={op_name="a"}
  c = f32[2] sine(a), metadata={stack_frame_id=2}
  ROOT r = f32[2] call(c), to_apply=inner, \
metadata={source_file="/home/f.py" source_line=7}
}
"""


@pytest.mark.parametrize("root, parent", [("", 1), (" parent_frame_id=1", 2)])
def test_frames_of_hlo_lead_to_the_readers_file(root, parent):
    """jaxlib counts parents from 0 or from 1; older ones name the line."""
    module = FRAMES % (root, parent)
    numbers = origins.hlo(module, "/home/f.py")
    told = dict(zip((row.strip().split(" ")[0] for row in module.splitlines()),
                    numbers, strict=True))
    assert told["c"] == 5 and told["ROOT"] == 7 and told["a"] == 0
    assert told["p"] == 7  # inside what is called once
    assert {*origins.hlo(module, "/other.py")} == {0}


LISTING = """\
\t.loc\t1 9 12\t// standard.py:9:12
\tmov.u32 %r1, %r2;
\t.loc\t2 43 17\t// standard.py:43:17 @[ standard.py:9:19 ]
\tadd.s32 %r3, %r1, 1;
\t.loc\t2 263 15\t// standard.py:263:15 @[ standard.py:293:36 @[ \
standard.py:11:34 ] ]
\tadd.f32 %f3, %f1, %f2;
\t.file\t1 "/home/standard.py"
\t.file\t2 "/lib/triton/standard.py"
"""


def test_a_file_named_as_one_of_the_library_keeps_its_own_lines():
    assert [*origins.listing(LISTING, "/home/standard.py")] == [
        9, 9, 9, 9, 11, 11, 0, 0]
    library = "/lib/triton/standard.py"
    assert origins.helpers(LISTING, "/home/standard.py") == {
        ("/home/standard.py", "9"): 9, (library, "43"): 9,
        (library, "263"): 11}


CALLS = """\
module @jit_f {
  func.func public @main(%arg0: tensor<f32>) -> tensor<f32> {
    %0 = call @once(%arg0) : (tensor<f32>) -> tensor<f32> loc(#loc7)
    %1 = call @twice(%0) : (tensor<f32>) -> tensor<f32> loc(#loc8)
    %2 = call @twice(%1) : (tensor<f32>) -> tensor<f32> loc(#loc9)
    return %2 : tensor<f32>
  }
  func.func private @once(%arg0: tensor<f32>) -> tensor<f32> {
    %0 = call @deep(%arg0) : (tensor<f32>) -> tensor<f32>
    return %0 : tensor<f32>
  } loc(#loc7)
  func.func private @deep(%arg0: tensor<f32>) -> tensor<f32> {
    %0 = stablehlo.sine %arg0 : tensor<f32>
    return %0 : tensor<f32>
  }
  func.func private @twice(%arg0: tensor<f32>) -> tensor<f32> {
    %0 = stablehlo.tan %arg0 : tensor<f32>
    return %0 : tensor<f32>
  } loc(#loc8)
}
#loc7 = loc("/home/f.py":7:0)
#loc8 = loc("/home/f.py":8:0)
#loc9 = loc("/home/f.py":9:0)
"""


def test_a_call_within_a_call_counts_for_the_only_line_that_made_it():
    numbers = origins.mlir(CALLS, "/home/f.py")
    assert numbers[2:5] == (7, 8, 9)
    assert set(numbers[7:15]) == {7}  # @once and @deep, heads among them
    assert set(numbers[15:19]) == {0}  # @twice is of two lines


def test_names_and_their_numbers_are_hidden_in_a_diff():
    hidden = text.without_ids
    assert hidden("  sin.1 = f32[8]{0} sine(a.12)", "hlo") == hidden(
        "  %sin = f32[8]{0} sine(%a)", "hlo")
    assert hidden("%param_0.3, %0, %arg1, %int8_t", "mlir") == (
        "%param, %, %arg, %int8_t")
    assert hidden("f32[] constant(1.5)", "hlo") == "f32[] constant(1.5)"


def test_who_waits_reads_what_for(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(progress, "SECONDS", 0.05)
    monkeypatch.setattr(sys, "stderr", slow := Terminal())
    with progress.line("compiling f ..."):
        deadline = time.monotonic() + 60
        while not slow.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert slow.getvalue().startswith("compiling f ...\r")
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    with progress.line("compiling f ..."):  # a file keeps what it is told
        time.sleep(0.5)
    assert file.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", quick := Terminal())
    monkeypatch.setattr(progress, "SECONDS", 60)
    with progress.line("compiling f ..."):
        pass
    assert quick.getvalue() == ""


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
    for name, author in (("dot.1_kernel", "compiler"), ("dot.1", "compiler"),
                         ("dot.10_kernel", "library"), ("dot", "library")):
        first, _ = hlo.kernels(MODULE, generated={name, "r"})
        assert first.author == author, name


PARTS = """\
HloModule jit_f

%update (cache: f32[1000,8], rows: f32[2,8], i: s32[]) -> f32[1000,8] {
  %cache = f32[1000,8]{1,0} parameter(0)
  %rows = f32[2,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %flat = f32[1000,8]{1,0} bitcast(%cache)
  %old = f32[2,8]{1,0} dynamic-slice(%flat, %i, %zero)
  %new = f32[2,8]{1,0} add(%rows, %old)
  ROOT %d = f32[1000,8]{1,0} dynamic-update-slice(%flat, %new, %i, %zero)
}

%shared (p: f32[1000,8], q: f32[2,8], j: s32[]) -> (f32[1000,8], f32[8]) {
  %p = f32[1000,8]{1,0} parameter(0)
  %q = f32[2,8]{1,0} parameter(1)
  %j = s32[] parameter(2)
  %none = s32[] constant(0)
  %sum = f32[8]{0} reduce(%p, %none), dimensions={0}
  %e = f32[1000,8]{1,0} dynamic-update-slice(%p, %q, %j, %none)
  ROOT %both = (f32[1000,8]{1,0}, f32[8]{0}) tuple(%e, %sum)
}

ENTRY %main (c: f32[1000,8], r: f32[2,8], n: s32[], at: s32[3]) \
-> f32[1000,8] {
  %c = f32[1000,8]{1,0} parameter(0)
  %r = f32[2,8]{1,0} parameter(1)
  %n = s32[] parameter(2)
  %at = s32[3]{0} parameter(3)
  %in_place = f32[1000,8]{1,0} fusion(%c, %r, %n), kind=kLoop, calls=%update
  %plain = f32[1000,8]{1,0} dynamic-update-slice(%in_place, %r, %n, %n)
  %both = (f32[1000,8]{1,0}, f32[8]{0}) fusion(%plain, %r, %n), calls=%shared
  %whole = f32[1000,8]{1,0} get-tuple-element(%both), index=0
  %some = f32[5,8]{1,0} slice(%whole), slice={[0:5], [0:8]}
  %got = f32[3,8]{1,0} gather(%whole, %at), offset_dims={1}
  ROOT %added = f32[1000,8]{1,0} scatter(%whole, %at, %got), to_apply=%sum
}
"""


def test_only_what_is_taken_or_updated_counts():
    """Rows of 8 floats: 2 to write, 5 to slice, 3 to gather, of 1000."""
    row, index = 8 * 4, 4
    moved = {k.name: (k.bytes_read, k.bytes_written)
             for k in hlo.kernels(PARTS)}
    assert moved == {
        "in_place": (2 * row + 2 * row + index, 2 * row),
        "plain": (2 * row + index, 2 * row),
        # What is read in another way besides cannot be updated in place.
        "both": (1000 * row + 2 * row + index, 1000 * row + row),
        "some": (5 * row, 5 * row), "got": (3 * row + 3 * index, 3 * row),
        "added": (3 * row + 3 * index, 3 * row)}  # scattered in place


FETCHED = """\
HloModule jit_f

ENTRY %main (x: bf16[8,4]) -> bf16[8,4] {
  %x = bf16[8,4]{1,0} parameter(0)
  %low = ((bf16[8,4]), bf16[6,4]{1,0}, s32[]) slice-start(%x), slice={[0:6]}
  %high = ((bf16[8,4]), bf16[2,4]{1,0}, s32[]) slice-start(%x), slice={[6:8]}
  %a = bf16[6,4]{1,0} slice-done(%low)
  %b = bf16[2,4]{1,0} slice-done(%high)
  %whole = bf16[8,4]{1,0} custom-call(%a, %b), \
custom_call_target="ConcatBitcast"
  %part = bf16[2,4]{1,0} negate(%b)
  %twice = bf16[8,4]{1,0} add(%whole, %x)
  ROOT %one = bf16[8,4]{1,0} multiply(%twice, %whole)
}
"""


def test_what_is_fetched_in_slices_counts_where_it_is_used():
    """As a TPU does with what its memory has room for: 8 bytes a row."""
    assert [(k.name, k.bytes_read, k.bytes_written)
            for k in hlo.kernels(FETCHED)] == [
        ("part", 2 * 8, 2 * 8), ("twice", 8 * 8, 8 * 8),
        ("one", 2 * 8 * 8, 8 * 8)]


PARTED = """\
HloModule jit_f

ENTRY %main (x: f32[8,4]) -> f32[8,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %p = (f32[8,4]{1,0}, f32[8,4]{1,0}, u32[], u32[]) \
collective-permute-start(%x), source_target_pairs={{0,1}}
  %q = f32[8,4]{1,0} collective-permute-done(%p)
  %r = f32[8,4]{1,0} all-reduce-start(%q), to_apply=%add
  %s = f32[8,4]{1,0} all-reduce-done(%r)
  %g = (f32[8,4]{1,0}, f32[16,4]{1,0}) all-gather-start(%s), dimensions={0}
  ROOT %h = f32[16,4]{1,0} all-gather-done(%g)
}
"""


def test_what_starts_here_and_ends_there_counts_once():
    """Each of them holds other things besides its result in its shape."""
    block = 8 * 4 * 4
    assert [(k.ops, k.bytes_read, k.bytes_written)
            for k in hlo.kernels(PARTED)] == [
        (("collective-permute",), block, block),
        (("all-reduce",), block, block), (("all-gather",), block, 2 * block)]


def test_programs_of_one_size_stand_by_their_names(tmp_path):
    """libtpu's clock orders the files, and its threads the clock."""
    for name in ("17-b-05-original", "18-a-04-original", "19-c-09-original"):
        (tmp_path / f"{name}.txt").write_text(name[:2])
    (tmp_path / "20-d-01-original.txt").write_text("longer")
    llo, = xla._tpu_code(tmp_path, "libtpu")
    assert re.findall("// (.)", llo.raw) == ["d", "a", "b", "c"]


@pytest.mark.parametrize("shape, size", [
    ("bf16[512,2048]{1,0:T(8,128)(2,1)S(1)}", 512 * 2048 * 2),
    ("f32[]", 4), ("pred[7]", 7), ("s4[8]", 4), ("s4[3]", 2),
    ("f8e4m3fn[16]", 16), ("c64[2]", 16), ("(f32[2]{0}, bf16[4]{0})", 16),
    ("f32[0,5]", 0)])
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
    with pytest.raises(worker.CompilerError, match="died .*code 7.*os:_exit"):
        worker.call("xla", "os:_exit", 7)
    assert worker.call("xla", "os:getpid") != first


def test_what_a_dead_worker_said_last_is_in_the_error():
    worker.call("xla", "warnings:warn", "these were its words")
    with pytest.raises(worker.CompilerError, match="these were its words"):
        worker.call("xla", "os:abort")


class Untold(Exception):
    def __init__(self, words, more):
        super().__init__(words)


def untold():
    raise Untold("these words", "which pickle does not keep")


def test_what_cannot_travel_is_an_error_and_the_worker_stays():
    first = worker.call("xla", "os:getpid")
    with pytest.raises(worker.CompilerError, match="Untold: these words"):
        worker.call("xla", "tests.test_compilers:untold")
    with pytest.raises(TypeError, match="cannot pickle"):
        worker.call("xla", "threading:Lock")
    assert worker.call("xla", "os:getpid") == first


@pytest.mark.parametrize("sent", [4, 8, 12])
def test_a_message_that_ends_half_way_is_the_end(sent):
    whole = io.BytesIO()
    worker._send(whole, b"0123456789")
    with pytest.raises(EOFError):
        worker._receive(io.BytesIO(whole.getvalue()[:sent]))


def test_a_worker_that_died_unasked_leaves_no_folder():
    scratch = worker.call("xla", "os:getenv", "COURSE_SCRATCH")
    child = worker.call("xla", "os:getpid")
    process, = (kept.process for kept in worker._workers.values()
                if kept.process.pid == child)
    process.kill()
    process.wait()
    assert worker.call("xla", "os:getpid") != child
    assert not os.path.exists(scratch)


def test_what_a_worker_started_ends_with_it(tmp_path):
    """As a C++ compiler does whose cell is stopped."""
    file = tmp_path / "pid"
    worker.call("xla", "os:getpid")  # it has started before its time counts
    with pytest.raises(worker.CompilerError, match="longer than 3 s"):
        worker.call("xla", "os:system", f"echo $$ > {file}; exec sleep 600",
                    timeout=3)
    deadline = time.monotonic() + 10
    while not gone(int(file.read_text())):
        assert time.monotonic() < deadline, "it outlived the worker"
        time.sleep(0.1)


def gone(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_stopped_cell_leaves_nothing_behind():
    child = worker.call("xla", "os:getpid")
    scratch = worker.call("xla", "os:getenv", "COURSE_SCRATCH")
    # A shell's background job would begin with the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.5, lambda: signal.pthread_kill(
        threading.main_thread().ident, signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            worker.call("xla", "time:sleep", 60)
    finally:
        signal.signal(signal.SIGINT, before)
    assert gone(child) and not os.path.exists(scratch)
    assert worker.call("xla", "os:getpid") != child


def test_what_the_reader_set_for_a_compiler_stays_outside(monkeypatch):
    theirs = ("XLA_FLAGS", "JAX_ENABLE_X64", "LIBTPU_INIT_ARGS",
              "JAX_COMPILATION_CACHE_DIR", "TRITON_CACHE_DIR",
              "TRITON_INTERPRET", "MLIR_ENABLE_DUMP", "TORCH_LOGS")
    for name in (*theirs, "OF_THE_READER"):
        monkeypatch.setenv(name, "1")
    seen = {name: worker.call("xla", "os:getenv", name, environment={
        "NEW": "2"}) for name in (*theirs, "OF_THE_READER", "NEW")}
    assert seen == {**dict.fromkeys(theirs), "OF_THE_READER": "1", "NEW": "2"}


def test_a_worker_has_no_space_in_its_folder(tmp_path, monkeypatch):
    (spaced := tmp_path / "a b").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(spaced))
    made = worker._Worker("xla", {})
    try:
        assert " " not in made.scratch and os.path.isdir(made.scratch)
    finally:
        made.stop()
    assert not os.path.exists(made.scratch)


def test_worker_has_a_time_out():
    with pytest.raises(worker.CompilerError, match="longer than 1 s"):
        worker.call("xla", "time:sleep", 600, timeout=1)


def test_worker_raises_what_the_function_raised():
    with pytest.raises(FileNotFoundError):
        worker.call("xla", "os:listdir", "/no/such/folder")


def test_worker_ends_with_its_parent_and_leaves_no_file(tmp_path):
    code = ("from course_utils.compilers import worker\n"
            "print(worker.call('xla', 'os:getpid'), flush=True)\n"
            "import os; os._exit(1)")  # no atexit
    out = subprocess.run([sys.executable, "-c", code], capture_output=True,
                         text=True, cwd=os.getcwd(),
                         env={**os.environ, "TMPDIR": str(tmp_path)})
    child = int(out.stdout)
    deadline = time.monotonic() + 10
    while not gone(child):
        assert time.monotonic() < deadline, "the worker outlived its parent"
        time.sleep(0.1)
    assert not [*tmp_path.iterdir()]


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
    file = kernels.vector_add.fn.__code__.co_filename
    folder = str(Path(file).parent).encode()
    for rung in made:
        held = bytes(int(byte) for byte in re.findall(
            r"\.b8 (\d+)", rung.text))  # DWARF spells its strings in bytes
        assert folder not in held + rung.text.encode(), rung.name
    assert folder in bytes(int(byte) for byte in re.findall(
        r"\.b8 (\d+)", made["ptx"].raw))


def test_no_cache_of_tritons_hides_what_it_does(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from course_utils import kernels

    torch = pytest.importorskip("torch")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = torch.empty(2048, device="meta")
    one, two = (kernels.build(kernels.vector_add, x, x, x, 2048, target="a100",
                              fresh=True) for _ in range(2))
    assert [r.text for r in one.rungs.values()] == [
        r.text for r in two.rungs.values()]
    assert {"ttir", "ttgir", "llvm-ir", "ptx", "sass"} <= {*two.rungs}
    assert not [*tmp_path.iterdir()]
