"""The ladder: real rungs, real machine code, kernels, passes, bad input."""

import functools
import importlib.machinery
import inspect
import os
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import pallas_call
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import course_utils
from course_utils import ir
from course_utils.compilers import recorded, worker

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


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


SQUARE = spec(64, 64)


def pallas(x):
    return pallas_call(lambda x, y: None, SQUARE)(x)


def refuses(x):
    raise NotImplementedError


async def later(x):
    return x


def prints(x):
    jax.debug.print("{}", x)
    return x + 1


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
    assert all(ladder[name].seconds > 0 for name in ladder.names[1:5])


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


def test_shared_memory_counts_what_the_launch_asks_for():
    """XLA's Triton kernels keep their tiles there, and ptxas knows nothing.
    """
    ladder = ir.ladder(lambda x, w: jnp.maximum(x @ w, 0),
                       *specs(512, 512, 512)[:2], target="h100")
    product = ladder.kernels[0]
    assert ".extern .shared" in ladder["ptx"].text
    assert product.who == "XLA (Triton)" and product.shared_bytes > 0


def test_a_local_stack_is_no_spill():
    """ptxas reports both as local memory: the sine of large angles."""
    ladder = ir.ladder(jnp.sin, spec(64, 64), target="h100")
    assert "__local_depot" in ladder["ptx"].text
    assert ladder.kernels[0].spills == 0 < ladder.kernels[0].registers


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


def test_passes_come_late_and_go_where_no_flag_says(tmp_path, monkeypatch):
    """XLA_FLAGS would be too late by now, and would go on filling it."""
    assert jax.jit(jnp.sin)(1.0) < 1  # the back end is in use
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to={tmp_path}")
    for fresh in (True, False):  # no warm cache hides what there is
        assert ir.passes(relu_xwb, *specs(32, 32, 32), fresh=fresh)
    assert not [*tmp_path.iterdir()]


def test_a_helper_that_changed_is_seen():
    scope = {}
    exec("import jax, jax.numpy as jnp\ndef h(x): return jnp.sin(x)\n"
         "def f(x): return h(x)\n@jax.jit\ndef g(x): return h(x)", scope)
    for name in "fg":
        assert ir.ladder(scope[name], SQUARE).kernels[0].ops == ("sine",)
    exec("def h(x): return jnp.tan(x)", scope)
    for name in "fg":
        assert ir.ladder(scope[name], SQUARE).kernels[0].ops == ("tan",)
        assert "tan(" in ir.passes(scope[name], SQUARE)[-1].text


def tripled(fn):
    @functools.wraps(fn)
    def wrapper(*args):
        return 3 * fn(*args)

    return wrapper


class Jitted:
    by = 7.0

    @functools.partial(jax.jit, static_argnums=0)
    def apply(self, x):
        return x * self.by


def sines(x):
    return jnp.sin(x).sum()


@pytest.mark.parametrize("fn, said", [
    (jax.jit(sines), r"\bsin\b"), (jax.grad(jax.jit(sines)), r"\bcos\b"),
    (jax.vmap(jax.jit(sines)), r"reduce_sum\[axes=\(1,\)|f32\[64\]"),
    (jax.checkpoint(jax.jit(sines)), "remat|checkpoint"),
    (tripled(jax.jit(sines)), r"mul 3\.0"),
    (Jitted().apply, r"7\.0"), (jax.jit(jax.grad(sines)), r"\bcos\b"),
    (functools.partial(jax.jit(lambda n, x: x * n, static_argnums=0), 7.0),
     r"7\.0")], ids=["itself", "grad", "vmap", "remat", "wrapped", "method",
                     "jit", "partial"])
def test_what_is_made_of_a_jit_is_not_taken_for_it(fn, said):
    assert re.search(said, ir.ladder(fn, SQUARE)["jaxpr"].text)
    assert len(ir.ladder(fn, SQUARE, wrt=0)["jaxpr"].text) > len(
        ir.ladder(fn, SQUARE)["jaxpr"].text)


def scaled(n, x):
    return jnp.sin(x) * n


@pytest.mark.parametrize("wrt", [None, 0])
@pytest.mark.parametrize("fn", [
    jax.jit(functools.partial(scaled, 3)), functools.partial(scaled, 3),
    functools.partial(jax.jit(scaled), 3)], ids=["jit of a partial", "partial",
                                                 "partial of a jit"])
