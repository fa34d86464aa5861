"""A model for the Language Model Evaluation Harness (`lm_eval`), scored by the code of `clearhead eval`.

import lm_eval
from clearhead.extras import install_command
from clearhead.measure.lm_eval import adapter

lm_eval.simple_evaluate(model=adapter(clearhead.load("path/to/model")), tasks=["lambada_openai"])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clearhead.extras import install_command
from clearhead.generate.complete import TextGenerator, generate
from clearhead.models.model import Model, SequenceModel
from clearhead.tokenize import Tokenizer

from .perplexity import WINDOW, logprobs, perplexity, windows


class Answers:
    """The three questions that the harness asks of a language model."""

    def __init__(self, model: Model, tokenizer: Tokenizer | None = None) -> None:
        task = TextGenerator.of(model, tokenizer)
        if not isinstance(task.model, SequenceModel) or task.tokenizer is None:
            raise ValueError("the harness needs a language model with a tokenizer")
        self.model, self.tokenizer = task.model, task.tokenizer
        self.start = [] if task.config.start is None else [task.config.start]
        self.context = task.context or WINDOW

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """log p of each continuation after its context, and whether greedy decoding would generate it.

        A continuation longer than the context is scored in windows. A token with nothing before it is not scored.
        """
        return [self.score_continuation(*request.args) for request in requests]

    def score_continuation(self, before: str, after: str) -> tuple[float, bool]:
        # spaces between the two belong to the continuation, as its tokens do
        cut = len(before.rstrip())
        before, after = before[:cut], before[cut:] + after
        prefix = self.tokenizer.prompt(before)
        ids = self.tokenizer.prompt(before + after)[len(prefix) :] if before else self.tokenizer.encode(after)
        prefix = prefix or self.start
        # cut the context, down to its last token, to make room for the continuation
        prefix = prefix[max(0, min(len(prefix) - 1, len(prefix) + len(ids) - self.context - 1)) :]
        tokens, total, all_greedy = [*prefix, *ids], 0.0, True
        for begin, end, counted in windows(len(tokens), self.context, self.context):
            first = max(counted, len(prefix))
            logp, greedy = logprobs(self.model, tokens[begin:first], tokens[first:end])
            total, all_greedy = total + float(logp.double().sum()), all_greedy and greedy
        return total, all_greedy

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """log p of each whole text; every token is scored once, in consecutive windows."""
        return [self.score_text(request.args[0]) for request in requests]

    def score_text(self, text: str) -> float:
        ids = [*self.start, *self.tokenizer.encode(text)]
        return -perplexity(self.model, ids, len(text.encode()), context=self.context, stride=self.context).nats

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """A completion of each context, up to one of its stop texts."""
        return [self.complete(*request.args) for request in requests]

    def complete(self, before: str, options: dict[str, Any]) -> str:
        stop = options.get("until") or ()
        given: dict[str, Any] = {"stop": (stop,) if isinstance(stop, str) else tuple(stop)}
        given |= {"temperature": options.get("temperature", 0.0) if options.get("do_sample") else 0.0}
        given |= {name: options[name] for name in ("top_k", "top_p") if options.get("do_sample") and name in options}
        given |= {"max_new_tokens": options.get("max_gen_toks", 256)}
        room = max(self.context - given["max_new_tokens"], self.context // 2)  # the prompt keeps at least half
        ids = (self.tokenizer.prompt(before) or self.start)[-room:]
        return generate(self.model, ids, tokenizer=self.tokenizer, seed=0, **given)[0].text


def adapter(model: Model, tokenizer: Tokenizer | None = None) -> Any:
    """An `lm_eval.api.model.LM` that wraps the model."""
    try:
        from lm_eval.api.model import LM
    except ImportError:
        raise ValueError(f"the harness is not installed: {install_command('lm-eval')}") from None

    return type("ClearheadLM", (Answers, LM), {"__init__": init_adapter})(model, tokenizer)


def init_adapter(self: Any, model: Model, tokenizer: Tokenizer | None) -> None:
    super(Answers, self).__init__()
    Answers.__init__(self, model, tokenizer)
