"""`clearhead.check`: check a file in child processes, or an object in this process."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from .candidate import Candidate, parse_example
from .diagnostic import Diagnostic
from .discover import classify, classify_by_trial, engine_of, read_source, uses_torch
from .report import CheckReport, PartReport
from .run import PARTS, check_for, run_check
from .sandbox import SECONDS, run_in_child


def check(thing: Any, part: str | None = None, *, example: str | None = None, lang: str | None = None) -> CheckReport:
    """Check a part of a Transformer and name its mistakes.

    `thing` is a path (`"my_attention.py"`, `"my_attention.py:attend"` or a notebook), whose code runs in a child
    process with limits, or a function, class or object, which runs in this process. `part` says what it is if the
    checker cannot tell: "softmax", "attention", "multi_head", "causal_mask", "layer_norm", … `example` shows how to
    call it: `"attend(q, k, v, mask=mask)"` or `"Attention(64, heads=4)(x)"`.

    >>> def softmax(x):
    ...     return np.exp(x) / np.exp(x).sum()
    >>> check(softmax, lang="en").verdict
    'wrong'
    """
    from .messages import language

    is_path = isinstance(thing, str | Path)
    report = check_file(str(thing), part, example=example) if is_path else check_object(thing, part, example)
    report.language = language(lang)
    return report


def split_name(where: str) -> tuple[str, str | None]:
    """Split `FILE.py:NAME` into path and name."""
    path, _, name = where.rpartition(":") if ":" in where and not Path(where).exists() else (where, "", "")
    return path, name or None


def check_file(
    where: str,
    part: str | None = None,
    seconds: float = SECONDS,
    example: str | None = None,
    only: Collection[str] = (),
) -> CheckReport:
    """Check every part that the file defines, in a child process."""
    path, name = split_name(where)
    import_checks()
    if uses_torch(read_source(Path(path))):
        import_torch()
    report, found = CheckReport(where), list[PartReport]()
    arguments = (path, name, validate_part(part), example, list(only))
    checked = receive(report, found, run_in_child(*arguments, 0, seconds=seconds), 0)
    while checked < len(found):  # a part ended the child: continue after it
        checked = receive(report, found, run_in_child(*arguments, checked, seconds=seconds), checked)
    report.parts += found
    if report.syntax is None and not report.file_diagnostics and not report.parts:
        report.file_diagnostics.append(nothing_found(path))
    return report


def receive(report: CheckReport, found: list[PartReport], messages: Iterable[dict[str, Any]], skip: int) -> int:
    """Add one child's messages to the report and to the parts found; return how many parts are done."""
    index, at = -1, "load"
    for message in messages:
        if "candidate" in message:
            found.append(PartReport(**message["candidate"]))
        elif "begin" in message:
            index, at = message["begin"], "start"
        elif "at" in message:
            at = message["at"]
        elif "diagnostic" in message:
            found[index].diagnostics.append(Diagnostic.from_dict(message["diagnostic"]))
        elif "assumed" in message:
            found[index].assumed.append(message["assumed"])
        elif "broken" in message:
            report.parts.append(broken_part(message["broken"]))
        elif "problem" in message:
            report.problems.append(message["problem"])
        elif "syntax" in message:
            report.syntax = message["syntax"]
        elif "confined" in message:
            report.confined = message["confined"]
        elif "ended" in message:
            values = {**message["ended"], "at": at}
            key = values.pop("key")
            if index < 0 and skip == 0:  # while the file was loaded
                report.file_diagnostics.append(Diagnostic("file", report.where, key, values))
                found.clear()
                return 0
            part = found[max(index, skip)]
            part.diagnostics.append(Diagnostic(part.part, part.name, key, values))
            return max(index, skip) + 1
    return len(found)


def nothing_found(where: str) -> Diagnostic:
    return Diagnostic("file", where, "nothing-found", {"names": ", ".join(PARTS)})


def broken_part(broken: dict[str, Any]) -> PartReport:
    """A part whose definition failed: not checked."""
    values = {"line": broken["line"], "error": broken["error"]}
    found = Diagnostic(broken["part"], broken["name"], "not-defined", values)
    return PartReport(broken["name"], broken["part"], "", [found])


def import_checks() -> None:
    """Import all checks once, before forking, so that the children need not."""
    for part in PARTS:
        check_for(part)


def import_torch() -> None:
    """Import torch once, before forking. Compute nothing: torch must not start threads before a fork."""
    from . import device  # noqa: F401

    with suppress(ImportError):
        import_module("torch._dynamo")  # torch.manual_seed imports it, 2 s in every child


def validate_part(part: str | None) -> str | None:
    if part is not None and part not in PARTS:
        from clearhead.configs.base import nearest

        raise ValueError(f"there is no part {part!r}{nearest(part, PARTS)}; the parts are {', '.join(PARTS)}")
    return part


def check_object(thing: Any, part: str | None = None, example: str | None = None) -> CheckReport:
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
    call = None if example is None else parse_example(example, thing, scope)
    candidate = Candidate(name, "", thing, engine, text, names, call)
    kind = validate_part(part) or classify(candidate)
    if kind is None and inspect.isfunction(thing):
        kind = classify_by_trial(candidate)
    report = CheckReport(name)
    if kind is None:
        report.file_diagnostics.append(nothing_found(name))
        return report
    recorder = run_check(replace(candidate, part=kind))
    found = recorder.diagnostics
    if getattr(subject, "__module__", "").startswith("torch."):  # its corners are documented and not for us to report
        found = [diagnostic for diagnostic in found if diagnostic.severity != "fragile"]
    report.parts.append(PartReport(name, kind, engine, found, recorder.assumed))
    return report
