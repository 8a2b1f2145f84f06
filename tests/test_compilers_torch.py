"""PyTorch's compilers: kernels, bytes, machine code, and isolation."""

import functools
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from course_utils.compilers import torch as compilers  # noqa: E402
from course_utils.compilers import worker  # noqa: E402
from course_utils.host import Missing  # noqa: E402

M, K, N = 512, 1024, 2048


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
    assert list(rungs) == ["python", "fx", "aten", "inductor", "assembly"]
    assert (product.author, product.ops) == ("library", ("addmm",))
    assert product.bytes_read == 2 * (M * K + K * N + N)
    assert product.bytes_written == 2 * M * N
    assert (rest.author, rest.who) == ("compiler", "Inductor")
    assert rest.ops == ("relu",)
    assert rest.bytes_read == rest.bytes_written == 2 * M * N
    assert rungs["inductor"].index("extern_kernels.addmm") < rungs[
        "inductor"].index(f"{rest.name}(buf")
    assert "def example(x, w, b):" in rungs["python"]
    assert "code: return torch.relu(x @ w + b)" in rungs["fx"]


def test_h100_calls_cublas_and_fuses_the_rest():
    rungs, (product, rest) = made(example, "h100")
    assert list(rungs) == ["python", "fx", "aten", "inductor", "ptx", "sass"]
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


def test_weights_do_not_travel():
    weight = torch.nn.Linear(2048, 2048)
    assert len(compilers._packed(weight, (spec(1, 2048),))) < 20_000


@pytest.mark.parametrize("fn, args, words", [
    (example, (spec(4, 5), spec(6, 4), spec(4)),
     ["example(float32[4, 5], float32[6, 4]", "reduction dim"]),
    (lambda x: x if x.sum() > 0 else -x, (spec(4),),
     ["float32[4]", "depends on the values"]),
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


def test_without_a_compiler_the_graphs_still_come(tmp_path):
    code = """
import torch
from course_utils.compilers import torch as compilers
rungs, kernels = compilers.rungs(
    torch.relu, (torch.empty(64, device="meta"),), "cpu")
print(*[r.name for r in rungs], *[k.author for k in kernels])
print(compilers.works("cpu"))
"""
    environment = {k: v for k, v in os.environ.items() if k != "CXX"}
    done = subprocess.run(
        [sys.executable, "-c", code], text=True, capture_output=True,
        env={**environment, "PATH": str(tmp_path),
             "COURSE_CACHE": str(tmp_path)})
    assert done.stdout.splitlines() == [
        "fx aten inductor compiler", str(compilers_missing())], done.stderr


def compilers_missing():
    return Missing("A C++ compiler", "it turns Inductor's C++ into machine "
                   "code", "On Debian: apt install g++")
