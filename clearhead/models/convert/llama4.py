"""The text model of Llama 4 as `transformers` stores it.

Three of four layers turn queries and keys, norm them and read within chunks; the fourth has no positions, reads the
whole text, and scales its queries as the text grows. Experts read inputs that are weighted by a sigmoid.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    Blockwise,
    Causal,
    GatedFeedForwardConfig,
    InputWeightedMoEConfig,
    LMHeadConfig,
    ModelConfig,
    PlainRMSNormConfig,
    QueryScaleConfig,
    RMSNormConfig,
    RotaryConfig,
    SequenceModelConfig,
    SigmoidChoiceConfig,
    StackConfig,
    TokenEmbeddingConfig,
    Window,
)

from .llama import NORMS, Swapped, gated_rules, outer_fields, outer_rules
from .rules import (
    Array,
    Rule,
    activation,
    both,
    context_length,
    decoder_head,
    hf_activation,
    joined_qkv,
    library,
    present,
    rope_parameters,
    rotary,
)

PREFIX = "model."
IGNORED = (r"lm_head\.weight",)
ARCHITECTURES = {"llama4_text": ("Llama4TextModel", "Llama4ForCausalLM")}
CHUNKED, GLOBAL = "chunked_attention", "full_attention"


class Halves(Rule):
    """They store the gates and the ups of all experts as [experts, in, 2·out]."""

    def gather(self, parts: list[Array]) -> list[Array]:
        half = parts[0].shape[-1] // 2
        return [array.swapaxes(-1, -2) for array in (parts[0][..., :half], parts[0][..., half:])]

    def scatter(self, arrays: list[Array]) -> list[Array]:
        return [library(arrays[0]).concatenate([array.swapaxes(-1, -2) for array in arrays], -1)]


def from_hf(hf: Mapping[str, Any]) -> SequenceModelConfig:
    count, norm = hf["num_hidden_layers"], RMSNormConfig(eps=float(hf.get("rms_norm_eps", 1e-5)))
    act, biased = activation(hf.get("hidden_act", "silu")), bool(hf.get("attention_bias", False))
    every = hf.get("no_rope_layer_interval") or 4
    turned = hf.get("no_rope_layers") or [(i + 1) % every for i in range(count)]
    kinds = hf.get("layer_types") or [CHUNKED if turns else GLOBAL for turns in turned]
    chunk = hf.get("attention_chunk_size", 8192)
    plain = AttentionConfig(
        heads=hf["num_attention_heads"],
        kv_heads=hf.get("num_key_value_heads"),
        head_dim=hf.get("head_dim"),
        mask=Causal(),
        qkv_bias=biased,
        out_bias=biased,
        dropout=hf.get("attention_dropout") or 0.0,
    )
    rope = rotary(hf, layout="interleaved", theta=5e5)
    normed = PlainRMSNormConfig(eps=norm.eps) if hf.get("use_qk_norm", True) else None
    scale = QueryScaleConfig(every=int(hf.get("floor_scale", 8192)), strength=float(hf.get("attn_scale", 0.1)))
    scaled = scale if hf.get("attn_temperature_tuning", True) else None

    def mixer(turns: int, kind: str) -> AttentionConfig:
        mask = Causal() & Blockwise(chunk, Window(1)) if kind == CHUNKED and chunk else Causal()
        return replace(plain, mask=mask, rotary=rope if turns else scaled, qk_norm=normed if turns else None)

    def gated(hidden: int) -> GatedFeedForwardConfig:
        return GatedFeedForwardConfig(hidden=hidden, activation=act)

    experts = InputWeightedMoEConfig(
        expert=gated(hf["intermediate_size"]),
        experts=hf.get("num_local_experts", 16),
        active=hf.get("num_experts_per_tok", 1),
        shared=gated(hf["intermediate_size"]),
        normalised=False,
        choice=SigmoidChoiceConfig(),
    )
    step = hf.get("interleave_moe_layer_step") or 1
    sparse = hf.get("moe_layers")
    sparse = range(step - 1, count, step) if sparse is None else sparse
    blocks = tuple(
        BlockConfig(
            mixer=mixer(turns, kind), ffn=experts if i in sparse else gated(hf["intermediate_size_mlp"]), norm=norm
        )
        for i, (turns, kind) in enumerate(zip(turned, kinds, strict=True))
    )
    return SequenceModelConfig(
        embedding=TokenEmbeddingConfig(vocabulary=hf["vocab_size"]),
        stack=StackConfig(dim=hf["hidden_size"], pattern=blocks, repeats=1, final_norm=norm),
        head=decoder_head(hf, ARCHITECTURES["llama4_text"], bool(hf.get("tie_word_embeddings", False))),
    )


def to_hf(config: ModelConfig, kind: str) -> dict[str, Any] | None:
    match config:
        case SequenceModelConfig(
            embedding=TokenEmbeddingConfig(vocabulary=vocabulary),
            stack=StackConfig() as stack,
            head=None | LMHeadConfig() as head,
        ):
            mixers = [block.mixer for block in stack.blocks if isinstance(block.mixer, AttentionConfig)]
            turned = next((each.rotary for each in mixers if isinstance(each.rotary, RotaryConfig)), None)
            scaled = next((each.rotary for each in mixers if isinstance(each.rotary, QueryScaleConfig)), None)
            feeds = [block.ffn for block in stack.blocks]
            sparse = next((ffn for ffn in feeds if isinstance(ffn, InputWeightedMoEConfig)), None)
            dense = next((ffn for ffn in feeds if isinstance(ffn, GatedFeedForwardConfig)), None)
            if turned is None or sparse is None or len(mixers) != len(stack.blocks):
                return None
            mixer, hidden = mixers[0], sparse.expert.hidden
            reaches = [each.mask.reach for each in mixers]
            return outer_fields(ARCHITECTURES[kind], stack, vocabulary, head) | {
                "model_type": kind,
                "num_attention_heads": mixer.heads,
                "num_key_value_heads": mixer.kv_heads,
                "head_dim": mixer.head_dim,
                "intermediate_size": hidden,
                "intermediate_size_mlp": hidden if dense is None else dense.hidden,
                "hidden_act": hf_activation(sparse.expert.activation),
                "rms_norm_eps": stack.blocks[0].norm.eps,
                "attention_bias": mixer.qkv_bias,
                "attention_dropout": mixer.dropout,
                "no_rope_layers": [int(isinstance(each.rotary, RotaryConfig)) for each in mixers],
                "layer_types": [GLOBAL if reach is None else CHUNKED for reach in reaches],
                "attention_chunk_size": next((reach for reach in reaches if reach), None),
                "use_qk_norm": any(each.qk_norm is not None for each in mixers),
                "attn_temperature_tuning": scaled is not None,
                "floor_scale": 8192 if scaled is None else scaled.every,
                "attn_scale": 0.1 if scaled is None else scaled.strength,
                "num_local_experts": sparse.experts,
                "num_experts_per_tok": sparse.active,
                "moe_layers": [i for i, ffn in enumerate(feeds) if isinstance(ffn, InputWeightedMoEConfig)],
                "rope_parameters": rope_parameters(turned),
                "max_position_embeddings": context_length(turned),
            }
    return None


def rules(config: SequenceModelConfig, kind: str) -> Iterator[Rule]:
    return present(config, all_rules(config))


def all_rules(config: SequenceModelConfig) -> Iterator[Rule]:
    yield from outer_rules(config)
    for i, block in enumerate(config.stack.blocks):
        assert isinstance(block.mixer, AttentionConfig)
        ours, theirs = f"stack.blocks.{i}", f"layers.{i}"
        yield from both({f"{ours}.{mine}": f"{theirs}.{their}" for mine, their in NORMS["pre"].items()})
        names = tuple(f"{theirs}.self_attn.{name}_proj" for name in "qkv")
        yield from joined_qkv(f"{ours}.mixer.qkv", names, block.mixer, config.stack.dim)
        yield from both({f"{ours}.mixer.out": f"{theirs}.self_attn.o_proj"})
        if isinstance(block.ffn, InputWeightedMoEConfig):
            inner = f"{theirs}.feed_forward"
            yield Rule((f"{ours}.ffn.router.weight",), (f"{inner}.router.weight",))
            both_halves = (f"{ours}.ffn.experts.gate.weight", f"{ours}.ffn.experts.up.weight")
            yield Halves(both_halves, (f"{inner}.experts.gate_up_proj",))
            yield Swapped((f"{ours}.ffn.experts.down.weight",), (f"{inner}.experts.down_proj",))
            yield from gated_rules(f"{ours}.ffn.shared", f"{inner}.shared_expert")
        else:
            yield from gated_rules(f"{ours}.ffn", f"{theirs}.feed_forward")
