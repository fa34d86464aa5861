"""The engine: the same answer alone and in company, no leaks, fair scheduling."""

from __future__ import annotations

import asyncio
import contextlib
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import clearhead
from clearhead.configs import precision
from clearhead.generate.complete import TextGenerator
from clearhead.generate.engine import CHUNK, EngineCore, EngineOptions, QueueFull
from clearhead.generate.job import JobError, JobOptions
from clearhead.generate.plan import Ticket, next_ticket, passes
from clearhead.generate.speculate import Draft
from clearhead.kernels.build import kernels
from clearhead.models.quantize import quantize
from clearhead.serve import Engine

from .tools import small_model

PRESETS = ("tiny-gpt", "tiny-llama", "tiny-mistral", "tiny-mixtral", "tiny-deepseek", "tiny-mamba", "tiny-lstm")


def disturbed(preset: str, weights: str | None):
    torch.manual_seed(0)
    model = clearhead.build(clearhead.preset(preset)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model if weights is None else quantize(model, precision(weights))


def run_all(core: EngineCore, prompts, limit: int = 8, choices: int = 1, **options) -> list:
    config = TextGenerator.of(core.model, None, **options).config
    wanted = JobOptions(config=config, limit=limit, logprobs=2, choices=choices)
    jobs = [core.submit(ids, wanted) for ids in prompts]
    while core.step():
        check_pages(core)
    return jobs


def answers(model, prompts, rows: int, cache: bool, limit: int = 8, length: int = 256, draft=None, **options):
    core = EngineCore(TextGenerator.of(model, None, draft), EngineOptions(rows=rows, length=length, prefix_cache=cache))
    jobs = run_all(core, prompts, limit, **options)
    return [scores_of(job) for job in jobs], jobs


def scores_of(job) -> list:
    return [(delta.choice, score.token, score.logprob, score.top) for delta in job for score in delta.tokens]


def check_pages(core: EngineCore) -> None:
    """Every page is free, or used as often as rows and the prefix cache refer to it; idle rows have none."""
    nodes = list(core.prefix.order)
    for number, reader in enumerate(core.readers):
        memory = reader.memory
        active = [*range(len(core.texts)), *([memory.staging] if core.prefill is not None else [])]
        idle = [row for row in range(memory.rows + 1) if row not in active]
        assert (memory.state.lengths[idle] == 0).all()
        for i, pool in enumerate(memory.pools):
            assert (pool.table[idle] == -1).all()
            held = [page for node in nodes for page in node.value[number].pages[i]]
            in_rows = pool.table[pool.table >= 0]
            users = torch.bincount(torch.cat((in_rows, torch.tensor(held, dtype=torch.long))), minlength=pool.count)
            assert users.equal(pool.users)
            assert sorted(pool.free) == (users == 0).nonzero()[:, 0].tolist()
            for row in active:  # no page beyond what a row has read, but those that a draft was ahead
                assert int((pool.table[row] >= 0).sum()) <= -(-(int(memory.state.lengths[row]) + core.ahead) // 32) + 1


def random_prompts(*lengths: int) -> list[list[int]]:
    torch.manual_seed(1)
    return [torch.randint(0, 100, (length,)).tolist() for length in lengths]


WEIGHTS = ("float32", "bfloat16", "float16", "int8", "int4")
needs_kernels = pytest.mark.skipif(kernels() is None, reason="pages and exact drafts need the compiled kernels")
SAMPLING = ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9, "seed": 3})


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_answer_is_bit_identical_alone_and_in_company(weights: str, sampling: dict) -> None:
    """Text and log-probabilities, with the prefix cache on and off, with 1 and 2 threads."""
    model, prompts = disturbed("tiny-llama", weights), random_prompts(3, 150, 30, 70, 2, 150, 65, 64)
    before = torch.get_num_threads()
    alone = [answers(model, [prompt], 1, False, **sampling)[0][0] for prompt in prompts]
    try:
        for threads in (1, 2) if kernels() is not None else (before,):  # torch rounds by the number of threads
            torch.set_num_threads(threads)
            together, _ = answers(model, prompts, 8, False, **sampling)
            assert together == alone
    finally:
        torch.set_num_threads(before)
    cached, jobs = answers(model, prompts * 2, 3, True, **sampling)
    assert cached == alone * 2
    assert jobs[9].usage.cached == 2 * CHUNK


