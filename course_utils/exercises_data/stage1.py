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
    why="2 x 2 x 4 x 8 x 1024 x 1024 x 64. The batching letters b and k, and "
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
            "g is in one operand only, and still counts.")),
)
def grouped_query_flops() -> int:
    """How many FLOPs is einsum("bkgth,bksh->bkgts") with b = 2, k = 4,
    g = 8, t = s = 1024, h = 64?"""
    import jax
    import jax.numpy as jnp

    from course_utils import flops

    q, k = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (
        (2, 4, 8, 1024, 64), (2, 4, 1024, 64)))
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
           (lambda right: 2 * right, "That is with a kernel that skips what "
            "a causal mask hides. The question is without."),
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
