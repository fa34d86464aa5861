"""Take the studio's screenshots for the documentation: `python docs/figures.py`. Needs chromium and playwright.

Each picture is `docs/images/studio-NAME-THEME.png`, at most 150 kB.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.studio.tools import CHROMIUM, running_studio

OUT = Path(__file__).with_name("images")
TEXT = "To be or not to be, that is the question"
PICTURES = {
    "write": "#view=write",
    "flow": "#view=flow&step=stack.blocks.1.mixer.scores&cell=1,6,3&head=1",
    "atlas": "#view=atlas",
    "head": "#view=atlas&open=true&layer=1&head=0",
    "lens": "#view=lens",
    "intervene": '#view=intervene&changes=[{"kind":"head","place":"stack","layer":1,"head":2,"do":"zero"}]',
    "check": "#view=check",
    "build": "#view=build",
    "lab": "#view=lab",
    "tour": "#view=flow&tour=4&step=stack.blocks.0.mixer.scores",
}
"""Name of a picture -> where in the studio it is taken."""


def shrink(path: Path) -> None:
    """Store a picture with 128 colours, which is enough for a page of text and heat maps."""
    from PIL import Image

    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(128)
    small.save(path, optimize=True)


def main(model: str | None = None) -> None:
    from playwright.sync_api import sync_playwright

    OUT.mkdir(exist_ok=True)
    with running_studio(*([model] if model else []), "--text", TEXT) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 800}, locale="en-US")
        page.goto(address)
        base = page.url.partition("#")[0]
        for theme in ("light", "dark"):
            for name, place in PICTURES.items():
                page.goto("about:blank")
                page.goto(f"{base}{place}&theme={theme}")
                page.wait_for_selector("main .panel")
                page.wait_for_load_state("networkidle")
                page.wait_for_timeout(400)
                path = OUT / f"studio-{name}-{theme}.png"
                page.screenshot(path=path)
                shrink(path)
                print(path.relative_to(OUT.parent), f"{path.stat().st_size / 1000:.0f} kB")
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:2])
