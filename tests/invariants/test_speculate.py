"""A draft model changes only the speed: same greedy text, same distribution of samples."""

from __future__ import annotations

import copy

import pytest
import torch

from clearhead.generate.filters import draw
from clearhead.generate.speculate import Draft, accept

from .test_generate import DECODERS, PROMPTS, SUMMARIES, model_of, tokens_of

REWINDS = [name for name in DECODERS if name not in SUMMARIES]


def nearly(model, noise: float):
    """A copy of a model with noise in its weights, which mostly agrees with it."""
    torch.manual_seed(5)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return other


@pytest.mark.parametrize("name", REWINDS)
def test_greedy_text_is_identical(name: str) -> None:
    model = model_of(name)
    plain = tokens_of(model, PROMPTS, max_new_tokens=12)
    for draft in (Draft(nearly(model, 0.02), 3), Draft(model, 5)):
        found = model.generate(PROMPTS, max_new_tokens=12, draft=draft)
        assert [one.tokens for one in found] == plain
    assert all(one.accepted == one.drafted > 0 for one in found)  # a model agrees with itself


def test_filters_ends_and_logprobs_are_unchanged() -> None:
    model = model_of("tiny-llama")
    draft = Draft(nearly(model, 0.03), 4)
    options = {"max_new_tokens": 14, "repetition_penalty": 1.5, "ends": (17, 30, 62), "logprobs": True}
    plain, fast = model.generate(PROMPTS, **options), model.generate(PROMPTS, draft=draft, **options)
    for one, other in zip(plain, fast, strict=True):
        assert (one.tokens, one.reason) == (other.tokens, other.reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert 0 < sum(one.accepted for one in fast) < sum(one.drafted for one in fast)


def test_acceptance_rule_keeps_the_distribution() -> None:
    """For any p and q, the first output token has the distribution of p, and so has every accepted one after it."""
    rows, rng = 200_000, torch.Generator().manual_seed(0)
    p, q = (torch.randn(3, 5, generator=rng, dtype=torch.float64).mul(1.5).softmax(-1) for _ in range(2))
    q[2] = 0  # nothing is drafted in the last place
    q[1, 3] = 0
    q[1] /= q[1].sum()
    luck = [torch.rand(rows, generator=rng, dtype=torch.float64) for _ in range(6)]
    tokens = torch.stack([draw(q[i].expand(rows, 5), luck[i]) for i in range(2)], dim=1)
    tests = torch.stack([*luck[2:4], luck[4]], dim=1)
    kept, extra = accept(p.expand(rows, 3, 5), q.expand(rows, 3, 5), tokens, tests, luck[5])
    written = torch.where(torch.arange(3) < kept[:, None], torch.cat((tokens, extra[:, None]), dim=1), -1)
    written[torch.arange(rows), kept] = extra
    for place in range(3):
        there = written[kept >= place, place]
        share = there.bincount(minlength=5) / len(there)
        assert len(there) > 10_000
        torch.testing.assert_close(share.double(), p[place], atol=0.01, rtol=0)
    least = torch.minimum(p, q).sum(-1)
    assert float((kept >= 1).double().mean()) == pytest.approx(float(least[0]), abs=0.01)


def test_samples_have_the_models_distribution() -> None:
    """Sample two tokens with a draft that disagrees, and compare with the model's own probabilities."""
    model, draft = model_of("tiny-llama", 0.3, 4), Draft(model_of("tiny-gpt", 0.2, 4), 2)
    count = 120
    found = model.generate([2, 3], temperature=0.7, n=count, seed=1, max_new_tokens=2, draft=draft)
    with torch.no_grad():
        first = (model(torch.tensor([[2, 3]]))[0, -1] / 0.7).softmax(-1)
        second = (model(torch.tensor([[2, 3, token] for token in range(4)]))[:, -1] / 0.7).softmax(-1)
    wanted = (first[:, None] * second).flatten().double()
    drawn = torch.tensor([4 * one.tokens[0] + one.tokens[1] for one in found]).bincount(minlength=16).double()
    likely = wanted > 5 / count
    distance = ((drawn - count * wanted)[likely] ** 2 / (count * wanted)[likely]).sum()
    assert likely.sum() > 3
    assert float(distance) < 3 * int(likely.sum())  # chi-squared: its mean is one less than the cells
    assert 0 < sum(one.accepted for one in found) < sum(one.drafted for one in found)


@pytest.mark.parametrize(
    ("model", "draft", "sentence"),
    [
        ("tiny-transformer", "tiny-gpt", "a draft model works only with language models"),
        ("tiny-gpt", "tiny-bert", "the draft model has no language-model head"),
        ("tiny-llama", "tiny-lstm", "the draft has a recurrent mixer"),
        ("tiny-lstm", "tiny-llama", "the model has a recurrent mixer"),
    ],
)
def test_unsuitable_drafts_are_refused(model: str, draft: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        model_of(model).generate([1, 2], draft=Draft(model_of(draft)), start=1, max_new_tokens=20)


def test_draft_with_another_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary has 7 tokens and the model's 101"):
        model_of("tiny-gpt").generate([1, 2], draft=Draft(model_of("tiny-gpt", vocabulary=7)))
    with pytest.raises(ValueError, match="cannot use a draft model"):
        model_of("tiny-gpt").generate([1, 2], beams=2, draft=Draft(model_of("tiny-gpt")))
