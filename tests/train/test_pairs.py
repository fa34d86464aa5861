"""Learning to translate: the loss, the run, its checkpoints' mean, and when it gives up."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import clearhead
from clearhead.cli.train import find_recipe
from clearhead.configs import ConfigError, dumps
from clearhead.configs.train import ImagesConfig, MaskedTokensConfig, NextTokenConfig, RecipeConfig
from clearhead.data import DataError
from clearhead.data.dates import LANGUAGES, dates
from clearhead.measure.cost import cost
from clearhead.models.presets import preset
from clearhead.models.transformer import modern_transformer, transformer
from clearhead.schedules import noam
from clearhead.tasks.translate import translate
from clearhead.training.checkpoint import list_checkpoints
from clearhead.training.loop import Callbacks, RunStopped, Trainer, TrainingError, train
from clearhead.training.pairs import Translation, fit_config
from clearhead.training.recipes import recipe
from clearhead.training.run import Run
from clearhead.training.task import prepare_task

from ..journeys.test_generate import run
from .tools import same, weights

WORDS = ("null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun")
NUMBERS = dict(zip("abcdefghij", WORDS, strict=True))


def tiny(name: str = "translate", dropout: float = 0.1, **changes: object) -> RecipeConfig:
    """A recipe at a size that takes a second or two; with dropout, so that random numbers matter."""
    make = {"translate": modern_transformer, "translate-2017": transformer}[name]
    model = make(dim=32, layers=1, heads=4, hidden=64, vocabulary=257, dropout=dropout)
    sizes = {
        "batch": 256, "steps": 12, "evaluate_every": 6, "save_every": 3, "average": 1, "task.judged": 20,
        "task.tokenizer": {"kind": "Bytes"}, "schedule.warmup": 5,
    }  # fmt: skip
    config = replace(recipe(name), model=model)
    for path, value in (sizes | changes).items():
        config = config.with_value(path, value)
    return config


def asked_at(step: int, numbers: dict) -> None:
    if numbers["step"] == step:
        os.kill(os.getpid(), signal.SIGTERM)


def write_table(path: Path, longest: int) -> Path:
    """Letters, and the German words for the numbers that they stand for."""
    rng = np.random.default_rng(0)
    rows = ["".join(rng.choice(list(NUMBERS), rng.integers(1, longest + 1))) for _ in range(600)]
    path.write_text("".join(f"{row}\t{' '.join(NUMBERS[c] for c in row)}\n" for row in rows))
    return path


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_table(tmp_path / "numbers.tsv", 3)


@pytest.mark.parametrize("name", ["translate", "translate-2017"])
def test_the_loss_is_the_mean_over_real_targets_of_sentences_read_alone(name: str, tmp_path: Path) -> None:
    table = write_table(tmp_path / "numbers.tsv", 9)
    task = prepare_task(tiny(name), [table], (), Run(tmp_path / "run"), lambda text: None)
    torch.manual_seed(0)
    model = clearhead.build(task.config).eval()
    batch = next(batch for batch in map(task.batch, range(9)) if batch.readable is not None)  # one with padding
    loss, _ = task.loss(model, batch, 0.1)
    total = torch.zeros(())
    for row in range(len(batch.inputs)):
        n, m = int((batch.targets[row] != -100).sum()), int(batch.readable[row].sum())
        logits = model(batch.source[row : row + 1, :m], batch.inputs[row : row + 1, :n])[0]
        total = total + F.cross_entropy(logits, batch.targets[row, :n], label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(loss, total / batch.count)


def test_a_run_learns_to_translate_and_its_folder_translates(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    model = train(tiny(dropout=0.0, steps=260, batch=512, average=2, evaluate_every=130), [table], out)
    lines = Run(out).history()
    assert lines[0]["train/loss"] == pytest.approx(np.log(257), rel=0.1)
    assert lines[-1]["val/exact"] > 0.6
    assert lines[-1]["val/bleu"] > lines[129]["val/bleu"]
    loaded = clearhead.load(out)
    source, target = torch.randint(0, 257, (2, 5)), torch.randint(0, 257, (2, 7))
    with torch.no_grad():
        assert torch.equal(loaded(source, target), model(source, target))
    rows = [line.split("\t") for line in table.read_text().splitlines()[:60]]
    written = [best.text for (best,) in translate(loaded, [row[0] for row in rows])]
    assert sum(one == row[1] for one, row in zip(written, rows, strict=True)) > 40


def test_stopped_and_resumed_equals_uninterrupted_and_the_model_is_the_mean_of_its_checkpoints(
    table: Path, tmp_path: Path
) -> None:
    config = tiny(average=3)
    messages: list[str] = []
    train(config, [table], tmp_path / "whole", callbacks=Callbacks(message=messages.append))
    paths = list_checkpoints(tmp_path / "whole" / "checkpoints")
    assert [path.name[-2:] for path in paths] == ["06", "09", "12"]
    assert any(text.startswith("Mean of the last 3 checkpoints: val/loss") for text in messages), messages
    found = [load_file(path / "state.safetensors") for path in paths]
    for name, mean in weights(tmp_path / "whole").items():
        torch.testing.assert_close(mean, torch.stack([one[f"weights.{name}"] for one in found]).mean(dim=0))
    out = tmp_path / "broken"
    for step in (5, 8, 11):  # each leaves a checkpoint between those that count
        asks = Callbacks(step=lambda n, step=step: asked_at(step, n))
        with pytest.raises(RunStopped):
            train(config, [table], out, resume=out.exists(), callbacks=asks)
    assert "step-00000011" in [path.name for path in list_checkpoints(out / "checkpoints")]
    train(config, [table], out, resume=True)
    assert same(tmp_path / "whole", out)
    with (paths[1] / "state.safetensors").open("r+b") as file:
        file.write(b"x")
    train(config, [table], tmp_path / "whole", resume=True, callbacks=Callbacks(message=messages.append))
    assert any("is damaged (state.safetensors was changed); averaging without it" in text for text in messages)
    for name, mean in weights(tmp_path / "whole").items():
        torch.testing.assert_close(mean, (found[0][f"weights.{name}"] + found[2][f"weights.{name}"]) / 2)


def test_a_run_without_improvement_ends_and_stays_ended(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([5.0, 3.0, 4.0, 3.5, 1.0])
    monkeypatch.setattr(Translation, "score", lambda self, numbers: next(scores))
    config = tiny(steps=100, evaluate_every=2, patience=2)
    messages: list[str] = []
    train(config, [table], tmp_path / "run", callbacks=Callbacks(message=messages.append))
    assert any("No improvement for 2 evaluations: ended at step 8" in text for text in messages)
    before = weights(tmp_path / "run")
    train(config, [table], tmp_path / "run", resume=True)
    assert Run(tmp_path / "run").history()[-1]["step"] == 8
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(tmp_path / "run").items())


def test_accumulating_gives_the_same_step(table: Path, tmp_path: Path) -> None:
    for parts in (1, 4):
        train(tiny(dropout=0.0, accumulate=parts, steps=3), [table], tmp_path / str(parts))
    one, four = weights(tmp_path / "1"), weights(tmp_path / "4")
    for name in one:
        torch.testing.assert_close(one[name], four[name], atol=2e-4, rtol=1e-3)


def test_files_to_validate_with_are_all_that_is_held_out(table: Path, tmp_path: Path) -> None:
    held = tmp_path / "held.tsv"
    held.write_text("abc\tnull eins zwei\nj\tneun\n")
    task = prepare_task(tiny(), [table], [held], Run(tmp_path / "run"), lambda text: None)
    assert (len(task.training), len(task.held_out)) == (600, 2)
    assert task.known == [("abc", "null eins zwei"), ("j", "neun")]
    with pytest.raises(ConfigError, match=r"a share of 0\.0001 of the pairs in .*numbers\.tsv holds out none"):
        prepare_task(tiny(validation=0.0001), [table], (), Run(tmp_path / "none"), lambda text: None)
    with pytest.raises(DataError, match=r"the validation share is 0\.0, but must be above 0"):
        prepare_task(tiny(validation=0.0), [table], (), Run(tmp_path / "none"), lambda text: None)
    empty = tmp_path / "empty.tsv"
    empty.write_text("a\t\n\tb\n")
    for data, more in (([empty], ()), ([table], [empty])):
        with pytest.raises(ConfigError, match=r"there is no pair in .*empty\.tsv: every line has an empty side"):
            prepare_task(tiny(), data, more, Run(tmp_path / "none"), lambda text: None)
    with pytest.raises(ConfigError, match="the built-in dates have their own validation pairs"):
        prepare_task(tiny(), [], [held], Run(tmp_path / "other"), lambda text: None)


def test_only_pairs_that_are_read_are_judged(table: Path, tmp_path: Path) -> None:
    held = tmp_path / "held.tsv"
    held.write_text(f"{'a' * 40}\tnull\nj\tneun\nab\t{'x' * 40}\nb\teins\n")
    task = prepare_task(tiny(**{"task.length": 32}), [table], [held], Run(tmp_path / "run"), lambda text: None)
    assert task.known == [("j", "neun"), ("b", "eins")]


def test_what_judges_is_asked_for_before_anything_is_made(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(ValueError, match=r"needs sacrebleu: pip install .*translate"):
        prepare_task(tiny(), [table], (), Run(tmp_path / "run"), lambda text: None)
    assert not (tmp_path / "run" / "tokenizer.json").exists()


def test_a_sample_of_a_translator_is_a_translation(table: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "recipe.json", tmp_path / "run"
    file.write_text(dumps(tiny(steps=60, dropout=0.0)))
    done = run("train", str(file), "--data", str(table), "--out", str(out), "--sample", "abc")
    assert done.returncode == 0, done.stderr
    ((best,),) = translate(clearhead.load(out), ["abc"])
    assert done.stdout == best.text + "\n" != "\n"


@pytest.mark.proof
def test_the_built_in_dates_are_learned(tmp_path: Path) -> None:
    """At least 99 in 100 of the days held out, to the letter, their languages mixed in one batch."""
    model = train(recipe("dates"), [], tmp_path / "run")
    _, held = dates(recipe("dates").validation, recipe("dates").seed)
    known = list(islice(held, 2000))
    assert len({source.split()[0] for source, _ in known} & set(LANGUAGES)) > 10
    found = translate(clearhead.load(tmp_path / "run"), [source for source, _ in known], beams=1, batch=64)
    right = sum(best.text == target for (best,), (_, target) in zip(found, known, strict=True))
    assert right >= 0.99 * len(known)
    assert model.config.kind() == "EncoderDecoder"


def test_a_loss_that_is_not_finite_is_located(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Trainer.train_step

    def poisoned(self: Trainer) -> tuple[float, float]:
        with torch.no_grad():
            self.model.encoder.blocks[0].ffn.up.weight[0, 0] = torch.nan
        return original(self)

    monkeypatch.setattr(Trainer, "train_step", poisoned)
    with pytest.raises(TrainingError, match=r"loss of step 1 is nan: .* encoder\.blocks\.0\.ffn\.up"):
        train(tiny(), [table], tmp_path / "run")


def test_a_model_without_a_decoder_is_refused(table: Path, tmp_path: Path) -> None:
    config = replace(tiny(), model=recipe("chars").model)
    with pytest.raises(ConfigError, match="a SequenceModel cannot learn from pairs"):
        train(config, [table], tmp_path / "run")


def test_a_checkpoint_that_knows_too_little_is_refused() -> None:
    with pytest.raises(ConfigError, match="the tokenizer has 300 tokens, but the checkpoint has 257"):
        fit_config(replace(tiny(), start="runs/mine"), 300)
    assert fit_config(replace(tiny(), start="runs/mine"), 257) == tiny().model
    learned = tiny(**{"model.source.position": {"kind": "Learned", "length": 64}})
    with pytest.raises(ConfigError, match="length=128, but the model has 64 learned positions"):
        fit_config(learned, 257)


def test_a_decoder_that_reads_later_tokens_is_refused() -> None:
    seeing = tiny(**{"model.decoder.pattern.0.mixer.mask": {"kind": "Full"}})
    with pytest.raises(ConfigError, match="block 0 can see the tokens it must predict"):
        fit_config(seeing, 257)


def test_the_modern_recipe_has_no_more_parameters_than_the_published_one() -> None:
    sizes = {name: cost(recipe(name).model).parameters.total for name in ("translate", "translate-2017")}
    assert sizes["translate"] <= sizes["translate-2017"]


def test_a_model_of_ones_own_and_the_presets_train_by_the_recipe_of_their_kind(table: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(dumps(preset("tiny-transformer")))
    small = (
        "batch=64",
        "validation=0.1",
        'task.tokenizer={"kind": "Bytes"}',
        "task.judged=4",
        "evaluate_every=2",
        "average=1",
    )
    config = find_recipe(str(file), small, steps=2)
    assert config.schedule == recipe("transformer-base").schedule
    assert train(config, [table], tmp_path / "run").config.source.vocabulary == 257
    for name, task in (("bert", MaskedTokensConfig), ("vit", ImagesConfig), ("lstm", NextTokenConfig)):
        file.write_text(dumps(recipe(name).model))
        assert isinstance(find_recipe(str(file)).task, task)
        assert find_recipe(str(file)).model == recipe(name).model
    for name in ("transformer-base", "transformer-big"):
        file.write_text(dumps(preset(name)))
        assert find_recipe(str(file)).model == preset(name)
        assert recipe(name).model == preset(name)


def test_the_rates_of_2017_are_those_of_its_equation() -> None:
    for name, dim in (("transformer-base", 512), ("transformer-big", 1024)):
        ours = recipe(name)
        for step in (1, 4000, 100000):
            rate = ours.optimizer.lr * ours.schedule.factor(step, ours.steps)
            assert rate == pytest.approx(noam(step, dim, 4000), rel=0.02)
    assert (ours.steps, ours.average) == (300000, 20)


def test_a_batch_of_the_built_in_dates_holds_several_languages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in dates are a mixture: texts that share a length share a batch, whatever their languages."""
    pytest.importorskip("babel")
    with pytest.raises(DataError, match="the validation share is 0"):
        dates(0.0)
    monkeypatch.setattr("clearhead.data.dates.COUNT", 6000)
    config = recipe("dates").with_value("task.judged", 10)
    task = prepare_task(config, (), (), Run(tmp_path / "run"), lambda text: None)
    assert isinstance(task, Translation)
    tags = [{task.tokenizer.decode(row.tolist()).split()[0] for row in task.batch(step).source} for step in range(12)]
    assert max(len(found & set(LANGUAGES)) for found in tags) > 10
    assert cost(task.config).parameters.total < 1_500_000
