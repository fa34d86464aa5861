"""How a run is carried out: recomputation, precision, best model, progress."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import clearhead
from clearhead.cli import runs, train_display
from clearhead.cli import train as cli_train
from clearhead.configs import dumps
from clearhead.training import curves
from clearhead.training.loop import Callbacks, Execution, train
from clearhead.training.run import Run

from .tools import same, small, start, weights


def test_recomputing_gives_the_same_weights(corpus: Path, tmp_path: Path) -> None:
    for name, execution in (("plain", Execution()), ("again", Execution(recompute=True))):
        model = train(small(steps=4), [corpus], tmp_path / name, execution=execution)
        assert not any("forward" in vars(block) for block in model.stack.layers())
    assert same(tmp_path / "plain", tmp_path / "again")


def test_the_best_model_is_kept_beside_the_last(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    numbers: list[dict] = []
    train(small(evaluate_every=3), [corpus], out, callbacks=Callbacks(step=numbers.append))
    best = min((line for line in numbers if "val/loss" in line), key=lambda line: line["val/loss"])
    assert same(out, out / "best") == (best["step"] == 12)
    clearhead.load(out / "best")
    assert all(isinstance(line["sample"], str) and line["peak"] > 0 for line in numbers if "val/loss" in line)


def test_the_time_that_is_left_goes_by_steps_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([90.0, 100.0, 120.0, 120.0])
    monkeypatch.setattr(train_display.time, "monotonic", lambda: next(clock))
    callbacks = train_display.line_callbacks(30)
    for step in (10, 20):  # a run that was resumed, a hundred seconds after it was called
        callbacks.step({"step": step, "train/loss": 1.0, "tokens_per_second": 9.0, "peak": 0.1})
    first, second = capsys.readouterr().err.splitlines()
    assert "left" not in first
    assert second.endswith("0:20 left")


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_run_that_was_never_evaluated_has_a_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluated: bool
) -> None:
    run, drawn = Run(tmp_path), []
    monkeypatch.setattr(curves, "save", lambda picture, path: drawn.extend(picture.axes[0].lines))
    run.log(**{"step": 1, "train/loss": 3.0} | ({"val/loss": 2.0} if evaluated else {}))
    curves.draw_curves([tmp_path], tmp_path / "loss.svg")
    assert [line.get_label().split(", ")[1] for line in drawn] == ["training (smoothed)", "validation"][: 1 + evaluated]


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "adapter.safetensors", "none"])
def test_runs_tells_who_has_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (tmp_path / "recipe.json").write_text(dumps(small()))
    (tmp_path / name).touch()
    runs.command.main([str(tmp_path), "--json"], standalone_mode=False)
    (row,) = json.loads(capsys.readouterr().out)
    assert row["finished"] == (name != "none")


def test_tensorboard_reads_the_numbers(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    file, out = tmp_path / "recipe.json", tmp_path / "run"
    file.write_text(dumps(small(steps=3)))
    assert start(file, corpus, out, "--tensorboard").wait() == 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard")).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    lines = Run(out).history()
    assert losses == [(line["step"], pytest.approx(line["train/loss"], rel=1e-6)) for line in lines]


def test_nothing_is_written_for_tensorboard_before_there_is_a_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with cli_train.tensorboard_events(tmp_path / "run", Callbacks()):
        pass
    assert list(tmp_path.iterdir()) == []


def test_lower_precision_is_tried_and_said_where_it_fails(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from clearhead.measure.precision import Probe
    from clearhead.training import loop

    monkeypatch.setattr(loop, "precision_works", lambda dtype: Probe(dtype=dtype, outcome="killed", detail="SIGILL"))
    messages: list[str] = []
    train(
        small(steps=2, precision="bfloat16"), [corpus], tmp_path / "run", callbacks=Callbacks(message=messages.append)
    )
    assert any("bfloat16 kills the process (SIGILL); training in float32" in text for text in messages)


def test_bfloat16_learns_as_float32_does(corpus: Path, tmp_path: Path) -> None:
    """In a child, under the setting that avoids an instruction which some machines advertise and do not allow."""
    settings = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
    losses = {}
    for precision in ("float32", "bfloat16"):
        file, out = tmp_path / f"{precision}.json", tmp_path / precision
        file.write_text(dumps(small(steps=30, precision=precision, dropout=0.0)))
        command = [sys.executable, "-m", "clearhead", "train", str(file), "--data", str(corpus), "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=settings)
        assert done.returncode == 0, done.stderr
        assert "training in float32" not in done.stderr or precision == "float32"
        losses[precision] = [line["train/loss"] for line in Run(out).history()]
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"][-1] == pytest.approx(losses["float32"][-1], rel=0.1)
    assert weights(tmp_path / "bfloat16")["stack.blocks.0.ffn.up.weight"].dtype == torch.float32


def test_where_nothing_can_compile_a_run_says_so_and_goes_on(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clearhead.measure.machine import Compile
    from clearhead.training import compiling

    monkeypatch.setattr(compiling, "look_for_compiler", lambda: Compile(compiler=None, headers=True))
    messages: list[str] = []
    train(
        small(steps=2),
        [corpus],
        tmp_path / "a",
        execution=Execution(compile=True),
        callbacks=Callbacks(message=messages.append),
    )
    train(small(steps=2), [corpus], tmp_path / "b")
    assert any("torch.compile needs a C++ compiler" in text for text in messages)
    assert same(tmp_path / "a", tmp_path / "b")


def test_where_compiling_fails_a_run_says_why_and_goes_on(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clearhead.measure.machine import Compile
    from clearhead.training import compiling

    def broken(function: object) -> object:
        raise RuntimeError("no working compiler found\nand much more")

    messages: list[str] = []
    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(compiling, "look_for_compiler", lambda: Compile(compiler="g++", headers=True))
    train(
        small(steps=1),
        [corpus],
        tmp_path / "a",
        execution=Execution(compile=True),
        callbacks=Callbacks(message=messages.append),
    )
    assert "torch.compile does not work here: no working compiler found; training without it" in " ".join(messages)
