"""A draft model changes only the speed: the text is the one that the model writes alone, greedy or sampled."""

from __future__ import annotations

import copy

import pytest
import torch

from clearhead.generate.speculate import Draft

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


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_sampled_text_is_identical(noise: float) -> None:
    model = model_of("tiny-llama")
    options = {"max_new_tokens": 14, "temperature": 0.9, "top_p": 0.95, "seed": 3, "n": 3}
    plain = model.generate(PROMPTS, **options)
    fast = model.generate(PROMPTS, draft=Draft(nearly(model, noise), 4), **options)
    assert [one.tokens for one in fast] == [one.tokens for one in plain]
    drafted, accepted = (sum(getattr(one, name) for one in fast) for name in ("drafted", "accepted"))
    assert 0 < accepted <= drafted
    assert (accepted == drafted) == (noise == 0)


def test_no_text_is_read_beyond_the_context() -> None:
    """Learned positions end where the context does, and a draft must not look beyond it."""
    model = model_of("tiny-gpt")
    (plain,), (fast,) = (
        model.generate([[1, 2, 3]], max_new_tokens=62, draft=draft) for draft in (None, Draft(model, 5))
    )
    assert len(plain.tokens) == 62
    assert fast.tokens == plain.tokens


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
