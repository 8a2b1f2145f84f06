"""flops.count of JAX: cases where other counters go wrong, by kind.

The cases and their values are worked by hand from the shapes; a loop counted
once, a branch counted twice, complex numbers taken for real ones are what
each of them is here for.
"""

import functools
import inspect
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_utils import flops

jax = pytest.importorskip("jax")
jnp, lax = jax.numpy, jax.lax
few = settings(max_examples=8, deadline=None)
size = st.integers(1, 9)


def spec(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def count(fn, *shapes, wrt=None):
    args = [spec(*s) if isinstance(s, tuple) else s for s in shapes]
    cost = flops.count(fn, *args, wrt=wrt)
    assert sum(op.flops for op in cost.ops) == cost.total
    return cost


def square(a):
    return a @ a


def twice(a):
    return square(square(a))


def scanned(n, f, **how):
    return lambda a: lax.scan(lambda c, _: (f(c), None), a, None, n, **how)[0]


def while_(test, step, start=0, f=square):
    """f a while test holds of a number that step moves."""
    return lambda a: lax.while_loop(
        lambda c: test(c[0]), lambda c: (step(c[0]), f(c[1])),
        (start, a))[1]


def block(x, w):
    """Attention and MLP of width 64, 4 heads, on 2 rows of 32."""
    q, k, v = (jnp.einsum("bsd,de->bse", x, w[n]).reshape(2, 32, 4, 16)
               for n in "qkv")
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + y.reshape(x.shape) @ w["o"]
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


WEIGHTS = {n: spec(64, 64) for n in "qkvo"} | {
    "up": spec(64, 256), "down": spec(256, 64)}


def decoder(scan=False, remat=False):
    layer = jax.checkpoint(block) if remat else block

    def model(w, ids):
        x = w["embed"][ids]
        if scan:
            x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, w["blocks"])
        else:
            for one in w["blocks"]:
                x = layer(x, one)
        return x @ w["head"]

    blocks = {n: spec(2, *s.shape) for n, s in WEIGHTS.items()}
    return model, {"embed": spec(100, 64), "head": spec(64, 100),
                   "blocks": blocks if scan else [WEIGHTS, WEIGHTS]}


@jax.custom_vjp
def linear(x, w):
    return x @ w


linear.defvjp(lambda x, w: (x @ w, (x, w)),
              lambda held, g: (g @ held[1].T, held[0].T @ g))


def conv(stride=1, padding="VALID", **how):
    return lambda x, w: lax.conv_general_dilated(
        x, w, (stride, stride), padding,
        dimension_numbers=("NCHW", "OIHW", "NCHW"), **how)


def dot_kernel(x, w, y):
    y[...] = x[...] @ w[...]


def pallas(x, w):
    from jax.experimental import pallas as pl
    return pl.pallas_call(
        dot_kernel, out_shape=spec(64, 96), grid=(2, 3),
        in_specs=[pl.BlockSpec((32, 16), lambda i, j: (i, 0)),
                  pl.BlockSpec((16, 32), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((32, 32), lambda i, j: (i, j)))(x, w)


def sharded(x, w):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(
        jax.sharding.AxisType.Auto,))
    part = jax.sharding.PartitionSpec
    return jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(
        part("i"), part()), out_specs=part("i"))(x, w)


@jax.custom_batching.custom_vmap
def batched(x):
    return x @ x


@batched.def_vmap
def _(size, mapped, x):
    return jnp.einsum("bij,bjk->bik", x, x), True