@pytest.mark.parametrize("weights", [None, "float16", "int4"])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_mixer_is_bit_identical_in_company(preset: str, weights: str | None) -> None:
    """Eight at once, each prompt twice, against one by one without the prefix cache."""
    model, prompts = disturbed(preset, weights), random_prompts(3, 17, 30, 5, 31, 2, 9, 30)
    sampling = {"temperature": 1.0, "seed": 4}
    together, _ = answers(model, prompts * 2, 8, True, length=48, **sampling)
    alone = [answers(model, [prompt], 1, False, length=48, **sampling)[0][0] for prompt in prompts]
    assert together == alone * 2


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-mistral", "tiny-mamba", "tiny-lstm", "tiny-deepseek"])
def test_cached_prefix_changes_nothing(preset: str) -> None:
    """Attention shares pages; windows, recurrent and latent states are restored from snapshots and copies."""
    model, (start,) = disturbed(preset, "float32"), random_prompts(600)
    prompts = [start[:200], [*start[:200], 7, 8], start, [*start[:130], 9], [*start, 5]]
    cached, jobs = answers(model, prompts, 1, True, length=700, temperature=0.0)
    plain, _ = answers(model, prompts, 1, False, length=700, temperature=0.0)
    assert cached == plain
    assert [job.usage.cached for job in jobs[:2]] == [0, 3 * CHUNK]
    assert jobs[4].usage.cached == 9 * CHUNK


@needs_kernels
@pytest.mark.parametrize("sampling", SAMPLING)
def test_preempted_requests_write_the_same_text(sampling: dict) -> None:
    """A pool for one and a half texts: the youngest request waits and is written again."""
    model, prompts = disturbed("tiny-llama", "float16"), random_prompts(40, 60, 3, 70)
    wanted = [answers(model, [prompt], 1, False, limit=90, **sampling)[0][0] for prompt in prompts]
    page = 2 * 2 * 32 * 8 * 2 * 2  # layers, key and value, slots, head width, heads, bytes
    core = EngineCore(TextGenerator.of(model, None), EngineOptions(rows=4, length=160, memory=8 * page))
    assert core.memory.pools[0].count == 8
    jobs = run_all(core, prompts, 90, **sampling)
    assert core.preempted > 0
    assert [scores_of(job) for job in jobs] == wanted
    assert [job.usage.completion for job in jobs] == [len(one) for one in wanted]


@needs_kernels
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_draft_changes_the_speed_and_not_the_answer(weights: str, sampling: dict) -> None:
    model, other = disturbed("tiny-llama", weights), disturbed("tiny-llama", "int4")
    prompts = random_prompts(3, 150, 30, 70)
    plain, _ = answers(model, prompts * 2, 4, False, limit=20, **sampling)
    for draft in (Draft(other, 3), Draft(model, 4)):
        core = EngineCore(TextGenerator.of(model, None, draft), EngineOptions(rows=4, length=256))
        jobs = run_all(core, prompts * 2, 20, **sampling)
        assert [scores_of(job) for job in jobs] == plain
        if draft.model is model:
            assert core.steps < 2 * (20 / 4 + 5) + 8


def test_logprobs_are_those_of_the_model() -> None:
    model, (prompt,) = disturbed("tiny-llama", None), random_prompts(70)
    (((_, *first), *_),), _ = answers(model, [prompt], 2, False, temperature=0.0)
    with torch.no_grad():
        own = model(torch.tensor([prompt]))[0, -1].log_softmax(0)
    assert first[0] == int(own.argmax())
    assert first[1] == pytest.approx(float(own.max()), abs=1e-4)


def test_prompt_scores_are_those_of_the_model() -> None:
    model, (prompt,) = disturbed("tiny-llama", None), random_prompts(70)
    core = EngineCore(TextGenerator.of(model, None), EngineOptions(rows=2))
    config = TextGenerator.of(model, None).config
    job = core.new_job(prompt, JobOptions(config=config, limit=0, logprobs=1, echo_logprobs=True))
    core.add(job)
    while core.step():
        pass
    with torch.no_grad():
        own = model(torch.tensor([prompt]))[0].log_softmax(1)
    wanted = [float(own[i, token]) for i, token in enumerate(prompt[1:])]
    assert [score.token for score in job.prompt_scores] == prompt
    assert [score.logprob for score in job.prompt_scores[1:]] == pytest.approx(wanted, abs=1e-3)
    assert [delta.reason for delta in job] == ["length"]


def test_engine_from_python_streams_and_cancels() -> None:
    with Engine(small_model(), rows=2) as engine:
        text = "".join(delta.text for delta in engine.submit([1, 2, 3], max_new_tokens=20, temperature=0))
        assert text == engine.core.model.generate([[1, 2, 3]], max_new_tokens=20, temperature=0)[0].text

        async def read_some() -> int:
            job, count = engine.submit([1, 2], max_new_tokens=40, temperature=0, logprobs=0), 0
            async for _ in job:
                count += 1
                if count == 3:
                    job.cancel()
            return count

        assert asyncio.run(read_some()) < 40
        while not engine.idle:
            pass
        assert engine.core.memory.state.lengths[:-1].sum() == 0


def test_failing_pass_ends_its_requests_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(small_model(), rows=2) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine.core, "decode", lambda: 1 / 0)
            with pytest.raises(JobError, match="a forward pass failed: division by zero"):
                list(engine.submit([1, 2], max_new_tokens=9, temperature=0))
        assert list(engine.submit([1, 2], max_new_tokens=9, logprobs=0))


