"""The ladder: real rungs, real machine code, kernels, passes, bad input."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import course_utils
from course_utils import ir

M, K, N = 512, 1024, 2048
X_BYTES, W_BYTES, B_BYTES, Y_BYTES = M * K * 2, K * N * 2, N * 2, M * N * 2
ABSENT = ("h100", "tpu-v5e")


def relu_xwb(x, w, b):
    return jax.nn.relu(x @ w + b)


def xwb(x, w, b):
    return x @ w + b


def specs(m=M, k=K, n=N, dtype=jnp.bfloat16):
    return tuple(jax.ShapeDtypeStruct(s, dtype)
                 for s in ((m, k), (k, n), (n,)))


@pytest.fixture(scope="module")
def ladders():
    return {target: ir.ladder(relu_xwb, *specs(), target=target)
            for target in ("cpu", *ABSENT)}


@pytest.mark.parametrize("target, last", [
    ("cpu", ("assembly", "library")), ("h100", ("ptx", "sass")),
    ("tpu-v5e", ("llo", "bundles"))])
def test_every_rung_stands(ladders, target, last):
    ladder = ladders[target]
    assert ladder.names[:5] == ("python", "jaxpr", "stablehlo", "hlo",
                                "hlo-optimized")
    assert ladder.names[-2:] == last
    for rung in ladder:
        assert rung.text.strip() and rung.raw and rung.tool, rung.name
        assert rung.seconds >= 0


@pytest.mark.parametrize("target, written", [
    ("cpu", [M * K * 4, K * N * 4, M * N * 4, Y_BYTES]),
    ("h100", [Y_BYTES]), ("tpu-v5e", [Y_BYTES])])
def test_kernels_and_their_bytes(ladders, target, written):
    kernels = ladders[target].kernels
    assert [k.bytes_written for k in kernels] == written
    assert sum("maximum" in k.ops for k in kernels) == 1
    if len(kernels) == 1:
        assert kernels[0].bytes_read == X_BYTES + W_BYTES + B_BYTES
        assert kernels[0].author == "compiler"
        assert {"add", "maximum"} <= set(kernels[0].ops)
    else:  # the product is handed to a library, in f32
        library = [k for k in kernels if k.author == "library"]
        assert [k.ops for k in library] == [("dot",)]


def test_registers_come_from_ptxas(ladders):
    kernel, = ladders["h100"].kernels
    assert 16 <= kernel.registers <= 255 and kernel.spills == 0
    assert kernel.shared_bytes >= 0


CODE = {"cpu": "assembly", "h100": "sass", "tpu-v5e": "bundles"}


@pytest.mark.parametrize("target", CODE)
def test_doubling_n_changes_the_machine_code(target):
    # Small, so that every kernel is generated; on the CPU 3 columns.
    sizes = (3, 3, 3) if target == "cpu" else (64, 64, 128)
    wider = (*sizes[:2], 2 * sizes[2])
    one, two = (ir.ladder(relu_xwb, *specs(*s, jnp.float32),
                          target=target)[CODE[target]].text
                for s in (sizes, wider))
    assert one != two


@pytest.mark.parametrize("target, relu", [
    ("cpu", r"vmaxss|vmaxps"), ("h100", r"MNMX|FMNMX|HMNMX"),
    ("tpu-v5e", r"vmax\.f32")])
def test_deleting_the_relu_removes_its_instruction(target, relu):
    sizes = (3, 3, 3) if target == "cpu" else (64, 64, 128)
    texts = [ir.ladder(fn, *specs(*sizes, jnp.float32),
                       target=target)[CODE[target]].text
             for fn in (relu_xwb, xwb)]
    assert re.search(relu, texts[0])
    assert not re.search(relu, texts[1])


@pytest.mark.parametrize("n, fmas", [(2, 8), (3, 27)])
def test_small_products_are_emitted_fma_by_fma(n, fmas):
    square = jax.ShapeDtypeStruct((n, n), jnp.float32)
    ladder = ir.ladder(jnp.matmul, square, square)
    assert len(re.findall("vfmadd", ladder["assembly"].text)) == fmas
    assert ladder.kernels[0].author == "compiler"


def test_cpu_code_is_capped_to_avx2():
    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    code = ir.ladder(lambda x: x * 2 + 1, square)["assembly"].text
    assert "ymm" in code and "zmm" not in code


def test_passes_find_the_fusion():
    changed = ir.passes(relu_xwb, *specs(), target="cpu")
    names = [p.name for p in changed]
    assert {"fusion", "scheduling"} <= set(names)
    first = next(p for p in changed if re.search(
        r"fusion\(.*kLoop", p.text))
    assert first.name == "fusion"
    assert len(ir.passes(relu_xwb, *specs(), changed=False)) > len(names)


def test_donation_lets_the_result_take_over_a_buffer():
    square = specs(256, 256, 256)
    plain = ir.ladder(relu_xwb, *square)
    given = ir.ladder(relu_xwb, *square, donate=(0,))
    assert plain.memory["alias"] == 0
    assert given.memory["alias"] == 256 * 256 * 2


def test_gradient_climbs_along():
    ladder = ir.ladder(relu_xwb, *specs(64, 64, 64), wrt="all")
    forward = ir.ladder(relu_xwb, *specs(64, 64, 64))
    assert ladder["jaxpr"].text.count("dot_general[") == 3
    assert forward["jaxpr"].text.count("dot_general[") == 1


def test_sharded_over_four_chips():
    mesh = AbstractMesh((4,), ("chips",))

    def split(shape, *axes):
        return jax.ShapeDtypeStruct(
            shape, jnp.bfloat16,
            sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    rows = ir.ladder(relu_xwb, split((M, K), "chips"), split((K, N)),
                     split((N,)), target="tpu-v5e")
    assert not any("all-" in k.name for k in rows.kernels)
    inner = ir.ladder(relu_xwb, split((M, K), None, "chips"),
                      split((K, N), "chips"), split((N,)), target="tpu-v5e")
    reduce, = [k for k in inner.kernels if k.ops == ("all-reduce",)]
    assert reduce.bytes_written == Y_BYTES
    with pytest.raises(ValueError, match="smaller mesh"):
        big = AbstractMesh((8,), ("chips",))
        ir.ladder(relu_xwb, *(jax.ShapeDtypeStruct(
            s.shape, s.dtype, sharding=NamedSharding(big, PartitionSpec()))
            for s in specs()), target="tpu-v5e")


def test_compare_backends(ladders):
    table = ir.compare_backends(relu_xwb, *specs())
    assert list(dict.fromkeys(table.index.get_level_values(0))) == [
        "XLA, cpu", "XLA, h100", "XLA, tpu-v5e"]
    assert table.loc["XLA, tpu-v5e"].bytes_read.sum() == (
        X_BYTES + W_BYTES + B_BYTES)


def test_targets_says_works_or_why_not():
    table = ir.targets()
    assert (table["JAX"].loc[["cpu", "h100", "tpu-v5e", "tpu7x"]]
            == "works").all()
    assert (table["torch"].loc[["cpu", "h100"]] == "works").all()
    assert table["Triton"].loc["mi300x"] == "works"
    assert table["JAX"].loc["mi300x"] != "works"
    assert (table.map(len) > 0).all(axis=None)


def test_text_is_the_same_twice(ladders):
    for target, ladder in ladders.items():
        again = ir.ladder(relu_xwb, *specs(), target=target, fresh=True)
        for one, two in zip(ladder, again, strict=True):
            assert one.text == two.text, (target, one.name)


def test_diff_and_save(ladders, tmp_path):
    ladder = ladders["tpu-v5e"]
    diff = ladder.diff("hlo", "hlo-optimized").text
    assert re.search(r"^-.*dot\(", diff, re.M)
    assert re.search(r"^\+.*convolution\(", diff, re.M)
    files = sorted(p.name for p in ladder.save(tmp_path).iterdir())
    assert len(files) == len(ladder)
    assert (tmp_path / files[-1]).read_text() == ladder["bundles"].raw


def test_nothing_of_the_reader_changes(ladders):
    import os
    before = dict(os.environ)
    flags = jax.config.values.copy()
    ir.ladder(relu_xwb, *specs(32, 32, 32), target="h100", fresh=True)
    assert dict(os.environ) == before and jax.config.values == flags
    assert {d.platform for d in jax.devices()} == {"cpu"}


@pytest.mark.parametrize("call, error, words", [
    (lambda: ir.ladder(relu_xwb, *specs(), target="h10"),
     ValueError, "target='h10'.*h100"),
    (lambda: ir.ladder(relu_xwb, *specs(), target="mi300x"),
     ValueError, "mi300x.*Triton can"),
    (lambda: ir.ladder(3, *specs()), TypeError, "fn is a int"),
    (lambda: ir.ladder(relu_xwb, specs()[0], specs()[0], specs()[2]),
     ValueError, r"relu_xwb\(x: bfloat16\[512,1024\].*contracting"),
    (lambda: ir.ladder(lambda x: x if x[0, 0] > 0 else -x, specs()[0]),
     ValueError, "lax.cond"),
    (lambda: ir.ladder(relu_xwb, *specs(), wrt=7), ValueError, "^wrt=7"),
    (lambda: ir.ladder(relu_xwb, *specs(), BLOCK=8), TypeError, "BLOCK"),
    (lambda: ir.passes(relu_xwb, *specs(), target="v5"), ValueError, "v5"),
])
def test_bad_input_gets_one_sentence(call, error, words):
    with pytest.raises(error, match=words) as caught:
        call()
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


def test_unknown_rung_names_the_nearest(ladders):
    with pytest.raises(KeyError, match="stablehlo"):
        ladders["cpu"]["stable-hlo"]


def test_public_name():
    assert course_utils.ir is ir


SQUARE = jax.ShapeDtypeStruct((64, 64), jnp.float32)
STACK = jax.ShapeDtypeStruct((8, 64, 64), jnp.float32)


def loop(x, w):
    return jax.lax.fori_loop(
        0, 64, lambda k, y: y + x[:, k, None] * w[k], jnp.zeros((64, 64)))


def scan(x):
    return jax.lax.scan(lambda c, t: (c @ t, c.sum()), x[0], x)


def branch(x):
    return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x + 1, x)


@pytest.mark.parametrize("target", ["cpu", "h100", "tpu-v5e"])
@pytest.mark.parametrize("fn, args, ops", [
    (loop, (SQUARE, SQUARE), {"multiply", "compare"}),
    (scan, (STACK,), {"compare"}), (branch, (SQUARE,), {"add"})])
def test_control_flow_climbs(fn, args, ops, target):
    ladder = ir.ladder(fn, *args, target=target)
    assert ladder.machine_code
    found = {op for k in ladder.kernels for op in k.ops}
    assert ops <= found
    if fn is not loop:
        assert found & {"dot", "convolution"}
    assert not any("tuple" in k.ops or "while" in k.ops
                   for k in ladder.kernels)


@pytest.mark.parametrize("target", ["cpu", "tpu-v5e"])
def test_same_optimized_hlo_as_the_public_path(target):
    """What travels as StableHLO compiles to what jax.jit compiles to."""
    from course_utils.compilers import text, worker, xla

    public = worker.call(
        "xla", "tests.public_path:optimized", target,
        environment=xla._environment(target))
    ours = ir.ladder(relu_xwb, *specs(), target=target)["hlo-optimized"]

    def shape(hlo):  # the module's own line and all names apart
        return re.sub(r"%[\w.-]+|\w+\.\d+:|, sharding={replicated}", "",
                      hlo.partition("\n")[2])

    assert shape(text.canonical(public)) == shape(ours.text)
