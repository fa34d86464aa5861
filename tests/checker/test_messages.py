"""One catalogue in two languages: the same keys, the same places to fill, and links that lead somewhere."""

import re
import string
from pathlib import Path

import pytest

from clearhead.checker.diagnostic import Diagnostic
from clearhead.checker.messages import LANGUAGES, catalogue, language, message
from clearhead.checker.mistakes import BY_PART, MISTAKES
from clearhead.checker.run import PARTS

ROOT = Path(__file__).parents[2]
TABLES = ("DIAGNOSTICS", "NUMPY_ADVICE", "MASK_MAKER_ADVICE", "ASSUMED", "PARTS", "WORDS")
SOURCES = [path.read_text(encoding="utf-8") for path in (ROOT / "clearhead" / "checker").rglob("*.py")]


def fields(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


@pytest.mark.parametrize("table", TABLES)
def test_languages_have_the_same_keys_and_fields(table: str) -> None:
    english, chinese = (getattr(catalogue(name), table) for name in LANGUAGES)
    assert list(english) == list(chinese)
    for key, text in english.items():
        for one, two in zip(*([t] if isinstance(t, str) else t for t in (text, chinese[key])), strict=True):
            assert fields(one) == fields(two), key
            assert one, key
            assert two, key


def test_every_diagnostic_has_a_text() -> None:
    assert set(catalogue("en").DIAGNOSTICS) == set(MISTAKES)
    assert set(PARTS) | {"file"} == set(catalogue("en").PARTS)


def test_every_key_in_the_code_is_known() -> None:
    keys = {key for text in SOURCES for key in re.findall(r"\.add\(\s*\"([a-z-]+)\"", text)}
    assumed = {key for text in SOURCES for key in re.findall(r"\.assume\(\s*\"([a-z_]+)\"", text)}
    assert len(keys) > 60
    assert keys <= set(MISTAKES)
    assert assumed <= set(catalogue("en").ASSUMED)


def slug(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", sorted({m.page for m in MISTAKES.values()} | set(BY_PART.values())))
def test_links_lead_somewhere(page: str) -> None:
    path, _, anchor = page.partition("#")
    text = (ROOT / path).read_text(encoding="utf-8")
    slugs = {slug(line.lstrip("#")) for line in text.splitlines() if line.startswith("#")}
    assert not anchor or anchor in slugs


@pytest.mark.parametrize("name", LANGUAGES)
def test_every_message_can_be_formatted(name: str) -> None:
    for key in MISTAKES:
        text, advice = message(Diagnostic("attention", "f", key, {"error": "E", "argument": "q"}), name)
        assert "{" not in text + advice or "{" in catalogue(name).DIAGNOSTICS[key][0]


def test_language_of_the_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert language() == "zh"
    assert language("en") == "en"
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    assert language() == "en"
