"""flops.count of PyTorch: cases where other counters go wrong, by kind.

The cases and their values are worked by hand from the shapes; other tools'
answers (0 for attention on a CPU, four times a grouped gradient, ...) are
what each of them is here for.
"""

import dataclasses
import functools
import inspect
import math
import random
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_utils import flops

torch = pytest.importorskip("torch")
formulas = pytest.importorskip("torch.utils.flop_counter")
checkpoints = pytest.importorskip("torch.utils.checkpoint")
biases = pytest.importorskip("torch.nn.attention.bias")
nn, F = torch.nn, torch.nn.functional
few = settings(max_examples=8, deadline=None)
size = st.integers(1, 9)


def meta(*shape, dtype=torch.float32, grad=False):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def matmul(fn, *shapes, wrt=None, dtype=torch.float32):
    args = [meta(*s, dtype=dtype) if isinstance(s, tuple) else s
            for s in shapes]
    cost = flops.count(fn, *args, wrt=wrt)
    assert sum(op.flops for op in cost.ops) == cost.total
    assert cost.unknown == ()
    return cost.matmul


ids = torch.arange(64).reshape(2, 32) % 100


class Block(nn.Module):
    """Attention and MLP of width 64, 4 heads; kv of them keys and values."""

    def __init__(self, kv=4, fused=True):
        super().__init__()
        self.heads, self.kv, self.fused = 4, kv, fused
        self.q, self.o = (nn.Linear(64, 64, bias=False) for _ in "qo")
        self.k, self.v = (nn.Linear(64, 16 * kv, bias=False) for _ in "kv")
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(2))

    def attention(self, x):
        q, k, v = (of(x).unflatten(-1, (-1, 16)).transpose(1, 2)
                   for of in (self.q, self.k, self.v))
        if self.fused:
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=self.kv != 4)
        else:
            y = torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v
        return self.o(y.transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Decoder(nn.Module):
    """Two blocks, 100 words; ids are 2 rows of 32."""

    def __init__(self, tied=False, checkpoint=False, **how):
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.blocks = nn.ModuleList(Block(**how) for _ in range(2))
        self.head = nn.Linear(64, 100, bias=False)
        self.checkpoint = checkpoint
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoints.checkpoint(
                block, x, use_reentrant=False) if self.checkpoint else (
                block(x))
        return self.head(x)


@torch.library.custom_op("course::product", mutates_args=())
def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


@product.register_fake
def _(a, b):
    return a.new_empty(a.shape[0], b.shape[1])


@torch.library.custom_op("course::told", mutates_args=())
def told(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


@told.register_fake
def _(a, b):
    return a.new_empty(a.shape[0], b.shape[1])


@formulas.register_flop_formula(torch.ops.course.told)
def _(a_shape, b_shape, *args, out_shape=None, **kwargs):
    return 2 * math.prod(a_shape) * b_shape[1]


@torch.library.custom_op("course::into", mutates_args=("out",))
def into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(a @ b)


class Square(torch.autograd.Function):
    """x @ x with a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x @ x

    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g @ x.T + x.T @ g


def either(p, x):
    return torch.cond(p, lambda x: x @ x, lambda x: x @ x @ x, (x,))


sdpa = F.scaled_dot_product_attention
heads = (2, 4, 64, 16)
linear = nn.Linear(64, 128)
shared, sequence = nn.Linear(100, 100), nn.Linear(32, 32)
BLOCK = 8 * 64 * 64 * 64 + 4 * 2 * 32 * 32 * 64 + 16 * 64 * 64 * 64
DECODER = 2 * BLOCK + 2 * 64 * 64 * 100
x64, w64 = (32, 64), (64, 128)
CASES = {  # fn, shapes, products in FLOPs
    "matmul": (torch.matmul, [x64, w64], 524288),
    "matmul of vectors": (torch.matmul, [(8,), (8,)], 16),
    "matmul matrix vector": (torch.matmul, [(4, 8), (8,)], 64),
    "matmul vector matrix": (torch.matmul, [(8,), (8, 4)], 64),
    "matmul broadcast": (torch.matmul, [(2, 1, 4, 8), (3, 8, 5)], 1920),
    "einsum": (functools.partial(torch.einsum, "bij,bjk->bik"),
               [(4, 16, 32), (4, 32, 12)], 49152),
    "relu linear": (lambda x: F.relu(linear(x)), [x64], 524288),
    "relu of products": (lambda x, w, b: F.relu(x @ w + b),
                         [x64, w64, (128,)], 524288),
    "linear 3-d": (nn.Linear(3, 8), [(5, 10, 3)], 2400),
    "linear 4-d": (nn.Linear(3, 8, bias=False), [(5, 100, 100, 3)],
                   2_400_000),
    "linear bf16": (nn.Linear(64, 128, dtype=torch.bfloat16),
                    [meta(32, 64, dtype=torch.bfloat16)], 524288),
    "layer norm": (nn.LayerNorm(64), [(8, 64)], 0),
    "mlp": (nn.Sequential(nn.Linear(784, 512), nn.Linear(512, 512),
                          nn.Linear(512, 10)), [(1, 784)], 1_337_344),
    "attention": (sdpa, [heads] * 3, 2097152),
    "attention 12 heads": (sdpa, [(1, 12, 64, 64)] * 3, 12_582_912),
    "attention causal, all pairs": (
        functools.partial(sdpa, is_causal=True), [heads] * 3, 2097152),
    "attention of keys and values of 2 heads": (
        functools.partial(sdpa, enable_gqa=True),
        [(2, 8, 64, 16), (2, 2, 64, 16), (2, 2, 64, 16)], 4194304),
    "attention across, other value width": (
        sdpa, [(2, 4, 32, 16), (2, 4, 64, 16), (2, 4, 64, 8)], 786432),
    "attention masked": (lambda q, k, v, m: sdpa(q, k, v, attn_mask=m),
                         [heads] * 3 + [(64, 64)], 2097152),
    "attention of one query on a cache": (
        sdpa, [(2, 4, 1, 16), (2, 4, 64, 16), (2, 4, 64, 16)],
        4 * 2 * 4 * 64 * 16),
    "multihead": (lambda m, x: m(x, x, x)[0],
                  [nn.MultiheadAttention(64, 4, batch_first=True),
                   (2, 32, 64)], 2621440),
    "multihead 448 wide, 4 heads": (
        lambda m, x: m(x, x, x), [nn.MultiheadAttention(448, 4),
                                  (300, 1, 448)], 2 * 321_484_800),
    "multihead 448 wide, 8 heads": (
        lambda m, x: m(x, x, x), [nn.MultiheadAttention(448, 8),
                                  (300, 1, 448)], 2 * 321_484_800),
    "multihead 100": (lambda m, x: m(x, x, x),
                      [nn.MultiheadAttention(100, 1), (1000, 1, 100)],
                      2 * 240_000_000),
    "decoder": (Decoder(), [ids], 14450688),
    "decoder by hand": (Decoder(fused=False), [ids], 14450688),
    "decoder of 2 kv heads": (Decoder(kv=2), [ids], 13402112),
    "decoder tied": (Decoder(tied=True), [ids], 14450688),
    "one linear, 7 times": (
        lambda m, x: functools.reduce(lambda y, _: m(y), range(7), x),
        [sequence, (16, 32)], 229376),
    "one linear, 3 names": (nn.Sequential(shared, shared, shared),
                            [(1, 100)], 60000),
    "conv 1-d": (nn.Conv1d(4, 8, 3), [(2, 4, 20)], 6912),
    "conv 1-d function": (F.conv1d, [(2, 4, 20), (8, 4, 3)], 6912),
    "conv padded": (nn.Conv2d(2, 4, 5, padding=2), [(2, 2, 12, 12)], 115200),
    "conv grouped": (nn.Conv2d(8, 16, 3, groups=4), [(2, 8, 10, 10)], 73728),
    "conv dilated": (nn.Conv2d(4, 8, 3, dilation=2), [(2, 4, 10, 10)],
                     41472),
    "conv depthwise": (nn.Conv2d(8, 8, 3, stride=2, groups=8),
                       [(2, 8, 11, 11)], 7200),
    "conv 3-d": (nn.Conv3d(2, 4, 3), [(1, 2, 5, 5, 5)],
                 2 * 4 * 27 * 2 * 27),
    "conv of one image": (nn.Conv2d(4, 8, 3), [(4, 10, 10)], 36864),
    "conv transposed": (nn.ConvTranspose2d(3, 1, 2, stride=2),
                        [(1, 3, 2, 2)], 96),
    "conv transposed grouped": (
        nn.ConvTranspose2d(8, 8, 3, groups=4, stride=2), [(2, 8, 4, 4)],
        9216),
    "conv transposed large": (nn.ConvTranspose2d(192, 384, 2, stride=2),
                              [(6, 192, 30, 96)], 10_192_158_720),
    "conv no weight": (F.conv2d, [(2, 0, 8, 8), (4, 0, 3, 3)], 0),
    "embedding": (nn.Embedding(100, 64), [ids], 0),
    "lstm": (nn.LSTM(16, 32), [(5, 2, 16)], 122880),
    "lstm both ways, 2 layers": (
        nn.LSTM(16, 32, 2, bidirectional=True), [(5, 2, 16)],
        2 * 122880 + 2 * 5 * 2 * 2 * 4 * 32 * (64 + 32)),
    "gru": (nn.GRU(16, 32), [(5, 2, 16)], 5 * 2 * 2 * 3 * 32 * (16 + 32)),
    "rnn": (nn.RNN(16, 32), [(5, 2, 16)], 5 * 2 * 2 * 32 * (16 + 32)),
    "lstm cell": (nn.LSTMCell(16, 32), [(2, 16)], 2 * 2 * 4 * 32 * 48),
    "no rows": (torch.matmul, [(0, 8), (8, 3)], 0),
    "no columns to sum": (torch.matmul, [(4, 0), (0, 3)], 0),
    "addmm": (functools.partial(torch.addmm, beta=0.5), [
        (4, 5), (4, 8), (8, 5)], 320),
    "baddbmm": (torch.baddbmm, [(2, 4, 5), (2, 4, 8), (2, 8, 5)], 640),
    "addbmm": (torch.addbmm, [(4, 5), (3, 4, 8), (3, 8, 5)], 960),
    "addmv": (torch.addmv, [(4,), (4, 8), (8,)], 64),
    "mv": (torch.mv, [(4, 8), (8,)], 64),
    "dot": (torch.dot, [(8,), (8,)], 16),
    "vdot": (torch.vdot, [(8,), (8,)], 16),
    "inner": (torch.inner, [(3, 8), (5, 8)], 2 * 3 * 5 * 8),
    "tensordot": (functools.partial(torch.tensordot, dims=2),
                  [(3, 4, 5), (4, 5, 6)], 2 * 3 * 20 * 6),
    "chain": (lambda *ms: torch.linalg.multi_dot(ms), [(2, 8), (8, 3), (3, 4)],
              2 * (2 * 8 * 3 + 2 * 3 * 4)),
    "outer": (torch.outer, [(4,), (8,)], 0),
    "bilinear": (nn.Bilinear(8, 6, 5), [(4, 8), (4, 6)], 2160),
    "vmap": (torch.vmap(torch.matmul), [(3, 4, 5), (3, 5, 8)], 960),
    "func.grad": (torch.func.grad(lambda w, x: (x @ w).sum()),
                  [(8, 4), (3, 8)], 384),
    "vmap of a vmap": (torch.vmap(torch.vmap(torch.matmul)),
                       [(3, 4, 5, 6), (3, 4, 6, 7)], 2 * 3 * 4 * 5 * 6 * 7),
    "func.vmap of func.grad": (
        torch.func.vmap(torch.func.grad(lambda w, x: (x @ w).sum()),
                        (None, 0)), [(8, 4), (5, 3, 8)], 5 * 384),
    "a trace, then a product": (
        functools.partial(torch.einsum, "iij,jk->ik"), [(4, 4, 5), (5, 6)],
        2 * 4 * 5 * 6),
    "function of its own gradient": (Square.apply, [(8, 8)], 1024),
    "dearest branch": (either, [meta(dtype=torch.bool), (8, 8)], 2048),
    "complex m8 n4 k16": (torch.matmul, [
        meta(8, 16, dtype=torch.complex64),
        meta(16, 4, dtype=torch.complex64)], 8 * 8 * 4 * 16),
    "attention, 4 queries of 10 keys, all 40 pairs, not causal's 34": (
        functools.partial(sdpa, is_causal=True),
        [(1, 1, 4, 8), (1, 1, 10, 8), (1, 1, 10, 16)], 2 * 40 * (8 + 16)),
    "product of 8-bit floats": (
        lambda a, b, s: torch._scaled_mm(a, b.T, s, s,
                                         out_dtype=torch.bfloat16),
        [meta(16, 32, dtype=torch.float8_e4m3fn)] * 2 + [(1,)],
        2 * 16 * 32 * 16),
    "multihead, eval": (
        lambda m, x: torch.no_grad()(m)(x, x, x)[0],
        [nn.MultiheadAttention(64, 4, batch_first=True).eval(), (2, 32, 64)],
        2621440),
    "lstm of projections": (
        nn.LSTM(16, 32, proj_size=8), [(5, 2, 16)],
        5 * 2 * 2 * (4 * 32 * (16 + 8) + 32 * 8)),
    "gru cell": (nn.GRUCell(16, 32), [(2, 16)], 2 * 2 * 3 * 32 * 48),
    "solve": (torch.linalg.solve, [(12, 12), (12, 3)], 2016),
    "solves": (torch.linalg.solve, [(7, 12, 12), (7, 12, 3)], 7 * 2016),
    "inverse": (torch.linalg.inv, [(12, 12)],
                2 * 12**3 // 3 + 2 * 12**3),  # LU, then a solve for 1
    "cholesky": (torch.linalg.cholesky, [(32, 32)], 10922),
    "triangular": (lambda a, b: torch.linalg.solve_triangular(
        a, b, upper=True), [(12, 12), (12, 3)], 12 * 12 * 3),
    "lu": (torch.linalg.lu_factor, [(12, 12)], 1152),
    "determinant": (torch.linalg.det, [(12, 12)], 1152),
    "fft": (torch.fft.fft, [meta(64, dtype=torch.complex64)], 1920),
    "inverse fft": (torch.fft.ifft, [meta(64, dtype=torch.complex64)], 1920),
    "fft of reals": (torch.fft.rfft, [(64,)], 960),
    "inverse fft to reals": (torch.fft.irfft, [
        meta(33, dtype=torch.complex64)], 960),
    "fft of images": (torch.fft.fft2, [
        meta(3, 8, 16, dtype=torch.complex64)], 5 * 3 * 8 * 16 * 7),
    "compiled": (torch.compile(lambda x: F.relu(linear(x))), [x64], 524288),
    "compiled module": (torch.compile(linear), [x64], 524288),
    "custom op with a formula": (torch.ops.course.told, [(8, 8), (8, 8)],
                                 1024),
}
IN_GRADIENT = [  # all that is differentiated, 3 times the products
    "matmul", "matmul broadcast", "relu of products", "attention",
    "attention of keys and values of 2 heads", "multihead",
    "attention across, other value width", "conv 1-d", "conv grouped",
    "conv padded", "conv dilated", "conv depthwise", "conv transposed",
    "conv transposed grouped", "conv of one image", "conv transposed large",
    "vmap", "addmm", "baddbmm", "addbmm", "vmap of a vmap",
    "a trace, then a product", "function of its own gradient",
    "dearest branch", "complex m8 n4 k16"]


@pytest.mark.parametrize("name", CASES)
def test_products(name):
    fn, shapes, expected = CASES[name]
    assert matmul(fn, *shapes) == expected


@pytest.mark.parametrize("name", IN_GRADIENT)
def test_products_forward_and_backward(name):
    fn, shapes, expected = CASES[name]
    assert matmul(fn, *shapes, wrt="all") == 3 * expected


def test_decoder_forward_and_backward():
    for how in {}, {"fused": False}, {"tied": True}:
        assert matmul(Decoder(**how), ids, wrt="params") == 43352064
    # what is made again: the blocks, less the last product of each
    again = 2 * (BLOCK - 2 * 64 * 256 * 64)
    assert 43352064 + again == 52789248
    assert matmul(Decoder(checkpoint=True), ids, wrt="params") == 52789248
    assert 3 * DECODER == 43352064


def test_linear_gradients():
    assert matmul(linear, x64, wrt="all") == 1572864
    assert matmul(linear, x64, wrt="params") == 1048576


# --- attention in every back end --------------------------------------------
BACKENDS = [*torch.nn.attention.SDPBackend.__members__.values()]


@pytest.mark.parametrize("backend", [
    b for b in BACKENDS if b.name not in ("ERROR", "OVERRIDEABLE")])
@pytest.mark.parametrize("how, shapes, causal", [
    ({}, [heads] * 3, False), ({}, [heads] * 3, True),
    ({"enable_gqa": True}, [(2, 8, 64, 16)] + [(2, 2, 64, 16)] * 2, True)])
def test_attention_costs_the_same_in_every_back_end(
        backend, how, shapes, causal):
    def inside(q, k, v):
        with torch.nn.attention.sdpa_kernel(backend):
            return sdpa(q, k, v, is_causal=causal, **how)

    args = [meta(*s) for s in shapes]
    for wrt in None, "all":
        plain = flops.count(functools.partial(sdpa, is_causal=causal, **how),
                            *args, wrt=wrt)
        with torch.nn.attention.sdpa_kernel(backend):
            outside = flops.count(functools.partial(
                sdpa, is_causal=causal, **how), *args, wrt=wrt)
        assert flops.count(inside, *args, wrt=wrt).ops == plain.ops
        assert outside.ops == plain.ops and not plain.unknown
        b, h, s, d = shapes[0]
        assert plain.matmul == (3 if wrt else 1) * 4 * b * h * s * s * d


def test_a_fused_attention_op_called_by_name_is_never_silently_nothing():
    for op in (torch.ops.aten._scaled_dot_product_flash_attention,
               torch.ops.aten._scaled_dot_product_flash_attention_for_cpu):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cost = flops.count(op, *[meta(*heads)] * 3)
        assert cost.matmul == 2097152 or len(cost.unknown) == 1


def test_encoder_layer_has_no_fast_path_past_the_counter():
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    slow = flops.count(layer, meta(2, 32, 64))
    with torch.no_grad():
        cost = flops.count(layer, meta(2, 32, 64))
    assert cost.matmul == slow.matmul == (
        8 * 64 * 64 * 64 + 4 * 2 * 32 * 32 * 64 + 4 * 64 * 64 * 128)
    assert not cost.unknown


# --- what other counters leave out or double --------------------------------
@pytest.mark.parametrize("fn, shapes, kind, n", [
    (nn.ReLU(), [(32, 128)], "elementwise", 4096),
    (lambda a, b: a - b, [(2, 3)] * 2, "elementwise", 6),
    (lambda a, b: a / b, [(2, 3)] * 2, "elementwise", 6),
    (lambda a: a * a + a, [(100,)], "elementwise", 200),
    (torch.outer, [(4,), (8,)], "elementwise", 32),
    (nn.Linear(8, 16), [(4, 8)], "elementwise", 64),
    (nn.ConvTranspose2d(3, 1, 2, stride=2), [(1, 3, 2, 2)], "elementwise",
     16),
    (torch.exp, [(1000,)], "transcendental", 1000),
    (torch.sort, [(1000,)], "integer", 10_000),
    (lambda a: torch.cumsum(a, 0), [(1000,)], "elementwise", 999),
    (torch.mul, [meta(10, dtype=torch.complex64)] * 2, "elementwise", 60),
    (torch.add, [meta(10, dtype=torch.complex64)] * 2, "elementwise", 20),
    (torch.add, [meta(10, dtype=torch.int32)] * 2, "integer", 10),
    (torch.matmul, [meta(8, 8, dtype=torch.int32)] * 2, "integer", 1024)])
def test_kinds_apart_from_products(fn, shapes, kind, n):
    args = [meta(*s) if isinstance(s, tuple) else s for s in shapes]
    cost = flops.count(fn, *args)
    assert getattr(cost, kind) == n and not cost.unknown
    assert cost.integer == (n if kind == "integer" else 0)


def test_distances_and_forward_mode_as_torch_runs_them():
    # By products, of vectors two longer: |x|^2 and 1 ride along.
    assert matmul(torch.cdist, (30, 16), (40, 16)) == 2 * 30 * 40 * (16 + 2)
    # Three products, one with the zero tangent of x that torch makes.
    assert matmul(lambda x, w: torch.func.jvp(
        lambda w: x @ w, (w,), (w,)), (3, 8), (8, 4)) == 3 * 2 * 3 * 8 * 4
    assert matmul(torch.mv, (4, 8), (8,), wrt="all") == 2 * 64  # and outer
    cost = flops.count(torch.mv, meta(4, 8), meta(8), wrt="all")
    assert cost.elementwise == 32


def test_cond_is_its_dearest_branch():
    cond = torch.cond

    def other(p, x):  # by a name that it has from before
        return cond(p, lambda x: x @ x, lambda x: x @ x @ x, (x,))

    for fn in either, other:
        cost = flops.count(fn, torch.tensor(True), torch.randn(8, 8))
        assert cost.matmul == 2 * 1024 and not cost.unknown
        assert [op.path for op in cost.ops] == ["[the dearest branch]"] * 2
    assert torch.cond is cond


def test_both_products_of_attention_are_there():
    h, t, dk, dv = 4, 64, 24, 16
    shapes = (1, h, t, dk), (1, h, t, dk), (1, h, t, dv)
    assert matmul(sdpa, *shapes, wrt="all") / t == 6 * h * (dk + dv) * t


@pytest.mark.parametrize("fn", [
    lambda x: x.to(torch.bfloat16) * 2, lambda x: x.T.reshape(-1) * 2,
    lambda x: x.reshape(-1) * 2, lambda x: F.linear(x, x * 2).flatten(),
    lambda x: x.contiguous() * 2, lambda x: x.T.contiguous() * 2])
def test_inference_mode_costs_the_same(fn):
    plain = flops.count(fn, meta(8, 8))
    with torch.inference_mode():
        cost = flops.count(fn, meta(8, 8))
    assert (cost.bytes, cost.total) == (plain.bytes, plain.total)
    assert not cost.unknown and plain.bytes


def test_autocast_is_seen_for_what_it_does():
    def f(x):
        plain = x @ x
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return plain, x @ x

    for x in meta(8, 8), torch.ones(8, 8):
        cost = flops.count(f, x)
        products = [op for op in cost.ops if op.name == "mm"]
        assert cost.matmul == 2 * 1024
        assert [op.shapes[0] for op in products] == ["f32[8,8]", "bf16[8,8]"]
        # The first reads one matrix; for the second x is cast twice.
        assert [op.bytes for op in products] == [2 * 256, 3 * 128]


# --- pooling: an addition or comparison for each element of a window --------
P2, P3 = (2, 3, 8, 8), (2, 3, 8, 8, 8)
ALL, QUARTER = 2 * 3 * 64, 2 * 3 * 16
# 8 elements in 3 windows: 0 to 3, 2 to 6, 5 to 8, so 3 + 4 + 3 of them
THREE = 2 * 3 * 10 * 10


@pytest.mark.parametrize("fn, shape, forward, backward", [
    (nn.AvgPool2d(2), P2, ALL, ALL + QUARTER),
    (nn.AvgPool1d(2), (2, 3, 8), 2 * 3 * 8, 2 * 3 * (8 + 4)),
    (nn.AvgPool3d(2), P3, 8 * ALL, 8 * ALL + 4 * QUARTER),
    (nn.AvgPool2d(3, 1, padding=1), P2, 9 * ALL, 10 * ALL),
    (nn.MaxPool2d(2), P2, 3 * QUARTER, QUARTER),
    (nn.MaxPool1d(2), (2, 3, 8), 2 * 3 * 4, 2 * 3 * 4),
    (nn.MaxPool3d(2), P3, 7 * 4 * QUARTER, 4 * QUARTER),
    (nn.AdaptiveAvgPool2d(3), P2, THREE, THREE + 6 * 9),
    (nn.AdaptiveMaxPool2d(3), P2, THREE - 6 * 9, 6 * 9)])
def test_pooling(fn, shape, forward, backward):
    one, both = (flops.count(fn, meta(*shape), wrt=wrt)
                 for wrt in (None, "all"))
    assert (one.elementwise, both.elementwise) == (
        forward, forward + backward)
    assert both.total == both.elementwise
    assert not both.integer and not both.unknown


@pytest.mark.parametrize("call, name", [
    (lambda: (torch.ops.course.product, (meta(8, 8), meta(8, 8))),
     "course.product"),
    (lambda: (torch.ops.course.into, (meta(8, 8),) * 3), "course.into"),
    (lambda: (torch._foreach_add_, ([meta(8, 8)], 1.)), "_foreach_add"),
    (lambda: (torch.linalg.svd, (meta(8, 8),)), "svd"),
    (lambda: (torch.linalg.eigh, (meta(8, 8),)), "eigh"),
    (lambda: (torch.linalg.qr, (meta(8, 8),)), "qr"),
    (lambda: (torch.linalg.eig, (meta(8, 8),)), "eig"),
    (lambda: (lambda a: torch.linalg.lstsq(a, a)[0], (meta(8, 8),)),
     "lstsq"),
    (lambda: (torch.nonzero, (meta(8),)), "nonzero"),
    (lambda: (torch.unique, (torch.ones(8),)), "_unique2"),
    (lambda: (torch.pdist, (meta(8, 4),)), "pdist"),
    (lambda: (lambda x: F.ctc_loss(
        x, torch.ones(2, 4).long(), torch.full((2,), 7), torch.full(
            (2,), 4), reduction="none"), (meta(7, 2, 5),)), "_ctc_loss"),
    (lambda: (nn.EmbeddingBag(9, 8), (torch.zeros(2, 5).long(),)),
     "embedding_bag"),
    (lambda: (torch.sparse.mm, (torch.eye(8).to_sparse(), torch.ones(8, 4))),
     "sparse"),
    (lambda: (torch.mm, (torch.eye(8).to_sparse(), torch.ones(8, 4))), "mm"),
    (lambda: (torch.mm, (torch.eye(8).to_sparse_csr(), torch.ones(8, 4))),
     "mm"),
    (lambda: (torch._weight_int8pack_mm, (
        meta(4, 8, dtype=torch.bfloat16), meta(6, 8, dtype=torch.int8),
        meta(6, dtype=torch.bfloat16))), "int8pack")])
def test_what_has_no_rule_is_listed_and_said_once(call, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of sparse tensors
        fn, args = call()
    with pytest.warns(UserWarning, match="no rule") as said:
        cost = flops.count(lambda *args: (fn(*args), fn(*args)), *args)
    assert len([w for w in said if "no rule" in str(w.message)]) == 1
    assert len(cost.unknown) == 1 and name in cost.unknown[0]
    assert cost.matmul == 0 and name in str(cost)


@pytest.mark.parametrize("fn, shapes, name", [
    (functools.partial(F.interpolate, scale_factor=2), [P2],
     "upsample_nearest2d_backward"),
    (functools.partial(F.interpolate, scale_factor=2, mode="bilinear"), [P2],
     "upsample_bilinear2d_backward"),
    (functools.partial(F.grid_sample, align_corners=False),
     [P2, (2, 5, 5, 2)], "grid_sampler_2d_backward")])
def test_a_gradient_that_has_no_rule_is_listed(fn, shapes, name):
    args = [meta(*shape) for shape in shapes]
    assert not flops.count(fn, *args).unknown
    with pytest.warns(UserWarning, match="no rule"):
        cost = flops.count(fn, *args, wrt="all")
    assert cost.unknown == (f"aten.{name}",)


def test_a_choice_by_mask_takes_all_of_it_and_says_so():
    with pytest.warns(UserWarning, match="aten.index .*hangs on values"):
        cost = flops.count(lambda x: x[x > 0] * 2, meta(100))
    assert cost.integer == 100 and "f32[100]" in cost.unknown[0]
    assert cost.ops[1].shapes == ("f32[100]", "bool[100]", "f32[100]")
    assert cost.elementwise == 100


@pytest.mark.parametrize("fn", [
    torch.nonzero, torch.argwhere, torch.unique, torch.unique_consecutive,
    lambda x: torch.bincount(x.long()), lambda x: torch.where(x > 0),
    lambda x: torch.masked_select(x, x > 0),
    lambda x: x.repeat_interleave(x.long())])
def test_sizes_that_hang_on_values_are_told(fn):
    with pytest.warns(UserWarning, match="hangs on values"):
        cost = flops.count(lambda x: (fn(x), fn(x)), torch.ones(9))
    assert len(cost.unknown) == 1 and "counted as for ones" in str(cost)


# --- what torch or a copy makes of it ----------------------------------------
def complex_conv(conv, *shapes):
    args = [meta(*s, dtype=torch.complex64) for s in shapes]
    return [flops.count(conv, *args, wrt=wrt) for wrt in (None, "all")]


@pytest.mark.parametrize("conv, x, w, macs", [
    (F.conv2d, (1, 2, 5, 5), (3, 2, 3, 3), 9 * 3 * 2 * 9),
    (F.conv1d, (4, 2, 9), (3, 2, 3), 4 * 7 * 3 * 2 * 3),
    (functools.partial(F.conv_transpose2d, stride=2), (1, 3, 2, 2),
     (3, 1, 2, 2), 4 * 3 * 4)])
def test_a_complex_convolution_is_8_flops_a_multiply_add(conv, x, w, macs):
    forward, both = complex_conv(conv, x, w)
    assert (forward.matmul, both.matmul) == (8 * macs, 24 * macs)
    bias = w[1] if "transpose" in str(conv) else w[0]
    biased = complex_conv(conv, x, w, (bias,))
    assert [c.matmul for c in biased] == [8 * macs, 24 * macs]
    assert biased[0].elementwise > forward.elementwise


@pytest.mark.parametrize("fn, n", [
    (lambda z: z**2, 48), (torch.square, 48), (lambda z: z * z, 48),
    (torch.prod, 42), (lambda z: z.cumprod(0), 42), (torch.sum, 14),
    (lambda z: z**3, 96), (lambda z: z.cumsum(0), 14)])
def test_complex_products_are_6_however_they_are_written(fn, n):
    assert flops.count(fn, meta(8, dtype=torch.complex64)).elementwise == n


def test_bilinear_by_position_and_by_name():
    x, y, w, b = meta(4, 8), meta(4, 6), meta(5, 8, 6), meta(5)
    costs = [flops.count(fn, x, y, w, b) for fn in (
        F.bilinear, lambda x, y, w, b: F.bilinear(x, y, w, bias=b),
        lambda x, y, w, b: F.bilinear(input1=x, input2=y, weight=w, bias=b))]
    assert {(c.matmul, c.elementwise) for c in costs} == {(2160, 20)}
    bare = flops.count(F.bilinear, x, y, w)
    assert (bare.matmul, bare.elementwise) == (2160, 0)


@pytest.mark.parametrize("power", [math.inf, math.nan, -math.inf, 1e300])
def test_a_power_that_is_no_number_of_products(power):
    assert flops.count(lambda x: x**power, meta(8)).transcendental == 8


class Holding(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what, self.inner = what, nn.Linear(8, 8)

    def forward(self, x):
        if isinstance(self.what, torch.Generator):
            return self.inner(x) + torch.rand(8, generator=self.what)
        with self.what:
            return self.inner(x)


@pytest.mark.parametrize("make", [
    threading.Lock, threading.RLock, torch.Generator])
def test_modules_that_hold_what_is_not_copied(make):
    held = make()
    state = held.get_state() if isinstance(held, torch.Generator) else None
    for wrt, products in (None, 1), ("params", 2):
        assert matmul(Holding(held), (4, 8), wrt=wrt) == products * 512
    assert state is None or torch.equal(state, held.get_state())


@dataclasses.dataclass
class Result:
    y: torch.Tensor
    name: str = "of a class of its own"


def test_a_gradient_goes_through_a_dataclass():
    assert matmul(lambda x, w: Result(x @ w), (4, 8), (8, 8),
                  wrt="all") == 3 * 512


def test_a_loop_operator_says_what_one_turn_is():
    from torch._higher_order_ops.while_loop import while_loop

    def fn(x):
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x @ x),
                          (torch.tensor(0), x))[1] @ x

    with pytest.warns(UserWarning, match="trips not known; one is 1,024 F"):
        cost = flops.count(fn, torch.ones(8, 8))
    assert cost.matmul == 1024  # what stands beside it


@pytest.mark.parametrize("call, words", [
    (lambda: (torch.cov, (meta(4, 10),)), "reads a value"),
    (lambda: (lambda x: x * x.sum().item(), (meta(4),)), "reads a value"),
    (lambda: (nn.LSTM(16, 32), (nn.utils.rnn.pack_padded_sequence(
        torch.ones(5, 2, 16), torch.tensor([5, 3])),)), "reads a value"),
    (lambda: (nn.Linear(8, 4), (torch.nested.nested_tensor(
        [torch.ones(3, 8), torch.ones(5, 8)], layout=torch.jagged),)),
     "jagged"),
    (lambda: (lambda q: sdpa(q, q, q, attn_mask=biases.causal_lower_right(
        64, 64)), (meta(*heads),)), "is_causal")])
def test_what_cannot_be_followed_is_refused_in_one_sentence(call, words):
    fn, args = call()
    with pytest.raises(ValueError, match=words) as caught:
        flops.count(fn, *args)
    assert "\n" not in str(caught.value)


def test_attention_by_the_name_of_a_back_end_and_by_a_score():
    flex = torch.nn.attention.flex_attention.flex_attention
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow uncompiled
        assert matmul(flex, *[(2, 4, 64, 16)] * 3) == 2097152
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    assert matmul(flash, *[heads] * 3) == 2097152


def test_running_sums_of_exponentials():
    cost = flops.count(lambda x: x.logcumsumexp(0), meta(10, 7))
    assert (cost.elementwise, cost.transcendental) == (3 * 63, 2 * 63)


def test_quantized_layers_are_listed():
    quantize = pytest.importorskip("torch.ao.quantization").quantize_dynamic
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = quantize(nn.Sequential(nn.Linear(8, 4)), {nn.Linear})
        except RuntimeError as error:  # no engine for it here
            pytest.skip(str(error))
        cost = flops.count(model, torch.randn(3, 8))
    assert cost.unknown == ("quantized.linear_dynamic",)


# --- modules reached by a closure -------------------------------------------
norm = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8))


def through_globals(x):
    return helper(x)


def helper(x):
    return norm(x)


def test_a_module_fn_closes_over_is_counted_and_left_alone():
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8))
    several = [model]

    def step(x):
        model(x).sum().backward()

    direct = flops.count(model, meta(4, 8))
    for fn in (lambda x: model(x), lambda x: several[0](x), through_globals,
               torch.compile(lambda x: model(x)),
               functools.partial(lambda m, x: m(x), model),
               functools.partial(lambda x: model(x))):
        assert flops.count(fn, meta(4, 8)).ops == direct.ops
        cost = flops.count(fn, meta(4, 8), wrt="params")
        assert cost.matmul == 3 * 512 and cost.params == 88
    assert flops.count(step, meta(4, 8)).matmul == 3 * 512
    x = torch.randn(4, 8)
    assert flops.count(lambda: model(x)).matmul == 512
    for held in model, norm:
        assert held[0].num_batches_tracked == 0
        assert all(p.grad is None and type(p) is nn.Parameter
                   for p in held.parameters())
        assert held(x).shape == (4, 8)  # it still runs, on its own weights
        held[0].reset_running_stats()


def test_what_is_reached_in_another_way_is_refused():
    class Holder:
        model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8))

    w, holder = torch.ones(8, 8), Holder()
    for fn in lambda x: holder.model(x), lambda x: x @ w.add_(1):
        with pytest.raises(ValueError, match="as an argument"):
            flops.count(fn, meta(4, 8))
    assert holder.model[0].num_batches_tracked == 0
    assert flops.count(lambda x: x @ w, meta(4, 8)).matmul == 512
    assert torch.equal(w, torch.ones(8, 8))


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop", "NAdam"])
def test_a_step_of_an_optimizer(kind):
    def step(model, x):
        optimizer = getattr(torch.optim, kind)(model.parameters(), 0.1)
        model(x).sum().backward()
        optimizer.step()

    model = nn.Linear(8, 8)
    before = model.weight.detach().clone()
    cost = flops.count(step, model, meta(4, 8))
    # 4 operations a parameter at least, a root each but for SGD
    assert cost.matmul == 2 * 512 and not cost.unknown
    assert cost.elementwise > 2 * 72
    assert cost.transcendental == (0 if kind == "SGD" else 72)
    assert torch.equal(model.weight, before)


def test_a_gradient_of_what_is_no_argument_is_refused():
    w = torch.ones(8, 8, requires_grad=True)
    assert matmul(lambda x: x @ w, (4, 8)) == 512
    assert matmul(lambda x: x @ w, (4, 8), wrt=0) == 2 * 512
    for grad in None, torch.ones(8, 8):
        w.grad = grad
        with pytest.raises(ValueError, match="that is no argument"):
            flops.count(lambda x: (x @ w).sum().backward(), meta(4, 8))
        assert w.grad is grad


@pytest.mark.parametrize("made", [
    lambda w: w.T, lambda w: w * 2, lambda w: (w * 2).exp() + w])
def test_so_is_one_of_what_was_made_from_it_before(made):
    w = torch.ones(8, 8, requires_grad=True)
    y = made(w)
    y.retain_grad()
    with pytest.raises(ValueError, match="that is no argument"):
        flops.count(lambda x: (x @ y).sum().backward(), meta(4, 8))
    assert w.grad is None and y.grad is None


def test_autocast_keeps_no_weight_of_a_count():
    w, x = torch.ones(8, 8, requires_grad=True), torch.ones(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert type(x @ w) is torch.Tensor
        assert flops.count(lambda x: x @ w, x).matmul == 512
        assert (x @ w).float().sum() == 4 * 8 * 8


def test_an_optimizer_in_a_closure_is_refused():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    model(torch.ones(4, 8)).sum().backward()
    with pytest.raises(ValueError, match="closes over an optimizer: pass it"):
        flops.count(step, torch.ones(4, 8))
    assert (model.weight.grad == 4).all()


head = nn.Linear(8, 100)  # a global, beside an attribute of that name


def test_an_attribute_is_no_global():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 8)

    cost = flops.count(lambda net, x: net.head(x), Net(), meta(4, 8))
    assert cost.params == 72
    assert flops.count(lambda x: head(x), meta(4, 8)).params == 900


def waiting_for(call):
    """A product that waits for ``call`` in another thread."""
    def fn(x):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return x @ x
    return fn


def test_another_thread_has_its_own_branch_of_torch_cond():
    found = []

    def other():
        found.append(torch.cond(
            torch.tensor(False), lambda x: x + 1, lambda x: x - 1,
            (torch.ones(2),)))

    assert flops.count(waiting_for(other), meta(8, 8)).matmul == 1024
    assert torch.equal(found[0], torch.zeros(2))


def test_a_count_that_its_own_function_waits_for_is_told(monkeypatch):
    from course_utils.flops import _torch

    said, one = [], _torch._ONE

    class Impatient:
        acquire = staticmethod(lambda timeout: one.acquire(timeout=0.1))
        release = staticmethod(one.release)

    monkeypatch.setattr(_torch, "_ONE", Impatient)

    def inner():
        try:
            flops.count(torch.relu, meta(4))
        except ValueError as error:
            said.append(str(error))

    assert flops.count(waiting_for(inner), meta(8, 8)).matmul == 1024
    assert "another thread has been counting" in said[0]


def test_other_threads_count_and_run_modules_meanwhile():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(9)))
    alone = flops.count(model, meta(4, 8), wrt="params")
    found, done = [], threading.Event()

    def run():
        while not done.is_set():
            model(torch.ones(4, 8))

    def count():
        found.extend(flops.count(model, meta(4, 8), wrt="params")
                     for _ in range(9))

    running = threading.Thread(target=run)
    threads = [threading.Thread(target=count) for _ in range(2)]
    for thread in running, *threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    running.join()
    assert found == [alone] * 18  # paths of modules and all


def test_outputs_are_what_they_were():
    class One(nn.Module):  # a tuple of one stays a tuple
        def forward(self, x):
            return (x @ x,)

    model = nn.ModuleList([One()])
    assert flops.count(lambda m, x: m[0](x)[0] @ x, model,
                       meta(8, 8)).matmul == 2 * 1024
    first, second = (flops.count(Decoder(), ids, wrt="params")
                     for _ in range(2))
    assert first == second


# --- bytes ------------------------------------------------------------------
def put(x, index, y):
    x[index] = y
    return x


@pytest.mark.parametrize("index, rows", [
    (3, 1), (slice(2, 5), 3), ((slice(0, 10, 2),), 5),
    ((torch.arange(100),), 100),
    (torch.arange(6).reshape(2, 3), 6),
    ((torch.arange(4)[:, None] * 0 + torch.arange(2),), 8),
    (torch.ones(1000, dtype=torch.bool), 1000)])
def test_a_scalar_written_into_a_tensor_moves_what_it_writes(index, rows):
    for value in 0., torch.tensor(1.):
        op = flops.count(lambda x, value=value: put(x, index, value),
                         meta(1000, 64)).ops[-1]
        held = sum(i.numel() * i.element_size() for i in (
            index if isinstance(index, tuple) else (index,))
            if isinstance(i, torch.Tensor))
        assert rows * 256 <= op.bytes <= rows * 256 + held + 8
        assert op.flops == 0


# --- where an op is written -------------------------------------------------
class Written(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        y = self.up(x)
        return torch.softmax(y @ y, -1)


def test_lines():
    source, first = inspect.getsourcelines(Written.forward)
    file = Path(__file__).name
    expected = [(name, f"{file}:{first + n}") for name, n in (
        ("addmm", 1), ("mm", 2), ("_softmax", 2))]
    for fn in Written(), torch.compile(Written()), Written().forward:
        cost = flops.count(fn, meta(8, 8), wrt="all")
        assert [(op.name, op.line) for op in cost.ops[:3]] == expected
        assert {op.line for op in cost.ops if op.path == "backward"} == {""}
        assert list(cost.table()["line"]) == [op.line for op in cost.ops]


def test_lines_of_a_cell_and_of_nobody():
    for file in "/tmp/ipykernel_12/345.py", "<ipython-input-3-0a1b>":
        names = {"torch": torch}
        exec(compile("def f(x):\n\n    return x @ x\n", file, "exec"), names)
        assert [op.line for op in flops.count(names["f"], meta(8, 8)).ops
                ] == ["<cell>:3"]
    for fn in torch.relu, nn.Sequential(nn.Linear(8, 8)):
        assert [op.line for op in flops.count(fn, meta(8, 8)).ops] == [""]


def test_the_same_op_on_two_lines_is_two():
    def f(x):
        x = x.sin()
        return x.sin(), x.sin()

    lines = [op.line.split(":")[1] for op in flops.count(f, meta(8)).ops]
    first = f.__code__.co_firstlineno
    assert lines == [str(first + n) for n in (1, 2, 2)]


# --- what is worked out once ------------------------------------------------
def test_a_layer_like_the_one_before_is_not_worked_out_again(monkeypatch):
    from course_utils.flops import _torch
    plain, learned = _torch._Count.learn, []
    monkeypatch.setattr(_torch._Count, "learn", lambda *args: (
        learned.append(0), plain(*args))[1])
    costs = []
    for n in 2, 20:
        layers = nn.Sequential(*(nn.TransformerEncoderLayer(
            16, 2, 32, batch_first=True) for _ in range(n)))
        costs.append((flops.count(layers, meta(2, 5, 16), wrt="all"),
                      len(learned)))
        learned.clear()
    (few, twice), (many, same) = costs
    assert twice == same and many.matmul == 10 * few.matmul
    assert many.params == 10 * few.params


def test_what_is_remembered_is_told_apart():
    def kinds(x):
        n = x.int()
        return n + 1, n + 1., n + True, n + 1, n + 1.

    cost = flops.count(kinds, meta(10))
    assert [op.shapes[-1] for op in cost.ops if op.name == "add"] == [
        "i32[10]", "f32[10]", "i32[10]", "i32[10]", "f32[10]"]
    assert (cost.elementwise, cost.integer) == (20, 30)
    cost = flops.count(lambda x, y: (x * y, x * x, x * y), *[meta(8)] * 1,
                       meta(8))
    assert [op.bytes for op in cost.ops] == [96, 64, 96]
    cost = flops.count(lambda x: (x.sum(0), x.T.sum(0), x.sum(0), x.T.sum(0),
                                  x.mT.contiguous()), meta(3, 5))
    assert [op.shapes[-1] for op in cost.ops] == [
        "f32[5]", "f32[3]", "f32[5]", "f32[3]", "f32[5,3]"]


def test_what_is_made_again_is_what_it_was():
    def f(x):
        for _ in range(3):
            y = x[1:].T.unflatten(0, (2, 2))
            assert (y.shape, y.stride(), y.device.type, y._base is not None
                    ) == ((2, 2, 3), (2, 1, 4), "cpu", True)
            z = torch.stack([y, y]).mul_(2).movedim(0, -1)
            assert (z.shape, z.stride(), z.dtype) == (
                (2, 2, 3, 2), (6, 3, 1, 12), torch.float32)
            a, b = z.split(1)
            assert a.is_contiguous() is False and a.shape == b.shape
            assert z.add_(1) is z and z._version == y.new_zeros(1).add_(
                1)._version + 1
            c = torch.view_as_complex(torch.ones(2, 2)).conj()
            assert c.is_conj() and not (c * 1).is_conj()
            i = torch.arange(3)
            assert (i.dtype, i.device.type) == (torch.int64, "cpu")
            w = x.clone()
            w.t_().unsqueeze_(0)
            assert w.shape == (1, 4, 4)
        return z.sum()

    for wrt in None, "all":
        assert not flops.count(f, torch.ones(4, 4), wrt=wrt).unknown


# --- properties -------------------------------------------------------------
@few
@given(b=size, m=size, n=size, wrt=st.sampled_from([None, "all"]))
def test_vmap_is_so_many_times_the_function(b, m, n, wrt):
    def f(x, w):
        return torch.exp(x @ w).sum()

    one = flops.count(f, meta(m, n), meta(n, m), wrt=wrt)
    cost = flops.count(torch.vmap(f), meta(b, m, n), meta(b, n, m), wrt=wrt)
    assert cost.matmul == b * one.matmul
    assert cost.transcendental == b * one.transcendental


@few
@given(widths=st.lists(size, min_size=2, max_size=4), rows=size,
       wrt=st.sampled_from([None, "params", "all"]))
def test_a_stack_is_its_layers_and_compiled_as_eager(widths, rows, wrt):
    layers = [nn.Sequential(nn.Linear(i, o), nn.GELU()) for i, o in zip(
        widths, widths[1:], strict=False)]
    stack = nn.Sequential(*layers)
    whole = flops.count(stack, meta(rows, widths[0]), wrt=wrt)
    assert flops.count(torch.compile(stack), meta(rows, widths[0]),
                       wrt=wrt).ops == whole.ops
    each = [flops.count(m, meta(rows, m[0].in_features)) for m in layers]
    forward = flops.count(stack, meta(rows, widths[0]))
    for kind in (*flops.KINDS, "bytes", "params"):
        assert getattr(forward, kind) == sum(getattr(c, kind) for c in each)
    for i, one in enumerate(each):
        assert one.matmul == sum(op.matmul for op in forward.ops if (
            f"{op.path}.").startswith(f"Sequential.{i}."))
    assert sum(op.flops for op in whole.ops) == whole.total


# --- what is alike counts alike ----------------------------------------------
@pytest.mark.parametrize("a, b, macs", [
    ((32, 16), (4, 16, 24), 32 * 16 * 24), ((16, 32), (32, 24), 16 * 32 * 24),
    ((4, 32, 16), (4, 16, 24), 4 * 32 * 16 * 24),
    ((4, 32, 16), (16, 24), 32 * 16 * 24)])  # a column meets one matrix
def test_a_grouped_product_counts_what_meets(a, b, macs):
    if not hasattr(F, "grouped_mm"):
        pytest.skip("this torch has none")
    args = [torch.empty(s, dtype=torch.bfloat16, device="meta")
            for s in (a, b)]
    last = {2: a[-1] if len(b) == 2 else a[0], 3: b[-1]}[len(a)]
    offs = None if len(a) == len(b) == 3 else torch.tensor(
        [last // 4, last // 2, last - 1, last], dtype=torch.int32)
    cost = flops.count(lambda a, b: F.grouped_mm(a, b, offs=offs), *args)
    assert cost.matmul == 2 * macs and not cost.unknown


@pytest.mark.parametrize("reduce", [torch.sum, torch.mean, torch.prod])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_a_reduction_is_of_the_type_it_is_asked_for(reduce, dtype):
    x = torch.empty(10, dtype=dtype, device="meta")
    cost = flops.count(lambda x: reduce(x, dtype=torch.float32), x)
    want = flops.count(lambda x: reduce(x.float()), x)
    assert (cost.elementwise, cost.integer) == (want.elementwise, 0)
    cost = flops.count(lambda x: x.cumsum(0, dtype=torch.float32), x)
    assert (cost.elementwise, cost.integer) == (9, 0)


def test_parameters_tied_by_their_memory_count_once():
    def head(weight):
        model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50, False))
        weight(model)
        return flops.count(model, torch.arange(3), wrt="params").params

    assert head(lambda m: None) == 800
    assert head(lambda m: setattr(m[1], "weight", m[0].weight)) == 400
    assert head(lambda m: setattr(m[1].weight, "data", m[0].weight.data)
                ) == 400
    assert head(lambda m: setattr(m[1], "weight", nn.Parameter(m[0].weight))
                ) == 400
    assert head(lambda m: m.to("meta")) == 800


def test_counting_rolls_no_dice():
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(20))

        def forward(self, x):
            for layer in self.layers:
                if random.random() + np.random.rand() > 1:
                    x = layer(x)
            return x

    random.seed(0)
    np.random.seed(0)
    model, x = Dropped(), meta(3, 8)
    one, two = (flops.count(model, x).matmul for _ in "12")
    table = flops.compare(model, x)
    assert one == two == table.matmul[0] == table.matmul[1]
    random.seed(0)
    np.random.seed(0)
    assert flops.count(model, x).matmul == one


@pytest.mark.parametrize("make, words", [
    (lambda: (lambda q: q.dequantize(), torch.quantize_per_tensor(
        torch.ones(8, 8), .1, 0, torch.quint8)), "quantized"),
    (lambda: (nn.LazyLinear(4), torch.ones(3, 8)), "lazy module")])
def test_what_has_no_shapes_is_one_sentence(make, words):
    fn, x = make()
    with pytest.raises(ValueError, match=words):
        flops.count(fn, x)


def test_a_quantized_model_is_told():
    tq = torch.ao.quantization
    model = nn.Sequential(tq.QuantStub(), nn.Linear(8, 8), tq.DeQuantStub())
    model.eval().qconfig = tq.get_default_qconfig("x86")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tq.prepare(model, inplace=True)(torch.ones(3, 8))
        tq.convert(model, inplace=True)
    with pytest.raises(ValueError, match="quantized tensor has no form"):
        flops.count(model, torch.ones(3, 8))


def test_what_takes_a_part_moves_a_part():
    table = meta(1000, 64)
    assert flops.count(lambda x, i: x.take(i), table, torch.arange(5)
                       ).bytes == 5 * 8 + 2 * 5 * 4
    assert flops.count(lambda x: x.narrow_copy(0, 3, 5), table
                       ).bytes == 2 * 5 * 64 * 4


def test_an_outer_product_added_is_two_ops_an_element():
    args = meta(3, 5), meta(3), meta(5)
    assert flops.count(torch.addr, *args).elementwise == 30
    assert flops.count(lambda *a: torch.addr(*a, alpha=2), *args
                       ).elementwise == 45


@pytest.mark.parametrize("fn, args, name", [
    (F.scaled_dot_product_attention, [meta(2, 4, 16, 8)] * 3,
     "_scaled_dot_product_flash_attention_for_cpu is 0"),
    (nn.LSTM(5, 7), [meta(6, 2, 5)], "mkldnn_rnn_layer is 0"),
    (torch.mv, [meta(4, 8), meta(8)], "mv is 0")])
def test_compare_names_what_the_other_leaves_out(fn, args, name):
    why = flops.compare(fn, *args).why[1]
    assert why == f"elementwise is 0, {name}"
