"""GPT-2 and GPT-1 as `transformers` stores them: matrices are [in, out]; one matrix holds queries, keys and values."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    ClassHeadConfig,
    ConfigError,
    FeedForwardConfig,
    LearnedConfig,
    LMHeadConfig,
    ModelConfig,
    SequenceModelConfig,
    StackConfig,
    TokenEmbeddingConfig,
)
from clearhead.models.gpt import gpt

from .rules import (
    Rule,
    Transposed,
    activation,
    both,
    copies,
    decoder_class,
    decoder_head,
    decoder_head_rules,
    hf_activation,
    labels,
    with_fields,
)

PREFIX = "transformer."
IGNORED = (r"h\.\d+\.attn\.(masked_)?bias", r"lm_head\.weight")
GPT2 = ("GPT2Model", "GPT2LMHeadModel", "GPT2ForSequenceClassification")
GPT1 = ("OpenAIGPTModel", "OpenAIGPTLMHeadModel", "OpenAIGPTForSequenceClassification")


def gpt2_config(hf: Mapping[str, Any]) -> SequenceModelConfig:
    if not hf.get("scale_attn_weights", True) or hf.get("scale_attn_by_inverse_layer_idx"):
        raise ConfigError("gpt2 with another scale of the scores than 1/√K is not supported yet")
    return from_hf(hf, GPT2, "pre", hf.get("activation_function", "gelu_new"))


def gpt1_config(hf: Mapping[str, Any]) -> SequenceModelConfig:
    # OpenAI's code calls the tanh form `gelu`
    return from_hf(hf, GPT1, "post", {"gelu": "gelu_new"}.get(hf.get("afn", "gelu"), hf.get("afn", "gelu")))


def from_hf(hf: Mapping[str, Any], architectures: tuple[str, ...], placement: Any, act: str) -> SequenceModelConfig:
    config = gpt(
        dim=hf["n_embd"],
        layers=hf["n_layer"],
        heads=hf["n_head"],
        vocabulary=hf["vocab_size"],
        length=hf["n_positions"],
        hidden=hf.get("n_inner"),
        placement=placement,
    )
    eps = float(hf.get("layer_norm_epsilon", 1e-5))
    fields: dict[str, Any] = {
        "embedding.dropout": hf.get("embd_pdrop", 0.1),
        "stack.pattern.0.mixer.dropout": hf.get("attn_pdrop", 0.1),
        "stack.pattern.0.dropout": hf.get("resid_pdrop", 0.1),
        "stack.pattern.0.norm.eps": eps,
        "stack.pattern.0.ffn.activation": activation(act),
    }
    if config.stack.final_norm is not None:
        fields["stack.final_norm.eps"] = eps
    head = decoder_head(hf, architectures, bool(hf.get("tie_word_embeddings", True)))
    return replace(with_fields(config, fields), head=head)


def gpt2_to_hf(config: ModelConfig) -> dict[str, Any] | None:
    hf = to_hf(config, GPT2)
    if hf is None:
        return None
    act, hidden = hf.pop("act"), hf.pop("hidden")
    return hf | {
        "model_type": "gpt2",
        "n_inner": None if hidden == 4 * hf["n_embd"] else hidden,
        "activation_function": "gelu_new" if act == "gelu_tanh" else hf_activation(act),
    }


def gpt1_to_hf(config: ModelConfig) -> dict[str, Any] | None:
    hf = to_hf(config, GPT1)
    names = {"gelu_tanh": "gelu", "relu": "relu", "silu": "silu"}
    if hf is None or hf.pop("hidden") != 4 * hf["n_embd"] or (act := hf.pop("act")) not in names:
        return None
    return hf | {"model_type": "openai-gpt", "afn": names[act]}


def to_hf(config: ModelConfig, architectures: tuple[str, ...]) -> dict[str, Any] | None:
    """Return the fields that both share, and `act` and `hidden`, which the two name differently."""
    match config:
        case SequenceModelConfig(
            embedding=TokenEmbeddingConfig(position=LearnedConfig(length=length)) as embedding,
            stack=StackConfig(
                pattern=(BlockConfig(mixer=AttentionConfig() as mixer, ffn=FeedForwardConfig() as ffn) as block, *_)
            ) as stack,
            head=None | LMHeadConfig() | ClassHeadConfig() as head,
        ):
            return {
                "architectures": [decoder_class(architectures, head)],
                "vocab_size": embedding.vocabulary,
                "n_positions": length,
                "n_embd": stack.dim,
                "n_layer": len(stack.blocks),
                "n_head": mixer.heads,
                "hidden": ffn.hidden,
                "act": ffn.activation,
                "layer_norm_epsilon": block.norm.eps,
                "embd_pdrop": embedding.dropout,
                "attn_pdrop": mixer.dropout,
                "resid_pdrop": block.dropout,
                "tie_word_embeddings": not isinstance(head, LMHeadConfig) or head.tied,
                "bos_token_id": None,
                "eos_token_id": None,
                **labels(head),
            }
    return None


def gpt2_rules(config: SequenceModelConfig) -> Iterator[Rule]:
    yield from copies({"embedding.tokens.weight": "wte.weight", "embedding.position.weight": "wpe.weight"})
    yield from both({"stack.final_norm": "ln_f"})
    yield from block_rules(config, "before")


def gpt1_rules(config: SequenceModelConfig) -> Iterator[Rule]:
    tables = {"embedding.tokens": "tokens_embed", "embedding.position": "positions_embed"}
    yield from both(tables, ("weight",))
    yield from block_rules(config, "after")


def block_rules(config: SequenceModelConfig, place: str) -> Iterator[Rule]:
    for i in range(len(config.stack.blocks)):
        ours, theirs = f"stack.blocks.{i}", f"h.{i}"
        norms = {f"{ours}.mixer_residual.{place}": f"{theirs}.ln_1", f"{ours}.ffn_residual.{place}": f"{theirs}.ln_2"}
        yield from both(norms)
        matrices = {
            f"{ours}.mixer.qkv": f"{theirs}.attn.c_attn",
            f"{ours}.mixer.out": f"{theirs}.attn.c_proj",
            f"{ours}.ffn.up": f"{theirs}.mlp.c_fc",
            f"{ours}.ffn.down": f"{theirs}.mlp.c_proj",
        }
        yield from both(matrices, ("bias",))
        for our_name, their_name in matrices.items():
            yield Transposed((f"{our_name}.weight",), (f"{their_name}.weight",))
    yield from decoder_head_rules(config.head)
