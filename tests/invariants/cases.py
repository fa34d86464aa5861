"""The one list of architectures that every invariant is tried on. A new mixer is one line in `MIXERS`.

Every mixer meets every norm placement; each other part appears at least once. Sizes are small, and distinct, so that
two axes cannot be confused: a transposed axis is an error and not a coincidence.
"""

from __future__ import annotations

from dataclasses import replace

from clearhead.configs import (
    AlibiConfig,
    AttentionConfig,
    BlockConfig,
    Blockwise,
    BorrowedEmbeddingConfig,
    Causal,
    ClampedFeedForwardConfig,
    ClassHeadConfig,
    DisentangledAttentionConfig,
    DistanceVectorsConfig,
    DotConfig,
    DualChunkConfig,
    DynamicScaling,
    EluConfig,
    EncoderDecoderConfig,
    FactoredEmbeddingConfig,
    FavorConfig,
    FeedForwardConfig,
    FirstTokenConfig,
    Full,
    GatedFeedForwardConfig,
    Global,
    GroupedChoiceConfig,
    GroupedSoftmaxChoiceConfig,
    HeadConfig,
    HeadwiseNormConfig,
    InputWeightedMoEConfig,
    LastTokenConfig,
    LatentAttentionConfig,
    LayerNormConfig,
    LearnedConfig,
    LinearAttentionConfig,
    LinearScaling,
    LinformerConfig,
    Llama3Scaling,
    LMHeadConfig,
    LongformerConfig,
    LongRopeScaling,
    LSTMConfig,
    Mamba2Config,
    MambaConfig,
    MaskedLMHeadConfig,
    MeanPoolConfig,
    MixerConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
    NTKScaling,
    OffsetRMSNormConfig,
    ParallelBlockConfig,
    PatchEmbeddingConfig,
    PlainLayerNormConfig,
    PlainRMSNormConfig,
    PoolerConfig,
    ProjectionNormConfig,
    QueryScaleConfig,
    RelativeBiasConfig,
    RMSNormConfig,
    RotaryConfig,
    Scattered,
    SequenceModelConfig,
    SharedStackConfig,
    ShortConvConfig,
    SigmoidChoiceConfig,
    SinksConfig,
    SinusoidalConfig,
    SpanHeadConfig,
    StackConfig,
    SwitchedFeedForwardConfig,
    TokenClassHeadConfig,
    TokenEmbeddingConfig,
    WidenedEmbeddingConfig,
    Window,
    YarnScaling,
)
from clearhead.configs.positions import AddedPositionConfig
from clearhead.configs.stack import FeedConfig

DIM, VOCABULARY, SOURCE_VOCABULARY, CLASSES, POSITIONS = 20, 23, 29, 13, 41
WINDOW = 3
ROTARY = RotaryConfig()
PLAIN = FeedForwardConfig(hidden=11)
GATED = GatedFeedForwardConfig(hidden=17)
RMS = RMSNormConfig(eps=1e-6)
LEARNED = LearnedConfig(length=POSITIONS)

