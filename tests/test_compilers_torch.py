"""PyTorch's compilers: kernels, bytes, machine code, and isolation."""

import functools
import importlib
import os
import shutil
import subprocess
import sys

import cloudpickle
import pytest

torch = pytest.importorskip("torch")

from course_utils.compilers import torch as compilers  # noqa: E402
from course_utils.compilers import worker  # noqa: E402
from course_utils.host import Missing  # noqa: E402

M, K, N = 512, 1024, 2048


pytestmark = pytest.mark.usefixtures("empty_cache")


def example(x, w, b):
    return torch.relu(x @ w + b)


def chain(x, b):
    return torch.relu(x * b + x)


def chain_without(x, b):
    return x * b + x


def spec(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def arguments(n=N):
    return tuple(spec(*shape, dtype=torch.bfloat16)
                 for shape in ((M, K), (K, n), (n,)))


@pytest.fixture
def graphs_only(monkeypatch):
    """As where no C++ compiler is: all but the machine code, in a second."""
    monkeypatch.setattr(compilers, "lacking", lambda target: Missing(
        "objdump", "it disassembles", "apt install binutils"))


@functools.cache
def made(fn, target, n=N):
    """Rung texts by name, and kernels, compiled in this very run."""
    args = arguments(n) if fn is example else (spec(64, n), spec(n))
    made = compilers.compile(fn, args, target, fresh=True)
    return {r.name: r.text for r in made.rungs}, made.kernels


def compiled(fn, *args):
    """Kernels and fx text for an H100, which needs no C++ compiler."""
    made = compilers.compile(fn, args, "h100", fresh=True)
    return made.kernels, next(r.text for r in made.rungs if r.name == "fx")


def typed(source, file="<typed>", **names):
    """What the last statement of ``source`` defines, as a cell does."""
    names |= {"torch": torch, "__name__": "typed", "__file__": file}
    exec(compile(source, file, "exec"), names)
    return list(names.values())[-1]


def test_eager_launches_one_kernel_an_op():
    mm, add, relu = compilers.eager(example, arguments())
    assert (mm.name, add.name, relu.name) == ("mm", "add", "relu")
    assert {k.author for k in (mm, add, relu)} == {"library"}
    assert mm.bytes_read == 2 * (M * K + K * N)
    assert add.bytes_read == 2 * (M * N + N)
    assert {k.bytes_written for k in (mm, add, relu)} == {2 * M * N}


def test_eager_linear_is_one_product_with_bias():
    linear = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU())
    found = compilers.eager(linear, (spec(4, 8),))
    assert [k.name for k in found] == ["addmm", "relu"]
    assert found[0].bytes_read == 4 * (4 * 8 + 8 * 16 + 16)


def test_eager_skips_views_and_counts_updates_in_place():
    def fn(x):
        x.T.reshape(4, 16).add_(1)
        return x[:2].zero_()

    add, zero = compilers.eager(fn, (torch.ones(8, 8).T,))
    assert (add.bytes_read, add.bytes_written) == (256, 256)
    assert (zero.bytes_read, zero.bytes_written) == (0, 64)


def test_cpu_calls_a_library_and_generates_the_rest():
    rungs, (product, rest) = made(example, "cpu")
    assert list(rungs) == [
        "python", "bytecode", "fx", "guards", "aten", "inductor", "assembly"]
    assert (product.author, product.who) == ("library", "ATen")
    assert product.ops == ("addmm",)
    assert product.bytes_read == 2 * (M * K + K * N + N)
    assert product.bytes_written == 2 * M * N
    assert (rest.author, rest.who) == ("compiler", "Inductor")
    assert rest.ops == ("relu",)
    assert rest.bytes_read == rest.bytes_written == 2 * M * N
    assert rungs["inductor"].index("extern_kernels.addmm") < rungs[
        "inductor"].index(f"{rest.name}(buf")
    assert "def example(x, w, b):" in rungs["python"]
    assert "torch.relu(" in rungs["fx"] and "# File" not in rungs["fx"]


def test_h100_calls_cublas_and_fuses_the_rest():
    rungs, (product, rest) = made(example, "h100")
    assert list(rungs) == [
        "python", "bytecode", "fx", "guards", "aten", "inductor", "ptx",
        "sass"]
    assert (product.who, product.ops) == ("cuBLAS", ("mm",))
    assert product.bytes_read == 2 * (M * K + K * N)
    assert (rest.author, rest.ops) == ("compiler", ("add", "relu"))
    assert rest.bytes_read == 2 * (M * N + N)
    assert rest.bytes_written == 2 * M * N
    assert 0 < rest.registers <= 255 and rest.spills == 0
    assert f".visible .entry {rest.name}(" in rungs["ptx"]
    assert ".target sm_90a" in rungs["ptx"] and "EF_CUDA_SM90" in rungs["sass"]


@pytest.mark.parametrize("target, rung", [("cpu", "assembly"),
                                          ("h100", "sass")])
def test_machine_code_follows_the_shape(target, rung):
    a, b = (made(chain, target, n)[0][rung] for n in (32, 64))
    assert a != b


