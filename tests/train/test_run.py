"""Runs learn, repeat exactly, and survive a kill at any moment."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from clearhead.cli.main import cli
from clearhead.cli.train import command
from clearhead.configs import ConfigError, dumps, loads
from clearhead.data import DataError
from clearhead.models.model import build
from clearhead.models.presets import preset
from clearhead.training import loop
from clearhead.training.checkpoint import ResumeError, State, list_checkpoints, write_checkpoint
from clearhead.training.distributed import World
from clearhead.training.loop import Callbacks, Trainer, TrainingError, train
from clearhead.training.model import list_blocks
from clearhead.training.pairs import Translation
from clearhead.training.recipes import RECIPES, recipe
from clearhead.training.run import Run, first_difference
from clearhead.training.task import prepare_task

from .tools import COMMAND, TEXT, same, small, start, stop_at, weights


def test_a_run_learns_and_its_folder_is_a_checkpoint(corpus: Path, tmp_path: Path) -> None:
    import clearhead

    out = tmp_path / "run"
    model = train(small(steps=60, dropout=0.0), [corpus], out)
    lines = Run(out).history()
    assert [line["step"] for line in lines] == list(range(1, 61))
    assert lines[0]["train/loss"] == pytest.approx(torch.log(torch.tensor(28.0)).item(), rel=0.05)
    assert lines[-1]["val/loss"] < 1.5
    assert lines[-1]["val/bpb"] == pytest.approx(lines[-1]["val/loss"] / 0.6931, rel=1e-3)  # a character is a byte
    loaded = clearhead.load(out)
    tokens = torch.randint(0, 28, (2, 9))
    with torch.no_grad():
        assert torch.equal(loaded(tokens), model(tokens))


def test_the_same_seed_gives_the_same_weights(corpus: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(small(seed=seed), [corpus], tmp_path / name)
    assert same(tmp_path / "a", tmp_path / "b")
    assert not same(tmp_path / "a", tmp_path / "c")


def test_accumulation_does_not_change_the_step(corpus: Path, tmp_path: Path) -> None:
    for parts in (1, 4):
        config = small(accumulate=parts, steps=3, dropout=0.0)
        train(config, [corpus], tmp_path / str(parts))
    one, four = weights(tmp_path / "1"), weights(tmp_path / "4")
    for name in one:
        torch.testing.assert_close(one[name], four[name], atol=2e-4, rtol=1e-3)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, a recipe, and a run that was never stopped."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "text.txt").write_text(TEXT)
    (folder / "recipe.json").write_text(dumps(small(steps=40)))
    assert start(folder / "recipe.json", folder / "text.txt", folder / "whole").wait() == 0
    return folder


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_and_resumed_equals_uninterrupted(uninterrupted: Path, tmp_path: Path, how: signal.Signals) -> None:
    file, corpus = uninterrupted / "recipe.json", uninterrupted / "text.txt"
    broken = start(file, corpus, tmp_path / "broken")
    metrics = tmp_path / "broken" / "metrics.jsonl"
    while broken.poll() is None and not (metrics.exists() and len(metrics.read_text().splitlines()) >= 10):
        time.sleep(0.005)
    broken.send_signal(how)
    code = broken.wait()
    if code == 0:
        pytest.skip("the run was over before the signal")
    assert code == (-9 if how == signal.SIGKILL else 130)
    assert not (tmp_path / "broken" / "model.safetensors").exists()
    train(loads(file.read_text()), [corpus], tmp_path / "broken", resume=True)
    assert same(uninterrupted / "whole", tmp_path / "broken")
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, 41))


def test_a_run_inside_its_data_folder_resumes(corpus: Path, tmp_path: Path) -> None:
    config = small(**{"task.tokenizer": {"kind": "Bytes"}})
    train(config, [corpus], tmp_path / "elsewhere" / "whole")
    text = tmp_path / "text"
    text.mkdir()
    corpus.rename(text / "text.txt")
    with pytest.raises(KeyboardInterrupt):
        train(config, [text], text / "runs" / "a", callbacks=Callbacks(step=lambda numbers: stop_at(9, numbers)))
    train(config, [text], text / "runs" / "a", resume=True)
    assert same(tmp_path / "elsewhere" / "whole", text / "runs" / "a")


def test_the_best_model_is_chosen_again_if_the_metric_changes(corpus: Path, tmp_path: Path) -> None:
    """For example a translation run, scored by BLEU, that continues sharded, scored by the loss."""
    config, out, messages = small(evaluate_every=3), tmp_path / "run", list[str]()
    with pytest.raises(KeyboardInterrupt):
        train(config, [corpus], out, callbacks=Callbacks(step=lambda numbers: stop_at(8, numbers)))
    state = list_checkpoints(out / "checkpoints")[-1] / "state.json"
    written = json.loads(state.read_text())
    assert written["facts"]["score_name"] == "val/loss"
    other = {"best_score": -30.0, "evaluations_since_best": 2, "score_name": "val/bleu"}
    changed = State(written["step"], other, written["digests"])
    state.write_text(json.dumps(asdict(replace(changed, digest=changed.compute_digest()))))
    shutil.rmtree(out / "best")
    train(config, [corpus], out, resume=True, callbacks=Callbacks(message=messages.append))
    assert "The best model is now chosen by val/loss, before by val/bleu." in messages
    assert (out / "best" / "model.safetensors").exists()
    losses = [line["val/loss"] for line in Run(out).history() if "val/loss" in line]
    last = json.loads((list_checkpoints(out / "checkpoints")[-1] / "state.json").read_text())
    assert last["facts"]["best_score"] == min(losses[2:])  # those after the checkpoint of step 8


def test_the_previous_checkpoint_replaces_a_damaged_one(corpus: Path, tmp_path: Path) -> None:
    train(small(), [corpus], tmp_path / "whole")
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(small(), [corpus], out, callbacks=Callbacks(step=lambda numbers: stop_at(9, numbers)))
    newest = list_checkpoints(out / "checkpoints")[-1] / "state.safetensors"
    content = bytearray(newest.read_bytes())
    content[-3] ^= 1
    newest.write_bytes(content)
    messages: list[str] = []
    train(small(), [corpus], out, resume=True, callbacks=Callbacks(message=messages.append))
    assert any("is damaged (state.safetensors was changed)" in text for text in messages)
    assert any("Continuing from step 4" in text for text in messages)
    assert same(tmp_path / "whole", out)


def test_resuming_with_another_recipe_is_refused(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(small(), [corpus], out)
    before = (out / "recipe.json").read_text()
    with pytest.raises(ResumeError, match="was started with another recipe: batch was 4 and is 8"):
        train(small(batch=8), [corpus], out, resume=True)
    with pytest.raises(ResumeError, match="already holds a run; add --resume"):
        train(small(), [corpus], out)
    assert (out / "recipe.json").read_text() == before


def test_a_folder_with_another_model_is_refused(tmp_path: Path) -> None:
    config = recipe("chars")
    for name in ("config.json", "adapter.json", "tokenizer.json", "model-00001-of-00002.safetensors"):
        (tmp_path / name).write_text("theirs")
        for resume in (False, True):
            with pytest.raises(ResumeError, match=rf"holds {name} but no recipe\.json, so it is not a run"):
                Run(tmp_path).begin(config, resume)
        assert [path.name for path in tmp_path.iterdir()] == [name]
        (tmp_path / name).unlink()


def test_a_run_without_steps_can_start_with_another_recipe(corpus: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.folder.mkdir()
    run.begin(small(), resume=False)
    (run.folder / "tokenizer.json").write_text("left by a killed preparation")
    run.begin(small(), resume=True)
    assert (run.folder / "tokenizer.json").exists()
    train(small(batch=8, steps=1), [corpus], run.folder)
    assert run.recipe().batch == 8
    assert run.history()[-1]["step"] == 1


def test_a_run_that_cannot_start_leaves_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(DataError, match="there is no file"):
        train(small(), [tmp_path / "nothing"], out)
    assert not out.exists()
    out.mkdir()
    (out / "notes.txt").write_text("somebody's")
    with pytest.raises(DataError, match="there is no file"):
        train(small(), [tmp_path / "nothing"], out)
    assert (out / "notes.txt").exists()


def test_resuming_without_a_run_is_refused(corpus: Path, tmp_path: Path) -> None:
    for out in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ResumeError, match=r"there is no run in .* to resume; leave out --resume"):
            train(small(), [corpus], out, resume=True)
    assert list(tmp_path.iterdir()) == [corpus]
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / ".lock").touch()  # a run killed before it wrote its recipe
    train(small(steps=1), [corpus], tmp_path / "killed", resume=True)
    assert Run(tmp_path / "killed").history()[-1]["step"] == 1
    with pytest.raises(ResumeError, match=r"text\.txt is not a folder"):
        train(small(), [corpus], corpus)


@pytest.mark.parametrize("how", ["damaged", "gone", "finished and gone"])
def test_a_run_that_lost_its_checkpoints_is_not_started_again(how: str, corpus: Path, tmp_path: Path) -> None:
    """Starting again would lose its metrics and everything it learned."""
    out, steps = tmp_path / "run", 12 if how == "finished and gone" else 9
    with contextlib.suppress(KeyboardInterrupt):
        train(small(), [corpus], out, callbacks=Callbacks(step=lambda numbers: steps == 12 or stop_at(steps, numbers)))
    for path in list_checkpoints(out / "checkpoints"):
        if how == "damaged":
            (path / "state.safetensors").write_bytes(b"cut off")
        else:
            shutil.rmtree(path)
    before = (out / "metrics.jsonl").read_bytes()
    messages: list[str] = []
    with pytest.raises(ResumeError, match=f"reached step {steps}, but it has no undamaged checkpoint"):
        train(small(), [corpus], out, resume=True, callbacks=Callbacks(message=messages.append))
    assert (out / "metrics.jsonl").read_bytes() == before
    assert sum("is damaged" in text for text in messages) == (2 if how == "damaged" else 0)


def test_saved_files_are_readable_by_other_users(corpus: Path, tmp_path: Path) -> None:
    train(small(steps=4), [corpus], tmp_path / "run")
    plain = (tmp_path / "run" / "recipe.json").stat().st_mode
    files = list((tmp_path / "run").rglob("*.safetensors"))
    assert len(files) >= 2
    assert all(path.stat().st_mode == plain for path in files)


def test_runs_lists_the_others_if_one_cannot_be_read(corpus: Path, tmp_path: Path) -> None:
    train(small(steps=1), [corpus], tmp_path / "runs" / "good")
    for name, text in (("cut", '{"kind": "Rec'), ("foreign", '{"ingredients": []}')):
        (tmp_path / "runs" / name).mkdir()
        (tmp_path / "runs" / name / "recipe.json").write_text(text)
    result = CliRunner().invoke(cli, ["runs", str(tmp_path / "runs"), "--json"])
    assert result.exit_code == 0
    assert [run["run"] for run in json.loads(result.stdout)] == [str(tmp_path / "runs" / "good")]
    assert f"{tmp_path / 'runs' / 'cut' / 'recipe.json'} is not JSON" in result.stderr
    assert f"{tmp_path / 'runs' / 'foreign' / 'recipe.json'}: config has no 'kind'" in result.stderr
    nowhere = CliRunner().invoke(cli, ["runs", str(tmp_path / "nowhere"), "--json"])
    assert isinstance(nowhere.exception, ValueError)
    assert "there is no folder" in str(nowhere.exception)


def test_a_text_shorter_than_the_context_is_reported(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT[:300])
    messages: list[str] = []
    config = small(steps=1).with_value("task.context", 400)
    train(config, [text], tmp_path / "run", callbacks=Callbacks(message=messages.append))
    assert any("shorter than the context of 400 tokens" in sentence for sentence in messages)


def test_a_damaged_line_of_metrics_is_skipped(corpus: Path, tmp_path: Path) -> None:
    train(small(steps=2), [corpus], tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b"\x00\xff garbage\n")
    assert [line["step"] for line in Run(tmp_path / "run").history()] == [1, 2]


def test_rows_are_not_longer_than_the_text(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT[:300])
    config = small(steps=1).with_value("task.context", 10**6)
    task = prepare_task(config, [text], [], Run(tmp_path / "run"), lambda sentence: None)
    assert task.batch(0).inputs.shape[1] == task.length < 300
    assert next(iter(task.validation())).inputs.shape[1] <= 300


def test_a_run_resumes_from_its_folder_alone(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with contextlib.suppress(KeyboardInterrupt):
        train(small(), [corpus], out, callbacks=Callbacks(step=lambda numbers: stop_at(9, numbers)))
    result = CliRunner().invoke(cli, ["train", "--data", str(corpus), "--out", str(out), "--resume"])
    assert result.exit_code == 0, result.output
    assert Run(out).history()[-1]["step"] == 12


def test_a_sample_of_a_classifier_is_refused_before_training(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["train", "vit", "--sample", "hello", "--out", str(tmp_path / "run")])
    assert result.exit_code == 2
    assert "the task Images does not" in result.output
    assert not (tmp_path / "run").exists()


def test_ctrl_c_during_preparation_stops_at_once(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "prepare_task", lambda *given: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's workers ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            train(small(), [corpus], tmp_path / "run")
    finally:
        signal.signal(signal.SIGINT, before)


def test_held_out_data_without_targets_is_refused(corpus: Path, tmp_path: Path) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps({"prompt": "the quick brown fox", "completion": ""}) + "\n")
    with pytest.raises(DataError, match="the held-out data has no targets"):
        train(small(), [corpus], tmp_path / "run", validation=[held])


def test_a_huge_loss_has_a_finite_perplexity(corpus: Path, tmp_path: Path) -> None:
    task = prepare_task(small(), [corpus], (), Run(tmp_path / "run"), lambda text: None)
    for measures in (task.measures, lambda *given: Translation.measures(task, *given)):
        assert json.loads(json.dumps(measures(1e4, {}, 1), allow_nan=False))["val/perplexity"] > 1e300


def test_the_lock_is_released_before_its_file_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some systems cannot remove an open file."""
    free: list[Path] = []

    def remove_if_unused(self: Run) -> None:
        with Run(self.folder).lock():
            free.append(self.folder)

    monkeypatch.setattr(Run, "remove_if_unused", remove_if_unused)
    with pytest.raises(DataError, match="there is no file"):
        train(small(), [tmp_path / "nothing"], tmp_path / "run")
    assert free == [tmp_path / "run"]


