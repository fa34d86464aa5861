"""Measure the checker on public files, which are not part of this repository.

    python -m tests.checker.public FOLDER            check the files of public.csv again, in FOLDER
    python -m tests.checker.public FOLDER LIST.txt   check other files: one path below FOLDER per line
    python -m tests.checker.public                   write the table of the page from public.csv

`public.csv` has one line for each part that was found (`fault` is empty) and for each fault that was planted in a
right part. Whether a part is right was judged by hand, in the column `truth`; the command keeps it and renews the rest.
"""

from __future__ import annotations

import csv
import multiprocessing
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from clearhead.checker.check import check_file, import_checks, import_torch
from clearhead.checker.discover import read_source

from .planting import plant
from .table import JOBS, PAGE, write_between

LEDGER = Path(__file__).parent / "public.csv"
START, END = "<!-- public: python -m tests.checker.public FOLDER -->", "<!-- end of public -->"


# results, and how the page calls them
COLUMNS = {
    "right": "called right",
    "properties": "right by properties",
    "fragile": "fragile",
    "wrong": "wrong",
    "unchecked": "not checked",
}
# assumptions that say that the numbers were not compared
PROPERTIES = {"weights_not_found", "sublayers_not_found", "without_attention", "positions_first"}


@dataclass(frozen=True)
class Line:
    file: str
    name: str
    part: str
    fault: str  # the names of the planted mistake; empty for the part as it is
    truth: str  # right, wrong, or other if we have no check for the part
    result: str  # right, properties, fragile, wrong, unchecked; for a planted fault also named


def read_ledger() -> list[Line]:
    with LEDGER.open(encoding="utf-8", newline="") as file:
        return [Line(**row) for row in csv.DictReader(file)]


def counts(lines: list[Line]) -> list[str]:
    """The table of the page."""
    parts = [line for line in lines if not line.fault]
    planted = Counter(line.result for line in lines if line.fault)
    caught = planted["wrong"] + planted["fragile"] + planted["named"]
    rows = ["| public files | parts | " + " | ".join(COLUMNS.values()) + " |", "|---|--:" + "|--:" * len(COLUMNS) + "|"]
    for truth, name in (("right", "right parts"), ("wrong", "wrong parts"), ("other", "parts of another kind")):
        found = Counter(line.result for line in parts if line.truth == truth)
        cells = (found.total(), *(found[result] for result in COLUMNS))
        rows.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    files, packages = {line.file for line in parts}, {line.file.split("/")[0] for line in parts}
    checked = planted.total() - planted["unchecked"]
    rows += ["", f"{len(files)} files of {len(packages)} projects. "]
    rows[-1] += f"Faults planted by rules in the parts called right or fragile: {planted.total()}, of which "
    rows[-1] += (
        f"{planted['unchecked']} not checked. Of the other {checked}: {caught} caught, {planted['named']} named."
    )
    return [*rows, "", "Projects: " + ", ".join(sorted(packages)) + "."]


def measure(folder: Path, names: list[str]) -> list[Line]:
    """Check the files, then plant faults in each part that is called right or fragile."""
    truths = {(line.file, line.name): line.truth for line in read_ledger()} if LEDGER.exists() else {}
    import_checks()
    import_torch()
    files = [folder / name for name in names]
    with ProcessPoolExecutor(JOBS, multiprocessing.get_context("fork")) as pool:
        return [line for lines in pool.map(partial(measure_file, folder, truths), files) for line in lines]


def measure_file(folder: Path, truths: dict[tuple[str, str], str], path: Path) -> list[Line]:
    where, lines = str(path.relative_to(folder)), []
    for part in check_file(str(path)).parts:
        truth = truths.get((where, part.name), "?")
        result = "properties" if part.verdict == "right" and PROPERTIES & set(part.assumed) else part.verdict
        line = Line(where, part.name, part.part, "", truth, result)
        lines.append(line)
        if result in ("right", "fragile") and truth in ("right", "?"):
            lines += planted_lines(path, line)
        keys = " ".join(diagnostic.key for diagnostic in part.diagnostics if diagnostic.severity != "note")
        print(f"{result} {where}:{part.name} [{part.part}] {keys}", file=sys.stderr, flush=True)
    return lines


def planted_lines(path: Path, line: Line) -> list[Line]:
    """Check the file with each fault, in a copy beside it, so that its imports work."""
    found = []
    for planted in plant(read_source(path), line.name, line.part):
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".py", prefix="planted_", encoding="utf-8"
        ) as copy:
            copy.write(planted.text)
            copy.flush()
            parts = check_file(f"{copy.name}:{line.name}", line.part).parts
        keys = {diagnostic.key for part in parts for diagnostic in part.diagnostics}
        result = "named" if keys & set(planted.keys) else parts[0].verdict if parts else "unchecked"
        found.append(replace(line, fault=" ".join(planted.keys), result=result))
    return found


def main() -> None:
    lines = read_ledger()
    if len(sys.argv) > 1:
        listed = Path(sys.argv[2]).read_text(encoding="utf-8").split() if len(sys.argv) > 2 else []
        lines = measure(Path(sys.argv[1]), listed or list(dict.fromkeys(line.file for line in lines)))
    with LEDGER.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, Line.__annotations__, lineterminator="\n")
        table.writeheader()
        table.writerows(asdict(line) for line in lines)
    write_between(PAGE, START, END, counts(lines))
    print("\n".join(counts(lines)))


if __name__ == "__main__":
    main()