MIXERS: dict[str, MixerConfig] = {
    "mha": AttentionConfig(heads=5, mask=Causal(), qkv_bias=True, out_bias=True),
    "mha, full": AttentionConfig(heads=5),
    "gqa, head_dim": AttentionConfig(heads=6, kv_heads=2, head_dim=8, mask=Causal(), rotary=ROTARY),
    "mqa, value_dim, yarn": AttentionConfig(
        heads=6,
        kv_heads=1,
        head_dim=8,
        value_dim=9,
        mask=Causal(),
        rotary=RotaryConfig(scaling=YarnScaling(factor=4.0, length=16)),
    ),
    "narrow values": AttentionConfig(heads=5, value_dim=3, mask=Causal(), rotary=ROTARY, out_bias=True),
    "interleaved, partial rotary": AttentionConfig(
        heads=2, mask=Causal(), rotary=RotaryConfig(layout="interleaved", theta=50.0, dim=6)
    ),
    "alibi, grouped": AttentionConfig(heads=6, kv_heads=3, head_dim=4, mask=Causal(), score_bias=AlibiConfig()),
    "alibi, full": AttentionConfig(heads=5, score_bias=AlibiConfig()),
    "qk_norm": AttentionConfig(heads=5, kv_heads=1, mask=Causal(), rotary=ROTARY, qk_norm=RMS),
    "scaled, norm of all heads": AttentionConfig(
        heads=6, kv_heads=2, head_dim=8, mask=Causal(), rotary=ROTARY, scale=0.3, qk_norm=ProjectionNormConfig(norm=RMS)
    ),
    "sinks, clipped": AttentionConfig(
        heads=6, kv_heads=2, head_dim=8, mask=Causal() & Window(4), rotary=ROTARY, sinks=SinksConfig(), qkv_clip=0.9
    ),
    "norm with gains for each head": AttentionConfig(
        heads=6, kv_heads=2, head_dim=8, mask=Causal(), qk_norm=HeadwiseNormConfig(width=8)
    ),
    "window": AttentionConfig(heads=6, kv_heads=2, head_dim=8, mask=Causal() & Window(WINDOW), rotary=ROTARY),
    "window, both ways": AttentionConfig(heads=5, mask=Window(WINDOW)),
    "longformer": AttentionConfig(heads=5, mask=Window(2) | Global(1)),
    "causal longformer": AttentionConfig(heads=5, mask=Causal() & (Window(2) | Global(1)), rotary=ROTARY),
    "longformer, global projections": LongformerConfig(heads=5, window=2, tokens=2, qkv_bias=True, out_bias=True),
    "dual chunk": AttentionConfig(
        heads=6, kv_heads=2, head_dim=8, mask=Causal(), rotary=DualChunkConfig(chunk=2, length=5, rotary=ROTARY)
    ),
    "dual chunk, window": AttentionConfig(
        heads=5, mask=Causal() & Window(4), rotary=DualChunkConfig(chunk=3, length=4, rotary=ROTARY)
    ),
    "blockwise": AttentionConfig(heads=5, mask=Blockwise(2, Window(2) | Global(1)), rotary=ROTARY),
    "bigbird": AttentionConfig(
        heads=6, kv_heads=3, head_dim=4, mask=Blockwise(2, Window(2) | Global(1) | Scattered(1, among=4, seed=1))
    ),
    "causal blockwise": AttentionConfig(heads=5, mask=Causal() & Blockwise(2, Window(2)), rotary=ROTARY),
    "latent": LatentAttentionConfig(heads=3, latent_dim=9, plain_dim=5, rope_dim=4, value_dim=7),
    "latent, query latent": LatentAttentionConfig(
        heads=3, latent_dim=9, plain_dim=5, rope_dim=4, value_dim=7, query_latent_dim=13, bias=True, magnitude=1.2
    ),
    "latent, full": LatentAttentionConfig(heads=3, latent_dim=9, plain_dim=5, rope_dim=4, value_dim=7, mask=Full()),
    "latent, window": LatentAttentionConfig(
        heads=3, latent_dim=9, plain_dim=5, rope_dim=4, value_dim=3, mask=Causal() & Window(WINDOW)
    ),
    "linear": LinearAttentionConfig(heads=5, mask=Causal()),
    "linear, full": LinearAttentionConfig(heads=5, kernel=EluConfig(), qkv_bias=True, out_bias=True),
    "performer": LinearAttentionConfig(heads=5, mask=Causal(), kernel=FavorConfig(features=7)),
    "performer, value_dim": LinearAttentionConfig(
        heads=3, head_dim=8, value_dim=7, mask=Causal(), kernel=FavorConfig(features=19, seed=5)
    ),
    "performer, full": LinearAttentionConfig(heads=5, kernel=FavorConfig(features=13)),
    "linear, undivided": LinearAttentionConfig(heads=5, mask=Causal(), kernel=DotConfig()),
    "linear, undivided, full": LinearAttentionConfig(heads=5, kernel=DotConfig(), qkv_bias=True),
    "linformer": LinformerConfig(heads=5, length=POSITIONS, rows=6, out_bias=True),
    "linformer, shared": LinformerConfig(heads=3, length=17, rows=9, shared=True, head_dim=4, value_dim=7),
    "mamba": MambaConfig(state_dim=6),
    "mamba, narrow": MambaConfig(inner=13, state_dim=3, conv=3, rank=4, conv_bias=False, bias=True),
    "mamba 2": Mamba2Config(heads=6, head_dim=5, groups=2, state_dim=7),
    "short conv": ShortConvConfig(),
    "short conv, biased": ShortConvConfig(conv=5, conv_bias=True, bias=True),
    "lstm": LSTMConfig(),
    "lstm, narrow": LSTMConfig(hidden=7),
}