def test_a_language_model_that_sees_later_tokens_is_refused(corpus: Path, tmp_path: Path) -> None:
    config = small(**{"model.stack.pattern.1.mixer.mask": {"kind": "Window", "size": 4}})
    with pytest.raises(ConfigError, match=r"block 1 can see the tokens it must predict: .* has the mask Window"):
        train(config, [corpus], tmp_path / "run")
    both = config.model.stack.pattern[1].mixer.with_value("mask", {"kind": "And", "left": {"kind": "Window", "size": 4},
                                                                "right": {"kind": "Causal"}})  # fmt: skip
    assert small(**{"model.stack.pattern.1.mixer": both}).model.stack.causal


def test_a_process_without_targets_still_computes(corpus: Path, tmp_path: Path) -> None:
    """In a sharded model, the other processes would wait for it forever."""
    messages, ran = list[str](), list[int]()

    class Second(World):
        def sum(self, numbers: list[float]) -> list[float]:
            return [mine + others for mine, others in zip(numbers, (90.0, 10.0), strict=True)]

    recipe = small(zero_out=False)
    task = prepare_task(recipe, [corpus], (), Run(tmp_path / "run"), lambda text: None)
    empty = task.batch(0)
    task.batch = lambda *given: replace(empty, targets=torch.full_like(empty.targets, -100))
    trainer = Trainer(
        recipe, task, Run(tmp_path / "run"), Callbacks(message=messages.append), Second(torch.device("cpu"))
    )
    trainer.objective.register_forward_hook(lambda *given: ran.append(1))
    trainer.check_initial_loss()
    assert ran
    assert messages == ["The loss before training is 9.00, but guessing gives 3.33; check the model's config."]