def test_whatever_binds_an_argument_the_code_is_found(fn, wrt):
    ladder = ir.ladder(fn, SQUARE, wrt=wrt)
    assert ladder["python"].text == inspect.getsource(scaled)
    sines = ladder.origin("stablehlo", r"\.sine")
    assert "jnp.sin(x) * n" in sines["code"].iloc[0]


def test_donation_keeps_the_options_of_the_readers_jit():
    plain = jax.jit(lambda x, unused, n: x.reshape(n), static_argnums=2)
    kept = jax.jit(lambda x, unused, n: x.reshape(n), static_argnums=2,
                   keep_unused=True)
    one, two = (ir.ladder(fn, SQUARE, SQUARE, 4096, donate=(0,)).memory
                for fn in (plain, kept))
    assert one["alias"] == two["alias"] == 64 * 64 * 4
    assert two["argument"] == 2 * one["argument"]


def test_options_of_the_readers_jit_reach_the_compiler():
    def fn(x):
        return jnp.sin(x) * 2

    apart = jax.jit(fn, compiler_options={"xla_disable_hlo_passes": "fusion"})
    for wrt in (None, 0):
        one, two = (ir.ladder(f, SQUARE, wrt=wrt).kernels
                    for f in (fn, apart))
        assert any("sine" in k.ops and len(k.ops) > 1 for k in one)
        assert all(len(k.ops) == 1 for k in two)


@pytest.mark.parametrize("target, fn", [
    ("h100", lambda x, i: x[i]),  # the gather is a module of its own
    ("tpu-v5e", lambda x, i: jnp.abs(jnp.fft.fft(x))[i])])  # cloned half-way
def test_every_pass_is_over_the_whole_function(target, fn):
    every = ir.passes(fn, spec(64), spec(5, dtype=jnp.int32), target=target,
                      changed=False)
    assert not every[0].changed and len(every) > 40
    for one in every:
        head, entry = (re.search(pattern, one.text, re.M)[1] for pattern in (
            r"^HloModule (\w+)", r"entry_computation_layout=\{\((.*?)\)->"))
        assert head == "jit__lambda" and entry.startswith("f32[64]")
    if target == "tpu-v5e":  # before the clone and after it
        names = [one.name for one in every]
        assert names.index("fft_expander") < names.index("tpu_fusion")


def test_an_attribute_that_changed_is_seen():
    class Scaled:
        by = 2.0

        def __call__(self, x):
            return x * self.by

    scaled = Scaled()
    assert "2.0" in ir.ladder(scaled, SQUARE)["jaxpr"].text
    scaled.by = 3.0
    assert "3.0" in ir.ladder(scaled, SQUARE)["jaxpr"].text


def test_an_update_in_place_moves_the_update():
    def put(cache, rows, at):
        return lax.dynamic_update_slice(cache, rows, (at, 0))

    args = spec(10_000, 64), spec(4, 64), spec(dtype=jnp.int32)
    ladder = ir.ladder(put, *args, donate=(0,))
    kernel, = ladder.kernels
    assert ladder.memory["alias"] == 10_000 * 64 * 4
    assert kernel.bytes_read == 4 * 64 * 4 + 4
    assert kernel.bytes_written == 4 * 64 * 4
    copy, again = ir.ladder(put, *args).kernels  # the caller keeps its own
    assert copy.bytes_written == 10_000 * 64 * 4
    assert again.bytes_written == 4 * 64 * 4


def test_gradient_past_a_static_argument():
    reshaped = jax.jit(lambda x, n: x.reshape(n) * 2, static_argnums=1)
    for wrt in (0, "all"):
        text = ir.ladder(reshaped, SQUARE, 4096, wrt=wrt)["stablehlo"].text
        assert re.search(r"-> \(tensor<4096xf32>.*, tensor<64x64xf32>", text)


def test_donation_lets_the_result_take_over_a_buffer():
    square = specs(256, 256, 256)
    plain = ir.ladder(relu_xwb, *square)
    given = ir.ladder(relu_xwb, *square, donate=(0,))
    assert plain.memory["alias"] == 0
    assert given.memory["alias"] == 256 * 256 * 2


