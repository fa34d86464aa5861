"""`clearhead doctor`: what this machine can do, and how to fix what it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from clearhead.units import bytes_text

from .options import console, json_option, print_json

if TYPE_CHECKING:
    from clearhead.measure.doctor import DoctorReport


@click.command("doctor")
@click.option("--quick", is_flag=True, help="Skip the tests of precisions and speed.")
@json_option
@click.pass_context
def command(ctx: click.Context, quick: bool, as_json: bool) -> None:
    """Check this machine: versions, speed, and which precisions work.

    Each precision is tested in its own process, because a broken one can crash it. This takes about ten seconds.
    The exit code is 0 if float32 works, else 1.

    \b
    clearhead doctor
    clearhead doctor --quick
    clearhead doctor --json
    """
    report = examine_with_progress(quick)
    if as_json:
        print_json(report.to_dict())
    else:
        show(report)
    ctx.exit(0 if report.ok else 1)


def examine_with_progress(quick: bool) -> DoctorReport:
    """The report; the current stage is shown on stderr if it is a terminal."""
    from rich.console import Console

    from clearhead.measure.doctor import examine

    err = Console(stderr=True, highlight=False)
    if not err.is_terminal or err.is_dumb_terminal:
        return examine(probe=not quick)
    with err.status("checking") as status:
        return examine(probe=not quick, progress=status.update)


def show(report: DoctorReport) -> None:
    from rich.padding import Padding
    from rich.text import Text

    out = console()
    versions = {name: version or "not installed" for name, version in report.versions.items()}
    table("Versions", [("clearhead", versions.pop("clearhead")), ("python", report.python), *versions.items()])
    table("Machine", [*machine_rows(report), *report.settings.items()])
    tried = [(probe.dtype, str(probe)) for probe in report.precisions]
    table("Precisions", tried or [("not tried",)])
    table("Optional", [(use.purpose, use.package, use.version or use.install) for use in report.uses])
    well = "No problems found." if tried else "No problems found. Run without --quick to test each precision."
    out.print(Text("What to do" if report.findings else well, "bold"))
    for finding in report.findings:
        style = "red" if finding.level == "error" else "yellow"
        out.print(Padding(Text(finding.text, style), (0, 0, 0, 2)))


def table(title: str, rows: Sequence[tuple[str, ...]]) -> None:
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, show_header=False, padding=(0, 0, 0, 2))
    grid.add_column(no_wrap=True)
    for row in rows:
        grid.add_row(*(Text(cell, overflow="fold") for cell in row))
    out = console()
    out.print(Text(title, "bold"))
    out.print(grid)
    out.print()


def machine_rows(report: DoctorReport) -> list[tuple[str, str]]:
    machine, speed, compile = report.machine, report.speed, report.compile
    threads = "torch is not installed" if report.threads is None else f"torch uses {report.threads} threads"
    quota = f", {machine.quota:g} allowed in this container" if machine.quota is not None else ""
    sizes = {"total": machine.memory_total, "free": machine.memory_available, "allowed": machine.memory_limit}
    lacking = "a C++ compiler" if compile.compiler is None else "Python.h"
    rows = [
        ("platform", machine.platform),
        ("processor", machine.processor or "unknown"),
        ("instructions", ", ".join(machine.instructions) or "no relevant ones"),
        ("cores", f"{machine.cores} usable{quota}; {threads}"),
        ("memory", ", ".join(f"{bytes_text(size)} {word}" for word, size in sizes.items() if size) or "unknown"),
        ("disk", f"{bytes_text(machine.disk_free)} free in {machine.folder}"),
        ("torch.compile", f"can use {compile.compiler}" if compile.possible else f"needs {lacking}"),
        ("kernels", report.kernels or "no C compiler found"),
    ]
    if speed is not None:
        rows += [
            ("matrix products", f"{speed.gemm_tflops:.3g} TFLOP/s in float32, measured"),
            ("memory reads", f"{speed.read_gbps:.3g} GB/s, measured"),
        ]
    for device in report.devices:
        if device.name != "cpu":
            size = f", {bytes_text(device.memory)}" if device.memory else ""
            rows.append((device.name, f"{device.model or 'available'}{size}"))
    return rows
