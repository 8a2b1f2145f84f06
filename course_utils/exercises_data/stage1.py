"""The exercises of notebook 1: from model to operations."""

from __future__ import annotations

from course_utils.exercises_data.register import exercise


@exercise(
    "1.1",
    hints=("Count forward first: one product a layer.",
           "Each layer needs the gradient of its weights. Which layer must "
           "also hand a gradient to one before it?"),
    why="Two forward, two for dW1 and dW2, and one for the gradient that "
        "layer 2 hands to layer 1. Nothing stands before layer 1, so its dX "
        "is never made.",
    wrong=((lambda right: right + 1,
            "X is data: nobody asks for its gradient."),
           (lambda right: right - 1,
            "Layer 1 learns too: it needs the gradient of what it handed to "
            "layer 2, and that is a product."),
           (lambda right: right - 2, "That is the backward pass alone, or a "
            "single layer: count forward and backward, both layers."),
           (lambda right: right - 3, "That is the forward pass alone.")),
)
def products_in_a_step() -> int:
    """How many matrix products does one training step of two layers hold,
    relu(relu(X @ W1 + b1) @ W2 + b2), when X is data?"""
    import jax
    import jax.numpy as jnp

    from course_utils import flops

    def two(x, w1, b1, w2, b2):
        return jax.nn.relu(jax.nn.relu(x @ w1 + b1) @ w2 + b2)

    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (
        (512, 1024), (1024, 2048), (2048,), (2048, 1024), (1024,))]
    cost = flops.count(two, *args, wrt=(1, 2, 3, 4))
    return sum(op.matmul > 0 for op in cost.ops)


@exercise(
    "1.2",
    hints=("Write down the letters that occur, each once: b, k, g, t, s, h.",
           "Two times the product of their six sizes."),
    why="2 x 2 x 4 x 16 x 1024 x 1024 x 64. The batching letters b and k, and "
        "the contracted h, stand in both operands and count once.",
    wrong=((lambda right: right / 2,
            "Those are multiply-adds; each is two FLOPs."),
           (lambda right: right * 8,
            "b and k are in both operands, and count once."),
           (lambda right: right * 64,
            "h is in both operands, and counts once."),
           (lambda right: right / 64,
            "h is not in the result, but it is summed over: it counts."),
           (lambda right: right / 8,
            "That is one matrix for all of b and k: each of their eight "
            "pairs has its own, so they count, once."),
           (lambda right: right / 16,
            "g is in one operand only, and still counts.")),
)
def grouped_query_flops() -> int:
    """How many FLOPs is einsum("bkgth,bksh->bkgts") with b = 2, k = 4,
    g = 16, t = s = 1024, h = 64?"""
    import jax
    import jax.numpy as jnp

    from course_utils import flops

    q, k = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (
        (2, 4, 16, 1024, 64), (2, 4, 1024, 64)))
    return flops.count(lambda q, k: jnp.einsum(
        "bkgth,bksh->bkgts", q, k), q, k).matmul


@exercise(
    "1.3",
    rel_tol=0.01,  # the question's numbers have three digits
    hints=("6ND, and N is what a token meets: a weight that it does not meet "
           "takes part in no product.",
           'transformer.published("mixtral-8x7b") has the model: see its '
           "active_params()."),
    why="A token meets 12.9 of 46.7 billion parameters. What it does not "
        "meet costs memory, and no FLOPs.",
    wrong=((lambda right: right * 46_702_792_704 / 12_879_925_248,
            "That takes all the parameters. A token goes through two experts "
            "of eight."),
           (lambda right: right / 3,
            "That is the forward pass. Training is three times as much."),
           (lambda right: right / 1e12,
            "That is one token's; there are 10**12.")),
)
def mixtral_training_flops() -> float:
    """How many FLOPs does 6ND give for training Mixtral 8x7B on 10**12
    tokens? It has 46.7e9 parameters; each layer has eight MLPs (experts), a
    token uses two, and so meets 12.9e9 of them."""
    from course_utils import transformer

    return transformer.published("mixtral-8x7b").train_flops(1e12)


