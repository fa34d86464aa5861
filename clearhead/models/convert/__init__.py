"""Checkpoint families of `transformers`: one file each, with names and layouts in both directions."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from clearhead.configs import ConfigError, ModelConfig
from clearhead.configs.base import nearest

from . import (
    albert,
    bert,
    deberta,
    deepseek,
    distilbert,
    electra,
    gemma,
    gpt,
    hybrid,
    llama,
    llama4,
    mamba,
    modernbert,
    mpnet,
    parallel,
    plain,
    roberta,
    seq2seq,
    t5,
    vit,
    whisper,
)
from .differences import differences
from .rules import Array, Rule

OUTSIDE = (
    "lm_head",
    "embed_out",
    "cls",
    "classifier",
    "qa_outputs",
    "score",
    "predictions",
    "final_logits_bias",
    "vocab_transform",
    "vocab_layer_norm",
    "vocab_projector",
    "pre_classifier",
    "generator_predictions",
    "generator_lm_head",
)
"""First words of tensors that belong to a head, and so have no prefix of the base model."""


OTHER_HEADS = (*OUTSIDE, "pooler", "qa_outputs", "seq_relationship", "discriminator_predictions")
"""First words of tensors of other heads, which a checkpoint may have besides the one that its config names."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded or saved; the message lists what is missing, unknown or misshapen."""


@dataclass(frozen=True)
class Family:
    """How one `model_type` is read and written."""

    from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    to_hf: Callable[[ModelConfig], dict[str, Any] | None]  # takes a resolved config
    rules: Callable[[Any], Iterable[Rule]]
    prefix: str  # of the base model's tensors; absent if the base model was saved without a head
    ignored: tuple[str, ...]  # patterns of tensors to skip: buffers, and copies of tied weights
    architectures: tuple[str, ...]  # classes of `transformers`, the one without a head first
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names of tensors -> those in the rules
    outside: tuple[str, ...] = OUTSIDE  # first words of the head's tensors

    def config(self, hf: Mapping[str, Any]) -> ModelConfig:
        """The config that a `config.json` describes."""
        named = hf.get("architectures") or self.architectures
        if named[0] not in self.architectures:
            raise ConfigError(f"the architecture {named[0]!r} is not supported{nearest(named[0], self.architectures)}")
        try:
            return self.from_hf(hf)
        except KeyError as error:
            raise ConfigError(f"config.json of a {hf.get('model_type')} lacks {error}") from None

    def hf(self, config: ModelConfig) -> dict[str, Any] | None:
        """The `config.json` of a resolved config; None if the config is not of this family. Dropout may differ."""
        hf = self.to_hf(config)
        try:
            return None if hf is None or differences(config, self.from_hf(hf)) else hf
        except ConfigError:
            return None

    def ours(self, tensors: Mapping[str, Array], config: ModelConfig) -> dict[str, Array]:
        """Our weights from their tensors. Anything missing, unknown or misshapen is an error."""
        theirs = {current_name(name.removeprefix(self.prefix)): array for name, array in tensors.items()}
        rules = list(self.rules(config))
        wanted = {name for rule in rules for name in rule.theirs}
        for old, new in self.aliases.items():
            if new in wanted and new not in theirs and old in theirs:
                theirs[new] = theirs.pop(old)
        missing = sorted(wanted - theirs.keys())
        extra = sorted(n for n in theirs.keys() - wanted if not any(re.fullmatch(p, n) for p in self.ignored))
        if spare := [name for name in extra if name.split(".")[0] in OTHER_HEADS]:
            extra = [name for name in extra if name not in spare]
            warnings.warn(f"{listing('ignored', spare, 3)}; they belong to another head", stacklevel=3)
        if missing or extra:
            raise CheckpointError("; ".join(filter(None, (listing("missing", missing), listing("unknown", extra)))))
        shapes = config.weights()
        weights, misshapen = {}, []
        for rule in rules:
            try:
                arrays = rule.gather([theirs[name] for name in rule.theirs])
            except (RuntimeError, ValueError, IndexError):
                misshapen.append(f"{', '.join(rule.theirs)} cannot be joined to {', '.join(rule.ours)}")
                continue
            for name, array in zip(rule.ours, arrays, strict=True):
                if tuple(array.shape) != shapes[name]:
                    found = tuple(array.shape)
                    misshapen.append(f"{rule.theirs[0]} gives {name} as {found}, not {shapes[name]}")
                weights[name] = array
        if misshapen:
            raise CheckpointError(listing("misshapen", misshapen))
        return weights

    def theirs(self, weights: Mapping[str, Array], config: ModelConfig, architecture: str) -> dict[str, Array]:
        """Their tensors from our weights, as views if the layouts allow it."""
        alone = architecture == self.architectures[0] and len(self.architectures) > 1
        return {
            name if alone or name.split(".")[0] in self.outside else self.prefix + name: array
            for rule in self.rules(config)
            for name, array in zip(rule.theirs, rule.scatter([weights[name] for name in rule.ours]), strict=True)
        }


