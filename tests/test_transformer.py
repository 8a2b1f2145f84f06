"""transformer: against published tables, and flops.count of real layers."""

import pickle
from dataclasses import FrozenInstanceError, replace
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_utils import chips, flops, transformer
from course_utils.exercises_data import EXERCISES
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
        assert printed_as(row.computed(config), row.printed), row


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
    "gpt-neox-20b": (dict(
        layers=44, d_model=6144, heads=64, d_ff=24576, vocab=50432, **GPT),
        20_554_567_680, None, 1_081_344),
    "qwen2.5-0.5b": (dict(  # biases on Q, K, V: 64 (14 + 2 x 2) a layer
        layers=24, d_model=896, heads=14, kv_heads=2, d_ff=4864, tied=True,
        vocab=151936, extra=24 * 64 * 18), 494_032_768, 357_898_112, 12_288),
    "phi-4-mini": (dict(
        layers=32, d_model=3072, heads=24, kv_heads=8, d_ff=8192, tied=True,
        vocab=200064), 3_836_021_760, None, 131_072),
    "mistral-nemo": (dict(
        layers=40, d_model=5120, heads=32, kv_heads=8, head_dim=128,
        d_ff=14336, vocab=131072), 12_247_782_400, None, 163_840),
    "mpt-7b": (dict(
        layers=32, d_model=4096, heads=32, d_ff=16384, vocab=50432,
        gated=False, tied=True), 6_649_286_656, None, None),
    "gemma-3-4b": (dict(
        layers=34, d_model=2560, heads=8, kv_heads=4, head_dim=256, tied=True,
        d_ff=10240, vocab=262144, norms=4, qk_norm=True),
        3_880_099_328, None, 139_264),
    "deepseek-v2-lite": (dict(
        layers=27, d_model=2048, heads=16, head_dim=128, d_ff=10944,
        vocab=102400, latent=512, rope=64, experts=64, active_experts=6,
        shared_experts=2, d_expert=1408, dense_layers=1),
        15_706_484_224, None, 27 * 576 * 2),
    "kimi-k2": (dict(
        layers=61, d_model=7168, heads=64, head_dim=128, d_ff=18432,
        vocab=163840, latent=512, rope=64, q_latent=1536, experts=384,
        active_experts=8, shared_experts=1, d_expert=2048, dense_layers=1,
        extra=60 * 384), 1_026_408_232_448, None, None),
    "glm-4.5-air": (dict(  # biases on Q, K, V; a correction for each expert
        layers=46, d_model=4096, heads=96, kv_heads=8, head_dim=128,
        d_ff=10944, vocab=151552, experts=128, active_experts=8, d_expert=1408,
        shared_experts=1, dense_layers=1,
        extra=46 * 128 * 112 + 45 * 128), 106_852_251_264, None, None),
    "gpt-oss-20b": (dict(  # biases (no norm's), routers' among them; sinks
        layers=24, d_model=2880, heads=64, kv_heads=8, head_dim=64, d_ff=2880,
        vocab=201088, experts=32, active_experts=4, extra=24 * (
            64 * 80 + 2880 + 64 + 32 * (3 * 2880 + 1))),
        20_914_757_184, None, 49_152),
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


@pytest.mark.parametrize("layers, d, params, inner", [
    (24, 1024, 559_214_592, None), (30, 4096, 7_069_016_064, None)])
def test_bloom_has_one_norm_more(layers, d, params, inner):
    config = Config(layers=layers, d_model=d, heads=16, d_ff=4 * d,
                    vocab=250880, tied=True, **GPT)
    assert config.params() + 2 * d == params


# arXiv 2205.05198 and 2104.04473: P, heads, h, L, and FLOPs of an iteration
MEGATRON = [(1.7, 24, 2304, 24, 512, 1.5467e16),
            (18.4, 48, 6144, 40, 1024, 3.2484e17),
            (145.6, 96, 12288, 80, 2304, 5.6417e18),
            (529.6, 128, 20480, 105, 2520, 2.2216e19)]


@pytest.mark.parametrize("billions, heads, h, layers, batch, total", MEGATRON)
def test_megatron_recomputes_the_layers(
        billions, heads, h, layers, batch, total):
    config = Config(layers=layers, d_model=h, heads=heads, d_ff=4 * h,
                    vocab=51200, positions=2048, tied=True, **GPT)
    assert printed_as(config.params() / 1e9, str(billions))
    once = config.flops_per_token(2048, training=True)
    again = config.flops_per_token(2048, training=True, again=True)
    assert again * 2048 * batch == pytest.approx(total, rel=1e-4)
    # their formulas, typed
    assert once * 2048 * batch == pytest.approx(
        72 * batch * layers * 2048 * h**2 * (
            1 + 2048 / (6 * h) + 51200 / (12 * h * layers)))
    assert again * 2048 * batch == pytest.approx(
        96 * batch * layers * 2048 * h**2 * (
            1 + 2048 / (6 * h) + 51200 / (16 * h * layers)))