@exercise(
    "1.4",
    hints=("Per layer and token, in units of 2 D**2 FLOPs: Q and O are 1 "
           "each, K and V are 8/32 each, the MLP is 3 x 14336/4096.",
           "QK^T and AV are together 4 T D. Where is that as much?"),
    why="Four heads share keys and values, and the MLP is 3.5 D wide: the "
        "weights are 13 D**2 where those of the layer above are 16 D**2, so "
        "attention overtakes at 6.5 D.",
    wrong=((lambda right: 8 * 4096,
            "That is 8D, of a layer with 4D-wide gated MLP and as many key "
            "heads as query heads. This one differs in both."),
           (lambda right: 6 * 4096, "That is 6D, of an MLP of two matrices. "
            "This one has three."),
           (lambda right: 2 * right, "Twice too much: count both QK^T and "
            "AV, and give no causal discount."),
           (lambda right: 4 * right, "QK^T and AV are no cheaper with fewer "
            "heads of keys: each query still meets every key."),
           (lambda right: 6.375 * 4096, "That is Llama 3 70B, whose MLP is "
            "narrower beside its D."),
           (lambda right: (2.5 * 4096 + 2 * 14336) / 2, "A gated MLP has "
            "three matrices, not two."),
           (lambda right: right / 4096, "That is in units of D: multiply by "
            "4096."),
           (lambda right: 7.25 * 4096, "Keys and values have 8 heads, not 32: "
            "their products with weights are smaller.")),
)
def llama_crossover() -> float:
    """From how many tokens in a sequence do QK^T and AV of Llama-3-8B take
    as many FLOPs as its products with weights, with no causal discount?
    D = 4096, 32 heads, 8 of keys and values, a gated MLP of 14336."""
    from course_utils import transformer

    return transformer.published("llama-3-8b").attention_crossover()


@exercise(
    "1.5",
    hints=("The gradient of the last projection's weights needs what that "
           "projection read: the mix. The mix needs the scores.",
           "QK^T and AV, once more, forward. Each is 2 T**2 N H."),
    why="4 T**2 N H: QK^T and AV, forward, once more. The seven products with "
        "weights are kept, and softmax is no product. The book says 4BT**2NH, "
        "exactly this.",
    wrong=((lambda right: right / 2,
            "That is one of QK^T and AV. The last projection's gradient needs "
            "the mix too, so both are done again."),
           (lambda right: right * 3,
            "That is all of attention, forward and backward. The backward "
            "products are done once in any case; only forward is repeated."),
           (lambda right: right * 5,
            "That does the whole layer again. The results of the seven "
            "products with weights are kept."),
           (lambda right: right / 8192,
            "That is for one token; there are 8,192."),
           (lambda right: right / 32, "That is one head; there are 32.")),
)
def attention_done_again() -> float:
    """How many FLOPs of products does the backward pass of one decoder layer
    do again, for one sequence of T = 8192 tokens, D = 4096, N = 32 heads of H
    = 128, where only the results of the seven products with weights are
    kept?"""
    from course_utils import transformer

    layer = transformer.Config(layers=1, d_model=4096, heads=32, d_ff=16384,
                               vocab=32000)
    return layer.attention_flops(8192) * 8192


