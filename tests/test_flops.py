"""flops.count against closed forms, XLA, FlopCounterMode and itself."""

import contextlib
import copy
import functools
import gc
import math
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_utils import flops

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
jnp, lax = jax.numpy, jax.lax
nn, F = torch.nn, torch.nn.functional
few = settings(max_examples=8, deadline=None)
size = st.integers(1, 9)
X, W, B = (512, 1024), (1024, 2048), (2048,)
MATMUL, EACH = 2 * 512 * 1024 * 2048, 512 * 2048


def spec(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def jax_layer(x, w, b):
    return jax.nn.relu(x @ w + b)


def torch_layer(x, w, b):
    return torch.relu(x @ w + b)


def bf16(front):
    if front == "jax":
        return jax_layer, [spec(*s, dtype="bfloat16") for s in (X, W, B)]
    return torch_layer, [meta(*s, dtype=torch.bfloat16) for s in (X, W, B)]


def square(a):
    return a @ a


def scanned(n, f):
    return lambda a: lax.scan(lambda c, _: (f(c), None), a, None, n)[0]


A = spec(32, 32)
PRODUCT = 2 * 32**3


# --- the running example ----------------------------------------------------
@pytest.mark.parametrize("front", ["jax", "torch"])
def test_example(front):
    fn, args = bf16(front)
    cost = flops.count(fn, *args)
    assert cost.matmul == 2_147_483_648 == MATMUL
    assert cost.elementwise == 2_097_152 == 2 * EACH
    assert cost.total == cost.matmul + cost.elementwise
    assert cost.transcendental == cost.integer == 0 and not cost.unknown
    # product, bias, max: each reads its inputs and writes its output once
    x, w, b, y = (2 * math.prod(s) for s in (X, W, B, (512, 2048)))
    assert cost.bytes == (x + w + y) + (y + b + y) + (y + y)
    assert cost.intensity == cost.total / cost.bytes
    assert sum(op.flops for op in cost.ops) == cost.total


@pytest.mark.parametrize("front", ["jax", "torch"])
@pytest.mark.parametrize("wrt, products", [
    ("all", 3), ((1, 2), 2), ([1], 2), (0, 2), ((2,), 1), ((0, 1, 2), 3)])
def test_example_backward(front, wrt, products):
    fn, args = bf16(front)
    assert flops.count(fn, *args, wrt=wrt).matmul == products * MATMUL


def test_linear_bias_is_elementwise():
    fn, (x, w, b) = bf16("torch")
    cost = flops.count(lambda x, w, b: F.relu(F.linear(x, w.T, b)), x, w, b)
    assert (cost.matmul, cost.elementwise) == (MATMUL, 2 * EACH)
    assert flops.count(fn, x, w, b).bytes - cost.bytes == 4 * EACH


def test_three_by_three():
    assert flops.count(jnp.matmul, spec(3, 3), spec(3, 3)).total == 54
    assert flops.count(torch.matmul, meta(3, 3), meta(3, 3)).total == 54


def test_module():
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    before = copy.copy(vars(model)), copy.copy(vars(model[0]))
    hooks = torch.nn.modules.module
    n_hooks = len(hooks._global_forward_hooks)
    cost = flops.count(model, torch.randn(32, 64), wrt="params")
    first, last = 2 * 32 * 64 * 128, 2 * 32 * 128 * 10
    assert cost.matmul == 2 * first + 3 * last  # no gradient of the input
    assert cost.params == sum(p.numel() for p in model.parameters())
    paths = {op.path: 0 for op in cost.ops}
    for op in cost.ops:
        paths[op.path] += op.matmul
    assert paths["Sequential.0"] == first
    assert paths["backward"] == first + 2 * last
    assert before == (vars(model), vars(model[0]))
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(v, model.state_dict()[k])
               for k, v in state.items())
    assert all(p.grad is None and type(p) is nn.Parameter
               for p in model.parameters())
    assert len(hooks._global_forward_hooks) == n_hooks
    everything = flops.count(model, meta(32, 64), wrt="all")
    assert everything.matmul == 3 * (first + last)


def test_tied_weight_counts_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(100, 8), nn.Linear(8, 100)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    cost = flops.count(Tied(), torch.arange(7))
    assert cost.params == 800 + 100
    assert cost.matmul == 2 * 7 * 8 * 100  # the lookup is free


