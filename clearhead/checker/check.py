"""`clearhead.check`: of a file in child processes, of an object in this one."""

from __future__ import annotations

import inspect
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from .examine import PARTS, check_of, examine
from .find import by_trial, classified, engine_of, uses_torch
from .finding import Finding
from .report import PartReport, Report
from .sandbox import SECONDS, events_of
from .suspect import Suspect


def check(thing: Any, part: str | None = None, *, lang: str | None = None) -> Report:
    """Is this part of a Transformer right, and if not, what is wrong with it?

    thing is a path (`"my_attention.py"` or `"my_attention.py:attend"`), whose code runs in a child process with limits,
    or a function, a class or an object, which runs here. part says what it is, where that cannot be told:
    "softmax", "attention", "multi_head", "causal_mask", "layer_norm", … The report has `ok`, `findings` and a text.
    """
    from .messages import language

    report = check_file(str(thing), part) if isinstance(thing, str | Path) else check_object(thing, part)
    report.language = language(lang)
    return report


def check_file(where: str, part: str | None = None, seconds: float = SECONDS) -> Report:
    """Every part that the file defines, each in a child of its own."""
    path, _, name = where.rpartition(":") if ":" in where and not Path(where).exists() else (where, "", "")
    source = Path(path).read_text(encoding="utf-8-sig")
    preload()
    if uses_torch(source):
        warm_torch()
    report, found = Report(where), []
    for event in events_of("find", path, name or None, known(part), seconds=seconds):
        if "suspect" in event:
            found.append(event["suspect"])
        elif "problem" in event:
            report.problems.append(event["problem"])
        elif "syntax" in event:
            report.syntax = event["syntax"]
        elif "ended" in event:
            report.failed.append(Finding("file", path, event["ended"].pop("key"), event["ended"]))
    for suspect in found:
        report.parts.append(check_part(path, suspect, seconds))
    if report.syntax is None and not report.failed and not found:
        report.failed.append(Finding("file", path, "nothing-found", {"names": ", ".join(PARTS), "name": name}))
    return report


def preload() -> None:
    """The checks are loaded once, here; the children find them."""
    for part in PARTS:
        check_of(part)


def warm_torch() -> None:
    """Load what every child would load for itself; compute nothing, so that no thread is started before the forks."""
    import torch  # noqa: F401

    with suppress(ImportError):
        import_module("torch.fx.experimental.symbolic_shapes")  # the first backward pass imports it


def check_part(path: str, suspect: dict[str, str], seconds: float) -> PartReport:
    report = PartReport(suspect["name"], suspect["part"], suspect["engine"])
    at = "start"
    for event in events_of("check", path, suspect["name"], suspect["part"], seconds=seconds):
        if "finding" in event:
            report.findings.append(Finding.from_dict(event["finding"]))
        elif "assumed" in event:
            report.assumed.append(event["assumed"])
        elif "at" in event:
            at = event["at"]
        elif "ended" in event:
            ended = event["ended"]
            key = ended.pop("key")
            report.findings.append(Finding(suspect["part"], suspect["name"], key, {**ended, "at": at}))
    return report


def known(part: str | None) -> str | None:
    if part is not None and part not in PARTS:
        from clearhead.configs.base import nearest

        raise ValueError(f"there is no part {part!r}{nearest(part, PARTS)}; the parts are {', '.join(PARTS)}")
    return part


def check_object(thing: Any, part: str | None = None) -> Report:
    """A live function, class or module, in this process."""
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
    suspect = Suspect(name, "", thing, engine, text, names)
    kind = known(part) or classified(suspect) or (by_trial(suspect) if inspect.isfunction(thing) else None)
    report = Report(name)
    if kind is None:
        report.failed.append(Finding("file", name, "nothing-found", {"names": ", ".join(PARTS), "name": name}))
        return report
    voice = examine(Suspect(name, kind, thing, engine, text, names))
    report.parts.append(PartReport(name, kind, engine, voice.findings, voice.assumed))
    return report