@exercise(
    "1.6",
    rel_tol=0.003,  # three digits
    hints=("For each layer: 4 D**2 for Q, K, V and O, and three matrices of "
           "D x 4D.",
           "64 layers of 16 D**2, and twice 32,000 x 4096. Norms are too few "
           "to see."),
    why="64 x 16 x 4096**2 are 17.18 billion, and the two tables 0.26. The "
        "book's 16 billion are 4e3 and 16e3 put in for 4096 and 16384: nine "
        "percent less.",
    wrong=((lambda right: 16e9,
            "That is the book's, which rounds 4096 to 4e3 and 16384 to 16e3 "
            "before it multiplies. Without that it is more."),
           (lambda right: right - 64 * 4096 * 16384,
            "That is with two matrices in the MLP. A gated one has three."),
           (lambda right: right - 32000 * 4096, "Embedding and unembedding "
            "are apart, so the vocabulary's table is there twice."),
           (lambda right: right - 2 * 32000 * 4096,
            "The embedding and the unembedding are parameters too."),
           (lambda right: right / 64, "That is one layer; there are 64."),
           (lambda right: right / 1e9, "In parameters, not in billions.")),
)
def parameters_of_the_book() -> int:
    """How many parameters has a decoder with D = 4096, gated MLPs of width
    4D, 32 heads of 128, 64 layers and a vocabulary of 32,000, embedding and
    unembedding apart?"""
    from course_utils import transformer

    return transformer.Config(layers=64, d_model=4096, heads=32, d_ff=16384,
                              vocab=32000).params()


@exercise(
    "1.7",
    rel_tol=0.0012,  # four digits, hours given with three
    hints=("6ND FLOPs, over the FLOPs that the chips could have done.",
           "Hours to seconds, times the peak: 1.520e25. 6ND is 3.286e24."),
    why="3.286e24 of 1.520e25 FLOPs. The book prints 21.7 %: it rounds both "
        "numbers first, to 3.3e24 and 1.52e25. In fp8, a fifth of the peak is "
        "not bad.",
    wrong=((lambda right: 0.217, "That is the book's, of 3.3e24 over 1.52e25: "
            "rounded before dividing."),
           (lambda right: right * 100, "As a fraction: divide by 100."),
           (lambda right: 6 * 671e9 * 14.8e12 / (2.79e6 * 3600 * 1.513e15),
            "That takes all 671 billion parameters. A token meets 37."),
           (lambda right: right / 3,
            "That is the forward pass. Training is three times as much."),
           (lambda right: right * 3600, "An hour has 3,600 seconds."),
           (lambda right: 1 / right, "The other way round.")),
)
def utilization_of_deepseek() -> float:
    """What is the MFU of DeepSeek-V3's training, as a fraction: 37e9 active
    parameters, 14.8e12 tokens, 2.79e6 hours of an H800 with an fp8 peak of
    1.513e15 FLOP/s?"""
    done = 6 * 37e9 * 14.8e12
    possible = 2.79e6 * 3600 * 1.513e15
    return done / possible


@exercise(
    "1.8",
    hints=("Bytes of one token's cache: 2 x 64 x 8 x 256, of one byte each.",
           "The weights lie in the same memory: take 18.4e9 from 16 x 16 GiB, "
           "and divide by one sequence's cache."),
    why="A token's cache has 262,144 bytes, a sequence's 33.6 GB. Beside the "
        "weights that fits seven times (7.6; the book counts 16 GB a chip, "
        "and has 7.08). With one head of keys it would be eight times less.",
    wrong=((lambda right: 8, "Seven and a bit: a part of a sequence does not "
            "fit. And the weights lie there too."),
           (lambda right: 3, "Two bytes a value? int8 has one."),
           (lambda right: 15, "That keeps keys or values. Both are needed."),
           (lambda right: 61, "That is one head of keys and values in each "
            "layer. There are 8."),
           (lambda right: 0, "One chip alone would not even hold the weights. "
            "The sixteen share them.")),
)
def sequences_that_fit() -> int:
    """How many sequences of 128,000 tokens fit on 16 TPU v5e (16 GiB each)
    beside the weights of a decoder of 18.4e9 parameters, 64 layers, 8 heads
    of keys and values of 256, all in int8?"""
    from course_utils import chips, transformer

    decoder = transformer.Config(layers=64, d_model=4096, heads=32, kv_heads=8,
                                 head_dim=256, d_ff=16384, vocab=32000)
    free = 16 * chips.get("tpu-v5e").hbm_bytes - 18.4e9
    return int(free // decoder.kv_cache_bytes(128_000, bytes_per_value=1))