def test_training_step_leaves_the_model_alone():
    def step(model, x):
        loss = model(x).sum()
        loss.backward()
        return loss

    model = nn.Linear(16, 4)
    assert flops.count(step, model, torch.randn(8, 16)).matmul == (
        2 * 2 * 8 * 16 * 4)
    assert model.weight.grad is None


def test_frozen_parameters_have_no_gradient():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[0].requires_grad_(False)
    cost = flops.count(model, meta(4, 16), wrt="params")
    assert cost.matmul == 3 * 2 * 4 * 16 * 16


# --- single ops, closed forms -----------------------------------------------
TORCH = {
    "dot": (torch.dot, [(8,), (8,)], 16),
    "mv": (torch.mv, [(4, 8), (8,)], 64),
    "broadcast": (torch.matmul, [(2, 1, 4, 8), (3, 8, 5)], 1920),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b),
               [(4, 16, 32), (4, 32, 12)], 2 * 4 * 16 * 32 * 12),
    "addmm": (torch.addmm, [(4, 5), (4, 8), (8, 5)], 320),
    "baddbmm": (torch.baddbmm, [(2, 4, 5), (2, 4, 8), (2, 8, 5)], 640),
    "layer_norm": (lambda x: F.layer_norm(x, (64,)), [(8, 64)], 0),
    "conv": (F.conv2d, [(2, 4, 10, 10), (8, 4, 3, 3)], 73728),
    "conv grouped": (lambda x, w: F.conv2d(x, w, groups=4),
                     [(2, 8, 10, 10), (16, 2, 3, 3)], 73728),
    "conv dilated": (lambda x, w: F.conv2d(x, w, dilation=2),
                     [(2, 4, 12, 12), (8, 4, 3, 3)], 73728),
    "conv padded": (lambda x, w: F.conv2d(x, w, padding=2),
                    [(2, 2, 12, 12), (4, 2, 5, 5)], 115200),
    "conv1d": (F.conv1d, [(2, 4, 20), (6, 4, 3)], 2 * 2 * 6 * 18 * 12),
    "conv transposed": (lambda x, w: F.conv_transpose2d(x, w, stride=2),
                        [(1, 3, 2, 2), (3, 1, 2, 2)], 96),
    "empty": (torch.matmul, [(0, 8), (8, 3)], 0),
    "empty k": (torch.matmul, [(4, 0), (0, 3)], 0),
    "attention": (F.scaled_dot_product_attention,
                  [(1, 12, 64, 64)] * 3, 12_582_912),
    "attention dv": (F.scaled_dot_product_attention, [
        (2, 4, 32, 16), (2, 4, 48, 16), (2, 4, 48, 24)],
        2 * 2 * 4 * 32 * 48 * (16 + 24)),
    "grouped queries": (
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, enable_gqa=True),
        [(2, 8, 64, 16), (2, 2, 64, 16), (2, 2, 64, 16)],
        4 * 2 * 8 * 64 * 64 * 16),
    "vmap": (torch.vmap(torch.matmul), [(3, 4, 5), (3, 5, 8)], 960),
    "func.grad": (torch.func.grad(lambda w, x: (x @ w).sum()),
                  [(4, 8), (6, 4)], 2 * 2 * 6 * 4 * 8),
}
DN = ("NCHW", "OIHW", "NCHW")


def conv(stride=1, padding="VALID", **more):
    return lambda x, w: lax.conv_general_dilated(
        x, w, (stride, stride), padding, dimension_numbers=DN, **more)


