"""From prompts, texts or token ids, to what the model writes: `model.generate`."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, Unpack

from clearhead.configs import ConfigError, DecodingConfig, LMHeadConfig, TokenEmbeddingConfig
from clearhead.configs.base import nearest
from clearhead.configs.decoding import DecodingOptions
from clearhead.models.model import EncoderDecoder, Model
from clearhead.tokenize import Tokenizer
from clearhead.tokenize.gguf import from_gguf

from .beam import beam_search
from .defaults import context_length, defaults
from .loop import begin, write
from .row import Pieces, Reason, Row
from .speculate import Draft, speculate

NEW_TOKENS = 256
BATCH = 16
Kind = TypeVar("Kind", bound="Task")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "source.spm")


@dataclass(frozen=True)
class Completion:
    """What was written for a prompt."""

    prompt: int  # the number of the prompt
    text: str  # without what ended it; empty where there is no tokenizer
    tokens: list[int]  # with the token that ended it
    reason: Reason | None  # "end": an end token, "stop": a stop text, "length": no room for more
    logprobs: list[float] | None = None  # what the model gave each token, before any filter
    score: float | None = None  # of a beam: its log-probability over the length penalty
    drafted: int | None = None  # with a draft: the tokens that it proposed, and how many of them were kept
    accepted: int | None = None


@dataclass(frozen=True)
class Task:
    """A model, its tokenizer, and how it is to write: what the caller asked for, over what the checkpoint asks for."""

    model: Model
    tokenizer: Tokenizer | None
    config: DecodingConfig
    context: int | None  # tokens that it reads at most
    draft: Draft | None = None

    @classmethod
    def of(
        cls: type[Kind], model: Model, tokenizer: Tokenizer | None = None, draft: Draft | None = None, **options: Any
    ) -> Kind:
        check_writes(model)
        if draft is not None:
            draft.check(model)
        tokenizer = tokenizer or own_tokenizer(model)
        config = decoding(defaults(model, tokenizer), options)
        if draft is not None and config.beams > 1:
            raise ValueError("beams look at several texts at once, so no draft can go ahead; leave one out")
        if config.start is None and isinstance(model, EncoderDecoder):
            raise ValueError("nothing says which token a target of this encoder–decoder begins with; give start=")
        known = [context_length(one) for one in (model, *([draft.model] if draft else []))]
        return cls(model, tokenizer, config, min((one for one in known if one), default=None), draft)

    def ids(self, prompt: str | Sequence[int]) -> list[int]:
        """The tokens of a prompt, whether it is text or tokens already."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    "the prompt is text, but the model came with no tokenizer; give token ids, or tokenizer="
                )
            ids = self.tokenizer.prompt(prompt)
        else:
            ids = [int(token) for token in prompt]
        if not ids and not isinstance(self.model, EncoderDecoder):
            if self.config.start is None:
                raise ValueError(
                    "the prompt is empty, and this model has no start token; give it something to go on from"
                )
            ids = [self.config.start]
        self.check(ids)
        return ids

    def check(self, ids: Sequence[int], what: str = "prompt") -> None:
        size = vocabulary(self.model)
        if not ids:
            raise ValueError("the source is empty: there is nothing to write about")
        if odd := [token for token in ids if not 0 <= token < size]:
            raise ValueError(f"token {odd[0]} is outside the vocabulary, which has ids 0 to {size - 1}")
        if self.context is not None and len(ids) > self.context - (not isinstance(self.model, EncoderDecoder)):
            raise ValueError(
                f"the {what} has {len(ids)} tokens, but the model reads at most {self.context}, what it writes "
                "included; begin with fewer"
            )

    def usual(self, ids: Sequence[int]) -> int:
        """How many tokens may be written after a prompt, where nobody says."""
        return NEW_TOKENS

    def limit(self, ids: Sequence[int]) -> int:
        """How many tokens may be written after a prompt."""
        wanted = self.config.max_new_tokens or self.usual(ids)
        read = 1 if isinstance(self.model, EncoderDecoder) else len(ids)
        return wanted if self.context is None else min(wanted, self.context - read)

    def row(self, number: int, ids: Sequence[int], sample: int = 0) -> Row:
        before = () if isinstance(self.model, EncoderDecoder) else ids
        pieces = None if self.tokenizer is None else Pieces(self.tokenizer, before)
        return Row(number, self.limit(ids), pieces, self.config.stop, sample)


def generate(
    model: Model,
    prompts: str | Sequence[Any],
    *,
    tokenizer: Tokenizer | None = None,
    draft: Draft | None = None,
    logprobs: bool = False,
    batch: int = BATCH,
    **options: Unpack[DecodingOptions],
) -> list[Completion]:
    """What the model writes for each prompt: `n` completions of the first, then of the second, and so on.

    prompts    a text, a list of texts, token ids, or a list of token ids; for an encoder–decoder they are the sources
    tokenizer  where the model was not loaded from a folder that holds one
    draft      a smaller model that writes ahead; what is written is the same, or of the same distribution
    logprobs   keep what the model gave each token
    batch      prompts that are worked on together; the text does not depend on it
    options    the fields of `configs.DecodingConfig`: temperature, top_k, beams, n, seed, stop, …
    """
    if batch < 1:
        raise ValueError(f"batch is {batch}, but must be at least 1")
    task = Task.of(model, tokenizer, draft, **options)
    ids = [task.ids(prompt) for prompt in listed(prompts)]
    found: list[Completion] = []
    for first in range(0, len(ids), batch):
        found += made(task, list(enumerate(ids[first : first + batch], first)), logprobs)
    return found


