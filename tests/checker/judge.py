"""A warm process that checks one snippet after another, so that torch is loaded once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from .snippets import Snippet

# reads paths, writes reports; torch is loaded by the first file that needs it
SERVER = """
import json, sys
from clearhead.checker.check import check
for line in sys.stdin:
    report = check(*json.loads(line))
    print(json.dumps(report.to_dict()), flush=True)
"""


class Judge:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = [sys.executable, "-c", SERVER]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def check(self, text: str, name: str = "") -> dict[str, Any]:
        """The report on a file with this text."""
        path = self.folder / "learner.py"
        path.write_text(text, encoding="utf-8")
        return self.ask(f"{path}:{name}" if name else str(path))

    def ask(self, *request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate()


def keys(report: dict[str, Any]) -> list[str]:
    """Return the keys of all diagnostics except notes."""
    found = [*report["diagnostics"], *(diagnostic for part in report["parts"] for diagnostic in part["diagnostics"])]
    return [diagnostic["key"] for diagnostic in found if diagnostic["severity"] != "note"]


def verdict(snippet: Snippet, report: dict[str, Any]) -> str:
    """Return passed, blamed, missed, caught or named; unchecked if there is no verdict on right or wrong code."""
    if report["verdict"] == "unchecked":
        return "unchecked"
    found = keys(report)
    if snippet.is_right:
        return "passed" if report["ok"] and not found else "blamed"
    if report["ok"]:
        return "missed"
    return "named" if snippet.key in found else "caught"