PLACEMENTS = ("pre", "post", "sandwich", "parallel")

FEEDS: dict[str, FeedConfig | None] = {
    "no feed-forward": None,
    "relu": FeedForwardConfig(hidden=11, activation="relu"),
    "relu2": FeedForwardConfig(hidden=11, activation="relu2", bias=False),
    "gelu, 4·D": FeedForwardConfig(activation="gelu"),
    "gelu_tanh": FeedForwardConfig(hidden=11, activation="gelu_tanh"),
    "silu": FeedForwardConfig(hidden=11, activation="silu"),
    "swiglu": GATED,
    "geglu, 8/3·D": GatedFeedForwardConfig(activation="gelu", bias=True),
    "moe": MoEConfig(expert=GATED, experts=5, active=2),
    "moe, plain experts": MoEConfig(expert=PLAIN, experts=5, active=3, normalised=False, scale=1.7),
    "moe, shared": MoEConfig(expert=GATED, experts=5, active=2, shared=PLAIN, normalised=False),
    "moe, grouped": MoEConfig(
        expert=GATED, experts=12, active=3, shared=PLAIN, scale=2.5, choice=GroupedChoiceConfig(groups=4, kept=2)
    ),
    "gelu_quick": FeedForwardConfig(hidden=11, activation="gelu_quick"),
    "clamped": ClampedFeedForwardConfig(hidden=11, limit=0.5, bias=True),
    "moe, clamped, router bias": MoEConfig(
        expert=ClampedFeedForwardConfig(hidden=11, limit=0.5, bias=True), experts=5, active=2, router_bias=True
    ),
    "moe, weighted inputs": InputWeightedMoEConfig(
        expert=GATED, experts=5, active=2, shared=GATED, normalised=False, choice=SigmoidChoiceConfig()
    ),
    "moe, switched": MoEConfig(
        expert=GATED, experts=5, active=2, shared=SwitchedFeedForwardConfig(ffn=GATED), normalised=False
    ),
    "moe, grouped softmax": MoEConfig(
        expert=GATED, experts=12, active=3, normalised=False, choice=GroupedSoftmaxChoiceConfig(groups=4, kept=2)
    ),
    "moe, shared, normalised": MoEConfig(expert=PLAIN, experts=4, active=4, shared=GATED, scale=0.6),
}

NORMS: dict[str, NormConfig] = {
    "layer norm": LayerNormConfig(),
    "layer norm, no bias": LayerNormConfig(bias=False, eps=1e-3),
    "rms norm": RMS,
    "offset rms norm": OffsetRMSNormConfig(),
    "no weights": PlainLayerNormConfig(),
}

POSITION_KINDS: dict[str, AddedPositionConfig | None] = {
    "sinusoidal": SinusoidalConfig(),
    "sinusoidal, halves": SinusoidalConfig(layout="halves", base=100.0),
    "sinusoidal, from 2": SinusoidalConfig(layout="halves", start=2),
    "learned": LEARNED,
    "no positions": None,
}

