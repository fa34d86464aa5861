"""Fine-tuning a checkpoint, fully or with LoRA."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import clearhead
from clearhead.cli import train as cli_train
from clearhead.cli.train import find_recipe
from clearhead.configs import ConfigError, Int8
from clearhead.configs.lora import LoRAConfig
from clearhead.data import chat
from clearhead.generate.defaults import default_decoding
from clearhead.generate.template import ChatTemplate
from clearhead.models import hub
from clearhead.models.convert import CheckpointError
from clearhead.models.lora import adapt, save_adapter, unmerge
from clearhead.models.origin import config_json
from clearhead.models.quantize import quantize
from clearhead.tasks.classify import classify
from clearhead.tokenize import Tokenizer
from clearhead.training import loop
from clearhead.training.distributed import World
from clearhead.training.loop import Callbacks, train
from clearhead.training.model import gather_model, make_model
from clearhead.training.recipes import recipe
from clearhead.training.run import Run
from clearhead.training.task import Task

from .test_tasks import folders
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
    unmerge(adapted, out)
    for mine, theirs in zip(adapted.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


def test_an_adapter_whose_base_has_changed_is_refused(base: Path, tmp_path: Path) -> None:
    out = tuned(base, tmp_path, "--lora", "2", "--steps", "2")
    about = json.loads((out / "adapter.json").read_text())
    (out / "adapter.json").write_text(json.dumps(about | {"digest": "0"}))
    with pytest.raises(ValueError, match="but the weights there have changed since"):
        clearhead.load(out)
    (out / "adapter.json").write_text(json.dumps(about | {"base": str(tmp_path / "gone")}))
    with pytest.raises(ValueError, match="which does not exist"):
        clearhead.load(out)


def test_a_damaged_adapter_is_named(base: Path, tmp_path: Path) -> None:
    from clearhead.cli.options import find_config

    model = clearhead.load(base)
    adapt(model, LoRAConfig(rank=2))
    save_adapter(model, tmp_path, base, LoRAConfig(rank=2))
    about = (tmp_path / "adapter.json").read_text()
    assert find_config(str(tmp_path)) == clearhead.load(tmp_path).config
    for text, sentence in (
        (about[:20], "is not JSON: .* line 2"),
        (about.replace("base", "bass"), "it holds an object without the field 'base'"),
        (about.replace("LoRA", "LoRa"), "has the unknown kind 'LoRa'; did you mean 'LoRA'?"),
        ("[]", r"it holds \[\], but must be an object"),
        (json.dumps(json.loads(about) | {"base": 3}), "base is 3, but must be a text"),
    ):
        (tmp_path / "adapter.json").write_text(text)
        for reads in (clearhead.load, find_config):
            with pytest.raises(ValueError, match=rf"adapter\.json.*{sentence}"):
                reads(str(tmp_path))
    (tmp_path / "adapter.json").write_text(about)
    (tmp_path / "adapter.safetensors").write_bytes((tmp_path / "adapter.safetensors").read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"adapter\.safetensors is missing or damaged"):
        clearhead.load(tmp_path)


def test_an_adapter_of_other_shapes_is_refused(base: Path, tmp_path: Path) -> None:
    """A B of [1, 2] would broadcast into every row."""
    model = clearhead.load(base)
    adapt(model, LoRAConfig(rank=2))
    save_adapter(model, tmp_path, base, LoRAConfig(rank=2))
    path = tmp_path / "adapter.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith(".b"))
    save_file(tensors | {name: tensors[name][:1].clone()}, path)
    with pytest.raises(CheckpointError, match=rf"{name} is \(1, 2\), but must be \(\d+, 2\)"):
        clearhead.load(tmp_path)


def test_an_adapter_of_an_adapter_knows_its_base(base: Path, tmp_path: Path) -> None:
    start = base
    for name in ("one", "two"):
        model = clearhead.load(start)
        adapt(model, LoRAConfig(rank=2))
        (tmp_path / name).mkdir()
        save_adapter(model, tmp_path / name, start, LoRAConfig(rank=2))
        start = tmp_path / name
    assert clearhead.load(start).config == clearhead.load(base).config
    model = clearhead.load(base)
    torch.manual_seed(5)
    adapt(model, LoRAConfig(rank=2))
    save_adapter(model, tmp_path / "one", base, LoRAConfig(rank=2))
    with pytest.raises(CheckpointError, match="one, but the weights there have changed since"):
        clearhead.load(start)


def test_an_adapter_has_what_was_trained_beside_the_weights(tmp_path: Path) -> None:
    """The layout of conversations, in a model whose base knew of none."""
    text, chats = tmp_path / "text.txt", tmp_path / "chats.jsonl"
    text.write_text(TEXT)
    conversation = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}]
    chats.write_text((json.dumps({"messages": conversation}) + "\n") * 30)
    train(small(steps=1, **{"task.tokenizer": {"kind": "Bytes"}}), [text], tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text('{"max_new_tokens": 3}')
    config = find_recipe("finetune", ("task.context=16",), steps=1, checkpoint=str(tmp_path / "base"), lora=2)
    train(config, [chats], tmp_path / "tuned")
    for folder in (tmp_path / "tuned", tmp_path / "tuned" / "best"):
        model = clearhead.load(folder)
        assert model.origin == folder
        template = ChatTemplate.load(model.origin, Tokenizer.load(model.origin))
        assert template.render(conversation, prompt=False) == "".join(piece for piece, _ in chat(conversation))
        assert default_decoding(model, None).max_new_tokens == 3  # as the base has it
        assert config_json(folder)["dtype"] == "float32"
    model.save(tmp_path / "merged")
    assert (tmp_path / "merged" / "chat_template.jinja").exists()


def test_an_adapter_of_pictures_has_the_names_of_its_classes(tmp_path: Path) -> None:
    config = recipe("vit").with_value("model.stack.repeats", 1).with_value("steps", 1)
    train(config, [folders(tmp_path / "shades")], tmp_path / "base")
    for old, new in (("dark", "night"), ("light", "noon")):
        (tmp_path / "shades" / old).rename(tmp_path / "shades" / new)
    config = find_recipe("vit", steps=1, checkpoint=str(tmp_path / "base"), lora=2)
    train(config, [tmp_path / "shades"], tmp_path / "tuned")
    (found,) = classify(clearhead.load(tmp_path / "tuned"), [tmp_path / "shades" / "noon" / "0.png"])
    assert {one.label for one in found} == {"night", "noon"}
    (found,) = classify(clearhead.load(tmp_path / "base"), [tmp_path / "shades" / "noon" / "0.png"])
    assert {one.label for one in found} == {"dark", "light"}


def test_of_a_checkpoints_model_only_dropout_can_be_changed(base: Path, tmp_path: Path) -> None:
    changes = ("task.context=16", "model.stack.pattern.0.dropout=0.5")
    config = find_recipe("finetune", changes, steps=1, checkpoint=str(base))
    model = train(config, [other_text(tmp_path)], tmp_path / "run")
    assert [block.mixer_residual.dropout.p for block in model.stack.blocks] == [0.5, 0.0, 0.0]
    assert model.config == config.model == clearhead.load(tmp_path / "run").config
    moved = max(
        (a - b).abs().max() for a, b in zip(weights(base).values(), weights(tmp_path / "run").values(), strict=True)
    )
    assert 0 < moved < 1e-3  # from the checkpoint's weights, by a step
    config = find_recipe("finetune", ("model.stack.pattern.0.ffn.activation=gelu",), checkpoint=str(base))
    with pytest.raises(
        ConfigError, match=r"differs from .*: stack\.blocks\.0\.ffn\.activation is gelu and relu2; with"
    ):
        train(config, [other_text(tmp_path)], tmp_path / "other")


def test_a_checkpoint_by_its_name_on_the_hub_brings_its_tokenizer(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "find_checkpoint", lambda path, *files: base if path == "org/name" else Path(path))
    config = find_recipe("finetune", checkpoint="org/name")
    assert (config.start, config.task.tokenizer.path) == ("org/name", str(base))


def test_what_cannot_be_adapted_or_trained_is_refused_at_the_start(base: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    about = replace(small(), start=str(tmp_path / "model.gguf"), adapter=LoRAConfig())
    with pytest.raises(ConfigError, match="is a file, and LoRA needs a checkpoint folder"):
        make_model(about, about.model)
    with pytest.raises(ConfigError, match=r"LoRA\.rank is 100000, but no matrix of this model has a rank above 32"):
        adapt(clearhead.load(base), LoRAConfig(rank=100_000))
    quantize(clearhead.load(base), Int8()).save(tmp_path / "int8")
    with pytest.raises(ConfigError, match="is quantized and cannot be trained"):
        make_model(replace(small(), start=str(tmp_path / "int8")), small().model)


def test_a_gathered_model_has_its_adapters_and_can_be_saved(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(small(), start=str(base), adapter=LoRAConfig(rank=2))
    task, here = Task(), World(torch.device("cpu"))
    task.config = clearhead.load(base).config
    model = make_model(config, task.config)
    copy = gather_model(model, task, config, here)
    assert all(torch.equal(tensor, copy.state_dict()[name]) for name, tensor in model.state_dict().items())
    save_adapter(copy, tmp_path, base, config.adapter)
    assert clearhead.load(tmp_path).config == task.config

    def full(*given: object) -> None:
        raise OSError("no space left")

    before = sorted(path.name for path in tmp_path.iterdir())
    monkeypatch.setattr("clearhead.models.folder.write_safetensors", full)
    with pytest.raises(OSError, match="no space left"):
        save_adapter(copy, tmp_path, base, config.adapter)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("rank", ["0", "1"])
def test_of_several_processes_the_first_speaks(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(loop, "train", lambda *given, callbacks, **options: callbacks.message("saved"))
    monkeypatch.setattr(cli_train, "SAMPLE_TOKENS", 2)
    cli_train.command.main(["chars", "--out", str(base), "--shard", "--sample", "the quick"], standalone_mode=False)
    printed = capsys.readouterr()
    assert (printed.out.startswith("the quick"), "saved\n" in printed.err) == ((rank == "0",) * 2)


def test_an_interrupted_adapter_goes_on(base: Path, tmp_path: Path) -> None:
    data = other_text(tmp_path)
    changes = ("task.context=16", "save_every=4", "evaluate_every=4")
    config = find_recipe("finetune", changes, steps=8, checkpoint=str(base), lora=2)
    train(config, [data], tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(config, [data], tmp_path / "broken", callbacks=Callbacks(step=lambda numbers: stop_at(6, numbers)))
    train(config, [data], tmp_path / "broken", resume=True)
    mine, other = (load_file(tmp_path / name / "adapter.safetensors") for name in ("whole", "broken"))
    assert all(torch.equal(mine[name], other[name]) for name in mine)
