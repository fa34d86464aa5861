"""What the benchmarks measured: one table, and one file for each processor in `benchmarks/results/`.

python -m benchmarks generation      measures, prints the table, and adds its lines to the file of this processor
python -m benchmarks.results         writes the speed tables of the documentation from these files
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from clearhead.measure.machine import look

FOLDER = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"
MARCH = {"x86-64-v3": "AVX2", "x86-64-v4": "AVX-512", "portable": "portable C"}


@dataclass(frozen=True)
class Result:
    """One line: our figure beside that of the best peer."""

    work: str
    unit: str
    ours: float
    peer: str
    best: float
    more_is_better: bool = False  # tokens/s, and not milliseconds
    share: float | None = None  # of what the machine's memory or processor allows

    @property
    def ratio(self) -> float:
        """How many times as fast as the best peer we are."""
        return self.ours / self.best if self.more_is_better else self.best / self.ours


FOUND: list[Result] = []
"""What this process has measured so far."""


def add(result: Result) -> None:
    FOUND.append(result)


def add_times(work: str, seconds: Mapping[str, float], ours: str) -> None:
    """A result from the seconds of all contestants."""
    peers = {name: taken for name, taken in seconds.items() if not name.startswith("clearhead")}
    if peers and ours.startswith("clearhead"):
        peer = min(peers, key=peers.__getitem__)
        add(Result(work, "ms", seconds[ours] * 1e3, peer, peers[peer] * 1e3))


def processor_name() -> str:
    """The processor and the instruction set that the kernels use, such as "AMD EPYC, AVX2"."""
    machine = look()
    sets = "AVX-512" if "avx512" in machine.instructions else "AVX2" if "avx2" in machine.instructions else "NEON"
    return f"{machine.processor or machine.platform}, {MARCH.get(os.environ.get('CLEARHEAD_MARCH', ''), sets)}"


def result_file(processor: str) -> Path:
    return FOLDER / f"{re.sub(r'[^a-z0-9]+', '-', processor.lower()).strip('-')}.json"


def read_file(path: Path) -> tuple[str, dict[str, Result]]:
    """The processor of a file, and its results by their work."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return data["processor"], {one["work"]: Result(**one) for one in data["results"]}


def save(found: Sequence[Result]) -> Path:
    """Add results to the file of this processor, in place of older ones for the same work."""
    processor = processor_name()
    path = result_file(processor)
    known = read_file(path)[1] if path.exists() else {}
    known |= {one.work: one for one in found}
    lines = ",\n".join(f"  {json.dumps(asdict(known[work]))}" for work in sorted(known))
    FOLDER.mkdir(exist_ok=True)
    path.write_text(f'{{"processor": {json.dumps(processor)}, "results": [\n{lines}\n]}}\n', encoding="utf-8")
    return path


def table(found: Sequence[Result]) -> str:
    """All results as aligned columns: work, us, best peer, ratio, share of the machine's limit."""
    rows = [("work", "clearhead", "best peer", "", "ratio", "of the limit")]
    for one in found:
        share = "" if one.share is None else f"{one.share:.0%}"
        rows.append((one.work, f"{one.ours:,.4g} {one.unit}", f"{one.best:,.4g}", one.peer, f"{one.ratio:.2f}×", share))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


# ---- the tables of the documentation

GENERATION = {
    "writing, 1 × 512": "after a prompt of 512",
    "writing, 8 × 128": "8 rows, prompts of 128",
    "reading, 1 × 512": "reading 512",
    "reading, 8 × 128": "reading 8 × 128",
}


def generation_table(files: Mapping[str, Mapping[str, Result]]) -> str:
    """Tokens/s of each width on each processor, with the ratio to the best peer."""
    lines = [f"| processor | width | {' | '.join(GENERATION.values())} |", f"|---|---|{'--:|' * len(GENERATION)}"]
    for processor, results in files.items():
        for width in ("float32", "bfloat16", "float16", "int8", "int4"):
            found = [results.get(f"{width}, {work}") for work in GENERATION]
            if any(found):
                cells = ["" if one is None else f"{one.ours:,.0f} ({one.ratio:.2f})" for one in found]
                lines.append(f"| {processor} | {width} | {' | '.join(cells)} |")
    return "\n".join(lines)


def translation_table(files: Mapping[str, Mapping[str, Result]]) -> str:
    """Beam search beside CTranslate2 and transformers on each processor."""
    lines = ["| processor | beam search, ratio to |", "|---|---|"]
    for processor, results in files.items():
        found = [one for work, one in results.items() if work.startswith("beam search")]
        if found:
            lines.append(f"| {processor} | {', '.join(f'{one.peer} {one.ratio:.2f}' for one in found)} |")
    return "\n".join(lines)


def sparse_table(files: Mapping[str, Mapping[str, Result]]) -> str:
    """A window of 257 beside dense attention on each processor."""
    lines = ["| processor | window of 257 | dense attention | ratio |", "|---|--:|--:|--:|"]
    for processor, results in files.items():
        for one in (one for work, one in results.items() if work.startswith("Window(257)")):
            lines.append(f"| {processor} | {one.ours:,.0f} ms | {one.best:,.0f} ms | {one.ratio:.1f} |")
    return "\n".join(lines)


PAGES = {
    "use/precision.md": generation_table,
    "use/translation.md": translation_table,
    "understand/growth.md": sparse_table,
}
MARKS = "<!-- from benchmarks/results -->", "<!-- end -->"


def fill_page(text: str, content: str) -> str:
    """A page with what is between the two marks replaced."""
    start, stop = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    return f"{text[:start]}\n{content}\n{text[stop:]}"


def all_files() -> dict[str, dict[str, Result]]:
    return dict(read_file(path) for path in sorted(FOLDER.glob("*.json")))


def write_docs() -> None:
    files = all_files()
    for name, make in PAGES.items():
        page = DOCS / name
        page.write_text(fill_page(page.read_text(encoding="utf-8"), make(files)), encoding="utf-8")


if __name__ == "__main__":
    write_docs()
