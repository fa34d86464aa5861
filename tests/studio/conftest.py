"""One browser, one studio and one short run for all tests of this folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clearhead.studio.app import SMALL_MODEL

from .tools import CHROMIUM, STUDIO_TEXT, environment, running_studio

OTHERS = ("tiny-bert", "tiny-vit", "tiny-mamba", "tiny-mixtral", "tiny-transformer")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@pytest.fixture(scope="session")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four steps with probes; step 0 and two checkpoints can be opened."""
    folder = tmp_path_factory.mktemp("runs") / "short"
    text = folder.parent / "text.txt"
    text.write_text("To be or not to be, that is the question. " * 200)
    sizes = ["batch=4", "task.context=32", "evaluate_every=2", "save_every=2", "evaluate_targets=64"]
    command = ["train", "chars", "--data", str(text), "--out", str(folder), "--steps", "4", "--probe-every", "2"]
    sets = [part for size in sizes for part in ("--set", size)]
    subprocess.run(
        [sys.executable, "-m", "clearhead", *command, *sets], check=True, capture_output=True, env=environment()
    )
    return folder


@pytest.fixture(scope="session")
def studio(short_run: Path) -> Iterator[str]:
    pytest.importorskip("uvicorn")
    with running_studio(str(SMALL_MODEL), *OTHERS, "--text", STUDIO_TEXT, "--runs", str(short_run.parent)) as address:
        yield address