def stream(
    model: Model,
    prompt: str | Sequence[int],
    *,
    tokenizer: Tokenizer | None = None,
    draft: Draft | None = None,
    **options: Unpack[DecodingOptions],
) -> Iterator[str]:
    """The text of one prompt's completion, piece by piece, each as soon as it is certain; options as of `generate`."""
    task = Task.of(model, tokenizer, draft, **options)
    if task.config.beams > 1 or task.config.n > 1:
        raise ValueError("a stream is one text under way; beams and n > 1 have none before the end")
    ids = task.ids(prompt)
    return pieces(task, ids, task.row(0, ids))


def pieces(task: Task, ids: Sequence[int], row: Row) -> Iterator[str]:
    """The text that one prompt's row is made of."""
    return (piece for _, piece in events(task, [ids], [row], False) if piece)


def events(
    task: Task, prompts: Sequence[Sequence[int]], rows: Sequence[Row], logprobs: bool
) -> Iterator[tuple[Row, str]]:
    """Write all rows, `n` to a prompt: each row that wrote a token, with the text that this made certain."""
    if task.draft is not None:
        for number, row in enumerate(rows):
            ids = prompts[number // task.config.n]
            yield from speculate(task.model, task.draft, ids, row, task.config, logprobs=logprobs)
        return
    begun = begin(task.model, prompts, max(row.limit for row in rows), start=task.config.start)
    if task.config.n > 1:
        begun.select([prompt for prompt in range(len(prompts)) for _ in range(task.config.n)])
    yield from write(task.model, begun, rows, task.config, logprobs=logprobs)


def made(task: Task, prompts: Sequence[tuple[int, list[int]]], logprobs: bool = False) -> list[Completion]:
    """What is written for numbered prompts that are worked on together. An end that was forced is none."""
    found = searched(task, prompts, logprobs) if task.config.beams > 1 else written(task, prompts, logprobs)
    if task.config.forced_end is None:
        return found
    limits = {number: task.limit(ids) for number, ids in prompts}
    return [replace(one, reason="length") if len(one.tokens) == limits[one.prompt] else one for one in found]


def written(task: Task, prompts: Sequence[tuple[int, list[int]]], logprobs: bool) -> list[Completion]:
    """One token after another: greedy, or drawn."""
    rows = [task.row(number, ids, sample) for number, ids in prompts for sample in range(task.config.n)]
    for _ in events(task, [ids for _, ids in prompts], rows, logprobs):
        pass
    found = [
        Completion(row.prompt, row.text, row.tokens, row.reason, row.logprobs if logprobs else None) for row in rows
    ]
    if task.draft is None:
        return found
    return [replace(one, drafted=row.drafted, accepted=row.accepted) for one, row in zip(found, rows, strict=True)]


def searched(task: Task, prompts: Sequence[tuple[int, list[int]]], logprobs: bool) -> list[Completion]:
    """The best of the beams."""
    limits = [task.limit(ids) for _, ids in prompts]
    begun = begin(task.model, [ids for _, ids in prompts], max(limits), start=task.config.start)
    searches = beam_search(task.model, begun, limits, task.config)
    found = []
    for (number, ids), search in zip(prompts, searches, strict=True):
        for score, tokens, said in search.best()[: task.config.n]:
            row = task.row(number, ids)
            for token in tokens:
                row.take(token, None, task.config.ends)
            found.append(Completion(number, row.text, tokens, row.reason, said if logprobs else None, score))
    return found


def decoding(asked: DecodingConfig, options: dict[str, Any]) -> DecodingConfig:
    """The caller's wishes over the checkpoint's. Who asks for drawing is not held to the checkpoint's beams."""
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
    config = replace(asked, **given)
    return replace(config, seed=secrets.randbits(32)) if config.seed is None else config


def listed(prompts: Any) -> list[Any]:
    """A list of prompts, however they were given."""
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    return [prompts] if isinstance(prompts, str) or not prompts or isinstance(prompts[0], int) else list(prompts)


def vocabulary(model: Model) -> int:
    """How many tokens the prompt may be made of."""
    embedding = model.config.source if isinstance(model, EncoderDecoder) else model.config.embedding
    assert isinstance(embedding, TokenEmbeddingConfig), "who writes reads tokens"
    return embedding.vocabulary


def own_tokenizer(model: Model) -> Tokenizer | None:
    """The one that lies where the model was loaded from, if there is one."""
    if model.origin is None:
        return None
    files = [model.origin] if model.origin.is_file() else [model.origin / name for name in TOKENIZERS]
    found = next((file for file in files if file.exists()), None)
    return None if found is None else read_tokenizer(model.origin, found.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def read_tokenizer(origin: Path, changed: int) -> Tokenizer | None:
    """Read once, and again when its file has changed."""
    return from_gguf(origin) if origin.is_file() else Tokenizer.load(origin)


def check_writes(model: Model) -> None:
    """A model writes if it gives the next token of what comes before."""
    config = model.config
    if isinstance(config.head, LMHeadConfig):
        return  # a mask that reads later tokens is refused where the state is made
    head = "no head" if config.head is None else f"the head {config.head.kind()}"
    uses = "`clearhead embed`, `fill-mask` or `classify`"
    raise ValueError(f"this model has {head} and reads whole texts or images, so it cannot write; see {uses}")
