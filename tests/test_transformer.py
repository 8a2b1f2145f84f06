"""transformer: against published tables, and flops.count of real layers."""

import pickle
from dataclasses import FrozenInstanceError, replace
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_utils import flops, transformer
from course_utils.transformer import Config, published

SIZES = {"layers": 1, "d_model": 64, "heads": 4, "d_ff": 96, "vocab": 50}


def printed_as(value, printed):
    """Whether value prints as printed does, last digit rounded or cut."""
    wanted = Decimal(printed)
    digit = Decimal((0, (1,), wanted.as_tuple().exponent))
    return wanted in {Decimal(value).quantize(digit, rounding=way)
                      for way in (ROUND_HALF_UP, ROUND_DOWN)}


def test_printed_as_is_strict():
    assert printed_as(8_632_012_800, "8.63e9")
    assert printed_as(540_356_474_880, "540.35e9")
    assert not printed_as(8_642_012_800, "8.63e9")
    assert not printed_as(124_439_809, "124439808")


@pytest.mark.parametrize("name", transformer.names())
def test_published_numbers_come_out_to_the_printed_digit(name):
    config = published(name)
    assert config.name == name and config.published
    for row in config.published:
        assert row.grade in {"A", "B1", "B2"} and row.source
        assert printed_as(getattr(config, row.what)(), row.printed), row


# Typed here from other tables: (shape, parameters, without embeddings, KV
# bytes a token at 16 bits). Sources: nanoGPT and keras-hub (GPT-2), the
# Pythia paper's Table 1, kvfit and model cards (Qwen3), gemma_pytorch.
GPT = {"gated": False, "biases": True}
QWEN = {"vocab": 151936, "head_dim": 128, "kv_heads": 8, "qk_norm": True}
OTHERS = {
    "gpt2-large": (dict(
        layers=36, d_model=1280, heads=20, d_ff=5120, vocab=50257,
        positions=1024, tied=True, **GPT), 774_030_080, None, 184_320),
    "pythia-14m": (dict(
        layers=6, d_model=128, heads=4, d_ff=512, vocab=50304, **GPT),
        14_067_712, 1_189_888, None),
    "pythia-2.8b": (dict(
        layers=32, d_model=2560, heads=32, d_ff=10240, vocab=50304, **GPT),
        2_775_208_960, 2_517_652_480, None),
    "qwen3-0.6b": (dict(
        layers=28, d_model=1024, heads=16, d_ff=3072, tied=True, **QWEN),
        596_049_920, 440_467_456, 114_688),
    "qwen3-32b": (dict(
        layers=64, d_model=5120, heads=64, d_ff=25600, **QWEN),
        32_762_123_264, 31_206_298_624, 262_144),
    "gemma-2-2b": (dict(
        layers=26, d_model=2304, heads=8, kv_heads=4, head_dim=256,
        d_ff=9216, vocab=256000, tied=True, norms=4),
        2_614_341_888, 2_024_517_888, 106_496),
    "llama-1-33b": (dict(
        layers=60, d_model=6656, heads=52, d_ff=17920, vocab=32000),
        32_528_943_616, None, None),
}


@pytest.mark.parametrize("name", OTHERS)
def test_models_that_are_not_in_the_table(name):
    shape, params, inner, cache = OTHERS[name]
    config = Config(**shape)
    tables = config.vocab * config.d_model * (2 - config.tied)
    assert params in (None, config.params())
    assert inner in (None, config.params() - tables)
    assert cache in (None, config.kv_cache_bytes())


def test_tokens_batch_and_width_of_a_value_scale_the_cache():
    big = published("llama-3-70b")
    assert big.kv_cache_bytes(4096) == 1_342_177_280  # an IETF draft
    assert big.kv_cache_bytes(1, bytes_per_value=1) == 160 * 1024  # ch. 8
    assert big.kv_cache_bytes(7, 3, 4) == 42 * big.kv_cache_bytes()
    # ch. 7 of the Scaling Book prints 6.7 GB
    assert printed_as(published("llama-2-13b").kv_cache_bytes(8192), "6.7e9")


