"""`clearhead check`: is this attention right, and if not, what is wrong with it?"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import check_free, console, force_option, json_option, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clearhead.checker.report import CheckReport


@click.command("check")
@click.argument("targets", metavar="FILE.py[:NAME]|FOLDER|PATTERN...", nargs=-1, required=True)
@click.option("part", "--as", metavar="PART", help="Which part it is, if the checker cannot tell: attention, …")
@click.option("--only", metavar="PARTS", help="Check only these parts, such as attention,softmax.")
@click.option("--explain", is_flag=True, help="Show notes, and the weights of each example.")
@click.option("--strict", is_flag=True, help="Treat fragile code as wrong: exit code 1 instead of 4.")
@click.option("allow", "--allow", type=click.Choice(["fragile"]), multiple=True, help="Let fragile code pass.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Files to check at once.")
@click.option("--csv", type=click.Path(dir_okay=False, path_type=Path), help="Write one line per part to this file.")
@click.option("--junit", type=click.Path(dir_okay=False, path_type=Path), help="Write JUnit XML to this file.")
@click.option("lang", "--lang", type=click.Choice(["en", "zh"]), help="Language.  [default: the locale's]")
@click.option("--watch", is_flag=True, help="Check again whenever the file is saved (one file).")
@force_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    targets: tuple[str, ...],
    part: str | None,
    only: str | None,
    explain: bool,
    strict: bool,
    allow: tuple[str, ...],
    jobs: int,
    csv: Path | None,
    junit: Path | None,
    lang: str | None,
    watch: bool,
    as_json: bool,
) -> None:
    """Check the parts of a Transformer that Python files and notebooks define, and name what is wrong.

    Parts are found by name, by arguments and by trial, in NumPy or PyTorch. The code runs in a child process with
    limits on time, memory, network and files. Exit codes: 0 everything is right, 1 something is wrong, 2 usage error,
    3 nothing found or not checked, 4 some code is fragile and nothing is wrong.

    \b
    clearhead check my_attention.py
    clearhead check my_attention.py:attend --as attention
    clearhead check submissions/ --jobs 2 --csv marks.csv --only attention,softmax
    """
    from clearhead.checker.batch import check_files, collect_files, exit_code, to_csv, to_junit
    from clearhead.checker.check import split_name, validate_part
    from clearhead.checker.messages import language
    from clearhead.files import write_atomically

    files = collect_files(targets)
    missing = [path for path in (Path(split_name(file)[0]) for file in files) if not path.is_file()]
    if missing:
        raise click.UsageError(f"there is no file {missing[0]}")
    if not files:
        raise click.UsageError(f"there are no .py or .ipynb files in {', '.join(targets)}")
    if watch and len(files) > 1:
        raise click.UsageError(f"--watch takes one file, not {len(files)}")
    try:
        parts = [validate_part(name.strip()) or "" for name in only.split(",")] if only else []
        validate_part(part)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    for path in (csv, junit):
        if path is not None:
            check_free(path)
    spoken = language(lang)
    while True:
        seen = [Path(split_name(file)[0]).stat().st_mtime_ns for file in files]
        reports = []
        for report in check_files(files, part, jobs=jobs, only=parts, language=spoken):
            reports.append(report)
            if not as_json:
                show(report, explain, allow, short=len(files) > 1)
        if as_json:
            print_json(report_json(reports, allow))
        elif len(files) > 1:
            show_summary(reports, spoken)
        for path, text in ((csv, to_csv), (junit, to_junit)):
            if path is not None:
                write_atomically(path, text(reports))
        if not watch:
            ctx.exit(exit_code(reports, strict, allow))
        wait_for_change(Path(split_name(files[0])[0]), seen[0], spoken)


def report_json(reports: Sequence[CheckReport], allow: tuple[str, ...]) -> object:
    """Return one file's report, or the reports of all files with a summary."""
    from clearhead.checker.batch import count_mistakes

    if len(reports) == 1:
        return reports[0].to_dict(allow)
    mistakes = [vars(count) for count in count_mistakes(reports)]
    return {"files": [report.to_dict(allow) for report in reports], "mistakes": mistakes}


def show(report: CheckReport, explain: bool, allow: tuple[str, ...], short: bool) -> None:
    """Print the report; with many files, one line per file."""
    from clearhead.checker.messages import word
    from clearhead.checker.render import render_lines

    out = console()
    if not short:
        for line in render_lines(report, explain, allow):
            out.print(line)
        return
    keys = list(dict.fromkeys(d.key for d in report.diagnostics if d.severity != "note"))
    verdict = word("ok" if report.verdict == "right" else report.verdict, report.language)
    out.print(f"{report.where}: {verdict}{': ' if keys else ''}{', '.join(keys)}", highlight=False, markup=False)


def show_summary(reports: Sequence[CheckReport], language: str) -> None:
    """Print how many files share each mistake, and how many are right."""
    from rich.table import Table

    from clearhead.checker.batch import count_mistakes
    from clearhead.checker.messages import part_name, word

    table = Table(word("files", language), word("part", language), word("mistake", language), box=None)
    for count in count_mistakes(reports):
        table.add_row(str(count.files), part_name(count.part, language), count.text)
    out = console()
    if table.row_count:
        out.print()
        out.print(table)
    out.print()
    verdicts = [report.verdict for report in reports]
    counts = {verdict: verdicts.count(verdict) for verdict in ("right", "wrong", "fragile", "unchecked")}
    out.print(word("summary", language).format(all=len(reports), **counts), highlight=False)


def wait_for_change(path: Path, seen: int, language: str) -> None:
    from clearhead.checker.messages import word

    click.echo(word("watching", language).format(file=path), err=True)
    while not path.exists() or path.stat().st_mtime_ns == seen:
        time.sleep(0.2)
