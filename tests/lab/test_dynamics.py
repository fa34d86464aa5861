"""Gradients, induction heads, shapes and recurrences: facts that hold at any size, and small runs that learn."""

from __future__ import annotations

import pytest
import torch

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    Causal,
    FeedForwardConfig,
    LearnedConfig,
    LMHeadConfig,
    SequenceModelConfig,
    TokenEmbeddingConfig,
)
from clearhead.inspect.plotting import figure
from clearhead.lab.gradients import (
    Size,
    block_gradient_norms,
    describe_evenness,
    describe_warmup,
    gradient_terms,
    gradients,
    loss_of,
    make_model,
    random_text,
    remove_residual,
)
from clearhead.lab.induction import induction, measure_heads, repeating_texts
from clearhead.lab.lstm import NAMES, matched_config, recall_by_distance, state_size
from clearhead.lab.manual_weights import IDENTITY_NORM, Fields, stack_of, zero_model
from clearhead.lab.shape import config, corpus, match_parameters, shape
from clearhead.lab.training_loop import record_steps, train_steps
from clearhead.measure.growth import ModelSize as CompareSize
from clearhead.measure.growth import parameters
from clearhead.models.llama import decoder
from clearhead.models.model import SequenceModel, build

SMALL = Size(dim=16, heads=2, length=8, batch=3, vocabulary=11)


def tokens() -> torch.Tensor:
    return random_text(SMALL, torch.Generator().manual_seed(0))


def test_the_gradient_is_its_identity_term_and_its_corrections() -> None:
    model = make_model(SMALL, 5, "pre", 0).double().eval()
    parts = gradient_terms(model, tokens())
    assert parts.error < 1e-14
    assert len(parts.corrections) == 10
    # by another way: the embedding's own gradient, summed over equal tokens, is that of x₀
    loss_of(model, tokens()).backward()
    position = model.embedding.position.weight.grad.clone()
    assert position.norm() > 0
    probe = torch.zeros(3, 8, 16, dtype=torch.float64, requires_grad=True)
    from clearhead.nn.tap import Taps

    loss_of(model, tokens(), Taps(replace={"embedding.norm": lambda x: x + probe})).backward()
    torch.testing.assert_close(probe.grad.sum(0), position, rtol=0, atol=1e-15)
    assert parts.total == pytest.approx(float(probe.grad.norm()), rel=1e-12)


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_without_residuals_each_block_is_its_branches(placement: str) -> None:
    """Against a transcription: after(f(before(x))), branch by branch."""
    model = make_model(SMALL, 2, placement, 0).double().eval()
    ids = tokens()[:, :-1]
    from clearhead.nn.context import Context

    at = torch.arange(ids.shape[1])[None]
    here = Context(at, at, aligned=True)
    x = model.embedding(ids, here)
    for block in model.stack.blocks:
        for part, residual in ((block.mixer, block.mixer_residual), (block.ffn, block.ffn_residual)):
            x = residual.after(part(residual.before(x), here))
    wanted = model.head(model.stack.final_norm(x), here, None)
    torch.testing.assert_close(model(ids, taps=remove_residual()), wanted, rtol=0, atol=1e-12)
    assert not torch.allclose(model(ids), wanted)


def test_gradient_norms_by_block_are_those_of_the_weights() -> None:
    model = make_model(SMALL, 3, "post", 0)
    loss_of(model, tokens()).backward()
    whole = sum(float(p.grad.square().sum()) for p in model.stack.parameters())
    assert sum(norm**2 for norm in block_gradient_norms(model)) == pytest.approx(whole, rel=1e-5)


