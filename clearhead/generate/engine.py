"""The engine: continuous batching of many requests.

    core = EngineCore(TextGenerator.of(model))
    job = core.submit(ids, JobOptions(config=..., limit=50))
    while core.step():
        ...

One step writes in every text and reads at most one chunk of one prompt:

    drop cancelled requests → start the next one → decode pass → prefill chunk → choose tokens, hand over text

A request gives the same text and log-probabilities alone and among others, with and without the prefix cache, a draft
model or a preemption: prompts are read alone, in chunks that start at multiples of CHUNK; a decode pass gives each row
the same bits for any number of rows; and tokens are chosen row by row, each row with a random stream of its own.

`model.generate` runs an engine too, `offline`: all prompts are read first, in larger chunks, and a model whose rows are
not independent computes all of them in one pass. That is faster, and rounds differently in the last bits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.kernels.build import kernels
from clearhead.models.model import SequenceModel
from clearhead.nn.cache import PagedKVCache

from .choose import Chooser, score
from .job import Delta, Job, JobError, JobOptions, TokenScore
from .loop import check_numbers
from .memory import RowMemory, Saved, plan_memory
from .plan import Ticket, next_ticket, passes
from .prefix import PrefixCache
from .row import Detokenizer, Row

if TYPE_CHECKING:
    from .complete import TextGenerator

CHUNK = 64  # tokens of a prompt per pass
OFFLINE_CHUNK = 2048
PASS = 32  # tokens per decode pass; the kernels read each matrix once for so many
SNAPSHOT = 512  # tokens between two snapshots of recurrent states in the prefix cache
LENGTH = 2048  # tokens per text, if the model has no context length


class QueueFull(JobError):
    """Too many requests are waiting."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} requests are waiting already; try again later", "queue_full")


@dataclass
class Text:
    """One text being written, in the decode row of the same index."""

    job: Job
    choice: int
    row: Row
    chooser: Chooser
    token: int = 0  # sampled, not yet fed to the model


@dataclass
class Prefill:
    """The prompt that is being read."""

    job: Job
    read: int


