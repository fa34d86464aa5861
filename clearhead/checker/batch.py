"""Check many files: collect them, run in parallel, and sum up the mistakes of a class."""

from __future__ import annotations

import csv
import io
import multiprocessing
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from glob import glob, has_magic
from pathlib import Path
from xml.etree import ElementTree

from .check import check_file, import_checks, import_torch, split_name
from .discover import read_source, uses_torch
from .messages import message
from .report import CheckReport

SUFFIXES = (".py", ".ipynb")


def collect_files(targets: Sequence[str]) -> list[str]:
    """Return the files that the arguments name: files, folders (with subfolders) and patterns."""
    found: list[str] = []
    for target in targets:
        if Path(target).is_dir():
            inside = sorted(p for p in Path(target).rglob("*") if p.suffix in SUFFIXES and not is_hidden(p, target))
            found += [str(path) for path in inside]
        elif has_magic(target) and not Path(target).exists():
            found += sorted(glob(target, recursive=True))
        else:
            found.append(target)
    return list(dict.fromkeys(found))


def is_hidden(path: Path, root: str) -> bool:
    return any(part.startswith((".", "__")) for part in path.relative_to(root).parts)


def check_files(
    files: Sequence[str],
    part: str | None = None,
    *,
    jobs: int = 1,
    only: Collection[str] = (),
    language: str = "en",
) -> Iterator[CheckReport]:
    """Yield a report for each file, in order. Torch is imported once, before the workers start."""
    check = partial(check_one, part=part, only=only, language=language)
    if jobs == 1 or len(files) == 1 or "fork" not in multiprocessing.get_all_start_methods():
        yield from map(check, files)
        return
    import_checks()
    if any(uses_torch(read_source(Path(split_name(file)[0]))) for file in files):
        import_torch()
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        yield from pool.map(check, files)


def check_one(file: str, part: str | None, only: Collection[str], language: str) -> CheckReport:
    report = check_file(file, part, only=only)
    report.language = language
    return report


@dataclass(frozen=True)
class MistakeCount:
    """How many files of a class share a mistake."""

    part: str
    key: str
    text: str
    files: int


def count_mistakes(reports: Sequence[CheckReport]) -> list[MistakeCount]:
    """Count each mistake once per file, the most frequent first."""
    counts: Counter[tuple[str, str]] = Counter()
    texts: dict[tuple[str, str], str] = {}
    for report in reports:
        found = [d for d in report.diagnostics if d.severity != "note"]
        counts.update({(d.part, d.key) for d in found})
        texts |= {(d.part, d.key): message(d, report.language).text for d in found}
    return [MistakeCount(part, key, texts[part, key], n) for (part, key), n in counts.most_common()]


def exit_code(reports: Sequence[CheckReport], strict: bool = False, allow: Sequence[str] = ()) -> int:
    """Return the most severe exit code: 1 wrong, 3 not checked, 4 fragile, 0 right."""
    codes = {report.exit_code(strict, allow) for report in reports}
    return next((code for code in (1, 3, 4) if code in codes), 0 if reports else 3)


FIELDS = ("file", "name", "part", "verdict", "mistakes", "text")


def to_csv(reports: Sequence[CheckReport]) -> str:
    """Return one line per part."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(FIELDS)
    for report in reports:
        for part in report.parts:
            found = [d for d in part.diagnostics if d.severity != "note"]
            texts = " ".join(message(d, report.language).text for d in found)
            keys = " ".join(d.key for d in found)
            table.writerow((report.where, part.name, part.part, part.verdict, keys, texts))
        if not report.parts:
            found = report.file_diagnostics
            keys = "syntax" if report.syntax else " ".join(d.key for d in found)
            texts = " ".join(message(d, report.language).text for d in found)
            error = (report.syntax or {}).get("error", texts)
            table.writerow((report.where, "", "", report.verdict, keys, error))
    return out.getvalue()


def to_junit(reports: Sequence[CheckReport]) -> str:
    """Return JUnit XML: a suite per file, a test case per part. Not checked counts as skipped."""
    root = ElementTree.Element("testsuites")
    for report in reports:
        suite = ElementTree.SubElement(root, "testsuite", name=report.where, tests=str(max(1, len(report.parts))))
        cases = [(f"{p.name} ({p.part})", p.verdict, p.diagnostics) for p in report.parts]
        for name, verdict, diagnostics in cases or [("file", report.verdict, report.file_diagnostics)]:
            case = ElementTree.SubElement(suite, "testcase", name=name, classname=report.where)
            if verdict != "right":
                found = [message(d, report.language).text for d in diagnostics if d.severity != "note"]
                text = " ".join(found) or str((report.syntax or {}).get("error", verdict))
                ElementTree.SubElement(case, "skipped" if verdict == "unchecked" else "failure", message=text)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"