P = 65536  # FLOPs of a product of 32 x 32 matrices
A, X, heads = (32, 32), [(32, 64), (64, 128)], (2, 64, 4, 16)
ids = spec(2, 32, dtype="int32")
c64, c8 = spec(64, dtype="complex64"), spec(8, 8, dtype="complex64")
CASES = {  # fn, shapes, products in FLOPs
    "matmul": (jnp.matmul, X, 524288),
    "matmul bf16": (jnp.matmul, [spec(*s, dtype="bfloat16") for s in X],
                    524288),
    "dot": (jnp.dot, [(8,), (8,)], 16),
    "matrix vector": (jnp.matmul, [(4, 8), (8,)], 64),
    "broadcast": (jnp.matmul, [(2, 1, 4, 8), (3, 8, 5)], 1920),
    "einsum": (functools.partial(jnp.einsum, "bij,bjk->bik"),
               [(4, 16, 32), (4, 32, 12)], 49152),
    "einsum of 3": (functools.partial(jnp.einsum, "ij,jk,kl->il"),
                    [(4, 8), (8, 16), (16, 2)], 640),
    "relu": (lambda x, w, b: jax.nn.relu(x @ w + b), [*X, (128,)], 524288),
    "layer norm": (lambda x: jax.nn.standardize(x), [(32, 64)], 0),
    "attention": (jax.nn.dot_product_attention, [heads] * 3, 2097152),
    "attention causal, all pairs": (
        functools.partial(jax.nn.dot_product_attention, is_causal=True),
        [heads] * 3, 2097152),
    "attention of keys and values of 2 heads": (
        jax.nn.dot_product_attention,
        [(2, 64, 8, 16), (2, 64, 2, 16), (2, 64, 2, 16)], 4194304),
    "scan": (scanned(10, square), [A], 10 * P),
    "scan over rows": (
        lambda w: lax.scan(lambda c, w: (c @ w, None), w[0], w)[0],
        [(7, 32, 32)], 7 * P),
    "scan unrolled by 2": (scanned(7, square, unroll=2), [A], 7 * P),
    "scan in reverse": (scanned(7, square, reverse=True), [A], 7 * P),
    "scan in a scan": (scanned(3, scanned(5, square)), [A], 15 * P),
    "scan of none": (scanned(0, square), [A], 0),
    "jit in a scan": (scanned(10, jax.jit(square)), [A], 10 * P),
    "vmap of a scan": (jax.vmap(scanned(10, square)), [(3, 32, 32)], 30 * P),
    "map": (lambda x: lax.map(lambda r: r @ jnp.ones((8, 32)), x),
            [(6, 8)], 3072),
    "fori": (lambda a: lax.fori_loop(0, 10, lambda i, c: square(c), a),
             [A], 10 * P),
    "fori in a scan": (scanned(3, lambda a: lax.fori_loop(
        2, 7, lambda i, c: square(c), a)), [A], 15 * P),
    "while, up": (while_(lambda i: i < 10, lambda i: i + 1), [A], 10 * P),
    "while, down": (while_(lambda i: i > 0, lambda i: i - 2, 9), [A], 5 * P),
    "while, doubling": (while_(lambda i: i < 100, lambda i: i * 2, 1), [A],
                        7 * P),
    "while, never": (while_(lambda i: i < 0, lambda i: i + 1), [A], 0),
    "while, numbers made outside": (
        lambda a: lax.while_loop(
            lambda c: c[0] < jnp.array(6) * 2,
            lambda c: (c[0] + 3, square(c[1])), (jnp.arange(3).sum(), a)),
        [A], 3 * P),
    "while, of floats": (while_(lambda t: t < 1., lambda t: t + .25, 0.),
                         [A], 4 * P),
    "while in a scan": (scanned(3, while_(
        lambda i: i < 10, lambda i: i + 1)), [A], 30 * P),
    "while in a while": (while_(lambda i: i < 4, lambda i: i + 1, f=while_(
        lambda i: i < 3, lambda i: i + 1)), [A], 12 * P),
    "while in a jit": (jax.jit(while_(lambda i: i < 10, lambda i: i + 1)),
                       [A], 10 * P),
    "cond, the dearer branch": (
        lambda p, a: lax.cond(p, square, twice, a), [spec(dtype="bool"), A],
        2 * P),
    "switch, the dearest branch": (
        lambda i, a: lax.switch(i, [lambda a: a, square, twice], a),
        [spec(dtype="int32"), A], 2 * P),
    "cond in a vmap runs both": (
        jax.vmap(lambda p, a: lax.cond(p, square, twice, a)),
        [spec(4, dtype="bool"), (4, 32, 32)], 786432),
    "vmap": (jax.vmap(jnp.matmul), [(3, 4, 5), (3, 5, 8)], 960),
    "remat, recomputed": (  # 2 forward, 2 again, 3 backward
        jax.value_and_grad(lambda w, x: jax.checkpoint(lambda w, x: jnp.sin(
            jnp.sin(x @ w[0]) @ w[1]))(w, x).sum()), [(2, 32, 32), A],
        7 * P),
    "jit in a jit, shared": (jax.jit(lambda x, w: jax.jit(jnp.matmul)(
        x, w) + jax.jit(jnp.matmul)(x, w)), X, 1048576),
    "written twice": (lambda x, w: x @ w + x @ w, X, 1048576),
    "dead code": (lambda a: (a @ a, a.sum())[1], [A], 0),
    "custom gradient": (linear, X, 524288),
    "conv 1-d": (lambda x, w: lax.conv_general_dilated(
        x, w, (1,), "VALID"), [(2, 4, 20), (8, 4, 3)], 6912),
    "conv same, padded taps with it": (
        conv(padding="SAME"), [(2, 2, 12, 12), (4, 2, 5, 5)], 115200),
    "conv same of even width": (
        conv(padding="SAME"), [(1, 1, 4, 4), (2, 1, 2, 2)], 256),
    "conv grouped": (conv(feature_group_count=4),
                     [(2, 8, 10, 10), (16, 2, 3, 3)], 73728),
    "conv dilated": (conv(rhs_dilation=(2, 2)),
                     [(2, 4, 10, 10), (8, 4, 3, 3)], 41472),
    "conv depthwise": (conv(2, feature_group_count=8),
                       [(2, 8, 11, 11), (8, 1, 3, 3)], 7200),
    "conv transposed": (
        lambda x, w: lax.conv_transpose(
            x, w, (2, 2), "VALID",
            dimension_numbers=("NCHW", "OIHW", "NCHW")),
        [(1, 3, 2, 2), (1, 3, 2, 2)], 96),
    "conv grouped by batch": (conv(batch_group_count=2),
                              [(4, 4, 10, 10), (8, 4, 3, 3)], 73728),
    "conv of no channel": (conv(), [(2, 0, 8, 8), (4, 0, 3, 3)], 0),
    "embedding": (lambda t, i: t[i], [(100, 64), ids], 0),
    "embedding by one-hot": (
        lambda t, i: jax.nn.one_hot(i, 100) @ t, [(100, 64), ids],
        2 * 64 * 100 * 64),
    "complex": (jnp.matmul, [c8, c8], 4096),
    "integer": (jnp.matmul, [spec(8, 8, dtype="int32")] * 2, 0),
    "no rows": (jnp.matmul, [(0, 8), (8, 3)], 0),
    "no columns to sum": (jnp.matmul, [(4, 0), (0, 3)], 0),
    "outer": (jnp.outer, [(4,), (8,)], 0),
    "ragged": (lax.ragged_dot, [(10, 8), (3, 8, 8), spec(3, dtype="int32")],
               1280),
    "associative scan": (lambda a: lax.associative_scan(jnp.matmul, a),
                         [(8, 16, 16)], 90112),
    "cholesky": (jnp.linalg.cholesky, [A], 10922),
    "solve": (jnp.linalg.solve, [(12, 12), (12, 3)], 2016),
    "solves": (jax.vmap(jnp.linalg.solve), [(7, 12, 12), (7, 12, 3)],
               7 * 2016),
    "triangular": (lambda a, b: jax.scipy.linalg.solve_triangular(a, b),
                   [(12, 12), (12, 3)], 12 * 12 * 3),
    "triangular from the right": (
        lambda a, b: lax.linalg.triangular_solve(a, b),
        [(12, 12), (3, 12)], 12 * 12 * 3),
    "lu": (lax.linalg.lu, [(12, 12)], 1152),
    "determinant": (jnp.linalg.det, [(12, 12)], 1152),
    "fft": (jnp.fft.fft, [c64], 1920),
    "inverse fft": (jnp.fft.ifft, [c64], 1920),
    "fft of reals": (jnp.fft.rfft, [(64,)], 960),
    "inverse fft to reals": (jnp.fft.irfft, [spec(33, dtype="complex64")],
                             960),
    "fft of images": (jnp.fft.fft2, [spec(3, 8, 16, dtype="complex64")],
                      5 * 3 * 8 * 16 * 7),
    "shard_map": (sharded, X, 524288),
    "pmap": (jax.pmap(square), [(1, 32, 32)], P),
    "jit in a jit in a jit": (jax.jit(jax.jit(jax.jit(square))), [A], P),
    "composite": (lax.composite(square, "course.square"), [A], P),
    "custom vmap": (batched, [A], P),
    "custom vmap, mapped": (jax.vmap(batched), [(3, 32, 32)], 3 * P),
    "sequential vmap": (
        jax.vmap(jax.custom_batching.sequential_vmap(square)),
        [(3, 32, 32)], 3 * P),
    "kernel of pallas": (pallas, [(64, 16), (16, 96)], 2 * 64 * 16 * 96),
    "a trace, then a product": (
        lambda x, y: jnp.einsum("iij,jk->ik", x, y), [(4, 4, 5), (5, 6)],
        2 * 4 * 5 * 6),
    "convolve, taps off its ends with it": (jnp.convolve, [(20,), (5,)],
                                            2 * 24 * 5),
    "correlate": (jnp.correlate, [(20,), (5,)], 2 * 16 * 5),
    "power of a matrix": (lambda a: jnp.linalg.matrix_power(a, 5), [A],
                          3 * P),
    "inverse": (jnp.linalg.inv, [(12, 12)], 2 * 12**3 // 3 + 2 * 12**3),
    "attention with a bias": (
        lambda q, k, v, b: jax.nn.dot_product_attention(q, k, v, bias=b),
        [heads] * 3 + [(2, 4, 64, 64)], 2097152),
    "a print beside a product": (
        lambda a: (jax.debug.print("{}", a[0, 0]), a @ a)[1], [A], P),
    "grad": (jax.grad(lambda w, x: (x @ w).sum()), [(8, 4), (3, 8)], 192),
    "value and grad": (
        jax.value_and_grad(lambda w, x: (x @ w).sum()), [(8, 4), (3, 8)],
        384),
    "jvp": (lambda x, w: jax.jvp(lambda w: x @ w, (w,), (w,)), X, 1048576),
    "hessian by forward over reverse": (
        jax.jacfwd(jax.grad(lambda x: x @ jnp.eye(4) @ x)), [(4,)],
        2 * 2 * 4 * 4 * 4),
}
IN_GRADIENT = [  # all that is differentiated, 3 times the products
    "matmul", "broadcast", "relu", "attention", "scan", "scan in a scan",
    "jit in a jit in a jit", "a trace, then a product", "correlate",
    "power of a matrix", "attention with a bias", "pmap",
    "attention of keys and values of 2 heads", "scan over rows",
    "fori", "vmap", "vmap of a scan", "custom gradient", "conv 1-d",
    "conv same, padded taps with it", "conv same of even width",
    "conv grouped", "conv dilated", "conv depthwise", "conv transposed",
    "conv grouped by batch", "complex", "ragged", "associative scan"]


@pytest.mark.parametrize("name", CASES)
def test_products(name):
    fn, shapes, expected = CASES[name]
    cost = count(fn, *shapes)
    assert (cost.matmul, cost.unknown) == (expected, ())


@pytest.mark.parametrize("name", IN_GRADIENT)
def test_products_forward_and_backward(name):
    fn, shapes, expected = CASES[name]
    cost = count(fn, *shapes, wrt="all")
    assert (cost.matmul, cost.unknown) == (3 * expected, ())


@pytest.mark.parametrize("scan", [False, True])
def test_decoder(scan):
    model, weights = decoder(scan)
    assert count(model, weights, ids).matmul == 14450688
    assert count(model, weights, ids, wrt="params").matmul == 43352064
    model, weights = decoder(scan, remat=True)
    # the recomputed blocks, less the last product of each, which is dead
    assert count(model, weights, ids, wrt="params").matmul == 52789248


# --- loops and branches that are not known ----------------------------------
@pytest.mark.parametrize("fn, args", [
    (lambda n, a: lax.fori_loop(0, n, lambda i, c: square(c), a),
     [spec(dtype="int32"), A]),
    (lambda a: lax.while_loop(lambda a: a.sum() < 1, square, a), [A]),
    (while_(lambda i: i < 1, lambda i: i), [A]),  # never ends
    (lambda a: lax.fori_loop(0, jnp.argmax(a), lambda i, c: square(c), a),
     [A])])
def test_trips_that_are_not_known_are_told(fn, args):
    with pytest.warns(UserWarning, match="trips not known"):
        cost = count(fn, *args)
    assert cost.matmul == 0 and len(cost.unknown) == 1
    assert "65,536 FLOPs" in cost.unknown[0] or "66,55" in cost.unknown[0]


def test_a_loop_of_unknown_trips_hides_nothing_beside_it():
    with pytest.warns(UserWarning, match="trips not known"):
        cost = count(lambda n, a: square(lax.fori_loop(
            0, n, lambda i, c: square(c), a)), spec(dtype="int32"), A)
    assert cost.matmul == P


def test_a_branch_says_that_it_is_the_dearest():
    cost = count(*CASES["switch, the dearest branch"][:1],
                 spec(dtype="int32"), A)
    paths = [op.path for op in cost.ops if op.matmul]
    assert len(paths) == 2
    assert all(path.endswith("[the dearest branch]") for path in paths)


def test_the_test_of_a_loop_runs_once_more_than_its_body():
    cost = count(CASES["while, up"][0], A)
    assert cost.integer == 11 + 10 and cost.matmul == 10 * P
    assert {op.repeats for op in cost.ops} == {10, 11}


def test_repeats_are_of_every_loop_around():
    cost = count(CASES["scan in a scan"][0], A)
    assert {(op.repeats, op.matmul) for op in cost.ops if op.matmul} == {
        (15, 15 * P)}


# --- what is no product -----------------------------------------------------
@pytest.mark.parametrize("fn, shapes, kind, n", [
    (jax.nn.relu, [(32, 128)], "elementwise", 4096),
    (jnp.cumsum, [(1000,)], "elementwise", 999),
    (lax.cumprod, [(10, 7)], "elementwise", 63),
    (lax.cummax, [(10, 7)], "elementwise", 63),
    (jnp.sum, [(1000,)], "elementwise", 999),
    (jnp.exp, [(1000,)], "transcendental", 1000),
    (jnp.sort, [(1000,)], "integer", 10_000),
    (jnp.outer, [(4,), (8,)], "elementwise", 32),
    (lambda x: lax.reduce_window(x, 0., lax.add, (2, 3), (2, 3), "VALID"),
     [(8, 9)], "elementwise", 4 * 3 * 5),
    (jnp.multiply, [spec(10, dtype="complex64")] * 2, "elementwise", 60),
    (jnp.add, [spec(10, dtype="complex64")] * 2, "elementwise", 20),
    (jnp.add, [spec(10, dtype="int32")] * 2, "integer", 10),
    (jnp.matmul, [spec(8, 8, dtype="int32")] * 2, "integer", 1024)])
def test_kinds_apart_from_products(fn, shapes, kind, n):
    cost = count(fn, *shapes)
    assert getattr(cost, kind) == n and not cost.unknown
    assert cost.total == (0 if kind == "integer" else n)


def test_repeated_adds_and_random_bits():
    cost = count(lambda x, y, z, w: lax.fori_loop(
        0, 1000, lambda i, x: x + y + z + w, x), *[(10, 100)] * 4)
    assert cost.elementwise == 1000 * 3 * 1000
    key = jax.eval_shape(lambda: jax.random.key(0))
    uniform = flops.count(lambda k: jax.random.uniform(k, (1000,)), key)
    assert uniform.total < 5 * 1000  # hashing is integer work


def over_one(fn, **how):
    """fn of x and an axis, on a mesh of one device."""
    mesh = jax.make_mesh((1,), ("i",), axis_types=(
        jax.sharding.AxisType.Auto,))
    part = jax.sharding.PartitionSpec("i")
    return lambda x: jax.shard_map(
        lambda x: fn(x, "i"), mesh=mesh, in_specs=part, out_specs=part,
        check_vma=False)(x)


def added(a, b):
    return a + 2 * b


@pytest.mark.parametrize("fn, name", [
    (jnp.linalg.svd, "svd"), (jnp.linalg.eigh, "eigh"),
    (jnp.linalg.qr, "qr"), (jnp.linalg.eig, "eig"),
    (jax.scipy.linalg.schur, "schur"), (jnp.linalg.pinv, "svd"),
    (lambda a: jnp.linalg.lstsq(a, a)[0], "svd"),
    (lambda a: jnp.linalg.norm(a, 2), "svd"),
    (lambda a: lax.reduce(a, 0., added, (0,)), "reduce"),
    (lambda a: lax.reduce_window(a, 0., added, (2, 2), (2, 2), "VALID"),
     "reduce_window"),
    (lambda a: a.at[0].apply(jnp.sin), "scatter"),
    (lambda a: jax.pure_callback(abs, spec(8, 8), a), "pure_callback"),
    (lambda a: jax.experimental.io_callback(abs, spec(8, 8), a),
     "io_callback"), (over_one(lax.psum), "psum"),
    (over_one(lax.pmax), "pmax"), (over_one(lax.all_gather), "all_gather"),
    (over_one(lambda x, i: lax.psum_scatter(x, i, tiled=True)),
     "reduce_scatter"),
    (over_one(lambda x, i: lax.ppermute(x, i, [(0, 0)])), "ppermute"),
    (over_one(lambda x, i: lax.all_to_all(x, i, 0, 0, tiled=True)),
     "all_to_all")])
def test_what_has_no_rule_is_listed_and_said_once(fn, name):
    with pytest.warns(UserWarning, match="no rule") as said:
        cost = count(lambda a: (fn(a), fn(2 * a), a @ a), (8, 8))
    assert any(name in found for found in cost.unknown)
    assert len([w for w in said if "no rule" in str(w.message)]) == 1
    assert len(cost.unknown) == len(set(cost.unknown))
    assert cost.matmul >= 1024  # what stands beside it is counted


def test_what_a_policy_saves_is_not_made_again():
    def f(policy):
        return jax.checkpoint(lambda a: jnp.sin(a @ a) @ a, policy=policy)

    saved = count(f(jax.checkpoint_policies.dots_saveable), A, wrt="all")
    made = count(f(jax.checkpoint_policies.nothing_saveable), A, wrt="all")
    assert (saved.matmul, made.matmul) == (6 * P, 7 * P)
    assert saved.transcendental == made.transcendental == 3 * 32 * 32
    whole = count(f(jax.checkpoint_policies.everything_saveable), A,
                  wrt="all")
    assert (whole.matmul, whole.transcendental) == (6 * P, 2 * 32 * 32)


def test_gradient_of_the_largest_in_a_window():
    def pool(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2),
                                 "VALID")

    forward, both = (count(pool, (8, 8), wrt=wrt) for wrt in (None, "all"))
    assert forward.elementwise == 16 * 3  # of 4, 3 comparisons
    assert both.elementwise == 16 * (3 + 3 + 1)  # found again, added once
    assert not both.unknown


