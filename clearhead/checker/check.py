"""`clearhead.check`: check a file in child processes, or an object in this process."""

from __future__ import annotations

import inspect
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from .candidate import Candidate
from .diagnostic import Diagnostic
from .discover import classify, classify_by_trial, engine_of, uses_torch
from .report import CheckReport, PartReport
from .run import PARTS, check_for, run_check
from .sandbox import SECONDS, run_in_child


def check(thing: Any, part: str | None = None, *, lang: str | None = None) -> CheckReport:
    """Check a part of a Transformer and name its mistakes.

    `thing` is a path (`"my_attention.py"` or `"my_attention.py:attend"`), whose code runs in a child process with
    limits, or a function, class or object, which runs in this process. `part` says what it is if the checker cannot
    tell: "softmax", "attention", "multi_head", "causal_mask", "layer_norm", …
    """
    from .messages import language

    report = check_file(str(thing), part) if isinstance(thing, str | Path) else check_object(thing, part)
    report.language = language(lang)
    return report


def check_file(where: str, part: str | None = None, seconds: float = SECONDS) -> CheckReport:
    """Check every part that the file defines, each in its own child process."""
    path, _, name = where.rpartition(":") if ":" in where and not Path(where).exists() else (where, "", "")
    source = Path(path).read_text(encoding="utf-8-sig")
    import_checks()
    if uses_torch(source):
        import_torch()
    report, found = CheckReport(where), []
    for event in run_in_child("discover", path, name or None, validate_part(part), seconds=seconds):
        if "candidate" in event:
            found.append(event["candidate"])
        elif "problem" in event:
            report.problems.append(event["problem"])
        elif "syntax" in event:
            report.syntax = event["syntax"]
        elif "ended" in event:
            report.file_diagnostics.append(Diagnostic("file", path, event["ended"].pop("key"), event["ended"]))
    for candidate in found:
        report.parts.append(check_part(path, candidate, seconds))
    if report.syntax is None and not report.file_diagnostics and not found:
        report.file_diagnostics.append(
            Diagnostic("file", path, "nothing-found", {"names": ", ".join(PARTS), "name": name})
        )
    return report


def import_checks() -> None:
    """Import all checks once, before forking, so that the children need not."""
    for part in PARTS:
        check_for(part)


def import_torch() -> None:
    """Import torch once, before forking. Compute nothing: torch must not start threads before a fork."""
    import torch  # noqa: F401

    with suppress(ImportError):
        import_module("torch.fx.experimental.symbolic_shapes")  # the first backward pass imports it


def check_part(path: str, candidate: dict[str, str], seconds: float) -> PartReport:
    report = PartReport(candidate["name"], candidate["part"], candidate["engine"])
    at = "start"
    for event in run_in_child("check", path, candidate["name"], candidate["part"], seconds=seconds):
        if "diagnostic" in event:
            report.diagnostics.append(Diagnostic.from_dict(event["diagnostic"]))
        elif "assumed" in event:
            report.assumed.append(event["assumed"])
        elif "at" in event:
            at = event["at"]
        elif "ended" in event:
            ended = event["ended"]
            key = ended.pop("key")
            report.diagnostics.append(Diagnostic(candidate["part"], candidate["name"], key, {**ended, "at": at}))
    return report


def validate_part(part: str | None) -> str | None:
    if part is not None and part not in PARTS:
        from clearhead.configs.base import nearest

        raise ValueError(f"there is no part {part!r}{nearest(part, PARTS)}; the parts are {', '.join(PARTS)}")
    return part


def check_object(thing: Any, part: str | None = None) -> CheckReport:
    """Check a function, class or object in this process."""
    name = getattr(thing, "__name__", type(thing).__name__)
    subject = thing if inspect.isclass(thing) or inspect.isfunction(thing) else type(thing)
    try:
        text = inspect.getsource(subject)
    except (OSError, TypeError):
        text = ""
    scope = getattr(sys.modules.get(getattr(subject, "__module__", "")), "__dict__", {})
    names = {n: v for n, v in scope.items() if not n.startswith("__")} if inspect.isclass(thing) else {}
    has_torch = "torch" in sys.modules and "torch" in text + str(scope.keys())
    engine = engine_of(subject, text, "import torch" if has_torch else "")
    candidate = Candidate(name, "", thing, engine, text, names)
    kind = (
        validate_part(part)
        or classify(candidate)
        or (classify_by_trial(candidate) if inspect.isfunction(thing) else None)
    )
    report = CheckReport(name)
    if kind is None:
        report.file_diagnostics.append(
            Diagnostic("file", name, "nothing-found", {"names": ", ".join(PARTS), "name": name})
        )
        return report
    recorder = run_check(Candidate(name, kind, thing, engine, text, names))
    report.parts.append(PartReport(name, kind, engine, recorder.diagnostics, recorder.assumed))
    return report
