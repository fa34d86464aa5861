"""Runs: they learn, they are repeatable, and a kill at any moment changes nothing but the time."""

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
from dataclasses import replace
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
from clearhead.training.checkpoint import ResumeError, listed, write
from clearhead.training.distributed import World
from clearhead.training.loop import Report, Trainer, TrainingError, train
from clearhead.training.pairs import Translation
from clearhead.training.recipes import RECIPES, recipe
from clearhead.training.run import Run, first_difference
from clearhead.training.task import prepare

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


def test_one_seed_is_one_run_and_two_are_two(corpus: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(small(seed=seed), [corpus], tmp_path / name)
    assert same(tmp_path / "a", tmp_path / "b")
    assert not same(tmp_path / "a", tmp_path / "c")


def test_accumulating_gives_the_same_step(corpus: Path, tmp_path: Path) -> None:
    for parts in (1, 4):
        config = small(accumulate=parts, steps=3, dropout=0.0)
        train(config, [corpus], tmp_path / str(parts))
    one, four = weights(tmp_path / "1"), weights(tmp_path / "4")
    for name in one:
        torch.testing.assert_close(one[name], four[name], atol=2e-4, rtol=1e-3)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, recipe, and the run that nobody stopped."""
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
    resumed = start(file, corpus, tmp_path / "broken", "--resume")
    assert resumed.wait() == 0
    assert same(uninterrupted / "whole", tmp_path / "broken")
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, 41))


def test_a_run_that_lies_in_its_data_goes_on(corpus: Path, tmp_path: Path) -> None:
    config = small(**{"task.tokenizer": {"kind": "Bytes"}})
    train(config, [corpus], tmp_path / "elsewhere" / "whole")
    text = tmp_path / "text"
    text.mkdir()
    corpus.rename(text / "text.txt")
    with pytest.raises(KeyboardInterrupt):
        train(config, [text], text / "runs" / "a", report=Report(show=lambda numbers: stop_at(9, numbers)))
    train(config, [text], text / "runs" / "a", resume=True)
    assert same(tmp_path / "elsewhere" / "whole", text / "runs" / "a")


def test_the_best_is_sought_anew_where_it_is_judged_otherwise(corpus: Path, tmp_path: Path) -> None:
    """As where a run of a translator, judged by BLEU, is gone on with in parts, judged by the loss."""
    config, out, said = small(evaluate_every=3), tmp_path / "run", list[str]()
    with pytest.raises(KeyboardInterrupt):
        train(config, [corpus], out, report=Report(show=lambda numbers: stop_at(8, numbers)))
    state = listed(out / "checkpoints")[-1] / "state.json"
    written = json.loads(state.read_text())
    assert written["facts"]["judged_by"] == "val/loss"
    state.write_text(json.dumps(written | {"facts": {"best": -30.0, "waited": 2, "judged_by": "val/bleu"}}))
    shutil.rmtree(out / "best")
    train(config, [corpus], out, resume=True, report=Report(say=said.append))
    assert "the best is sought anew, by val/loss: it was judged by val/bleu" in said
    assert (out / "best" / "model.safetensors").exists()
    losses = [line["val/loss"] for line in Run(out).history() if "val/loss" in line]
    last = json.loads((listed(out / "checkpoints")[-1] / "state.json").read_text())
    assert last["facts"]["best"] == min(losses[2:])  # those after the checkpoint of step 8


def test_a_damaged_checkpoint_is_said_and_the_one_before_used(corpus: Path, tmp_path: Path) -> None:
    train(small(), [corpus], tmp_path / "whole")
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(small(), [corpus], out, report=Report(show=lambda numbers: stop_at(9, numbers)))
    newest = listed(out / "checkpoints")[-1] / "state.safetensors"
    content = bytearray(newest.read_bytes())
    content[-3] ^= 1
    newest.write_bytes(content)
    said: list[str] = []
    train(small(), [corpus], out, resume=True, report=Report(say=said.append))
    assert any("is damaged (state.safetensors is not what was written)" in text for text in said)
    assert any("going on from step 4" in text for text in said)
    assert same(tmp_path / "whole", out)


def test_resuming_with_another_recipe_is_refused(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(small(), [corpus], out)
    before = (out / "recipe.json").read_text()
    with pytest.raises(ResumeError, match="was begun with another recipe: batch was 4 and is 8"):
        train(small(batch=8), [corpus], out, resume=True)
    with pytest.raises(ResumeError, match="holds a run already; give --resume"):
        train(small(), [corpus], out)
    assert (out / "recipe.json").read_text() == before


def test_a_folder_of_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    config = recipe("chars")
    for name in ("config.json", "adapter.json", "tokenizer.json", "model-00001-of-00002.safetensors"):
        (tmp_path / name).write_text("theirs")
        for resume in (False, True):
            with pytest.raises(ResumeError, match=rf"holds {name} but no recipe\.json, so it is no run"):
                Run(tmp_path).begin(config, resume)
        assert [path.name for path in tmp_path.iterdir()] == [name]
        (tmp_path / name).unlink()


def test_a_run_that_never_began_can_be_begun_with_another_recipe(corpus: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.folder.mkdir()
    run.begin(small(), resume=False)
    (run.folder / "tokenizer.json").write_text("left by a killed preparation")
    run.begin(small(), resume=True)
    assert (run.folder / "tokenizer.json").exists()
    train(small(batch=8, steps=1), [corpus], run.folder)
    assert run.recipe().batch == 8
    assert run.history()[-1]["step"] == 1


def test_nothing_is_left_of_a_run_that_could_not_be_begun(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(DataError, match="there is no file"):
        train(small(), [tmp_path / "nothing"], out)
    assert not out.exists()
    out.mkdir()
    (out / "notes.txt").write_text("somebody's")
    with pytest.raises(DataError, match="there is no file"):
        train(small(), [tmp_path / "nothing"], out)
    assert (out / "notes.txt").exists()


def test_where_there_is_no_run_none_is_gone_on_with(corpus: Path, tmp_path: Path) -> None:
    for out in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ResumeError, match=r"there is no run in .* to go on with; leave --resume out to begin one"):
            train(small(), [corpus], out, resume=True)
    assert list(tmp_path.iterdir()) == [corpus]
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / ".lock").touch()  # as far as a run may come in which no recipe was written down
    train(small(steps=1), [corpus], tmp_path / "killed", resume=True)
    assert Run(tmp_path / "killed").history()[-1]["step"] == 1
    with pytest.raises(ResumeError, match=r"text\.txt is not a folder"):
        train(small(), [corpus], corpus)


@pytest.mark.parametrize("how", ["damaged", "gone", "finished and gone"])
def test_a_run_without_its_checkpoints_is_not_begun_anew(how: str, corpus: Path, tmp_path: Path) -> None:
    """A cut-off log and all that was learned would be lost by it."""
    out, steps = tmp_path / "run", 12 if how == "finished and gone" else 9
    with contextlib.suppress(KeyboardInterrupt):
        train(small(), [corpus], out, report=Report(show=lambda numbers: steps == 12 or stop_at(steps, numbers)))
    for path in listed(out / "checkpoints"):
        if how == "damaged":
            (path / "state.safetensors").write_bytes(b"cut off")
        else:
            shutil.rmtree(path)
    before = (out / "metrics.jsonl").read_bytes()
    said: list[str] = []
    with pytest.raises(ResumeError, match=f"came to step {steps}, but there is no whole checkpoint of it"):
        train(small(), [corpus], out, resume=True, report=Report(say=said.append))
    assert (out / "metrics.jsonl").read_bytes() == before
    assert sum("is damaged" in text for text in said) == (2 if how == "damaged" else 0)


def test_what_is_written_can_be_read_by_others(corpus: Path, tmp_path: Path) -> None:
    train(small(steps=4), [corpus], tmp_path / "run")
    plain = (tmp_path / "run" / "recipe.json").stat().st_mode
    files = list((tmp_path / "run").rglob("*.safetensors"))
    assert len(files) >= 2
    assert all(path.stat().st_mode == plain for path in files)


def test_runs_are_listed_though_one_cannot_be_read(corpus: Path, tmp_path: Path) -> None:
    train(small(steps=1), [corpus], tmp_path / "runs" / "good")
    for name, text in (("cut", '{"kind": "Rec'), ("foreign", '{"ingredients": []}')):
        (tmp_path / "runs" / name).mkdir()
        (tmp_path / "runs" / name / "recipe.json").write_text(text)
    result = CliRunner().invoke(cli, ["runs", str(tmp_path / "runs"), "--json"])
    assert result.exit_code == 0
    assert [run["run"] for run in json.loads(result.stdout)] == [str(tmp_path / "runs" / "good")]
    assert f"{tmp_path / 'runs' / 'cut' / 'recipe.json'}: not JSON" in result.stderr
    assert f"{tmp_path / 'runs' / 'foreign' / 'recipe.json'}: config has no 'kind'" in result.stderr
    nowhere = CliRunner().invoke(cli, ["runs", str(tmp_path / "nowhere"), "--json"])
    assert isinstance(nowhere.exception, ValueError)
    assert "there is no folder" in str(nowhere.exception)


def test_a_text_shorter_than_a_row_is_said(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT[:300])
    said: list[str] = []
    config = small(steps=1).changed("task.context", 400)
    train(config, [text], tmp_path / "run", report=Report(say=said.append))
    assert any("less than one row of task.context=400" in sentence for sentence in said)


def test_a_line_of_metrics_that_is_no_text_is_passed_over(corpus: Path, tmp_path: Path) -> None:
    train(small(steps=2), [corpus], tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b"\x00\xff garbage\n")
    assert [line["step"] for line in Run(tmp_path / "run").history()] == [1, 2]


def test_a_row_is_no_longer_than_the_text(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT[:300])
    config = small(steps=1).changed("task.context", 10**6)
    task = prepare(config, [text], [], Run(tmp_path / "run"), lambda sentence: None)
    assert task.batch(0).inputs.shape[1] == task.length < 300
    assert next(iter(task.validation())).inputs.shape[1] <= 300


def test_a_run_is_gone_on_with_by_its_folder_alone(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with contextlib.suppress(KeyboardInterrupt):
        train(small(), [corpus], out, report=Report(show=lambda numbers: stop_at(9, numbers)))
    result = CliRunner().invoke(cli, ["train", "--data", str(corpus), "--out", str(out), "--resume"])
    assert result.exit_code == 0, result.output
    assert Run(out).history()[-1]["step"] == 12


def test_a_sample_of_what_writes_nothing_is_refused_at_once(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["train", "vit", "--sample", "hello", "--out", str(tmp_path / "run")])
    assert result.exit_code == 2
    assert "the task Images writes none" in result.output
    assert not (tmp_path / "run").exists()


def test_what_stops_a_preparation_is_not_put_off(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "prepare", lambda *given: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a worker of the tests ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            train(small(), [corpus], tmp_path / "run")
    finally:
        signal.signal(signal.SIGINT, before)


def test_validation_without_an_answer_is_refused(corpus: Path, tmp_path: Path) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps({"prompt": "the quick brown fox", "completion": ""}) + "\n")
    with pytest.raises(DataError, match="nothing that is held out has an answer to judge by"):
        train(small(), [corpus], tmp_path / "run", validation=[held])


def test_a_loss_beyond_measure_still_has_a_perplexity(corpus: Path, tmp_path: Path) -> None:
    task = prepare(small(), [corpus], (), Run(tmp_path / "run"), lambda text: None)
    for measures in (task.measures, lambda *given: Translation.measures(task, *given)):
        assert json.loads(json.dumps(measures(1e4, {}, 1), allow_nan=False))["val/perplexity"] > 1e300


def test_the_lock_is_let_go_of_before_its_file_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every system removes a file that is open."""
    free: list[Path] = []

    def take_back(self: Run) -> None:
        with Run(self.folder).held():
            free.append(self.folder)

    monkeypatch.setattr(Run, "take_back", take_back)
    with pytest.raises(DataError, match="there is no file"):
        train(small(), [tmp_path / "nothing"], tmp_path / "run")
    assert free == [tmp_path / "run"]


def test_a_language_model_that_reads_later_tokens_is_refused(corpus: Path, tmp_path: Path) -> None:
    config = small(**{"model.stack.pattern.1.mixer.mask": {"kind": "Window", "size": 4}})
    with pytest.raises(ConfigError, match="block 1 reads later tokens: its Attention has the mask Window"):
        train(config, [corpus], tmp_path / "run")
    both = config.model.stack.pattern[1].mixer.changed("mask", {"kind": "And", "left": {"kind": "Window", "size": 4},
                                                                "right": {"kind": "Causal"}})  # fmt: skip
    assert small(**{"model.stack.pattern.1.mixer": both}).model.stack.causal


def test_a_process_without_a_target_computes_with_the_others(corpus: Path, tmp_path: Path) -> None:
    """Where a model is held in parts, one that does not would keep the others waiting."""
    said, ran = list[str](), list[int]()

    class Second(World):
        def sum(self, numbers: list[float]) -> list[float]:
            return [mine + others for mine, others in zip(numbers, (90.0, 10.0), strict=True)]

    recipe = small(zero_out=False)
    task = prepare(recipe, [corpus], (), Run(tmp_path / "run"), lambda text: None)
    empty = task.batch(0)
    task.batch = lambda *given: replace(empty, targets=torch.full_like(empty.targets, -100))
    trainer = Trainer(recipe, task, Run(tmp_path / "run"), Report(say=said.append), Second(torch.device("cpu")))
    trainer.objective.register_forward_hook(lambda *given: ran.append(1))
    trainer.expect_a_guess()
    assert ran == [1]
    assert said == ["the loss before training is 9.00, though a guess has 3.33: look at the model"]


@pytest.mark.parametrize("name", ["tiny-albert", "tiny-gpt"])
def test_every_block_stands_once_among_those_that_are_sharded(name: str) -> None:
    model = build(preset(name))
    assert len(model.stack.layers()) > 1
    assert [*map(id, loop.blocks_of(model))] == [*map(id, model.stack.blocks)]


def test_a_folder_in_use_is_refused(corpus: Path, tmp_path: Path) -> None:
    with Run(tmp_path / "run").held(), pytest.raises(ResumeError, match="is in use by another process"):
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
def test_what_is_not_finite_is_located(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, poison: Callable, sentence: str
) -> None:
    original = Trainer.update

    def poisoned(self: Trainer) -> tuple[float, float]:
        if self.step == 6:
            poison(self.model.stack.blocks[1].ffn.up.weight)
        return original(self)

    monkeypatch.setattr(Trainer, "update", poisoned)
    with pytest.raises(TrainingError, match=rf"{sentence}: .* stack\.blocks\.1\.ffn\.up"):
        train(small(), [corpus], tmp_path / "run")
    assert [path.name for path in listed(tmp_path / "run" / "checkpoints")] == ["step-00000004"]


@pytest.mark.parametrize("kept", [False, True])
def test_a_checkpoint_is_named_if_there_is_one(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    def fails(*given: object, **options: object) -> None:
        raise TrainingError("the loss is nan")

    monkeypatch.setattr(loop, "train", fails)
    if kept:
        (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    told = "step-00000004 is from before it" if kept else "there is no checkpoint yet"
    with pytest.raises(ValueError, match=f"the loss is nan; .*{told}"):
        command.main(["chars", "--data", str(corpus), "--out", str(tmp_path)], standalone_mode=False)


def test_parts_that_cannot_be_written_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.api import CheckpointException

    def full(*given: object, **options: object) -> None:
        raise CheckpointException("save", {1: (OSError("no space left"), None)})  # type: ignore[dict-item]

    monkeypatch.setattr(checkpoint, "save", full)
    held = torch.zeros(3)
    held.device_mesh = None  # as a tensor has that is held in parts
    with pytest.raises(ResumeError, match="the checkpoint of step 8 could not be written: no space left"):
        write(tmp_path, 8, {"weights.a": held}, {}, World(torch.device("cpu")))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "setrlimit") and sys.platform == "win32", reason="no file size limits")
def test_a_full_disk_is_said_and_the_last_checkpoint_stays(corpus: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "recipe.json", tmp_path / "run"
    file.write_text(dumps(small(steps=8)))
    code = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    code += "from clearhead.training import checkpoint as c; original = c.write\n"
    code += "def limited(folder, step, *more):\n"
    code += "    if step == 8: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
    code += "    return original(folder, step, *more)\n"
    code += "import clearhead.training.loop as loop; loop.write = limited\n" + COMMAND
    command = [sys.executable, "-c", code, "train", str(file), "--data", str(corpus), "--out", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "the checkpoint of step 8 could not be written" in result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in listed(out / "checkpoints")] == ["step-00000004"]
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
        ({"seed": 2**64}, "Recipe.seed is 18446744073709551616, but must be a number of 64 bits"),
        ({"stepz": 3}, "Recipe has no field 'stepz'; did you mean 'steps'?"),
    ],
)
def test_bad_recipes_are_refused_when_made(changes: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("?", r"\?")):
        small(**changes)
