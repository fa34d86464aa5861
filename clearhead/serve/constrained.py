"""Generate text that fits a JSON schema or a regular expression, from Python and for `clearhead generate`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from clearhead.configs import LMHeadConfig
from clearhead.generate.complete import Completion, TextGenerator

from .engine import EngineCore, EngineOptions
from .grammar import Grammar, GrammarError
from .job import JobOptions


def read_grammar(generator: TextGenerator, schema_file: str | None, regex: str | None) -> Grammar:
    """The grammar of a schema file or of an expression."""
    head, tokenizer = generator.model.config.head, generator.tokenizer
    if tokenizer is None or not isinstance(head, LMHeadConfig):
        raise GrammarError("structured output needs a language model with a tokenizer")
    if schema_file is not None and regex is not None:
        raise GrammarError("give --json-schema or --regex, not both")
    if regex is not None:
        return Grammar.from_regex(tokenizer, regex, head.vocabulary, generator.config.ends)
    assert schema_file is not None
    try:
        schema = json.loads(Path(schema_file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise GrammarError(f"cannot read the JSON schema in {schema_file}: {error}") from None
    return Grammar.from_schema(tokenizer, schema, head.vocabulary, generator.config.ends)


def constrained_generate(
    generator: TextGenerator, prompts: Sequence[str], grammar: Grammar, logprobs: bool = False
) -> list[Completion]:
    """`n` completions of each prompt within the grammar."""
    ids = [generator.encode(prompt) for prompt in prompts]
    longest = max(len(one) + generator.limit(one) for one in ids)
    core = EngineCore(generator.model, generator.tokenizer, EngineOptions(rows=generator.config.n, length=longest))
    jobs = []
    for one in ids:
        options = JobOptions(
            config=generator.config,
            limit=generator.limit(one),
            choices=generator.config.n,
            logprobs=0 if logprobs else None,
            grammar=grammar,
        )
        jobs.append(core.new_job(one, options))
        core.waiting.append(jobs[-1])
    while core.step():
        pass
    found = []
    for number, job in enumerate(jobs):
        deltas = list(job)
        for choice in range(generator.config.n):
            mine = [delta for delta in deltas if delta.choice == choice]
            scores = [score for delta in mine for score in delta.tokens]
            reason = "length" if mine[-1].reason == "length" else "end"
            found.append(
                Completion(
                    number,
                    "".join(delta.text for delta in mine),
                    [score.token for score in scores],
                    reason,  # type: ignore[arg-type]
                    [score.logprob or 0.0 for score in scores] if logprobs else None,
                )
            )
    return found
