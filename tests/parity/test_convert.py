"""Folders as people have them: pickles, names of wrappers, spare or missing heads. `transformers` loads the same."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from clearhead.cli.main import cli
from clearhead.models.convert import CheckpointError
from clearhead.models.folder import ALIGNMENT
from clearhead.models.load import load
from clearhead.models.model import build
from clearhead.models.presets import preset

SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80, "vocab_size": 71}
TOKENS = torch.tensor([[5, 17, 31, 8, 4]])


@pytest.fixture(scope="module")
def bert() -> Any:
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(**SIZES)).eval()


def write_pickle(model: Any, folder: Path, change: Callable[[dict[str, Any]], Any] = dict) -> Path:
    folder.mkdir()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    torch.save(change(model.state_dict()), folder / "pytorch_model.bin")
    return folder


def hidden(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(TOKENS, taps=None) if model.head is None else model(TOKENS)


def test_a_pickle_is_refused_without_convert(bert: Any, tmp_path: Path) -> None:
    folder = write_pickle(bert, tmp_path / "old")
    with pytest.raises(
        CheckpointError, match=r"only as pickles \(pytorch_model.bin\); convert them: clearhead convert"
    ):
        load(folder)


def test_a_pickle_is_converted_by_the_command(bert: Any, tmp_path: Path) -> None:
    folder = write_pickle(bert, tmp_path / "old")
    result = CliRunner().invoke(cli, ["convert", str(folder), str(tmp_path / "new")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "new" / "model.safetensors").exists()
    with torch.inference_mode():
        want = bert(TOKENS).pooler_output
    for model in (load(tmp_path / "new"), load(folder, convert=True)):
        torch.testing.assert_close(hidden(model), want, rtol=1e-4, atol=1e-5)
    theirs = transformers.AutoModel.from_pretrained(tmp_path / "new")
    assert all(torch.equal(t, bert.state_dict()[name]) for name, t in theirs.state_dict().items())


@pytest.mark.parametrize("form", ["sharded", "old format", "nested", "tied"])
def test_kinds_of_pickles(form: str, bert: Any, tmp_path: Path) -> None:
    weights = bert.state_dict()
    folder = write_pickle(bert, tmp_path / "old")
    if form == "sharded":
        names, half = list(weights), len(weights) // 2
        (folder / "pytorch_model.bin").unlink()
        table = {}
        for i, part in enumerate((names[:half], names[half:]), 1):
            file = f"pytorch_model-{i:05}-of-00002.bin"
            torch.save({name: weights[name] for name in part}, folder / file)
            table |= dict.fromkeys(part, file)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    else:
        data = {"nested": {"state_dict": weights, "epoch": 3}}.get(form, weights)
        data = (
            weights | {"cls.predictions.decoder.weight": weights["embeddings.word_embeddings.weight"]}
            if form == "tied"
            else data
        )
        torch.save(data, folder / "pytorch_model.bin", _use_new_zipfile_serialization=form != "old format")
    with torch.inference_mode():
        torch.testing.assert_close(hidden(load(folder, convert=True)), bert(TOKENS).pooler_output, rtol=1e-4, atol=1e-5)


class Runs:
    """A pickle that would make a file when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_runs_code_is_refused(bert: Any, tmp_path: Path) -> None:
    folder = write_pickle(bert, tmp_path / "old", lambda weights: {**weights, "odd": Runs(tmp_path / "made")})
    with pytest.raises(CheckpointError, match="holds more than tensors, and opening it could run code"):
        load(folder, convert=True)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("content", [b"", b"no pickle at all", pickle.dumps([1, 2]), b"PK\3\4 cut short"])
def test_what_is_no_pickle_of_tensors_is_one_sentence(content: bytes, bert: Any, tmp_path: Path) -> None:
    folder = write_pickle(bert, tmp_path / "old")
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"cannot convert .*pytorch_model.bin: \w"):
        load(folder, convert=True)


def spoil(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]], **fields: Any) -> Path:
    """Change the tensors and the config of a folder."""
    save_file(
        {name: t.clone() for name, t in change(load_file(folder / "model.safetensors")).items()},
        folder / "model.safetensors",
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (config | fields).items() if v is not None}))
    return folder


