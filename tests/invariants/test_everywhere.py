"""Every mixer saves, loads, trains, generates, quantizes and exports, or says in one sentence why not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clearhead.configs import Int8
from clearhead.models.convert import CheckpointError
from clearhead.models.gguf.write import save_gguf
from clearhead.models.load import load
from clearhead.models.model import SequenceModel, build
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
    model = model_of(name).train()
    model(TOKENS).logsumexp(-1).sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.stack.parameters())


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
