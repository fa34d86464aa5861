"""Several processes give the same run as one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import clearhead
from clearhead.configs import dumps
from clearhead.training.loop import Execution, train
from clearhead.training.run import Run

from .test_pairs import tiny, write_table
from .tools import same, small, weights


def torchrun(file: Path, corpus: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "clearhead",
    ]
    options = ["train", str(file), "--data", str(corpus), "--out", str(out), *more]
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *options], capture_output=True, text=True, check=False, env=settings, timeout=120)


@pytest.mark.parametrize(
    ("optimizer", "sharded"),
    [("Muon", False), ("AdamW", True), pytest.param("Muon", True, marks=pytest.mark.proof)],
)
def test_two_processes_walk_the_same_curve_as_one(
    corpus: Path,
    tmp_path: Path,
    optimizer: str,
    sharded: bool,
) -> None:
    file = tmp_path / "recipe.json"
    config = small(steps=6, accumulate=2, save_every=3, dropout=0.0)
    config = config if optimizer == "Muon" else config.with_value("optimizer", {"kind": "AdamW", "lr": 0.01})
    file.write_text(dumps(config))
    train(config, [corpus], tmp_path / "one")
    done = torchrun(file, corpus, tmp_path / "two", *(["--shard"] if sharded else []))
    assert done.returncode == 0, done.stderr
    one, two = (Run(tmp_path / name).history() for name in ("one", "two"))
    assert [line["step"] for line in two] == [1, 2, 3, 4, 5, 6]
    for a, b in zip(one, two, strict=True):
        assert b["train/loss"] == pytest.approx(a["train/loss"], rel=1e-4)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)
    assert two[-1]["val/loss"] == pytest.approx(one[-1]["val/loss"], rel=1e-3)
    mine, other = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert mine.keys() == other.keys()
    for name in mine:
        torch.testing.assert_close(other[name], mine[name], atol=2e-3, rtol=1e-2)
    clearhead.load(tmp_path / "two")
    written = sorted(path.name for path in (tmp_path / "two" / "checkpoints" / "step-00000003").iterdir())
    assert len([name for name in written if name.endswith(".safetensors")]) == 2
    assert not [
        path for path in (tmp_path / "two").rglob("*") if path.suffix in (".pt", ".pkl", ".distcp", ".metadata")
    ]


def test_a_process_that_has_no_row_of_a_batch_waits_for_the_others(tmp_path: Path) -> None:
    """Pairs, of which a batch holds one or two: of two processes, one often has nothing to learn from."""
    file, table = tmp_path / "recipe.json", write_table(tmp_path / "numbers.tsv", 3)
    config = tiny(dropout=0.0, steps=4, batch=8, evaluate_every=4)
    file.write_text(dumps(config))
    train(config, [table], tmp_path / "one")
    done = torchrun(file, table, tmp_path / "two")
    assert done.returncode == 0, done.stderr
    one, two = (Run(tmp_path / name).history() for name in ("one", "two"))
    assert [line["train/loss"] for line in two] == pytest.approx([line["train/loss"] for line in one], rel=1e-4)
    assert two[-1]["val/loss"] == pytest.approx(one[-1]["val/loss"], rel=1e-3)


def test_a_sharded_run_goes_on_in_any_number_of_processes(corpus: Path, tmp_path: Path) -> None:
    file = tmp_path / "recipe.json"
    config = small(steps=8, save_every=4, dropout=0.0)
    file.write_text(dumps(config))
    assert torchrun(file, corpus, tmp_path / "whole", "--shard").returncode == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoints" / "step-00000008")
    shutil.copytree(tmp_path / "half", tmp_path / "alone")
    assert torchrun(file, corpus, tmp_path / "half", "--shard", "--resume").returncode == 0
    assert same(tmp_path / "whole", tmp_path / "half")
    train(config, [corpus], tmp_path / "alone", resume=True)
    mine, other = weights(tmp_path / "whole"), weights(tmp_path / "alone")
    for name in mine:
        torch.testing.assert_close(other[name], mine[name], atol=1e-3, rtol=1e-2)


def test_what_the_first_process_refuses_is_said_once(corpus: Path, tmp_path: Path) -> None:
    file = tmp_path / "recipe.json"
    file.write_text(dumps(small()))
    done = torchrun(file, tmp_path / "nothing", tmp_path / "run")
    assert done.returncode != 0
    assert done.stderr.count("there is no file or folder") == 1
    assert done.stderr.count("Traceback") == 1  # that of torchrun itself, which tells of the processes
    assert "training/loop.py" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_one_process_cannot_shard(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="start them with: torchrun"):
        train(small(), [corpus], tmp_path / "run", execution=Execution(shard=True))