def test_the_family_can_be_given(bert: Any, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path / "old")
    spoil(tmp_path / "old", dict, model_type=None, architectures=None)
    with pytest.raises(
        ValueError, match=r"has no model_type; name the family: clearhead convert FOLDER OUT --family bert"
    ):
        load(tmp_path / "old")
    with torch.inference_mode():
        torch.testing.assert_close(
            hidden(load(tmp_path / "old", family="bert")), bert(TOKENS).pooler_output, rtol=1e-4, atol=1e-5
        )
    with pytest.raises(CheckpointError, match="the family 'bart7' is not supported"):
        load(tmp_path / "old", family="bart7")
    result = CliRunner().invoke(cli, ["convert", str(tmp_path / "old"), str(tmp_path / "new"), "--family", "bert"])
    assert result.exit_code == 0, result.output
    assert load(tmp_path / "new").family == "bert"


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (lambda t: {f"_orig_mod.{n}": v for n, v in t.items()}, "prefixes of torch.compile or DDP"),
        (lambda t: {f"module.{n}": v for n, v in t.items()}, "prefixes of torch.compile or DDP"),
        (lambda t: {f"module._orig_mod.bert.{n}": v for n, v in t.items()}, "prefixes of torch.compile or DDP"),
        (lambda t: t | {"classifier.weight": torch.ones(3, 48), "qa_outputs.bias": torch.ones(2)}, "ignored 2 tensors"),
    ],
)  # fmt: skip
def test_names_that_transformers_accepts(change: Any, note: str, bert: Any, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path / "old")
    spoil(tmp_path / "old", change)
    with pytest.warns(UserWarning, match=note):
        model = load(tmp_path / "old")
    with torch.inference_mode():
        torch.testing.assert_close(hidden(model), bert(TOKENS).pooler_output, rtol=1e-4, atol=1e-5)


def test_a_missing_pooler(bert: Any, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path / "old")
    spoil(tmp_path / "old", lambda t: {n: v for n, v in t.items() if not n.startswith("pooler")})
    with pytest.warns(UserWarning, match="no pooler"):
        model = load(tmp_path / "old")
    with torch.inference_mode():
        torch.testing.assert_close(hidden(model), bert(TOKENS).last_hidden_state, rtol=1e-4, atol=1e-5)
    spoil(tmp_path / "old", lambda t: {n: v for n, v in t.items() if "layer.1.output" not in n})
    with pytest.raises(CheckpointError, match="missing"), pytest.warns(UserWarning, match="no pooler"):
        load(tmp_path / "old")


def test_fewer_labels_than_classes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, num_labels=5)).eval()
    theirs.save_pretrained(tmp_path / "old")
    spoil(tmp_path / "old", dict, id2label={"0": "no", "1": "yes"}, label2id={"no": 0, "yes": 1})
    with pytest.warns(UserWarning, match="names 2 classes, but the classifier has 5"):
        model = load(tmp_path / "old")
    with torch.inference_mode():
        torch.testing.assert_close(model(TOKENS), theirs(TOKENS).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("llama9_text", "; the nearest supported family is llama;"),
        ("mixtral_moe", "; the nearest supported family is mixtral;"),
        ("blenderbot", "'blenderbot' is not supported; supported: "),
        ("clip", "'clip' is not supported; supported: "),
    ],
)
def test_a_near_family_is_named_only_if_it_is_one(kind: str, sentence: str, bert: Any, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path / "old")
    spoil(tmp_path / "old", dict, model_type=kind)
    with pytest.raises(ValueError, match=sentence) as caught:
        load(tmp_path / "old")
    assert "--family NAME" in str(caught.value)


def test_weights_of_tensorflow_are_named(bert: Any, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path / "old")
    (tmp_path / "old" / "model.safetensors").rename(tmp_path / "old" / "tf_model.h5")
    with pytest.raises(CheckpointError, match=r"has only TensorFlow weights \(tf_model.h5\)"):
        load(tmp_path / "old")


@pytest.mark.parametrize("dim", [48, 40, 24])
def test_a_saved_model_computes_the_same_bits(dim: int, tmp_path: Path) -> None:
    """Tensors that begin at odd addresses would be multiplied in another order."""
    torch.manual_seed(dim)
    config = preset("tiny-llama").with_value("stack.dim", dim).with_value("head.vocabulary", 61)
    model = build(config.with_value("embedding.vocabulary", 61)).eval()
    model.save(tmp_path / "mine")
    again = load(tmp_path / "mine")
    assert all(weight.data_ptr() % ALIGNMENT == 0 for weight in again.parameters())
    tokens = torch.randint(61, (3, 17))
    with torch.inference_mode():
        assert torch.equal(model(tokens), again(tokens))
    for name, tensor in load_file(tmp_path / "mine" / "model.safetensors").items():
        assert tensor.isfinite().all(), name
