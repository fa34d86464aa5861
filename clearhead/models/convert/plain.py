"""Decoders with plain feed-forward layers: OPT, BLOOM, Falcon, GPT-Neo and StarCoder 2."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from clearhead.configs import (
    AlibiConfig,
    AttentionConfig,
    BlockConfig,
    Causal,
    ClassHeadConfig,
    ConfigError,
    FeedForwardConfig,
    LayerNormConfig,
    LearnedConfig,
    LMHeadConfig,
    ModelConfig,
    ParallelBlockConfig,
    RotaryConfig,
    SequenceModelConfig,
    StackConfig,
    TokenEmbeddingConfig,
    WidenedEmbeddingConfig,
    Window,
)
from clearhead.configs.norm import NormConfig

from .rules import (
    GroupedRows,
    Rule,
    SkippedRows,
    activation,
    both,
    context_length,
    copies,
    decoder_class,
    decoder_head,
    decoder_head_rules,
    hf_activation,
    joined_qkv,
    labels,
    present,
    rope_parameters,
    rotary,
)

PREFIX = "transformer."
PREFIXES = {"opt": "model.", "starcoder2": "model."}
IGNORED = (r"lm_head\.weight", r".*rotary_emb\.inv_freq", r"h\.\d+\.attn\.attention\.(masked_)?bias")
NAMES = {"opt": "OPT", "bloom": "Bloom", "falcon": "Falcon", "gpt_neo": "GPTNeo", "starcoder2": "Starcoder2"}
ARCHITECTURES = {
    kind: tuple(f"{name}{head}" for head in ("Model", "ForCausalLM", "ForSequenceClassification"))
    for kind, name in NAMES.items()
}
Blocks = tuple[BlockConfig | ParallelBlockConfig, ...]


def from_hf(hf: Mapping[str, Any]) -> SequenceModelConfig:
    kind = hf["model_type"]
    make = {"opt": opt, "bloom": bloom, "falcon": falcon, "gpt_neo": gpt_neo, "starcoder2": starcoder2}[kind]
    embedding, blocks = make(hf)
    norm: NormConfig | None = blocks[0].norm
    if (isinstance(blocks[0], BlockConfig) and blocks[0].placement == "post") or hf.get("_remove_final_layer_norm"):
        norm = None
    same = all(block == blocks[0] for block in blocks)
    head = decoder_head(hf, ARCHITECTURES[kind], bool(hf.get("tie_word_embeddings", True)))
    if (width := narrow_table(hf)) is not None:
        if not isinstance(head, LMHeadConfig):
            raise ConfigError("opt with a narrow table (word_embed_proj_dim) is supported as a language model only")
        head = replace(head, width=width)
    return SequenceModelConfig(
        embedding=embedding,
        stack=StackConfig(
            dim=hf["hidden_size"],
            pattern=blocks[:1] if same else blocks,
            repeats=len(blocks) if same else 1,
            final_norm=norm,
        ),
        head=head,
    )


def opt(hf: Mapping[str, Any]) -> tuple[TokenEmbeddingConfig, Blocks]:
    if not hf.get("layer_norm_elementwise_affine", True):
        raise ConfigError("opt with norms without weights is not supported yet")
    bias, dropout = bool(hf.get("enable_bias", True)), hf.get("dropout", 0.1)
    block = BlockConfig(
        mixer=AttentionConfig(
            heads=hf["num_attention_heads"],
            mask=Causal(),
            qkv_bias=bias,
            out_bias=bias,
            dropout=hf.get("attention_dropout", 0.0),
        ),
        ffn=FeedForwardConfig(
            hidden=hf["ffn_dim"], activation=activation(hf.get("activation_function", "relu")), bias=bias
        ),
        norm=LayerNormConfig(eps=1e-5),
        placement="pre" if hf.get("do_layer_norm_before", True) else "post",
        dropout=dropout,
    )
    blocks, position = (block,) * hf["num_hidden_layers"], LearnedConfig(length=hf["max_position_embeddings"])
    if (width := narrow_table(hf)) is not None:
        return WidenedEmbeddingConfig(vocabulary=hf["vocab_size"], position=position, width=width), blocks
    return TokenEmbeddingConfig(vocabulary=hf["vocab_size"], position=position), blocks


def narrow_table(hf: Mapping[str, Any]) -> int | None:
    """The width of OPT-350m's table, if it is not that of the model."""
    width = hf.get("word_embed_proj_dim")
    return None if hf["model_type"] != "opt" or width == hf["hidden_size"] else width


