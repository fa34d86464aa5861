"""Gradients, induction heads, shapes and recurrences: facts that hold at any size, and small runs that learn."""

from __future__ import annotations

import pytest
import torch

from clearhead.configs import AttentionConfig, Causal, FeedForwardConfig
from clearhead.lab.gradients import Size, by_block, gradients, loss_of, made, split, text, without_residual
from clearhead.lab.induction import induction, look, texts
from clearhead.lab.learn import learn, moments
from clearhead.lab.lstm import NAMES, contestant, kept, recall
from clearhead.lab.shape import config, corpus, narrowed, shape
from clearhead.measure.compare import Size as CompareSize
from clearhead.measure.compare import parameters
from clearhead.models.assemble import build
from clearhead.models.llama import decoder

SMALL = Size(dim=16, heads=2, length=8, batch=3, vocabulary=11)


def tokens() -> torch.Tensor:
    return text(SMALL, torch.Generator().manual_seed(0))


def test_the_gradient_is_its_identity_term_and_its_corrections() -> None:
    model = made(SMALL, 5, "pre", 0).double().eval()
    parts = split(model, tokens())
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
    model = made(SMALL, 2, placement, 0).double().eval()
    ids = tokens()[:, :-1]
    from clearhead.nn.context import Context

    at = torch.arange(ids.shape[1])[None]
    here = Context(at, at, aligned=True)
    x = model.embedding(ids, here)
    for block in model.stack.blocks:
        for part, residual in ((block.mixer, block.mixer_residual), (block.ffn, block.ffn_residual)):
            x = residual.after(part(residual.before(x), here))
    wanted = model.head(model.stack.final_norm(x), here, None)
    torch.testing.assert_close(model(ids, taps=without_residual()), wanted, rtol=0, atol=1e-12)
    assert not torch.allclose(model(ids), wanted)


def test_gradient_norms_by_block_are_those_of_the_weights() -> None:
    model = made(SMALL, 3, "post", 0)
    loss_of(model, tokens()).backward()
    whole = sum(float(p.grad.square().sum()) for p in model.stack.parameters())
    assert sum(norm**2 for norm in by_block(model)) == pytest.approx(whole, rel=1e-5)


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
    assert found.more["split"]["error"] < 1e-13


def test_scores_know_an_induction_head_when_they_see_one() -> None:
    """A text twice: in a fresh model no head stands out, and the second half is as hard as the first."""
    mixer = AttentionConfig(heads=2, mask=Causal())
    model = build(decoder(dim=16, layers=2, mixer=mixer, ffn=FeedForwardConfig(), vocabulary=9))
    seen = look(model, *texts(64, 9, 10, torch.Generator().manual_seed(0)), 0)
    assert seen.induction < 0.3
    assert seen.second == pytest.approx(seen.first, abs=0.2)
    assert model.training


def test_texts_repeat_with_a_period_of_their_own() -> None:
    rows, again = texts(50, 100, 6, torch.Generator().manual_seed(0))
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
        one = narrowed(usual, 2, ratio)
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
    ours, theirs = (contestant(name, size) for name in NAMES)
    assert parameters(theirs) == pytest.approx(parameters(ours), rel=0.01)
    assert kept(ours, 100) == 2 * 2 * 100 * 32  # layers, keys and values, tokens, width
    assert kept(theirs, 100) == kept(theirs, 10) == 2 * 2 * 32  # layers, h and c


@pytest.mark.parametrize("name", NAMES)
def test_recall_is_told_by_distance(name: str) -> None:
    """After a few steps of one layer nobody recalls much, at any of the distances that there are."""
    size = CompareSize(dim=16, layers=1, heads=4, vocabulary=128)
    shares = recall(contestant(name, size), 6, 30, 16, 0, lambda text: None)
    assert set(shares) == {4, 5, 6}  # the periods
    assert all(0 <= share < 0.5 for share in shares.values())


def test_the_loop_yields_every_step_and_moments_end_with_the_last() -> None:
    model = torch.nn.Linear(2, 1)
    steps = list(learn(model, lambda: model(torch.ones(3, 2)).square().mean(), steps=30, lr=0.1))
    assert [step for step, _ in steps] == list(range(1, 31))
    assert steps[-1][1] < steps[0][1]
    assert max(moments(500, 9)) == 500
    assert min(moments(500, 9)) == 1