def test_what_gradients_finds() -> None:
    found = gradients(depths=(2, 10), dim=16, heads=2, length=8, batch=2, train_depth=2, steps=6)
    start = {row[1:5]: row[9] for row in found.rows if row[0] == "start"}
    assert len(start) == 2 * 2 * 3
    assert start["plain", 10, "post", "on"] < start["scaled", 10, "post", "on"]
    runs = found.more["training"]
    assert len(runs) == 5
    for run in runs.values():
        assert run[0]["update"] == pytest.approx(1, abs=0.02)  # Adam's first step is a sign
        assert run[-1]["update"] < 0.9
        assert len(run[-1]["block_gradient_norms"]) == 2
    ends = [(row[7], row[8]) for row in found.rows if row[0] == "end"]
    assert [(run[-1]["block_gradient_norms"][0], run[-1]["block_gradient_norms"][-1]) for run in runs.values()] == ends
    assert found.more["split"]["error"] < 1e-13
    with figure(15, 8) as picture:
        found.draw(picture, "light")
        after = next(axis for axis in picture.axes if axis.get_title() == "after 6 steps")
        assert [line.get_ydata().tolist() for line in after.lines] == [
            run[-1]["block_gradient_norms"] for run in runs.values()
        ]


def test_norms_make_up_for_residuals_only_where_gradients_are_even() -> None:
    assert describe_evenness(0.5, 2.0) != ""
    assert describe_evenness(0.5, 1e-4) == describe_evenness(30.0, 1.0) == ""


def test_of_warm_up_is_said_what_the_losses_tell() -> None:
    nan, inf = float("nan"), float("inf")
    assert "did not need warm-up" in describe_warmup(1.5, 1.5, 4.16)
    assert "1.50 higher" in describe_warmup(3.0, 1.5, 4.16)
    for lost in (nan, inf):
        assert "diverges" in describe_warmup(lost, 1.5, 4.16)
    for cold, warm in ((4.1, 4.1), (nan, nan), (inf, inf)):
        assert "is open" in describe_warmup(cold, warm, 4.16)


def inductive(vocabulary: int, length: int) -> SequenceModel:
    """By hand: the first layer tells each token who came before it, the second searches by that."""
    at = Fields(token=vocabulary, place=length, before=vocabulary, answer=vocabulary)
    first, second = (
        BlockConfig(
            mixer=AttentionConfig(heads=1, head_dim=width, value_dim=vocabulary, mask=Causal()),
            ffn=None,
            norm=IDENTITY_NORM,
        )
        for width in (length, vocabulary)
    )
    config = SequenceModelConfig(
        embedding=TokenEmbeddingConfig(vocabulary=vocabulary, position=LearnedConfig(length=length)),
        stack=stack_of(at.dim, first, second),
        head=LMHeadConfig(vocabulary=vocabulary),
    )
    model = zero_model(config, torch.float32)
    back_one, same = torch.eye(length).roll(1, 1), torch.eye(vocabulary)
    with torch.no_grad():
        model.embedding.tokens.weight[:, at["token"]] = same
        model.embedding.position.weight[:, at["place"]] = torch.eye(length)
        asked = (("place", "place", "before", back_one), ("token", "before", "answer", same))
        for block, (own, of, into, fits) in zip(model.stack.layers(), asked, strict=True):
            query, key, value = block.mixer.qkv.weight.split(block.mixer.rows)
            query[:, at[own]], key[:, at[of]] = 60 * len(fits) ** 0.5 * fits, torch.eye(len(fits))
            value[:, at["token"]] = block.mixer.out.weight[at[into]] = same
        model.head.weight[:, at["answer"]] = 10 * same
    return model


def test_scores_know_an_induction_head_when_they_see_one() -> None:
    """A model by hand has both heads. In a fresh one none stands out, and what came before is as hard as the rest."""
    seen = measure_heads(inductive(100, 12), *repeating_texts(16, 100, 6, torch.Generator().manual_seed(0)), 0)
    assert seen.previous > 0.99
    assert seen.induction > 0.85, "all but where the first token, which has none before it, took itself"
    assert seen.second < 0.5 < 3 < seen.first
    mixer = AttentionConfig(heads=2, mask=Causal())
    model = build(decoder(dim=16, layers=2, mixer=mixer, ffn=FeedForwardConfig(), vocabulary=9))
    seen = measure_heads(model, *repeating_texts(64, 9, 10, torch.Generator().manual_seed(0)), 0)
    assert seen.induction < 0.3
    assert seen.second == pytest.approx(seen.first, abs=0.2)
    assert model.training