JAX = {
    "product": (square, [(32, 32)], PRODUCT),
    "einsum": (lambda a, b: jnp.einsum("bij,bjk->bik", a, b),
               [(4, 16, 32), (4, 32, 12)], 2 * 4 * 16 * 32 * 12),
    "einsum of 3": (lambda a, b, c: jnp.einsum("ij,jk,k->i", a, b, c),
                    [(4, 8), (8, 16), (16,)], 2 * (8 * 16 + 4 * 8)),
    "vmap": (jax.vmap(jnp.matmul), [(3, 4, 5), (3, 5, 8)], 960),
    "attention": (jax.nn.dot_product_attention, [(1, 128, 4, 64)] * 3,
                  4 * 4 * 128 * 128 * 64),
    "conv": (conv(), [(2, 4, 10, 10), (8, 4, 3, 3)], 73728),
    "conv grouped": (conv(feature_group_count=4),
                     [(2, 8, 10, 10), (16, 2, 3, 3)], 73728),
    "conv dilated": (conv(rhs_dilation=(2, 2)),
                     [(2, 4, 12, 12), (8, 4, 3, 3)], 73728),
    "conv padded": (conv(padding="SAME"),
                    [(2, 2, 12, 12), (4, 2, 5, 5)], 115200),
    "conv transposed": (
        lambda x, w: lax.conv_transpose(x, w, (2, 2), "VALID",
                                        dimension_numbers=DN),
        [(1, 3, 2, 2), (1, 3, 2, 2)], 96),
    "empty": (jnp.matmul, [(0, 8), (8, 3)], 0),
    "empty k": (jnp.matmul, [(4, 0), (0, 3)], 0),
    "fori": (lambda a: lax.fori_loop(0, 10, lambda i, c: square(c), a),
             [(32, 32)], 10 * PRODUCT),
    "map": (lambda a: lax.map(lambda r: r @ jnp.ones((32, 8)), a),
            [(6, 32)], 2 * 6 * 32 * 8),
    "scan": (scanned(10, square), [(32, 32)], 10 * PRODUCT),
    "nested scan": (scanned(3, scanned(5, square)), [(32, 32)], 15 * PRODUCT),
    "associative scan": (lambda a: lax.associative_scan(jnp.matmul, a),
                         [(8, 16, 16)], 11 * 2 * 16**3),
    "dead code": (lambda a: (a @ a, a.sum())[1], [(32, 32)], 0),
    "written twice": (lambda a: a @ a + a @ a, [(32, 32)], 2 * PRODUCT),
}


@pytest.mark.parametrize("name", TORCH)
def test_torch_matmul(name):
    fn, shapes, expected = TORCH[name]
    cost = flops.count(fn, *(meta(*s) for s in shapes))
    assert (cost.matmul, cost.unknown) == (expected, ())


@pytest.mark.parametrize("name", JAX)
def test_jax_matmul(name):
    fn, shapes, expected = JAX[name]
    cost = flops.count(fn, *(spec(*s) for s in shapes))
    assert (cost.matmul, cost.unknown) == (expected, ())


@pytest.mark.parametrize("name", ["conv", "conv grouped", "conv dilated",
                                  "conv padded", "conv transposed"])
def test_conv_backward_is_twice_the_forward(name):
    for table, like in (TORCH, meta), (JAX, spec):
        fn, shapes, forward = table[name]
        args = [like(*s) for s in shapes]
        assert flops.count(fn, *args, wrt="all").matmul == 3 * forward
        assert flops.count(fn, *args, wrt=1).matmul == 2 * forward


@pytest.mark.parametrize("fn, n, matmul, integer", [
    (jnp.matmul, spec(8, 8, dtype="complex64"), 4096, 0),
    (jnp.matmul, spec(8, 8, dtype="int32"), 0, 1024),
    (torch.matmul, meta(8, 8, dtype=torch.complex64), 4096, 0),
    (torch.matmul, meta(8, 8, dtype=torch.int32), 0, 1024)])
def test_complex_and_integer(fn, n, matmul, integer):
    cost = flops.count(fn, n, n)
    assert (cost.matmul, cost.integer) == (matmul, integer)


def test_reductions_and_powers():
    n = 1000
    for fn, like in (jnp.sum, spec), (torch.sum, meta):
        assert flops.count(fn, like(n)).total == n - 1
    assert flops.count(jnp.cumsum, spec(n)).elementwise == n - 1
    assert flops.count(lambda x: x**3, spec(n)).elementwise == 2 * n
    assert flops.count(lambda x: x**3, meta(n)).elementwise == 2 * n
    assert flops.count(jnp.exp, spec(n)).transcendental == n
    assert flops.count(torch.exp, meta(n)).transcendental == n
    assert flops.count(lambda x: x > 0, spec(n)).integer == n
    assert flops.count(jnp.sort, spec(n)).total == 0


