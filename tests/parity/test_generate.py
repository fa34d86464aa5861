"""Decoding against `transformers`: its logits processors, its sampling, its beam search."""

from __future__ import annotations

import pytest
import torch

import clearhead
from clearhead.configs import Power
from clearhead.generate.filters import BannedTokens, MinP, RepetitionPenalty, Temperature, TopK, TopP

transformers = pytest.importorskip("transformers")
process = transformers.generation.logits_process

PAIRS = [
    (Temperature(0.7), lambda: process.TemperatureLogitsWarper(0.7)),
    (TopK(5), lambda: process.TopKLogitsWarper(5)),
    (TopK(500), lambda: process.TopKLogitsWarper(500)),
    (TopP(0.8), lambda: process.TopPLogitsWarper(0.8)),
    (TopP(0.0), lambda: process.TopPLogitsWarper(0.0)),
    (MinP(0.1), lambda: process.MinPLogitsWarper(0.1)),
    (RepetitionPenalty(1.7), lambda: process.RepetitionPenaltyLogitsProcessor(1.7)),
    (RepetitionPenalty(0.6), lambda: process.RepetitionPenaltyLogitsProcessor(0.6)),
    (BannedTokens((3, 11)), lambda: process.NoBadWordsLogitsProcessor([[3], [11]], eos_token_id=torch.tensor([0]))),
]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda value: getattr(value, "__dict__", None) and str(value))
def test_filters_equal_logits_processors(ours, theirs) -> None:
    rng = torch.Generator().manual_seed(0)
    logits = (torch.randn(6, 37, generator=rng) * 3).round(decimals=1)  # with ties
    read = torch.randint(0, 37, (6, 9), generator=rng)
    seen = torch.zeros(6, 37, dtype=torch.bool).scatter(1, read, True)
    assert torch.equal(ours(logits, seen), theirs()(read, logits.clone()))


def test_top_p_keeps_the_smallest_set() -> None:
    level = torch.zeros(1, 4)  # sums of exactly a quarter, a half, …
    for count, share in enumerate((0.25, 0.5, 0.75, 1.0), 1):
        found = TopP(share)(level, level.bool())
        assert torch.equal(found, process.TopPLogitsWarper(share)(None, level))
        assert int(found.isfinite().sum()) == count


def llama(**extra):
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=53,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.4,
            eos_token_id=[3, 11],
            pad_token_id=0,
            **extra,
        )
    ).eval()


def marian():
    torch.manual_seed(1)
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in
             {"layers": 2, "attention_heads": 4, "ffn_dim": 48}.items()}  # fmt: skip
    config = transformers.MarianConfig(
        vocab_size=53,
        d_model=32,
        init_std=0.4,
        pad_token_id=52,
        decoder_start_token_id=52,
        eos_token_id=0,
        forced_eos_token_id=None,
        scale_embedding=True,
        max_position_embeddings=64,
        **sizes,
    )
    return transformers.MarianMTModel(config).eval()


MODELS = {"llama": llama, "marian": marian}


@pytest.fixture(scope="module", params=MODELS)
def both(request, tmp_path_factory):
    theirs = MODELS[request.param]()
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return clearhead.load(folder), theirs


def their_generate(theirs, prompt: list[int], **options) -> tuple[list[list[int]], list[float] | None]:
    """The tokens after the prompt, including the end token, and the beam scores."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        found = theirs.generate(ids, return_dict_in_generate=True, output_scores=True, max_length=None, **options)
    skip = 1 if theirs.config.is_encoder_decoder else len(prompt)
    ends = theirs.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    texts = []
    for row in found.sequences[:, skip:].tolist():
        stop = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        texts.append(row[:stop])
    scores = found.sequences_scores.tolist() if options.get("num_beams", 1) > 1 else None
    return texts, scores


PROMPTS = [[5, 6, 7], [20, 21, 22, 23, 24], [44]]


def test_greedy_and_repetition_penalty_match(both) -> None:
    ours, theirs = both
    for penalty in (1.0, 1.4):
        found = ours.generate(PROMPTS, max_new_tokens=15, repetition_penalty=penalty)
        for prompt, mine in zip(PROMPTS, found, strict=True):
            options = {"max_new_tokens": 15, "do_sample": False, "repetition_penalty": penalty}
            assert [mine.tokens] == their_generate(theirs, prompt, **options)[0]


@pytest.mark.parametrize(
    ("alpha", "early", "again"),
    [(0.0, False, 1.0), (0.7, False, 1.6), (1.5, "never", 1.0), (-1.0, True, 1.0), (1.0, True, 1.3)],
)
def test_beam_search_matches(both, alpha: float, early, again: float) -> None:
    ours, theirs = both
    options = {"beams": 4, "n": 4, "length_penalty": Power(alpha), "early_stopping": early, "max_new_tokens": 12}
    found = ours.generate(PROMPTS, repetition_penalty=again, **options)
    for number, prompt in enumerate(PROMPTS):
        texts, scores = their_generate(
            theirs,
            prompt,
            num_beams=4,
            num_return_sequences=4,
            length_penalty=alpha,
            early_stopping=early,
            repetition_penalty=again,
            max_new_tokens=12,
            do_sample=False,
        )
        mine = [one for one in found if one.prompt == number]
        assert [one.tokens for one in mine] == texts
        assert [one.score for one in mine] == pytest.approx(scores, abs=1e-4, rel=1e-5)


def test_sampling_has_the_same_distribution(both) -> None:
    """Frequencies of the first token over many samples, against the probabilities of transformers."""
    ours, theirs = both
    options = {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.05}
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        probabilities = theirs.generate(
            ids, do_sample=True, max_new_tokens=1, return_dict_in_generate=True, output_scores=True,
            max_length=None, **options,
        ).scores[0]  # fmt: skip
    wanted = probabilities.softmax(-1)[0]
    drawn = ours.generate([PROMPTS[0]], n=4000, max_new_tokens=1, seed=5, **options)
    share = torch.tensor([one.tokens[0] for one in drawn]).bincount(minlength=53) / 4000
    assert (share[wanted == 0] == 0).all()
    assert (wanted > 0).sum() > 3
    assert torch.allclose(share, wanted, atol=0.03)