@pytest.mark.parametrize("name", ["tiny-albert", "tiny-gpt"])
def test_every_block_is_sharded_once(name: str) -> None:
    model = build(preset(name))
    assert len(model.stack.layers()) > 1
    assert [*map(id, list_blocks(model))] == [*map(id, model.stack.blocks)]


def test_a_folder_in_use_is_refused(corpus: Path, tmp_path: Path) -> None:
    with Run(tmp_path / "run").lock(), pytest.raises(ResumeError, match="is in use by another process"):
        train(small(), [corpus], tmp_path / "run")


def poisoned_weight(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight[0, 0] = torch.nan


def poisoned_gradient(weight: torch.Tensor) -> None:
    weight.register_hook(lambda gradient: gradient * torch.inf)


@pytest.mark.parametrize(
    ("poison", "sentence"),
    [(poisoned_weight, "loss of step 7 is nan"), (poisoned_gradient, "gradient of step 7 has the norm (inf|nan)")],
)
def test_nonfinite_values_are_located(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, poison: Callable, sentence: str
) -> None:
    original = Trainer.train_step

    def poisoned(self: Trainer) -> tuple[float, float]:
        if self.step == 6:
            poison(self.model.stack.blocks[1].ffn.up.weight)
        return original(self)

    monkeypatch.setattr(Trainer, "train_step", poisoned)
    with pytest.raises(TrainingError, match=rf"{sentence}: .* stack\.blocks\.1\.ffn\.up"):
        train(small(), [corpus], tmp_path / "run")
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-00000004"]


@pytest.mark.parametrize("kept", [False, True])
def test_the_last_checkpoint_is_named_after_an_error(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    def fails(*given: object, **options: object) -> None:
        raise TrainingError("the loss is nan")

    monkeypatch.setattr(loop, "train", fails)
    if kept:
        (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    advice = "step-00000004 is from before it" if kept else "there is no checkpoint yet"
    with pytest.raises(ValueError, match=f"the loss is nan; .*{advice}"):
        command.main(["chars", "--data", str(corpus), "--out", str(tmp_path)], standalone_mode=False)


def test_a_failed_sharded_write_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.api import CheckpointException

    def full(*given: object, **options: object) -> None:
        raise CheckpointException("save", {1: (OSError("no space left"), None)})  # type: ignore[dict-item]

    monkeypatch.setattr(checkpoint, "save", full)
    held = torch.zeros(3)
    held.device_mesh = None  # as a sharded tensor has
    with pytest.raises(ResumeError, match="the checkpoint of step 8 could not be written: no space left"):
        write_checkpoint(tmp_path, 8, {"weights.a": held}, {}, World(torch.device("cpu")))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "setrlimit") and sys.platform == "win32", reason="no file size limits")
def test_a_full_disk_is_reported_and_the_last_checkpoint_stays(corpus: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "recipe.json", tmp_path / "run"
    file.write_text(dumps(small(steps=8)))
    code = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    code += "from clearhead.training import checkpoint as c; original = c.write_checkpoint\n"
    code += "def limited(folder, step, *more):\n"
    code += "    if step == 8: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
    code += "    return original(folder, step, *more)\n"
    code += "import clearhead.training.loop as loop; loop.write_checkpoint = limited\n" + COMMAND
    command = [sys.executable, "-c", code, "train", str(file), "--data", str(corpus), "--out", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "the checkpoint of step 8 could not be written" in result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in list_checkpoints(out / "checkpoints")] == ["step-00000004"]
    resumed = start(file, corpus, out, "--resume")
    assert resumed.wait() == 0


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_survive_json(name: str) -> None:
    assert loads(dumps(recipe(name))) == recipe(name)


def test_first_difference_names_the_field() -> None:
    assert (
        first_difference(small().to_dict(), small(**{"optimizer.lr": 0.5}).to_dict())
        == "optimizer.lr was 0.03 and is 0.5"
    )
    assert first_difference(small().to_dict(), small().to_dict()) == ""


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"steps": 0}, "Recipe.steps is 0, but must be positive"),
        ({"accumulate": 3}, "batch=4 is not a multiple of accumulate=3"),
        ({"optimizer.iterations": 9}, "Muon.iterations is 9"),
        ({"schedule.decay": 1.5}, "Stable.decay is 1.5"),
        ({"seed": 2**64}, "Recipe.seed is 18446744073709551616, but must fit in 64 bits"),
        ({"stepz": 3}, "Recipe has no field 'stepz'; did you mean 'steps'?"),
    ],
)
def test_bad_recipes_are_refused_when_made(changes: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("?", r"\?")):
        small(**changes)
