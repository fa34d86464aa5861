"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): the cache holds a low-rank latent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from .base import Scope, Shape, Step, under
from .masks import Causal, Mask
from .mixer import MixerConfig
from .norm import NormConfig, RMSNormConfig
from .rotary import RotaryConfig


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig(MixerConfig):
    """Keys and values are computed from one latent per position; all heads share one rotary key.

    c = norm(W_down·x)      k_h = [W_key,h·c ; rot(W_rope·x)]      v_h = W_value,h·c      q_h = [q_plain ; rot(q_rope)]

    >>> config = LatentAttentionConfig(heads=2, latent_dim=4, plain_dim=4, rope_dim=2, value_dim=4)
    >>> list(config.weights(8))
    ['query.weight', 'down.weight', 'latent_norm.weight', 'up.weight', 'out.weight']
    """

    traceable: ClassVar[bool] = True

    heads: int
    latent_dim: int  # L, numbers kept per position
    plain_dim: int  # K − N: the part of a key without position
    rope_dim: int  # N: the part that is rotated
    value_dim: int  # U
    query_latent_dim: int | None = None  # None: the query is projected directly (V2-Lite)
    mask: Mask = Causal()
    rotary: RotaryConfig = RotaryConfig(layout="interleaved")
    norm: NormConfig = RMSNormConfig(eps=1e-6)  # of the latents
    bias: bool = False  # of the down and out projections
    dropout: float = 0.0
    magnitude: float = 1.0  # YaRN's m: the score scale is m²/√K

    def check(self) -> None:
        self.require_positive(
            "heads", "latent_dim", "plain_dim", "rope_dim", "value_dim", "query_latent_dim", "magnitude"
        )
        self.require_share("dropout")
        self.rotary.width(self.rope_dim)

    @property
    def scale(self) -> float:
        return self.magnitude**2 * (self.plain_dim + self.rope_dim) ** -0.5

    def resolve(self, dim: int = 0) -> LatentAttentionConfig:
        return replace(self, mask=self.mask.resolve(), rotary=self.rotary.resolve(self.rope_dim))

    def own_scope(self, scope: Scope) -> Scope:
        return scope.with_sizes(
            "attention",
            H=self.heads,
            K=self.plain_dim + self.rope_dim,
            U=self.value_dim,
            L=self.latent_dim,
            M=self.plain_dim,
            N=self.rope_dim,
            Q=self.query_latent_dim or scope["D"],
        )

    def steps(self, scope: Scope) -> Iterator[Step]:
        s = self.own_scope(scope)
        if s["T"] < s["S"] and self.ring is not None:  # decoding reads what the ring holds
            s = s.with_sizes(S=min(s["S"], max(self.ring, s["T"])))
        tokens, heads = s["B"] * s["T"], s["H"]

        def projection(name: str, formula: str, letters: str, rows: int, columns: int, bias: bool, count: int) -> Step:
            weights: dict[str, Shape] = {f"{name}.weight": (rows, columns)} | (
                {f"{name}.bias": (rows,)} if bias else {}
            )
            return s.step(name, formula, letters, weights=weights, flops=2 * count * rows * columns, order="n·d²")

        if self.query_latent_dim is not None:
            yield projection("query_down", "X·W_DQ", "B T Q", s["Q"], s["D"], self.bias, tokens)
            yield from under("query_norm", self.norm.steps(s, "B T Q"))
        yield projection("query", "X·W_Q", "B T H·K", heads * s["K"], s["Q"], False, tokens)
        yield projection("down", "X·[W_DKV W_KR]", "B T L+N", s["L"] + s["N"], s["D"], self.bias, tokens)
        yield from under("latent_norm", self.norm.steps(s, "B T L"))
        yield s.step("query_rotated", "rotary part turned by position", "B H T K")
        yield s.step("rope_key", "turned by position, shared by all heads", "B 1 T N")
        pairs = 2 * s["B"] * heads * s["T"] * s["S"]
        up = heads * (self.plain_dim + s["U"])
        keys = s["B"] * s["S"]
        if s["T"] == s["S"]:
            yield projection("up", "latent -> keys, values", "B S H·M+H·U", up, s["L"], False, keys)
            yield s.step("scores", "m²·QKᵀ/√K", "B H T S", flops=pairs * s["K"], order="n²·d", kept=0)
            yield s.step("weights", f"softmax where {self.mask.kind()} allows", "B H T S", kept=0)
            yield s.step("mixed", "weights·V", "B H T U", flops=pairs * s["U"], order="n²·d")
        else:  # decoding: W_up is absorbed into the query and the output, and the heads read the latent itself
            joint = pairs * (s["L"] + s["N"])
            yield projection("up", "query -> latent, mixed latent -> values", "B T H·L", up, s["L"], False, tokens)
            yield s.step("scores", "m²·Q·latentᵀ/√K", "B H T S", flops=joint, order="n²·d", kept=0)
            yield s.step("weights", f"softmax where {self.mask.kind()} allows", "B H T S", kept=0)
            yield s.step("mixed", "weights·latent", "B H T L", flops=joint, order="n²·d")
        yield s.step("concat", "heads side by side", "B T H·U", kept=0)
        yield projection("out", "concat·W_O", "B T D", s["D"], heads * s["U"], self.bias, tokens)

    def state(self, scope: Scope) -> dict[str, Shape]:
        """The latent and the rotary key of up to S positions, for all heads together."""
        s = self.own_scope(scope)
        s = s.with_sizes(S=min(s["S"], self.ring or s["S"]))
        return {"latent": s.shape("B S L"), "rope_key": s.shape("B S N")}

    @property
    def ring(self) -> int | None:
        """The size of the ring that suffices for decoding; None if the mask reads arbitrarily far back."""
        return self.mask.reach if self.mask.causal else None
