"""List text and names that do not follow the voice of the project: `python -m tests.style.voice [PATH…]`.

It looks for archaic words in code, docs and tests, for functions named by a bare participle, and for class names that
are defined more than once in the package. `test_voice.py` asserts that it finds nothing.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("clearhead", "tests", "docs", "benchmarks", "examples", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
OWN = {"tests/style/voice.py", "tests/style/test_voice.py"}
ARCHAIC = {
    r"\bforesee(s|n|ing)?\b|\bforesaw\b|\bforetell(s|ing)?\b|\bforetold\b": "predict",
    r"\btold\b": "print, report, predict, output",
    r"\bif not said\b|\bwhere nothing is said\b": "default",
    r"\bis none of\b|\bis no more\b|\bnone is\b|\bso that none\b": "say it positively",
    r"\bwhosoever\b|\bwhoever\b|\bwho(?= (asks|wants|needs|reads|looks|waits|has none))": "the caller, the user, you",
    r"\b(is|are|was|were|be) said\b|\bsays so of\b|\bas (it|they) (is|are) said\b": "say who says it",
    r"\bnot read yet\b|\bis not read\b|\bare not read\b": "not supported",
    r"\bgo(es|ing)? on with\b|\bgone on with\b|\bwent on with\b": "continue, resume",
    r"\bbegun anew\b|\bmade anew\b|\bwritten anew\b|\banew\b": "again",
    r"\bthe very (same|weights|tokens|one|text|model|bytes)\b": "exactly",
    r"\btells? apart\b": "distinguish",
    r"\bof which none\b|\bof whom\b|\bwhereof\b|\bthereof\b|\bhence\b|\bthereby\b": "two sentences",
    r"\bas they are, if\b|\bleft as (it is|it was|they are)\b": "unchanged",
    r"\bof no use to\b|\bis of use\b": "unused",
    r"\bfor want of\b|\bin want of\b": "without",
    r"\bso many (tokens|rows|steps|bytes|lines|places|numbers)\b": "n tokens",
    r"\bspelled out\b|\bspells out\b": "explicit, written in full",
}
PARTICIPLES = """
    added asked begun built called changed checked chosen cleaned closed come compared computed copied counted
    cropped cut decoded described done drawn encoded escaped escaping expected filled filtered finished fitted
    foreseen found foretold gathered given gone grown handed held hidden joined kept known laid left listed looked
    looked_at looked_up made mapped marked masked measured merged moved named normed opened ordered packed padded
    parsed paid placed pooled printed ranked read_out reduced rendered resized rounded said scored seen sent shared
    shown sized smoothed sorted_out spelled_out split_up stored stretched taken taught told touched trained
    translated tried turned unpacked used wanted watched weighed widened worked written written_aside
"""


def text_files() -> Iterator[Path]:
    for place in PLACES:
        path = ROOT / place
        found = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in found:
            if file.suffix in (".py", ".md", ".js", ".html", ".txt") and file.relative_to(ROOT).as_posix() not in OWN:
                yield file


def archaic_words(path: Path) -> Iterator[str]:
    """`path:line: words (better)` for every archaic phrase of a file."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        for pattern, better in ARCHAIC.items():
            for found in re.finditer(pattern, line, re.IGNORECASE):
                yield f"{path.relative_to(ROOT)}:{number}: “{found[0]}” ({better})"


def bare_participles(path: Path) -> Iterator[str]:
    """Functions of a module whose whole name is a participle. Properties and fields state facts and may be one."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.strip("_") in PARTICIPLES.split():
            decorators = {ast.unparse(each).split(".")[-1] for each in node.decorator_list}
            if not decorators & {"property", "cached_property"}:
                yield f"{path.relative_to(ROOT)}:{node.lineno}: the function {node.name}"


def repeated_classes() -> Iterator[str]:
    """Classes that share a name but not a meaning.

    The same idea has the same name in the NumPy engine, in the PyTorch engine, and in `nn/layers.py`, which offers the
    parts of the PyTorch engine with another constructor.
    """
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "clearhead").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                engine = next((each for each in ("reference/", "nn/layers.py") if f"clearhead/{each}" in str(path)), "")
                places[f"{engine} {node.name}".strip()].append(path.relative_to(ROOT).as_posix())
    for name, files in sorted(places.items()):
        if len(files) > 1:
            yield f"class {name} in {', '.join(files)}"


def findings(under: tuple[str, ...] = ()) -> list[str]:
    """Everything that is left, in the files whose path begins with one of `under`."""
    files = [file for file in text_files() if not under or file.relative_to(ROOT).as_posix().startswith(under)]
    found = [line for file in files for line in archaic_words(file)]
    found += [
        line
        for file in files
        if file.suffix == ".py" and file.is_relative_to(ROOT / "clearhead")
        for line in bare_participles(file)
    ]
    return found + [line for line in repeated_classes() if not under or any(place in line for place in under)]


if __name__ == "__main__":
    left = findings(tuple(sys.argv[1:]))
    print("\n".join([*left, f"{len(left)} left"]))