def test_numbers_of_arguments_may_be_one_or_a_list():
    for fn in (sines, jax.jit(sines)):
        assert ir.ladder(fn, SQUARE, wrt=[0])["jaxpr"].text == ir.ladder(
            fn, SQUARE, wrt=0)["jaxpr"].text
    for fn in (jnp.sin, lambda x: x + 1):
        for donate in (0, [0], (0,)):
            assert ir.ladder(fn, SQUARE, donate=donate).memory["alias"]


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
    full = tmp_path / "full"
    full.write_text("mine")
    with pytest.raises(ValueError, match="full' is a file"):
        ladder.save(full)
    assert full.read_text() == "mine"


@pytest.mark.parametrize("target", ["cpu", *ABSENT])
def test_nothing_of_the_reader_changes(target, capfd):
    before = dict(os.environ)
    flags = jax.config.values.copy()
    ir.ladder(relu_xwb, *specs(32, 32, 32), target=target, fresh=True)
    assert dict(os.environ) == before and jax.config.values == flags
    assert {d.platform for d in jax.devices()} == {"cpu"}
    assert capfd.readouterr() == ("", "")  # plugins and libtpu would speak
    left = [files for process in worker._workers.values()
            if process.kind == "xla" for *_, files in os.walk(process.scratch)]
    assert left and not any(left)  # of tens of MB


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
    (lambda: ir.ladder(relu_xwb, *specs(), wrt=[0, 3]), ValueError,
     r"^wrt=\[0, 3\].*from 0 to 2, or"),
    (lambda: ir.ladder(relu_xwb, *specs(), donate=7), ValueError,
     "^donate=7.*from 0 to 2"),
    (lambda: ir.ladder(relu_xwb, *specs(), donate="x"), ValueError,
     "^donate='x'"),
    (lambda: ir.ladder(relu_xwb, *specs(), BLOCK=8), TypeError, "BLOCK"),
    (lambda: ir.passes(relu_xwb, *specs(), target="v5"), ValueError, "v5"),
    (lambda: ir.ladder(jnp.sin, SQUARE, target="gpu"), ValueError, "b200"),
    (lambda: ir.ladder(lambda x, n: jnp.zeros(n), SQUARE, 3), ValueError,
     r"n: 3\).*functools.partial"),
    (lambda: ir.ladder(lambda x, mode: x, SQUARE, "up"), ValueError,
     "at path mode.*functools.partial"),
    (lambda: ir.ladder(lambda x: np.sin(x), SQUARE), ValueError, "jax.numpy"),
    (lambda: ir.ladder(lambda x: x[0, 0].item(), SQUARE), ValueError,
     "lax.cond"),
    (lambda: ir.ladder(lambda x: "y", SQUARE), ValueError, "type <class 'str"),
    (lambda: ir.ladder(refuses, SQUARE), ValueError, "NotImplementedError.$"),
    (lambda: ir.ladder(pallas, SQUARE, target="h100"), ValueError,
     "climbs for the TPUs alone"),
    (lambda: ir.ladder(prints, SQUARE, target="h100"), ValueError,
     "the cpu only"),
    (lambda: ir.ladder(np.sin, SQUARE), ValueError, "use jax.numpy"),
    (lambda: ir.ladder(later, SQUARE), TypeError, "later is an async"),
    (lambda: ir.ladder(jnp.sin, SQUARE)["hlo"].show("("), ValueError,
     "^wanted='\\('"),
    (lambda: ir.ladder(xwb, *specs()).origin("hlo", "("), ValueError,
     "^wanted='\\('"),
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




def loop(x, w):
    return jax.lax.fori_loop(
        0, 64, lambda k, y: y + x[:, k, None] * w[k], jnp.zeros((64, 64)))


def branch(x):
    return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x + 1, x)


@pytest.mark.parametrize("target", ["cpu", "h100", "tpu-v5e"])
@pytest.mark.parametrize("fn, args, ops", [
    (loop, (SQUARE, SQUARE), {"multiply", "compare"}),
    (branch, (SQUARE,), {"add"})])
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


# Strangers' functions: everything here climbs.

def selective_scan(x, delta, a, b, c):
    """Mamba's recurrence: x and delta (L, D), a (D, N), b and c (L, N)."""
    def step(h, now):
        x, delta, b, c = now
        h = jnp.exp(delta[:, None] * a) * h + (delta * x)[:, None] * b
        return h, h @ c

    return lax.scan(step, jnp.zeros(a.shape), (x, delta, b, c))[1]


