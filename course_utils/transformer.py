"""What a decoder costs, in closed form: parameters, FLOPs, bytes. Floor 1.

One layer is attention (four products with weights, and two without: QK^T and
AV) and an MLP (two products, three if gated). A FLOP count here is that of
the products alone, 2 a multiply-add; ``flops.count`` gives the rest. Causal
is half of dense, as in a kernel that skips what the mask hides (exactly, T
tokens have T(T + 1)/2 pairs). ``models.toml`` has published models.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from importlib import resources
from numbers import Real
from typing import Any, NamedTuple

from course_utils._whole import whole


class Published(NamedTuple):
    """A number as printed, "70.6e9" with three digits: of what method of
    Config, and what it is ``given``; ``grade`` as in ``models.toml``."""

    what: str
    printed: str
    source: str
    grade: str
    given: dict[str, Any] = {}

    def computed(self, config: Config) -> float:
        return getattr(config, self.what)(**self.given)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The shape of a decoder. Where kv_heads is left out, ``key_heads`` is
    heads; where head_dim is, ``head_size`` is d_model / heads.

    ``published`` are printed numbers to compare with, ``note`` what is odd
    about them: of a model of the table, as its name, not of one made from it.
    """

    layers: int
    d_model: int
    heads: int
    d_ff: int
    vocab: int
    kv_heads: int | None = None
    head_dim: int | None = None
    gated: bool = True         # an MLP has three matrices, not two
    tied: bool = False         # the unembedding is the embedding's matrix
    experts: int = 0           # MLPs a layer; 0 is one for all tokens
    active_experts: int = 0    # of these, seen by a token
    shared_experts: int = 0    # more of them, seen by each token
    d_expert: int | None = None  # width of an expert; left out: d_ff
    dense_layers: int = 0      # the first ones, with one MLP for all
    latent: int = 0            # MLA: keys and values are made from so many,
    rope: int = 0              # these are cached besides, one head for all,
    q_latent: int = 0          # and queries are made from so many
    window: int | None = None  # the tokens that a layer sees, at most
    full_layers: int = 0       # see all of them all the same
    norms: int = 2             # a layer; one more stands at the end
    qk_norm: bool = False      # two norms more a layer, of head_dim
    biases: bool = False       # in norms and products, not in scores
    positions: int = 0         # rows of a learned table
    extra: int = 0             # parameters, in all, that none of these is
    name: str = field(default="", init=False, compare=False)
    note: str = field(default="", init=False, compare=False, repr=False)
    published: tuple[Published, ...] = field(
        default=(), init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type == "bool" and not isinstance(value, bool):
                raise ValueError(f"{f.name} is {value!r}: give True or False.")
            if f.type == "int" or value is not None and "int" in f.type:
                least = 0 if isinstance(f.default, int) else 1
                object.__setattr__(self, f.name, whole(f.name, value, least))
        if self.heads % self.key_heads:
            raise ValueError(f"kv_heads is {self.kv_heads}: give a divisor of"
                             f" heads, {self.heads}.")
        if not self.head_dim and self.d_model % self.heads:
            raise ValueError(f"d_model is {self.d_model}: give a multiple of "
                             f"heads, {self.heads}, or head_dim.")
        if bool(self.experts) != bool(self.active_experts) or (
                self.active_experts > self.experts):
            raise ValueError(f"active_experts is {self.active_experts} of "
                             f"{self.experts}: give 1 to experts, or neither.")
        for part, of in (("shared_experts", "experts"), ("rope", "latent"),
                         ("d_expert", "experts"), ("q_latent", "latent"),
                         ("dense_layers", "experts"),
                         ("full_layers", "window")):
            if (n := getattr(self, part)) and not getattr(self, of) or (
                    "layers" in part and n > self.layers):
                raise ValueError(f"{part} is {n}: give {of} with it, and no "
                                 f"more layers than {self.layers}.")

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.d_model // self.heads

    # --- parameters ---------------------------------------------------------
    def _mlps(self, active: bool = True) -> tuple[tuple[int, int], ...]:
        """How many MLPs all layers have, or a token sees, and how wide."""
        sparse = self.layers - self.dense_layers if self.experts else 0
        seen = self.active_experts if active else self.experts
        return ((self.layers - sparse, self.d_ff), (
            sparse * (seen + self.shared_experts), self.d_expert or self.d_ff))

    def weights(self, active: bool = True) -> dict[str, int]:
        """Parameters that multiply a token, by part of the model, the
        layers together. ``active``: of experts those that a token sees."""
        d, width = self.d_model, self.heads * self.head_size
        attention = 2 * d * (width + self.key_heads * self.head_size)
        if self.latent:
            attention = d * (self.q_latent + self.latent + self.rope + width)
            attention += 2 * self.latent * width
            attention += (self.q_latent or d) * (
                width + self.heads * self.rope)
        mlp = sum(n * (2 + self.gated) * f for n, f in self._mlps(active))
        mlp += self.experts * (self.layers - self.dense_layers)  # routers
        return {"Q, K, V, O": self.layers * attention, "MLP": mlp * d,
                "unembedding": self.vocab * d}

    def params(self, active: bool = False) -> int:
        """All parameters, each once; with ``active`` those that one token
        uses, both embeddings included."""
        d, size = self.d_model, self.head_size
        layer = self.norms * d * (1 + self.biases) + self.qk_norm * 2 * size
        layer += self.latent + self.q_latent  # each has a norm
        others = self.extra
        if self.biases:
            layer += d + (self.heads + 2 * self.key_heads) * size
            others += sum(n * (d + (1 + self.gated) * f)
                          for n, f in self._mlps(active))
        table = self.vocab * (not self.tied) + self.positions
        others += self.layers * layer + d * (1 + self.biases + table)
        return sum(self.weights(active).values()) + others

    def active_params(self) -> int:
        return self.params(active=True)

    # --- FLOPs --------------------------------------------------------------
    def attention_flops(self, context: float, causal: bool = False) -> float:
        """FLOPs of QK^T and AV, all layers, for one token of a sequence of
        ``context`` tokens, forward; causal is the mean over the sequence."""
        _check(context=context)
        near, full = min(context, self.window or math.inf), self.full_layers
        pairs = full * context * (1 - causal / 2) + (self.layers - full) * (
            near * (1 - causal * near / 2 / (context or 1)))
        return self.heads * (4 * self.head_size + 2 * self.rope) * pairs

    def weight_flops(self) -> int:
        """FLOPs of the layers' products with weights, a token, forward."""
        return 2 * (sum(self.weights().values()) - self.vocab * self.d_model)

    def flops_per_token(self, context: float, causal: bool = False,
                        training: bool = False, again: bool = False) -> float:
        """FLOPs of all products for one token, forward; with ``training``
        three times as many, and the layers' ``again`` if recomputed."""
        layers = self.weight_flops() + self.attention_flops(context, causal)
        forward = layers + 2 * self.weights()["unembedding"]
        return 3 * forward + again * layers if training else forward

    def train_flops(self, tokens: float) -> float:
        """The rule of thumb: 6 x active parameters x tokens."""
        _check(tokens=tokens)
        return 6 * self.active_params() * tokens

    def attention_crossover(self, causal: bool = False) -> float:
        """Tokens in a sequence at which QK^T and AV take as many FLOPs as
        the layers' products with weights; infinity if a window forbids it."""
        goal = self.weight_flops()
        tokens = goal / self.attention_flops(1, causal)
        while abs(goal - (now := self.attention_flops(tokens, causal))) > (
                1e-12 * goal):  # only with a window: Newton's method
            if not (slope := self.attention_flops(tokens + 1, causal) - now):
                return math.inf
            tokens += (goal - now) / slope
        return tokens

    def mfu(self, tokens_per_second: float, peak: float, context: float,
            causal: bool = False) -> float:
        """The share of ``peak`` (FLOP/s, all chips) that training uses."""
        _check(tokens_per_second=tokens_per_second, peak=peak)
        if not peak:
            raise ValueError("peak is 0: give the FLOP/s of all chips.")
        return tokens_per_second / peak * self.flops_per_token(
            context, causal, training=True)

    # --- bytes --------------------------------------------------------------
    def kv_cache_bytes(self, tokens: int = 1, batch: int = 1,
                       bytes_per_value: float = 2) -> float:
        """Bytes of the keys and values of all layers (MLA: of what they are
        made from); a layer with a window keeps no more tokens than that."""
        _check(tokens=tokens, batch=batch, bytes_per_value=bytes_per_value)
        near, full = min(tokens, self.window or math.inf), self.full_layers
        values = self.latent + self.rope if self.latent else (
            2 * self.key_heads * self.head_size)
        tokens = full * tokens + (self.layers - full) * near
        return tokens * values * batch * bytes_per_value

    def optimizer_bytes(self, bytes_per_param: int = 2 + 2 + 4 + 8) -> int:
        """Bytes that training with Adam holds: 16-bit weight and gradient, a
        32-bit copy of the weight, and two 32-bit moments."""
        _check(bytes_per_param=bytes_per_param)
        return self.params() * bytes_per_param

    def activation_bytes(self, context: int, batch: int = 1,
                         scores: bool = True) -> float:
        """Bytes that the layers keep for the backward pass, 16 bits a value:
        inputs of norms, products and gates, and ``scores`` after softmax."""
        _check(context=context, batch=batch)
        layer = (self.norms + 1) * self.d_model
        layer += 2 * (self.latent + self.q_latent)  # before its norm, after
        layer += (self.heads + self.key_heads) * self.head_size * (
            2 + self.qk_norm)
        layer += self.heads * (2 * self.rope + scores * context)
        mlps = sum(n * (self.d_model + (4 if self.gated else 2) * f)
                   for n, f in self._mlps())
        return 2 * context * batch * (self.layers * layer + mlps)

    def __str__(self) -> str:
        return (f"{self.name or 'decoder'}: {self.params():,} parameters in "
                f"{self.layers} layers, d_model {self.d_model}, "
                f"{self.heads} heads ({self.key_heads} of keys and values) of "
                f"{self.head_size}, d_ff {self.d_ff}, vocabulary {self.vocab}")


def _check(**named: float) -> None:
    """ValueError of the first that is no number from 0 on (NaN is none)."""
    for name, value in named.items():
        if not isinstance(value, Real) or not value >= 0:
            raise ValueError(f"{name} is {value!r}: give a number, 0 or more.")


def published(name: str) -> Config:
    """The published model ``name``, as "llama-3-70b"; see ``names()``."""
    if name not in (known := _models()):
        near = get_close_matches(str(name), known, 3, 0.4)
        raise ValueError(f"name {name!r} is no model of the table; nearest: "
                         f"{', '.join(near)}. All: {', '.join(known)}.")
    return known[name]


def names() -> list[str]:
    return list(_models())


@cache
def _models() -> dict[str, Config]:
    file = resources.files("course_utils") / "models.toml"
    entries = tomllib.loads(file.read_text(encoding="utf-8"))["models"]
    for name, entry in entries.items():
        config = entries[name] = Config(**entry["shape"])
        vars(config).update(  # frozen, and none of the three is an argument
            name=name, note=entry.get("note", ""), published=tuple(
                Published(*row) for row in entry["published"]))
    return entries
