"""The decode loop says what the whole model says, for every kind of model that can be decoded."""

from __future__ import annotations

import pytest
import torch

import clearhead
from clearhead.generate.loop import decode, sampler

DECODERS = ["tiny-gpt", "tiny-llama", "tiny-mistral", "tiny-mixtral", "tiny-deepseek", "tiny-lstm", "tiny-mamba"]


def model_of(name: str):
    torch.manual_seed(0)
    model = clearhead.build(clearhead.preset(name)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))  # so that the likeliest token depends on the prompt
    return model


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 101, shape, generator=torch.Generator().manual_seed(1))


def by_whole_passes(model, prompt: torch.Tensor, steps: int, **source) -> torch.Tensor:
    for _ in range(steps):
        logits = model(*source.values(), prompt)[:, -1]
        prompt = torch.cat((prompt, logits.argmax(-1, keepdim=True)), dim=1)
    return prompt[:, -steps:]


@pytest.mark.parametrize("name", DECODERS)
def test_decoding_equals_whole_passes(name: str) -> None:
    model, prompt = model_of(name), ids(3, 7)
    got = torch.stack(list(decode(model, prompt, steps=13)), dim=1)
    with torch.no_grad():
        assert torch.equal(got, by_whole_passes(model, prompt, 13))


def test_encoder_decoder_decoding_equals_whole_passes() -> None:
    model, source, start = model_of("tiny-transformer"), ids(3, 9), ids(3, 1)
    got = torch.stack(list(decode(model, start, steps=11, source=source)), dim=1)
    with torch.no_grad():
        assert torch.equal(got, by_whole_passes(model, start, 11, source=source))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_ragged_batch_equals_one_by_one(name: str, side: str) -> None:
    model, prompt = model_of(name), ids(3, 7)
    readable = torch.ones(3, 7, dtype=torch.bool)
    readable[1, :3] = readable[2, :6] = False
    if side == "right":
        readable = readable.flip(1)
    together = torch.stack(list(decode(model, prompt, steps=9, readable=readable)), dim=1)
    for row in range(3):
        alone = torch.stack(list(decode(model, prompt[row][readable[row]][None], steps=9)), dim=1)
        assert torch.equal(together[row : row + 1], alone)


def test_sampling_follows_the_distribution_and_the_seed() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.6, 0.3]])).expand(20000, 3)
    drawn = sampler(rng=torch.Generator().manual_seed(0))(logits)
    assert torch.allclose(drawn.bincount() / 20000, torch.tensor([0.1, 0.6, 0.3]), atol=0.02)
    assert torch.equal(drawn, sampler(rng=torch.Generator().manual_seed(0))(logits))
    cold = sampler(temperature=0.05, rng=torch.Generator().manual_seed(0))(logits)
    assert cold.eq(1).float().mean() > 0.999


def test_bad_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        list(decode(model_of("tiny-gpt"), ids(1, 0), steps=1))
    with pytest.raises(ValueError, match="the source is missing"):
        list(decode(model_of("tiny-transformer"), ids(1, 1), steps=1))
    with pytest.raises(ValueError, match="reads later tokens"):
        list(decode(model_of("tiny-bert"), ids(1, 3), steps=1))
    with pytest.raises(ValueError, match="temperature is 0"):
        sampler(temperature=0)
    with pytest.raises(ValueError, match="position 64 is past the 64 learned positions"):
        list(decode(model_of("tiny-gpt"), ids(1, 60), steps=6))
