"""Perplexity against its definition and torch's own loss; the harness asks, and gets the same numbers."""

from __future__ import annotations

import json
import math
import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import clearhead
from clearhead.configs import BytesConfig, CharactersConfig
from clearhead.measure.lm_eval import Answers, adapter
from clearhead.measure.perplexity import perplexity, perplexity_of, windows
from clearhead.tokenize import make

TEXT = "The quick brown fox jumps over the lazy dog. Ünïcödé counts its bytes."


def bytes_model(name: str = "tiny-gpt"):
    torch.manual_seed(0)
    config = clearhead.preset(name)
    config = replace(
        config, embedding=replace(config.embedding, vocabulary=257), head=replace(config.head, vocabulary=257)
    )
    model = clearhead.build(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(("context", "stride"), [(64, 64), (16, 4), (16, 16), (7, 3), (1, 1)])
@torch.no_grad()
def test_every_token_is_counted_once_with_what_its_window_holds(context: int, stride: int) -> None:
    model, tokenizer = bytes_model(), make(BytesConfig(), [])
    tokens = [256, *tokenizer.encode(TEXT)]
    nats, seen = 0.0, []
    for begin, end, counted in windows(len(tokens), context, stride):
        for place in range(counted, end):
            logits = model(torch.tensor([tokens[begin:place]]))[0, -1]
            nats -= float(logits.log_softmax(-1)[tokens[place]])
            seen.append(place)
            assert place == end - 1 or place - begin <= context
            assert place < context or place - begin >= min(context - stride + 1, place)
    assert seen == list(range(1, len(tokens)))
    score = perplexity(model, tokens, len(TEXT.encode()), context=context, stride=stride)
    assert score.nats == pytest.approx(nats, rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(nats / len(seen)), rel=1e-5)
    assert score.bits_per_byte == pytest.approx(nats / math.log(2) / len(TEXT.encode()), rel=1e-5)


def test_the_last_window_is_full() -> None:
    assert list(windows(8, context=4, stride=2)) == [(0, 5, 1), (2, 7, 5), (3, 8, 7)]
    assert list(windows(8, context=4, stride=4)) == [(0, 5, 1), (3, 8, 5)]  # as the harness rolls
    assert list(windows(3, context=4, stride=2)) == [(0, 3, 1)]


def test_one_window_is_the_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = bytes_model("tiny-llama"), make(BytesConfig(), [])
    tokens = torch.tensor([[256, *tokenizer.encode(TEXT)]])
    with torch.no_grad():
        wanted = torch.nn.functional.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:])
    score = perplexity_of(model, TEXT, tokenizer=tokenizer)
    assert score.loss == pytest.approx(float(wanted), rel=1e-5)
    monkeypatch.setattr("clearhead.measure.perplexity.SLICE", 7)
    assert perplexity_of(model, TEXT, tokenizer=tokenizer).loss == pytest.approx(float(wanted), rel=1e-5)
    assert score.tokens == score.bytes == len(TEXT.encode())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"stride": 9, "context": 8}, "stride is 9, but must be between 1 and the context of 8 tokens"),
        ({"context": 65}, "context is 65, but the model reads at most 64 tokens"),
    ],
)
def test_bad_windows_are_refused(options, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        perplexity_of(bytes_model(), TEXT, tokenizer=make(BytesConfig(), []), **options)


@dataclass
class Request:
    """What the harness calls an Instance: only its arguments are read."""

    args: tuple


@pytest.fixture
def asked(monkeypatch):
    """The adapter over the harness's own base class, or over a stand-in where the harness is not installed."""
    try:
        from lm_eval.api.model import LM
    except ImportError:
        LM = type("LM", (), {"__init__": lambda self: setattr(self, "_rank", 0)})
        for name, module in {"lm_eval": {}, "lm_eval.api": {}, "lm_eval.api.model": {"LM": LM}}.items():
            made = types.ModuleType(name)
            vars(made).update(module)
            monkeypatch.setitem(sys.modules, name, made)
    model, tokenizer = bytes_model(), make(BytesConfig(), [])
    answers = adapter(model, tokenizer)
    assert isinstance(answers, LM)
    assert isinstance(answers, Answers)
    assert answers._rank == 0
    return answers, model, tokenizer


@torch.no_grad()
def test_the_harness_gets_log_probabilities(asked) -> None:
    answers, model, tokenizer = asked
    pairs = [("The quick", " brown"), ("", "fox"), ("to ", "be"), ("x" * 80, "end"), ("to be", ""), ("x" * 80, "")]
    found = answers.loglikelihood([Request(pair) for pair in pairs])
    for (before, after), (score, greedy) in zip(pairs, found, strict=True):
        tokens = [*([] if before else [256]), *tokenizer.encode(before + after)]
        count = len(after) + len(before) - len(before.rstrip())
        tokens = tokens[-65:]  # the last is predicted and not read
        logits = model(torch.tensor([tokens[:-1]]))[0].log_softmax(-1)
        places = range(len(tokens) - count, len(tokens))
        assert score == pytest.approx(sum(float(logits[place - 1, tokens[place]]) for place in places), rel=1e-4)
        assert greedy == all(int(logits[place - 1].argmax()) == tokens[place] for place in places)


def test_a_continuation_longer_than_the_context_is_scored_whole(asked) -> None:
    answers, model, tokenizer = asked
    after = TEXT * 2
    ((total, greedy),) = answers.loglikelihood([Request(("The quick", after))])
    score = perplexity(model, tokenizer.encode("k" + after), 1, context=64, stride=64)
    assert total == pytest.approx(-score.nats, rel=1e-5)
    assert score.tokens == len(after.encode())
    assert greedy is False


@torch.no_grad()
def test_without_a_start_token_the_first_token_is_not_scored() -> None:
    model, tokenizer = bytes_model(), make(CharactersConfig(), ["fox"])
    answers = Answers(model, tokenizer)
    assert answers.start == []
    one, three = answers.loglikelihood([Request(("", "f")), Request(("", "fox"))])
    f, o, x = tokenizer.encode("fox")
    logits = model(torch.tensor([[f, o]]))[0].log_softmax(-1)
    assert one == (0.0, True)
    assert three[0] == pytest.approx(float(logits[0, o] + logits[1, x]), rel=1e-5)


def test_a_prompt_keeps_half_of_the_context(asked) -> None:
    answers, model, tokenizer = asked
    for before, kept in {TEXT: 32, TEXT[:20]: 20}.items():
        (wanted,) = model.generate(tokenizer.encode(before)[-kept:], tokenizer=tokenizer, temperature=0)
        assert len(wanted.tokens) == 65 - kept or wanted.reason == "end"
        assert answers.generate_until([Request((before, {"until": [], "max_gen_toks": 90}))]) == [wanted.text]


def test_the_harness_gets_rolling_texts_and_continuations(asked) -> None:
    answers, model, tokenizer = asked
    text = TEXT * 2
    (rolled,) = answers.loglikelihood_rolling([Request((text,))])
    whole = perplexity_of(model, text, tokenizer=tokenizer, context=64, stride=64)
    assert rolled == pytest.approx(-whole.nats)
    (plain,) = model.generate("The quick", tokenizer=tokenizer, max_new_tokens=12)
    (text,) = answers.generate_until([Request(("The quick", {"until": [], "max_gen_toks": 12}))])
    assert text == plain.text
    stop = plain.text[4:6]
    (cut,) = answers.generate_until([Request(("The quick", {"until": stop, "max_gen_toks": 12, "do_sample": False}))])
    assert cut == plain.text[: plain.text.index(stop)]
    (tokens,) = answers.loglikelihood([Request(("The quick", plain.text))])
    assert tokens[1] is True or "\ufffd" in plain.text


@pytest.mark.filterwarnings("default")
@torch.no_grad()
def test_the_harness_itself_runs_tasks(tmp_path: Path, monkeypatch) -> None:
    """Choices, whole texts and continuations of a local file, by the harness's own tasks and metrics."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lm_eval = pytest.importorskip("lm_eval")
    model, tokenizer = bytes_model(), make(BytesConfig(), [])
    choices = [" brown", " fox jumps", " dog"]
    sums = []
    for choice in choices:
        tokens = tokenizer.encode("The quick" + choice)
        logits = model(torch.tensor([tokens]))[0].log_softmax(-1)
        sums.append(sum(float(logits[place - 1, tokens[place]]) for place in range(9, len(tokens))))
    (plain,) = model.generate("The quick", tokenizer=tokenizer, max_new_tokens=5, temperature=0)
    right, wrong = (sums.index(max(sums)), plain.text), (sums.index(min(sums)), "otherwise")
    row = {"text": "The quick", "choices": choices, "whole": TEXT}
    rows = [row | {"answer": answer, "written": written} for answer, written in (right, wrong)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    shared = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{text}}"}
    shared["dataset_kwargs"] = {"data_files": {"test": str(tmp_path / "rows.jsonl")}}
    tasks = [
        {"task": "chosen", "output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "answer"},
        {"task": "written", "output_type": "generate_until", "doc_to_target": "written",
         "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 5}, "metric_list": [{"metric": "exact_match"}]},
        {"task": "predicted", "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{whole}}",
         "metric_list": [{"metric": "bits_per_byte"}]},
    ]  # fmt: skip
    answers = adapter(model, tokenizer)
    found = lm_eval.simple_evaluate(model=answers, tasks=[shared | task for task in tasks], bootstrap_iters=0)
    assert found["results"]["chosen"]["acc,none"] == 0.5
    assert found["results"]["written"]["exact_match,none"] == 0.5
    bits = perplexity_of(model, TEXT, tokenizer=tokenizer, context=64, stride=64).bits_per_byte
    assert found["results"]["predicted"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)


def test_without_the_harness_it_says_how_to_get_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(ValueError, match="the harness is not installed: pip install"):
        adapter(bytes_model(), make(BytesConfig(), []))
