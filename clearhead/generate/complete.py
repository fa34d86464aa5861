"""From prompts (text or token ids) to completions: `model.generate`."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from clearhead.configs import ConfigError, DecodingConfig, LMHeadConfig, TokenEmbeddingConfig
from clearhead.configs.base import nearest
from clearhead.configs.decoding import DecodingOptions
from clearhead.models.model import EncoderDecoder, Model
from clearhead.tokenize import Tokenizer
from clearhead.tokenize.tokenizer import FILES

from .beam import beam_search
from .defaults import context_length, default_decoding
from .job import Delta, Job, JobOptions
from .loop import decode, prefill
from .row import Detokenizer, Reason, Row
from .speculate import Draft

if TYPE_CHECKING:
    from .engine import EngineCore
    from .grammar import Grammar

NEW_TOKENS = 256
BATCH = 16
Kind = TypeVar("Kind", bound="TextGenerator")


@dataclass(frozen=True)
class Completion:
    """The text generated for a prompt."""

    prompt: int  # number of the prompt
    text: str  # without the end token or stop string; empty if there is no tokenizer
    tokens: list[int]  # including the end token
    reason: Reason | None  # why it ended: "end" (an end token), "stop" (a stop string), "length" (the limit)
    logprobs: list[float] | None = None  # of each token, before any filter
    score: float | None = None  # beam search: log-probability divided by the length penalty
    drafted: int | None = None  # tokens that the draft model proposed
    accepted: int | None = None  # proposed tokens that were kept


@dataclass(frozen=True)
class TextGenerator:
    """A model, its tokenizer and its decoding options: the caller's options override those of the checkpoint."""

    model: Model
    tokenizer: Tokenizer | None
    config: DecodingConfig
    context: int | None  # the longest text that the model can read, in tokens
    draft: Draft | None = None

    @classmethod
    def of(
        cls: type[Kind],
        model: Model,
        tokenizer: Tokenizer | None = None,
        draft: Draft | None = None,
        **options: Unpack[DecodingOptions],
    ) -> Kind:
        check_generates(model)
        if draft is not None:
            draft.check(model)
        tokenizer = tokenizer or model.tokenizer
        config = merge_options(default_decoding(model, tokenizer), options)
        if draft is not None and config.beams > 1:
            raise ValueError(
                f"beam search (beams={config.beams}) cannot use a draft model; drop one of the two options"
            )
        if config.start is None and isinstance(model, EncoderDecoder):
            raise ValueError("this encoder–decoder does not say which token its targets begin with; pass start=")
        known = [context_length(one) for one in (model, *([draft.model] if draft else []))]
        return cls(model, tokenizer, config, min((one for one in known if one), default=None), draft)

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """The token ids of a prompt, which is text or token ids."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    f"the prompt is text, but the model has no tokenizer (none of {FILES}); name a folder that has one "
                    "with --tokenizer (in Python: tokenizer=), or give token ids"
                )
            ids = self.tokenizer.prompt(prompt)
        else:
            ids = [int(token) for token in prompt]
        if not ids and not isinstance(self.model, EncoderDecoder):
            if self.config.start is None:
                raise ValueError("the prompt is empty and this model has no start token; pass at least one token")
            ids = [self.config.start]
        self.check(ids)
        return ids

    def check(self, ids: Sequence[int], what: str = "prompt") -> None:
        """Raise if the model cannot read these tokens."""
        size = vocabulary_size(self.model)
        if not ids:
            raise ValueError("the source is empty; pass at least one token")
        if odd := [token for token in ids if not 0 <= token < size]:
            raise ValueError(f"token {odd[0]} is outside the vocabulary, which has ids 0 to {size - 1}")
        if self.context is not None and len(ids) > self.context:
            raise ValueError(
                f"the {what} has {len(ids):,} tokens, but the model's context is {self.context:,} tokens; shorten it"
            )

    def default_limit(self, ids: Sequence[int]) -> int:
        """How many tokens to generate after a prompt if `max_new_tokens` is not set."""
        return NEW_TOKENS

    def limit(self, ids: Sequence[int]) -> int:
        """How many tokens to generate after a prompt. The last one is predicted by a full context and never read."""
        wanted = self.config.max_new_tokens or self.default_limit(ids)
        read = 1 if isinstance(self.model, EncoderDecoder) else len(ids)
        return wanted if self.context is None else min(wanted, self.context - read + 1)

    @property
    def uses_engine(self) -> bool:
        """Whether the engine writes the texts: those of language models, without beams."""
        return not isinstance(self.model, EncoderDecoder) and self.config.beams == 1

    def row(self, number: int, ids: Sequence[int], sample: int = 0) -> Row:
        """A new text that continues prompt `number`."""
        before = () if isinstance(self.model, EncoderDecoder) else ids
        detokenizer = None if self.tokenizer is None else Detokenizer(self.tokenizer, before)
        return Row(number, self.limit(ids), detokenizer, self.config.stop, sample)


def generate(
    model: Model,
    prompts: str | Sequence[Any],
    *,
    tokenizer: Tokenizer | None = None,
    draft: Draft | None = None,
    logprobs: bool = False,
    batch: int = BATCH,
    grammar: Grammar | None = None,
    **options: Unpack[DecodingOptions],
) -> list[Completion]:
    """Generate completions for each prompt: `n` for the first prompt, then `n` for the second, and so on.

    prompts    a text, a list of texts, token ids, or a list of token ids; the sources of an encoder–decoder
    tokenizer  needed only if the model was not loaded from a folder with a tokenizer
    draft      a smaller model that proposes tokens; the output has the same distribution as without it
    logprobs   also return the log-probability of every token
    batch      prompts that are continued at once; does not change the text
    grammar    a JSON schema or regular expression that the text must fit
    options    the fields of `configs.DecodingConfig`: temperature, top_k, beams, n, seed, stop, …
    """
    if batch < 1:
        raise ValueError(f"batch is {batch}, but must be at least 1")
    generator = TextGenerator.of(model, tokenizer, draft, **options)
    ids = [generator.encode(prompt) for prompt in as_list(prompts)]
    if generator.uses_engine:
        return complete_all(generator, ids, logprobs=logprobs, batch=batch, grammar=grammar)
    if grammar is not None:
        raise ValueError(
            f"structured output works with language models, and without beams (beams={generator.config.beams}); "
            "drop one of the two options"
        )
    found: list[Completion] = []
    for first in range(0, len(ids), batch):
        found += complete_batch(generator, list(enumerate(ids[first : first + batch], first)), logprobs)
    return found


def stream(
    model: Model,
    prompt: str | Sequence[int],
    *,
    tokenizer: Tokenizer | None = None,
    draft: Draft | None = None,
    **options: Unpack[DecodingOptions],
) -> Iterator[str]:
    """Yield the completion of one prompt piece by piece, as soon as each piece is final. Options as in `generate`."""
    generator = TextGenerator.of(model, tokenizer, draft, **options)
    if generator.config.beams > 1 or generator.config.n > 1:
        raise ValueError("stream writes one text; beams and n > 1 produce several, use generate for those")
    return iter(TextStream(generator, generator.encode(prompt)))


@dataclass
class TextStream:
    """The completion of one prompt: iterate over its pieces. The counts of the draft's tokens follow the text."""

    generator: TextGenerator
    ids: Sequence[int]
    drafted: int = 0
    accepted: int = 0

    def __iter__(self) -> Iterator[str]:
        generator, ids = self.generator, self.ids
        if not generator.uses_engine:
            pieces = decode_rows(generator, [ids], [generator.row(0, ids)], False)
            yield from (piece for _, piece in pieces if piece)
            return
        core = start_engine(generator, [ids], 1)
        job = core.submit(ids, JobOptions(config=generator.config, limit=generator.limit(ids)))
        while core.step():
            yield from (delta.text for delta in job.take() if delta.text)
        (self.drafted,), (self.accepted,) = job.drafted, job.accepted
        yield from (delta.text for delta in job if delta.text)