def test_texts_repeat_with_a_period_of_their_own() -> None:
    rows, again = repeating_texts(50, 100, 6, torch.Generator().manual_seed(0))
    periods = set()
    for row, old in zip(rows.tolist(), again.tolist(), strict=True):
        period = old.index(True) - 1
        periods.add(period)
        assert row[period:] == row[: 12 - period]
    assert periods == {4, 5, 6}


@pytest.mark.proof
def test_two_layers_grow_induction_heads_and_one_does_not() -> None:
    found = induction()
    last = dict(zip(found.columns, found.rows[-1], strict=True))
    assert last["step"] == 800
    assert last["loss, again"] < 0.5 < 3 < last["loss, new"]
    assert last["1 layer: loss, again"] > 1.5
    assert last["induction"] > 0.5 > 0.3 > last["1 layer: induction"]


def test_shapes_have_equal_parameters() -> None:
    usual = config(96, 2, 4, 384)
    for ratio in (1, 2, 4, 8):
        one = match_parameters(usual, 2, ratio)
        assert parameters(one) == pytest.approx(parameters(usual), rel=0.005)
        assert one.weights()["stack.blocks.0.ffn.up.weight"][0] / one.stack.dim == pytest.approx(ratio, rel=0.2)
    assert parameters(config(96, 2, 16, 384)) == parameters(usual)


def test_shape_learns_from_any_text(tmp_path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"abcdefgh" * 100)
    found = shape(ratios=(2, 4), heads=(1, 2), dim=16, steps=40, batch=4, context=16, runs=1, data=[str(file)])
    assert found.more["bytes"] == 800
    assert all(row[5] < 5.0 for row in found.rows)  # ln 256 = 5.55
    with pytest.raises(ValueError, match="has 800 bytes, but needs at least 2000"):
        corpus([str(file)], 100)
    with pytest.raises(ValueError, match="must be a multiple of 10"):
        shape(heads=(5,), dim=16)


def test_contestants_are_alike_in_size_and_a_recurrence_keeps_as_much_at_any_length() -> None:
    size = CompareSize(dim=32, layers=2, heads=4, vocabulary=128)
    ours, theirs = (matched_config(name, size) for name in NAMES)
    assert parameters(theirs) == pytest.approx(parameters(ours), rel=0.01)
    assert state_size(ours, 100) == 2 * 2 * 100 * 32  # layers, keys and values, tokens, width
    assert state_size(theirs, 100) == state_size(theirs, 10) == 2 * 2 * 32  # layers, h and c


def test_recall_is_told_by_distance() -> None:
    """A predictor that knows every repeated token except in texts of period 5, and no new token."""
    tokens, again = repeating_texts(60, 100, 6, torch.Generator().manual_seed(0))
    knows = again[:, 1:] & ((~again).sum(1, keepdim=True) - 1 != 5)
    assert recall_by_distance(torch.where(knows, tokens[:, 1:], 100), tokens, again) == {4: 1.0, 5: 0.0, 6: 1.0}


def test_the_loop_yields_every_step_and_moments_end_with_the_last() -> None:
    model = torch.nn.Linear(2, 1)
    steps = list(train_steps(model, lambda: model(torch.ones(3, 2)).square().mean(), steps=30, lr=0.1))
    assert [step for step, _ in steps] == list(range(1, 31))
    assert steps[-1][1] < steps[0][1]
    assert max(record_steps(500, 9)) == 500
    assert min(record_steps(500, 9)) == 1
