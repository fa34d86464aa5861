"""The engine: the same answer alone and in company, no leaks, fair scheduling."""

from __future__ import annotations

import asyncio

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import clearhead
from clearhead.configs import precision
from clearhead.generate.complete import TextGenerator
from clearhead.models.quantize import quantize
from clearhead.serve import Engine
from clearhead.serve.engine import CHUNK, EngineCore, EngineOptions
from clearhead.serve.job import JobError, JobOptions
from clearhead.serve.plan import Ticket, next_ticket, passes

from .tools import small_model

PRESETS = ("tiny-gpt", "tiny-llama", "tiny-mistral", "tiny-mixtral", "tiny-deepseek", "tiny-mamba", "tiny-lstm")


def disturbed(preset: str, weights: str | None):
    torch.manual_seed(0)
    model = clearhead.build(clearhead.preset(preset)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model if weights is None else quantize(model, precision(weights))


def answers(model, prompts, rows: int, cache: int, limit: int = 8, length: int = 256, **options):
    core = EngineCore(model, None, EngineOptions(rows=rows, length=length, cache_bytes=cache))
    config = TextGenerator.of(model, None, **options).config
    jobs = [core.new_job(ids, JobOptions(config=config, limit=limit, logprobs=2)) for ids in prompts]
    for job in jobs:
        core.add(job)
    while core.step():
        pass
    assert core.memory.state.lengths[:-1].sum() == 0  # every row is free again
    return [[(score.token, score.logprob, score.top) for delta in job for score in delta.tokens] for job in jobs], jobs


def random_prompts(*lengths: int) -> list[list[int]]:
    torch.manual_seed(1)
    return [torch.randint(0, 100, (length,)).tolist() for length in lengths]


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "float16", "int8", "int4"])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9, "seed": 3}])
def test_answer_is_bit_identical_alone_and_in_company(weights: str, sampling: dict) -> None:
    """Text and log-probabilities, with the prefix cache on and off."""
    model, prompts = disturbed("tiny-llama", weights), random_prompts(3, 150, 30, 70, 2, 150, 65, 64)
    alone = [answers(model, [prompt], 1, 0, **sampling)[0][0] for prompt in prompts]
    together, _ = answers(model, prompts, 8, 0, **sampling)
    cached, jobs = answers(model, prompts * 2, 3, 1 << 26, **sampling)
    assert together == alone
    assert cached == alone * 2
    assert jobs[9].usage.cached == 2 * CHUNK


@pytest.mark.parametrize("preset", PRESETS)
def test_every_mixer_writes_the_same_text_in_company(preset: str) -> None:
    """Eight at once, with the prefix cache, against plain `generate`."""
    model, prompts = disturbed(preset, None), random_prompts(3, 17, 30, 5, 31, 2, 9, 30)
    together, _ = answers(model, prompts * 2, 8, 1 << 26, length=48, temperature=0.0)
    plain = [model.generate([prompt], max_new_tokens=8, temperature=0)[0].tokens for prompt in prompts]
    assert [[token for token, *_ in one] for one in together] == plain * 2


def test_logprobs_are_those_of_the_model() -> None:
    model, (prompt,) = disturbed("tiny-llama", None), random_prompts(70)
    ((first, *_),), _ = answers(model, [prompt], 2, 0, temperature=0.0)
    with torch.no_grad():
        own = model(torch.tensor([prompt]))[0, -1].log_softmax(0)
    assert first[0] == int(own.argmax())
    assert first[1] == pytest.approx(float(own.max()), abs=1e-4)


def test_prompt_scores_are_those_of_the_model() -> None:
    model, (prompt,) = disturbed("tiny-llama", None), random_prompts(70)
    core = EngineCore(model, None, EngineOptions(rows=2))
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
    """Whatever happens, rows and the prefix cache are accounted for, and finished answers are right."""

    model = small_model()

    def __init__(self) -> None:
        super().__init__()
        self.core = EngineCore(self.model, None, EngineOptions(rows=3, length=200, queue=4, cache_bytes=60_000))
        self.config = TextGenerator.of(self.model, None, temperature=0.0).config
        self.jobs: list = []

    @rule(start=st.integers(0, 2), length=st.integers(1, 150), limit=st.integers(1, 6), choices=st.integers(1, 3))
    def submit(self, start: int, length: int, limit: int, choices: int) -> None:
        ids = [(start * 7 + i) % 50 for i in range(length)]
        job = self.core.new_job(ids, JobOptions(config=self.config, limit=limit, choices=choices, logprobs=0))
        self.core.add(job)
        self.jobs.append(job)

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.core.step()

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        data.draw(st.sampled_from(self.jobs)).cancel()

    @rule()
    def evict(self) -> None:
        limit, self.core.prefix.limit = self.core.prefix.limit, 1
        self.core.prefix.evict()
        self.core.prefix.limit = limit

    @invariant()
    def rows_belong_to_texts(self) -> None:
        lengths = self.core.memory.state.lengths
        active = len(self.core.texts)
        assert (lengths[:active] > 0).all()
        assert (lengths[active : self.core.memory.rows] == 0).all()
        assert len({(id(text.job), text.choice) for text in self.core.texts}) == active <= 3

    @invariant()
    def cache_is_within_its_limit(self) -> None:
        prefix = self.core.prefix
        assert prefix.size <= prefix.limit
        pending, size = list(prefix.root.children.values()), 0
        while pending:
            node = pending.pop()
            pending += node.children.values()
            size += node.saved.size
        assert size == prefix.size

    def teardown(self) -> None:
        while self.core.step():
            pass
        assert not self.core.texts
        assert all(job.done for job in self.jobs)
        assert (self.core.memory.state.lengths[:-1] == 0).all()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(SLOW, max_examples=15, stateful_step_count=20)