@pytest.mark.parametrize("h, layers, batch, gpus, seconds, mfu, hfu", [
    (12288, 96, 64, 64, 13.75, "51.4", "52.8"),
    (6144, 48, 4, 8, 1.10, None, None)])
def test_utilization_of_a_training_step(
        h, layers, batch, gpus, seconds, mfu, hfu):
    config = Config(layers=layers, d_model=h, heads=h // 128, d_ff=4 * h,
                    vocab=51200, positions=2048, tied=True, **GPT)
    speed, peak = batch * 2048 / seconds, gpus * chips.get("a100").peak("bf16")
    found = 100 * config.mfu(speed, peak, 2048)
    if mfu is None:  # printed 41.5; 1.10 s is rounded, and gives 41.65
        assert found == pytest.approx(41.65, abs=0.005)
        return
    assert printed_as(found, mfu)
    # attention is done again, forward; their formula (s/3h for s/6h) adds it
    # three times, as if backward too
    more = 3 * speed / peak * config.attention_flops(2048)
    assert printed_as(found + 100 * more, hfu)


# llm-foundry's table: L, d, T, tokens a second, GPUs, peak, MFU in percent
@pytest.mark.parametrize("layers, d, context, speed, peak, printed", [
    (32, 4096, 2048, 85_144, 8 * 989.4e12, 46.44),
    (80, 8192, 2048, 515_636, 512 * 989.4e12, 41.25),
    (32, 4096, 65536, 8_108, 8 * 312e12, 46.97)])
def test_mpt_counts_its_table_of_positions_as_a_product(
        layers, d, context, speed, peak, printed):
    config = Config(layers=layers, d_model=d, heads=d // 128, d_ff=4 * d,
                    vocab=50368, positions=context, tied=True, **GPT)
    theirs = 6 * config.params() + 3 * config.attention_flops(context)
    assert 100 * speed / peak * theirs == pytest.approx(printed, abs=0.01)
    table = 6 * context * d  # and norms and biases, which are next to nothing
    assert config.mfu(speed, peak, context) == pytest.approx(
        speed / peak * (theirs - table), rel=2e-3)


def chinchilla(layers, d, heads, size):
    a, f = heads * size, 4 * d
    return Config(layers=layers, d_model=d, heads=heads, head_dim=size,
                  d_ff=f, vocab=32000, gated=False, tied=True,
                  extra=layers * (5 * a + d * a + f))


@pytest.mark.parametrize("shape, params, ratio", [
    ((10, 640, 10, 64), 73_799_040, "1.03"),
    ((24, 1280, 10, 128), 552_480_000, "1.08"),
    ((28, 2048, 16, 128), 1_592_895_488, "1.03")])
def test_chinchilla_table_a4(shape, params, ratio):
    """Its FLOPs over 6ND: no embedding, no logits, 3 a score for softmax."""
    config = chinchilla(*shape)
    assert config.params() == params
    layers, _, heads, _ = shape
    forward = config.weight_flops() + config.attention_flops(2048)
    theirs = 3 * (forward + 3 * layers * heads * 2048)
    assert printed_as(theirs / config.train_flops(1), ratio)
    logits = theirs + 3 * 4 * 32000 * config.d_model  # as its appendix says
    assert not printed_as(logits / config.train_flops(1), ratio)


def test_chinchillas_of_the_table_have_its_extra_parameters():
    assert published("chinchilla-12b") == chinchilla(44, 4608, 36, 128)
    assert published("chinchilla-16b") == chinchilla(47, 5120, 40, 128)
    assert published("chinchilla-552m") == replace(
        chinchilla(24, 1280, 10, 128), head_dim=None)


def test_training_flops_as_the_papers_print_them():
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


def test_gpt3_xl_is_not_made_of_the_heads_it_prints():
    xl = published("gpt3-xl")
    printed = replace(xl, heads=24, head_dim=128)
    assert printed_as(printed.params(), "1517.1e6") and "24 heads" in xl.note
    assert not printed_as(printed.params(), "1.32e9")
    # D.1's FLOPs are of the rounded parameters
    assert printed_as(6 * 1320e6 * 300e9, "2.38e21")
    assert not printed_as(xl.train_flops(300e9), "2.38e21")


