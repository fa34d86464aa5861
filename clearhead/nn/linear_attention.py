"""Linear attention: sums over keys in the place of a comparison with each of them.

    kernel    φ(x)                 weights
    Elu       elu(x) + 1           positive, divided by their sum
    Favor     exp(ω·x − |x|²/2)    estimates of softmax attention (Performer)
    Dot       x                    of either sign, not divided

A kernel is a part with its own config, like a norm: `LinearAttention` does not know which one it has. Decoding keeps Σ
φ(k)[v 1], W × (U + 1) numbers per head, whatever the length.

The 1 beside v is the denominator: Σ φ(k)·1 is one more column of the same sum, so numerator and denominator come from
one product and cannot get out of step.

The Performer's features are kept as logarithms. exp(ω·x − |x|²/2) of a long x leaves the range of floats, and a sum
over a text would then be 0/0. So its sums are stored with the exponent of their largest term (`FavorSums`), and each
product subtracts it again, as the softmax does with its maximum.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from clearhead.configs import Config, DotConfig, EluConfig, FavorConfig, LinearAttentionConfig, Mask
from clearhead.configs.masks import check_causal
from clearhead.functional.linear_attention import (
    EMPTY,
    FavorSums,
    elu_features,
    favor_exponents,
    favor_over_all_keys,
    favor_over_keys_so_far,
    log_products,
    no_favor_sums,
    over_all_keys,
    over_keys_so_far,
)
from clearhead.functional.softmax import softmax, widen
from clearhead.precision.matrix import Linear
from clearhead.reference.linear_attention import random_directions

from .attention import merge_heads, split_heads
from .attention_view import AttentionView, Rows
from .build import build_part, builds
from .cache import StateAllocator
from .context import Context
from .packing import DenseRows, dense_rows, document_rows

C = TypeVar("C", bound=Config)

Heads = Float[Tensor, "B H T U"]
Features = Float[Tensor, "B H T W"]


@dataclass
class LinearAttentionState:
    """Σ_j φ(k_j)·[v_j 1] over all keys so far. Constant size, however long the text.

    The Performer's sums are stored relative to exp(top), each feature's largest, so that they cannot overflow.
    """

    can_rewind: ClassVar[bool] = False

    sums: Float[Tensor, "B H W U1"]
    top: Float[Tensor, "B H W"] | None = None

    def select(self, rows: Int[Tensor, "B"]) -> None:
        self.sums, self.top = self.sums[rows], None if self.top is None else self.top[rows]


class Kernel(nn.Module):
    """A feature map φ, and how a layer reads its keys through it. This one divides the weights by their sum.

    `forward` computes the features. `mix` reads all keys at once, `mix_causal` those so far, and `weights` writes every
    pair out, for maps and for the comparison with NumPy. All three give the same numbers up to rounding.
    """

    shares = True

    def mix(self, q: Features, k: Features, v: Heads, rows: DenseRows) -> Heads:
        """Every query reads all real keys of its row."""
        k = k if rows.real is None else k * rows.real[:, None, :, None]
        return over_all_keys(q, k, v, self.shares)

    def mix_causal(
        self, q: Features, k: Features, v: Heads, rows: DenseRows, state: LinearAttentionState | None
    ) -> Heads:
        """Every query reads the real keys up to its own; the state holds the sums over those before."""
        k = k if rows.real is None else k * rows.real[:, None, :, None]
        start = None if state is None else state.sums.to(q)
        mixed, sums = over_keys_so_far(q, k, v, rows.document, start, self.shares)
        if state is not None:
            state.sums = sums.detach()
        return mixed

    def weights(
        self, q: Features, k: Float[Tensor, "B H S W"], allowed: Bool[Tensor, "#B 1 #T #S"] | None
    ) -> Float[Tensor, "B H T S"]:
        """The weight of every pair, written out."""
        products = q @ k.mT
        products = products if allowed is None else products * allowed
        if not self.shares:
            return products
        total = products.sum(-1, keepdim=True)
        return products / torch.where(total == 0, 1, total)

    def rows(self, context: Context, batch: int, mask: Mask) -> DenseRows:
        """Causally, documents may follow each other in a row; a sum over all keys needs a row for each."""
        return dense_rows(context, batch) if mask.causal or context.documents is None else document_rows(context, batch)

    def init_state(self, allocator: StateAllocator, heads: int, features: int, width: int) -> LinearAttentionState:
        return LinearAttentionState(widen(allocator.zeros(heads, features, width)))


@builds(EluConfig)
class Elu(Kernel):
    """φ(x) = elu(x) + 1: positive everywhere, so a denominator is never 0 (Katharopoulos et al. 2020)."""

    def __init__(self, config: EluConfig, width: int) -> None:
        super().__init__()

    def forward(self, x: Float[Tensor, "B H T K"]) -> Float[Tensor, "B H T K"]:
        return elu_features(x.contiguous())


@builds(DotConfig)
class Dot(Kernel):
    """φ(x) = x: weights of either sign, which are not divided by their sum.

    A sum of either sign can be near 0, and dividing by it would blow up. A norm after the layer sets the size instead.
    """

    shares = False

    def __init__(self, config: DotConfig, width: int) -> None:
        super().__init__()

    def forward(self, x: Float[Tensor, "B H T K"]) -> Float[Tensor, "B H T K"]:
        return x


@builds(FavorConfig)
class Favor(Kernel):
    """Positive random features (Performer), as exponents, so that long vectors neither overflow nor underflow.

    The directions follow from the config's seed, so they are not weights.
    """

    def __init__(self, config: FavorConfig, width: int) -> None:
        super().__init__()
        self.directions = torch.from_numpy(random_directions(config.features, width, config.seed))

    def draw(self, seed: int) -> None:
        """Replace the directions by those of another seed.

        Redrawing in training keeps the model from fitting itself to the errors of one set of random features.
        """
        features, width = self.directions.shape
        self.directions = torch.from_numpy(random_directions(features, width, seed))

    def forward(self, x: Float[Tensor, "B H T K"]) -> Float[Tensor, "B H T W"]:
        return favor_exponents(x, self.directions.to(x))

    def mix(self, q: Features, k: Features, v: Heads, rows: DenseRows) -> Heads:
        return favor_over_all_keys(q, self.real_keys(k, rows), v)

    def mix_causal(
        self, q: Features, k: Features, v: Heads, rows: DenseRows, state: LinearAttentionState | None
    ) -> Heads:
        """The same with sums that carry their own scale: FavorSums(sums, top) means sums · exp(top)."""
        start = no_favor_sums(q, v)
        if state is not None:
            assert state.top is not None
            start = FavorSums(state.sums.to(q), state.top.to(q))
        mixed, sums = favor_over_keys_so_far(q, self.real_keys(k, rows), v, start)
        if state is not None:
            state.sums, state.top = sums.sums.detach(), sums.top.detach()
        return mixed

    def weights(
        self, q: Features, k: Float[Tensor, "B H S W"], allowed: Bool[Tensor, "#B 1 #T #S"] | None
    ) -> Float[Tensor, "B H T S"]:
        """softmax over log Σ_w φ_w(q)φ_w(k): the shares never leave the range of floats."""
        logs = log_products(q, k)
        return softmax(logs if allowed is None else torch.where(allowed, logs, -torch.inf))

    def rows(self, context: Context, batch: int, mask: Mask) -> DenseRows:
        """A row for each document: a stabiliser must not see another document's keys."""
        return dense_rows(context, batch) if context.documents is None else document_rows(context, batch)

    def init_state(self, allocator: StateAllocator, heads: int, features: int, width: int) -> LinearAttentionState:
        """Sums of 0, with exponents so small that the first key replaces them."""
        sums, top = allocator.zeros(heads, features, width), allocator.zeros(heads, features)
        return LinearAttentionState(widen(sums), widen(top).fill_(EMPTY))

    @staticmethod
    def real_keys(k: Features, rows: DenseRows) -> Features:
        """The keys, padding with exponents so small that nothing reads it."""
        return k if rows.real is None else torch.where(rows.real[:, None, :, None], k, EMPTY)


