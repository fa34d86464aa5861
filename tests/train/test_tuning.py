"""Going on from a checkpoint, wholly or by differences of low rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import clearhead
from clearhead.training.loop import Report, train
from clearhead.training.run import Run

from .tools import TEXT, small, stop_at, weights


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    (folder / "text.txt").write_text(TEXT)
    train(small(steps=30, dropout=0.0), [folder / "text.txt"], folder / "run")
    return folder / "run"


def other_text(folder: Path) -> Path:
    path = folder / "other.txt"
    path.write_text("a lazy dog over the brown fox. " * 300)
    return path


def tuned(base: Path, tmp_path: Path, *more: str) -> Path:
    command = ["train", "--from", str(base), "--data", str(other_text(tmp_path)), "--out", str(tmp_path / "tuned")]
    sizes = ["--steps", "30", "--set", "task.context=16", "--set", "optimizer.lr=0.01", "--set", "evaluate_every=10"]
    done = subprocess.run(
        [sys.executable, "-m", "clearhead", *command, *sizes, *more], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return tmp_path / "tuned"


def test_a_checkpoint_is_trained_further_by_its_own_tokenizer(base: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in base.glob("*.*") if path.is_file()}
    out = tuned(base, tmp_path)
    losses = [line["train/loss"] for line in Run(out).history()]
    assert losses[0] < 2.5  # not from nothing: that would be ln 28 = 3.3
    assert np.mean(losses[-5:]) < losses[0] - 0.5
    assert (out / "tokenizer.json").read_bytes() == before["tokenizer.json"]
    assert {path.name: path.read_bytes() for path in base.glob("*.*") if path.is_file()} == before


def test_lora_learns_few_numbers_saves_them_alone_and_leaves_the_base(base: Path, tmp_path: Path) -> None:
    before = weights(base)
    out = tuned(base, tmp_path, "--lora", "4")
    losses = [line["train/loss"] for line in Run(out).history()]
    assert np.mean(losses[-5:]) < losses[0] - 0.2
    assert not (out / "model.safetensors").exists()
    learned = load_file(out / "adapter.safetensors")
    assert sum(t.numel() for t in learned.values()) < 0.5 * sum(t.numel() for t in before.values())
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(base).items())
    adapted, plain = clearhead.load(out), clearhead.load(base)
    name = "stack.blocks.1.ffn.up"
    difference = 2 * learned[f"{name}.b"] @ learned[f"{name}.a"]  # alpha / rank = 2
    torch.testing.assert_close(
        adapted.get_submodule(name).weight, plain.get_submodule(name).weight + difference, atol=1e-6, rtol=1e-5
    )
    assert torch.equal(adapted.embedding.table, plain.embedding.table)
    adapted.save(tmp_path / "merged")
    tokens = torch.randint(0, 28, (1, 9))
    with torch.no_grad():
        assert torch.equal(clearhead.load(tmp_path / "merged")(tokens), adapted(tokens))


def test_an_adapter_whose_base_has_changed_is_refused(base: Path, tmp_path: Path) -> None:
    out = tuned(base, tmp_path, "--lora", "2", "--steps", "2")
    about = json.loads((out / "adapter.json").read_text())
    (out / "adapter.json").write_text(json.dumps(about | {"digest": "0"}))
    with pytest.raises(ValueError, match="whose weights have changed since"):
        clearhead.load(out)
    (out / "adapter.json").write_text(json.dumps(about | {"base": str(tmp_path / "gone")}))
    with pytest.raises(ValueError, match="which is not there"):
        clearhead.load(out)


def test_an_interrupted_adapter_goes_on(base: Path, tmp_path: Path) -> None:
    from clearhead.cli.train import find_recipe

    data = other_text(tmp_path)
    changes = ("task.context=16", "save_every=4", "evaluate_every=4")
    config = find_recipe("finetune", changes, steps=8, checkpoint=str(base), lora=2)
    train(config, [data], tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(config, [data], tmp_path / "broken", report=Report(show=lambda numbers: stop_at(6, numbers)))
    train(config, [data], tmp_path / "broken", resume=True)
    mine, other = (load_file(tmp_path / name / "adapter.safetensors") for name in ("whole", "broken"))
    assert all(torch.equal(mine[name], other[name]) for name in mine)