def test_nan_logits_are_one_sentence() -> None:
    model = small_model(weights=None)
    with torch.no_grad():
        next(model.stack.parameters()).fill_(torch.nan)
    with Engine(model, rows=2) as engine, pytest.raises(JobError, match="layer 0's weights contain NaN"):
        list(engine.submit([1, 2], max_new_tokens=9))


# ---- the scheduler

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
TICKETS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4)), max_size=12)


@SLOW
@given(TICKETS)
def test_every_request_starts_and_none_is_overtaken_for_ever(wanted: list[tuple[str, int]]) -> None:
    waiting = [Ticket(number, user, rows) for number, (user, rows) in enumerate(wanted)]
    turns: dict[str, int] = {}
    for turn in range(len(wanted)):
        chosen = next_ticket(waiting, 4, turns)
        assert chosen is not None
        assert not [one for one in waiting if one.user == chosen.user and one.number < chosen.number]
        oldest = min(turns.get(one.user, -1) for one in waiting)
        assert turns.get(chosen.user, -1) == oldest
        turns[chosen.user] = turn
        waiting.remove(chosen)
    assert not waiting


@SLOW
@given(TICKETS, st.integers(0, 4))
def test_rows_are_never_overcommitted(wanted: list[tuple[str, int]], free: int) -> None:
    chosen = next_ticket([Ticket(i, user, rows) for i, (user, rows) in enumerate(wanted)], free, {})
    assert chosen is None or chosen.rows <= free


@SLOW
@given(st.integers(0, 200), st.integers(1, 40))
def test_passes_cover_every_row_once(active: int, largest: int) -> None:
    slices = passes(active, largest)
    assert [row for first, last in slices for row in range(first, last)] == list(range(active))
    assert all(last - first <= largest for first, last in slices)


# ---- a machine that submits, steps, cancels and evicts in any order


class EngineMachine(RuleBasedStateMachine):
    """Whatever happens, every page is accounted for, and finished answers are those of the request alone."""

    model = small_model()
    draft = Draft(small_model(seed=1), 2)
    alone: ClassVar[dict] = {}  # what each request gives alone

    @initialize(drafted=st.booleans(), pages=st.sampled_from([10, 30]))
    def start(self, drafted: bool, pages: int) -> None:
        page = 2 * 2 * 32 * 8 * 2 * 4
        options = EngineOptions(rows=3, length=200, queue=4, memory=pages * page)
        self.core = EngineCore(TextGenerator.of(self.model, None, self.draft if drafted else None), options)
        self.jobs: list = []

    @rule(start=st.integers(0, 2), length=st.integers(1, 150), limit=st.integers(1, 40), choices=st.integers(1, 3))
    def submit(self, start: int, length: int, limit: int, choices: int) -> None:
        ids = [(start * 7 + i) % 50 for i in range(length)]
        config = TextGenerator.of(self.model, None, temperature=1.0, seed=start).config
        wanted = JobOptions(config=config, limit=limit, choices=choices, logprobs=0)
        with contextlib.suppress(JobError):  # it does not fit the pool
            self.jobs.append(self.core.submit(ids, wanted))

    @rule(steps=st.integers(1, 9))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.core.step()

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        data.draw(st.sampled_from(self.jobs)).cancel()

    @rule()
    def evict(self) -> None:
        self.core.prefix.evict()

    @rule()
    def fail(self) -> None:
        """As `Engine` does after an exception in a pass."""
        for job in self.core.running():
            self.core.remove(job)
            job.cancel()

    @invariant()
    def pages_and_rows_are_accounted_for(self) -> None:
        check_pages(self.core)
        assert len({(id(text.job), text.choice) for text in self.core.texts}) == len(self.core.texts) <= 3

    @invariant()
    def no_page_has_two_writers(self) -> None:
        """A page that a row has written after its prompt belongs to that row alone."""
        for reader in self.core.readers:
            lengths, table = reader.memory.state.lengths, reader.memory.pools[0].table
            for row, text in enumerate(self.core.texts):
                if int(lengths[row]) > len(text.job.ids):
                    assert (table == table[row, (int(lengths[row]) - 1) // 32]).sum() == 1

    def expected(self, job) -> list:
        key = (tuple(job.ids), job.options.limit, job.options.choices, job.options.config.seed)
        if key not in self.alone:
            core = EngineCore(TextGenerator.of(self.model, None), EngineOptions(rows=3, length=200, prefix_cache=False))
            one = core.submit(job.ids, job.options)
            while core.step():
                pass
            self.alone[key] = sorted(scores_of(one))
        return self.alone[key]

    def teardown(self) -> None:
        while self.core.step():
            pass
        check_pages(self.core)
        assert not self.core.texts
        for job in self.jobs:
            assert job.done
            if not job.cancelled:
                with contextlib.suppress(QueueFull):
                    assert sorted(scores_of(job)) == self.expected(job)


TestEngineMachine = needs_kernels(EngineMachine.TestCase)
TestEngineMachine.settings = settings(SLOW, max_examples=15, stateful_step_count=20)