def test_references_read_and_write_what_they_hold():
    def f(x):
        ref = jax.new_ref(x)
        ref[0] = x[1]
        return ref[...]

    if not hasattr(jax, "new_ref"):
        pytest.skip("this JAX has no references outside kernels")
    ops = {op.name: op.bytes for op in count(f, (8, 64)).ops}
    assert (ops["new_ref"], ops["get"]) == (2 * 2048, 2 * 2048)
    assert ops["swap"] == 2 * 256


# --- where an op is written -------------------------------------------------
def written(x):
    y = jnp.sin(x)
    return jax.nn.relu(y @ y)


def line_of(fn, text):
    source, first = inspect.getsourcelines(fn)
    return f"{Path(__file__).name}:" + str(first + next(
        i for i, line in enumerate(source) if text in line))


@pytest.mark.parametrize("fn", [written, jax.jit(written),
                                jax.checkpoint(written)])
def test_lines(fn):
    jax.nn.relu(jnp.ones((8, 8)))  # traced here first, and kept by JAX
    cost = count(fn, (8, 8), wrt="all")
    lines = {op.name: op.line for op in cost.ops if op.name in (
        "sin", "cos", "dot_general", "max")}
    assert lines == {
        "sin": line_of(written, "sin"), "cos": line_of(written, "sin"),
        "dot_general": line_of(written, "relu"),
        "max": line_of(written, "relu")}
    assert list(cost.table()["line"]) == [op.line for op in cost.ops]