def test_llama_405b_with_a_quarter_of_attention():
    """2505.09343 prints 2448 GFLOP a token; half of attention, as it has for
    DeepSeek, is 2473."""
    big = published("llama-3.1-405b")
    weights = 6 * (big.active_params() - big.vocab * big.d_model)
    quarter = 3 * big.attention_flops(4096) / 4
    assert printed_as(weights + quarter, "2448e9") and "quarter" in big.note
    assert printed_as(weights + 2 * quarter, "2473e9")


def test_palm_with_what_it_recomputes():
    """Table 22: TFLOP a token, and 57.8 % of the hardware."""
    for name, other, printed in (("palm-8b", 0, "0.0561e12"),
                                 ("palm-540b", 0.75, "4.10e12")):
        palm = published(name)
        total = (palm.flops_per_token(2048, training=True)
                 + palm.attention_flops(2048) + other * 2 * palm.params())
        assert printed_as(total, printed)
    assert printed_as(100 * 238.3e3 * total / (6144 * 275e12), "57.8")
    assert printed_as(100 * published("palm-540b").mfu(
        238.3e3, 6144 * 275e12, 2048), "46.2")


def test_active_parameters_say_what_is_counted():
    v3 = published("deepseek-v3")
    table = v3.vocab * v3.d_model
    assert v3.active_params() == 37_552_297_472
    assert v3.active_params() - table == 36_625_618_432
    assert v3.active_params() - 2 * table == 35_698_939_392
    moe = published("qwen3-30b-a3b")
    assert moe.active_params() - moe.vocab * moe.d_model == 3_041_867_776
    sees = 24 * (64 * 80 + 2880 + 64 + 4 * 3 * 2880 + 32)
    oss = Config(**OTHERS["gpt-oss-20b"][0] | {"extra": sees})
    assert oss.active_params() - 201088 * 2880 == 3_608_307_264  # the card's


def test_latent_attention_caches_what_the_paper_says():
    # DeepSeek-V2's appendix, in values: 34.6K of MLA where MHA has 860.2K
    small = Config(**OTHERS["deepseek-v2-lite"][0])
    assert small.kv_cache_bytes(bytes_per_value=1) == 15_552
    assert replace(small, latent=0, rope=0).kv_cache_bytes(
        bytes_per_value=1) == 110_592
    assert printed_as(published("deepseek-v2").kv_cache_bytes(
        bytes_per_value=1), "34.6e3")


# --- the Scaling Book, chapters 4 to 8 (edition of July 2026) ---------------
BOOK = {"layers": 64, "d_model": 4096, "heads": 32, "d_ff": 16384,
        "vocab": 32000}


def test_the_books_parameters():
    q1 = Config(**BOOK)  # ch. 4, prints 16e9, of 4e3 and 16e3
    assert printed_as(q1.params(), "17.44e9")
    assert not printed_as(q1.params(), "16e9")
    weights = q1.weights()
    inner = weights["Q, K, V, O"] + weights["MLP"]
    assert weights["Q, K, V, O"] / inner == 0.25
    assert printed_as(weights["Q, K, V, O"] / q1.params(), "0.246")
    toy = Config(**BOOK | {"kv_heads": 8, "head_dim": 256, "vocab": 32128,
                           "tied": True})  # ch. 7
    assert printed_as(toy.params(), "18.4e9")
    assert toy.kv_cache_bytes(bytes_per_value=1) == 262_144
    moe = replace(toy, experts=16, active_experts=2)
    assert printed_as(moe.params(), "212e9")
    assert printed_as(moe.active_params(), "31.2e9")
    # 16 v5e of 16 GB, int8, 128e3 tokens: 7 sequences; with one head 56
    free = 16 * 16e9 - toy.params()
    for config, most in (toy, 7), (replace(toy, kv_heads=1), 56):
        assert free // config.kv_cache_bytes(
            128_000, bytes_per_value=1) == most
    small = published("llama-2-13b").weights()  # ch. 5, question 1
    assert [printed_as(small[part], printed) for part, printed in (
        ("MLP", "8.493e9"), ("Q, K, V, O", "4.194e9"))] == [True, True]


def test_the_books_flops():
    big = published("llama-3-70b")
    assert printed_as(big.train_flops(1), "4.2e11")
    assert printed_as(big.train_flops(15e12), "6.3e24")
    days = big.train_flops(15e12) / (8960 * 0.4 * 459e12 * 86400)
    assert printed_as(days, "44")
    used = EXERCISES["1.7"].solve()
    assert printed_as(100 * used, "21.62")  # the book prints 21.7
    layer = Config(**BOOK)
    assert layer.attention_flops(2 * 4096) == (  # ch. 4, question 5: T = 2D
        2 * layer.weights()["Q, K, V, O"])