def router(x, w, experts):
    """The two best of the experts for each token."""
    gates, chosen = lax.top_k(jax.nn.softmax(x @ w), 2)
    made = jnp.einsum("td,edf->tef", x, experts)
    picked = jnp.take_along_axis(made, chosen[..., None], 1)
    return jnp.einsum("tk,tkf->tf", gates, picked)


def rope(x):
    n, d = x.shape
    angle = jnp.arange(n)[:, None] / 10000 ** (jnp.arange(0, d, 2) / d)
    a, b = x[:, ::2], x[:, 1::2]
    return jnp.stack([a * jnp.cos(angle) - b * jnp.sin(angle),
                      a * jnp.sin(angle) + b * jnp.cos(angle)], -1)


def convolve(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME")


def cholesky(a):
    return jnp.linalg.cholesky(a @ a.T + jnp.eye(8))


def spectrum(x):
    return jnp.abs(jnp.fft.fft(x))


STRANGERS = [
    (selective_scan, (spec(8, 16), spec(8, 16), spec(16, 4), spec(8, 4),
                      spec(8, 4)), "exponential"),
    (router, (spec(8, 16), spec(16, 4), spec(4, 16, 8)), "divide"),
    (rope, (spec(8, 16),), "sine"),
    (convolve, (spec(1, 4, 8, 8), spec(8, 4, 3, 3)),
     "convolution|__cudnn|eigen_conv"),
    (cholesky, (spec(8, 8),), "holesky|potrf"),
    (spectrum, (spec(64),), "fft|sine"),  # on a TPU, a product with sines
]


@pytest.mark.parametrize("target", ["cpu", *ABSENT])
@pytest.mark.parametrize("fn, args, op", STRANGERS, ids=lambda part: getattr(
    part, "__name__", ""))
def test_strangers_climb(fn, args, op, target):
    ladder = ir.ladder(fn, *args, target=target)
    assert ladder.machine_code
    assert re.search(op, " ".join(o for k in ladder.kernels for o in k.ops))
    lines, start = inspect.getsourcelines(fn)
    for name in ("jaxpr", "stablehlo", "hlo", "hlo-optimized"):
        rung = ladder[name]
        assert len(rung.origins) == len(rung.raw.splitlines())
        assert {0} < set(rung.origins) <= {
            0, *range(start, start + len(lines))}


class Layer:
    def apply(self, x):
        return jnp.tanh(x)

    def __call__(self, x):
        return jnp.cos(x)


@jax.custom_vjp
def doubling(x):
    return jnp.sin(x)


doubling.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * 1234,))


def typed():
    scope = {}
    exec("import jax.numpy as jnp\ndef f(x):\n    return jnp.exp(x)", scope)
    return scope["f"]


def on_one_device(x):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))
    return jax.shard_map(lambda x: lax.psum(x, "i"), mesh=mesh, in_specs=(
        PartitionSpec("i"),), out_specs=PartitionSpec())(x)


SMALL = spec(8, 8)
KEY = jax.random.key(0)


@pytest.mark.parametrize("fn, args, said", [
    (typed(), (SMALL,), "exponential"),
    (functools.partial(lambda n, x: x.reshape(n), 64), (SMALL,), "<64xf32>"),
    (functools.partial(lambda x, *, n: x[:n], n=3), (SMALL,), "<3x8xf32>"),
    (Layer().apply, (SMALL,), "tanh"), (Layer(), (SMALL,), "cosine"),
    (lambda p, x: {"y": x @ p["w"] + p["b"], "none": None},
     ({"w": SMALL, "b": spec(8)}, SMALL), "result\\['y'\\]"),
    (lambda xs: sum(xs), ([SMALL, SMALL],), "%arg1: tensor<8x8xf32>"),
    (lambda x, n: x * n, (SMALL, 3), "tensor<i32>"),
    (jax.jit(lambda x, n: x.reshape(n), static_argnums=1), (SMALL, 64),
     "<64xf32>"),
    (lambda a, b: lax.dot(a, b, preferred_element_type=jnp.int32),
     (spec(64, 64, dtype=jnp.int8),) * 2, "64xi8>.*64xi32>"),
    (lambda a, b: lax.dot(a, b, preferred_element_type=jnp.float32),
     (spec(64, 64, dtype=jnp.float8_e4m3fn),) * 2, "f8E4M3FN"),
    (lambda x: x @ x.T, (spec(0, 8),), "<0x8xf32>"),
    (lambda x: None, (SMALL,), "return$"),
    (lambda x: x, (SMALL,), "return %arg0"), (lambda: 1.0, (), "1.0"),
    (lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c * 2, x),
     (SMALL,), "while"),
    (jnp.sort, (SMALL,), "sort"), (lambda x: lax.top_k(x, 2), (SMALL,),
                                   "top_k"),
    (lambda k: jax.random.bits(k, (8,)), (KEY,), "shift_left|xor"),
    (jax.grad(lambda x: doubling(x).sum()), (SMALL,), "1.234"),
    (jax.vmap(jax.grad(lambda x: jnp.sin(x).sum())), (SMALL,), "cosine"),
    (on_one_device, (SMALL,), "sdy|all_reduce"),
    (prints, (SMALL,), "callback")])
