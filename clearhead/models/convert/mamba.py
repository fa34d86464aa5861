"""Mamba and Mamba-2 as `transformers` stores them: filters and decays have channels first; ours have channels last."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from clearhead.configs import (
    BlockConfig,
    ConfigError,
    LMHeadConfig,
    Mamba2Config,
    MambaConfig,
    MixerConfig,
    ModelConfig,
    RMSNormConfig,
    SequenceModelConfig,
    StackConfig,
    TokenEmbeddingConfig,
)
from clearhead.models.mamba import mamba

from .rules import Array, Rule, Transposed, architecture, both, copies, present, with_fields

PREFIX = "backbone."
IGNORED = (r"lm_head\.weight",)
ARCHITECTURES = {"mamba": ("MambaModel", "MambaForCausalLM"), "mamba2": ("Mamba2Model", "Mamba2ForCausalLM")}


@dataclass(frozen=True)
class Filters(Rule):
    """Converts a depthwise convolution kernel, stored as [channels, 1, tokens], to [tokens, channels]."""

    def gather(self, parts: list[Array]) -> list[Array]:
        return [parts[0].squeeze(1).T]

    def scatter(self, arrays: list[Array]) -> list[Array]:
        return [arrays[0].T[:, None]]


def from_hf(hf: Mapping[str, Any]) -> SequenceModelConfig:
    kind = hf["model_type"]
    if hf.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"a {kind} with the activation {hf['hidden_act']!r} instead of silu is not supported yet")
    headless, whole = ARCHITECTURES[kind]
    config = mamba(
        dim=hf["hidden_size"],
        layers=hf["num_hidden_layers"],
        vocabulary=hf["vocab_size"],
        mixer=mamba1_mixer(hf) if kind == "mamba" else mamba2_mixer(hf),
        eps=float(hf.get("layer_norm_epsilon", 1e-5)),
        tied=bool(hf.get("tie_word_embeddings", kind == "mamba")),
    )
    return with_fields(config, {"head": None}) if architecture(hf, whole) == headless else config


def mamba1_mixer(hf: Mapping[str, Any]) -> MambaConfig:
    dim, rank = hf["hidden_size"], hf.get("time_step_rank", "auto")
    return MambaConfig(
        inner=hf.get("intermediate_size") or int(hf.get("expand", 2) * dim),
        state_dim=hf.get("state_size", 16),
        conv=hf.get("conv_kernel", 4),
        rank=-(-dim // 16) if rank == "auto" else rank,
        conv_bias=bool(hf.get("use_conv_bias", True)),
        bias=bool(hf.get("use_bias", False)),
    )


def mamba2_mixer(hf: Mapping[str, Any]) -> Mamba2Config:
    least, most = hf.get("time_step_limit") or (0.0, None)
    if least or most not in (None, float("inf"), {"__float__": "Infinity"}):  # the last as `transformers` writes it
        raise ConfigError(f"mamba2 with the time_step_limit {hf['time_step_limit']} is not supported yet; (0, inf) is")
    return Mamba2Config(
        heads=hf["num_heads"],
        head_dim=hf.get("head_dim", 64),
        groups=hf.get("n_groups", 8),
        state_dim=hf.get("state_size", 128),
        conv=hf.get("conv_kernel", 4),
        conv_bias=bool(hf.get("use_conv_bias", True)),
        bias=bool(hf.get("use_bias", False)),
        norm=RMSNormConfig(eps=float(hf.get("layer_norm_epsilon", 1e-5))),
    )


def to_hf(config: ModelConfig, kind: str) -> dict[str, Any] | None:
    match config:
        case SequenceModelConfig(
            embedding=TokenEmbeddingConfig() as embedding,
            stack=StackConfig(
                pattern=(BlockConfig(mixer=MambaConfig() | Mamba2Config() as mixer, ffn=None) as block, *_)
            ) as stack,
            head=None | LMHeadConfig() as head,
        ) if (
            mixer.inner is not None
            and mixer.inner % stack.dim == 0
            and isinstance(mixer, Mamba2Config) == (kind == "mamba2")
        ):
            own: dict[str, Any] = (
                {"num_heads": mixer.heads, "head_dim": mixer.head_dim, "n_groups": mixer.groups}
                if (isinstance(mixer, Mamba2Config))
                else {"intermediate_size": mixer.inner, "time_step_rank": mixer.rank}
            )
            return own | {
                "architectures": [ARCHITECTURES[kind][head is not None]],
                "model_type": kind,
                "vocab_size": embedding.vocabulary,
                "hidden_size": stack.dim,
                "num_hidden_layers": len(stack.blocks),
                "state_size": mixer.state_dim,
                "conv_kernel": mixer.conv,
                "expand": mixer.inner // stack.dim,
                "use_conv_bias": mixer.conv_bias,
                "use_bias": mixer.bias,
                "hidden_act": "silu",
                "layer_norm_epsilon": block.norm.eps,
                "residual_in_fp32": False,
                "tie_word_embeddings": kind == "mamba" if head is None else head.tied,
                "bos_token_id": None,
                "eos_token_id": None,
                "pad_token_id": None,
            }
    return None


def mixer_rules(ours: str, theirs: str, mixer: MixerConfig) -> Iterator[Rule]:
    """The tensors of a Mamba or Mamba-2 layer; biases that it lacks are left to `present`."""
    yield from both({f"{ours}.input": f"{theirs}.in_proj", f"{ours}.out": f"{theirs}.out_proj"})
    yield Filters((f"{ours}.filter",), (f"{theirs}.conv1d.weight",))
    yield from copies({f"{ours}.filter_bias": f"{theirs}.conv1d.bias", f"{ours}.skip": f"{theirs}.D"})
    if isinstance(mixer, Mamba2Config):
        yield from copies({f"{ours}.decay": f"{theirs}.A_log", f"{ours}.step_bias": f"{theirs}.dt_bias"})
        yield Rule((f"{ours}.norm.weight",), (f"{theirs}.norm.weight",))
    else:
        yield Rule((f"{ours}.select.weight",), (f"{theirs}.x_proj.weight",))
        yield from both({f"{ours}.step": f"{theirs}.dt_proj"})
        yield Transposed((f"{ours}.decay",), (f"{theirs}.A_log",))
        norms = {"step_norm": "dt_layernorm", "write_norm": "b_layernorm", "read_norm": "c_layernorm"}
        yield from both({f"{ours}.{mine}": f"{theirs}.{their}" for mine, their in norms.items()})


def rules(config: SequenceModelConfig, kind: str) -> Iterator[Rule]:
    return present(config, all_rules(config))


def all_rules(config: SequenceModelConfig) -> Iterator[Rule]:
    yield from copies({"embedding.tokens.weight": "embeddings.weight", "stack.final_norm.weight": "norm_f.weight"})
    for i, block in enumerate(config.stack.blocks):
        ours, theirs = f"stack.blocks.{i}.mixer", f"layers.{i}.mixer"
        yield from copies({f"stack.blocks.{i}.mixer_residual.before.weight": f"layers.{i}.norm.weight"})
        yield from mixer_rules(ours, theirs, block.mixer)
    yield Rule(("head.weight",), ("lm_head.weight",))
