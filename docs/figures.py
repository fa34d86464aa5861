"""Draw the pictures of README and docs with the commands beside them: `make figures`.

A page that shows `images/NAME-light.svg` (or .png) has a command with `--out NAME.svg`, or a Python block that saves to
`"NAME.svg", theme="light"`. This script runs the page in an empty folder, then runs that command or block again with
the dark theme. Both pictures go to `docs/images`, each at most 150 kB. Commands that take minutes are marked
`bash no-run`: tests skip them, and this script runs those that draw.

    python -m docs.figures                     all pages
    python -m docs.figures README.md           the pictures of one page
    python -m docs.figures studio [MODEL]      screenshots of the studio
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from clearhead.studio.app import SMALL_MODEL
from tests.journeys.test_docs import DRIVER, Block, blocks_of
from tests.studio.tools import CHROMIUM, running_studio

DOCS = Path(__file__).parent
ROOT = DOCS.parent
OUT = DOCS / "images"
LIMIT = 150_000  # bytes of a picture
SHOWN = re.compile(r"images/(?!studio-)([\w-]+)-light\.(svg|png)")
TEXT = "To be or not to be, that is the question"
SCREENSHOTS = {
    "write": "#view=write",
    "flow": "#view=flow&step=stack.blocks.1.mixer.scores&cell=1,6,3&head=1",
    "atlas": "#view=atlas",
    "head": "#view=atlas&open=true&layer=1&head=0",
    "compare": "#view=atlas&compare=true&otherText=To be or not to be, that was the question",
    "lens": "#view=lens&token=.",
    "train": "#view=train",
    "intervene": '#view=intervene&changes=[{"kind":"head","place":"stack","layer":1,"head":2,"do":"zero"}]',
    "check": "#view=check",
    "build": "#view=build",
    "lab": "#view=lab",
    "tour": "#view=flow&tour=4&step=stack.blocks.0.mixer.scores",
    "steps": "#view=atlas&compare=true&model=chars · step 0&otherModel=chars&text=to be or not",
    "zh": "#view=flow&lang=zh&step=stack.blocks.1.mixer.weights&cell=1,6,3&head=1",
}
"""Name of a picture of the studio -> where in the studio it is taken."""


def pages() -> list[Path]:
    """README, then every page."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def drawing_lines(block: Block, file: str) -> list[str]:
    """The commands of a block that draw a picture."""
    return [line for line in block.commands if re.search(rf"--out {re.escape(file)}(\s|$)", line)]


def draws(block: Block, file: str) -> bool:
    """Whether a block draws a picture."""
    if block.language == "python":
        return f'"{file}", theme="light"' in block.code
    return block.language.startswith("bash") and bool(drawing_lines(block, file))


def drawn_files(page: Path) -> list[str]:
    """The pictures that a page shows and draws, such as `loss.svg`."""
    files = [f"{name}.{kind}" for name, kind in SHOWN.findall(page.read_text(encoding="utf-8"))]
    return [file for file in dict.fromkeys(files) if any(draws(block, file) for block in blocks_of(page))]


def dark(block: Block, file: str) -> Block:
    """The block that draws the same picture with the dark theme."""
    if block.language == "python":
        code = block.code.replace(f'"{file}", theme="light"', f'"{file}", theme="dark"')
        return Block(block.page, block.line, "python", code)
    lines = [f"{line.split('#')[0].strip()} --theme dark --force" for line in drawing_lines(block, file)]
    return Block(block.page, block.line, "bash", "\n".join(lines) + "\n")