def test_training_flops_as_the_papers_print_them():
    gpt3 = published("gpt3-175b")
    assert printed_as(gpt3.train_flops(300e9), "3.14e23")
    # 2204.02311: 238.3 thousand tokens a second on 6144 TPU v4 are 46.2 %
    palm = published("palm-540b").flops_per_token(2048, training=True)
    assert printed_as(100 * 238.3e3 * palm / (6144 * 275e12), "46.2")
    # its Table 22, without recomputation: TFLOP a token
    assert printed_as(palm, "3.28e12")
    assert printed_as(published("palm-8b").flops_per_token(
        2048, training=True), "0.0550e12")


@pytest.mark.parametrize("shape, dense", [
    ({}, 8), ({"gated": False}, 6),
    ({"d_model": 8192, "heads": 64, "kv_heads": 8, "d_ff": 28672}, 6.375),
    ({"kv_heads": 8, "d_ff": 14336}, 6.5)])
def test_the_crossover_in_units_of_d_model(shape, dense):
    book = {"layers": 3, "d_model": 4096, "heads": 32, "d_ff": 16384,
            "vocab": 32000}
    config = Config(**book | shape)
    assert config.attention_crossover() == dense * config.d_model
    assert config.attention_crossover(causal=True) == (
        2 * dense * config.d_model)


def test_models_of_the_table_cross_where_the_book_says():
    assert published("llama-3-70b").attention_crossover() == 52_224
    assert published("gpt2").attention_crossover() == 4608


