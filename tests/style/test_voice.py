"""The voice of the project: no archaic words, no functions named by a bare participle, one meaning per class name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from .voice import ROOT, archaic_words, bare_participles, findings


def test_every_text_and_name_follows_the_voice() -> None:
    assert findings() == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# the tokens that it is to foretell\n", "foretell"),
        ("def shown(x): ...\n", "shown"),
        ("x = 1  # 65,536 targets (unless told)\n", "told"),
    ],
)
def test_an_odd_text_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, found: str) -> None:
    file = tmp_path / "some.py"
    file.write_text(text, encoding="utf-8")
    monkeypatch.setattr("tests.style.voice.ROOT", tmp_path)
    lines = [*archaic_words(file), *bare_participles(file)]
    assert len(lines) == 1
    assert found in lines[0]


def comment_ratio(folder: str) -> float:
    """Lines of docstrings and comments for each line of code in a folder of the package."""
    text, code = 0, 0
    for path in sorted((ROOT / "clearhead" / folder).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        docs = {number for node in docstrings(source) for number in range(node.lineno, (node.end_lineno or 0) + 1)}
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            if number in docs or line.lstrip().startswith("#"):
                text += 1
            else:
                code += 1
                text += "  # " in line
    return text / code


def docstrings(source: str) -> Iterator[ast.Constant]:
    """The docstrings of a module: any string that stands alone as a statement."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


@pytest.mark.parametrize(("folder", "least"), [("nn", 0.3), ("reference", 0.9)])
def test_engines_explain_themselves(folder: str, least: float) -> None:
    """The NumPy engine is a text to learn from, so it has about as many lines of explanation as of code."""
    assert comment_ratio(folder) >= least