def test_composite_ops_are_the_sum_of_their_parts():
    rows, n = 4, 20
    cost = flops.count(lambda x: F.softmax(x, -1), meta(rows, n))
    # max and sum (n - 1 each), subtract, divide; one exp a value
    assert cost.elementwise == rows * (4 * n - 2)
    assert cost.transcendental == rows * n
    assert [op.name for op in cost.ops] == ["_softmax"]
    assert flops.count(jax.nn.softmax,
                       spec(rows, n)).transcendental == rows * n
    a = flops.count(lambda x: jax.nn.gelu(x, False), spec(rows, n))
    b = flops.count(F.gelu, meta(rows, n))
    assert (a.elementwise, a.transcendental) == (
        b.elementwise, b.transcendental) == (4 * rows * n, rows * n)


def test_bytes_of_rows_and_views():
    row = 64 * 4
    # one number read, one written, as XLA's memory_analysis has it
    assert flops.count(lambda x: x * x, spec()).bytes == 4 + 4
    assert flops.count(lambda x: x * x, meta()).bytes == 4 + 4
    table, update = spec(10_000, 64), spec(1, 64)
    dus = flops.count(lambda t, u: lax.dynamic_update_slice(t, u, (0, 0)),
                      table, update)
    assert dus.bytes == 2 * row
    ids = spec(4, dtype="int32")
    assert 8 * row <= flops.count(lambda t, i: t[i], table, ids).bytes < (
        9 * row)
    assert flops.count(lambda x: x.reshape(-1), table).bytes == 0
    assert flops.count(lambda x: x.view(-1, 100).T, meta(100, 64)).bytes == 0
    assert flops.count(lambda x: x * x, spec(64)).bytes == 2 * row
    assert flops.count(lambda x: x * x, meta(64)).bytes == 2 * row


def test_lstm_is_its_products():
    step = 2 * 4 * 32 * (16 + 32)
    cost = flops.count(nn.LSTM(16, 32), torch.randn(10, 2, 16))
    assert cost.matmul == 10 * 2 * step and not cost.unknown
    assert torch.backends.mkldnn.enabled


def test_remat_counts_the_recompute():
    def f(x, w):
        return jax.checkpoint(lambda x, w: jnp.tanh(x @ w) @ w)(x, w)

    plain = flops.count(lambda x, w: jnp.tanh(x @ w) @ w, A, A, wrt="all")
    cost = flops.count(f, A, A, wrt="all")
    assert plain.matmul == 6 * PRODUCT
    # the second product need not be made again, the first must
    assert cost.matmul == plain.matmul + PRODUCT


def test_cond_is_its_dearest_branch():
    cost = flops.count(
        lambda p, a: lax.cond(p, square, lambda a: square(square(a)), a),
        spec(dtype="bool"), A)
    assert cost.matmul == 2 * PRODUCT
    paths = [op.path for op in cost.ops if op.matmul]
    assert len(paths) == 2 and all("dearest branch" in at for at in paths)


def test_unknown_is_said():
    n = spec(dtype="int32")
    with pytest.warns(UserWarning, match="trips not known"):
        cost = flops.count(lambda n, a: lax.fori_loop(
            0, n, lambda i, c: square(c), a), n, A)
    assert cost.matmul == 0 and f"{PRODUCT:,}" in cost.unknown[0]
    with pytest.warns(UserWarning, match="igamma") as said:
        cost = flops.count(lambda x: jax.scipy.special.gammainc(
            x, jax.scipy.special.gammainc(x, x)), spec(64))
    assert cost.unknown == ("igamma",) and len(said) == 1
    with pytest.warns(UserWarning, match="_linalg_svd"):
        cost = flops.count(torch.linalg.svd, meta(8, 8))
    assert "aten._linalg_svd" in str(cost)


# --- gradients: counted, or refused -----------------------------------------
@pytest.mark.parametrize("mode", [
    torch.no_grad, torch.inference_mode, contextlib.nullcontext])
@pytest.mark.parametrize("wrap", [
    lambda y: {"y": (y, None)}, lambda y: [y, 3, "text"]])
def test_gradients_under_any_mode_and_in_any_result(mode, wrap):
    with mode():
        model, x = nn.Linear(8, 8), torch.randn(4, 8)
        cost = flops.count(lambda m, x: wrap(m(x)), model, x, wrt="all")
        assert torch.is_grad_enabled() == (mode is contextlib.nullcontext)
    assert cost.matmul == 3 * 2 * 4 * 8 * 8
    assert model.weight.grad is None


