"""What a decoder costs, in closed form: parameters, FLOPs, cache. Floor 1.

One layer is attention (four products with weights, and two without: QK^T and
AV) and an MLP (two products, three if gated). A FLOP count here is that of
the products alone, 2 a multiply-add; ``flops.count`` gives the rest. A causal
count is half the dense one, as of a kernel that skips what the mask hides
(exactly, T tokens have T(T + 1)/2 pairs). ``models.toml`` has published
models, each number of theirs with its source.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from course_utils.host import need


class Published(NamedTuple):
    """A number as it was printed: "70.6e9" has three digits.

    ``what`` is a method of Config without arguments; ``grade`` as in
    ``models.toml``.
    """

    what: str
    printed: str
    source: str
    grade: str


@dataclass(frozen=True, kw_only=True)
class Config:
    """The shape of a decoder. Left out: kv_heads = heads, head_dim =
    d_model / heads.

    ``gated``: the MLP has three matrices, not two. ``tied``: the unembedding
    is the embedding's matrix. ``experts`` MLPs a layer of which a token sees
    ``active_experts``; 0 is one MLP for all. ``norms`` a layer, and one at
    the end; ``qk_norm``: two more a layer, of head_dim. ``biases``: on every
    product but the unembedding, and in the norms. ``positions``: rows of a
    learned table. ``published`` are printed numbers to compare with.
    """

    layers: int
    d_model: int
    heads: int
    d_ff: int
    vocab: int
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = True
    tied: bool = False
    experts: int = 0
    active_experts: int = 0
    norms: int = 2
    qk_norm: bool = False
    biases: bool = False
    positions: int = 0
    name: str = field(default="", compare=False)
    published: tuple[Published, ...] = field(
        default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        self._whole("layers", "d_model", "heads", "d_ff", "vocab")
        for key, value in (("kv_heads", self.heads),
                           ("head_dim", self.d_model // self.heads)):
            object.__setattr__(self, key, getattr(self, key) or value)
        self._whole("kv_heads", "head_dim")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads is {self.kv_heads}, and {self.heads} "
                             "heads do not share that many evenly: give a "
                             "divisor of heads.")
        if not 0 <= self.active_experts <= self.experts or (
                bool(self.experts) != bool(self.active_experts)):
            raise ValueError(f"active_experts is {self.active_experts} of "
                             f"{self.experts} experts; give 1 to experts, or "
                             "neither.")

    def _whole(self, *keys: str) -> None:
        for key in keys:
            if type(value := getattr(self, key)) is not int or value < 1:
                raise ValueError(f"{key} is {value!r}; give a whole number, "
                                 "1 or more.")

    # --- parameters ---------------------------------------------------------
    def weights(self, active: bool = True) -> dict[str, int]:
        """Parameters that multiply a token, by part of the model: the
        projections and MLP of all layers, and the unembedding. ``active``
        counts the experts that one token sees, else all of them."""
        projections = 2 * self.d_model * self.head_dim * (
            self.heads + self.kv_heads)
        mlp = (3 if self.gated else 2) * self.d_model * self.d_ff
        seen = self.active_experts if active else self.experts
        router = self.d_model * self.experts
        return {"Q, K, V, O": self.layers * projections,
                "MLP": self.layers * (mlp * max(seen, 1) + router),
                "unembedding": self.vocab * self.d_model}

    def params(self) -> int:
        """All parameters, each once."""
        return sum(self.weights(active=False).values()) + self._others()

    def active_params(self) -> int:
        """The parameters that one token uses, both embeddings included."""
        return sum(self.weights().values()) + self._others()

    def _others(self) -> int:
        """Embedding, norms, biases: looked up or added, never multiplied
        with a sum behind it."""
        norm = self.d_model * (1 + self.biases)
        layer = self.norms * norm + self.qk_norm * 2 * self.head_dim
        if self.biases:
            copies = max(self.experts, 1)
            layer += (self.heads + 2 * self.kv_heads) * self.head_dim
            layer += self.d_model + copies * (
                self.d_model + (1 + self.gated) * self.d_ff)
        table = self.vocab * (not self.tied) + self.positions
        return self.layers * layer + norm + table * self.d_model

    # --- FLOPs --------------------------------------------------------------
    def attention_flops(self, context: float, causal: bool = False) -> float:
        """FLOPs of QK^T and AV, all layers, for one token of a sequence of
        ``context`` tokens, forward."""
        pairs = context / 2 if causal else context
        return 4 * self.layers * self.heads * self.head_dim * pairs

    def weight_flops(self) -> int:
        """FLOPs of the products with weights in all layers, for one token,
        forward; the unembedding left out."""
        weights = self.weights()
        return 2 * (weights["Q, K, V, O"] + weights["MLP"])

    def flops_per_token(self, context: float, causal: bool = False,
                        training: bool = False) -> float:
        """FLOPs of all products for one token, forward; with ``training``
        forward and backward, three times as many."""
        forward = 2 * sum(self.weights().values()) + self.attention_flops(
            context, causal)
        return forward * (3 if training else 1)

    def train_flops(self, tokens: float) -> float:
        """The rule of thumb: 6 x active parameters x tokens."""
        return 6 * self.active_params() * tokens

    def attention_crossover(self, causal: bool = False) -> float:
        """Tokens in a sequence at which QK^T and AV take as many FLOPs as
        all products with weights in the layers (unembedding left out)."""
        return self.weight_flops() / self.attention_flops(1, causal)

    # --- memory -------------------------------------------------------------
    def kv_cache_bytes(self, tokens: int = 1, batch: int = 1,
                       bytes_per_value: float = 2) -> float:
        """Bytes of the keys and values of all layers, no window."""
        per_token = 2 * self.layers * self.kv_heads * self.head_dim
        return per_token * tokens * batch * bytes_per_value

    def table(self) -> Any:
        """A pandas DataFrame: each published number beside ours."""
        rows = [(p.what, getattr(self, p.what)(), *p[1:])
                for p in self.published]
        return need("pandas", "a table of numbers is a DataFrame").DataFrame(
            rows, columns=["what", "computed", "printed", "source", "grade"])

    def __str__(self) -> str:
        return (f"{self.name or 'decoder'}: {self.params():,} parameters in "
                f"{self.layers} layers, d_model {self.d_model}, "
                f"{self.heads} heads ({self.kv_heads} of keys and values) of "
                f"{self.head_dim}, d_ff {self.d_ff}, vocabulary {self.vocab}")


def published(name: str) -> Config:
    """The published model ``name``, as "llama-3-70b"; see ``names()``."""
    if name not in (known := _models()):
        near = get_close_matches(str(name), known, 3, 0.4)
        raise ValueError(
            f"name {name!r} is not a model of the table"
            + f"; nearest: {', '.join(near)}" * bool(near)
            + f". All: {', '.join(known)}")
    return known[name]


def names() -> list[str]:
    return list(_models())


@cache
def _models() -> dict[str, Config]:
    file = resources.files("course_utils") / "models.toml"
    entries = tomllib.loads(file.read_text(encoding="utf-8"))["models"]
    return {name: Config(name=name, **entry["shape"], published=tuple(
        Published(*row) for row in entry["published"]))
        for name, entry in entries.items()}
