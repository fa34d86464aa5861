"""`lm_eval --model local-completions` scores a served model like the adapter in this process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import clearhead
from clearhead.configs import precision
from clearhead.measure.lm_eval import Answers
from clearhead.models.quantize import quantize

from .tools import chat_folder, running

PAIRS = [("Hello", " you"), ("To be", " or not to be"), ("One day", " the cat saw a dog"), ("a", "bc")]


def test_local_completions_has_the_scores_of_the_adapter(tmp_path) -> None:
    completions = pytest.importorskip("lm_eval.models.openai_completions")
    from lm_eval.api.instance import Instance

    model = quantize(clearhead.load(chat_folder(tmp_path)), precision("float32"))
    wanted = Answers(model).loglikelihood([SimpleNamespace(args=pair) for pair in PAIRS])
    with running({"tiny": model}, rows=4) as server:
        harness = completions.LocalCompletionsAPI(
            base_url=f"{server.url}/v1/completions", tokenizer_backend="remote", model="tiny", batch_size=4
        )
        found = harness.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)])
        texts = harness.generate_until(
            [Instance("generate_until", {}, ("Hello", {"until": ["\n"], "max_gen_toks": 12}), 0)]
        )
    assert [round(score, 4) for score, _ in found] == [round(score, 4) for score, _ in wanted]
    assert [bool(greedy) for _, greedy in found] == [greedy for _, greedy in wanted]
    assert texts == [Answers(model).complete("Hello", {"until": ["\n"], "max_gen_toks": 12})]