def test_the_books_bytes():
    cache = Config(**BOOK | {"heads": 64, "head_dim": 128})  # KH = 8192
    assert cache.kv_cache_bytes(8192, bytes_per_value=1) == 8 * 2**30
    big = published("llama-3-70b")
    assert printed_as(big.kv_cache_bytes(32768, bytes_per_value=1), "5.3e9")
    assert {-(-(big.params() + big.kv_cache_bytes(tokens, 240, 1)) // 16e9)
            for tokens in (32_000, 32_768)} == {84, 85}  # v5e; it prints 86
    small = published("llama-2-13b")  # ch. 5: weights and Adam's moments
    assert printed_as(small.optimizer_bytes(2 + 8), "130e9")
    assert small.optimizer_bytes() == 16 * small.params()
    kept = small.d_model + 2 * small.d_ff  # a layer's, after each big product
    assert printed_as(2 * 16e6 * small.layers * kept, "41.9e12")


def test_the_books_sharded_product():
    """Ch. 4, question 2: Z has nothing to do, so it does everything again."""
    jax = pytest.importorskip("jax")
    spec = jax.sharding.PartitionSpec
    mesh = jax.sharding.AbstractMesh((4, 8, 4), ("X", "Y", "Z"))
    b, d, f = 64, 128, 32
    product = jax.shard_map(
        lambda a, w: jax.lax.psum(a @ w, "Y"), mesh=mesh,
        in_specs=(spec("X", "Y"), spec("Y", None)), out_specs=spec("X", None))
    with pytest.warns(UserWarning, match="psum"):  # what chips exchange
        cost = flops.count(product, *(
            jax.ShapeDtypeStruct(shape, "float32")
            for shape in ((b, d), (d, f))))
    assert cost.matmul == 2 * b * d * f * 4
    assert cost.matmul / mesh.size == 2 * b * d * f / (4 * 8)


def test_the_books_checkpoints_of_big_products():
    """Ch. 4: of about 20 values a layer, the 7 products with weights stay."""
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    def layer(x, q, k, v, o, gate, up, down):
        h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))
        weights = jax.nn.softmax((h @ q) @ (h @ k).swapaxes(1, 2))
        x = x + (weights @ (h @ v)) @ o
        h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))
        return x + (jax.nn.silu(h @ gate) * (h @ up)) @ down

    def kept(policy):
        """Values besides arguments that two layers keep for a backward."""
        def both(x, *w):
            part = jax.checkpoint(layer, policy=policy)
            return part(part(x, *w), *w).sum()

        forward = jax.make_jaxpr(lambda *a: jax.vjp(both, *a)[1])(*args)
        return len({*map(id, forward.jaxpr.outvars)}
                   - {*map(id, forward.jaxpr.invars)})

    args = [jnp.ones(shape) for shape in (
        (2, 8, 4), *[(4, 4)] * 4, *[(4, 6)] * 2, (6, 4))]
    policies = jax.checkpoint_policies
    # The last of all, and nothing else, is not needed to differentiate.
    assert kept(policies.dots_with_no_batch_dims_saveable) == 2 * 7 - 1
    assert kept(policies.nothing_saveable) == 1  # between the layers
    assert 2 * 17 < kept(policies.everything_saveable) < 2 * 23


# Its chips: FLOP/s in bf16, bytes/s of HBM, bytes.
V5E, V5E_HBM, V5E_BYTES, V5P = 1.97e14, 8.2e11, 16e9, 4.59e14


def serving(config, chips_n, batch, context, cache=None):
    """Seconds a step of 8-bit weights and cache: the cache is read, and the
    weights are read or multiplied, whichever takes longer."""
    cache = cache or config.kv_cache_bytes(context, batch, 1)
    weights = max(config.params() / V5E_HBM,
                  2 * batch * config.params() / V5E)
    return (weights + cache / V5E_HBM) / chips_n