SCALED = {
    "linear": RotaryConfig(scaling=LinearScaling(factor=3.0)),
    "ntk": RotaryConfig(scaling=NTKScaling(factor=2.5)),
    "llama3": RotaryConfig(scaling=Llama3Scaling(factor=8.0, length=16)),
    "dynamic": RotaryConfig(scaling=DynamicScaling(factor=3.0, length=100_000)),
    "longrope": RotaryConfig(scaling=LongRopeScaling(short=(1.0, 1.5), long=(2.0, 5.0), length=100_000, rotation=1.2)),
}

HEADS: dict[str, HeadConfig | None] = {
    "no head": None,
    "masked lm": MaskedLMHeadConfig(vocabulary=VOCABULARY),
    "masked lm, untied": MaskedLMHeadConfig(vocabulary=VOCABULARY, tied=False, activation="relu", norm=RMS),
    "first token": FirstTokenConfig(),
    "last token": LastTokenConfig(),
    "classes of the last token": ClassHeadConfig(classes=CLASSES, pool=LastTokenConfig(), bias=False),
    "mean": MeanPoolConfig(),
    "pooler": PoolerConfig(),
    "classes of the pooler": ClassHeadConfig(classes=CLASSES, pool=PoolerConfig()),
    "classes of a relu": ClassHeadConfig(classes=CLASSES, pool=PoolerConfig(activation="relu")),
    "start and end": SpanHeadConfig(),
    "classes of every token": TokenClassHeadConfig(classes=CLASSES),
    "classes of the mean": ClassHeadConfig(classes=CLASSES, pool=MeanPoolConfig()),
}


def block(
    mixer: MixerConfig, placement: str = "pre", ffn: FeedConfig | None = PLAIN, norm: NormConfig = RMS
) -> BlockConfig | ParallelBlockConfig:
    if placement == "parallel":
        return ParallelBlockConfig(mixer=mixer, ffn=ffn, norm=norm)
    return BlockConfig(mixer=mixer, ffn=ffn, norm=norm, placement=placement)


def sequence(
    *pattern: BlockConfig | ParallelBlockConfig,
    repeats: int = 2,
    first: tuple[BlockConfig, ...] = (),
    position: AddedPositionConfig | None = None,
    head: HeadConfig | None = LMHeadConfig(vocabulary=VOCABULARY),
    final_norm: NormConfig | None = LayerNormConfig(),
    distances: DistanceVectorsConfig | None = None,
    **embedding: object,
) -> SequenceModelConfig:
    return SequenceModelConfig(
        embedding=TokenEmbeddingConfig(vocabulary=VOCABULARY, position=position, **embedding),
        stack=StackConfig(
            dim=DIM, pattern=pattern, repeats=repeats, first=first, final_norm=final_norm, distances=distances
        ),
        head=head,
    )


def shared(config: SequenceModelConfig) -> SequenceModelConfig:
    """The same with a stack that runs one set of weights over and over."""
    stack = config.stack
    looped = SharedStackConfig(
        dim=stack.dim, pattern=stack.pattern, repeats=stack.repeats, first=stack.first, final_norm=stack.final_norm
    )
    return replace(config, stack=looped)


def biased(config: SequenceModelConfig, mirrored: bool) -> SequenceModelConfig:
    """The same with T5's bias in every block."""
    bias = RelativeBiasConfig(heads=5, buckets=12, limit=20, mirrored=mirrored)
    return replace(config, stack=replace(config.stack, score_bias=bias))


def translator(
    encoder: AttentionConfig | LatentAttentionConfig,
    decoder: AttentionConfig | LatentAttentionConfig,
    cross: AttentionConfig,
    placement: str,
    *,
    tied: bool,
    position: AddedPositionConfig | None = SinusoidalConfig(),
) -> EncoderDecoderConfig:
    source = TokenEmbeddingConfig(vocabulary=VOCABULARY if tied else SOURCE_VOCABULARY, position=position, scaled=True)
    target = None if tied else TokenEmbeddingConfig(vocabulary=VOCABULARY, position=position, norm=RMS)
    below = BlockConfig(mixer=encoder, ffn=PLAIN, placement=placement)
    above = BlockConfig(mixer=decoder, cross=cross, ffn=GATED, placement=placement)
    return EncoderDecoderConfig(
        source=source,
        encoder=StackConfig(dim=DIM, pattern=(below,), repeats=2, final_norm=RMS),
        target=target,
        decoder=StackConfig(dim=DIM, pattern=(above,), repeats=2, final_norm=RMS),
        head=LMHeadConfig(vocabulary=VOCABULARY, tied=tied, bias=not tied),
    )


