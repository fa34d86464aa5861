"""Measure the checker on the corpus and write the counts to docs/learn/checker.md: `python -m tests.checker.table`."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .judge import Judge, keys, verdict
from .snippets import Snippet, snippets

PAGE = Path(__file__).parents[2] / "docs" / "learn" / "checker.md"
JOBS = 4
START, END = "<!-- bank: python -m tests.checker.table -->", "<!-- end of bank -->"
NAMES = {
    "softmax": "softmax",
    "attention": "attention",
    "masks": "masks",
    "multihead": "multi-head attention",
    "positions": "positions",
    "norms": "norms",
    "feedforward": "feed-forward",
    "blocks": "blocks",
    "models": "models",
    "files": "whole files",
}


def row(snippet: Snippet, result: str, found: list[str]) -> str:
    """One line of the long table."""
    names = ", ".join(f"`{key}`" for key in dict.fromkeys(found)) or "nothing"
    return f"| {NAMES[snippet.part]} | {snippet.title} | {snippet.engine} | {result} | {names} |"


def summary(results: list[tuple[Snippet, str]]) -> list[str]:
    lines = [
        "| part | wrong | caught | named | not checked | right | blamed | not checked |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for part in [*NAMES, None]:
        here = [(snippet.is_right, result) for snippet, result in results if part in (None, snippet.part)]
        wrong = Counter(result for is_right, result in here if not is_right)
        right = Counter(result for is_right, result in here if is_right)
        caught = wrong["caught"] + wrong["named"]
        cells = (wrong.total(), caught, wrong["named"], wrong["unchecked"])
        cells += (right.total(), right["blamed"], right["unchecked"])
        name = "**all**" if part is None else NAMES[part]
        lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    return lines


def stated_results(page: str) -> list[tuple[Snippet, str]]:
    """The results that the page states, by snippet."""
    found = []
    for snippet in snippets():
        start = f"| {NAMES[snippet.part]} | {snippet.title} | {snippet.engine} | "
        line = next((line for line in page.splitlines() if line.startswith(start)), None)
        if line is not None:
            found.append((snippet, line.removeprefix(start).split(" | ")[0]))
    return found


def write_page(results: list[tuple[Snippet, str]], rows: list[str]) -> None:
    """Replace the tables of the page."""
    long = ["| part | implementation | in | result | found |", "|---|---|---|---|---|", *rows]
    details = ["<details><summary>Each of them</summary>", "", *long, "", "</details>"]
    write_between(PAGE, START, END, [*summary(results), "", *details])


def write_between(page: Path, start: str, end: str, lines: list[str]) -> None:
    """Replace the lines between two comments of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(start)
    text = "\n".join([start, "", *lines, "", end])
    page.write_text(before + text + rest.partition(end)[2], encoding="utf-8")


def judge_all(share: list[Snippet]) -> list[tuple[Snippet, str, str]]:
    """Return each snippet with its result and its line of the long table."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(Path(folder))
        for snippet in share:
            report = judge.check(snippet.text)
            result = verdict(snippet, report)
            found.append((snippet, result, row(snippet, result, keys(report))))
            print("." if result in ("passed", "named") else f"\n{found[-1][2]}", end="", file=sys.stderr, flush=True)
        judge.close()
    return found


def main() -> None:
    everything = snippets()
    with ThreadPoolExecutor(JOBS) as pool:
        shares = list(pool.map(judge_all, (everything[i::JOBS] for i in range(JOBS))))
    found = {snippet.id: result for share in shares for snippet, *result in share}
    results = [(snippet, found[snippet.id][0]) for snippet in everything]
    write_page(results, [found[snippet.id][1] for snippet in everything])
    print("\n" + "\n".join(summary(results)))


if __name__ == "__main__":
    main()
