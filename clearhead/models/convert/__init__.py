"""Other people's checkpoints: one file per family, names and layouts both ways."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from clearhead.configs import ConfigError, ModelConfig
from clearhead.configs.base import nearest

from . import albert, bert, deepseek, gemma, gpt, llama, mamba, marian, vit
from .resolve import differences, spelled_out
from .rules import Array, Rule

OUTSIDE = ("lm_head", "cls", "classifier", "score", "predictions", "final_logits_bias")
"""Tensors of heads, which stand beside the base model and not in it."""


class CheckpointError(ValueError):
    """A checkpoint that does not fit its config: the message lists what is missing, left over or misshapen."""


@dataclass(frozen=True)
class Family:
    """What is known of one `model_type`."""

    from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    to_hf: Callable[[ModelConfig], dict[str, Any] | None]  # of a config that `spelled_out` has gone over
    rules: Callable[[Any], Iterable[Rule]]
    prefix: str  # of the base model's tensors, absent where the base model was saved alone
    ignored: tuple[str, ...]  # tensors that say nothing new: buffers, and copies of tied weights
    architectures: tuple[str, ...]  # classes of `transformers`

    def config(self, hf: Mapping[str, Any]) -> ModelConfig:
        """Our config of their `config.json`."""
        named = hf.get("architectures") or self.architectures
        if named[0] not in self.architectures:
            raise ConfigError(f"the architecture {named[0]!r} is not known{nearest(named[0], self.architectures)}")
        try:
            return self.from_hf(hf)
        except KeyError as error:
            raise ConfigError(f"config.json of a {hf.get('model_type')} lacks {error}") from None

    def hf(self, spelled: ModelConfig) -> dict[str, Any] | None:
        """Their `config.json` of our config, spelled out; None where it is not of this family, dropout aside."""
        hf = self.to_hf(spelled)
        try:
            return None if hf is None or differences(spelled, self.from_hf(hf)) else hf
        except ConfigError:
            return None

    def ours(self, tensors: Mapping[str, Array], config: ModelConfig) -> dict[str, Array]:
        """Our named weights from theirs; anything missing, left over or misshapen is an error."""
        theirs = {modern(name.removeprefix(self.prefix)): array for name, array in tensors.items()}
        rules = list(self.rules(config))
        wanted = {name for rule in rules for name in rule.theirs}
        missing = sorted(wanted - theirs.keys())
        extra = sorted(n for n in theirs.keys() - wanted if not any(re.fullmatch(p, n) for p in self.ignored))
        if missing or extra:
            raise CheckpointError("; ".join(filter(None, (listing("missing", missing), listing("unknown", extra)))))
        shapes = config.weights()
        weights, misshapen = {}, []
        for rule in rules:
            try:
                array = rule.gather([theirs[name] for name in rule.theirs])
            except (RuntimeError, ValueError):
                misshapen.append(f"{', '.join(rule.theirs)} do not go together as {rule.ours}")
                continue
            if tuple(array.shape) != shapes[rule.ours]:
                found = tuple(array.shape)
                misshapen.append(f"{rule.theirs[0]} gives {rule.ours} as {found}, not {shapes[rule.ours]}")
            weights[rule.ours] = array
        if misshapen:
            raise CheckpointError(listing("misshapen", misshapen))
        return weights

    def theirs(self, weights: Mapping[str, Array], config: ModelConfig, architecture: str) -> dict[str, Array]:
        """Their named tensors from our weights: views, nothing is copied."""
        alone = architecture == self.architectures[0] and len(self.architectures) > 1
        return {
            name if alone or name.split(".")[0] in OUTSIDE else self.prefix + name: array
            for rule in self.rules(config)
            for name, array in zip(rule.theirs, rule.scatter(weights[rule.ours]), strict=True)
        }


def modern(name: str) -> str:
    """Norms of BERT's first checkpoints are still called as TensorFlow did."""
    return re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name))


def own_rules(config: ModelConfig) -> Iterator[Rule]:
    """Every weight under its own name."""
    return (Rule(name, (name,)) for name in config.weights())


def from_own(hf: Mapping[str, Any]) -> ModelConfig:
    raise ConfigError("a config.json whose model_type is clearhead says no more: the config is in clearhead.json")


OWN = Family(from_own, lambda config: None, own_rules, "", (), ("SequenceModel", "EncoderDecoder"))
"""An architecture that nobody else has."""

FAMILIES = {
    "gpt2": Family(gpt.gpt2_config, gpt.gpt2_to_hf, gpt.gpt2_rules, gpt.PREFIX, gpt.IGNORED, gpt.GPT2),
    "openai-gpt": Family(gpt.gpt1_config, gpt.gpt1_to_hf, gpt.gpt1_rules, gpt.PREFIX, gpt.IGNORED, gpt.GPT1),
    **{
        kind: Family(file.from_hf, partial(file.to_hf, kind=kind), file.rules, file.PREFIX, file.IGNORED, names)
        for file in (llama, gemma, deepseek)
        for kind, names in file.ARCHITECTURES.items()
    },
    **{
        kind: Family(file.from_hf, file.to_hf, file.rules, file.PREFIX, file.IGNORED, file.ARCHITECTURES)
        for kind, file in {"bert": bert, "albert": albert, "vit": vit, "marian": marian, "mamba": mamba}.items()
    },
}


def family(hf: Mapping[str, Any]) -> Family:
    kind = hf.get("model_type")
    if kind == "clearhead":
        return OWN
    if kind not in FAMILIES:
        raise ConfigError(f"the model_type {kind!r} is not known{nearest(kind, FAMILIES)}")
    return FAMILIES[kind]


def to_hf(config: ModelConfig) -> dict[str, Any] | None:
    """The `config.json` by which `transformers` builds this very model; None where it has no such architecture."""
    spelled = spelled_out(config)
    return next((hf for kind in FAMILIES.values() if (hf := kind.hf(spelled)) is not None), None)


def listing(what: str, names: list[str], most: int = 8) -> str:
    """`missing 12 tensors: a, b, …`, or nothing."""
    if not names:
        return ""
    shown = ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
    return f"{what} {len(names)} tensor{'s' if len(names) > 1 else ''}: {shown}"