def start_engine(generator: TextGenerator, prompts: Sequence[Sequence[int]], rows: int) -> EngineCore:
    """An engine for these prompts, `rows` texts at a time."""
    from .engine import EngineCore, EngineOptions

    length = max((len(ids) + generator.limit(ids) for ids in prompts), default=1)
    options = EngineOptions(rows=rows, length=length, queue=len(prompts), prefix_cache=False, offline=True)
    return EngineCore(generator, options)


def complete_all(
    generator: TextGenerator, prompts: Sequence[list[int]], *, logprobs: bool, batch: int, grammar: Grammar | None
) -> list[Completion]:
    """`n` completions of each prompt, by the same engine that `clearhead serve` runs."""
    choices = generator.config.n
    core = start_engine(generator, prompts, choices * min(batch, len(prompts)))
    jobs = [
        core.submit(
            ids,
            JobOptions(
                config=generator.config,
                limit=generator.limit(ids),
                choices=choices,
                logprobs=0 if logprobs else None,
                grammar=grammar,
            ),
        )
        for ids in prompts
    ]
    while core.step():
        pass
    return [one for number, job in enumerate(jobs) for one in completions_of(number, job, generator.draft is not None)]


def completions_of(prompt: int, job: Job, drafted: bool) -> Iterator[Completion]:
    """The texts of a finished request."""
    deltas: list[list[Delta]] = [[] for _ in range(job.options.choices)]
    for delta in job:
        deltas[delta.choice].append(delta)
    for choice, mine in enumerate(deltas):
        scores = [score for delta in mine for score in delta.tokens]
        yield Completion(
            prompt,
            "".join(delta.text for delta in mine),
            [score.token for score in scores],
            mine[-1].reason,
            None if job.options.logprobs is None else [score.logprob or 0.0 for score in scores],
            drafted=job.drafted[choice] if drafted else None,
            accepted=job.accepted[choice] if drafted else None,
        )


