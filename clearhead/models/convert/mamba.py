"""Mamba as `transformers` stores it: filters and decays have channels first; ours have channels last."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from clearhead.configs import (
    BlockConfig,
    ConfigError,
    LMHeadConfig,
    MambaConfig,
    ModelConfig,
    SequenceModelConfig,
    StackConfig,
    TokenEmbeddingConfig,
)
from clearhead.models.mamba import mamba

from .rules import Array, Rule, Transposed, architecture, both, copies, with_fields

PREFIX = "backbone."
IGNORED = (r"lm_head\.weight",)
ARCHITECTURES = {"mamba": ("MambaModel", "MambaForCausalLM")}


@dataclass(frozen=True)
class Filters(Rule):
    """Converts a depthwise convolution kernel, stored as [channels, 1, tokens], to [tokens, channels]."""

    def gather(self, parts: list[Array]) -> list[Array]:
        return [parts[0].squeeze(1).T]

    def scatter(self, arrays: list[Array]) -> list[Array]:
        return [arrays[0].T[:, None]]


def from_hf(hf: Mapping[str, Any]) -> SequenceModelConfig:
    if hf.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"a mamba with the activation {hf['hidden_act']!r} instead of silu is not supported yet")
    dim, rank = hf["hidden_size"], hf.get("time_step_rank", "auto")
    mixer = MambaConfig(
        inner=hf.get("intermediate_size") or int(hf.get("expand", 2) * dim),
        state_dim=hf.get("state_size", 16),
        conv=hf.get("conv_kernel", 4),
        rank=-(-dim // 16) if rank == "auto" else rank,
        conv_bias=bool(hf.get("use_conv_bias", True)),
        bias=bool(hf.get("use_bias", False)),
    )
    config = mamba(
        dim=dim,
        layers=hf["num_hidden_layers"],
        vocabulary=hf["vocab_size"],
        mixer=mixer,
        eps=float(hf.get("layer_norm_epsilon", 1e-5)),
        tied=bool(hf.get("tie_word_embeddings", True)),
    )
    return with_fields(config, {"head": None}) if architecture(hf, "MambaForCausalLM") == "MambaModel" else config


def to_hf(config: ModelConfig, kind: str) -> dict[str, Any] | None:
    match config:
        case SequenceModelConfig(
            embedding=TokenEmbeddingConfig() as embedding,
            stack=StackConfig(pattern=(BlockConfig(mixer=MambaConfig() as mixer, ffn=None) as block, *_)) as stack,
            head=None | LMHeadConfig() as head,
        ) if mixer.inner is not None and mixer.inner % stack.dim == 0:
            return {
                "architectures": [ARCHITECTURES[kind][head is not None]],
                "model_type": kind,
                "vocab_size": embedding.vocabulary,
                "hidden_size": stack.dim,
                "num_hidden_layers": len(stack.blocks),
                "state_size": mixer.state_dim,
                "conv_kernel": mixer.conv,
                "expand": mixer.inner // stack.dim,
                "intermediate_size": mixer.inner,
                "time_step_rank": mixer.rank,
                "use_conv_bias": mixer.conv_bias,
                "use_bias": mixer.bias,
                "hidden_act": "silu",
                "layer_norm_epsilon": block.norm.eps,
                "residual_in_fp32": False,
                "tie_word_embeddings": head is None or head.tied,
                "bos_token_id": None,
                "eos_token_id": None,
                "pad_token_id": None,
            }
    return None


def rules(config: SequenceModelConfig, kind: str) -> Iterator[Rule]:
    yield from copies({"embedding.tokens.weight": "embeddings.weight", "stack.final_norm.weight": "norm_f.weight"})
    for i, block in enumerate(config.stack.blocks):
        assert isinstance(block.mixer, MambaConfig)
        ours, theirs = f"stack.blocks.{i}.mixer", f"layers.{i}.mixer"
        yield from copies({f"stack.blocks.{i}.mixer_residual.before.weight": f"layers.{i}.norm.weight"})
        projections = {f"{ours}.input": f"{theirs}.in_proj", f"{ours}.out": f"{theirs}.out_proj"}
        yield from both(projections, ("weight", "bias") if block.mixer.bias else ("weight",))
        yield from copies({f"{ours}.select.weight": f"{theirs}.x_proj.weight", f"{ours}.skip": f"{theirs}.D"})
        yield from both({f"{ours}.step": f"{theirs}.dt_proj"})
        yield Transposed((f"{ours}.decay",), (f"{theirs}.A_log",))
        yield Filters((f"{ours}.filter",), (f"{theirs}.conv1d.weight",))
        if block.mixer.conv_bias:
            yield Rule((f"{ours}.filter_bias",), (f"{theirs}.conv1d.bias",))
    if isinstance(config.head, LMHeadConfig) and not config.head.tied:
        yield Rule(("head.weight",), ("lm_head.weight",))
