"""The report in a notebook: HTML, print, and the cell magic."""

from types import SimpleNamespace
from typing import Any

import numpy as np

import clearhead
from clearhead.checker.magic import check_cell


def naive_softmax(x):
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def test_html_shows_verdict_example_and_hint() -> None:
    html = clearhead.check(naive_softmax, lang="en")._repr_html_()
    assert html.count("<div") == html.count("</div>")
    assert html.count("<table") == html.count("</table>") >= 3
    for text in ("✗", "naive_softmax", "The softmax overflows", "expected", "Subtract the row", "rgba("):
        assert text in html


def test_html_escapes_the_code() -> None:
    report = clearhead.check(naive_softmax, lang="en")
    report.where = "<script>"
    assert "<script>" not in report._repr_html_()


def test_print_works_where_rich_takes_jupyter_for_a_terminal(monkeypatch) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert "The softmax overflows" in str(clearhead.check(naive_softmax, lang="en"))


class Shell:
    """What the magic needs of IPython."""

    def __init__(self) -> None:
        self.user_ns: dict[str, Any] = {"np": np, "_": None}
        self.magics: dict[str, Any] = {}

    def run_cell(self, cell: str) -> None:
        exec(cell, self.user_ns)

    def register_magic_function(self, function: Any, kind: str, name: str) -> None:
        self.magics[name] = SimpleNamespace(function=function, kind=kind)


def test_the_magic_runs_and_checks_the_cell() -> None:
    shell = Shell()
    clearhead.load_ipython_extension(shell)
    assert shell.magics["check"].kind == "cell"
    cell = "def softmax(x):\n    e = np.exp(x)\n    return e / e.sum(-1, keepdims=True)\n"
    report = shell.magics["check"].function("", cell)
    assert [d.key for d in report.diagnostics] == ["softmax-unstable"]
    assert callable(shell.user_ns["softmax"])
    assert check_cell(shell, "softmax", cell).where == "cell"
