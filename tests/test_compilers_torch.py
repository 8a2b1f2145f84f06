"""PyTorch's compilers: kernels, bytes, machine code, and isolation."""

import functools
import importlib
import os
import shutil
import subprocess
import sys

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


@functools.cache
def made(fn, target, n=N):
    """Rung texts by name, and kernels, compiled in this very run."""
    args = arguments(n) if fn is example else (spec(64, n), spec(n))
    rungs, kernels = compilers.rungs(fn, args, target, fresh=True)
    return {r.name: r.text for r in rungs}, kernels


def compiled(fn, *args):
    """Kernels and fx text for an H100, which needs no C++ compiler."""
    rungs, kernels = compilers.rungs(fn, args, "h100", fresh=True)
    return kernels, next(r.text for r in rungs if r.name == "fx")


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

    _, kernels = compilers.rungs(fn, (spec(4, 4),), "h100", fresh=True)
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
    (lambda w, i: w[i] + w[i + 1], (spec(9), INDEX), 8 + 36)],
    ids=["slice", "rows", "in-place", "gather"])
def test_what_is_only_ordered_is_not_read(fn, args, read):
    (kernel,), _ = compiled(fn, *args)
    assert (kernel.author, kernel.bytes_read) == ("compiler", read)


def test_a_check_is_no_kernel_and_picking_a_result_no_op():
    kernels, _ = compiled(torch.linalg.cholesky, spec(8, 8))
    assert [k.name for k in kernels] == ["linalg_cholesky_ex"]
    assert compilers.eager(torch.linalg.cholesky, (spec(8, 8),)) == kernels
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
        return compilers.rungs(typed(source, file)(), (x,), "h100")[1]

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


def test_what_torch_compile_wrapped_is_unwrapped():
    found = compilers.eager(torch.compile(chain), (spec(8, 8), spec(8)))
    assert [k.name for k in found] == ["mul", "add", "relu"]
    linear = torch.compile(torch.nn.Linear(8, 8))
    assert [k.name for k in compilers.eager(linear, (spec(8, 8),))] == [
        "addmm"]


def test_a_tensor_that_is_not_dense_is_refused():
    for run in (compilers.eager, lambda *a: compilers.rungs(*a, "cpu")):
        with pytest.raises(ValueError, match=r"layout .*\.to_dense\(\)"):
            run(lambda x: x * 2, (torch.eye(4).to_sparse(),))


def test_each_gpu_is_itself_and_the_t4_has_no_bf16():
    for target, number in (("h100", 90), ("t4", 75)):
        assert f"cc={number}" in made(chain, target, 32)[0]["inductor"]
    with pytest.raises(ValueError, match="BF16"):
        compilers.rungs(example, arguments(), "t4", fresh=True)


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
        compilers.rungs(fn, args, "cpu", fresh=True)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


def test_unknown_target():
    with pytest.raises(ValueError, match="target='tpu'.*h100"):
        compilers.rungs(example, arguments(), "tpu")


class Deadly:
    def __reduce__(self):
        return os._exit, (3,)


def test_a_worker_that_dies_is_an_error():
    with pytest.raises(worker.CompilerError, match="exit code 3"):
        compilers.rungs(lambda x, _: x + 1, (spec(4), Deadly()), "cpu",
                        fresh=True)


def test_nothing_changes_in_this_process():
    import torch._inductor.config as config

    def state():
        return (config.get_config_copy(), dict(os.environ),
                torch.cuda.is_available(), torch.get_num_threads(),
                torch.cuda.get_device_properties)

    before = state()
    compilers.rungs(chain, (spec(4, 4), spec(4)), "h100", fresh=True)
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
    assert compilers.works("cpu").startswith("objdump is missing: it dis")

    class Refuses:
        def find_spec(self, name, path=None, target=None):
            if name == "triton":
                raise ImportError(name)

    monkeypatch.setattr(sys, "meta_path", [Refuses(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    with pytest.raises(Missing, match="pip install triton"):
        compilers.rungs(chain, (spec(4), spec(4)), "h100")


def test_without_a_compiler_the_graphs_still_come(tmp_path):
    code = """
import torch
from course_utils.compilers import torch as compilers
rungs, kernels = compilers.rungs(
    torch.relu, (torch.empty(64, device="meta"),), "cpu")
print(*[r.name for r in rungs], *[k.author for k in kernels])
"""
    environment = {k: v for k, v in os.environ.items() if k != "CXX"}
    done = subprocess.run(
        [sys.executable, "-c", code], text=True, capture_output=True,
        env={**environment, "PATH": str(tmp_path),
             "COURSE_CACHE": str(tmp_path)})
    assert done.stdout == "fx guards aten inductor compiler\n", done.stderr
