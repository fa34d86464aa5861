"""Every mixer saves, loads, trains, generates, quantizes and exports, or says in one sentence why not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from clearhead.configs import Int8, ModelConfig
from clearhead.models.convert import CheckpointError
from clearhead.models.gguf.write import save_gguf
from clearhead.models.load import load
from clearhead.models.model import SequenceModel, build
from clearhead.models.onnx import Graph, check_onnx, save_onnx
from clearhead.models.quantize import quantize

from .cases import LEARNED, MIXERS, VOCABULARY, block, sequence

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])


def model_of(name: str) -> SequenceModel:
    torch.manual_seed(0)
    model = build(sequence(block(MIXERS[name]), repeats=1, position=LEARNED))
    assert isinstance(model, SequenceModel)
    return model.eval()


@pytest.mark.parametrize("name", MIXERS)
def test_saves_and_loads(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    model.save(tmp_path)
    again = load(tmp_path)
    assert again.config == model.config
    assert torch.equal(again(TOKENS), model(TOKENS))


@pytest.mark.parametrize("name", MIXERS)
def test_trains(name: str) -> None:
    """Two steps of AdamW on one batch: the loss falls, and every weight of the stack moves."""
    model = model_of(name).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    start = {key: weight.detach().clone() for key, weight in model.stack.named_parameters()}
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(model(TOKENS)[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]
    moved = dict(model.stack.named_parameters())
    assert not [key for key, weight in start.items() if torch.equal(weight, moved[key])]


@pytest.mark.parametrize("name", MIXERS)
def test_generates_or_says_why_not(name: str) -> None:
    model = model_of(name)
    if MIXERS[name].mask.causal:
        (text,) = model.generate([TOKENS[0].tolist()], max_new_tokens=3, temperature=0.0)
        assert len(text.tokens) == 3
        assert all(0 <= token < VOCABULARY for token in text.tokens)
    else:
        with pytest.raises(ValueError, match=r"causal|later|predict"):
            model.generate([TOKENS[0].tolist()], max_new_tokens=3)


@pytest.mark.parametrize("name", MIXERS)
def test_quantizes(name: str, tmp_path: Path) -> None:
    packed = quantize(model_of(name), Int8())
    packed.save(tmp_path)
    with torch.inference_mode():
        torch.testing.assert_close(load(tmp_path)(TOKENS), packed(TOKENS))


@pytest.mark.parametrize("name", MIXERS)
def test_exports_to_gguf_or_says_why_not(name: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    with pytest.raises(CheckpointError, match=r"cannot export .* to GGUF") as caught:
        save_gguf(model_of(name), tmp_path / "m.gguf", None)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", MIXERS)
def test_exports_to_onnx_or_says_why_not(name: str) -> None:
    """The check before an export: it passes, or it is one sentence that names the part."""
    config = model_of(name).config
    reason = onnx_refusal(config)
    if config.stack.pattern[0].mixer.traceable:
        assert reason is None or "changes with the length" in reason
    else:
        assert reason is not None
        assert "is not written to ONNX" in reason
        assert config.stack.pattern[0].mixer.kind() in reason
        assert "\n" not in reason


@pytest.mark.proof
@pytest.mark.parametrize("name", MIXERS)
def test_onnxruntime_computes_the_same(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = model_of(name)
    if reason := onnx_refusal(model.config):
        pytest.skip(reason)
    save_onnx(model, tmp_path / "m.onnx")
    tokens = torch.cat([TOKENS, TOKENS.flip(1)])
    given = {"input_ids": tokens.numpy(), "attention_mask": torch.ones_like(tokens).numpy()}
    names = Graph(model).names
    (*_, logits) = onnxruntime.InferenceSession(str(tmp_path / "m.onnx")).run(None, {key: given[key] for key in names})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(logits), model(tokens), atol=1e-4, rtol=1e-4)


def onnx_refusal(config: ModelConfig) -> str | None:
    """Why a model cannot be written to ONNX; None if it can."""
    try:
        check_onnx(config)
    except CheckpointError as error:
        return str(error)
    return None
