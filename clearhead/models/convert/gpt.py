"""GPT-2 and GPT-1 as `transformers` stores them: matrices are [in, out], queries, keys and values in one."""

from collections.abc import Iterator, Mapping
from typing import Any

from clearhead.configs import SequenceModelConfig
from clearhead.models.gpt import gpt

from .rules import Rule, Transposed, activation, both, copies

PREFIX = "transformer."
IGNORED = (r"h\.\d+\.attn\.(masked_)?bias", r"lm_head\.weight")


def gpt2_config(hf: Mapping[str, Any]) -> SequenceModelConfig:
    return from_hf(hf, "pre", hf.get("activation_function", "gelu_new"))


def gpt1_config(hf: Mapping[str, Any]) -> SequenceModelConfig:
    # OpenAI's code calls the tanh form `gelu`
    return from_hf(hf, "post", {"gelu": "gelu_new"}.get(hf.get("afn", "gelu"), hf.get("afn", "gelu")))


def from_hf(hf: Mapping[str, Any], placement: Any, act: str) -> SequenceModelConfig:
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
    config = config.changed("stack.pattern.0.norm.eps", eps).changed("stack.pattern.0.ffn.activation", activation(act))
    return config if config.stack.final_norm is None else config.changed("stack.final_norm.eps", eps)


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
            yield Transposed(f"{our_name}.weight", (f"{their_name}.weight",))