def test_the_books_serving():
    big = published("llama-3-70b")
    kept = big.kv_cache_bytes(8000, 32, 1)  # ch. 8: 112 GB, 7 chips
    assert printed_as(kept + 70e9, "112e9")
    assert -(-(kept + 70e9) // V5E_BYTES) == 7
    step = serving(big, 8, 32, 8000)  # 17 ms; 32 tokens in it
    assert printed_as(1e3 * step, "17") and 1850 < 32 / step < 1882
    assert printed_as(1e3 * V5E_BYTES / V5E_HBM, "19")  # when HBM is full
    prefill = 2 * 70e9 * 8192 / (16 * 0.4 * V5E)
    assert printed_as(prefill, "0.91")
    # Servers that fill caches for one that generates 512 tokens, 32 at once
    assert printed_as(prefill * 32 / (512 * V5E_BYTES / V5E_HBM), "3")
    assert printed_as(1e3 * big.train_flops(1) / V5P, "0.92")  # 1 ms a token
    kept = 4 * 2 * 80 * 8192 * 4e6  # ch. 6: 4 values of D a layer, 4M tokens
    assert printed_as(kept, "20.9e12")
    assert printed_as(kept + 10 * 70e9, "21.6e12")
    assert -(-(kept + 10 * 70e9) // 96e9) == 226  # the book: 225
    thirty = Config(layers=1, d_model=50_000, heads=1, d_ff=133_333, vocab=1)
    assert thirty.params() == pytest.approx(30e9, rel=1e-3)
    for batch, printed in (4, "2.5"), (256, "20.8"):  # ch. 7; it prints 21
        step = serving(thirty, 16, batch, 8192, batch * 8192 * 100e3)
        assert printed_as(1e3 * step, printed)


def test_the_books_rooflines_of_a_product():
    jax = pytest.importorskip("jax")
    ridge = V5E / V5E_HBM

    def intensity(b, d, kind="bfloat16", spread=False):
        x = jax.ShapeDtypeStruct((b, d), kind)
        w = jax.ShapeDtypeStruct((b, d, d) if spread else (d, d), kind)
        cost = flops.count(lambda x, w: jax.numpy.einsum(
            "bd,bdf->bf" if spread else "bd,df->bf", x, w), x, w)
        return (cost.matmul or cost.integer) / cost.bytes

    for d, b in (8192, 255), (4096, 272):  # ch. 1: 240, of very wide ones
        assert intensity(b, d) < ridge < intensity(b + 1, d)
    assert intensity(64, 1024, spread=True) == pytest.approx(1, abs=0.01)
    experts = published("deepseek-v3")  # ch. 4, question 8: 8-bit weights
    assert 3800 < ridge / 2 * experts.experts / experts.active_experts < 3850
    assert printed_as(2 * V5E / 4.5e10, "8755")  # two chips, D split


def test_the_books_einsums():
    jax = pytest.importorskip("jax")
    size = dict(zip("ghijklmno", (2, 3, 4, 5, 6, 7, 8, 9, 10), strict=True))
    for dots in "ghijkl,ghmnkl->ghijmn", "ijkl,ijmno->klmno":
        a, b = (jax.ShapeDtypeStruct([size[x] for x in part], "float32")
                for part in dots.split("->")[0].split(","))
        want = 2
        for letter in {*dots} - {*",->"}:
            want *= size[letter]
        assert flops.count(
            lambda a, b, dots=dots: jax.numpy.einsum(dots, a, b), a, b
        ).matmul == want


# --- where other calculators were wrong: facts in public reports ------------
def test_width_of_heads_is_free_of_d_model():
    """torchtitan issue 1920, LMCache issue 688: 32 heads of 128, d 2560."""
    qwen = published("qwen3-4b")
    assert qwen.heads * qwen.head_size == 4096 != qwen.d_model
    assert qwen.attention_flops(1000) == 4 * 4096 * 1000 * qwen.layers
    assert qwen.kv_cache_bytes() == 147_456
    assert replace(qwen, head_dim=None).kv_cache_bytes() == 92_160


def test_both_products_of_attention_count():
    """torchtitan pull request 4366: 6 h (dk + dv) T a token and layer."""
    dk, dv, context = 128 + 64, 128, 4096
    latent = Config(layers=1, d_model=512, heads=16, head_dim=dv, d_ff=1,
                    vocab=1, latent=64, rope=dk - dv)
    weights = 6 * sum(latent.weights().values())
    assert latent.flops_per_token(context, training=True) - weights == (
        6 * 16 * (dk + dv) * context)


def test_bytes_of_adam_depend_on_what_is_kept():
    """Megatron-LM issue 654: 16, or 18 with 32-bit gradients."""
    model = published("gpt2")
    assert model.optimizer_bytes() / model.params() == 16
    assert model.optimizer_bytes(2 + 4 + 4 + 8) / model.params() == 18


# --- windows ----------------------------------------------------------------
@pytest.mark.parametrize("full", [0, 1, 3])
@pytest.mark.parametrize("context", [4, 16, 17, 100, 1000])
def test_a_window_by_counting_pairs(full, context):
    window = 16
    config = Config(**SIZES | {"layers": 3, "window": window,
                               "full_layers": full})
    near = min(context, window)
    dense = full * context + (3 - full) * near
    assert config.attention_flops(context) == 4 * 64 * dense
    # token t sees t + 1, or the window; half a token more than the formula
    exact = sum(full * (t + 1) + (3 - full) * min(t + 1, window)
                for t in range(context)) / context
    half = (full + (3 - full) * near / context) / 2
    assert config.attention_flops(context, causal=True) == pytest.approx(
        4 * 64 * (exact - half))
    assert config.kv_cache_bytes(context) == 2 * 2 * 64 * dense


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("full", [0, 1, 2, 6])
@pytest.mark.parametrize("window", [100, 400, 800, 10_000])
def test_the_crossover_of_a_window_is_one(window, full, causal):
    config = Config(**SIZES | {"layers": 6, "window": window,
                               "full_layers": full})
    tokens, goal = config.attention_crossover(causal), config.weight_flops()
    if full == 0 and 4 * 64 * 6 * window <= goal:
        assert tokens == float("inf")
    else:
        assert config.attention_flops(tokens, causal) == pytest.approx(goal)


def test_gemma_3_caches_what_its_windows_keep():
    gemma = published("gemma-3-1b")
    assert gemma.kv_cache_bytes() == 26_624
    assert gemma.kv_cache_bytes(32768) == 1024 * (4 * 32768 + 22 * 512)


# --- activations ------------------------------------------------------------
@pytest.mark.parametrize("sbh", [(1024, 3, 256, 4), (2048, 1, 512, 16)])
def test_activations_as_in_the_formula_of_megatron(sbh):
    """sbh (34 + 5as/h) a layer: 2 of the 34, and 3 of the 5, are dropout."""
    s, b, h, a = sbh
    config = Config(layers=2, d_model=h, heads=a, d_ff=4 * h, vocab=9,
                    gated=False)
    assert config.activation_bytes(s, b) == 2 * s * b * h * (
        32 + 2 * a * s / h)
    assert config.activation_bytes(s, b, scores=False) == 2 * 32 * s * b * h


@pytest.mark.parametrize("shape", [
    {}, {"gated": False}, {"head_dim": 24}, {"qk_norm": True},
    {"latent": 24}, {"latent": 24, "q_latent": 40}],
    ids=lambda shape: " ".join(shape) or "plain")
def test_activations_are_what_autograd_keeps(shape):
    torch = pytest.importorskip("torch")
    config = Config(**SIZES | shape, biases=True)  # LayerNorm: one op
    block = layer(config).to_empty(device="cpu").to(torch.bfloat16)
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept = {}

    def keep(x):
        at = x.untyped_storage().data_ptr()
        if at not in weights and x.shape[-1] > 1:  # a norm's two numbers
            kept[at] = x  # alive, so the place is not used again
        return x

    x = torch.ones(3, 40, 64, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        block(x)
    found = sum(t.untyped_storage().nbytes() for t in kept.values())
    assert found == config.activation_bytes(40, 3)


def test_models_of_the_table_cross_where_the_book_says():
    assert published("llama-3-70b").attention_crossover() == 52_224
    assert published("gpt2").attention_crossover() == 4608


def layer(config):
    """The same decoder layer, written as a torch module on meta tensors."""
    torch = pytest.importorskip("torch")
    nn, F = torch.nn, torch.nn.functional
    d, width = config.d_model, config.head_size
    split = {"device": "meta", "bias": config.biases}

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            kind = nn.LayerNorm if config.biases else nn.RMSNorm
            self.norms = nn.ModuleList(
                kind(d, device="meta") for _ in range(config.norms))
            self.latents = nn.ModuleList(nn.Sequential(
                nn.Linear(d, size, **split), kind(size, device="meta"))
                if size else nn.Identity()
                for size in (config.q_latent, config.latent))
            self.heads = nn.ModuleList(
                kind(width, device="meta") if config.qk_norm else
                nn.Identity() for _ in "qk")
            self.q = nn.Linear(
                config.q_latent or d, config.heads * width, **split)
            self.k, self.v = (nn.Linear(
                config.latent or d, config.key_heads * width, **split)
                for _ in "kv")
            self.o = nn.Linear(config.heads * width, d, **split)
            if config.gated:
                self.gate = nn.Linear(d, config.d_ff, **split)
            self.up = nn.Linear(d, config.d_ff, **split)
            self.down = nn.Linear(config.d_ff, d, **split)

        def forward(self, x):
            h = self.norms[0](x)
            narrow, c = (latent(h) for latent in self.latents)
            q, k, v = (x.unflatten(-1, (-1, width)) for x in (
                self.q(narrow), self.k(c), self.v(c)))
            q, k = (norm(x) for norm, x in zip(
                self.heads, (q, k), strict=True))
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            k, v = (t.repeat_interleave(config.heads // config.key_heads, 1)
                    for t in (k, v))
            weights = (q @ k.mT * width**-0.5).softmax(-1)
            x = x + self.o((weights @ v).transpose(1, 2).flatten(2))
            h = self.norms[1](x)
            up = F.silu(self.gate(h)) * self.up(h) if config.gated else (
                F.gelu(self.up(h)))
            return x + self.down(up)

    return Layer()


def experts(config):
    """A mixture on meta tensors, each expert with as many tokens as others."""
    torch = pytest.importorskip("torch")
    nn, F = torch.nn, torch.nn.functional
    d, f, n = config.d_model, config.d_expert or config.d_ff, config.experts
    k = config.active_experts

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(d, n, bias=False, device="meta")
            self.up, self.gate, self.down = (
                nn.Parameter(torch.empty(shape, device="meta"))
                for shape in ((n, d, f), (n, d, f), (n, f, d)))
            self.shared = nn.ModuleList(
                nn.Linear(*shape, bias=False, device="meta")
                for _ in range(config.shared_experts)
                for shape in ((d, f), (d, f), (f, d)))

        def forward(self, x):
            x = x.flatten(0, 1)
            share = self.router(x).softmax(-1)[:, :k].T.unsqueeze(-1)
            sent = x.repeat(k, 1).unflatten(0, (n, -1))
            sent = (F.silu(sent @ self.gate) * (sent @ self.up)) @ self.down
            out = (sent.flatten(0, 1).unflatten(0, (k, -1)) * share).sum(0)
            for at in range(0, len(self.shared), 3):
                gate, up, down = self.shared[at:at + 3]
                out = out + down(F.silu(gate(x)) * up(x))
            return out

    return Mixture()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("more", [
    {}, {"shared_experts": 2, "d_expert": 48}])
def test_the_closed_form_counts_what_a_mixture_multiplies(more, training):
    torch = pytest.importorskip("torch")
    config = Config(**SIZES, experts=8, active_experts=2, **more)
    x = torch.empty(3, 40, config.d_model, device="meta")
    cost = flops.count(experts(config), x, wrt="all" if training else None)
    each = 2 * config.weights()["MLP"] * (3 if training else 1)
    assert cost.matmul == 120 * each
    assert cost.params == config.weights(active=False)["MLP"]


@pytest.mark.parametrize("q_latent", [0, 40])
def test_the_closed_form_counts_what_latent_attention_multiplies(q_latent):
    torch = pytest.importorskip("torch")
    config = Config(**SIZES, latent=24, rope=8, q_latent=q_latent)
    d, h, size, tokens = 64, 4, 16, 40

    def attend(x, wq, wc, wkv, wo, *more):
        q = x @ more[0] @ wq if more else x @ wq
        c = x @ wc
        k, v = (c[:, :24] @ wkv).unflatten(-1, (h, -1)).split(size, -1)
        turned = c[:, 24:].unsqueeze(1).expand(-1, h, -1)  # one for all heads
        q, k, v = (t.transpose(0, 1) for t in (
            q.unflatten(-1, (h, -1)), torch.cat([k, turned], -1), v))
        mixed = (q @ k.mT).softmax(-1) @ v
        return mixed.transpose(0, 1).flatten(1) @ wo

    shapes = [(tokens, d), (q_latent or d, h * (size + 8)), (d, 24 + 8),
              (24, 2 * h * size), (h * size, d)] + [(d, 40)] * bool(q_latent)
    args = [torch.empty(shape, device="meta") for shape in shapes]
    weights = config.weights()["Q, K, V, O"]
    assert sum(w.numel() for w in args[1:]) == weights
    assert flops.count(attend, *args).matmul == tokens * (
        2 * weights + config.attention_flops(tokens))
    norms = 3 * 64 + 24 + q_latent  # of both latents too
    assert config.params() == sum(config.weights().values()) + (
        norms + 50 * 64)


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


@pytest.mark.parametrize("old", [{}, {"kv_heads": 2}, {"head_dim": 24}])
@pytest.mark.parametrize("new", [
    {"d_model": 128}, {"heads": 8}, {"heads": 2}, {"kv_heads": 1},
    {"kv_heads": 4}, {"head_dim": 16}, {"d_model": 96, "heads": 6}])
def test_a_changed_shape_is_as_one_made_afresh(old, new):
    """Whatever was left out follows, and what was given stays."""
    changed = replace(Config(**SIZES | old), **new)
    fresh = Config(**SIZES | old | new)
    assert changed == fresh and str(changed) == str(fresh)
    assert changed.attention_crossover() == fresh.attention_crossover()
    assert changed.params() == fresh.params()
    assert changed.kv_cache_bytes() == fresh.kv_cache_bytes()


def test_a_model_made_from_a_published_one_is_not_that_one():
    half = replace(published("llama-3-8b"), layers=16)
    assert half.published == () and str(half).startswith("decoder: 4,5")
    assert published("llama-3-8b").name == "llama-3-8b"


@given(st.fixed_dictionaries({}, optional={
    "layers": st.integers(1, 3), "heads": st.sampled_from([1, 2, 8]),
    "kv_heads": st.just(1), "head_dim": st.integers(1, 99),
    "norms": st.integers(0, 4), "positions": st.integers(0, 9)}))
def test_whole_numbers_of_numpy_count_the_same(shape):
    np = pytest.importorskip("numpy")
    shape = SIZES | {"d_ff": 60_000, "vocab": 60_000} | shape
    narrow = Config(**{key: np.int32(n) for key, n in shape.items()})
    assert narrow == Config(**shape)
    assert narrow.params() == Config(**shape).params()  # none overflows
    assert type(narrow.layers) is int


@pytest.mark.parametrize("change, said", [
    ({"layers": 0}, "layers is 0"), ({"d_ff": 1.5}, "d_ff is 1.5"),
    ({"d_model": "64"}, "d_model is '64'"),
    ({"heads": 0}, "heads is 0"), ({"vocab": True}, "vocab is True"),
    ({"kv_heads": 3}, "kv_heads is 3"),
    ({"kv_heads": -2}, "kv_heads is -2"),
    ({"d_model": 3}, "d_model is 3: give a multiple of heads, 4"),
    ({"d_model": 66}, "d_model is 66: give a multiple"),
    ({"kv_heads": 0}, "kv_heads is 0"), ({"head_dim": 2.0}, "head_dim is 2"),
    ({"layers": None}, "layers is None"),
    ({"norms": -5}, "norms is -5"), ({"norms": None}, "norms is None"),
    ({"positions": -1}, "positions is -1: give a whole number, 0 or more"),
    ({"experts": 8.0, "active_experts": 2}, "experts is 8.0"),
    ({"gated": "no"}, "gated is 'no': give True or False"),
    ({"biases": 2}, "biases is 2"), ({"tied": None}, "tied is None"),
    ({"experts": 4}, "active_experts is 0 of 4"),
    ({"experts": 2, "active_experts": 3}, "active_experts is 3 of 2"),
    ({"active_experts": 1}, "active_experts is 1 of 0"),
    ({"shared_experts": 1}, "shared_experts is 1: give experts with it"),
    ({"d_expert": 8}, "d_expert is 8: give experts"),
    ({"d_expert": 0}, "d_expert is 0: give a whole number, 1 or more"),
    ({"rope": 8}, "rope is 8: give latent with it"),
    ({"full_layers": 1}, "full_layers is 1: give window with it"),
    ({"full_layers": 2, "window": 9}, "no more layers than 1"),
    ({"dense_layers": 2, "experts": 2, "active_experts": 1},
     "dense_layers is 2")])
def test_a_wrong_shape_gets_one_sentence(change, said):
    with pytest.raises(ValueError, match=said) as caught:
        Config(**SIZES | change)
    assert "\n" not in str(caught.value)


def test_an_unknown_name_is_told_its_neighbours():
    with pytest.raises(ValueError, match="nearest: llama-3-70b"):
        published("llama3-70b")
    with pytest.raises(ValueError, match="All: gpt2"):
        published("zzzz")


@pytest.mark.parametrize("wrong", [-1, float("nan"), "8", None])
@pytest.mark.parametrize("what, name, more", [
    ("flops_per_token", "context", {}), ("train_flops", "tokens", {}),
    ("attention_flops", "context", {}), ("kv_cache_bytes", "tokens", {}),
    ("kv_cache_bytes", "batch", {}), ("kv_cache_bytes", "bytes_per_value", {}),
    ("optimizer_bytes", "bytes_per_param", {}),
    ("activation_bytes", "context", {}),
    ("activation_bytes", "batch", {"context": 8}),
    ("mfu", "peak", {"tokens_per_second": 1, "context": 8}),
    ("mfu", "tokens_per_second", {"peak": 1, "context": 8})])
def test_what_is_no_amount_is_refused(what, name, more, wrong):
    of = getattr(transformer.published("gpt2"), what)
    with pytest.raises(ValueError, match=f"^{name} is .*0 or more"):
        of(**more, **{name: wrong})
    assert of(**more, **{name: 2}) > 0


def test_a_peak_of_nothing_is_refused():
    with pytest.raises(ValueError, match="peak is 0"):
        transformer.published("gpt2").mfu(1, 0, 8)
