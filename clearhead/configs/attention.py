"""Multi-head, grouped-query and multi-query attention: one config, which differ in `kv_heads` only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from .base import ConfigError, Part, Scope, Shape, Step, under
from .masks import Full, Mask
from .mixer import MixerConfig
from .norm import HeadwiseNormConfig, NormConfig, ProjectionNormConfig
from .positions import AlibiConfig
from .rotary import DualChunkConfig, QueryScaleConfig, RotaryConfig
from .tiles import pairs


@dataclass(frozen=True, kw_only=True)
class SinksConfig(Part):
    """A learned score for each head that takes part in the softmax and reads nothing: weights sum to less than 1.

    Agarwal et al. 2025 (gpt-oss); Xiao et al. 2023 on why models look for such a place.

    >>> AttentionConfig(heads=4, sinks=SinksConfig()).weights(8)
    {'qkv.weight': (24, 8), 'sinks.weight': (4,), 'out.weight': (8, 8)}
    """

    def steps(self, scope: Scope) -> Iterator[Step]:
        yield scope.step("", "a score for reading nothing", "H", weights={"weight": scope.shape("H")}, kept=0)


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(MixerConfig):
    """softmax(QKᵀ/√K + bias)·V in each of H heads  (Vaswani et al. 2017, 3.2; grouped: Ainslie et al. 2023).

    >>> AttentionConfig(heads=4, kv_heads=2, mask=Causal(), rotary=RotaryConfig()).weights(8)
    {'qkv.weight': (16, 8), 'out.weight': (8, 8)}
    """

    traceable: ClassVar[bool] = True

    heads: int
    kv_heads: int | None = None  # None: as many as heads (MHA); 1: MQA; in between: GQA
    head_dim: int | None = None  # None: dim // heads
    value_dim: int | None = None  # None: head_dim
    mask: Mask = Full()
    rotary: RotaryConfig | DualChunkConfig | QueryScaleConfig | None = None
    score_bias: AlibiConfig | None = None
    qk_norm: NormConfig | ProjectionNormConfig | HeadwiseNormConfig | None = None  # before turning
    scale: float | None = None  # of the scores; None: 1/√K
    softcap: float | None = None  # scores become softcap·tanh(scores/softcap) (Gemma 2)
    sinks: SinksConfig | None = None
    qkv_clip: float | None = None  # queries, keys and values are cut to ±qkv_clip (OLMo)
    qkv_bias: bool = False  # two facts, because Qwen2 has one without the other
    out_bias: bool = False
    dropout: float = 0.0  # on the weights

    def check(self) -> None:
        self.require_positive("heads", "kv_heads", "head_dim", "value_dim", "scale", "softcap", "qkv_clip")
        if self.heads % self.groups:
            raise ConfigError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        self.require_share("dropout")
        if isinstance(self.rotary, DualChunkConfig) and not self.mask.causal:
            raise ConfigError(f"rotary is DualChunk, which reads earlier chunks only, but the mask is {self.mask}")
        if isinstance(self.rotary, DualChunkConfig) and (self.softcap is not None or self.sinks is not None):
            raise ConfigError("softcap and sinks are not supported together with DualChunk")
        if isinstance(self.qk_norm, HeadwiseNormConfig) and self.qk_norm.width != self.head_dim:
            raise ConfigError(f"qk_norm is for heads of width {self.qk_norm.width}, but head_dim is {self.head_dim}")
        if self.rotary is not None and self.head_dim is not None:
            self.rotary.width(self.head_dim)

    @property
    def score_formula(self) -> str:
        formula = "QKᵀ/√K" if self.scale is None else f"{self.scale:.3g}·QKᵀ"
        return formula if self.softcap is None else f"{self.softcap:g}·tanh({formula}/{self.softcap:g})"

    @property
    def groups(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    def widths(self, dim: int) -> tuple[int, int]:
        """K and U in a model of width `dim`."""
        key, value = head_widths(dim, self.heads, self.head_dim, self.value_dim)
        if self.rotary is not None:
            self.rotary.width(key)
        return key, value

    def resolve(self, dim: int = 0) -> AttentionConfig:
        key, value = self.widths(dim)
        return replace(
            self,
            kv_heads=self.groups,
            head_dim=key,
            value_dim=value,
            mask=self.mask.resolve(),
            rotary=None if self.rotary is None else self.rotary.resolve(key),
            scale=key**-0.5 if self.scale is None else self.scale,
        )

    def own_scope(self, scope: Scope) -> Scope:
        key, value = self.widths(scope["D"])
        return scope.with_sizes("attention", H=self.heads, G=self.groups, K=key, U=value)

    def steps(self, scope: Scope) -> Iterator[Step]:
        s = self.own_scope(scope)
        if s["T"] < s["S"] and self.ring is not None:  # decoding reads what the ring holds
            s = s.with_sizes(S=min(s["S"], max(self.ring, s["T"])))
        yield from self.crossing_steps(s) if "crossing" in s.sizes else self.projection_steps(s)
        if self.qk_norm is not None:
            yield from under("query_norm", self.qk_norm.steps(s, "B H T K"))
            yield from under("key_norm", self.qk_norm.steps(s, "B G S K"))
        if self.rotary is not None:
            of_query, of_key = self.rotary.formulas
            for name in self.rotary.queries(self.mask):
                yield s.step(name, of_query, "B H T K")
            yield s.step("key_rotated", of_key, "B G S K")
        bias = " + ALiBi" if self.score_bias is not None else ""
        itself = s["T"] == s["S"] and "crossing" not in s.sizes
        kinds = (self.mask,) if self.rotary is None else tuple(self.rotary.queries(self.mask).values())
        whole = s["T"] * s["S"]
        read = pairs(kinds, s["T"]) if itself else len(kinds) * whole  # what the mask empties is not computed
        order = "n²·d" if read >= whole else "n·w·d"
        products = 2 * s["B"] * s["H"]
        yield s.step(
            "scores", f"{self.score_formula}{bias}", "B H T S", flops=products * read * s["K"], order=order, kept=0
        )
        if self.sinks is not None:
            yield from under("sinks", self.sinks.steps(s))
        yield s.step("weights", f"softmax where {self.mask.kind()} allows", "B H T S", kept=0)
        yield s.step("mixed", "weights·V", "B H T U", flops=products * min(read, whole) * s["U"], order=order)
        yield s.step("concat", "heads side by side", "B T H·U", kept=0)
        (joined,) = s.shape("H·U")
        yield s.step(
            "out",
            "concat·W_O",
            "B T D",
            weights={"out.weight": (s["D"], joined)} | ({"out.bias": (s["D"],)} if self.out_bias else {}),
            flops=2 * s["B"] * s["T"] * s["D"] * joined,
            order="n·d²",
            kept=0,
        )

    def projection_steps(self, s: Scope) -> Iterator[Step]:
        """Self-attention: one matrix gives queries, keys and values of new tokens; older keys are cached."""
        (rows,) = s.shape("H·K+G·K+G·U")
        flops = 2 * s["B"] * s["T"] * s["D"] * rows
        yield s.step("qkv", "X·[W_Q W_K W_V]", "B T H·K+G·K+G·U", weights=self.qkv(s), flops=flops, order="n·d²")
        yield s.step("query", "split into heads", "B H T K", kept=0)
        yield s.step("key", "split into heads", "B G S K", kept=0)
        yield s.step("value", "split into heads", "B G S U", kept=0)

    def crossing_steps(self, s: Scope) -> Iterator[Step]:
        """Cross-attention: the query rows of the matrix read X, its key and value rows read the source."""

        def flops(tokens: int, rows: str) -> int:
            return 2 * s["B"] * tokens * s["D"] * s.shape(rows)[0]

        new = s["source_new"]
        yield s.step("query", "X·W_Q", "B H T K", weights=self.qkv(s), flops=flops(s["T"], "H·K"), order="n·d²")
        yield s.step("key", "source·W_K", "B G S K", flops=flops(new, "G·K"), order="n·d²")
        yield s.step("value", "source·W_V", "B G S U", flops=flops(new, "G·U"), order="n·d²")

    def qkv(self, s: Scope) -> dict[str, Shape]:
        (rows,) = s.shape("H·K+G·K+G·U")
        return {"qkv.weight": (rows, s["D"])} | ({"qkv.bias": (rows,)} if self.qkv_bias else {})

    def state(self, scope: Scope) -> dict[str, Shape]:
        """The KV cache for up to S positions; a causal window keeps only its own size (a ring)."""
        s = self.own_scope(scope)
        s = s.with_sizes(S=min(s["S"], self.ring or s["S"]))
        return {"key": s.shape("B G S K"), "value": s.shape("B G S U")}

    @property
    def ring(self) -> int | None:
        """The size of the ring that suffices for decoding; None if the mask reads arbitrarily far back."""
        return self.mask.reach if self.mask.causal else None


def head_widths(dim: int, heads: int, head_dim: int | None, value_dim: int | None) -> tuple[int, int]:
    """K and U. Defaults: K = dim/heads, U = K."""
    if head_dim is None and dim % heads:
        raise ConfigError(f"dim={dim} is not a multiple of heads={heads}; give head_dim")
    key = head_dim or dim // heads
    return key, value_dim or key
