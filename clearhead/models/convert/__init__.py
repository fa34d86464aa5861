"""Other people's checkpoints: one file per family, names and layouts both ways."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from clearhead.configs import ConfigError, ModelConfig
from clearhead.configs.base import nearest

from . import bert, deepseek, gpt, llama, marian, vit
from .rules import Array, Rule


class CheckpointError(ValueError):
    """A checkpoint that does not fit its config: the message lists what is missing, left over or misshapen."""


@dataclass(frozen=True)
class Family:
    """What is known of one `model_type`."""

    config: Callable[[Mapping[str, Any]], ModelConfig]
    rules: Callable[[Any], Iterable[Rule]]
    prefix: str  # of the base model's tensors, absent where the base model was saved alone
    ignored: tuple[str, ...]  # tensors that say nothing new: buffers, and copies of tied weights

    def ours(self, tensors: Mapping[str, Array], config: ModelConfig) -> dict[str, Array]:
        """Our named weights from theirs; anything missing, left over or misshapen is an error."""
        theirs = {name.removeprefix(self.prefix): array for name, array in tensors.items()}
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


FAMILIES = {
    "gpt2": Family(gpt.gpt2_config, gpt.gpt2_rules, gpt.PREFIX, gpt.IGNORED),
    "openai-gpt": Family(gpt.gpt1_config, gpt.gpt1_rules, gpt.PREFIX, gpt.IGNORED),
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "mixtral"),
        Family(llama.from_hf, llama.rules, llama.PREFIX, llama.IGNORED),
    ),
    "bert": Family(bert.from_hf, bert.rules, bert.PREFIX, bert.IGNORED),
    "vit": Family(vit.from_hf, vit.rules, vit.PREFIX, vit.IGNORED),
    "marian": Family(marian.from_hf, marian.rules, marian.PREFIX, marian.IGNORED),
    "deepseek_v2": Family(deepseek.from_hf, deepseek.rules, deepseek.PREFIX, deepseek.IGNORED),
}


def family(hf: Mapping[str, Any]) -> Family:
    kind = hf.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(f"the model_type {kind!r} is not known{nearest(kind, FAMILIES)}")
    return FAMILIES[kind]


def listing(what: str, names: list[str], most: int = 8) -> str:
    """`missing 12 tensors: a, b, …`, or nothing."""
    if not names:
        return ""
    shown = ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
    return f"{what} {len(names)} tensor{'s' if len(names) > 1 else ''}: {shown}"