def test_lines_of_a_cell_and_of_nobody():
    for file in "/tmp/ipykernel_12/345.py", "<ipython-input-3-0a1b>":
        names = {"jnp": jnp}
        exec(compile("def f(x):\n\n    return x @ x\n", file, "exec"), names)
        assert [op.line for op in count(names["f"], (8, 8)).ops] == [
            "<cell>:3"]
    assert [op.line for op in count(jnp.matmul, (8, 8), (8, 8)).ops] == [""]


def test_a_kernel_of_pallas_is_its_body_times_its_programs():
    for fn in pallas, jax.jit(pallas):
        cost = count(fn, (64, 16), (16, 96))
        assert cost.matmul == cost.total == 2 * 64 * 16 * 96
        assert not cost.unknown and {op.repeats for op in cost.ops} == {6}
        read, written = (sum(op.bytes for op in cost.ops if op.name == name)
                         for name in ("get", "swap"))
        assert read == 2 * 6 * 4 * (32 * 16 + 16 * 32)  # once to a register
        assert written == 2 * 4 * 64 * 96


def test_collectives_are_listed_beside_the_products():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cost = count(sharded, *X, wrt="all")
    assert cost.matmul == 3 * 524288
    assert cost.unknown
    assert all("psum" in name for name in cost.unknown)


