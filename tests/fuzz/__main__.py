"""`python -m tests.fuzz`: mutated files and random command lines; nothing may end in a traceback, hang, or take 2 GB.

Every case runs in a process of its own, forked from one that has everything imported. The seed of a run repeats it.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import click

os.environ["OMP_NUM_THREADS"] = "1"  # threads do not survive a fork
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from clearhead.cli.main import COMMANDS, cli, describe_error

from .assets import write_assets
from .mutate import mutate

CPU_SECONDS = 20  # of one case
MEMORY = 2 * 2**30
TRACEBACK, HANG, CRASH = 70, 71, 72
VALUES = [
    "0", "-1", "1", "2", "3", "5", "64", "1e9", "1e400", "99999999999", "nan", "", "x", "[b]", "[/b]", "\x1b[31m",
    "../..", "/", ".", "-", "--", "*", "0,1", "1-2", "-3--1", "a=b", "stack.repeats=2", "stack.dim=0", "head=", "=3",
    "stack.pattern.0=3", "light", "int8", "float32", "gpt2", "tiny-gpt", "tiny-llama", "json", "tsv",
]  # fmt: skip
SLOW = {"train", "compare", "doctor", "scaling", "lab", "exercises", "completion", "serve", "studio"}
"""Commands that run for long, wait for requests, or write into folders: only their option parsing is tried."""


@dataclass
class Tally:
    """What happened, by kind, and one example of each place that failed."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    peak: int = 0
    slowest: float = 0.0

    def add(self, kind: str, text: str, case: str) -> None:
        self.counts[kind] += 1
        if kind not in ("fine", "refused"):
            place = text.strip().splitlines()[-1][:200] if text.strip() else kind
            if f"{kind}: {place}" not in self.examples:
                self.examples[f"{kind}: {place}"] = case
                print(f"{kind}: {case}\n{text[-3000:]}", flush=True)


def run_case(arguments: list[str], typed: str, log: Path) -> tuple[str, str, int, float]:
    """Run a command line in a forked process: what came of it, its traceback, peak memory, CPU seconds."""
    child = os.fork()
    if child == 0:
        os._exit(run_here(arguments, typed, log))
    deadline = time.monotonic() + 10 * CPU_SECONDS
    while True:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    seconds, peak = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024
    text = log.read_text(errors="replace") if log.exists() else ""
    if os.WIFSIGNALED(status):
        kind = "hang" if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL) else "crash"
        return kind, f"signal {os.WTERMSIG(status)}", peak, seconds
    code = os.WEXITSTATUS(status)
    kind = {0: "fine", TRACEBACK: "traceback", HANG: "hang"}.get(code, "refused")
    if kind in ("fine", "refused") and peak > MEMORY:
        kind = "memory"
    return kind, text, peak, seconds