@dataclass
class Reader:
    """A model and its memory: the model that writes, or its draft."""

    model: SequenceModel
    memory: RowMemory

    def read(self, tokens: Sequence[Sequence[int]], first: int, *, every: bool = False) -> Float[Tensor, "B T V"]:
        """Read tokens in rows first, first+1, …; the logits after the last token, or after `every` token."""
        device = self.memory.state.lengths.device
        view = self.memory.view(first, first + len(tokens))
        given = torch.tensor(tokens, device=device)
        logits = self.model(given, state=view) if every else self.model.next_logits(given, view)[:, None]
        self.memory.commit(view, first)
        return logits

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget what the first rows have read after these lengths."""
        view = self.memory.view(0, len(lengths))
        view.rewind(torch.tensor(lengths, device=view.lengths.device))
        self.memory.commit(view, 0)


@dataclass(frozen=True)
class EngineOptions:
    rows: int = 8  # texts written at once
    length: int | None = None  # tokens per text, prompt included; None: the model's context
    queue: int = 64  # requests that may wait
    memory: int | None = None  # bytes of the KV cache; None: enough for all rows
    prefix_cache: bool = True
    offline: bool = False  # nobody waits for a first token: read all prompts first, in large chunks


class EngineSettings(TypedDict, total=False):
    """The fields of `EngineOptions` that a server sets, as keyword arguments."""

    rows: int
    length: int | None
    queue: int
    memory: int | None
    prefix_cache: bool


class EngineCore:
    """The engine without a thread: `submit`, then `step` until it returns False."""

    def __init__(self, generator: TextGenerator, options: EngineOptions | None = None) -> None:
        self.generator, self.options = generator, options or EngineOptions()
        if not isinstance(generator.model, SequenceModel):
            raise ValueError("an encoder–decoder cannot be served yet; use `clearhead translate` or `generate`")
        self.model, self.tokenizer, self.draft = generator.model, generator.tokenizer, generator.draft
        context, rows = self.generator.context, self.options.rows
        length = self.options.length or context or LENGTH
        length = length if context is None else min(length, context)
        self.ahead = 0 if self.draft is None else self.draft.count  # tokens that the draft proposes
        pages, room, self.copies_limit = plan_memory(self.model, rows, length, self.options.memory)
        self.length = min(length, room)
        self.writer = Reader(self.model, RowMemory(self.model, rows, self.length, pages, self.ahead + 1))
        self.readers = [self.writer]
        if self.draft is not None:
            assert isinstance(self.draft.model, SequenceModel), "Draft.check has refused other models"
            memory = RowMemory(self.draft.model, rows, self.length, None, self.ahead + 1)
            self.readers.append(Reader(self.draft.model, memory))
        self.prefix: PrefixCache[list[Saved]] = PrefixCache(CHUNK, self.forget)
        self.copied = 0  # bytes that the prefix cache holds outside the pages
        independent = rows_are_independent(self.model, self.memory)
        self.rows_per_pass = max(1, PASS // (1 + self.ahead)) if independent else rows if self.options.offline else 1
        self.chunk = OFFLINE_CHUNK if self.options.offline else CHUNK
        self.texts: list[Text] = []
        self.waiting: list[Job] = []
        self.prefill: Prefill | None = None
        self.last_turn: dict[str, int] = {}
        self.steps = self.submitted = self.preempted = 0

    @property
    def memory(self) -> RowMemory:
        return self.writer.memory

    # ---- requests

    def new_job(self, ids: Sequence[int], options: JobOptions) -> Job:
        """Check a request and give it a number. It is not in the queue yet."""
        self.generator.check(ids)
        if options.choices > self.options.rows:
            raise JobError(f"n={options.choices} is more than the {self.options.rows} rows of this server", "n")
        if len(ids) + max(options.limit, 1) - 1 > self.length:
            raise JobError(
                f"the prompt has {len(ids):,} tokens and {options.limit:,} new ones are wanted, but this server's "
                f"context is {self.length:,} tokens",
                "context_length_exceeded",
            )
        longest = min(len(ids) + max(options.limit, 1) + self.ahead, self.length)
        if not self.memory.fits(len(ids), longest - len(ids), options.choices):
            raise JobError(
                f"n={options.choices} texts of up to {len(ids) + options.limit:,} tokens do not fit this server's "
                "memory; ask for fewer or shorter ones",
                "context_length_exceeded",
            )
        self.submitted += 1
        return Job(self.submitted, list(ids), options)

    def add(self, job: Job) -> None:
        if len(self.waiting) >= self.options.queue:
            job.finish(QueueFull(self.options.queue))
        else:
            self.waiting.append(job)

    def submit(self, ids: Sequence[int], options: JobOptions) -> Job:
        """Check a request and put it into the queue."""
        job = self.new_job(ids, options)
        self.add(job)
        return job

    @property
    def busy(self) -> bool:
        return bool(self.texts or self.waiting or self.prefill)

    # ---- one step

    @torch.inference_mode()
    def step(self) -> bool:
        """Write in every text and read one chunk of one prompt; False if there is nothing to do."""
        self.steps += 1
        self.drop_cancelled()
        if self.prefill is None:
            self.start_next()
        waits = self.options.offline and self.prefill is not None
        if self.texts and not waits and self.make_room(0, len(self.texts), 1 + self.ahead):
            self.decode()
        if self.prefill is not None:
            self.read_chunk(self.prefill)
        return self.busy

    def drop_cancelled(self) -> None:
        """Free the rows of requests whose client has left or whose time is over."""
        now = time.monotonic()
        jobs = {id(job): job for job in (*self.waiting, *self.running())}
        for job in jobs.values():
            if job.options.deadline is not None and now > job.options.deadline and not job.done:
                job.finish(JobError("the request took longer than this server's --timeout", "timeout"))
            if job.cancelled or job.done:
                self.remove(job)

    def running(self) -> list[Job]:
        """The requests that have rows, each once."""
        jobs = {id(text.job): text.job for text in self.texts}
        if self.prefill is not None:
            jobs[id(self.prefill.job)] = self.prefill.job
        return list(jobs.values())

    def remove(self, job: Job) -> None:
        """End a request."""
        self.waiting = [one for one in self.waiting if one is not job]
        self.release(job)
        job.finish()

    def release(self, job: Job) -> None:
        """Free all that a request holds."""
        if self.prefill is not None and self.prefill.job is job:
            self.prefill = None
            for reader in self.readers:
                reader.memory.clear(reader.memory.staging)
        for index in reversed(range(len(self.texts))):
            if self.texts[index].job is job:
                self.free(index)

    def free(self, index: int) -> None:
        """End the text in a row; the last active row takes its place."""
        last = len(self.texts) - 1
        for reader in self.readers:
            if index != last:
                reader.memory.copy(last, index)
            reader.memory.clear(last)
        self.texts[index] = self.texts[last]
        self.texts.pop()

    def start_next(self) -> None:
        tickets = [Ticket(job.number, job.options.user, len(job.unfinished)) for job in self.waiting]
        chosen = next_ticket(tickets, self.options.rows - len(self.texts), self.last_turn)
        if chosen is None:
            return
        job = next(one for one in self.waiting if one.number == chosen.number)
        if self.texts and not all(one.memory.has_room(len(job.ids), len(job.unfinished)) for one in self.readers):
            return
        self.waiting.remove(job)
        self.last_turn[chosen.user] = self.steps
        if len(self.last_turn) > 10_000:
            self.last_turn = {chosen.user: self.steps}
        scored = job.options.echo_logprobs
        saved = [] if scored or not self.options.prefix_cache else self.prefix.match(job.ids[:-1])
        for number, reader in enumerate(self.readers):
            reader.memory.load(reader.memory.staging, [one[number] for one in saved], CHUNK)
        job.usage.prompt, job.usage.cached = len(job.ids), len(saved) * CHUNK
        job.prompt_scores = [TokenScore(job.ids[0], None)] if scored else []
        self.prefill = Prefill(job, len(saved) * CHUNK)

    # ---- memory

    def make_room(self, first: int, last: int, count: int) -> bool:
        """Free pages until rows first … last−1 can write `count` tokens each; False if none of them is left.

        The prefix cache goes first, then the youngest request. It waits and is written again later: the same seed
        gives the same text, and what its client has already is not sent twice.
        """
        while any(reader.memory.lacks(first, last, count) for reader in self.readers):
            if self.prefix.evict():
                continue
            youngest = max(self.running(), key=lambda job: job.number)
            self.release(youngest)
            self.waiting.append(youngest)
            self.preempted += 1
            if first < self.memory.staging:
                last = len(self.texts)
            if first == last or (first == self.memory.staging and self.prefill is None):
                return False
        return True

    def forget(self, saved: list[Saved]) -> None:
        for reader, one in zip(self.readers, saved, strict=True):
            reader.memory.forget(one)
            self.copied -= one.copied

    def cache_prefix(self, job: Job, start: int, stop: int) -> None:
        """Keep the chunk that was just read in the prefix cache."""
        if not self.options.prefix_cache or job.options.echo_logprobs or stop % CHUNK:
            return
        needs_snapshot = any(reader.memory.needs_snapshot for reader in self.readers)
        resumable = not needs_snapshot or stop % SNAPSHOT == 0 or stop + CHUNK > len(job.ids) - 1
        if not self.prefix.missing(job.ids[:stop], resumable):
            return
        saved = [reader.memory.save(reader.memory.staging, start, stop, snapshot=resumable) for reader in self.readers]
        self.copied += sum(one.copied for one in saved)
        self.prefix.insert(job.ids[:stop], saved, resumable)
        while self.copied > self.copies_limit and self.prefix.evict():
            pass

    # ---- passes

    def decode(self) -> None:
        """Read the last token of every text and what the draft proposes after it, and choose the next tokens."""
        proposals = self.propose() if self.draft is not None else [[] for _ in self.texts]
        logits = []
        for first, last in passes(len(self.texts), self.rows_per_pass):
            both = zip(self.texts[first:last], proposals[first:last], strict=True)
            tokens = [[text.token, *proposal] for text, proposal in both]
            logits.append(self.writer.read(tokens, first, every=bool(self.ahead)))
        self.extend(list(enumerate(self.texts)), torch.cat(logits), proposals)

    def propose(self) -> list[list[int]]:
        """The tokens that the draft would write next in every text. It reads them all, to be as far as the model."""
        drafter, tokens = self.readers[1], [[text.token] for text in self.texts]
        proposals: list[list[int]] = [[] for _ in self.texts]
        longest = max(len(text.job.ids) + len(text.row.tokens) for text in self.texts)
        count = min(self.ahead, self.length - longest)  # no text is read beyond the context
        for place in range(count + 1):
            logits = drafter.read(tokens, 0)[:, 0]
            if place < count:
                tokens = [[text.chooser.guess(logits[i], place)] for i, text in enumerate(self.texts)]
                for proposal, (token,) in zip(proposals, tokens, strict=True):
                    proposal.append(token)
        return proposals

    def read_chunk(self, prefill: Prefill) -> None:
        """Read the next chunk of the prompt; after the last one, the request starts to write."""
        job, start = prefill.job, prefill.read
        stop = min(start + self.chunk, len(job.ids))
        staging = self.memory.staging
        if not self.make_room(staging, staging + 1, stop - start):
            return
        logits, *_ = [
            reader.read([job.ids[start:stop]], staging, every=job.options.echo_logprobs and reader is self.writer)
            for reader in self.readers
        ]
        if job.options.echo_logprobs:
            following = job.ids[start + 1 : stop + 1]
            job.prompt_scores += [score(logits[0, i], token, job.options.logprobs) for i, token in enumerate(following)]
        prefill.read = stop
        self.cache_prefix(job, start, stop)
        if stop == len(job.ids):
            self.prefill = None
            self.start_writing(job, logits[:, -1:])

    def start_writing(self, job: Job, logits: Float[Tensor, "1 1 V"]) -> None:
        started = []
        for choice in job.unfinished:
            if job.options.limit == 0:
                job.put(Delta(choice, reason="length"))
                job.unfinished = [other for other in job.unfinished if other != choice]
                continue
            for reader in self.readers:
                reader.memory.copy(reader.memory.staging, len(self.texts))
            detokenizer = None if self.tokenizer is None else Detokenizer(self.tokenizer, job.ids)
            row = Row(0, job.options.limit, detokenizer, job.options.config.stop, choice)
            self.texts.append(Text(job, choice, row, Chooser(job.options, choice, job.ids)))
            started.append((len(self.texts) - 1, self.texts[-1]))
        for reader in self.readers:
            reader.memory.clear(reader.memory.staging)
        if not job.unfinished:
            job.finish()
        if started:
            self.extend(started, logits.expand(len(started), -1, -1), [[] for _ in started])

    def extend(
        self, texts: Sequence[tuple[int, Text]], logits: Float[Tensor, "B T V"], proposals: Sequence[Sequence[int]]
    ) -> None:
        """Choose the next tokens of each text: one, and one more for each proposed token that was chosen.

        Then hand over what they complete, take back what was read in vain, and free the texts that end.
        """
        nan = logits.isnan().flatten(1).any(dim=1).tolist()
        best = logits.argmax(dim=2).tolist() if any(text.chooser.plain for _, text in texts) else None
        ended = []
        for place, (index, text) in enumerate(texts):
            if nan[place]:
                self.fail(text.job, logits[place])
                ended.append(index)
                continue
            try:
                self.choose(text, logits[place], None if best is None else best[place], proposals[place])
            except Exception as error:  # such as a grammar that grows too large: it ends this request only
                text.job.finish(JobError(f"a token could not be chosen: {error}", "server_error"))
            if text.row.reason is not None or text.job.done:
                ended.append(index)
        if self.ahead and logits.shape[1] > 1:
            lengths = [len(text.job.ids) + len(text.row.tokens) - 1 for text in self.texts]
            for reader in self.readers:
                reader.rewind(lengths)
        for index in sorted(ended, reverse=True):
            self.free(index)

    def choose(
        self, text: Text, logits: Float[Tensor, "T V"], best: Sequence[int] | None, proposal: Sequence[int]
    ) -> None:
        """Choose tokens for one text until one differs from the proposal."""
        job, row = text.job, text.row
        job.drafted[text.choice] += min(len(proposal), row.limit - len(row.tokens) - 1)
        for i in range(len(logits)):
            if text.chooser.plain:
                assert best is not None
                chosen = TokenScore(best[i], None)
            else:
                chosen = text.chooser.choose(logits[i])
            text.token = chosen.token
            self.hand_over(text, chosen, text.chooser.accept(chosen.token, text.row))
            if row.reason is not None or chosen.token not in proposal[i : i + 1]:
                return
            job.accepted[text.choice] += 1

    def fail(self, job: Job, logits: Float[Tensor, "T V"]) -> None:
        """End a request whose logits are NaN, with a sentence that names the layer."""
        try:
            check_numbers(self.model, logits)
        except ValueError as error:
            job.finish(JobError(str(error), "nan"))

    def hand_over(self, text: Text, chosen: TokenScore, piece: str) -> None:
        """Send what is new. A request that was preempted writes its text again, and only the rest is new."""
        job, reason = text.job, text.row.reason
        if len(text.row.tokens) > job.sent[text.choice]:
            job.sent[text.choice] += 1
            job.usage.completion += 1
            if job.first_token is None:
                job.first_token = time.monotonic()
            job.put(Delta(text.choice, piece, (chosen,), reason))
        if reason is not None:
            job.unfinished = [choice for choice in job.unfinished if choice != text.choice]
            if not job.unfinished:
                job.finish()


def rows_are_independent(model: SequenceModel, memory: RowMemory) -> bool:
    """Whether a decode pass gives each row the same bits for any number of rows.

    The kernels do: packed matrices, attention over pages. A dense matrix, such as the router of a mixture of experts,
    is multiplied by torch, which rounds differently for each number of rows.
    """
    if kernels() is None or not memory.state.lengths.is_cpu:
        return False
    known = all(isinstance(block.mixer, PagedKVCache) for block in memory.state.blocks)
    linear = (part for part in model.modules() if isinstance(part, nn.Linear))
    return known and model.precision is not None and all(part._parameters.get("weight") is None for part in linear)
