"""Which tokens a token reads: all that the mask allows; never the future, padding, another row or another document."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clearhead.configs import Blockwise, Causal, DotConfig, Full, Global, Mask, Window
from clearhead.nn.tap import Taps

from .cases import CASES, MIXERS, WINDOW, block, sequence
from .tools import (
    BATCH,
    CAUSAL,
    LENGTH,
    RELATIVE,
    SEQUENCES,
    SOURCE,
    STREAMS,
    TRANSLATORS,
    close,
    fresh,
    gives_a_vector_per_token,
    ids,
    inputs_of,
    kinds,
    model_of,
    once_each,
    padded,
    sequence_model,
    translator_model,
    weighs,
)

LENGTHS = (7, 4, 6)
SIDES = ("left", "right")


def rows(*lengths: int) -> list[Tensor]:
    return [row[:length] for row, length in zip(ids(len(lengths), max(lengths)), lengths, strict=True)]


@pytest.mark.parametrize("name", CAUSAL)
def test_the_future_is_not_read(name: str) -> None:
    model, tokens, at = sequence_model(name), ids(BATCH, LENGTH), 3
    changed = tokens.clone()
    changed[:, at] = (changed[:, at] + 1) % 23
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    close(after[:, :at], before[:, :at])
    difference = (after - before).abs().amax(-1)
    assert (difference[:, at] > 1e-3).all()
    if name != "window of one":
        assert (difference[:, at + 1] > 1e-6).all(), "the next token reads this one"


@pytest.mark.parametrize("name", [name for name in STREAMS if name not in CAUSAL])
def test_an_encoder_reads_both_ways(name: str) -> None:
    model, tokens, at = sequence_model(name), ids(BATCH, LENGTH), 3
    changed = tokens.clone()
    changed[:, at] = (changed[:, at] + 1) % 23
    with torch.no_grad():
        difference = (model(changed) - model(tokens)).abs().amax(-1)
    assert (difference[:, at - 1 : at + 2] > 1e-6).all()


@pytest.mark.parametrize("name", STREAMS)
def test_padding_is_not_read(name: str) -> None:
    """Rows of a padded batch are the rows alone, whatever stands in the padding, on whichever side."""
    model, single = sequence_model(name), rows(*LENGTHS)
    with torch.no_grad():
        alone = torch.cat([model(row[None])[0] for row in single])
        for side, seed in (("left", 3), ("right", 3), ("right", 4)):
            tokens, readable = padded(single, side, seed)
            batched = model(tokens, readable=readable)
            close(batched[readable], alone)
            assert batched.isfinite().all()


POOLED = [name for name in SEQUENCES if not gives_a_vector_per_token(CASES[name])]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", POOLED)
def test_one_vector_does_not_read_padding(name: str, side: str) -> None:
    model, single = sequence_model(name), rows(*LENGTHS)
    tokens, readable = padded(single, side)
    with torch.no_grad():
        batched = model(tokens, readable=readable)
        alone = torch.cat([model(row[None]) for row in single])
    close(batched, alone)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", TRANSLATORS)
def test_a_translator_does_not_read_padding(name: str, side: str) -> None:
    model, sources, targets = translator_model(name), rows(5, 8, 3), rows(*LENGTHS)
    source, source_readable = padded(sources, side)
    target, readable = padded(targets, side, seed=5)
    with torch.no_grad():
        batched = model(source, target, source_readable=source_readable, readable=readable)
        alone = [model(s[None], t[None])[0] for s, t in zip(sources, targets, strict=True)]
    close(batched[readable], torch.cat(alone))


@pytest.mark.parametrize("name", CASES)
def test_a_row_of_a_batch_is_a_batch_of_one(name: str) -> None:
    model, inputs = model_of(name), inputs_of(CASES[name])
    with torch.no_grad():
        batched = model(*inputs)
        alone = torch.cat([model(*(x[i : i + 1] for x in inputs)) for i in range(BATCH)])
    close(alone, batched)


@pytest.mark.parametrize("name", once_each(STREAMS))
def test_an_empty_row_stays_finite(name: str) -> None:
    """A row with nothing to read gets numbers, and so does every gradient of the batch it is in."""
    model, tokens = sequence_model(name), ids(BATCH, LENGTH)
    readable = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    readable[1] = False
    for fused in (True, False):
        out = model(tokens, readable=readable, fused=fused)
        gradients = torch.autograd.grad(out.square().sum(), list(model.parameters()), allow_unused=True)
        assert out.isfinite().all()
        assert all(g is None or g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("name", STREAMS)
def test_documents_do_not_read_each_other(name: str) -> None:
    """With positions that start again, two documents in one row are the two documents apart."""
    model, (first, second) = sequence_model(name), (ids(BATCH, 3), ids(BATCH, 4, seed=6))
    tokens = torch.cat((first, second), 1)
    documents = torch.tensor([5] * 3 + [2] * 4).expand(BATCH, -1)
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3]).expand(BATCH, -1)
    with torch.no_grad():
        apart = torch.cat((model(first), model(second)), 1)
        packed = model(tokens, documents=documents, positions=positions)
        written_out = model(tokens, documents=documents, positions=positions, fused=False)
    close(packed, apart)
    close(written_out, apart)


@pytest.mark.parametrize("name", once_each(RELATIVE))
def test_documents_need_no_positions_where_they_are_relative(name: str) -> None:
    model, (first, second) = sequence_model(name), (ids(BATCH, 3), ids(BATCH, 4, seed=6))
    documents = torch.tensor([0] * 3 + [1] * 4).expand(BATCH, -1)
    with torch.no_grad():
        apart = torch.cat((model(first), model(second)), 1)
        packed = model(torch.cat((first, second), 1), documents=documents)
    close(packed, apart)


@pytest.mark.parametrize(
    "name",
    ["mha; pre", "alibi, full; post", "latent; parallel", "window; pre", "recurrent hybrid", "mamba, mamba, attention"],
)
def test_documents_and_padding_together(name: str) -> None:
    """Documents in one row, of which one row has fewer tokens: neither lifts the other."""
    model, tokens = sequence_model(name), ids(2, LENGTH)
    documents = torch.tensor([0, 0, 0, 1, 1, 1, 1]).expand(2, -1)
    readable = torch.ones(2, LENGTH, dtype=torch.bool)
    readable[1, 5:] = False
    with torch.no_grad():
        both = model(tokens, documents=documents, readable=readable)
        short = model(tokens[1:, :5], documents=documents[1:, :5])
        whole = model(tokens[:1], documents=documents[:1])
    close(both[1, :5], short[0])
    close(both[0], whole[0])


PICTURES: dict[str, tuple[Mask, str]] = {
    "full": (Full(), "111111 111111 111111 111111 111111 111111"),
    "causal": (Causal(), "100000 110000 111000 111100 111110 111111"),
    "window 2": (Window(2), "110000 111000 011100 001110 000111 000011"),
    "causal window 3": (Causal() & Window(3), "100000 110000 111000 011100 001110 000111"),
    "window 1": (Window(1), "100000 010000 001000 000100 000010 000001"),
    "global 1": (Global(1), "111111 100000 100000 100000 100000 100000"),
    "longformer": (Window(2) | Global(1), "111111 111000 111100 101110 100111 100011"),
    "causal longformer": (Causal() & (Window(2) | Global(1)), "100000 110000 111000 101100 100110 100011"),
    "blocks": (Blockwise(2, Window(1)), "110000 110000 001100 001100 000011 000011"),
    "blocks before": (Blockwise(2, Causal()), "110000 110000 111100 111100 111111 111111"),
    "causal blocks": (Causal() & Blockwise(2, Window(2)), "100000 110000 111000 111100 001110 001111"),
}


def picture(text: str) -> Tensor:
    return torch.tensor([[mark == "1" for mark in row] for row in text.split()])


@pytest.mark.parametrize("name", PICTURES)
def test_a_mask_is_its_picture(name: str) -> None:
    mask, text = PICTURES[name]
    want, i = picture(text), torch.arange(6)
    assert torch.equal(mask(i[:, None], i[None]), want)
    assert mask(i.numpy()[:, None], i.numpy()[None]).tolist() == want.tolist()
    assert mask.causal == (name in ("causal", "causal window 3", "causal longformer", "causal blocks"))
    assert not (mask.causal and want.triu(1).any())
    if mask.reach is not None:
        furthest = max(int(q - row.nonzero().min()) + 1 for q, row in enumerate(want))
        assert furthest <= mask.reach
    for length in range(1, 7):
        simpler = mask.within(length)
        assert torch.equal(simpler(i[:length, None], i[None, :length]), want[:length, :length])


@pytest.mark.parametrize("name", [name for name, mixer in MIXERS.items() if weighs(mixer)])
def test_the_weights_are_not_zero_where_the_mask_allows_and_nowhere_else(name: str) -> None:
    taps = Taps(read=["stack.blocks.*.mixer.weights"])
    mask, i = MIXERS[name].mask, torch.arange(LENGTH)
    with torch.no_grad():
        sequence_model(f"{name}; pre")(ids(BATCH, LENGTH), taps=taps)
    allowed = torch.tensor([[bool(mask(q, k)) for k in range(LENGTH)] for q in i.tolist()])
    assert taps.values
    for weights in taps.values.values():
        assert torch.equal(weights != 0, allowed.expand_as(weights))
        if getattr(MIXERS[name], "sinks", None) is not None:
            assert (weights.sum(-1) < 1).all()
        elif not isinstance(getattr(MIXERS[name], "kernel", None), DotConfig):  # which has no denominator
            close(weights.sum(-1), torch.ones_like(weights[..., 0]))


@pytest.mark.parametrize("name", ["window", "latent, window"])
def test_a_window_reaches_so_far_and_no_further(name: str) -> None:
    """Two blocks with a window of w read 2(w − 1) tokens back."""
    model, tokens, far = fresh(sequence(block(MIXERS[name]), repeats=2)), ids(1, 9), 2 * (WINDOW - 1)
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 23
    with torch.no_grad():
        difference = (model(changed) - model(tokens)).abs().amax(-1)[0]
    assert difference[far] > 1e-6
    assert difference[far + 1 :].max() < 1e-9


@pytest.mark.parametrize("name", TRANSLATORS)
def test_a_translator_reads_its_source_and_not_its_future(name: str) -> None:
    model, source, target, at = translator_model(name), ids(BATCH, SOURCE, seed=2), ids(BATCH, LENGTH), 3
    changed = target.clone()
    changed[:, at] = (changed[:, at] + 1) % 23
    other = source.clone()
    other[:, -1] = (other[:, -1] + 1) % 23
    with torch.no_grad():
        logits, after, elsewhere = model(source, target), model(source, changed), model(other, target)
    close(after[:, :at], logits[:, :at])
    assert ((after - logits).abs().amax(-1)[:, at : at + 2] > 1e-6).all()
    assert ((elsewhere - logits).abs().amax(-1) > 1e-6).all()


def test_the_cases_are_what_they_are_meant_to_be() -> None:
    assert len(CAUSAL) > 60
    assert len(STREAMS) > len(CAUSAL) > len(RELATIVE) / 2
    assert {"Alibi", "Rotary", "Learned", "MoE", "LatentAttention"} <= set().union(*(kinds(c) for c in CASES.values()))