# --- convolutions and their gradients ---------------------------------------
def gradients(fn, *shapes):
    return [count(fn, *shapes, wrt=wrt).matmul for wrt in (None, 0, 1, "all")]


@settings(max_examples=25, deadline=None)
@given(x=st.integers(1, 7), k=st.integers(1, 4), step=st.integers(1, 3),
       apart=st.integers(1, 3), pad=st.integers(0, 5),
       groups=st.integers(1, 3))
def test_convolutions_and_gradients_are_those_of_torch(
        x, k, step, apart, pad, groups):
    torch = pytest.importorskip("torch")
    if x + 2 * pad < apart * (k - 1) + 1:
        return
    shapes = (2, 2 * groups, x, x + 1), (3 * groups, 2, k, k)
    ours = gradients(conv(step, [(pad, pad)] * 2, rhs_dilation=(apart,) * 2,
                          feature_group_count=groups), *shapes)
    args = [torch.empty(s, device="meta") for s in shapes]
    theirs = [flops.count(
        lambda x, w: torch.nn.functional.conv2d(
            x, w, None, step, pad, apart, groups), *args, wrt=wrt).matmul
        for wrt in (None, 0, 1, "all")]
    assert (ours[0], ours[2]) == (theirs[0], theirs[2])
    if all((n + 2 * pad - apart * (k - 1) - 1) // step + 1 <= n
           for n in (x, x + 1)):  # no more outputs than inputs
        assert ours == theirs