MHA, FULL = MIXERS["mha"], MIXERS["mha, full"]
ROTATED = MIXERS["gqa, head_dim"]
GROUPED_FULL = AttentionConfig(heads=6, kv_heads=2, head_dim=8, rotary=ROTARY)
CAPPED = AttentionConfig(heads=6, kv_heads=3, head_dim=8, mask=Causal() & Window(4), rotary=ROTARY, softcap=1.5)
CROSS = AttentionConfig(heads=5, qkv_bias=True, out_bias=True)
GROUPED_CROSS = AttentionConfig(heads=6, kv_heads=2, head_dim=8, value_dim=9, qk_norm=RMS)

CASES: dict[str, ModelConfig] = {
    **{
        f"{name}; {place}": sequence(block(mixer, place), repeats=1)
        for name, mixer in MIXERS.items()
        for place in PLACEMENTS
    },
    **{f"ffn: {name}": sequence(block(ROTATED, ffn=ffn)) for name, ffn in FEEDS.items()},
    **{f"norm: {name}": sequence(block(ROTATED, norm=norm), final_norm=norm) for name, norm in NORMS.items()},
    **{f"position: {name}": sequence(block(MHA), position=kind) for name, kind in POSITION_KINDS.items()},
    **{
        f"rotary: {name}": sequence(block(AttentionConfig(heads=5, mask=Causal(), rotary=rotary)))
        for name, rotary in SCALED.items()
    },
    **{
        f"head: {name}": sequence(block(FULL, "post"), position=LEARNED, segments=3, head=head)
        for name, head in HEADS.items()
    },
    "tied head, scaled embedding": sequence(
        block(MHA), head=LMHeadConfig(vocabulary=VOCABULARY, tied=True, bias=True), scaled=True, norm=RMS
    ),
    "shared blocks": shared(sequence(block(ROTATED), block(MIXERS["window"], "post"), first=(block(MHA),))),
    "shared blocks, narrow table": SequenceModelConfig(
        embedding=FactoredEmbeddingConfig(vocabulary=VOCABULARY, width=7, position=LEARNED, segments=3, norm=RMS),
        stack=SharedStackConfig(dim=DIM, pattern=(block(FULL, "post"),), repeats=3),
        head=MaskedLMHeadConfig(vocabulary=VOCABULARY, width=7),
    ),
    "capped scores": sequence(block(CAPPED), head=LMHeadConfig(vocabulary=VOCABULARY, scale=0.4, softcap=2.0)),
    "relative bias": biased(sequence(block(MHA, ffn=GATED)), mirrored=False),
    "relative bias, full": biased(sequence(block(FULL, "post"), head=None), mirrored=True),
    "distance vectors": sequence(
        block(DisentangledAttentionConfig(heads=5), "post"),
        head=HEADS["masked lm"],
        distances=DistanceVectorsConfig(limit=9, buckets=6, norm=RMS),
    ),
    "distance vectors, own matrices": sequence(
        block(DisentangledAttentionConfig(heads=3, head_dim=4, own_positions=True, terms=("content to position",))),
        head=None,
        distances=DistanceVectorsConfig(limit=4),
    ),
    "a narrow table": SequenceModelConfig(
        embedding=WidenedEmbeddingConfig(vocabulary=VOCABULARY, width=7, position=LEARNED),
        stack=StackConfig(dim=DIM, pattern=(block(MHA, "post"),), repeats=2),
        head=LMHeadConfig(vocabulary=VOCABULARY, tied=True, width=7),
    ),
    "scaled branches, a bare mixer": sequence(
        replace(block(ROTATED), bare=("mixer",)), replace(block(MHA), branch_scale=0.3), scaled=3.5
    ),
    "alibi, scaled": sequence(block(AttentionConfig(heads=5, mask=Causal(), score_bias=AlibiConfig(scale=0.4)))),
    "norms inside": sequence(block(ROTATED, "inside", GATED)),
    "parallel, two norms": sequence(
        ParallelBlockConfig(mixer=MHA, ffn=PLAIN, norm=LayerNormConfig(), ffn_norm=LayerNormConfig())
    ),
    "no final norm": sequence(block(MHA, "post"), final_norm=None),
    "hybrid": sequence(
        block(MIXERS["window"]),
        block(MHA, "sandwich", GATED),
        block(MIXERS["latent"], "parallel", FEEDS["moe"]),
        first=(block(MIXERS["alibi, grouped"], "post"),),
        repeats=2,
    ),
    "mamba, normed steps": sequence(block(MambaConfig(state_dim=3, select_norm=RMS)), repeats=1),
    "mamba, mamba, attention": sequence(
        block(MIXERS["mamba"], ffn=None), block(MIXERS["mamba, narrow"]), block(MHA, "post"), repeats=1
    ),
    "mamba 2, biased; attention": sequence(
        block(Mamba2Config(heads=3, head_dim=4, state_dim=5, conv=3, conv_bias=False, bias=True)), block(MHA), repeats=1
    ),
    "recurrent hybrid": sequence(
        block(MIXERS["lstm"]), block(MIXERS["performer"], "post"), block(MIXERS["window"]), repeats=1
    ),
    "short conv, attention": sequence(block(MIXERS["short conv"]), block(MHA, "post"), repeats=1),
    "chunks, and scaled queries": sequence(
        block(
            AttentionConfig(
                heads=5,
                mask=Causal() & Blockwise(4, Window(1)),
                rotary=replace(ROTARY, layout="interleaved"),
                qk_norm=PlainRMSNormConfig(),
            )
        ),
        block(AttentionConfig(heads=5, mask=Causal(), rotary=QueryScaleConfig(every=3, strength=0.4))),
        repeats=1,
    ),
    "two windows": sequence(
        block(AttentionConfig(heads=5, mask=Causal() & Window(2))),
        block(MIXERS["window"], "post", FEEDS["moe, shared"]),
    ),
    "window of one": sequence(block(AttentionConfig(heads=5, mask=Causal() & Window(1)))),
    "patches": SequenceModelConfig(
        embedding=PatchEmbeddingConfig(image=6, patch=3, channels=2),
        stack=StackConfig(dim=DIM, pattern=(block(FULL),), repeats=2, final_norm=RMS),
        head=ClassHeadConfig(classes=CLASSES),
    ),
    "patches, no head": SequenceModelConfig(
        embedding=PatchEmbeddingConfig(image=6, patch=2, channels=1),
        stack=StackConfig(dim=DIM, pattern=(block(FULL, "parallel"),), repeats=1),
    ),
    **{f"translator; {place}": translator(FULL, MHA, CROSS, place, tied=True) for place in ("pre", "post", "sandwich")},
    "translator, two tables": translator(FULL, MHA, CROSS, "post", tied=False, position=LEARNED),
    "translator, a borrowed table": replace(
        translator(FULL, MHA, CROSS, "post", tied=True, position=LEARNED),
        target=BorrowedEmbeddingConfig(vocabulary=VOCABULARY, position=LEARNED, norm=RMS),
    ),
    "translator, grouped": translator(GROUPED_FULL, MIXERS["window"], GROUPED_CROSS, "pre", tied=False),
    "translator, latent": translator(MIXERS["latent, full"], MIXERS["latent"], CROSS, "pre", tied=True, position=None),
}  # fmt: skip
