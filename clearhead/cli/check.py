"""`clearhead check`: is my attention right, and if not, what is wrong with it?"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import console, json_option, print_json

if TYPE_CHECKING:
    from clearhead.checker.report import CheckReport


@click.command("check")
@click.argument("file", metavar="FILE.py[:NAME]")
@click.option("part", "--as", metavar="PART", help="What it is, where that cannot be told: attention, multi_head, …")
@click.option("--explain", is_flag=True, help="Say what was assumed; show notes and the weights of each example.")
@click.option("allow", "--allow", type=click.Choice(["fragile"]), multiple=True, help="Let what is only fragile pass.")
@click.option("lang", "--lang", type=click.Choice(["en", "zh"]), help="Language.  [default: the locale's]")
@click.option("--watch", is_flag=True, help="Check again whenever the file is saved.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    file: str,
    part: str | None,
    explain: bool,
    allow: tuple[str, ...],
    lang: str | None,
    watch: bool,
    as_json: bool,
) -> None:
    """Check the parts of a Transformer that FILE.py defines, in NumPy or PyTorch, and name what is wrong.

    It is found by its name, its arguments and by trial; your code runs in a child process with limits of time and
    memory. The exit code is 0 if every part that was found is right, else 1.

    \b
    clearhead check my_attention.py
    clearhead check my_attention.py:attend --as attention
    clearhead check my_model.py --allow fragile --json
    """
    from clearhead.checker.check import check, validate_part

    path = Path(file if Path(file).exists() else file.rpartition(":")[0] or file)
    if not path.is_file():
        raise click.UsageError(f"there is no file {path}")
    try:
        validate_part(part)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    while True:
        seen = path.stat().st_mtime_ns
        report = check(file, part, lang=lang)
        if as_json:
            print_json(report.to_dict(allow))
        else:
            show(report, explain, allow)
        if not watch:
            ctx.exit(0 if report.passes(allow) else 1)
        wait_for_change(path, seen, report.language)


def show(report: CheckReport, explain: bool, allow: tuple[str, ...]) -> None:
    from clearhead.checker.render import render_lines

    out = console()
    for line in render_lines(report, explain, allow):
        out.print(line)


def wait_for_change(path: Path, seen: int, language: str) -> None:
    from clearhead.checker.messages import word

    click.echo(word("watching", language).format(file=path), err=True)
    while not path.exists() or path.stat().st_mtime_ns == seen:
        time.sleep(0.2)