def bloom(hf: Mapping[str, Any]) -> tuple[TokenEmbeddingConfig, Blocks]:
    if hf.get("apply_residual_connection_post_layernorm"):
        raise ConfigError("bloom with apply_residual_connection_post_layernorm is not supported yet")
    norm = LayerNormConfig(eps=float(hf.get("layer_norm_epsilon", 1e-5)))
    block = BlockConfig(
        mixer=AttentionConfig(
            heads=hf.get("n_head") or hf["num_attention_heads"],
            mask=Causal(),
            score_bias=AlibiConfig(),
            qkv_bias=True,
            out_bias=True,
            dropout=hf.get("attention_dropout", 0.0),
        ),
        ffn=FeedForwardConfig(hidden=4 * hf["hidden_size"], activation="gelu_tanh"),
        norm=norm,
        dropout=hf.get("hidden_dropout", 0.0),
    )
    layers = hf.get("n_layer") or hf["num_hidden_layers"]
    return TokenEmbeddingConfig(vocabulary=hf["vocab_size"], norm=norm), (block,) * layers


def falcon(hf: Mapping[str, Any]) -> tuple[TokenEmbeddingConfig, Blocks]:
    """Falcon 40B has groups and two norms, 7B one key head and one norm, RW ALiBi and branches after each other."""
    dim, heads = hf["hidden_size"], hf["num_attention_heads"]
    new, bias = bool(hf.get("new_decoder_architecture", False)), bool(hf.get("bias", False))
    groups = 1 if hf.get("multi_query", True) and not new else hf.get("num_kv_heads") or heads
    norm = LayerNormConfig(eps=float(hf.get("layer_norm_epsilon", 1e-5)))
    far = bool(hf.get("alibi", False))
    mixer = AttentionConfig(
        heads=heads,
        kv_heads=groups,
        mask=Causal(),
        rotary=None if far else rotary(hf),
        score_bias=AlibiConfig(scale=(dim // heads) ** -0.5) if far else None,
        qkv_bias=bias,
        out_bias=bias,
        dropout=hf.get("attention_dropout", 0.0),
    )
    ffn = FeedForwardConfig(
        hidden=hf.get("ffn_hidden_size") or 4 * dim, activation=activation(hf.get("activation", "gelu")), bias=bias
    )
    dropout = hf.get("hidden_dropout", 0.0)
    block: BlockConfig | ParallelBlockConfig = BlockConfig(mixer=mixer, ffn=ffn, norm=norm, dropout=dropout)
    if hf.get("parallel_attn", True) or new:
        two = new and hf.get("num_ln_in_parallel_attn") in (None, 2)
        block = ParallelBlockConfig(mixer=mixer, ffn=ffn, norm=norm, ffn_norm=norm if two else None, dropout=dropout)
    return TokenEmbeddingConfig(vocabulary=hf["vocab_size"]), (block,) * hf["num_hidden_layers"]


def gpt_neo(hf: Mapping[str, Any]) -> tuple[TokenEmbeddingConfig, Blocks]:
    kinds = hf.get("attention_layers") or [
        kind for group, count in hf["attention_types"] for _ in range(count) for kind in group
    ]
    mixer = AttentionConfig(
        heads=hf["num_heads"], mask=Causal(), scale=1.0, out_bias=True, dropout=hf.get("attention_dropout", 0.0)
    )
    block = BlockConfig(
        mixer=mixer,
        ffn=FeedForwardConfig(
            hidden=hf.get("intermediate_size") or 4 * hf["hidden_size"],
            activation=activation(hf.get("activation_function", "gelu_new")),
        ),
        norm=LayerNormConfig(eps=float(hf.get("layer_norm_epsilon", 1e-5))),
        dropout=hf.get("resid_dropout", 0.0),
    )
    window = Causal() & Window(hf.get("window_size", 256))
    embedding = TokenEmbeddingConfig(
        vocabulary=hf["vocab_size"],
        position=LearnedConfig(length=hf["max_position_embeddings"]),
        dropout=hf.get("embed_dropout", 0.0),
    )
    local = replace(block, mixer=replace(mixer, mask=window))
    return embedding, tuple(local if kind == "local" else block for kind in kinds)


def starcoder2(hf: Mapping[str, Any]) -> tuple[TokenEmbeddingConfig, Blocks]:
    bias, window = bool(hf.get("use_bias", True)), hf.get("sliding_window")
    block = BlockConfig(
        mixer=AttentionConfig(
            heads=hf["num_attention_heads"],
            kv_heads=hf.get("num_key_value_heads"),
            mask=Causal() & Window(window) if window else Causal(),
            rotary=rotary(hf),
            qkv_bias=bias,
            out_bias=bias,
            dropout=hf.get("attention_dropout", 0.0),
        ),
        ffn=FeedForwardConfig(
            hidden=hf["intermediate_size"],
            activation=activation(hf.get("hidden_act", "gelu_pytorch_tanh")),
            bias=bias,
        ),
        norm=LayerNormConfig(eps=float(hf.get("norm_epsilon", 1e-5))),
        dropout=hf.get("residual_dropout", 0.0),
    )
    embedding = TokenEmbeddingConfig(vocabulary=hf["vocab_size"], dropout=hf.get("embedding_dropout", 0.0))
    return embedding, (block,) * hf["num_hidden_layers"]


def to_hf(config: ModelConfig, kind: str) -> dict[str, Any] | None:
    match config:
        case SequenceModelConfig(
            embedding=TokenEmbeddingConfig() as embedding,
            stack=StackConfig(
                pattern=(
                    BlockConfig(mixer=AttentionConfig() as mixer, ffn=FeedForwardConfig() as ffn)
                    | ParallelBlockConfig(mixer=AttentionConfig() as mixer, ffn=FeedForwardConfig() as ffn) as block,
                    *_,
                )
            ) as stack,
            head=None | LMHeadConfig() | ClassHeadConfig() as head,
        ):
            own = own_fields(kind, embedding, stack, block, mixer, ffn)
            return own and own | {
                "architectures": [decoder_class(ARCHITECTURES[kind], head)],
                "model_type": kind,
                "vocab_size": embedding.vocabulary,
                "hidden_size": stack.dim,
                "attention_dropout": mixer.dropout,
                "tie_word_embeddings": not isinstance(head, LMHeadConfig) or head.tied,
                "bos_token_id": None,
                "eos_token_id": None,
                **labels(head),
            }
    return None


def own_fields(
    kind: str,
    embedding: TokenEmbeddingConfig,
    stack: StackConfig,
    block: BlockConfig | ParallelBlockConfig,
    mixer: AttentionConfig,
    ffn: FeedForwardConfig,
) -> dict[str, Any] | None:
    """The fields that these families name differently. `Family.hf` rejects what they cannot say."""
    layers, act, eps = len(stack.blocks), hf_activation(ffn.activation), block.norm.eps
    length = embedding.position.length if isinstance(embedding.position, LearnedConfig) else None
    plain = {"num_hidden_layers": layers, "num_attention_heads": mixer.heads}
    match kind, block:
        case "opt", BlockConfig(placement=placement) if length:
            return plain | {
                "ffn_dim": ffn.hidden,
                "max_position_embeddings": length,
                "activation_function": act,
                "do_layer_norm_before": placement == "pre",
                "_remove_final_layer_norm": placement == "pre" and stack.final_norm is None,
                "word_embed_proj_dim": embedding.width if isinstance(embedding, WidenedEmbeddingConfig) else stack.dim,
                "enable_bias": mixer.qkv_bias,
                "dropout": block.dropout,
                "pad_token_id": 1,
            }
        case "bloom", BlockConfig():
            return {
                "n_layer": layers,
                "n_head": mixer.heads,
                "layer_norm_epsilon": eps,
                "hidden_dropout": block.dropout,
            }
        case "gpt_neo", BlockConfig() if length:
            kinds = ["global" if each.mixer.mask.reach is None else "local" for each in stack.blocks]
            windows = [each.mixer.mask.reach for each in stack.blocks if each.mixer.mask.reach]
            return {
                "num_layers": layers,
                "num_heads": mixer.heads,
                "attention_types": [[[kind], 1] for kind in kinds],
                "window_size": windows[0] if windows else 256,
                "intermediate_size": ffn.hidden,
                "max_position_embeddings": length,
                "activation_function": "gelu_new" if ffn.activation == "gelu_tanh" else act,
                "layer_norm_epsilon": eps,
                "resid_dropout": block.dropout,
                "embed_dropout": embedding.dropout,
            }
        case "starcoder2", BlockConfig() if isinstance(mixer.rotary, RotaryConfig):
            return plain | {
                "num_key_value_heads": mixer.kv_heads,
                "intermediate_size": ffn.hidden,
                "hidden_act": act,
                "norm_epsilon": eps,
                "sliding_window": mixer.mask.reach,
                "use_bias": mixer.qkv_bias,
                "residual_dropout": block.dropout,
                "embedding_dropout": embedding.dropout,
                "rope_parameters": rope_parameters(mixer.rotary),
                "max_position_embeddings": context_length(mixer.rotary),
            }
        case "falcon", _:
            two = isinstance(block, ParallelBlockConfig) and block.ffn_norm is not None
            new = two or mixer.kv_heads not in (1, mixer.heads)
            rope = mixer.rotary if isinstance(mixer.rotary, RotaryConfig) else RotaryConfig()
            return plain | {
                "new_decoder_architecture": new,
                "num_ln_in_parallel_attn": (2 if two else 1) if new else None,
                "multi_query": mixer.kv_heads == 1 and not new,
                "num_kv_heads": mixer.kv_heads,
                "parallel_attn": isinstance(block, ParallelBlockConfig),
                "alibi": mixer.score_bias is not None,
                "bias": mixer.qkv_bias,
                "ffn_hidden_size": ffn.hidden,
                "activation": act,
                "layer_norm_epsilon": eps,
                "hidden_dropout": block.dropout,
                "rope_parameters": rope_parameters(rope),
                "max_position_embeddings": context_length(rope),
            }
    return None


@dataclass(frozen=True)
class Names:
    """Where a family stores the parts of a layer. `qkv` with braces: three matrices, otherwise one."""

    tokens: str
    final: str
    layer: str
    norms: tuple[str, str]
    qkv: str
    out: str
    up: str
    down: str
    positions: str = ""
    embedding_norm: str = ""


BLOOM = Names(
    "word_embeddings",
    "ln_f",
    "h.{}",
    ("input_layernorm", "post_attention_layernorm"),
    "self_attention.query_key_value",
    "self_attention.dense",
    "mlp.dense_h_to_4h",
    "mlp.dense_4h_to_h",
    embedding_norm="word_embeddings_layernorm",
)
TENSORS = {
    "opt": Names(
        "decoder.embed_tokens",
        "decoder.final_layer_norm",
        "decoder.layers.{}",
        ("self_attn_layer_norm", "final_layer_norm"),
        "self_attn.{}_proj",
        "self_attn.out_proj",
        "fc1",
        "fc2",
        positions="decoder.embed_positions",
    ),
    "bloom": BLOOM,
    "falcon": BLOOM,
    "gpt_neo": Names(
        "wte",
        "ln_f",
        "h.{}",
        ("ln_1", "ln_2"),
        "attn.attention.{}_proj",
        "attn.attention.out_proj",
        "mlp.c_fc",
        "mlp.c_proj",
        positions="wpe",
    ),
    "starcoder2": Names(
        "embed_tokens",
        "norm",
        "layers.{}",
        ("input_layernorm", "post_attention_layernorm"),
        "self_attn.{}_proj",
        "self_attn.o_proj",
        "mlp.c_fc",
        "mlp.c_proj",
    ),
}


def rules(config: SequenceModelConfig, kind: str) -> Iterator[Rule]:
    return present(config, all_rules(config, kind))


def all_rules(config: SequenceModelConfig, kind: str) -> Iterator[Rule]:
    names = TENSORS[kind]
    yield Rule(("embedding.tokens.weight",), (f"{names.tokens}.weight",))
    skipped = 2 if kind == "opt" else 0
    yield SkippedRows(("embedding.position.weight",), (f"{names.positions}.weight",), skipped)
    projections = {"embedding.projection.weight": "project_in", "head.narrow.weight": "project_out"}
    yield from copies({mine: f"decoder.{their}.weight" for mine, their in projections.items()})
    yield from both({"embedding.norm": names.embedding_norm, "stack.final_norm": names.final})
    for i, block in enumerate(config.stack.blocks):
        assert isinstance(block.mixer, AttentionConfig)
        mixer, ours, theirs = block.mixer, f"stack.blocks.{i}", names.layer.format(i)
        if "{" in names.qkv:
            apart = tuple(f"{theirs}.{names.qkv.format(letter)}" for letter in "qkv")
            yield from joined_qkv(f"{ours}.mixer.qkv", apart, mixer, config.stack.dim)
        else:
            for suffix in ("weight", "bias"):
                joined = (f"{theirs}.{names.qkv}.{suffix}",)
                repeats = mixer.heads // mixer.groups
                yield GroupedRows((f"{ours}.mixer.qkv.{suffix}",), joined, mixer.groups, repeats)
        first, second = names.norms
        if isinstance(block, ParallelBlockConfig):
            norms = {"norm": first} if block.ffn_norm is None else {"norm": "ln_attn", "ffn_norm": "ln_mlp"}
        else:
            place = "after" if block.placement == "post" else "before"
            norms = {f"mixer_residual.{place}": first, f"ffn_residual.{place}": second}
        layers = norms | {"mixer.out": names.out, "ffn.up": names.up, "ffn.down": names.down}
        yield from both({f"{ours}.{mine}": f"{theirs}.{their}" for mine, their in layers.items()})
    yield from decoder_head_rules(config.head)
