"""How byte-level BPE tokenizers split a text into words, under llama.cpp's names (`tokenizer.ggml.pre`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import Regex, pre_tokenizers

from .tokenizer import TokenizerError

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
DIGIT, DIGITS = r"\p{N}", r"\p{N}+"
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", DIGIT)
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")


@dataclass(frozen=True)
class WordRule:
    """Regular expressions that split a text one after the other, and options for merging the words."""

    splits: tuple[str, ...]
    ignore_merges: bool = False  # a word in the vocabulary is always one token, regardless of the merges
    begins: bool = False  # default if the file has no setting: texts begin with the bos token
    written: bool = True  # llama.cpp splits every text identically; if False, files are read but not written


WORD_RULES = {
    "gpt-2": WordRule((GPT2,)),
    "llama-bpe": WordRule((LLAMA3,), ignore_merges=True, begins=True),
    "dbrx": WordRule((LLAMA3,)),
    "qwen2": WordRule((QWEN2,)),
    "smollm": WordRule((DIGIT, GPT2)),
    "bloom": WordRule((BLOOM,)),
    "viking": WordRule((BLOOM, DIGIT)),
    "deepseek-coder": WordRule(DEEPSEEK_CODER, written=False),
    "deepseek-v3": WordRule(DEEPSEEK3),
    "falcon": WordRule(FALCON),
    "tekken": WordRule((TEKKEN,), ignore_merges=True, begins=True, written=False),
    "gpt-4o": WordRule((GPT4O,), written=False),
}
"""The rule of each name. llama.cpp approximates tekken, gpt-4o and deepseek-coder, so those are only read."""
ALIASES = {
    "gpt-2": "phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat mellum modern-bert roberta-bpe mpt olmo jais",
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    "dbrx": "smaug-bpe chatglm-bpe glm4",
    "qwen2": "stablelm2 hunyuan megrez deepseek-r1-qwen grok-2",
    "smollm": "starcoder refact command-r codeshell exaone minerva-7b",
    "bloom": "poro-chat gpt3-finnish",
    "deepseek-v3": "hunyuan-dense",
    "gpt-4o": "llama4",
}
WORD_RULES |= {alias: WORD_RULES[name] for name, aliases in ALIASES.items() for alias in aliases.split()}


def find_rule(name: str, path: object) -> WordRule:
    if name not in WORD_RULES:
        known = ", ".join(sorted(WORD_RULES))
        raise TokenizerError(f"{path}: the pre-tokenizer {name!r} is not supported; supported: {known}")
    return WORD_RULES[name]


def split_words(rule: WordRule) -> pre_tokenizers.PreTokenizer:
    """Build the pre-tokenizer of a rule. Its last step maps bytes to characters."""
    steps: list[Any] = [pre_tokenizers.Split(Regex(split), "isolated") for split in rule.splits]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def name_rule(tokenizer: tokenizers.Tokenizer, whole: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for a tokenizer's pre-tokenizer. Raise if llama.cpp has no identical one.

    whole  the contents of `tokenizer.json`
    """
    splits = regex_splits(whole["pre_tokenizer"])
    names = [name for name, rule in WORD_RULES.items() if rule.splits == splits and rule.written]
    if not names:
        raise TokenizerError(
            "cannot write this tokenizer to GGUF: llama.cpp has no pre-tokenizer that splits words by "
            + " then ".join(repr(split) for split in splits)
        )
    ignore = bool(whole["model"].get("ignore_merges"))
    same = [name for name in names if WORD_RULES[name].ignore_merges == ignore]
    if not same and not merges_reach_all(tokenizer, whole):
        raise TokenizerError(
            f"cannot write this tokenizer to GGUF: ignore_merges is {ignore}, but llama.cpp's {names[0]} has it "
            f"{'on' if not ignore else 'off'}"
        )
    return (same or names)[0]


def merges_reach_all(tokenizer: tokenizers.Tokenizer, whole: Mapping[str, Any]) -> bool:
    """Return whether the merges turn every vocabulary word into one token, so `ignore_merges` makes no difference."""
    model = dict(whole["model"], ignore_merges=False)
    bare = tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", "model": model}))
    return all(len(bare.encode(word).ids) == 1 for word in model["vocab"])


def regex_splits(pre: Mapping[str, Any]) -> tuple[str, ...]:
    """Convert a byte-level pre-tokenizer to successive splitting regular expressions. Raise for any other step."""
    steps = pre.get("pretokenizers", [pre])
    if [step["type"] for step in steps].index("ByteLevel") != len(steps) - 1:
        raise TokenizerError("cannot write this tokenizer to GGUF: it changes words after they became bytes")
    splits: list[str] = []
    for step in steps:
        match step:
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": regex}:
                splits += [GPT2] if regex else []
            case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}:
                splits.append(regex)
            case {"type": "Digits", "individual_digits": each}:
                splits.append(DIGIT if each else DIGITS)
            case {"type": kind}:
                detail = {"ByteLevel": " with add_prefix_space", "Split": f" ({step.get('behavior')})"}.get(kind, "")
                raise TokenizerError(
                    f"cannot write this tokenizer to GGUF: llama.cpp has no pre-tokenizer {kind}{detail}"
                )
    return tuple(splits)