def test_jax_results_that_are_no_arrays():
    def f(x):
        return {"y": x @ x, "n": 3, "none": None, "at": jnp.argmax(x)}

    cost = flops.count(f, A, wrt=0)
    assert cost.matmul == 3 * PRODUCT
    assert cost.integer == flops.count(f, A).integer == 32 * 32 - 1


@pytest.mark.parametrize("fn, like", [
    (lambda x, y: None, spec), (lambda x, y: y * 2, spec), (
        lambda x, y: lax.stop_gradient(x @ y), spec),
    (lambda x, y: jnp.argmax(x), spec), (lambda x, y: 3, spec),
    (lambda x, y: None, meta), (lambda x, y: y * 2, meta),
    (lambda x, y: (x @ y).detach(), meta), (lambda x, y: 3, meta),
    (lambda x, y: torch.no_grad()(torch.matmul)(x, y), meta)])
def test_no_gradient_is_no_silent_forward_count(fn, like):
    with pytest.raises(ValueError, match="nothing fn returns depends on"):
        flops.count(fn, like(4, 4), like(4, 4), wrt=0)
    flops.count(fn, like(4, 4), like(4, 4))


def test_gradient_of_no_arithmetic_is_no_refusal():
    for like in spec, meta:
        assert flops.count(lambda x: x, like(4), wrt=0).total == 0
        assert flops.count(lambda x: x.sum(), like(4), wrt=0).total == 3


# --- counting changes nothing, however fn reaches it ------------------------
class Cached(nn.Module):
    """Its buffers and attributes keep what they see."""

    def __init__(self):
        super().__init__()
        self.norm, self.lin = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.last = None

    def forward(self, x):
        self.last = self.lin(self.norm(x)) if self.last is None else (
            self.lin(self.norm(x)) + self.last)
        return self.last


class Trainer:
    def __init__(self, model):
        self.state, self.steps = {"model": model}, 0

    def step(self, x):
        self.steps += 1
        loss = self.state["model"](x).sum()
        loss.backward()
        return loss


REACHES = {
    "module": lambda m: (m, ()),
    "method": lambda m: (m.forward, ()),
    "partial": lambda m: (functools.partial(m.forward), ()),
    "argument": lambda m: (lambda m, x: m(x), (m,)),
    "list": lambda m: (lambda ms, x: ms[0](x), ([m],)),
    "compiled": lambda m: (torch.compile(lambda m, x: m(x)), (m,)),
    "object": lambda m: (Trainer(m).step, ()),
}


@pytest.mark.parametrize("reach", REACHES)
def test_counting_leaves_a_model_alone(reach):
    model = Cached()
    fn, args = REACHES[reach](model)
    cost = flops.count(fn, *args, meta(4, 8))
    product = 2 * 4 * 8 * 8  # both gradients: the norm's weights lie below
    assert cost.matmul == product * (3 if reach == "object" else 1)
    if reach != "object":  # whose step has its own backward
        cost = flops.count(fn, *args, meta(4, 8), wrt="params")
        assert cost.matmul == 3 * product
    assert cost.params == sum(p.numel() for p in model.parameters()) == 88
    assert model.last is None and model.norm.num_batches_tracked == 0
    assert model.norm.running_mean.abs().sum() == 0
    assert all(p.grad is None for p in model.parameters())


def test_counting_draws_no_random_numbers():
    torch.manual_seed(0)
    first = torch.rand(3)
    torch.manual_seed(0)
    flops.count(lambda x: F.dropout(x) + torch.rand(4, 8), meta(4, 8))
    assert torch.equal(torch.rand(3), first)


def test_counting_leaves_python_and_torch_as_they_were():
    cond, eager = torch.cond, torch.backends.mkldnn.enabled
    for fn in torch.relu, lambda x: x @ x.nothing:
        with contextlib.suppress(ValueError):
            flops.count(fn, meta(4, 8))
        assert gc.isenabled() and torch.cond is cond
        assert torch.backends.mkldnn.enabled == eager
    gc.disable()
    try:
        flops.count(torch.relu, meta(4, 8))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_modules_that_hold_computed_tensors():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch prefers its newer form
        normed = nn.utils.weight_norm(nn.Linear(8, 8))
    filled = Cached()
    for model in normed, filled:
        model(torch.randn(4, 8))  # leaves a tensor that is no leaf
        cost = flops.count(model, meta(4, 8), wrt=(0,))
        assert cost.matmul == 2 * 2 * 4 * 8 * 8
    assert filled.last.grad_fn is not None