def test_machine_code_follows_the_relu():
    def count(fn, target, rung, instruction):
        return made(fn, target, 32)[0][rung].count(instruction)

    # Inductor's maximum keeps NaN, so on a GPU it is compare and select.
    for target, rung, instruction in (
            ("cpu", "assembly", "vmaxps"), ("h100", "sass", "FSEL"),
            ("h100", "sass", "FSETP")):
        assert count(chain, target, rung, instruction) > 0
        assert count(chain_without, target, rung, instruction) == 0


def test_a_slice_and_a_factory_on_a_chip_that_is_absent():
    def fn(x):
        return x.T.reshape(-1)[:4] + torch.arange(4, device=x.device)

    kernels, _ = compiled(fn, spec(4, 4))
    assert kernels and all(k.author == "compiler" for k in kernels)


def test_an_out_argument_is_written_and_not_read():
    add, = compilers.eager(lambda a, out: torch.add(a, a, out=out),
                           (spec(8), spec(8)))
    assert (add.bytes_read, add.bytes_written) == (32, 32)


def write_a_row(c, y):
    c[2:3] = y
    return c


def write_rows(c, y, i):
    return c.index_put_((i,), y)


INDEX = spec(1, dtype=torch.int64)


@pytest.mark.parametrize("fn, args, read", [
    (write_a_row, (spec(1024, 4), spec(1, 4)), 16),
    (write_rows, (spec(1024, 4), spec(1, 4), INDEX), 16 + 8),
    (torch.Tensor.add_, (spec(64), spec(64)), 512),
    (lambda w, i: w[i] + w[i + 1], (spec(9), INDEX), 8 + 8)],
    ids=["slice", "rows", "in-place", "gather"])
def test_what_is_only_ordered_is_not_read(fn, args, read):
    (kernel,), _ = compiled(fn, *args)
    assert (kernel.author, kernel.bytes_read) == ("compiler", read)


def cached_keys(c, k):
    c[:, 3] = k
    return c.sum(-1)


def looked_up(i, w):
    return torch.nn.functional.embedding(i, w) * 2


FEW = spec(4, dtype=torch.int64)
TABLE, ROWS = spec(1000, 64), spec(4, 64)
ONE = 4 * 64  # bytes of a row


@pytest.mark.parametrize("target", ["cpu", "h100"])
@pytest.mark.parametrize("fn, args, read, written", [
    # On a CPU one kernel does both, and need not read what it has written.
    (cached_keys, (spec(2, 1000, 64), spec(2, 64)),
     {"cpu": 2000 * ONE, "h100": 2002 * ONE}, 2 * ONE + 4 * 2000),
    (looked_up, (FEW, TABLE), 32 + 4 * ONE, 4 * ONE),
    (lambda x, i: x[i], (TABLE, FEW), 32 + 4 * ONE, 4 * ONE),
    (lambda x, i: x[i], (spec(2, 64), FEW), 32 + 2 * ONE, 4 * ONE),
    (lambda x, i: torch.gather(x, 1, i),
     (TABLE, spec(1000, 4, dtype=torch.int64)), 32_000 + 16_000, 16_000),
    (write_rows, (TABLE, ROWS, FEW), 32 + 4 * ONE, 4 * ONE),
    (lambda x, k, i: x.index_put((i,), k), (TABLE, ROWS, FEW),
     1000 * ONE + 32 + 4 * ONE, 1000 * ONE + 4 * ONE)],
    ids=["cache", "embedding", "index", "small table", "gather", "update",
         "copy and update"])
def test_of_a_buffer_counts_what_is_taken_or_updated(
        fn, args, read, written, target, graphs_only):
    kernels = compilers.compile(fn, args, target).kernels
    assert {k.author for k in kernels} == {"compiler"}
    assert sum(k.bytes_read for k in kernels) == (
        read[target] if isinstance(read, dict) else read)
    assert sum(k.bytes_written for k in kernels) == written