def test_odd_functions_climb(fn, args, said):
    ladder = ir.ladder(fn, *args)
    assert re.search(said, ladder["stablehlo"].text, re.M)
    assert ladder["hlo-optimized"].tool
    shown = "".join(ladder[name].text for name in ("stablehlo", "hlo"))
    assert not re.search(r"\bloc\(|metadata=|StackFrames", shown)
    assert str(ladder) and ladder._repr_html_()


def test_wider_types_climb_where_the_reader_allows_them():
    assert "f64" not in ir.ladder(jnp.sin, SMALL)["stablehlo"].text
    with jax.enable_x64(True):
        ladder = ir.ladder(lambda x: x + 1, spec(8, dtype=jnp.float64))
    assert "f64" in ladder["stablehlo"].text and ladder.machine_code


def test_a_name_is_escaped_wherever_it_shows():
    def fn(x):
        return x + 1

    fn.__name__ = fn.__qualname__ = "<img onerror=1>"
    ladder = ir.ladder(fn, SMALL)
    assert "<img onerror" in str(ladder)
    for page in (ladder._repr_html_(), ladder["jaxpr"]._repr_html_()):
        assert "<img" not in page
    with pytest.raises(ValueError, match="<img onerror=1>"):
        ir.ladder(fn, SMALL, SMALL)


def test_a_captured_array_does_not_flood_the_text():
    values = np.random.default_rng(0).random((512, 512), "float32")
    ladder = ir.ladder(lambda x: x @ values, spec(4, 512))
    assert all(len(rung.text) < 2_000 for rung in ladder)
    assert len(ladder["stablehlo"].raw) > 2 * values.nbytes
    assert re.search(r"dot.*constant|constant\(\{\.\.\.\}\)",
                     ladder["hlo"].text)
    assert ladder.origin("hlo", r"\bdot\(").python.item() == at(
        test_a_captured_array_does_not_flood_the_text, "lambda x")


def test_captured_arrays_are_told_apart_by_the_cache(empty_cache):
    texts = {ir.ladder(lambda x, v=v: x * np.array(v), spec(400))[
        "llvm-ir"].text for v in ([2.0, 3.0] * 200, [*range(400)])}
    assert len(texts) == 2


def test_kernels_of_a_gpu_stand_in_the_order_of_the_schedule():
    """XLA's threads finish in any order: it varied from run to run."""
    ladder = ir.ladder(*STRANGERS[3][:1], *STRANGERS[3][1], target="h100",
                       fresh=True)
    names = [re.sub(r"[.-]", "_", k.name) for k in ladder.kernels]
    found = re.findall(r"\.entry (\w+)", ladder["ptx"].text)
    assert len(found) == 3
    assert found == [name for name in names if name in found]


def test_layers_alike_share_a_kernel_and_its_registers():
    """XLA compiles one of them, and under the name of one."""
    def layers(x, *weights):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.sort(x)

    ladder = ir.ladder(layers, SQUARE, SQUARE, SQUARE, SQUARE, target="h100")
    compiled = re.findall(r"\.entry (\w+)", ladder["ptx"].text)
    assert len(compiled) < len(ladder.kernels)
    assert all(k.registers > 0 for k in ladder.kernels)
    layered = {k.registers for k in ladder.kernels if "tanh" in k.ops}
    assert len(layered) == 1


