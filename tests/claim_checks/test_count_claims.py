"""Claims about operations, FLOPs and number types, settled by counting."""

import functools

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from course_utils import chips, flops  # noqa: E402

D, HEADS = 64, 4
BF16 = jnp.bfloat16


def spec(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def projections(x, qkvo):
    return [x @ w for w in qkvo]


def attention(q, k, v):
    """Dot-product attention, (T, heads, D / heads) each; no mask."""
    scores = jnp.einsum("thd,shd->hts", q, k)
    return jnp.einsum("hts,shd->thd", jax.nn.softmax(scores, -1), v)


def gated_mlp(x, up, gate, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def two_matrix_mlp(x, up, down):
    return jax.nn.relu(x @ up) @ down


def products(fn, *args):
    return flops.count(fn, *args).matmul


def layer(x, norms, qkvo, mlp):
    """A decoder layer as a model writes it."""
    def norm(x, scale):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True)) * scale

    q, k, v = (y.reshape(-1, HEADS, D // HEADS)
               for y in projections(norm(x, norms[0]), qkvo[:3]))
    x = x + attention(q, k, v).reshape(-1, D) @ qkvo[3]
    return x + gated_mlp(norm(x, norms[1]), *mlp)


def decoder(tokens):
    weights = spec(D, D), spec(D, 4 * D), spec(4 * D, D)
    return flops.count(layer, spec(tokens, D), (spec(D), spec(D)),
                       (weights[0],) * 4, (weights[1], *weights[1:]))


def ratio(times, mlp, causal=False):
    """Attention's FLOPs over all other products', at T = times * D."""
    t = times * D
    heads = spec(t, HEADS, D // HEADS)
    over = products(attention, heads, heads, heads) / (2 if causal else 1)
    rest = products(projections, spec(t, D), (spec(D, D),) * 4)
    if mlp == 3:
        rest += products(gated_mlp, spec(t, D), spec(D, 4 * D),
                         spec(D, 4 * D), spec(4 * D, D))
    elif mlp == 2:
        rest += products(two_matrix_mlp, spec(t, D), spec(D, 4 * D),
                         spec(4 * D, D))
    return over / rest


def test_products_are_most_flops_and_few_ops():  # 4, 5
    cost = decoder(8)
    assert {op.name for op in cost.ops} >= {"dot_general", "add", "exp"}
    wide = flops.count(gated_mlp, spec(512, 4096), spec(4096, 16384),
                       spec(4096, 16384), spec(16384, 4096))
    assert wide.matmul / wide.total > 0.99
    calls = [op.matmul > 0 for op in cost.ops]
    assert sum(calls) < len(calls) / 2


def test_dots_cost_two_flops_for_each_multiply_add():  # 10
    p, n, m, batch = 5, 7, 11, 3
    for shapes, equation, cost in (
            (((p,), (p,)), "p,p->", 2 * p),
            (((n, p), (p,)), "np,p->n", 2 * n * p),
            (((n, p), (p, m)), "np,pm->nm", 2 * n * p * m),
            (((batch, n, p), (batch, p, m)), "bnp,bpm->bnm",
             2 * batch * n * p * m)):  # batch and contracted sizes once
        counted = flops.count(functools.partial(jnp.einsum, equation),
                              *(spec(*s) for s in shapes))
        assert counted.matmul == cost


M, L, K, N = 2, 6, 10, 14


def test_a_forward_product_costs_2mlkn():  # 11
    assert products(jnp.matmul, spec(M, L, K), spec(K, N)) == 2 * M * L * K * N


def test_each_gradient_costs_as_much_again():  # 12, 13
    args = spec(M, L, K), spec(K, N)
    once = 2 * M * L * K * N
    weight, activation, both = (
        flops.count(jnp.matmul, *args, wrt=wrt).matmul
        for wrt in (1, 0, "all"))
    assert weight == activation == 2 * once  # one gradient: a first layer's
    assert both == 3 * once


def test_attention_overtakes_at_8d_under_assumptions_only():  # 14
    assert ratio(8, mlp=3) == 1
    assert ratio(6, mlp=2) == 1
    assert ratio(16, mlp=3, causal=True) == 1
    assert ratio(2, mlp=0) == 1


def test_attention_is_two_products_of_equal_cost():  # 15, 16
    heads = spec(32, HEADS, D // HEADS)
    cost = flops.count(attention, heads, heads, heads)
    dots = [op.matmul for op in cost.ops if op.matmul]
    assert dots == [2 * 32 * 32 * D] * 2
    assert cost.matmul > 0.8 * cost.total


def test_the_t_by_t_matrix_is_a_question_of_memory():  # 17
    t, heads = 16 * 1024, 16
    assert round(heads * t * t * 2 / 1e9, 1) == 8.6  # GB, fp16, a sequence
    # The same result a tile at a time: the matrix is never whole.
    q, k, v = np.random.default_rng(0).standard_normal((3, 96, 8))
    whole = np.exp(q @ k.T)
    want = whole / whole.sum(1, keepdims=True) @ v
    top = np.full((96, 1), -np.inf)
    total, out = np.zeros((96, 1)), np.zeros((96, 8))
    for start in range(0, 96, 16):
        tile = q @ k[start:start + 16].T
        new = np.maximum(top, tile.max(1, keepdims=True))
        part, old = np.exp(tile - new), np.exp(top - new)
        total = total * old + part.sum(1, keepdims=True)
        out = out * old + part @ v[start:start + 16]
        top = new
    np.testing.assert_allclose(out / total, want, rtol=1e-12)


def test_an_elementwise_op_is_bound_by_memory_everywhere():  # 23
    x = spec(4096, dtype=jnp.float32)
    intensity = flops.count(jnp.add, x, x).intensity
    assert intensity == 1 / 12
    for name in chips.names():
        if "peak_fp32" in chips.get(name).values:
            assert intensity < chips.get(name).ridge("fp32") / 10


def test_a_convolution_is_mapped_to_a_matrix_product():  # 56
    rng = np.random.default_rng(0)
    image = rng.standard_normal((1, 3, 8, 8)).astype("f4")
    weights = rng.standard_normal((5, 3, 3, 3)).astype("f4")
    patches = np.lib.stride_tricks.sliding_window_view(
        image[0], (3, 3), axis=(1, 2)).transpose(1, 2, 0, 3, 4)
    product = patches.reshape(36, 27) @ weights.reshape(5, 27).T
    conv = jax.lax.conv(image, weights, (1, 1), "VALID")
    np.testing.assert_allclose(product.T.reshape(5, 6, 6), conv[0],
                               rtol=2e-4, atol=1e-5)


def error(k, accumulate):
    """Relative error of a sum of k fp16 products, each kept exactly."""
    rng = np.random.default_rng(0)
    a, b = rng.random((2, k)).astype(np.float16)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    total = accumulate(0)
    for product in a.astype(np.float32) * b.astype(np.float32):
        total = accumulate(total + accumulate(product))
    return abs(float(total) - exact) / exact


def test_fp16_products_summed_in_fp32_keep_their_accuracy():  # 57, 58
    a = np.random.default_rng(0).random(10_000).astype(np.float16)
    single = a.astype(np.float32) * a.astype(np.float32)
    double = a.astype(np.float64) * a.astype(np.float64)
    assert (single == double).all()  # a product of two fp16 fits fp32
    assert error(4096, np.float32) < 1e-5
    assert error(4096, np.float16) > 1000 * error(4096, np.float32)
    ones = np.float16(0)
    for _ in range(4096):
        ones = np.float16(ones + np.float16(1))
    assert ones == 2048  # there it sticks
    rounded = np.float64(np.float16(0.1))  # inputs are rounded all the same
    assert rounded != 0.1


def overlapped(copies, computes):
    """Seconds with two buffers: copy i + 2 waits for compute i."""
    copied, computed = [], []
    for i, (copy, compute) in enumerate(zip(copies, computes, strict=True)):
        free = computed[i - 2] if i > 1 else 0
        start = max(copied[-1] if copied else 0, free)
        copied.append(start + copy)
        begin = max(copied[-1], computed[-1] if computed else 0)
        computed.append(begin + compute)
    return computed[-1]


def test_overlap_hides_the_shorter_part_and_at_most_halves_the_time():  # 63
    for copy, compute in ((3, 5), (5, 3), (4, 4)):
        n = 200
        apart = n * (copy + compute)
        together = overlapped([copy] * n, [compute] * n)
        assert together == n * max(copy, compute) + min(copy, compute)
        assert 1 < apart / together < 2
