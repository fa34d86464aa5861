"""Every example in the documentation runs as it stands, and prints what the page says it prints.

The blocks of a page run in order: ```python in one namespace, ```bash as typed, in an empty folder that holds a link to
`examples/`. A ```text block right after a block is its exact output, on a terminal of 120 columns without colour.
A ```bash block of `make` commands is not run: its targets must exist. ```bash no-run is skipped.
"""

import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for page in (
        ROOT / "README.md",
        ROOT / "README.zh.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    )
    if page.exists()
]
COMMANDS = ("clearhead", "python", "export")

# Runs the blocks it reads from its input and writes what each printed; stops at the first that fails. Commands that
# need no shell run in copies of this process, as they would alone but for the seconds in which torch loads.
DRIVER = """
import contextlib, io, json, os, shlex, subprocess, sys, tempfile, traceback
import torch

START = torch.initial_seed()

def typed(code):
    return subprocess.run(["bash", "-euo", "pipefail", "-c", code], capture_output=True, text=True)

def copied(line):
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1), os.dup2(errors.fileno(), 2)
            code = 1
            try:
                from clearhead.cli.main import main
                torch.manual_seed(START)
                sys.argv = shlex.split(line, comments=True)
                main()
                code = 0
            except SystemExit as left:
                code = left.code or 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0), errors.seek(0)
        return subprocess.CompletedProcess(line, code, out.read(), errors.read())

def commands(code):
    if "export" in code or "\\\\" in code:
        return [typed(code)]
    done = []
    for line in code.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            plain = line.startswith("clearhead ") and not set(line) & set("|<>&;$`")
            done.append(copied(line) if plain else typed(line))
            if done[-1].returncode:
                break
    return done

blocks, namespace, results = json.load(sys.stdin), {"__name__": "__main__"}, []
for block in blocks:
    if block["language"] == "bash":
        done = commands(block["code"])
        printed = "".join(one.stdout for one in done)
        error = f"exit code {done[-1].returncode}\\n{done[-1].stderr}" if done and done[-1].returncode else ""
    else:
        out, error = io.StringIO(), ""
        try:
            with contextlib.redirect_stdout(out):
                exec(compile("\\n" * block["line"] + block["code"], block["page"], "exec"), namespace)
        except BaseException:
            error = traceback.format_exc()
        printed = out.getvalue()
    results.append({"printed": printed, "error": error})
    if error:
        break
json.dump(results, sys.stdout)
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and the ```text block that follows it, if one does."""

    page: str
    line: int  # of its opening fence, from 1
    language: str
    code: str
    expected: str | None = None

    @property
    def commands(self) -> list[str]:
        joined = self.code.replace("\\\n", " ")
        return [line for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]

    @property
    def is_make(self) -> bool:
        return self.language == "bash" and all(line.startswith("make") for line in self.commands)

    @property
    def runs(self) -> bool:
        return self.language in ("python", "bash") and not self.is_make


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page in order, each with its output where the page states one."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    name, at, last_end = page.relative_to(ROOT).as_posix(), 0, -1
    while at < len(lines):
        opening = re.fullmatch(r"\s*(`{3,})(.*)", lines[at])
        if opening is None:
            at += 1
            continue
        start, fence, language = at, opening[1], opening[2].strip()
        at += 1
        while at < len(lines) and lines[at].strip() != fence:
            at += 1
        body = textwrap.dedent("".join(f"{line}\n" for line in lines[start + 1 : at]))
        last = found[-1] if found and not any(line.strip() for line in lines[last_end + 1 : start]) else None
        if language == "text" and last is not None and last.runs and last.expected is None:
            found[-1] = Block(last.page, last.line, last.language, last.code, body)
        else:
            found.append(Block(name, start + 1, language, body))
        last_end, at = at, at + 1
    return found


def run_blocks(blocks: list[Block], folder: Path) -> list[dict[str, str]]:
    """What each block printed, in a fresh interpreter in `folder`, and the error that ended it."""
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("FORCE_COLOR", "CLICOLOR"))}
    env |= {
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), env["PATH"])),
        "COLUMNS": "120",
        "OMP_NUM_THREADS": "1",  # as `make test` has it: many small products, several workers
        "NO_COLOR": "1",
        "PYTHONIOENCODING": "utf-8",
    }
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps([vars(block) for block in blocks]),
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=folder,
        env=env,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_examples_run_and_print_what_the_page_says(page: Path, tmp_path: Path) -> None:
    blocks = [block for block in blocks_of(page) if block.runs]
    results = run_blocks(blocks, tmp_path) if blocks else []
    for block, result in zip(blocks, results, strict=False):
        where = f"{block.page}:{block.line}"
        assert not result["error"], f"{where} fails:\n{result['error']}"
        if block.expected is not None:
            assert clean(result["printed"]) == clean(block.expected), f"{where} prints something else"
    assert len(results) == len(blocks)


def clean(text: str) -> list[str]:
    """The lines without the spaces at their ends, which editors drop."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_are_ours(page: Path) -> None:
    for block in blocks_of(page):
        if block.language == "bash" and not block.is_make:
            strange = [line for line in block.commands if not line.startswith(COMMANDS)]
            assert not strange, f"{block.page}:{block.line} has commands that a test cannot run: {strange}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_make_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    named = {word for block in blocks_of(page) if block.is_make for line in block.commands for word in targets_in(line)}
    assert named <= targets, f"{page_id(page)} names make targets that do not exist: {sorted(named - targets)}"


def targets_in(command: str) -> list[str]:
    words = command.split("#")[0].split()[1:]
    return [word for word in words if not word.startswith("-") and "=" not in word]


def test_blocks_are_found() -> None:
    """The reader of pages itself: order, languages, outputs, and what is not an output."""
    page = ROOT / "docs" / "learn" / "attention.md"
    blocks = blocks_of(page)
    assert sum(block.language == "python" for block in blocks) == page.read_text(encoding="utf-8").count(
        "\n```python\n"
    )
    assert any(block.expected for block in blocks)
    assert blocks == sorted(blocks, key=lambda block: block.line)


def test_a_wrong_page_is_noticed(tmp_path: Path) -> None:
    good = Block("x.md", 1, "python", "a = 2\nprint(a)\n")
    uses = Block("x.md", 5, "bash", "python -c 'print(3)'\n")
    bad = Block("x.md", 9, "python", "print(a)\nprint(b)\n")
    first, second, third = run_blocks([good, uses, bad, good], tmp_path)
    assert (first["printed"], second["printed"], third["printed"]) == ("2\n", "3\n", "2\n")
    assert "NameError" in third["error"]
    assert "line 11" in third["error"]
    assert not first["error"]