def test_bundles_and_slots(ladders):
    ladder = ladders["tpu-v5e"]
    kernel, = ladder.kernels
    program = ladder["bundles"].text.split("\n// ")[0]
    bundles = re.findall(r"^ *(?:0x)?[0-9a-f]+ .*?: .*?\{(.*)", program, re.M)
    assert kernel.bundles == len(bundles) > 1000
    stores = sum(" vst " in bundle for bundle in bundles)
    assert kernel.slots["VSTORE"] == pytest.approx(stores / len(bundles))
    assert kernel.slots["MXU"] > 0.8 > kernel.slots["VALU"] > 0.3
    without = ir.ladder(lambda x: x + 1, spec(512, 512), target="tpu-v5e")
    assert without.kernels[0].slots["MXU"] == 0


# From a line of a rung back to a line of this file.

def layered(x, w, b):
    product = x @ w
    shifted = product + b
    return jax.nn.relu(
        shifted)


def at(fn, words):
    lines, start = inspect.getsourcelines(fn)
    return start + next(n for n, line in enumerate(lines) if words in line)


@pytest.mark.parametrize("target", ["cpu", *ABSENT])
def test_every_rung_links_back_to_the_python(target):
    ladder = ir.ladder(layered, *specs(), target=target)
    for name in ladder.names[1:5]:
        for wanted, words in ((r"[\s.](dot|convolution)(_general)?[\s(\[]",
                               "x @ w"), (r"[\s.]max(imum)?[\s(]", "nn.relu")):
            table = ladder.origin(name, wanted)
            assert at(layered, words) in set(table.python), (name, words)
            assert set(table.python) <= {0, at(layered, words)}
            for row in table[table.python > 0].itertuples():
                assert words in row.code
                assert row.text == ladder[name].text.splitlines()[
                    row.Index - 1].strip()
    code = ladder.origin(ladder.names[5])  # where the kernel begins
    kernel = ladder.kernels[-1].name.replace(".", "_")
    assert all(kernel in text.replace(".", "_")
               for text in code.text[code.python > 0])


def test_a_helper_of_another_file_counts_where_it_is_called():
    scope = {}
    exec(compile("import jax.numpy as jnp\n\ndef double(x):\n"
                 "    return jnp.sin(x) * 2\n", "/lib/helper.py", "exec"),
         scope)

    def fn(x):
        y = x + 1
        return scope["double"](y)

    ladder = ir.ladder(fn, SMALL)
    assert set(ladder.origin("jaxpr", r"\bsin ").python) == {0}  # not told
    for name in ladder.names[2:5]:
        table = ladder.origin(name, r"\bsine?[ (]")
        assert at(fn, "double") in set(ladder.origin(name).python)
        assert set(table.python) == {at(fn, "double")}, name


def test_helpers_within_helpers_count_where_they_are_called():
    def fn(x):
        y = x + 1
        return jnp.var(y, axis=0)

    ladder = ir.ladder(fn, SMALL)
    for name, wanted in (("jaxpr", "reduce_sum|select_n"),
                         ("stablehlo", "reduce|select"),
                         ("hlo", r" reduce\(| select\(|^reduce_sum.* add"),
                         ("hlo-optimized", r" reduce\(")):
        table = ladder.origin(name, wanted)
        assert len(table) and set(table.python) == {at(fn, "jnp.var")}, name


def test_a_helper_of_two_lines_is_of_neither():
    @jax.jit
    def helper(x):
        return jnp.sin(x) + 3

    def fn(x):
        y = helper(x)
        return helper(y * 2)

    ladder = ir.ladder(fn, SMALL)
    for name, wanted in (("jaxpr", "let helper"), ("stablehlo", "@helper.*{$"),
                         ("hlo", "^helper"),
                         ("hlo-optimized", r"constant\(3\)")):
        assert set(ladder.origin(name, wanted).python) == {0}, name
        assert set(ladder.origin(name, r"\bsine?[ (]").python) == {
            at(helper, "jnp.sin")}, name


