"""What a newcomer does first: stop a run, use it, train it longer, change sizes, and read what it shows."""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import clearhead
from clearhead.cli.main import cli
from clearhead.cli.train import find_recipe, try_commands
from clearhead.cli.train_display import LossCurve, progress_line, split_sample
from clearhead.configs import ConfigError, MambaConfig
from clearhead.configs.train import RecipeConfig
from clearhead.models.convert import CheckpointError
from clearhead.models.device import choose_device
from clearhead.models.hub import find_checkpoint
from clearhead.training.checkpoint import ResumeError, find_damage, list_checkpoints
from clearhead.training.loop import Callbacks, train
from clearhead.training.recipes import RECIPES, recipe
from clearhead.training.resize import RecipeSizes, resize
from clearhead.training.run import Run

from .tools import same, small, stop_at, weights


def stopped(config: RecipeConfig, corpus: Path, out: Path, step: int) -> Path:
    with contextlib.suppress(KeyboardInterrupt):
        train(config, [corpus], out, callbacks=Callbacks(step=lambda numbers: stop_at(step, numbers)))
    return out


@pytest.mark.filterwarnings("default:.*has not finished training")
@pytest.mark.parametrize(("step", "name"), [(5, "last"), (9, "best")])
def test_a_stopped_run_is_a_model(corpus: Path, tmp_path: Path, step: int, name: str) -> None:
    run = stopped(small(), corpus, tmp_path / "run", step)  # saves at 4 and 8, evaluates at 6
    with pytest.warns(UserWarning, match=f"has not finished training; using its {name} model so far"):
        model = clearhead.load(run)
    assert model.origin == run / name
    result = CliRunner().invoke(cli, ["generate", str(run), "the quick", "-m", "3", "--seed", "1"])
    assert result.exit_code == 0, result.output
    tuned = ["train", "--from", str(run), "--data", str(corpus), "--out", str(tmp_path / "tuned"), "--steps", "1"]
    assert CliRunner().invoke(cli, [*tuned, "--context", "16", "--batch", "2"]).exit_code == 0


def test_a_run_without_a_checkpoint_says_how_to_continue(corpus: Path, tmp_path: Path) -> None:
    run = stopped(small(), corpus, tmp_path / "run", 2)
    with pytest.raises(CheckpointError, match=r"stopped before its first checkpoint.* --resume"):
        find_checkpoint(run)


def test_a_finished_run_trains_longer_and_survives_a_kill(corpus: Path, tmp_path: Path) -> None:
    config, longer = small(), small(steps=20)
    for name in ("whole", "broken"):
        train(config, [corpus], tmp_path / name)
    first, messages = weights(tmp_path / "whole"), list[str]()
    train(longer, [corpus], tmp_path / "whole", resume=True, callbacks=Callbacks(message=messages.append))
    assert any(
        "from 12 to 20 steps: the Stable schedule" in text and "rises again over 10 steps" in text for text in messages
    )
    run = Run(tmp_path / "whole")
    assert [line["step"] for line in run.history()] == list(range(1, 21))
    assert run.recipe().extended_at == 12
    rates = [line["lr"] for line in run.history()]
    assert rates[11] < rates[12] < 0.2 * max(rates), "the rate rises from zero, it does not jump"
    assert any((first[name] != tensor).any() for name, tensor in weights(tmp_path / "whole").items())
    with contextlib.suppress(KeyboardInterrupt):
        stop = Callbacks(step=lambda numbers: stop_at(17, numbers))
        train(longer, [corpus], tmp_path / "broken", resume=True, callbacks=stop)
    assert not Run(tmp_path / "broken").finished, "while it trains on, its old model is not the result"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clearhead.load(tmp_path / "broken")
    train(longer, [corpus], tmp_path / "broken", resume=True)
    assert same(tmp_path / "whole", tmp_path / "broken")
    with pytest.raises(ResumeError, match="is at step 20, past --steps 15; give more steps"):
        train(small(steps=15), [corpus], tmp_path / "whole", resume=True)