@settings(max_examples=25, deadline=None)
@given(x=st.integers(1, 5), k=st.integers(1, 4), step=st.integers(1, 3),
       hole=st.integers(1, 3), low=st.integers(-1, 5), high=st.integers(0, 5),
       wrap=st.sampled_from(["plain", "jit", "remat", "vmap", "scan"]))
def test_gradients_pair_what_their_forward_pairs(
        x, k, step, hole, low, high, wrap):
    if hole * (x - 1) + 1 + low + high < k or low + hole * (x - 1) + 1 < 1:
        return
    outputs = (hole * (x - 1) + 1 + low + high - k) // step + 1
    if outputs > x if hole == 1 else outputs < x:
        return  # padded, or cut, beyond what keeps the size
    fn, many = conv(step, [(low, high)] * 2, lhs_dilation=(hole,) * 2), ()
    if wrap in ("vmap", "scan"):
        many, plain = (3,), fn
        fn = jax.vmap(plain) if wrap == "vmap" else lambda x, w: lax.scan(
            lambda c, xw: (c, plain(*xw)), 0., (x, w))[1]
    else:
        fn = {"plain": lambda f: f, "jit": jax.jit,
              "remat": jax.checkpoint}[wrap](fn)
    forward, *each, both = gradients(
        fn, (*many, 1, 2, x, x), (*many, 3, 2, k, k))
    assert each == [2 * forward] * 2 and both == 3 * forward


@pytest.mark.parametrize("fn, shapes, forward", [
    (conv(padding="SAME"), [(8, 16, 1, 1), (16, 16, 3, 3)], 36864),
    (conv(padding="SAME"), [(8, 16, 2, 2), (16, 16, 3, 3)], 147456),
    (functools.partial(jnp.convolve, mode="valid"), [(20,), (5,)], 160),
    (lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"),
     [(1, 3, 3, 3), (4, 4, 3, 5)], 2 * 9 * 16 * 15)])
def test_gradients_of_odd_convolutions(fn, shapes, forward):
    assert gradients(fn, *shapes) == [
        forward, 2 * forward, 2 * forward, 3 * forward]
    again = jax.checkpoint(lambda x, w: jnp.sin(fn(x, w)))
    assert count(again, *shapes, wrt="all").matmul == 4 * forward


@pytest.mark.parametrize("kernel", [
    "OIHW", "HWIO", "OHWI", "IOHW", "HWOI", "IHWO"])
@pytest.mark.parametrize("image", ["NCHW", "NHWC", "HWNC", "HWCN"])
@pytest.mark.parametrize("step, pad", [(1, "VALID"), (1, "SAME"),
                                       (2, "VALID"), (2, "SAME")])
def test_in_whatever_layout_a_convolution_is_the_same(
        image, kernel, step, pad):
    def shape(layout, sizes):
        return tuple(sizes[axis] for axis in layout)

    x = shape(image, {"N": 4, "C": 6, "H": 10, "W": 11})
    w = shape(kernel, {"O": 8, "I": 6, "H": 3, "W": 3})

    def fn(x, w):
        return lax.conv_general_dilated(
            x, w, (step, step), pad, dimension_numbers=(image, kernel, image))

    plain = count(conv(step, pad), (4, 6, 10, 11), (8, 6, 3, 3)).matmul
    forward, of_input, of_kernel, _ = gradients(fn, x, w)
    assert forward == plain and of_kernel == 2 * plain
    # Of these the gradient is, to the letter, another's padded forward.
    padded = (kernel in ("IOHW", "HWOI", "IHWO") and image[0] == "N"
              and (step, pad) == (1, "VALID"))
    again = 2 * 4 * 8 * 6 * 9 * 10 * 11 if padded else plain
    assert of_input == plain + again


def test_padding_beyond_the_size_counts_forward():
    assert count(jnp.convolve, (20,), (5,)).matmul == 240
    assert count(jnp.convolve, (5,), (20,)).matmul == 240
    assert count(lambda x, w: lax.conv_transpose(x, w, (1, 1), "VALID"),
                 (1, 1, 1, 3), (4, 4, 3, 5)).matmul == 7680


def test_a_name_that_reads_like_a_gradient_changes_nothing():
    def f(x, w):
        with jax.named_scope("transpose(jvp("):
            return lax.conv_transpose(x, w[::-1], (2,), "VALID")

    assert count(f, (1, 3, 2), (4, 2, 5)).matmul == 2 * 3 * 4 * 2 * 5


def test_second_derivatives_of_convolutions():
    def f(x, w):
        y = conv()(x, w)
        return jax.grad(lambda x: (conv()(x, w)**3).sum())(x).sum() + y.sum()

    # three convolutions there, two of them in the gradient of the gradient
    one = count(conv(), (1, 2, 8, 8), (3, 2, 3, 3)).matmul
    assert count(f, (1, 2, 8, 8), (3, 2, 3, 3)).matmul == 3 * one
    assert count(f, (1, 2, 8, 8), (3, 2, 3, 3), wrt=0).matmul % one == 0