def test_where_the_ladder_is_asked_for_caused_nothing():
    def fn(x):
        return jax.nn.softmax(x)

    here = inspect.currentframe().f_lineno + 1
    ladder = ir.ladder(fn, SMALL)
    assert str(here) in ladder["hlo"].raw  # jax noted it
    assert {n for rung in ladder for n in rung.origins} <= {
        0, at(fn, "def"), at(fn, "softmax")}


@pytest.mark.parametrize("target, code, wanted, words", [
    ("h100", "ttir", "tt.dot", "tl.dot"),
    ("h100", "ttgir", "warp_group_dot", "tl.dot"),
    ("h100", "llvm-ir", "llvm.maxnum|llvm.maximum|fcmp", "tl.maximum"),
    ("h100", "ptx", r"wgmma\.mma_async", "tl.dot"),
    ("h100", "ptx", r"max\.f32", "tl.maximum"),
    ("h100", "sass", "HGMMA", "tl.dot"),
    ("h100", "sass", "FMNMX", "tl.maximum"),
    ("mi300x", "amdgcn", "v_mfma", "tl.dot"),
    ("mi300x", "ttir", "divsi %tiles_n", "tiles_n = tl.cdiv")])
def test_triton_links_back_through_its_own_library(target, code, wanted,
                                                   words):
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from course_utils import kernels

    tensors = [torch.empty(*shape, dtype=torch.bfloat16, device="meta")
               for shape in ((M, K), (K, N), (N,), (M, N))]
    ladder = ir.ladder(kernels.matmul_bias_relu,
                       *kernels.linear_args(*tensors), target=target)
    rung = ladder[code]
    assert len(rung.origins) == len(rung.raw.splitlines())
    line = at(kernels.matmul_bias_relu.fn, words)
    table = ladder.origin(code, wanted)
    told = table[table.python > 0]  # ptxas moves a few to a neighbour's line
    assert told.python.mode().item() == line
    assert told.code[told.python == line].str.contains(words, regex=False
                                                       ).all()


def test_sass_links_back_past_labels_and_through_a_helper():
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from course_utils import kernels

    text = """import triton
import triton.language as tl
@triton.jit
def double(x_ptr, y_ptr, n):
    o = tl.program_id(0) * 128 + tl.arange(0, 128)
    m = o < tl.cdiv(n, 2)
    x = tl.load(x_ptr + o, mask=m)
    tl.store(y_ptr + o, x + x, mask=m)
"""
    x = torch.empty(1000, device="meta")
    ladder = ir.ladder(kernels.from_source(text), x, x, 1000, target="h100")
    for name, wanted, line in (("sass", "FADD", 8), ("sass", "STG", 8),
                               ("sass", "LDG", 7), ("sass", "LEA.HI", 6),
                               ("ptx", "shr.s32", 6), ("ttir", "divsi", 6),
                               ("llvm-ir", "sdiv", 6)):
        table = ladder.origin(name, wanted)
        assert set(table.python) == {line}, (name, wanted)
        assert set(table.code) == {text.splitlines()[line - 1].strip()}
    assert ".L_x_0:" in ladder["sass"].text.partition("FADD")[0]


def test_a_kernel_that_does_not_fit_says_why_and_where():
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from course_utils import kernels

    kernel = kernels.from_source("""@triton.jit
def kernel(x, B: tl.constexpr):
    o = tl.arange(0, B)
    tl.store(x + o, o)
""")
    for size, why in ((100, "power of 2"), (1 << 21, "exceeds.*1048576")):
        with pytest.raises(ValueError, match=rf"kernel\(x: torch.float32\[8\]"
                           rf".*{why}.*line 2.*tl.arange\(0, B\)") as caught:
            ir.ladder(kernel, torch.empty(8, device="meta"), B=size,
                      target="h100")
        assert "\n" not in str(caught.value)