def layer(config):
    """The same decoder layer, written as a torch module on meta tensors."""
    torch = pytest.importorskip("torch")
    nn, F = torch.nn, torch.nn.functional
    d, width = config.d_model, config.head_dim
    split = {"device": "meta", "bias": config.biases}

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            kind = nn.LayerNorm if config.biases else nn.RMSNorm
            self.norms = nn.ModuleList(
                kind(d, device="meta") for _ in range(config.norms))
            self.q = nn.Linear(d, config.heads * width, **split)
            self.k = nn.Linear(d, config.kv_heads * width, **split)
            self.v = nn.Linear(d, config.kv_heads * width, **split)
            self.o = nn.Linear(config.heads * width, d, **split)
            if config.gated:
                self.gate = nn.Linear(d, config.d_ff, **split)
            self.up = nn.Linear(d, config.d_ff, **split)
            self.down = nn.Linear(config.d_ff, d, **split)

        def forward(self, x):
            h = self.norms[0](x)
            q, k, v = (p(h).unflatten(-1, (-1, width)).transpose(1, 2)
                       for p in (self.q, self.k, self.v))
            k, v = (t.repeat_interleave(config.heads // config.kv_heads, 1)
                    for t in (k, v))
            weights = (q @ k.mT * width**-0.5).softmax(-1)
            x = x + self.o((weights @ v).transpose(1, 2).flatten(2))
            h = self.norms[1](x)
            up = F.silu(self.gate(h)) * self.up(h) if config.gated else (
                F.gelu(self.up(h)))
            return x + self.down(up)

    return Layer()


LAYERS = {"gated": {}, "dense": {"gated": False}, "GQA": {"kv_heads": 2},
          "multi-query, wide heads": {"kv_heads": 1, "head_dim": 24},
          "biases": {"gated": False, "biases": True}}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("training", [False, True],
                         ids=["forward", "forward and backward"])
def test_the_closed_form_counts_what_a_torch_layer_multiplies(kind, training):
    torch = pytest.importorskip("torch")
    config = Config(**SIZES | LAYERS[kind])
    batch, tokens = 3, 40
    x = torch.empty(batch, tokens, config.d_model, device="meta")
    cost = flops.count(layer(config), x, wrt="all" if training else None)
    head = 2 * config.vocab * config.d_model * (3 if training else 1)
    each = config.flops_per_token(tokens, training=training) - head
    assert cost.matmul == batch * tokens * each
    # what a layer holds besides: the final norm and both embeddings
    outside = 2 * config.vocab * config.d_model + (
        config.d_model * (1 + config.biases))
    assert cost.params == config.params() - outside


def test_attention_equals_weights_in_a_counted_layer_at_the_crossover():
    torch = pytest.importorskip("torch")
    config = Config(**SIZES)
    tokens = config.attention_crossover()
    x = torch.empty(1, int(tokens), config.d_model, device="meta")
    ops = flops.count(layer(config), x).ops
    with_weights = sum(op.matmul for op in ops if op.name in ("mm", "addmm"))
    assert tokens == int(tokens)
    assert with_weights == sum(op.matmul for op in ops if op.name == "bmm")


def test_a_mixture_counts_the_experts_a_token_sees():
    dense = Config(**SIZES)
    mixed = replace(dense, experts=8, active_experts=2)
    mlp, router = 3 * 64 * 96, 64 * 8
    assert mixed.params() == dense.params() + 7 * mlp + router
    assert mixed.active_params() == dense.params() + mlp + router
    assert mixed.train_flops(10) == 60 * mixed.active_params()
    # a router's scores are products too, so they are in the FLOPs
    assert mixed.flops_per_token(1) - dense.flops_per_token(1) == (
        2 * (mlp + router))


few = settings(max_examples=30, deadline=None)


@few
@given(st.integers(1, 9), st.integers(1, 9), st.booleans(), st.booleans(),
       st.booleans())
def test_parts_add_up(layers, heads, gated, tied, biases):
    config = Config(layers=layers, d_model=16 * heads, heads=heads, d_ff=48,
                    vocab=100, gated=gated, tied=tied, biases=biases)
    thrice = config.flops_per_token(64, training=True)
    assert thrice == 3 * config.flops_per_token(64)
    assert config.flops_per_token(0) == 2 * sum(config.weights().values())
    assert config.flops_per_token(0) - config.weight_flops() == (
        2 * config.vocab * config.d_model)
    assert (config.flops_per_token(64) + config.flops_per_token(0)
            == 2 * config.flops_per_token(64, causal=True))
    more = replace(config, layers=layers + 1)
    assert config.params() < more.params()
    assert config.attention_crossover() == more.attention_crossover()


def test_objects_are_frozen_equal_and_travel():
    config = published("llama-3-8b")
    with pytest.raises(FrozenInstanceError):
        config.layers = 1
    shape = dict(layers=32, d_model=4096, heads=32, kv_heads=8, d_ff=14336,
                 vocab=128256)
    assert config == Config(**shape)
    assert pickle.loads(pickle.dumps(config)) == config
    assert str(config).startswith("llama-3-8b: 8,030,261,248 parameters")


def test_a_table_puts_both_numbers_side_by_side():
    pytest.importorskip("pandas")
    table = published("mixtral-8x7b").table()
    assert [*table.what] == ["params", "active_params"]
    assert [*table.computed] == [int(n) for n in table.printed]


@pytest.mark.parametrize("change, said", [
    ({"layers": 0}, "layers is 0"), ({"d_ff": 1.5}, "d_ff is 1.5"),
    ({"d_model": "64"}, "d_model is '64'"),
    ({"heads": 0}, "heads is 0"), ({"vocab": True}, "vocab is True"),
    ({"kv_heads": 3}, "kv_heads is 3"),
    ({"kv_heads": -2}, "kv_heads is -2"),
    ({"d_model": 3}, "head_dim is 0"),
    ({"experts": 4}, "active_experts is 0 of 4"),
    ({"experts": 2, "active_experts": 3}, "active_experts is 3 of 2")])
def test_a_wrong_shape_gets_one_sentence(change, said):
    with pytest.raises(ValueError, match=said) as caught:
        Config(**SIZES | change)
    assert "\n" not in str(caught.value)


def test_an_unknown_name_is_told_its_neighbours():
    with pytest.raises(ValueError, match="nearest: llama-3-70b"):
        published("llama3-70b")
    with pytest.raises(ValueError, match="All: gpt2"):
        published("zzzz")