@builds(LinearAttentionConfig)
class LinearAttention(nn.Module):
    """x -> q, k, v by one matrix -> heads -> features -> Σ_j φ(q)·φ(k_j)·v_j / Σ_j φ(q)·φ(k_j) -> out.

    all keys   φ(q)·(Σφ(k)[v 1]): two products, in any order of keys
    causal     chunk by chunk: each is compared with itself, and with everything before it through the sums. Decoding
               continues from the sums over all earlier tokens.
    """

    def __init__(self, config: LinearAttentionConfig, dim: int) -> None:
        super().__init__()
        key, value = config.widths(dim)
        self.widths, self.mask = (key, value), config.mask
        self.heads, self.features = config.heads, config.kernel.count(key)
        self.rows = (config.heads * key, config.heads * key, config.heads * value)  # of queries, keys and values
        self.fused = {"qkv": self.rows}
        self.qkv = Linear(dim, sum(self.rows), bias=config.qkv_bias)
        self.kernel: Kernel = build_part(config.kernel, key)
        self.out = Linear(config.heads * value, dim, bias=config.out_bias)

    def forward(
        self, x: Float[Tensor, "B T D"], context: Context, state: LinearAttentionState | None = None
    ) -> Float[Tensor, "B T D"]:
        """Features and sums in float32 or wider, whatever the dtype of x: a sum over 100,000 keys needs the digits."""
        key, value = self.widths
        qkv = context.tap("qkv", self.qkv(x)).split(self.rows, dim=-1)
        q = context.tap("query", split_heads(qkv[0], key))
        k = context.tap("key", split_heads(qkv[1], key))
        v = context.tap("value", split_heads(qkv[2], value))
        with torch.autocast(x.device.type, enabled=False):  # sums over a whole text need float32
            q = context.tap("query_features", self.kernel(widen(q)))
            k = context.tap("key_features", self.kernel(widen(k)))
            mixed = context.tap("mixed", self.mix(q, k, widen(v), context, state).to(x.dtype))
        return context.tap("out", self.out(context.tap("concat", merge_heads(mixed))))

    def mix(self, q: Features, k: Features, v: Heads, context: Context, state: LinearAttentionState | None) -> Heads:
        """The mixed values, B H T U: from weights if they must be seen, otherwise from sums.

        Rows are packed first: padding is dropped, and documents are kept apart.
        """
        if state is None:  # without a state all keys are here, and all weights can be written out
            view = LinearAttentionView(q, k, self.mask, context, self.kernel)
            for callback in context.viewers():
                callback(view)
            if not context.fused or context.replaces("weights"):
                return context.tap("weights", view.weights()) @ v
            if context.reads("weights"):
                context.tap("weights", view.weights())
        rows = self.kernel.rows(context, len(q), self.mask)
        q, k, v = rows.gather(q, 2), rows.gather(k, 2), rows.gather(v, 2)
        if self.mask.causal:
            return rows.scatter(self.kernel.mix_causal(q, k, v, rows, state), 2)
        return rows.scatter(self.kernel.mix(q, k, v, rows), 2)

    def init_state(self, allocator: StateAllocator) -> LinearAttentionState:
        """Sums over no keys. The last column is Σ φ(k), the denominator."""
        check_causal(self.mask)
        return self.kernel.init_state(allocator, self.heads, self.features, self.widths[1] + 1)