def test_a_changed_state_file_is_detected(corpus: Path, tmp_path: Path) -> None:
    run = stopped(small(), corpus, tmp_path / "run", 9)
    newest = list_checkpoints(run / "checkpoints")[-1]
    state = newest / "state.json"
    written = json.loads(state.read_text())
    for change in ({"step": 7}, {"facts": {}}, {"digests": {}}):
        state.write_text(json.dumps(written | change))
        assert find_damage(newest) == "state.json was changed"
    state.write_text(json.dumps(written))
    assert find_damage(newest) == ""
    shutil.copytree(newest, newest.with_name("step-00000099"))
    assert find_damage(newest.with_name("step-00000099")) == "state.json was changed"


def test_a_small_text_gets_a_small_vocabulary(corpus: Path, tmp_path: Path) -> None:
    options = ["--layers", "1", "--dim", "32", "--heads", "2", "--context", "16", "--batch", "2", "--steps", "2"]
    result = CliRunner().invoke(cli, ["train", "lm", "--data", str(corpus), "--out", str(tmp_path / "run"), *options])
    assert result.exit_code == 0, result.output
    assert "too small for a vocabulary of 4,096 tokens: using" in result.stderr
    assert "parameters on CPU" in result.stderr
    assert f"clearhead generate {tmp_path / 'run'}" in result.stderr


def test_sizes_reach_every_part_of_a_recipe() -> None:
    config = resize(recipe("lm"), RecipeSizes(layers=2, dim=64, heads=2, context=48, batch=3, vocabulary=300, lr=0.01))
    stack = config.model.stack
    assert (stack.dim, stack.repeats, stack.pattern[0].mixer.heads, stack.pattern[0].ffn.hidden) == (64, 2, 2, 176)
    assert (config.task.context, config.batch, config.task.tokenizer.vocabulary) == (48, 3, 300)
    assert (config.optimizer.lr, config.optimizer.rest.lr) == (0.01, 0.0025)
    assert isinstance(resize(recipe("lm"), RecipeSizes(mixer="mamba")).model.stack.pattern[0].mixer, MambaConfig)
    assert resize(recipe("chars"), RecipeSizes(mixer="linear")).model.stack.repeats == 3
    assert resize(recipe("bert"), RecipeSizes(context=256)).model.embedding.position.length == 256
    assert resize(recipe("translate"), RecipeSizes(layers=2, dim=64)).model.decoder.repeats == 2