def current_name(name: str) -> str:
    """The current name of a tensor: BERT's first checkpoints use TensorFlow's names for norms."""
    return re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name))


def own_rules(config: ModelConfig) -> Iterator[Rule]:
    """Every weight under its own name."""
    return (Rule((name,), (name,)) for name in config.weights())


def from_own(hf: Mapping[str, Any]) -> ModelConfig:
    raise ConfigError("config.json has model_type clearhead, so the config is in clearhead.json")


OWN = Family(from_own, lambda config: None, own_rules, "", (), ("SequenceModel", "EncoderDecoder"))
"""Our own format, for architectures that `transformers` does not have."""


FAMILIES = {
    "gpt2": Family(gpt.gpt2_config, gpt.gpt2_to_hf, gpt.gpt2_rules, gpt.PREFIX, gpt.IGNORED, gpt.GPT2),
    "openai-gpt": Family(gpt.gpt1_config, gpt.gpt1_to_hf, gpt.gpt1_rules, gpt.PREFIX, gpt.IGNORED, gpt.GPT1),
    **{
        kind: Family(
            file.from_hf,
            partial(file.to_hf, kind=kind),
            partial(file.rules, kind=kind),
            getattr(file, "PREFIXES", {}).get(kind) or file.PREFIX,
            file.IGNORED,
            names,
            getattr(file, "ALIASES", {}),
            getattr(file, "OUTSIDE", OUTSIDE),
        )
        for file in (
            bert,
            llama,
            llama4,
            gemma,
            deepseek,
            distilbert,
            electra,
            roberta,
            mpnet,
            modernbert,
            deberta,
            albert,
            vit,
            seq2seq,
            whisper,
            t5,
            mamba,
            hybrid,
            parallel,
            plain,
        )
        for kind, names in file.ARCHITECTURES.items()
    },
}
"""By `model_type`. A config that several families have is saved as the first of them, unless it was loaded from one."""


def family(hf: Mapping[str, Any]) -> Family:
    kind = hf.get("model_type")
    if kind == "clearhead":
        return OWN
    if kind is None:
        raise ConfigError(
            "config.json has no model_type; name the family: clearhead convert FOLDER OUT --family bert "
            "(in Python: load(…, family='bert'))"
        )
    if kind not in FAMILIES:
        raise ConfigError(
            f"the model_type {kind!r} is not supported{closest_family(kind)}; "
            f"supported: {', '.join(sorted(FAMILIES))}. "
            "If the model computes what one of these does, name it: clearhead convert FOLDER OUT --family NAME"
        )
    return FAMILIES[kind]


def closest_family(kind: str) -> str:
    """`; the nearest supported family is llama`, if the name is a variant of one: mllama, llama4_text, qwen2_5_vl."""
    bare = re.sub(r"[\W\d_]+|text|vl|moe|vision|model|for|causal|lm", "", kind.lower())
    bases = {re.sub(r"[\W\d_]+|text|moe", "", name): name for name in sorted(FAMILIES, reverse=True)}
    return f"; the nearest supported family is {bases[bare]}" if bare in bases else ""


def to_hf(config: ModelConfig, preferred: str | None = None) -> dict[str, Any] | None:
    """The `config.json` from which `transformers` builds this model; None if it has no such architecture.

    preferred  the family that the model was loaded from, which is tried first
    """
    resolved = config.resolve()
    kinds = sorted(FAMILIES, key=lambda kind: kind != preferred)
    return next((hf for kind in kinds if (hf := FAMILIES[kind].hf(resolved)) is not None), None)


def listing(what: str, names: list[str], most: int = 8) -> str:
    """`missing 12 tensors: a, b, …`, or nothing."""
    if not names:
        return ""
    shown = ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
    return f"{what} {len(names)} tensor{'s' if len(names) > 1 else ''}: {shown}"