# --- writes, kinds, loops, views --------------------------------------------
def put(x, i, y):
    x[i] = y
    return x


ROW = 64 * 4
WRITES = {  # fn, arguments after x[1000,64], rows, adds
    "set": (lambda x: x.at[3].set(0.), [], 1, 0),
    "set rows": (lambda x, i: x.at[i].set(0.), ["i"], 100, 0),
    "add a row": (lambda x, i, y: x.at[i].add(y), ["i", "y"], 100, 1),
    "slice": (lambda x: lax.dynamic_update_slice(
        x, jnp.zeros((2, 64)), (0, 0)), [], 2, 0),
    "torch set": (lambda x: put(x, 3, 0.), [], 1, 0),
    "torch accumulate": (lambda x, i, y: x.index_put_(
        (i,), y.expand(100, 64), accumulate=True), ["i", "y"], 100, 1),
    "torch scatter": (lambda x, i: x.scatter_(
        0, i[:, None].expand(100, 64), 0.), ["i"], 100, 0),
    "torch scatter maxima": (lambda x, i, y: x.scatter_reduce(
        0, i[:, None].expand(100, 64), y.expand(100, 64), "amax"),
        ["i", "y"], 100, 1),
    "torch index add": (lambda x, i, y: x.index_add_(
        0, i, y.expand(100, 64)), ["i", "y"], 100, 1),
    "torch index add, scaled": (lambda x, i, y: x.index_add_(
        0, i, y.expand(100, 64), alpha=3), ["i", "y"], 100, 2),
    "torch index copy": (lambda x, i, y: x.index_copy_(
        0, i, y.expand(100, 64)), ["i", "y"], 100, 0),
    "torch index fill": (lambda x, i: x.index_fill_(0, i, 0.), ["i"], 100, 0),
    "torch slice scatter": (lambda x, y: x.slice_scatter(
        y.expand(5, 64), 0, 0, 5), ["y"], 5, 0),
    "torch fill": (lambda x: x[:5].zero_(), [], 5, 0),
    "torch copy": (lambda x, y: x[:5].copy_(y), ["y"], 5, 0),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_moves_what_it_writes(name):
    fn, names, rows, each = WRITES[name]
    if name.startswith("torch"):
        more = {"i": meta(100, dtype=torch.int64), "y": meta(64)}
        x = meta(1000, 64)
    else:
        more = {"i": spec(100, dtype="int32"), "y": spec(64)}
        x = spec(1000, 64)
    op = flops.count(fn, x, *(more[n] for n in names)).ops[-1]
    small = 100 * 8 + 64 * 8 + ROW + 4  # the indices and the value read
    assert rows * ROW <= op.bytes <= rows * ROW + small
    assert op.elementwise == each * rows * 64 and not op.integer


@pytest.mark.parametrize("fn, elementwise", [
    (lambda x: x.clamp(0, 1), 2), (lambda x: x.clamp(max=1), 1),
    (lambda x: x.clamp(x, x), 2), (lambda x: torch.add(x, x, alpha=2), 2),
    (lambda x: torch.sub(x, x, alpha=2), 2), (lambda x: 1 - x, 1),
    (lambda x: x.div(x, rounding_mode="floor"), 2), (lambda x: x / x, 1),
    (lambda x: torch.addcmul(x, x, x), 2), (lambda x: torch.fmax(x, x), 1),
    (lambda x: torch.lerp(x, x, 0.5), 3),
    (lambda x: torch.nn.functional.relu6(x), 2)])
def test_elementwise_kinds(fn, elementwise):
    cost = flops.count(fn, meta(10))
    assert (cost.elementwise, cost.integer) == (10 * elementwise, 0)


@pytest.mark.parametrize("fn", [
    lambda x: torch.polygamma(1, x), lambda x: torch.igamma(x, x),
    lambda x: torch.hypot(x, x), torch.angle, torch.special.airy_ai])
def test_unlisted_pointwise_ops_are_unknown(fn):
    with pytest.warns(UserWarning, match="left out"):
        cost = flops.count(fn, meta(10))
    assert len(cost.unknown) == 1 and cost.total == 0


@pytest.mark.parametrize("fn", [
    lambda x: x.t_().unsqueeze_(0).squeeze_(), lambda x: x.transpose_(0, 1),
    lambda x: x.resize_(2, 2)])
def test_views_in_place_are_free(fn):
    cost = flops.count(fn, meta(4, 8))
    assert not cost.unknown and cost.bytes == cost.total == 0


def test_rnn_batch_first():
    cost = flops.count(nn.RNN(8, 4, batch_first=True), meta(2, 3, 8))
    assert cost.matmul == 3 * 2 * 2 * 4 * (8 + 4) and not cost.unknown


def test_compare_with_gradients_of_a_module():
    for wrt, products in ("all", 3), (0, 2), ("params", 2):
        found = flops.compare(nn.Linear(8, 8), meta(4, 8), wrt=wrt)
        assert list(found["matmul"]) == [products * 512] * 2


# --- properties -------------------------------------------------------------
@few
@given(n=st.integers(0, 20), m=size, wrt=st.sampled_from([None, "all"]))
def test_scan_is_n_times_its_body(n, m, wrt):
    def body(a):
        return jnp.tanh(a @ a)

    one = flops.count(body, spec(m, m))
    cost = flops.count(scanned(n, body), spec(m, m))
    for kind in (*flops.KINDS, "total", "bytes"):
        assert getattr(cost, kind) == n * getattr(one, kind)
    assert {op.repeats for op in cost.ops} == ({n} if n else set())
    full = flops.count(scanned(n, body), spec(m, m), wrt=wrt)
    assert sum(op.flops for op in full.ops) == full.total
    assert full.matmul == n * one.matmul * (3 if wrt else 1)


@few
@given(rows=size, widths=st.lists(size, min_size=2, max_size=5),
       wrt=st.sampled_from([None, "params", "all"]))
def test_jax_torch_and_the_other_counters_agree(rows, widths, wrt):
    def mlp(params, x):
        for w, b in params:
            x = jnp.maximum(x @ w + b, 0)
        return x

    def torch_mlp(params, x):
        for w, b in params:
            x = torch.relu(x @ w + b)
        return x

    shapes = [((i, o), (o,)) for i, o in
              zip(widths, widths[1:], strict=False)]
    ours = flops.count(mlp, [tuple(spec(*s) for s in pair)
                             for pair in shapes], spec(rows, widths[0]),
                       wrt=wrt)
    args = ([tuple(meta(*s) for s in pair) for pair in shapes],
            meta(rows, widths[0]))
    theirs = flops.count(torch_mlp, *args, wrt=wrt)
    assert ours.matmul == theirs.matmul
    assert ours.params == theirs.params
    found = flops.compare(torch_mlp, *args, wrt=wrt)
    assert list(found["matmul"]) == [ours.matmul] * 2
    if wrt is None:
        assert ours.elementwise == theirs.elementwise
        assert ours.bytes == theirs.bytes


# --- compare ----------------------------------------------------------------
def test_compare_agrees_with_xla_where_xla_is_right():
    for fn, args in ((jax_layer, bf16("jax")[1]), (square, [A]),
                     (JAX["einsum"][0], [spec(4, 8, 2), spec(4, 2, 6)])):
        found = flops.compare(fn, *args).set_index("counter")
        assert found.flops["XLA lowered"] == found.flops["course_utils"]
        assert found.why["XLA lowered"] == "agrees"


def test_compare_says_why_not():
    found = flops.compare(scanned(10, square), A).set_index("counter")
    assert found.flops["course_utils"] == 10 * PRODUCT
    assert found.flops["XLA lowered"] < 2 * PRODUCT
    assert "loop" in found.why["XLA lowered"]
    c = spec(8, 8, dtype="complex64")
    found = flops.compare(jnp.matmul, c, c).set_index("counter")
    assert "complex" in found.why["XLA lowered"]
    assert "loop" not in found.why["XLA lowered"]  # it has none
    found = flops.compare(torch.mv, meta(4, 8), meta(8))
    assert list(found["matmul"]) == [64, 0] and "mv" in found["why"][1]


# --- how it reads, and bad input --------------------------------------------
def test_table_and_text():
    fn, args = bf16("jax")
    cost = flops.count(fn, *args)
    table = cost.table()
    assert table["flops"].sum() == cost.total
    assert list(table["name"]) == ["dot_general", "add", "max"]
    assert table["shapes"][0] == (
        "bf16[512,1024]", "bf16[1024,2048]", "bf16[512,2048]")
    assert [line.startswith("test_flops.py:") for line in table["line"]] == [
        True] * 3 and table["line"].nunique() == 1
    assert "2,147,483,648" in str(cost) and str(cost) in cost._repr_html_()


def test_a_table_of_nothing_has_its_columns():
    for like in spec, meta:
        table = flops.count(lambda x: x, like(3)).table()
        assert len(table) == 0 and {"name", "flops", "bytes"} <= {*table}


def test_an_inverse_costs_the_same_in_both():
    for n in 8, 12:
        costs = {flops.count(fn, like(n, n)).matmul for fn, like in (
            (jnp.linalg.inv, spec), (torch.linalg.inv, meta))}
        assert costs == {2 * n**3 // 3 + 2 * n**3}


def test_whose_file_it_is():
    from course_utils.flops import _rules
    python, mine = Path(contextlib.__file__).parent, Path(__file__)
    for file, name in {
            mine: mine.name, "/srv/jax/torch/model.py": "model.py",
            "C:\\Temp\\ipykernel_7\\89.py": "<cell>",
            "/tmp/ipykernel_7/89.py": "<cell>", contextlib.__file__: "",
            torch.nn.functional.__file__: "", jax.nn.__file__: "",
            _rules.__file__: "", "<frozen importlib._bootstrap>": "",
            "<eval_with_key>.3": "", "<string>": "",
            python / "site-packages" / "einops" / "ops.py": "ops.py"}.items():
        assert _rules.shown(str(file)) == name, file


def test_torch_casts_are_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flops.count(nn.LayerNorm(8).bfloat16(),
                    meta(4, 8, dtype=torch.bfloat16), wrt="all")


@pytest.mark.parametrize("call, error, words", [
    (lambda: flops.count(3, A), TypeError, "fn is a int"),
    (lambda: flops.count(square, A, kwargs=[1]), TypeError, "kwargs"),
    (lambda: flops.count(jax_layer, spec(3, 4), spec(5, 6), spec(6)),
     ValueError, r"x f32\[3,4\], w f32\[5,6\]"),
    (lambda: flops.count(torch_layer, meta(3, 4), meta(5, 6), meta(6)),
     ValueError, r"x f32\[3,4\], w f32\[5,6\]"),
    (lambda: flops.count(lambda a, b: a, A, meta(3)), TypeError, "mix"),
    (lambda: flops.count(nn.Linear(3, 3), A), TypeError, "mix"),
    (lambda: flops.count(square, A, wrt="parms"), ValueError, "'params'"),
    (lambda: flops.count(square, A, wrt=1), ValueError, "1 arguments"),
    (lambda: flops.count(square, A, wrt=True), ValueError, "True"),
    (lambda: flops.count(square, spec(3, 3, dtype="int32"), wrt="all"),
     ValueError, "floating"),
    (lambda: flops.count(lambda x: x if x.sum() > 0 else -x, meta(3)),
     ValueError, "looks at no value"),
    (lambda: flops.count(lambda x: x if x.sum() > 0 else -x, spec(3)),
     ValueError, "looks at no value")])
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        call()


def rows_of_three(n):
    return sum(torch.ones(n, 3) @ torch.ones(3, k) for k in (2, 2))


@pytest.mark.parametrize("fn", [
    rows_of_three, lambda n: rows_of_three(n)], ids=["itself", "a helper"])
def test_the_code_tells_the_framework_where_arguments_do_not(fn):
    assert flops.count(fn, 4).matmul == 2 * 2 * 4 * 3 * 2


MODEL = nn.Linear(3, 2, bias=False)


@pytest.mark.parametrize("fn", [
    lambda xs: [MODEL(x) for x in xs],
    lambda xs, model=MODEL: [*map(model, xs)],
    lambda xs, *, made={"of": MODEL}: [*map(made["of"], xs)]],
    ids=["in a comprehension", "by default", "by a keyword's default"])
def test_a_module_that_a_function_names_is_counted_on_copies(fn):
    cost = flops.count(fn, [meta(4, 3)] * 2, wrt="params")
    assert cost.matmul == 2 * 2 * 2 * 4 * 3 * 2  # of X no gradient
    assert cost.params == 6
    assert MODEL.weight.grad is None