def test_a_convolution_counts_the_same_wherever_it_stands():
    """Gradients of gradients, in a loop or not, in a rule of the reader's."""
    for step, pad in (1, "VALID"), (2, "SAME"):
        def descend(x, w, step=step, pad=pad):
            return x - jax.grad(
                lambda x: (conv(step, pad)(x, w)**2).sum())(x)

        shapes = (1, 1, 16, 16), (1, 1, 3, 3)
        one = count(conv(step, pad), *shapes).matmul
        for n in 1, 3:
            def looped(x, w, n=n, descend=descend):
                return lax.scan(lambda x, _: (descend(x, w), 0), x, None, n)[0]

            assert gradients(looped, *shapes)[1] == 4 * n * one
            assert count(looped, *shapes).matmul == 2 * n * one
        assert count(descend, *shapes, wrt=1).matmul == 5 * one

    def penalty(x, w):
        def fn(x):
            return (lax.conv_transpose(x, w, (2, 2), "SAME")**2).sum()
        return jax.grad(fn)(x)

    shapes = (2, 5, 5, 6), (3, 3, 6, 4)
    assert count(penalty, *shapes, wrt=1).matmul == 5 * count(
        lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"), *shapes).matmul

    def turned(x, w):
        return lax.conv_transpose(x, w, (2,), "SAME",
                                  dimension_numbers=("NCH", "OIH", "NCH"))

    @jax.custom_vjp
    def again(x, w):
        return x.sum()

    again.defvjp(lambda x, w: (x.sum(), (x, w)),
                 lambda r, t: (t * turned(*r)[..., ::2], r[1]))
    shapes = (1, 1, 50), (1, 1, 3)
    assert count(again, *shapes, wrt=0).matmul == count(
        turned, *shapes).matmul == 2 * 50 * 3


def test_two_jitted_steps_are_two_steps():
    @jax.jit
    def step(x, w):
        return x - jax.grad(lambda x: (conv()(x, w)**2).sum())(x)

    shapes = (1, 1, 8, 8), (1, 1, 3, 3)
    one = gradients(step, *shapes)[1]
    assert gradients(lambda x, w: step(step(x, w), w), *shapes)[1] == 2 * one


@pytest.mark.parametrize("fn", [
    lambda a: jnp.stack([a, a]), lambda a: jnp.stack([a, a], 1),
    lambda a: jnp.select([a > 0], [a]), lambda a: [*jnp.unstack(a)]])
def test_stacks_only_move(fn):
    for wrt in None, 0:
        cost = count(fn, (4, 4), wrt=wrt)
        assert not cost.unknown and not cost.matmul
        assert cost.bytes >= (64 if wrt is None else 128)


@pytest.mark.parametrize("dear", [
    jnp.sort, lambda x: (x.astype("int32") + 1).astype("float32"),
    lambda x: jnp.flip(x)])
def test_of_branches_without_floats_the_dearer_counts(dear):
    costs = [count(lambda p, x, ways=ways: lax.cond(p, *ways, x),
                   spec(dtype="bool"), (64,)) for ways in (
        (dear, lambda x: x), (lambda x: x, dear))]
    for kind in "integer", "bytes":
        assert getattr(costs[0], kind) == getattr(costs[1], kind)
    assert costs[0].bytes >= 512


def test_one_array_in_two_places_is_one_parameter():
    w = jnp.ones((50, 8))

    def tied(p, i):
        return p["embed"][i] @ p["head"].T

    i = jnp.arange(3)
    assert flops.count(tied, {"embed": w, "head": w}, i, wrt="params"
                       ).params == 400
    one = spec(50, 8)  # a shape twice is two arrays
    assert flops.count(tied, {"embed": one, "head": one}, i, wrt="params"
                       ).params == 800


# --- types, meshes, loops ---------------------------------------------------
@pytest.mark.parametrize("a, b, out, expected", [
    ("int8", "bfloat16", "float32", 1024), ("bfloat16", "int8", None, 1024),
    ("int8", "int8", "int32", 0), ("int8", "int8", "float32", 1024),
    ("float32", "complex64", None, 2048), ("complex64", "float32", None, 2048),
    ("complex64", "complex64", None, 4096)])
def test_products_of_mixed_types(a, b, out, expected):
    cost = count(lambda a, b: lax.dot(a, b, preferred_element_type=out),
                 spec(8, 8, dtype=a), spec(8, 8, dtype=b))
    assert cost.matmul == expected
    assert cost.integer == (0 if expected else 1024)


@pytest.mark.parametrize("fn, n", [
    (lambda z: z**2, 48), (jnp.square, 48), (lambda z: z * z, 48),
    (jnp.prod, 42), (lax.cumprod, 42), (jnp.sum, 14), (lambda z: z**3, 96)])
def test_complex_products_are_6_however_they_are_written(fn, n):
    assert count(fn, spec(8, dtype="complex64")).elementwise == n


def test_a_shard_map_runs_on_its_own_axes():
    mesh, part = jax.sharding.AbstractMesh(
        (2, 4), ("a", "b")), jax.sharding.PartitionSpec

    def over(fn, axis, **how):
        return jax.shard_map(fn, in_specs=part(axis), out_specs=part(axis),
                             axis_names={axis}, check_vma=False, **how)

    def gram(x):
        return x @ x.T

    assert count(over(gram, "a", mesh=mesh), (8, 16)).matmul == (
        2 * 2 * 4 * 4 * 16)
    both = over(over(gram, "b"), "a", mesh=mesh)
    assert count(both, (16, 32)).matmul == 8 * 2 * 2 * 2 * 32


TABLE = jnp.arange(9)


@pytest.mark.parametrize("n", [np.full(9, 2), np.int32(2)])
def test_constants_of_a_jitted_function_shift_no_input(n):
    inner = jax.jit(lambda n, a: lax.fori_loop(
        0, TABLE.max(), lambda i, c: c @ c, a) + n.sum())
    assert count(lambda a: inner(n, a), A).matmul == 8 * P


def test_what_a_loop_carries_for_nobody_is_not_counted():
    def f(a):
        return lax.while_loop(lambda c: c[0] < 5, lambda c: (
            c[0] + 1, square(c[1]), twice(c[2])), (0, a, a))[1]

    def chain(a):  # the third is what the second is made of
        return lax.while_loop(lambda c: c[0] < 5, lambda c: (
            c[0] + 1, c[1] @ c[2], square(c[2])), (0, a, a))[1]

    assert count(f, A).matmul == 5 * P
    assert count(chain, A).matmul == 10 * P


def ran(i):
    raise AssertionError("a callback ran")


def in_pallas(x):
    from jax.experimental import pallas as pl

    def kernel(x, y):
        y[...] = lax.fori_loop(0, pl.program_id(0) + 1,
                               lambda i, c: c @ c, x[...])
    block = pl.BlockSpec((32, 32), lambda i: (i, 0))
    return pl.pallas_call(kernel, out_shape=spec(64, 32), grid=(2,),
                          in_specs=[block], out_specs=block)(x)


@pytest.mark.parametrize("fn, shapes, words", [
    (lambda a: lax.fori_loop(0, jax.pure_callback(
        ran, spec(dtype="int32"), 3), lambda i, c: c @ c, a), [A], "65,536"),
    (lambda a: lax.while_loop(lambda c: c[0].sum() < 9, lambda c: (
        c[0] @ c[0], c[1] @ c[1]), (jnp.zeros((200, 200)), a))[1], [A],
     "FLOPs"),
    (jax.vmap(lambda n, a: lax.fori_loop(0, n, lambda i, c: c @ c, a)),
     [spec(3, dtype="int32"), (3, 32, 32)], "FLOPs"),
    (in_pallas, [(64, 32)], "65,536 FLOPs; the loop runs 2 times"),
    (over_one(lambda x, i: lax.fori_loop(
        0, lax.axis_index(i) + 1, lambda i, c: c @ c, x)), [A], "65,536"),
    (while_(lambda i: i < 20_000, lambda i: i + 1), [A], "more than 10,000"),
    (lambda n, a: scanned(6, lambda a: lax.fori_loop(
        0, n, lambda i, c: c @ c, a))(a), [spec(dtype="int32"), A],
     "65,536 FLOPs; the loop runs 6 times"),
    (lambda n, a: [lax.fori_loop(0, n, lambda i, c: c @ c, a)
                   for _ in "12"], [spec(dtype="int32"), A], "2 times")])
def test_loops_that_cannot_be_followed_are_told_and_not_run(
        fn, shapes, words):
    with pytest.warns(UserWarning, match="trips not known") as said:
        count(fn, *shapes)
    assert any(words in str(w.message) for w in said)


# --- bytes ------------------------------------------------------------------
def test_bytes_of_rows():
    row, table = 256, spec(10_000, 64)
    got = count(lambda t, i: jnp.take(t, i, axis=0, mode="clip"), table,
                spec(4, dtype="int32"))
    assert 8 * row <= got.bytes < 9 * row
    update = count(lambda t, u: lax.dynamic_update_slice(t, u, (0, 0)),
                   table, (1, 64))
    assert update.bytes == 2 * row
    assert count(lambda t: t[5], table).bytes == 2 * row
    assert count(lambda t: t.reshape(64, -1), table).bytes == 0


# --- properties -------------------------------------------------------------
def layer(a):
    return jnp.tanh(a @ a) + a


KINDS = (*flops.KINDS, "bytes")


@few
@given(n=st.integers(0, 9), outer=st.integers(0, 4), m=size)
def test_loops_are_their_trips_times_the_body(n, outer, m):
    one, a = flops.count(layer, spec(m, m)), (m, m)
    for fn, times in (
            (scanned(n, layer), n), (scanned(outer, scanned(n, layer)),
                                     outer * n),
            (lambda a: lax.fori_loop(0, n, lambda i, a: layer(a), a), n)):
        cost = count(fn, a)
        assert all(getattr(cost, kind) == times * getattr(one, kind)
                   for kind in KINDS)
    cost = count(while_(lambda i: i < n, lambda i: i + 1, f=layer), a)
    assert (cost.matmul, cost.transcendental) == (
        n * one.matmul, n * one.transcendental)


@few
@given(b=size, m=size, n=size, wrt=st.sampled_from([None, "all"]))
def test_vmap_is_so_many_times_the_function(b, m, n, wrt):
    def f(x, w):
        return jnp.exp(x @ w).sum()

    one = count(f, (m, n), (n, m), wrt=wrt)
    cost = count(jax.vmap(f), (b, m, n), (b, n, m), wrt=wrt)
    assert all(getattr(cost, kind) == b * getattr(one, kind)
               for kind in flops.KINDS)


@few
@given(depth=st.integers(1, 5), rows=size, width=size,
       wrt=st.sampled_from([None, "all"]))
def test_a_stack_is_its_layers_scanned_jitted_or_neither(
        depth, rows, width, wrt):
    def step(x, w):
        return jnp.tanh(x @ w)

    def stack(w, x):
        for i in range(depth):
            x = step(x, w[i])
        return x

    def scan(w, x):
        return lax.scan(lambda x, w: (step(x, w), None), x, w)[0]

    args = (depth, width, width), (rows, width)
    one = count(step, (rows, width), (width, width), wrt=wrt)
    for fn in stack, scan, jax.jit(stack), jax.jit(scan):
        cost = count(fn, *args, wrt=wrt)
        assert cost.matmul == depth * one.matmul
        assert cost.transcendental == depth * one.transcendental