def run(blocks: list[Block], folder: Path) -> None:
    """Run blocks as the tests of the documentation do; stop with the message of the first that fails."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps([vars(block) for block in blocks]),
        cwd=folder,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for block, result in zip(blocks, json.loads(done.stdout), strict=False):
        if result["error"]:
            sys.exit(f"{block.page}:{block.line} fails:\n{result['error']}")


def draw_page(page: Path) -> None:
    """Run a page, and store each picture that it draws in both themes."""
    files, blocks = drawn_files(page), blocks_of(page)
    if not files:
        return
    last = max(i for i, block in enumerate(blocks) if any(draws(block, file) for file in files))
    wanted = [block for block in blocks[: last + 1] if block.runs]
    for block in blocks[: last + 1]:
        if block.language == "bash no-run":
            lines = [line for file in files for line in drawing_lines(block, file)]
            wanted += [Block(block.page, block.line, "bash", "\n".join(lines) + "\n")] if lines else []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        run(wanted, Path(folder))
        store(files, Path(folder), "light")
        run([dark(block, file) for file in files for block in blocks if draws(block, file)], Path(folder))
        store(files, Path(folder), "dark")


def store(files: list[str], folder: Path, theme: str) -> None:
    """Copy pictures to the documentation; one that is too large is an error."""
    for file in files:
        name, _, kind = file.partition(".")
        path = OUT / f"{name}-{theme}.{kind}"
        shutil.copyfile(folder / file, path)
        if kind == "png":
            shrink(path)
        if (size := path.stat().st_size) > LIMIT:
            sys.exit(f"{path} has {size:,} bytes, but a picture of the documentation may have {LIMIT:,}")
        print(path.relative_to(ROOT), f"{size / 1000:.0f} kB")


def shrink(path: Path) -> None:
    """Store a picture with 128 colours, which is enough for a page of text and heat maps."""
    from PIL import Image

    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(128)
    small.save(path, optimize=True)


NO_SCALE = """import numpy as np


def attention(q, k, v):
    scores = q @ np.swapaxes(k, -1, -2)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v
"""


def prepare(page: Any, name: str) -> None:
    """What a reader does before a picture is taken."""
    if name == "check":
        page.fill("textarea.code", NO_SCALE)
        page.click("[data-act=check]")
        page.wait_for_selector("[data-code=no-scale]", timeout=120_000)
    if name == "intervene":
        page.click("[data-act=measure]")
        page.wait_for_selector("[data-act=measure]", timeout=120_000)
    if name == "lab":
        page.click("[data-lab=masks]")
        page.select_option("[data-part=instrument] select", "BigBird")
    if name == "write":
        page.click("[data-act=generate]")
        page.wait_for_selector("[data-part=generated] .tok", timeout=60_000)


def take_screenshots(model: str | None = None) -> None:
    """The studio in a browser, in both themes. Needs chromium and playwright."""
    from playwright.sync_api import sync_playwright

    OUT.mkdir(exist_ok=True)
    runs = Path(tempfile.mkdtemp())
    train = ["train", "chars", "--out", str(runs / "chars"), "--steps", "60", "--probe-every", "3"]
    subprocess.run([sys.executable, "-m", "clearhead", *train, "--set", "evaluate_every=15"], check=True)
    given = [*([model] if model else [str(SMALL_MODEL)]), "--text", TEXT, "--runs", str(runs)]
    with running_studio(*given) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1360, "height": 860}, locale="en-US")
        page.goto(address)
        base = page.url.partition("#")[0]
        for theme in ("light", "dark"):
            for name, place in SCREENSHOTS.items():
                page.goto("about:blank")
                page.goto(f"{base}{place}&theme={theme}")
                page.wait_for_selector("main .panel")
                page.wait_for_load_state("networkidle") if name != "train" else page.wait_for_selector("[data-frame]")
                prepare(page, name)
                page.wait_for_timeout(400)
                path = OUT / f"studio-{name}-{theme}.png"
                page.screenshot(path=path)
                shrink(path)
                if (size := path.stat().st_size) > LIMIT:
                    sys.exit(f"{path} has {size:,} bytes, but a picture of the documentation may have {LIMIT:,}")
                print(path.relative_to(DOCS), f"{size / 1000:.0f} kB")
        browser.close()


def main(arguments: list[str]) -> None:
    OUT.mkdir(exist_ok=True)
    if arguments[:1] == ["studio"]:
        take_screenshots(*arguments[1:2])
        return
    for page in map(Path, arguments) if arguments else pages():
        draw_page(page.resolve())
    if not arguments and CHROMIUM is not None:
        take_screenshots()


if __name__ == "__main__":
    main(sys.argv[1:])
