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
CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴ"
    "ᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓"
    "𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
"""Letters with an upper and a lower case, which deepseek-llm lists instead of naming their class."""
DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?[{CASED}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-퟿]+",
    DIGITS,
)
SPARK = (*DEEPSEEK3[:2], DEEPSEEK3[2].replace("]+[\r\n]*|\\s*[\r\n]+", "]+|[\r\n]"), DIGIT)
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, DIGITS, "[0-9][0-9][0-9]")
MINICPM = (r"\p{N}{1,3}", LLAMA3.replace(r"\p{N}{1,3}", DIGITS))
SPACES = "".join(rf"\s{{{2**power}}}(?!\S)|" for power in range(9, 1, -1)) + r"\s{1,2}(?!\S)|\s{1}"
JAIS2 = LLAMA3.replace(r"\s+(?!\S)|\s+", SPACES)
QWEN35 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
BAILING = QWEN2.replace(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'(?i:[sdmt]|ll|ve|re)").replace(r"\s*[\r\n]+", r"\s*[\r\n]")
SEED_CODER = QWEN2.replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+")
UFAKZEKA = QWEN2.removeprefix("(?i:'s|'t|'re|'ve|'m|'ll|'d)|")
EXAONE_MOE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
HAN_UPPER, HAN_LOWER = (f"[{letters[1:-1]}&&[^\\p{{Han}}]]" for letters in (UPPER, LOWER))
KIMI = r"\p{Han}+|" + GPT4O.replace(UPPER, HAN_UPPER).replace(LOWER, HAN_LOWER).replace(r"[\r\n/]*", r"[\r\n]*")
YOUTU = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
    GPT4O.replace(r"\p{N}{1,3}", DIGIT),
)
TINY_AYA = (r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O)
AFMOE = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
    DEEPSEEK3[2],
)
CHAMELEON = (
    "<sentinel:[0-9]+>",
    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    DIGIT,
    r"[\p{P}!-/:-@\[-`{-~]",
    GPT2,
)


@dataclass(frozen=True)
class WordRule:
    """Regular expressions that split a text one after the other, and options for merging the words."""

    splits: tuple[str, ...]
    ignore_merges: bool = False  # a word in the vocabulary is always one token, regardless of the merges
    begins: bool = False  # default if the file has no setting: texts begin with the bos token
    written: bool = True  # llama.cpp splits every text identically; if False, files are read but not written


WORD_RULES = {
    "default": WordRule(DEFAULT),
    "gpt-2": WordRule((GPT2,)),
    "llama-bpe": WordRule((LLAMA3,), ignore_merges=True, begins=True),
    "glm4": WordRule((LLAMA3,), ignore_merges=True),
    "dbrx": WordRule((LLAMA3,)),
    "qwen2": WordRule((QWEN2,)),
    "qwen35": WordRule((QWEN35,)),
    "smollm": WordRule((DIGIT, GPT2)),
    "bloom": WordRule((BLOOM,)),
    "viking": WordRule((BLOOM, DIGIT)),
    "deepseek-llm": WordRule(DEEPSEEK_LLM, written=False),
    "deepseek-coder": WordRule(DEEPSEEK_CODER, written=False),
    "deepseek-v3": WordRule(DEEPSEEK3),
    "spark2_5": WordRule(SPARK),
    "falcon": WordRule(FALCON),
    "minicpm5": WordRule(MINICPM, ignore_merges=True),
    "jais-2": WordRule((JAIS2,)),
    "bailingmoe": WordRule((BAILING,)),
    "seed-coder": WordRule((SEED_CODER,)),
    "ufakzeka": WordRule((UFAKZEKA,)),
    "laguna": WordRule((r"[^\n]+|[\n]+", QWEN2)),
    "exaone-moe": WordRule((EXAONE_MOE,)),
    "superbpe": WordRule((DIGITS, r"(?=(\d{3})+(?!\d))"), written=False),
    "kimi-k2": WordRule((KIMI,), written=False),
    "youtu": WordRule(YOUTU, ignore_merges=True),
    "tiny_aya": WordRule(TINY_AYA, written=False),
    "afmoe": WordRule(AFMOE, written=False),
    "chameleon": WordRule(CHAMELEON, begins=True),
    "tekken": WordRule((TEKKEN,), ignore_merges=True, begins=True, written=False),
    "gpt-4o": WordRule((GPT4O,), written=False),
    "granite-embed-multi-97m": WordRule((GPT4O,), ignore_merges=True, written=False),
}
"""The rule of each name of llama.cpp, which approximates some; those are read exactly, but not written."""
ALIASES = {
    "gpt-2": "phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code gigachat a.x-4.0 mellum modern-bert "
    "roberta-bpe mpt olmo jais trillion granite-docling exaone4",
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    "glm4": "glm5",
    "dbrx": "smaug-bpe chatglm-bpe",
    "qwen2": "stablelm2 hunyuan megrez deepseek-r1-qwen grok-2 kormo f2llmv2 solar-open",
    "smollm": "starcoder refact command-r codeshell exaone minerva-7b mellum2",
    "bloom": "poro-chat gpt3-finnish",
    "deepseek-v3": "hunyuan-dense joyai-llm hy_v4",
    "bailingmoe": "bailingmoe2 llada-moe",
    "tiny_aya": "cohere2moe",
    "gpt-4o": "llama4 kanana2 talkie minimax-m2",
}
WORD_RULES |= {alias: WORD_RULES[name] for name, aliases in ALIASES.items() for alias in aliases.split()}


class UnknownTokenizer(TokenizerError):
    """A GGUF file has a tokenizer of a kind that is not supported."""


def find_rule(name: str, path: object) -> WordRule:
    if name not in WORD_RULES:
        known = ", ".join(sorted(WORD_RULES))
        raise UnknownTokenizer(f"{path}: the pre-tokenizer {name!r} is not supported; supported: {known}")
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
