"""Whole models: NumPy, PyTorch written out and PyTorch fused give the same numbers, intermediates included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import clearhead
from clearhead import reference
from clearhead.configs import EncoderDecoderConfig, ModelConfig, PatchEmbeddingConfig, TokenEmbeddingConfig
from clearhead.nn.tap import Taps
from tests.invariants.cases import CASES

EXACT = {"atol": 1e-9, "rtol": 1e-9}  # float64
BATCH, LENGTH = 3, 11


def build(config: ModelConfig) -> Any:
    """A model in float64 whose every weight matters: no gain is 1, no bias 0."""
    torch.manual_seed(0)
    model = clearhead.build(config).double().eval()
    with torch.no_grad():
        biases = [buffer for name, buffer in model.named_buffers() if name.endswith("bias")]
        for weight in [*model.parameters(), *biases]:
            weight.add_(0.1 * torch.randn_like(weight))
    return model


def weights(model: Any) -> dict[str, np.ndarray]:
    return {name: weight.numpy() for name, weight in model.state_dict().items()}


def inputs(config: ModelConfig) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)

    def tokens(embedding: TokenEmbeddingConfig, length: int) -> torch.Tensor:
        return torch.randint(0, embedding.vocabulary, (BATCH, length), generator=generator)

    if isinstance(config, EncoderDecoderConfig):
        return tokens(config.source, LENGTH + 2), tokens(config.target or config.source, LENGTH)
    if isinstance(config.embedding, PatchEmbeddingConfig):
        side = config.embedding.image
        return (torch.randn(BATCH, config.embedding.channels, side, side, generator=generator).double(),)
    return (tokens(config.embedding, LENGTH),)


def padding(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Some rows shorter than others, where the model reads tokens."""
    if isinstance(config, EncoderDecoderConfig):
        readable = torch.ones(BATCH, LENGTH + 2, dtype=torch.bool)
        readable[1, 5:] = False
        return {"source_readable": readable}
    if isinstance(config.embedding, PatchEmbeddingConfig):
        return {}
    readable = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    readable[1, 6:] = False
    readable[2, :4] = False
    return {"readable": readable}


@pytest.mark.parametrize("name", CASES)
def test_three_ways_one_result(name: str) -> None:
    config = CASES[name]
    model, given, padded = build(config), inputs(config), padding(config)
    arrays = {key: mask.numpy() for key, mask in padded.items()}
    record: dict[str, np.ndarray] = {}
    numpy_out = reference.run(config, weights(model), *(x.numpy() for x in given), record=record, **arrays)
    taps = Taps(read=["*"])
    with torch.no_grad():
        written_out = model(*given, **padded, fused=False, taps=taps)
        fused = model(*given, **padded)
    np.testing.assert_allclose(numpy_out, written_out.numpy(), **EXACT)
    np.testing.assert_allclose(numpy_out, fused.numpy(), **EXACT)
    assert record.keys() == taps.values.keys()
    for path, value in record.items():
        np.testing.assert_allclose(value, taps.values[path].numpy(), **EXACT, err_msg=path)


@pytest.mark.parametrize("name", CASES)
def test_numpy_decodes_in_pieces(name: str) -> None:
    config = CASES[name]
    stack = config.decoder if isinstance(config, EncoderDecoderConfig) else config.stack
    if not all(block.mixer.mask.causal for block in stack.blocks):
        with pytest.raises(ValueError, match="reads later tokens"):
            reference.run(
                config, weights(build(config)), *(x.numpy() for x in inputs(config)), state=reference.DecodeState()
            )
        return
    model = build(config)
    *source, target = (x.numpy() for x in inputs(config))
    whole = reference.run(config, weights(model), *source, target)
    state = reference.DecodeState()
    pieces = [
        reference.run(config, weights(model), *source, piece, state=state)
        for piece in np.split(target, [3, 4, 8], axis=1)
    ]
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, **EXACT)


def test_a_batch_without_a_real_token() -> None:
    config = CASES["longformer, global projections; pre"]
    model, (tokens,) = build(config), inputs(config)
    readable = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    with torch.no_grad():
        want = model(tokens, readable=readable)
    got = reference.run(config, weights(model), tokens.numpy(), readable=readable.numpy())
    np.testing.assert_allclose(got, want.numpy(), **EXACT)


def test_numpy_engine_says_what_is_wrong() -> None:
    config = clearhead.preset("tiny-gpt")
    good = weights(build(config))
    tokens = np.zeros((1, 3), int)
    with pytest.raises(ValueError, match=r"1 weights are missing, such as stack\.final_norm\.bias"):
        reference.run(config, {k: v for k, v in good.items() if k != "stack.final_norm.bias"}, tokens)
    with pytest.raises(ValueError, match=r"wrong shape, such as stack\.final_norm\.bias: \(3,\), not \(32,\)"):
        reference.run(config, good | {"stack.final_norm.bias": np.zeros(3)}, tokens)
    with pytest.raises(IndexError, match="token 101 is outside a vocabulary of 101"):
        reference.run(config, good, tokens + 101)
    with pytest.raises(ValueError, match="position 64 is past the 64 learned positions"):
        reference.run(config, good, np.zeros((1, 65), int))
    with pytest.raises(ValueError, match="no decoder of its own"):
        reference.run(config, good, tokens, tokens)


def test_no_file_hides_the_function_of_its_name() -> None:
    """`reference.embedding` is the function, also after a model has loaded the file of that name."""
    for name in ("tiny-gpt", "tiny-deepseek", "tiny-mixtral"):
        config = clearhead.preset(name)
        reference.run(config, weights(build(config)), np.zeros((1, 3), int))
    for engine in (reference, clearhead.functional):
        hidden = [name for name in engine.__all__ if name != "ACTIVATIONS" and not callable(getattr(engine, name))]
        assert hidden == []