def run_here(arguments: list[str], typed: str, log: Path) -> int:
    """In the child: run the command with its output thrown away; the exit code says what happened."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * MEMORY, used + 2 * MEMORY))
    with tempfile.TemporaryFile("w+") as given, Path(os.devnull).open("w") as nothing:
        given.write(typed)
        given.seek(0)
        os.dup2(given.fileno(), 0)
        sys.stdin = os.fdopen(0)
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
        with redirect_stdout(nothing), redirect_stderr(nothing):
            try:
                cli(arguments, prog_name="clearhead", standalone_mode=False)
            except (click.ClickException, click.Abort, SystemExit):
                return 1
            except BaseException as error:  # every kind: that is the question
                if isinstance(error, Exception) and describe_error(error) is not None:
                    return 1
                log.write_text(traceback.format_exc())
                return TRACEBACK
    return 0


def fuzz_files(folder: Path, cases: int, rng: random.Random, tally: Tally) -> None:
    commands = write_assets(folder)
    log, runs = folder / "log", folder / "runs"
    shutil.copytree(runs, folder / "runs.whole")
    names = sorted(commands)
    for number in range(cases):
        name = names[number % len(names)]
        path = folder / name
        whole = path.read_bytes()
        path.write_bytes(mutate(whole, rng, path.suffix in (".json", ".jsonl")))
        line = [word.replace("{}", str(folder)) for word in rng.choice(commands[name])]
        log.unlink(missing_ok=True)
        kind, text, peak, seconds = run_case(line, "hello\n", log)
        tally.add(kind, text, f"{name}: {' '.join(line)}")
        if kind not in ("fine", "refused"):
            kept = folder.parent / "failures" / f"{number}-{path.name}"
            kept.parent.mkdir(exist_ok=True)
            kept.write_bytes(path.read_bytes())
        tally.peak, tally.slowest = max(tally.peak, peak), max(tally.slowest, seconds)
        path.write_bytes(whole)
        if line[0] == "train":
            shutil.rmtree(runs)
            shutil.copytree(folder / "runs.whole", runs)
        report(number + 1, cases, "files", tally)


def random_line(folder: Path, rng: random.Random) -> list[str]:
    """A command with options that it has, and values that it may not expect."""
    name = rng.choice(sorted(COMMANDS))
    context = click.Context(cli)
    command = cli.get_command(context, name)
    line = [name]
    if isinstance(command, click.Group):
        name = rng.choice(command.list_commands(context))
        line.append(name)
        command = command.get_command(context, name)
    assert command is not None
    values = [*VALUES, str(folder), str(folder / "llama"), str(folder / "bert"), str(folder / "text.txt")]
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            good = [str(folder / "llama"), "tiny-gpt"] if parameter.name in ("model", "text") else values
            line += [rng.choice(good if rng.random() < 0.6 else values)] if rng.random() < 0.9 else []
        elif rng.random() < 0.15 and parameter.opts[-1] not in ("--write", "--steps", "--out", "--force"):
            line += [rng.choice(parameter.opts)] if rng.random() < 0.95 else ["--nope"]
            if not getattr(parameter, "is_flag", False):
                choices = list(getattr(parameter.type, "choices", ())) or values
                line.append(str(rng.choice(choices if rng.random() < 0.5 else values)))
    if line[0] in SLOW and line[0] != "completion":
        line.append("--no-such-option")
    if line[0] in ("generate", "chat", "translate") and not {"-m", "--max-new-tokens"} & {*line}:
        line += ["-m", "3"]
    return line


def fuzz_lines(folder: Path, cases: int, rng: random.Random, tally: Tally) -> None:
    os.chdir(folder)
    log = folder / "log"
    for number in range(cases):
        line = random_line(folder, rng)
        log.unlink(missing_ok=True)
        kind, text, peak, seconds = run_case(line, "hello\n", log)
        tally.add(kind, text, " ".join(line))
        tally.peak, tally.slowest = max(tally.peak, peak), max(tally.slowest, seconds)
        report(number + 1, cases, "command lines", tally)


def report(done: int, cases: int, what: str, tally: Tally) -> None:
    if done == cases or done % 250 == 0:
        counts = ", ".join(f"{count:,} {kind}" for kind, count in tally.counts.most_common())
        print(
            f"{done:,} of {cases:,} {what}: {counts}; {tally.peak / 2**20:,.0f} MiB, {tally.slowest:.1f} s", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", default=None, help="folder for the files that failed")
    given = parser.parse_args()
    for name in (
        "clearhead.generate.complete",
        "clearhead.inspect",
        "clearhead.measure.perplexity",
        "clearhead.tasks",
        "clearhead.training.loop",
        "matplotlib.figure",
    ):
        import_module(name)  # here once, not in every case

    bad = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "of", "assets")  # so that `../..` is a folder of ours
        folder.mkdir(parents=True)
        for what, cases in ((fuzz_files, given.files), (fuzz_lines, given.lines)):
            tally = Tally()
            what(folder, cases, random.Random(given.seed), tally)
            bad += sum(count for kind, count in tally.counts.items() if kind not in ("fine", "refused"))
        if given.keep and Path(place, "failures").exists():
            shutil.copytree(Path(place, "failures"), given.keep, dirs_exist_ok=True)
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