@dataclass(frozen=True)
class LinearAttentionView(AttentionView):
    """The features of one layer. Its weights are computed only on request: the forward pass never needs them."""

    kernel: Kernel

    @property
    def shares(self) -> bool:
        """Whether each row of weights sums to 1."""
        return self.kernel.shares

    def weights(
        self, heads: slice = slice(None), rows: Rows = slice(None), keys: int | None = None
    ) -> Float[Tensor, "B Heads Rows Keys"]:
        """φ(q)·φ(k) of the keys that may be read, as shares of their sum or as it is; padding reads nothing."""
        allowed = self.attention_mask(rows)
        if self.context.readable is not None:
            allowed = self.context.readable[:, None, rows, None] & (True if allowed is None else allowed)
        some = None if allowed is None else allowed[..., :keys]
        return self.kernel.weights(self.q[:, heads, rows], self.k[:, heads, :keys], some)

    def select_heads(self, heads: list[int]) -> LinearAttentionView:
        return replace(self, q=self.q[:, heads], k=self.k[:, heads])


def redraw(model: nn.Module, seed: int) -> None:
    """Draw new directions for every `Favor`, and write the seed into the config, so that it is saved."""
    for module in model.modules():
        if isinstance(module, Favor):
            module.draw(seed)
        config = getattr(module, "config", None)
        if isinstance(config, Config):
            module.config = with_seed(config, seed)  # type: ignore[assignment]


def with_seed(config: C, seed: int) -> C:
    """The same config tree with another seed in every `Favor`."""

    def reseed(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(map(reseed, value))
        return with_seed(value, seed) if isinstance(value, Config) else value

    if isinstance(config, FavorConfig):
        return replace(config, seed=seed)
    return replace(config, **{f.name: reseed(getattr(config, f.name)) for f in fields(config)})
