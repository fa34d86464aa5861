"""One catalogue: every sentence by its key, in English and in Simplified Chinese."""

from __future__ import annotations

import locale
import os
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from ..diagnostic import Diagnostic

LANGUAGES = ("en", "zh")


class Message(NamedTuple):
    text: str  # what is wrong
    advice: str  # what to do about it


def catalogue(language: str) -> ModuleType:
    return import_module(f"clearhead.checker.messages.{language}")


def language(wanted: str | None = None) -> str:
    """The one asked for, else that of the locale, else English."""
    if wanted in LANGUAGES:
        return wanted
    names = [os.environ.get(name, "") for name in ("LC_ALL", "LC_MESSAGES", "LANG")]
    spoken = next((name for name in names if name), None) or locale.getlocale()[0] or "en"
    return "zh" if spoken.lower().startswith(("zh", "chinese")) else "en"


def message(diagnostic: Diagnostic, language: str = "en") -> Message:
    tables = catalogue(language)
    text, advice = tables.DIAGNOSTICS[diagnostic.key]
    if diagnostic.engine == "numpy":
        advice = tables.NUMPY_ADVICE.get(diagnostic.key, advice)
    if diagnostic.part in ("causal_mask", "padding_mask"):
        advice = tables.MASK_MAKER_ADVICE.get(diagnostic.key, advice)
    values = Blank(diagnostic.values)
    return Message(text.format_map(values), advice.format_map(values))


class Blank(dict[str, object]):
    """Fills a missing value with "…"."""

    def __missing__(self, key: str) -> str:
        return "…"


def assumption(key: str, language: str = "en") -> str:
    return catalogue(language).ASSUMED[key]


def word(key: str, language: str = "en") -> str:
    return catalogue(language).WORDS[key]


def part_name(part: str, language: str = "en") -> str:
    return catalogue(language).PARTS[part]
