"""A studio on this machine, and a browser that records its messages and requests."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from clearhead.inspect.bundle import WEB

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)


STUDIO_TEXT = "To be or not to be"


def environment() -> dict[str, str]:
    """What a child needs to run this source tree."""
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "CLEARHEAD_SHAPES": "unchecked"}


@contextmanager
def running_studio(*arguments: str) -> Iterator[str]:
    """The address of `clearhead studio` while it runs."""
    command = [sys.executable, "-m", "clearhead", "studio", *arguments, "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            process.wait(10)


@cache
def phrases() -> list[tuple[re.Pattern[str], str]]:
    source = (WEB / "words" / "phrases.js").read_text(encoding="utf-8")
    found = [json.loads(line) for line in re.findall(r"^  (\[\".*\"\]),", source, re.MULTILINE)]
    return [(re.compile(pattern), re.sub(r"\$(\d)", r"\\g<\1>", words)) for pattern, words in found]


@cache
def translate(text: str) -> str:
    """A sentence of Python in Chinese, as `words/phrases.js` has it."""
    for pattern, words in phrases():
        text = pattern.sub(words, text, count=1)
    return text


@cache
def has_english(text: str) -> bool:
    """Whether a formula or a term keeps English words in Chinese; its numbers do not matter."""
    return bool(ENGLISH.search(translate(text)))


ENGLISH = re.compile(r"[A-Za-z]{3,} (?:of |a |the |in |is )?[a-z]{3,}")
"""Two English words after each other, which Chinese text does not have."""


class Watched:
    """A page, the requests it made and the messages it wrote to the console."""

    def __init__(self, page: Any) -> None:
        self.page, self.requests, self.messages = page, [], []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.messages.append(message.text))
        page.on("pageerror", lambda error: self.messages.append(str(error)))

    @property
    def base(self) -> str:
        return "http://" + urlsplit(self.page.url).netloc + "/"

    def forget(self) -> None:
        self.requests.clear()
        self.messages.clear()

    def go(self, address: str, wait: str) -> None:
        """Open a place of the studio by its address: first the start, so that nothing of the last view remains."""
        for each in ("#view=build", address or "#"):
            self.page.evaluate("(hash) => { location.hash = hash; }", each)
            view = re.search(r"view=(\w+)", each)
            self.page.wait_for_selector(f"main[data-view={view[1] if view else 'write'}]")
        self.page.wait_for_selector(wait, timeout=30_000)

    def code(self, part: str) -> str:
        """What Copy as Python of a panel copies."""
        return str(self.page.locator(f"[data-part={part}] [data-python]").first.get_attribute("data-python"))

    def until(self, expression: str, seconds: float = 30.0) -> None:
        """Wait until an expression is true. (Playwright's own wait needs eval, which the page's policy forbids.)"""
        end = time.monotonic() + seconds
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, expression
            self.page.wait_for_timeout(20)

    def open(self, view: str, wait: str = "main .panel") -> None:
        self.page.click(f"button[data-view={view}]")
        self.page.wait_for_selector(f"main[data-view={view}]")
        self.page.wait_for_selector(wait, timeout=30_000)
