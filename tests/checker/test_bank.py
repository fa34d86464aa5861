"""Wrong code is caught and named, right code is not blamed, and the page states the counts."""

import pytest

from .judge import Judge, keys, verdict
from .snippets import Snippet, snippets
from .table import PAGE, row, stated_results, summary

ALL = snippets()


@pytest.mark.parametrize("snippet", ALL, ids=lambda snippet: snippet.id)
def test_snippet(snippet: Snippet, judge: Judge) -> None:
    report = judge.check(snippet.text)
    result = verdict(snippet, report)
    assert result != "missed", f"passes, though it has {snippet.key}"
    assert result != "blamed", f"is right, and is blamed for {keys(report)}"
    line = row(snippet, result, keys(report))
    assert line in PAGE.read_text(encoding="utf-8"), (
        f"docs/learn/checker.md is old; python -m tests.checker.table. Now: {line}"
    )


def test_the_corpus_is_large_and_varied() -> None:
    wrong, right = [s for s in ALL if not s.is_right], [s for s in ALL if s.is_right]
    assert len(wrong) >= 200
    assert len(right) >= 100
    assert {s.engine for s in wrong} == {s.engine for s in right} == {"numpy", "torch"}
    assert len({s.id for s in ALL}) == len(ALL)


def test_the_counts_of_the_page_are_current() -> None:
    page = PAGE.read_text(encoding="utf-8")
    results = stated_results(page)
    assert [snippet for snippet, _ in results] == ALL
    assert "\n".join(summary(results)) in page
    wrong = [result for snippet, result in results if not snippet.is_right]
    right = [result for snippet, result in results if snippet.is_right]
    assert wrong.count("missed") + wrong.count("unchecked") <= 0.05 * len(wrong)
    assert wrong.count("named") >= 0.9 * len(wrong)
    assert right.count("blamed") <= 0.01 * len(right)


def test_every_mistake_of_a_snippet_is_known() -> None:
    from clearhead.checker.mistakes import MISTAKES

    assert {s.key for s in ALL if not s.is_right} <= set(MISTAKES)
