"""What a newcomer types in Python: names for configs, wrong types, what objects print, and a model's own tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import clearhead
from clearhead import nn
from clearhead.configs import BytesConfig
from clearhead.configs.precision import Int8
from clearhead.models.convert import CheckpointError
from clearhead.models.model import SequenceModel
from clearhead.tokenize import make
from clearhead.training.run import Run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SequenceModel:
    """A small model saved with a tokenizer of bytes, and loaded again."""
    config = clearhead.preset("tiny-llama").with_values({"embedding.vocabulary": 257, "head.vocabulary": 257})
    folder = tmp_path_factory.mktemp("model")
    clearhead.build(config).save(folder, tokenizer=make(BytesConfig(), []))
    loaded = clearhead.load(folder)
    assert isinstance(loaded, SequenceModel)
    return loaded


def test_a_name_a_config_and_a_model_give_the_same_trace_and_cost() -> None:
    config = clearhead.preset("tiny-gpt")
    for given in ("tiny-gpt", clearhead.build("tiny-gpt")):
        assert clearhead.cost(given) == clearhead.cost(config)
        assert clearhead.trace(given).steps == clearhead.trace(config).steps


def test_a_precision_has_a_name() -> None:
    assert isinstance(clearhead.quantize(clearhead.build("tiny-llama"), "int8").precision, Int8)


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda: clearhead.build(3), "3 does not describe a whole model"),
    (lambda: clearhead.cost(None), "None does not describe a whole model"),
    (lambda: clearhead.trace(clearhead.preset("gpt2").stack), "a Stack does not describe a whole model"),
    (lambda: clearhead.load(3), "load takes the path of a checkpoint or a name on the Hub, not 3"),
    (lambda: clearhead.load("no/where/at/all"), "there is no folder no/where/at/all; give a checkpoint folder"),
    (lambda: clearhead.quantize("a", "int8"), "quantize takes a model, not 'a'"),
    (lambda: clearhead.quantize(clearhead.build("tiny-llama"), "int3"), "no precision 'int3'; did you mean 'int"),
    (lambda: clearhead.build("tiny-llama").encode("a"), "the model has no tokenizer"),
    (lambda: nn.MultiHeadAttention(8, 2)(torch.zeros(1, 3, 9)), r"a layer of dim=8 takes .* not .* \(1, 3, 9\)"),
    (lambda: nn.Mamba(8)(torch.zeros(1, 3, 9)), "a layer of dim=8 takes a float tensor"),
    (lambda: nn.Block(8, mixer="mamba"), "mixer is 'mamba', but must be a layer"),
])  # fmt: skip
def test_a_wrong_value_is_one_sentence(call: Any, sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_a_model_reads_and_writes_text_with_its_own_tokenizer(model: SequenceModel) -> None:
    ids = model.encode("a<|endoftext|>b")
    assert ids == [model.tokenizer.encode("a")[0], 256, model.tokenizer.encode("b")[0]]
    assert model.decode(torch.tensor(ids)) == "ab"
    assert model.decode(ids, skip_special_tokens=False) == "a<|endoftext|>b"


def test_a_list_of_texts_gives_a_list_of_inspections(model: SequenceModel) -> None:
    first, second = model.inspect(["to be", "or not"], layers=[1])
    assert first.model_input.labels == list("to be")
    assert (second.map(1, 0).values == model.inspect("or not").map(1, 0).values).all()
    assert repr(second) == str(second)
    assert "1 layer, 4 heads, 6 positions" in repr(second)


def test_objects_print_what_they_are(model: SequenceModel, tmp_path: Path) -> None:
    tree = repr(clearhead.preset("tiny-gpt")).splitlines()
    assert "  stack: Stack(dim=32, repeats=2, final_norm=LayerNorm())" in tree
    assert "GatedFeedForward, 11,584" in model._repr_html_()
    cost, trace = clearhead.cost("gpt2"), clearhead.trace("gpt2", batch=2, length=8)
    assert repr(cost).startswith("124,439,808 parameters\n  embedding ")
    assert "<td>474.7 MiB</td>" in cost._repr_html_()
    assert "[B,T,D] = [2,8,768]" in repr(trace)
    assert trace._repr_html_().count("<tr>") == len(repr(trace).splitlines())
    taps = clearhead.Taps(read="stack.blocks.0.mixer.weights")
    model(torch.tensor([[1, 2, 3]]), taps=taps)
    assert repr(taps) == "Taps(read=['stack.blocks.0.mixer.weights'])\n  stack.blocks.0.mixer.weights: (1, 4, 3, 3)"
    lines = [{"step": 1, "train/loss": 4.0}, {"step": 2, "train/loss": 3.0, "val/loss": 3.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = Run(tmp_path)
    assert repr(run) == f"Run {tmp_path}: step 2, loss 3.000, validation 3.500"
    assert 'points="200.0,0.0 400.0,100.0"' in run._repr_html_()


def test_a_preset_without_weights_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Path:
        raise CheckpointError("gpt2-xl is not a folder")

    monkeypatch.setattr("clearhead.models.load.find_checkpoint", refuse)
    with pytest.raises(CheckpointError, match=r'clearhead.build\("gpt2-xl"\) makes this architecture'):
        clearhead.load("gpt2-xl")
