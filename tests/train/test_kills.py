"""A hundred kills, at moments drawn at random, change nothing. Minutes long: `make proof`."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from clearhead.configs import dumps
from clearhead.training.run import Run

from .tools import same, small, start

KILLS = 100


@pytest.mark.proof
def test_a_hundred_kills_change_nothing(corpus: Path, tmp_path: Path) -> None:
    """Kills hit the start, steps, checkpoint writes and the last save; a run that ends starts again."""
    file = tmp_path / "recipe.json"
    file.write_text(dumps(small(steps=300, save_every=1, evaluate_every=50)))
    begun = time.monotonic()
    assert start(file, corpus, tmp_path / "whole").wait() == 0
    length = time.monotonic() - begun
    rng, kills, finished = random.Random(0), 0, 0
    while kills < KILLS or not finished:
        out = tmp_path / f"broken-{finished}"
        process = start(file, corpus, out, *(["--resume"] if (out / "recipe.json").exists() else []))
        try:
            code = process.wait(rng.uniform(0, length) if kills < KILLS else None)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            code = process.wait()
            kills += 1
        if code == 0:
            assert same(tmp_path / "whole", out), f"run {finished} differs after {kills} kills"
            assert [line["step"] for line in Run(out).history()] == list(range(1, 301))
            finished += 1
        else:
            assert code == -signal.SIGKILL, f"exit code {code}"
    assert finished >= 1