def test_the_same_kernel_in_another_file_is_linked_to_that(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    x = torch.empty(1000, device="meta")
    for place in ("a", "b"):  # and named as a file of Triton's own
        file = tmp_path / place / "standard.py"
        file.parent.mkdir()
        file.write_text("""import triton
import triton.language as tl
@triton.jit
def total(x, y, n):
    o = tl.arange(0, 1024)
    tl.store(y, tl.sum(tl.load(x + o, mask=o < n)))
""")
        loader = importlib.machinery.SourceFileLoader("standard", str(file))
        module = types.ModuleType("standard")
        module.__file__ = str(file)
        loader.exec_module(module)
        for target in ("h100", "mi300x"):
            ladder = ir.ladder(module.total, x, x, 1000, target=target)
            assert str(file) in ladder["ttir"].raw
            for rung in ladder:
                assert set(rung.origins) <= {0, *range(3, 7)}, rung.name
            assert set(ladder.origin(ladder.names[-1], "(?i)add.*f").python
                       ) <= {0, 6}


def scaled_by(n):
    def scaled(x):
        return x * n

    return scaled


def first_of(xs):
    return xs[0] * 2


def called_a(xs):
    return xs["a"] * 2


def with_default(x, n=K):
    return x * n


def by_the_readers_number(x):
    return x * K


class Holds(Layer):
    def __init__(self, n):
        self.n = n

    def apply(self, x):
        return x * self.n


def doubled(x, n=2):
    return jax.nn.relu(x) * n


@pytest.mark.parametrize("fn, args", [
    (scaled_by(2), (SMALL,)), (with_default, (SMALL,)),
    (by_the_readers_number, (SMALL,)), (Holds(2).apply, (SMALL,)),
    (functools.partial(lambda n, x: x * n, 2), (SMALL,)),
    (jax.grad(sines), (SMALL,)), (called_a, ({"a": SMALL},)),
    (first_of, ([SMALL],)), (lambda x: x * 2, (SMALL,))], ids=[
        "closure", "default", "global", "method", "partial", "made", "dict",
        "list", "lambda"])
def test_nothing_is_recorded_that_the_name_would_not_tell_apart(
        fn, args, tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "FOLDER", tmp_path)
    monkeypatch.setenv("COURSE_RECORD", "1")
    ir.ladder(fn, *args, target="h100")
    assert not [*tmp_path.iterdir()]
    ir.ladder(doubled, SMALL, target="h100")
    assert [*tmp_path.glob("*.json.gz")]


def test_a_recording_says_what_it_has_no_room_for(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "FOLDER", tmp_path)
    monkeypatch.setattr(recorded, "_LARGEST", 1500)
    monkeypatch.setenv("COURSE_RECORD", "1")
    made = ir.ladder(doubled, SMALL, target="h100")
    name, = (p.name.partition(".")[0] for p in tmp_path.glob("*.json.gz"))
    kept, _ = recorded.find(name)
    assert [r.name for r in kept.rungs] == [*made.names]
    for there, rung in zip(made, kept.rungs, strict=True):
        if there.name in ("python", "jaxpr"):
            assert rung.text == there.text and "recorded" in rung.tool
        if there.name == "sass":
            assert "is missing" in rung.text and not rung.tool
            assert f"{len(there.raw):,} characters" in rung.text


def test_a_module_with_a_part_called_fn_is_itself():
    torch = pytest.importorskip("torch")

    class Twice(torch.nn.Module):
        def __init__(self, fn):
            super().__init__()
            self.fn = fn

        def forward(self, x):
            return self.fn(self.fn(x))

    made = ir.ladder(Twice(torch.nn.ReLU()), torch.empty(3, device="meta"))
    assert made.file == __file__ and "self.fn(self.fn" in made["python"].text
    assert "return self.fn(self.fn(x))" in set(made.origin("fx").code)


def test_a_recording_keeps_its_links(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "FOLDER", tmp_path)
    monkeypatch.setenv("COURSE_RECORD", "1")
    ladder = ir.ladder(layered, *specs(64, 64, 64), target="h100", fresh=True)
    name, = (p.name.partition(".")[0] for p in tmp_path.glob("*.json.gz"))
    start = ladder["python"].origins[0]
    found, whence = recorded.find(name, start + 100)
    assert "make record" in whence
    for then, now in zip(ladder, found.rungs, strict=True):
        assert now.text == then.text
        assert len(now.origins) in (0, len(now.raw.splitlines()))
        assert set(now.origins) == {n and n + 100 for n in then.origins}


def test_gradients_keep_the_options_of_the_readers_jit():
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    fn = jax.jit(lambda x, y: (x * x).sum(), donate_argnums=0,
                 keep_unused=True)
    memory = ir.ladder(fn, x, x, wrt=0).memory
    assert memory["alias"] == 64 * 64 * 4  # the gradient takes its place
    assert memory["argument"] == 2 * 64 * 64 * 4
