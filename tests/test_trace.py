"""Traces: every access of a kernel, recounted from the kernel's own rules."""

import inspect
import math
import os
from datetime import date
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from course_utils import kernels  # noqa: E402
from course_utils.compilers import recorded  # noqa: E402
from course_utils.kernels import trace  # noqa: E402
from tests.test_host import python, site_without  # noqa: E402

ON = kernels.device()


def add(n, block=64, dtype=torch.float32):
    x, y = torch.randn(2, n, device=ON).to(dtype)
    out = torch.zeros(n, dtype=dtype, device=ON)
    done = kernels.launch(kernels.vector_add, -(-n // block), x, y, out, n,
                          trace=True, BLOCK_SIZE=block)
    assert torch.equal(out, x + y)
    return done


def linear(m, n, k, dtype=torch.float32, flip=False, **blocks):
    x, w, b = (torch.randn(s, device=ON).to(dtype)
               for s in ((k, m) if flip else (m, k), (k, n), (n,)))
    y = torch.empty((m, n), dtype=dtype, device=ON)
    tiles = math.prod(-(-s // blocks["BLOCK_" + c])
                      for s, c in ((m, "M"), (n, "N")))
    return kernels.launch(
        kernels.matmul_bias_relu, tiles,
        *kernels.linear_args(x.T if flip else x, w, b, y), trace=True,
        **blocks)


def test_vector_add_access_by_access():
    done = add(150)
    seen = done.trace
    assert done.where == "interpreter" and seen.grid == (3,)
    assert [(a.kind, a.tensor, a.program) for a in seen.accesses] == [
        (kind, tensor, (p, 0, 0)) for p in range(3) for kind, tensor in (
            ("load", "x_ptr"), ("load", "y_ptr"), ("store", "output_ptr"))]
    for access in seen.accesses:
        first = 64 * access.program[0]
        assert access.offsets.dtype == np.int64 and access.lanes == 64
        assert access.offsets.tolist() == [*range(first, min(first + 64, 150))]
        assert access.bytes == 4 * access.offsets.size
    source = inspect.getsource(kernels.vector_add.fn).splitlines()
    for access in seen.of(1):  # the line really is that load or store
        assert f"tl.{access.kind}({access.tensor}" in source[access.line - 1]
    assert [*map(len, (seen.of(0), seen.of((2, 0, 0)), seen.programs))] == [
        3, 3, 3]
    with pytest.raises(ValueError, match=r"program 3 is not of the grid \(3"):
        seen.of(3)
    assert not seen.accesses[0].pattern.flags.writeable
    assert "9 accesses, 1,800 bytes issued" in str(seen)


@pytest.mark.parametrize("m, n, k, flip", [
    (37, 71, 53, False), (37, 71, 53, True), (32, 64, 32, False)])
def test_each_program_reads_its_rows_and_columns(m, n, k, flip):
    """Offsets against tiles cut from a NumPy array of element numbers."""
    size = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16, "GROUP": 2}
    seen = linear(m, n, k, flip=flip, **size).trace
    places = {key: np.lib.stride_tricks.as_strided(
        np.arange(math.prod(t.shape)), t.shape, [8 * s for s in t.strides])
        for key, t in seen.tensors.items()}
    assert (seen.tensors["x_ptr"].strides == (1, m)) is flip
    wide = -(-n // 32)
    tiles = set()
    for program in seen.programs:
        *loads, bias, store = seen.of(program)
        assert (bias.tensor, store.kind) == ("b_ptr", "store")
        # Where it stores says which tile it is; the rest must follow.
        row, column = divmod(int(store.base), n)
        tiles.add((row, column))
        rows, columns = slice(row, row + 16), slice(column, column + 32)
        assert store.offsets.tolist() == places["y_ptr"][
            rows, columns].ravel().tolist()
        assert bias.offsets.tolist() == places["b_ptr"][columns].tolist()
        for step, pair in enumerate(zip(loads[::2], loads[1::2],
                                        strict=True)):
            inner = slice(16 * step, 16 * step + 16)
            for access, name, block in zip(pair, ("x_ptr", "w_ptr"), (
                    (rows, inner), (inner, columns)), strict=True):
                assert access.tensor == name
                assert access.offsets.tolist() == places[name][
                    block].ravel().tolist()
    assert tiles == {(16 * i, 32 * j) for i in range(-(-m // 16))
                     for j in range(wide)}


def test_table_counts_issued_and_unique_bytes():
    size = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16, "GROUP": 2}
    seen = linear(64, 96, 48, torch.bfloat16, **size)
    assert "bf16" in seen.note
    table = seen.trace.table()
    # X once for each of 3 columns of tiles, W for each of 4 rows.
    assert table.bytes_issued.to_dict() == {
        ("x_ptr", "load"): 2 * 64 * 48 * 3, ("w_ptr", "load"): 2 * 48 * 96 * 4,
        ("b_ptr", "load"): 2 * 96 * 4, ("y_ptr", "store"): 2 * 64 * 96}
    assert table.unique_bytes.to_dict() == {
        (name, kind): seen.trace.tensors[name].bytes
        for name, kind in table.index}
    assert table.accesses.tolist() == [36, 36, 12, 12]
    assert (table.elements * 2 == table.bytes_issued).all()
    tensor = seen.trace.tensors["y_ptr"]
    assert (tensor.dtype, tensor.itemsize) == ("bfloat16", 2)


def test_a_launch_that_touches_nothing_has_an_empty_table():
    off = kernel("tl.store(y + tl.arange(0, B), 0.0, mask=n < 0)")
    x = torch.zeros(4, device=ON)
    table = kernels.launch(off, 1, x, x, 4, B=4, trace=True).trace.table()
    assert table.empty and table.unique_bytes.sum() == 0


def test_alike_accesses_share_one_pattern():
    size = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16, "GROUP": 2}
    seen = linear(64, 96, 48, **size).trace
    # W and Y have rows of one length, and blocks of one shape.
    assert len({id(a.pattern) for a in seen.accesses}) == 3
    again = trace.from_data(seen.data())
    for a, b in zip(seen.accesses, again.accesses, strict=True):
        assert repr(a) == repr(b)
        assert a.offsets.tolist() == b.offsets.tolist()
    assert again.tensors == seen.tensors and again.grid == seen.grid


def kernel(body, head="x, y, n, B: tl.constexpr"):
    lines = "\n".join("    " + line for line in body.splitlines())
    return kernels.from_source(f"@triton.jit\ndef kernel({head}):\n{lines}")


def test_atomics_masks_grids_and_shared_memory():
    count = kernel("i = tl.program_id(0) + 2 * tl.program_id(1)\n"
                   "tl.atomic_add(x + i, 1.0, mask=i != 1)\n"
                   "tl.store(y + tl.arange(0, B), 0.0, mask=i > n)")
    x = torch.zeros(6, device=ON)
    seen = kernels.launch(count, (2, 3), x, x[2:], 99, B=4, trace=True).trace
    # Where every lane is off nothing is touched; x fastest in .programs.
    assert {a.kind for a in seen.accesses} == {"atomic"}
    assert [a.base for p in seen.programs for a in seen.of(p)] == [
        0, 2, 3, 4, 5]
    assert seen.programs[1] == (1, 0, 0) and len(seen.programs) == 6
    one, two = seen.tensors.values()
    assert one.storage == two.storage and (one.start, two.start) == (0, 2)
    assert x.tolist() == [1, 0, 1, 1, 1, 1]


def views(name):
    """Two tensors that share memory; where x's elements are in it."""
    whole = torch.arange(96.0, device=ON).reshape(8, 12)
    x, y = {"columns": (whole[:, :4], whole[:, 4:8]),
            "interleaved": (whole[:, ::2], whole[:, 1::2]),
            "transposed": (whole[:4, :4], whole[4:, :4].T),
            "the same": (whole[:, :4], whole[:, :4])}[name]
    return whole, x, y


@pytest.mark.parametrize("name", ["columns", "interleaved", "transposed",
                                  "the same"])
@pytest.mark.parametrize("traced", [True, False])
def test_an_access_is_of_the_tensor_whose_pointer_it_came_from(name, traced):
    double = kernel("i, j = tl.arange(0, 4)[:, None], tl.arange(0, 4)[None]\n"
                    "v = tl.load(x + i * a + j * b)\n"
                    "tl.store(y + i * c + j * d, 2 * v)", "x, y, a, b, c, d")
    whole, x, y = views(name)
    want = 2 * x[:4, :4]
    done = kernels.launch(double, 1, x, y, *x.stride(), *y.stride(),
                          trace=traced)
    assert done.result is y and torch.equal(y[:4, :4], want)
    if traced:
        load, store = done.trace.accesses
        assert (load.tensor, store.tensor) == ("x", "y")
        table = done.trace.table()
        assert table.unique_bytes.to_dict() == {
            ("x", "load"): 64, ("y", "store"): 64}
        for t, access in ((x, load), (y, store)):
            places = done.trace.tensors[access.tensor].places()
            assert places[access.offsets].tolist() == [
                i * t.shape[1] + j for i in range(4) for j in range(4)]


def test_places_number_a_tensors_elements():
    for t in (torch.empty(3, 4), torch.empty(4, 3).T, torch.empty(9)[::2],
              torch.empty(3, 8)[:, 1:4], torch.empty(2, 3, 4)[:, :, ::2],
              torch.empty(()), torch.empty(0, 4), torch.empty(4, 0)):
        [operand] = trace.operands({"t": t}).values()
        places = operand.places()
        flat = torch.arange(max(t.numel(), 1)).reshape(-1)
        memory = torch.full((max(places.size, 1),), -1)
        memory.as_strided(t.shape, t.stride()).copy_(
            flat[:t.numel()].reshape(t.shape))
        assert places.tolist() == memory.tolist()[:places.size]


def test_the_lane_of_the_first_element_is_noted():
    halo = kernel("i = tl.program_id(0) * B + tl.arange(0, B)\n"
                  "tl.store(y + i, tl.load(x + i - 3, mask=i > 2))")
    x = torch.ones(8, device=ON)
    seen = kernels.launch(halo, 2, x, x.clone(), 8, B=4, trace=True).trace
    assert [(a.lane, a.base, a.pattern.size) for a in seen.accesses] == [
        (3, 0, 1), (0, 0, 4), (0, 1, 4), (0, 4, 4)]
    again = trace.from_data(seen.data())
    assert [a.lane for a in again.accesses] == [3, 0, 0, 0]
    assert [a.line for a in again.accesses] == [4, 4, 4, 4]


@pytest.mark.parametrize("make", [
    lambda big: (big[0], big[1]), lambda big: (big[:, :4], big[:, 4:])])
def test_reading_on_into_the_next_tensor_is_an_error(make):
    copy = kernel("i = tl.arange(0, B)\ntl.store(y + i, tl.load(x + i))")
    x, y = make(torch.zeros(2, 8, device=ON))
    with pytest.raises(ValueError, match="load: these addresses are not in x"):
        kernels.launch(copy, 1, x, y, 0, B=16, trace=True)


BLOCKS = """
d = tl.make_tensor_descriptor(x, [n, n], [n, 1], [B, B])
e = tl.make_tensor_descriptor(y, [n, n], [n, 1], [B, B])
e.store([8, 0], d.load([8, 0]))
""", """
d = tl.make_block_ptr(x, (n, n), (n, 1), (8, 0), (B, B), (1, 0))
e = tl.make_block_ptr(y, (n, n), (n, 1), (8, 0), (B, B), (1, 0))
tl.store(e, tl.load(d, boundary_check=(0, 1)), boundary_check=(0, 1))
"""


@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
@pytest.mark.parametrize("body", BLOCKS)
@pytest.mark.parametrize("traced", [True, False])
def test_descriptors_and_block_pointers_run_and_are_traced(body, traced):
    x = torch.randn(12, 12, device=ON)
    y = torch.zeros_like(x)
    done = kernels.launch(kernel(body.strip()), 1, x, y, 12, B=8,
                          trace=traced)
    want = torch.zeros_like(x)
    want[8:, :8] = x[8:, :8]  # four of its eight rows are there
    assert done.result is y and done.difference(want) == 0.0
    if traced:
        for access in done.trace.accesses:
            assert access.lanes == 64 and access.offsets.tolist() == [
                12 * i + j for i in range(8, 12) for j in range(8)]


@pytest.mark.parametrize("body, words", [
    ("tl.store(y + 0, tl.load(x + 64))", "line 3.*load: these addresses"),
    ("tl.store(x - 1, 0.0)", "store: these addresses are not in x"),
    ("tl.store(tl.where(tl.arange(0, B) > 1, x, y), 0.0)",
     "store: its pointers come from no single tensor"),
    ("p = y.to(tl.pointer_type(tl.int8))\ntl.store(p, tl.load(x).to(tl.int8))",
     "store of y: it takes 1 bytes, an element has 4"),
])
def test_what_cannot_be_traced_is_said_before_it_happens(body, words):
    x, y = torch.zeros(8, device=ON), torch.ones(8, device=ON)
    with pytest.raises(ValueError, match=words):
        kernels.launch(kernel(body), 1, x, y, 8, B=4, trace=True)
    assert y.tolist() == [1] * 8


def test_untraced_launches_have_no_trace():
    x = torch.ones(4, device=ON)
    done = kernels.launch(kernels.vector_add, 1, x, x, x, 4)
    assert done.trace is None


LAUNCH = """
import course_utils; course_utils.start()
import torch
from pathlib import Path
from course_utils import Missing, kernels
from course_utils.compilers import recorded
recorded.FOLDER = Path({folder!r})
def go(n, **meta):
    x, y, out = torch.ones(3, n)
    done = kernels.launch(kernels.vector_add, lambda a: -(-n // a[
        "BLOCK_SIZE"]), x, y, out, n, trace=True, **meta)
    print(done.where, done.result is None, done.trace)
    print([a.offsets.sum() for a in done.trace.accesses])
    return done
"""


def test_a_recording_stands_in_without_triton(tmp_path):
    folder = tmp_path / "recorded"
    code = LAUNCH.format(folder=str(folder)) + "done = go(100, BLOCK_SIZE=64)"
    made, _ = python(code, COURSE_RECORD="1")
    [file] = folder.iterdir()
    assert file.stat().st_size < 1000
    hidden = {"PYTHONPATH": site_without(tmp_path, ("triton",))}
    shown, _ = python(code + """
print(done)
try:
    go(101, BLOCK_SIZE=64)
except Missing as missing:
    print(missing.what)
""", "-S", **hidden)
    where, numbers, head, note, missing = shown.splitlines()
    assert made.splitlines()[0].replace("interpreter False",
                                        "recorded True") == where
    assert made.splitlines()[1] == numbers
    assert "recorded" in head and missing == "triton"
    assert f"recorded {date.today()} by `make record` with triton" in note


def test_the_courses_traces_are_recorded(tmp_path):
    """Without triton stage 5 still has the traffic of the example."""
    out, _ = python("from course_utils import example\n"
                    "print(example.launch().where)", "-S",
                    PYTHONPATH=site_without(tmp_path, ("triton",)))
    assert out == "recorded\n"


def test_the_example_is_small(tmp_path, monkeypatch):
    """Of the whole example only the size of what is kept is checked."""
    pattern = (np.arange(128)[:, None] * 1024 + np.arange(64)).ravel()
    x = trace.Operand((512, 1024), (1024, 1), "bfloat16", 2)
    seen = trace.Trace("f", tuple(trace.Access(
        (p, 0, 0), "load", "x", (128, 64), 64 * p, pattern, 2)
        for p in range(2176)), {"x": x}, (2176,))
    monkeypatch.setattr(recorded, "FOLDER", Path(tmp_path))
    monkeypatch.delenv("COURSE_RECORD", raising=False)
    trace.keep_trace("a", seen)
    assert not os.listdir(tmp_path)
    monkeypatch.setenv("COURSE_RECORD", "1")
    trace.keep_trace("a", seen)
    assert (tmp_path / "a.trace.gz").stat().st_size < 40_000
    again, whence = trace.find_trace("a")
    assert recorded.COMMAND in whence
    assert again.accesses[9].offsets.tolist() == (576 + pattern).tolist()
    assert again.accesses[9].pattern is again.accesses[0].pattern


@pytest.mark.gpu
def test_on_a_gpu_the_trace_is_the_interpreters():
    done = add(150)
    assert done.where == "interpreter" and "not on the GPU" in done.note
    assert done.result.device.type == "cuda"