@pytest.mark.parametrize(("sizes", "sentence"), [
    (RecipeSizes(layers=4), "repeats a pattern of 3 blocks; give a multiple of 3"),
    (RecipeSizes(mixer="mambo"), "there is no mixer 'mambo'; did you mean 'mamba'"),
    (RecipeSizes(vocabulary=300), "sets the size of a byte-pair vocabulary, but this recipe has Characters"),
    (RecipeSizes(lr=-1.0), "--lr is -1.0, but must be positive"),
])  # fmt: skip
def test_sizes_that_cannot_be_are_refused(sizes: RecipeSizes, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resize(recipe("chars"), sizes)
    with pytest.raises(ConfigError, match="--from takes the model from a checkpoint"):
        resize(replace(recipe("lm"), start="somewhere"), RecipeSizes(layers=2))


def test_set_scales_all_rates_and_names_the_path_of_short_names() -> None:
    config = find_recipe("lm", ("optimizer.lr=0.002",))
    assert (config.optimizer.lr, config.optimizer.rest.lr) == (0.002, pytest.approx(0.0005))
    config = find_recipe("lm", ("optimizer.lr=0.002", "optimizer.rest.lr=0.7"))
    assert config.optimizer.rest.lr == 0.7
    result = CliRunner().invoke(cli, ["train", "lm", "--set", "lr=0.1"])
    assert result.exit_code == 2
    assert "a recipe has no field 'lr'; use --lr, or optimizer.lr" in result.output


def test_the_progress_line_fits_80_columns() -> None:
    numbers = {"step": 99999, "train/loss": 10.1234, "tokens_per_second": 123456.0, "peak": 0.5}
    line = progress_line(numbers, 100000, 10.4321, 3 * 3600 + 62)
    assert len(line) <= 80
    assert line.endswith("3:01:02 left")


def test_a_sample_shows_its_prompt_and_no_control_characters() -> None:
    numbers = {"prompt": "To be", "sample": "To be\nor \x1b[31mnot"}
    assert split_sample(numbers) == ("To be", "⏎or  [31mnot")
    assert split_sample({"prompt": "ein Hund", "sample": "a dog"}) == ("ein Hund", " → a dog")


def test_the_loss_curve_falls_from_left_to_right() -> None:
    curve = LossCurve()
    for step in range(1, 101):
        curve.add({"step": step, "train/loss": 5 - step / 25} | ({"val/loss": 2.0} if step == 75 else {}))
    rows = curve.draw(width=20, height=5).splitlines()
    assert rows[0].startswith("   4.92 ┤")
    assert rows[4].startswith("   1.02 ┤")
    first, last = (next(i for i, c in enumerate(row[9:]) if c != " ") for row in (rows[0], rows[4]))
    assert first < last
    assert sum(row.count("o") for row in rows[:5]) == 1
    assert max(map(len, rows)) <= 80


def test_a_device_that_is_not_here_is_refused_with_the_way_out(corpus: Path, tmp_path: Path) -> None:
    assert choose_device("cpu").type == "cpu"
    if choose_device("auto").type == "cpu":
        command = ["train", "chars", "--data", str(corpus), "--out", str(tmp_path / "run"), "--device", "cuda"]
        result = CliRunner().invoke(cli, command)
        assert "--device cuda cannot be used here" in str(result.exception)
        assert "use --device cpu" in str(result.exception)
        assert not (tmp_path / "run").exists()


def test_share_of_peak_is_at_most_one_and_samples_have_100_characters(corpus: Path, tmp_path: Path) -> None:
    train(small(steps=6), [corpus], tmp_path / "run")
    lines = Run(tmp_path / "run").history()
    assert all(0 < line["peak"] <= 1 for line in lines)
    last = lines[-1]
    assert last["sample"].startswith(last["prompt"])
    assert len(last["sample"]) - len(last["prompt"]) >= 100


def test_conversations_are_scored_on_their_answers(tmp_path: Path) -> None:
    chats, text = tmp_path / "chats.jsonl", tmp_path / "answers.txt"
    messages = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}]
    chats.write_text((json.dumps({"messages": messages}) + "\n") * 40)
    text.write_text("two")
    config = small(steps=2, **{"task.tokenizer": {"kind": "Bytes"}, "task.context": 48})
    train(config, [chats], tmp_path / "run")
    result = CliRunner().invoke(cli, ["eval", str(tmp_path / "run"), str(chats), "--json"])
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)["files"].values()
    answer = len("two<|end|>\n")
    assert (found["tokens"], found["bytes"]) == (40 * (answer + 1), 40 * answer)  # and the end-of-text token
    sample = Run(tmp_path / "run").history()[-1]
    assert sample["prompt"] == "<|user|>\none?<|end|>\n<|assistant|>\n", "a sample answers a question"
    assert try_commands(tmp_path / "run", config)[0] == f"clearhead chat {tmp_path / 'run'}"


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_learns_in_bfloat16(name: str) -> None:
    """One forward and backward pass under autocast, at a small size."""
    import torch

    from clearhead.measure.precision import precision_works
    from clearhead.training.model import make_model
    from clearhead.training.task import Task

    if not precision_works("bfloat16").works:
        pytest.skip("this processor cannot multiply in bfloat16")
    config = resize(recipe(name), RecipeSizes(dim=32, heads=2))
    task = Task()
    task.config = config.model
    model = make_model(config, task.config)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if hasattr(model, "encoder"):
            out = model(torch.randint(0, 50, (2, 5)), torch.randint(0, 50, (2, 4)))
        elif name == "vit":
            out = model(torch.randn(2, 1, 8, 8))
        else:
            out = model(torch.randint(0, 50, (2, 9)))
    out.float().square().mean().backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())
    assert any(p.grad is not None for p in model.parameters())