def decode_rows(
    generator: TextGenerator, prompts: Sequence[Sequence[int]], rows: Sequence[Row], logprobs: bool
) -> Iterator[tuple[Row, str]]:
    """Write all rows, `n` per prompt. Yields each row that got a token, with the text that this token completed."""
    config = generator.config
    batch = prefill(generator.model, prompts, max(row.limit for row in rows), start=config.start)
    if config.n > 1:
        batch.select([prompt for prompt in range(len(prompts)) for _ in range(config.n)])
    yield from decode(generator.model, batch, rows, config, logprobs=logprobs)


def complete_batch(
    generator: TextGenerator, prompts: Sequence[tuple[int, list[int]]], logprobs: bool = False
) -> list[Completion]:
    """Complete numbered prompts in one batch. A forced end token is reported as "length"."""
    complete = search_batch if generator.config.beams > 1 else decode_batch
    found = complete(generator, prompts, logprobs)
    if generator.config.forced_end is None:
        return found
    limits = {number: generator.limit(ids) for number, ids in prompts}
    return [replace(one, reason="length") if len(one.tokens) == limits[one.prompt] else one for one in found]


def decode_batch(
    generator: TextGenerator, prompts: Sequence[tuple[int, list[int]]], logprobs: bool
) -> list[Completion]:
    """Greedy or sampled completions."""
    rows = [generator.row(number, ids, sample) for number, ids in prompts for sample in range(generator.config.n)]
    for _ in decode_rows(generator, [ids for _, ids in prompts], rows, logprobs):
        pass
    return [
        Completion(row.prompt, row.text, row.tokens, row.reason, row.logprobs if logprobs else None) for row in rows
    ]


def search_batch(
    generator: TextGenerator, prompts: Sequence[tuple[int, list[int]]], logprobs: bool
) -> list[Completion]:
    """The best texts of a beam search."""
    config, limits = generator.config, [generator.limit(ids) for _, ids in prompts]
    batch = prefill(generator.model, [ids for _, ids in prompts], max(limits), start=config.start)
    searches = beam_search(generator.model, batch, limits, config)
    found = []
    for (number, ids), search in zip(prompts, searches, strict=True):
        for score, tokens, scores in search.best()[: config.n]:
            row = generator.row(number, ids)
            for token in tokens:
                row.append(token, None, config.ends)
            found.append(Completion(number, row.text, tokens, row.reason, scores if logprobs else None, score))
    return found


def merge_options(checkpoint: DecodingConfig, options: Mapping[str, Any]) -> DecodingConfig:
    """The caller's options over the checkpoint's. An option that asks for sampling also turns off its beams."""
    names = {f.name for f in fields(DecodingConfig)}
    if unknown := [name for name in options if name not in names]:
        raise ConfigError(f"generate has no option {unknown[0]!r}{nearest(unknown[0], names)}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if isinstance(given.get("stop"), str):
        given["stop"] = (given["stop"],)
    if given.keys() & {"temperature", "top_k", "top_p", "min_p"}:
        given = {"beams": 1} | given
    if given.get("beams", 1) > 1 or given.get("temperature") == 0:
        given = {"temperature": None, "top_k": None, "top_p": None, "min_p": None} | given
    config = replace(checkpoint, **given)
    return replace(config, seed=secrets.randbits(32)) if config.seed is None else config


def as_list(prompts: Any) -> list[Any]:
    """A list of prompts from one prompt or several."""
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    return [prompts] if isinstance(prompts, str) or not prompts or isinstance(prompts[0], int) else list(prompts)


def vocabulary_size(model: Model) -> int:
    """The number of token ids that a prompt may use."""
    embedding = model.config.source if isinstance(model, EncoderDecoder) else model.config.embedding
    if not isinstance(embedding, TokenEmbeddingConfig):
        raise ValueError("this model reads sound, not text; use `clearhead transcribe`")
    return embedding.vocabulary


def check_generates(model: Model) -> None:
    """Raise if the model does not predict the next token. (A mask that reads later tokens is refused by the state.)"""
    head = model.config.head
    if isinstance(head, LMHeadConfig):
        return
    kind = "no head" if head is None else f"a {head.kind()} head"
    raise ValueError(
        f"this model has {kind} and cannot generate text; use `clearhead embed`, `fill-mask` or `classify` instead"
    )
