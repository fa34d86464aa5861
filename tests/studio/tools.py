"""A studio on this machine, and a browser that records its messages and requests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)


@contextmanager
def running_studio(*arguments: str) -> Iterator[str]:
    """The address of `clearhead studio` while it runs."""
    command = [sys.executable, "-m", "clearhead", "studio", *arguments, "--no-browser"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "CLEARHEAD_SHAPES": "unchecked"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            process.wait(10)


class Watched:
    """A page, the requests it made and the messages it wrote to the console."""

    def __init__(self, page: Any) -> None:
        self.page, self.requests, self.messages = page, [], []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.messages.append(message.text))
        page.on("pageerror", lambda error: self.messages.append(str(error)))

    def go(self, base: str, address: str, wait: str) -> None:
        self.page.goto("about:blank")
        self.page.goto(f"{base}{address}")
        self.page.wait_for_selector(wait, timeout=30_000)

    def until(self, expression: str, seconds: float = 30.0) -> None:
        """Wait until an expression is true. (Playwright's own wait needs eval, which the page's policy forbids.)"""
        end = time.monotonic() + seconds
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, expression
            self.page.wait_for_timeout(50)

    def open(self, view: str, wait: str = "main .panel") -> None:
        self.page.click(f"button[data-view={view}]")
        self.page.wait_for_selector(f"main[data-view={view}]")
        self.page.wait_for_selector(wait, timeout=30_000)