@pytest.mark.parametrize("target", ["cpu", "h100"])
@pytest.mark.parametrize("dtype, cast", [
    (torch.float32, 0), (torch.bfloat16, 1000 * ONE // 2)])
def test_the_gradient_of_a_table_is_zeros_and_an_update(
        dtype, cast, target, graphs_only):
    made = compilers.compile(looked_up, (FEW, TABLE.to(dtype)), target, (1,))
    backward = [k for k in made.kernels if k.name.startswith("backward")]
    assert sum(k.bytes_written for k in backward) == 1004 * ONE + cast
    # The sum is in float32; on a GPU what rounds it is a kernel of its own.
    again = 1000 * ONE if cast and target == "h100" else 0
    assert sum(k.bytes_read for k in backward) == (
        32 + 4 * 64 * dtype.itemsize + again)


def test_a_library_updates_in_place_what_was_copied_for_it(graphs_only):
    def fn(x, i, k):
        return x.index_put((i,), k, accumulate=True)

    made = compilers.compile(fn, (TABLE.long(), FEW, ROWS.long()), "h100")
    copy, update = made.kernels
    assert (copy.bytes_read, copy.bytes_written) == (2000 * ONE, 2000 * ONE)
    assert (update.author, update.bytes_written) == ("library", 8 * ONE)
    assert update.bytes_read == 8 * ONE + 8 * ONE + 32  # adds, to what it was


def test_boundaries_that_are_searched_are_read():
    (kernel,), _ = compiled(torch.bucketize, spec(1000), spec(10))
    assert kernel.bytes_read == 4 * (1000 + 10)


@pytest.mark.parametrize("fn, args, read, written", [
    (lambda x, i: x[i], (TABLE, FEW), 32 + 4 * ONE, 4 * ONE),
    (lambda x, i: x[:, i], (TABLE, FEW), 32 + 16_000, 16_000),
    (lambda x, i: x[i, i], (TABLE, FEW), 32 + 16, 16),
    (lambda x, i: x[i], (spec(2, 64), FEW), 32 + 2 * ONE, 4 * ONE),
    (lambda x, i: x.index_select(-1, i), (TABLE, FEW), 32 + 16_000, 16_000),
    (lambda x, i: x.gather(1, i[:, None]), (TABLE, FEW), 32 + 16, 16),
    (lambda x, i: x.gather(0, i[0]), (spec(), FEW), 8 + 4, 4),
    (torch.take, (TABLE, FEW), 32 + 16, 16),
    (torch.nn.functional.nll_loss, (TABLE[:4], FEW), 32 + 16, 8),
    (write_rows, (TABLE, ROWS, FEW), 32 + 4 * ONE, 4 * ONE),
    (lambda x, i: x.index_fill_(1, i, 1), (TABLE, FEW), 32, 16_000),
    (lambda x, i, k: x.index_add_(0, i, k), (TABLE, FEW, ROWS),
     32 + 8 * ONE, 4 * ONE),
    (lambda x, i, k: x.scatter_add_(1, i[:, None], k),
     (TABLE, FEW, spec(4, 1)), 32 + 2 * 16, 16),
    (lambda x, i, k: x.scatter_(1, i[:, None], k), (TABLE, FEW, spec(4, 1)),
     32 + 16, 16),
    (lambda x, m, k: x.index_put_((m,), k),
     (TABLE, spec(1000, 64, dtype=torch.bool), spec()), 64_004, 1000 * ONE)],
    ids=["index", "columns", "elements", "small table", "index_select",
         "gather", "scalar", "take", "nll_loss", "index_put_", "index_fill_",
         "index_add_", "scatter_add_", "scatter_", "mask"])
def test_eager_counts_of_a_table_what_is_taken_or_updated(
        fn, args, read, written):
    kernel, = compilers.eager(fn, args)
    assert (kernel.bytes_read, kernel.bytes_written) == (read, written)


def test_a_bag_of_embeddings_reads_the_rows_it_sums():
    def fn(i, w, offsets):
        return torch.nn.functional.embedding_bag(i, w, offsets)

    bag, = compilers.eager(fn, (FEW, TABLE, FEW[:2]))
    assert bag.bytes_read == 32 + 16 + 4 * ONE


def conjugated(x):
    z = torch.view_as_complex(x)
    return torch.view_as_real(z * z.conj() + 1j * z)


def test_a_view_of_a_constant_is_no_kernel(graphs_only):
    made = compilers.compile(conjugated, (spec(32, 2),), "cpu", "all")
    assert {k.name.partition("/")[2] for k in made.kernels
            if k.author == "library"} == {"clone", "mul", "add"}


def test_a_check_is_no_kernel_and_picking_a_result_no_op():
    kernels, _ = compiled(torch.linalg.cholesky, spec(8, 8))
    assert [k.name for k in kernels] == ["linalg_cholesky_ex"]
    launched = compilers.eager(torch.linalg.cholesky, (spec(8, 8),))
    assert [k.name for k in launched] == ["linalg_cholesky_ex"]
    (kernel,), _ = compiled(torch.sort, spec(8, 8))
    assert kernel.ops == ("sort",)


def test_a_function_may_call_one_of_another_cell():
    helper = typed("def helper(x):\n    return x.sin()\n", "<one>")
    fn = typed("def fn(x):\n    return helper(x) * 123\n", "<two>",
               helper=helper)
    _, fx = compiled(fn, spec(4))
    assert ".sin()" in fx and "* 123" in fx


NET = """
class Net(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2
"""


def test_the_same_script_elsewhere_is_found_and_no_other(monkeypatch):
    def kernels(source, file, x):
        return compilers.compile(typed(source, file)(), (x,), "h100").kernels

    first = kernels(NET, "/a/net.py", spec(8, 8))
    monkeypatch.setattr(worker, "call", None)
    assert kernels(NET, "/elsewhere/net.py", spec(8, 8)) == first
    for source, x in ((NET.replace("2", "3"), spec(8, 8)), (NET, spec(8, 9)),
                      (NET, spec(8, 8).T), (NET, spec(8, 8).double())):
        with pytest.raises(TypeError, match="not callable"):
            kernels(source, "/a/net.py", x)


def test_a_module_beside_the_notebook_is_sent_as_it_is_now(
        tmp_path, monkeypatch):
    compiled(chain, spec(4), spec(4))  # the worker stands, without the folder
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "beside_b.py").write_text(
        "def g(x):\n    return x * K\n")
    (tmp_path / "beside_a.py").write_text(
        "import torch, beside_b\n"
        "def f(x):\n    return torch.relu(beside_b.g(x))\n")
    for name in ("beside_b", "beside_a"):
        sys.modules.pop(name, None)
    module = importlib.import_module("beside_a")
    for k in (31, 57):
        module.beside_b.K = k
        for fn in (module.f, lambda x: module.f(x)):
            _, fx = compiled(fn, spec(4))
            assert f"* {k}" in fx
            assert str(tmp_path) not in fx


def test_modules_that_travel_by_value_anyway_go_on_to(monkeypatch):
    known = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(known)
    try:
        compilers.eager(chain, (spec(8, 8), spec(8)))
        assert __name__ in cloudpickle.list_registry_pickle_by_value()
    finally:
        cloudpickle.unregister_pickle_by_value(known)
    compilers.eager(chain, (spec(8, 8), spec(8)))
    assert __name__ not in cloudpickle.list_registry_pickle_by_value()


def test_what_torch_compile_wrapped_is_unwrapped():
    found = compilers.eager(torch.compile(chain), (spec(8, 8), spec(8)))
    assert [k.name for k in found] == ["mul", "add", "relu"]
    linear = torch.compile(torch.nn.Linear(8, 8))
    assert [k.name for k in compilers.eager(linear, (spec(8, 8),))] == [
        "addmm"]


compiled_chain = torch.compile(chain)


@functools.wraps(compiled_chain)
def tripled(x, y):
    return 3 * compiled_chain(x, y)


def test_what_wraps_a_compiled_function_is_not_that_function():
    found = compilers.eager(tripled, (spec(8, 8), spec(8)))
    assert [k.name for k in found] == ["mul", "add", "relu", "mul"]
    made = compilers.compile(tripled, (spec(8, 8), spec(8)), "cpu")
    [graph] = [rung.text for rung in made.rungs if rung.name == "fx"]
    assert "3 * " in graph or "* 3" in graph


class Twice(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore")  # of torch, about three of them
@pytest.mark.parametrize("make, words", [
    (lambda: torch.eye(4).to_sparse(), r"sparse_coo.*\.to_dense\(\)"),
    (lambda: torch.quantize_per_tensor(torch.ones(4), 1.0, 0, torch.qint8),
     r"qint8.*\.dequantize\(\)"),
    (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
     r"\.to_padded_tensor\(0.0\)"),
    (lambda: torch.ones(4).as_subclass(Twice), "a Twice")],
    ids=["sparse", "quantized", "nested", "subclass"])
def test_a_tensor_that_is_not_plain_is_refused(make, words):
    for run in (compilers.eager, lambda *a: compilers.compile(*a, "cpu")):
        with pytest.raises(ValueError, match=words) as caught:
            run(lambda x: x * 2, (make(),))
        assert "\n" not in str(caught.value)


def test_each_gpu_is_itself_and_the_t4_has_no_bf16():
    for target, number in (("h100", 90), ("t4", 75)):
        assert f"cc={number}" in made(chain, target, 32)[0]["inductor"]
    with pytest.raises(ValueError, match="BF16"):
        compilers.compile(example, arguments(), "t4", fresh=True)


def test_weights_do_not_travel():
    weight = torch.nn.Linear(2048, 2048)
    assert len(compilers._packed(weight, (spec(1, 2048),))) < 20_000


@pytest.mark.parametrize("fn, args, words", [
    (example, (spec(4, 5), spec(6, 4), spec(4)),
     ["reduction dim", "[4, 5] X [6, 4]"]),
    (lambda x: x if x.sum() > 0 else -x, (spec(4),), ["torch.where"]),
    (lambda x: x * x.sum().item(), (spec(4),), ["depends on the values"]),
    (lambda x: [print(x), x + 1][1], (spec(4),), ["print"]),
    (lambda x: 3, (spec(4),), ["no operation"]),
    (example, (spec(4),), ["missing 2 required", "'w' and 'b'"]),
], ids=["shapes", "branch", "item", "break", "empty", "missing"])
def test_what_cannot_compile_is_one_sentence(fn, args, words):
    with pytest.raises(ValueError) as caught:
        compilers.compile(fn, args, "cpu", fresh=True)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


def test_unknown_target():
    with pytest.raises(ValueError, match="target='tpu'.*h100"):
        compilers.compile(example, arguments(), "tpu")


class Deadly:
    def __reduce__(self):
        return os._exit, (3,)


def test_a_worker_that_dies_is_an_error():
    with pytest.raises(worker.CompilerError, match="exit code 3"):
        compilers.compile(lambda x, _: x + 1, (spec(4), Deadly()), "cpu",
                        fresh=True)


def test_nothing_changes_in_this_process():
    import torch._inductor.config as config

    def state():
        return (config.get_config_copy(), dict(os.environ),
                torch.cuda.is_available(), torch.get_num_threads(),
                torch.cuda.get_device_properties)

    before = state()
    compilers.compile(chain, (spec(4, 4), spec(4)), "h100", fresh=True)
    compilers.eager(chain, (spec(4, 4), spec(4)))
    assert state() == before


def test_what_is_lacking_is_named(tmp_path, monkeypatch):
    assert compilers.lacking("cpu") is compilers.lacking("h100") is None
    compiler = shutil.which("g++") or shutil.which("c++")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert compilers.lacking("cpu").what == "A C++ compiler"
    (tmp_path / "g++").symlink_to(compiler)
    assert compilers.lacking("cpu").what == "objdump"
    assert str(compilers.lacking("cpu")).startswith(
        "objdump is missing: it dis")

    class Refuses:
        def find_spec(self, name, path=None, target=None):
            if name == "triton":
                raise ImportError(name)

    monkeypatch.setattr(sys, "meta_path", [Refuses(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    with pytest.raises(Missing, match="pip install triton"):
        compilers.compile(chain, (spec(4), spec(4)), "h100")


def test_without_a_compiler_the_graphs_still_come(tmp_path):
    code = """
import torch
from course_utils.compilers import torch as compilers
made = compilers.compile(
    torch.relu, (torch.empty(64, device="meta"),), "cpu")
print(*[r.name for r in made.rungs], *[k.author for k in made.kernels])
print(made.rungs[-1])
"""
    environment = {k: v for k, v in os.environ.items() if k != "CXX"}
    done = subprocess.run(
        [sys.executable, "-c", code], text=True, capture_output=True,
        env={**environment, "PATH": str(tmp_path),
             "COURSE_CACHE": str(tmp_path)})
    names, why, *_ = done.stdout.splitlines()
    assert names == "fx guards aten inductor assembly compiler", done.stderr
    assert why.startswith("A C++ compiler is missing: it turns")


@pytest.mark.parametrize("name, what", [
    ("torch._inductor.changed", "A torch that this course knows"),
    ("course_utils.changed", None)])
def test_an_inside_of_torch_that_is_another_is_missing(
        name, what, monkeypatch):
    def call(*unused, **options):
        raise ImportError("cannot import name", name=name)

    monkeypatch.setattr(worker, "call", call)
    with pytest.raises(Missing if what else ImportError) as caught:
        compilers.compile(chain, (spec(4), spec(4)), "h100")
    assert not what or torch.__version__.split("+")[0] in str(caught.value)


def attend(q, k, v, mask=None, **options):
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, mask, **options)


def by_hand(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) / 8, -1) @ v


def heads(size=64, dtype=torch.bfloat16, kv=4):
    return tuple(spec(2, n, 128, size, dtype=dtype) for n in (4, kv, kv))


grouped = functools.partial(attend, enable_gqa=True)
newest = torch.__version__ >= "2.13"


@pytest.mark.parametrize("target, fn, args, want", [
    ("h100", attend, heads(), "cudnn" if newest else "flash"),
    ("h100", by_hand, heads(), "cudnn" if newest else "flash"),
    ("h100", grouped, heads(kv=2), "cudnn" if newest else "flash"),
    ("h100", attend, heads(20), "flash"),  # padded to 24
    ("a100", attend, (*heads(), spec(128, 128, dtype=torch.bool)),
     "efficient"),
    ("h100", attend, heads(dtype=torch.float64), "math"),
    ("t4", attend, heads(dtype=torch.float16), "efficient"),
    ("cpu", attend, heads(), "flash_attention_for_cpu"),
    ("cpu", grouped, heads(kv=2), "flash_attention_for_cpu")])
def test_attention_is_what_the_chip_would_run(
        target, fn, args, want, graphs_only):
    names = [k.name for k in compilers.compile(fn, args, target).kernels]
    fused = [n for n in names if n.startswith("_scaled_dot_product")]
    if want == "math":
        assert not fused and names.count("bmm") == 2
    else:
        assert len(fused) == 1 and want in fused[0] and "bmm" not in names


MASK = spec(4, 128, 128, dtype=torch.bool)
LEARNED = torch.nn.Parameter(spec(128, 128, dtype=torch.bfloat16))
QUERY, KEY, VALUE = heads()
DEEPSEEK = *heads(192)[:2], heads(128)[2]


CHOICES = [
    (9, heads(192), {}, "cudnn"),  # up to 256 on Hopper
    (9, heads(264), {}, "efficient"),
    (10, heads(192), {}, "flash"),  # up to 128, but for one shape
    (10, DEEPSEEK, {}, "cudnn"), (8, DEEPSEEK, {}, "efficient"),
    (12, heads(), {}, "flash"), (8, heads(), {}, "flash"),
    (7, heads(), {}, "math"),
    (9, heads(), {"dropout": 0.25, "causal": True}, "cudnn"),
    (9, heads(), {"dropout": 0.3, "causal": True}, "flash"),  # not 1/16s
    (9, (QUERY[:, :, :1], KEY, VALUE), {}, "cudnn"),
    (9, (QUERY[:, :, :1], KEY, VALUE), {"dropout": 0.5}, "flash"),
    (9, (QUERY, KEY[:, :, :1], VALUE[:, :, :1]), {}, "flash"),
    (9, (QUERY, KEY[:, :, :1], VALUE[:, :, :1]), {"causal": True},
     "efficient"),
    (9, (QUERY, KEY[:, :, :0], VALUE[:, :, :0]), {}, "math"),
    (9, (*heads(), MASK[0]), {}, "cudnn"),
    (9, (*heads(), MASK), {}, "efficient"),  # of 3 dimensions
    (9, (*heads(), LEARNED), {}, "efficient"),
    (9, (*heads(), MASK.mT), {}, "math"),
    (9, heads(kv=2), {"gqa": True}, "cudnn"),
    (8, heads(kv=2), {"gqa": True}, "flash"),
    (8, (*heads(kv=2), MASK), {"gqa": True}, "math"),
    (8, (QUERY, KEY[:, :2], VALUE[:, :1]), {"gqa": True}, "math"),
    (9, heads(kv=1), {}, "math"),  # nobody said that heads are shared
    (9, heads(dtype=torch.float32), {}, "efficient"),
    (9, heads(6, dtype=torch.float32), {}, "math"),
    (7, heads(6, dtype=torch.float32), {}, "efficient"),
    (9, [t[..., 2:] for t in heads(66, dtype=torch.float32)], {}, "math"),
    (9, [t.mT for t in heads(128)], {}, "math"),
    (9, [t[0] for t in heads()], {}, "math")]


@pytest.mark.skipif(not newest, reason="torch before 2.13 has other rules")
@pytest.mark.parametrize("major, args, options, want", CHOICES)
def test_the_choice_of_attention_is_that_of_torch(major, args, options, want):
    """As torch 2.13.0's sdp_utils.cpp has it; nothing here ran on a GPU."""
    from course_utils.compilers.attention import choice

    assert choice(major, *args, **options) == want


@pytest.mark.gpu
@pytest.mark.skipif(not newest, reason="torch before 2.13 has other rules")
def test_the_choice_of_attention_is_what_this_gpu_is_given():
    from course_utils.compilers.attention import choice

    major, _ = torch.cuda.get_device_capability()
    for _, args, options, _ in CHOICES:
        real = [torch.empty_strided(
            t.shape, t.stride(), dtype=t.dtype, device="cuda",
            requires_grad=t.requires_grad) for t in args]
        q, k, v, mask, dropout, causal, gqa = (
            *real, *[None] * (4 - len(real)), options.get("dropout", 0.0),
            options.get("causal", False), options.get("gqa", False))
        given = torch.nn.attention.SDPBackend(torch._fused_sdp_choice(
            q, k, v, mask, dropout, causal, enable_gqa=gqa)).name
        assert given.partition("_")[0].lower() == choice(
            major, *real, **options), (args, options)


def test_attention_learns_with_the_same_kernel(graphs_only):
    made = compilers.compile(attend, heads(192), "a100", "all")
    names = [k.name for k in made.kernels]
    assert names == ["forward/_scaled_dot_product_flash_attention",
                     "backward/_scaled_dot_product_flash_attention_backward"]
    assert made.memory["saved inputs"] == 3 * 2 * 2 * 4 * 128 * 192


class Block(torch.nn.Module):
    """A decoder layer with grouped heads, a buffer and a gate."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.RMSNorm(32)
        self.q, self.o = (torch.nn.Linear(32, 32) for _ in range(2))
        self.k, self.v = (torch.nn.Linear(32, 16) for _ in range(2))
        self.register_buffer("turn", torch.ones(8, 8))

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (part(y).view(2, 8, -1, 8).transpose(1, 2)
                   for part in (self.q, self.k, self.v))
        y = attend(q * self.turn, k, v, is_causal=True, enable_gqa=True)
        return x + self.o(y.transpose(1, 2).reshape(2, 8, 32))


class Vision(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cut = torch.nn.Conv2d(3, 32, 4, 4)
        self.norm = torch.nn.BatchNorm2d(32)
        self.layer = torch.nn.TransformerEncoderLayer(
            32, 4, 64, batch_first=True)

    def forward(self, image):
        return self.layer(self.norm(self.cut(image)).flatten(2).mT)


class Named(torch.nn.Module):
    def forward(self, *, x):
        return x * 2


def choose(x):
    return torch.cond(x.sum() > 0, lambda x: torch.sin(x + torch.ones(8)),
                      torch.cos, (x,))


def lower(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ w


def weights_of_int8(x, w, scale):
    return x @ (w.to(x.dtype) * scale)


def dynamic_int8(x, w):
    scale = x.abs().amax() / 127
    return torch._int_mm((x / scale).round().to(torch.int8), w) * scale


def step(w, x):
    return w - 0.1 * torch.func.grad(lambda w: ((x @ w) ** 2).mean())(w)


def again(x, w):
    return torch.utils.checkpoint.checkpoint(
        lambda x: torch.sin(x @ w + torch.arange(8.0)), x,
        use_reentrant=False)


def loop(x):
    return torch._higher_order_ops.while_loop(
        lambda i, x: i < 5, lambda i, x: (i + 1, x.sin()),
        (torch.tensor(0), x))


def literal(x):
    return x @ torch.tensor([[1.0], [2.0]] * 4) * torch.tensor(2) + x[[2, 0]]


def wraps(x):
    def double(x):
        return x * 2

    return functools.wraps(double)(lambda x: double(x) + 1)(x)


ONES = torch.ones(8)


def plus(x, b=ONES):
    return x + b


class Adds:
    def method(self, x):
        return x + 1


def strange(x):
    return x + 1


strange.__name__ = "<img onerror=1>"
X = spec(8, 8)
STRANGERS = {
    "decoder": (Block().bfloat16(), spec(2, 8, 32, dtype=torch.bfloat16)),
    "vision": (Vision(), spec(2, 3, 16, 16)),
    "int8 weights": (weights_of_int8, X, spec(8, 4, dtype=torch.int8),
                     spec(4)),
    "int8": (dynamic_int8, spec(32, 32), spec(32, 32, dtype=torch.int8)),
    "step": (step, X, X), "cond": (choose, X), "autocast": (lower, X, X),
    "checkpoint": (again, X, X), "default": (plus, X),
    "dropout": (torch.nn.Dropout(0.5), X),
    "embedding": (torch.nn.Embedding(9, 4), spec(3, dtype=torch.int64)),
    "complex": (lambda x: torch.fft.fft(x).abs(), X),
    "keywords": (functools.partial(Named(), x=X),),
    "method": (Adds().method, X), "name": (strange, X),
    "no source": (typed(NET, "<net>")(), X),
    "loop": (loop, X), "literal": (literal, spec(2, 8)),
    "wraps": (wraps, X), "hessian": (
        lambda x: torch.func.hessian(lambda x: (x**3).sum())(x), spec(8)),
    "weight norm": (torch.nn.utils.parametrizations.weight_norm(
        torch.nn.Linear(8, 8)), X)}


@pytest.mark.parametrize("target", ["cpu", "h100"])
@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_climb(name, target, graphs_only):
    fn, *args = STRANGERS[name]
    made = compilers.compile(fn, tuple(args), target)
    assert [r.name for r in made.rungs if r.tool][-2:] == ["aten", "inductor"]
    assert made.kernels


@pytest.mark.parametrize("name", ["decoder", "vision", "step", "cond",
                                  "checkpoint", "autocast", "literal",
                                  "weight norm"])
def test_strangers_learn(name, graphs_only):
    fn, *args = STRANGERS[name]
    made = compilers.compile(fn, tuple(args), "h100", "all")
    assert [r.name for r in made.rungs if r.tool][-2:] == [
        "inductor-forward", "inductor-backward"]
    halves = [k.name.partition("/")[0] for k in made.kernels]
    assert set(halves) == {"forward", "backward"}
    assert halves == sorted(halves, reverse=True)
    assert not any("cpp" in k.name for k in made.kernels)


def of_no_dtype(x):
    return x + torch.ones(8) * torch.tensor(2.0)


@pytest.mark.parametrize("target", ["cpu", "h100"])
def test_the_readers_default_dtype_and_autocast_travel(target, graphs_only):
    def written(fn, *args):
        made = compilers.compile(fn, args, target)
        eager = compilers.eager(fn, args)
        assert eager[-1].bytes_written == made.kernels[-1].bytes_written
        return eager[-1].bytes_written

    plain = written(of_no_dtype, spec(8)), written(torch.matmul, X, X)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        wide = written(of_no_dtype, spec(8, dtype=torch.float32))
    finally:
        torch.set_default_dtype(before)
    with torch.autocast("cpu", torch.bfloat16):
        low = written(torch.matmul, X, X)
        made = compilers.compile(torch.matmul, (X, X), target, "all")
    assert (wide, low) == (2 * plain[0], plain[1] / 2)
    assert 'tangents_1: "bf16' in next(
        r.text for r in made.rungs if r.name == "joint")
    assert (written(of_no_dtype, spec(8)), written(torch.matmul, X, X)
            ) == plain


@pytest.mark.parametrize("target", ["cpu", "h100"])
def test_the_kernels_of_a_branch_are_what_is_in_it(target, graphs_only):
    """And choosing it is Python's, no kernel."""
    made = compilers.compile(choose, (X,), target)
    assert [sorted(k.ops) for k in made.kernels[-2:]] == [
        ["add", "full", "sin"], ["cos"]]
    assert all(k.author == "compiler" for k in made.kernels)


class Sized(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x)


SIZED = Sized.forward.__code__.co_firstlineno + 1


def own_step(w, x):
    loss = (x @ w).sum()
    return w - torch.autograd.grad(loss, w)[0]


@pytest.mark.parametrize("fn, args, words", [
    *[(fn, (X.long(),), r"torch.where or torch.cond \(line \d+, in <lambda>")
      for fn in (lambda x: x[x > 0],
                 lambda x: torch.masked_select(x, x > 0),
                 lambda x: torch.unique(x),
                 lambda x: torch.unique_consecutive(x),
                 lambda x: torch.bincount(x[0]),
                 lambda x: torch.repeat_interleave(x[0], x[1]),
                 lambda x: torch.combinations(x[0]),
                 lambda x: x.tolist())],
    (own_step, (X, X), "give wrt=, or use torch.func.grad"),
    (lambda x: x.cuda() * 2, (X,), "leave that to target="),
    (lambda x: x + torch.ones(8, device="cuda"), (X,), "leave that to"),
    (Sized(), (X,), rf"\[8, 8\] X \[3, 3\] \(line {SIZED}, in forward\)"),
    (torch.nn.LSTM(8, 4), (X,), "LSTM$"),  # no line: it would be torch's
    (Named(), (X,), "takes 1 positional argument"),
], ids=["boolean", "masked_select", "unique", "unique_consecutive",
        "bincount", "repeat_interleave", "combinations", "tolist",
        "autograd", "cuda", "on cuda", "shapes", "lstm",
        "keywords"])
def test_strangers_that_do_not_are_told_in_one_sentence(fn, args, words):
    with pytest.raises(ValueError, match=words) as caught:
        compilers.compile(fn, args, "h100")
    assert "\n" not in str(caught.value)


def test_a_function_that_calls_a_triton_kernel_says_so():
    from course_utils import kernels

    kernel = kernels.from_source(
        "@triton.jit\ndef double(x):\n"
        "    tl.store(x, 2 * tl.load(x))\n")

    def calls(x):
        kernel[(1,)](x)
        return x

    with pytest.raises(ValueError, match="give ladder that kernel$"):
        compilers.compile(calls, (X,), "h100")


def test_eager_does_not_choose_by_a_value_that_is_not_there():
    with pytest.raises(ValueError, match="values of a tensor"):
        compilers.eager(choose, (X,))


def calls_libraries(x, n):
    return (torch.linalg.cholesky(x), torch.fft.fft(x), x @ x,
            torch._int_mm(n, n), torch.baddbmm(x[None], x[None], x[None]))


def test_each_call_names_its_library():
    made = compilers.compile(calls_libraries, (
        spec(32, 32), spec(32, 32, dtype=torch.int8)), "h100")
    who = {k.name: k.who for k in made.kernels if k.author == "library"}
    assert who == {"linalg_cholesky_ex": "cuSOLVER", "_fft_r2c": "cuFFT",
                   "mm": "cuBLAS", "_int_mm": "cuBLAS", "baddbmm": "cuBLAS"}


def test_what_a_failed_trace_left_harms_no_other(graphs_only):
    def fails(x):
        return torch.func.grad(lambda x: (x * x.sum().item()).sum())(x)

    with pytest.raises(ValueError, match="values of a tensor"):
        compilers.compile(fails, (X,), "h100")
    assert compilers.compile(strange, (X,), "h100").kernels


def test_a_warm_cache_hides_nothing(tmp_path, monkeypatch, graphs_only):
    """Neither ours nor, in the worker that has made it before, torch's."""
    def made():
        found = compilers.compile(chain, (spec(8, 8), spec(8)), "cpu", "all")
        return [(r.name, r.text) for r in found.rungs]

    cold = made()
    assert made() == cold
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "another"))
    assert made() == cold and len(cold) > 7


def test_more_shapes_than_dynamo_recompiles(graphs_only):
    for n in range(2, 2 + 2 * torch._dynamo.config.recompile_limit):
        made = compilers.compile(strange, (spec(n),), "h100")
        assert [r.name for r in made.rungs].count("inductor") == 1


def test_two_look_ups_in_one_kernel_are_two():
    def twice(w, i, j):
        embed = torch.nn.functional.embedding
        return embed(i, w) * 2, embed(j, w) + 1

    args = torch.ones(1000, 64), *(
        torch.zeros(10, dtype=torch.long) for _ in "ij")
    made = compilers.compile(twice, args, "cpu").kernels
    assert sum(k.bytes_read for k in made) == 2 * (10 * 64 * 4 + 10 * 8)


def test_eager_writes_a_mask_once_and_fills_without_reading():
    def put(s, m, u):
        s[m] = u
        return torch.rand_like(s), s.new_zeros(3)

    args = torch.ones(1000, 64), torch.ones(1000, dtype=torch.bool), (
        torch.ones(64))
    for target in ("cpu", "h100"):
        written = [k.bytes_written for k in compilers.compile(
            put, args, target).kernels if k.name == "index_put_"]
        assert written == [256_000]
    read = {k.name: k.bytes_read for k in compilers.eager(put, args)}
    assert read["rand_like"] == read["new_zeros"] == 0
