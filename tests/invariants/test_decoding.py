"""Decoding in pieces equals one pass: every cache, every ring, ragged rows, reordered rows, and the encoder–decoder."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from clearhead.configs import Scope
from clearhead.models.model import SequenceModel
from clearhead.nn.cache import DecodeState

from .cases import CASES, MIXERS, POSITIONS, VOCABULARY, block, sequence
from .tools import (
    BATCH,
    CAUSAL,
    LENGTH,
    RINGS,
    SOURCE,
    STREAMS,
    TRANSLATORS,
    close,
    fresh,
    ids,
    model_of,
    once_each,
    padded,
    sequence_model,
    translator_model,
)

PIECES = ((7,), (1,) * 7, (3, 1, 3), (1, 6))
RING_PIECES = ((17,), (1,) * 17, (2, 5, 1, 1, 8), (3, 3, 3, 0, 6, 2))
MIXED = [
    "mha; pre",
    "window; post",
    "two windows",
    "hybrid",
    "latent; pre",
    "alibi, grouped; parallel",
    "lstm; pre",
    "mamba; pre",
    "mamba, mamba, attention",
    "linear; pre",
    "performer, value_dim; pre",
    "recurrent hybrid",
    "position: learned",
]


def in_pieces(
    model: SequenceModel, tokens: Tensor, pieces: tuple[int, ...], state: DecodeState, **options: bool
) -> Tensor:
    return torch.cat([model(piece, state=state, **options) for piece in tokens.split(pieces, dim=1)], dim=1)


@pytest.mark.parametrize("name", CAUSAL)
def test_pieces_equal_one_pass(name: str) -> None:
    model, tokens = sequence_model(name), ids(BATCH, LENGTH)
    with torch.no_grad():
        whole = model(tokens)
        for pieces in PIECES:
            close(in_pieces(model, tokens, pieces, model.init_state(BATCH, LENGTH)), whole)


@pytest.mark.parametrize("pieces", RING_PIECES, ids=str)
@pytest.mark.parametrize(
    "name", [*once_each(RINGS), "window; post", "hybrid", "latent, window; pre", "causal longformer; pre"]
)
def test_a_ring_may_turn_often(name: str, pieces: tuple[int, ...]) -> None:
    model, tokens = sequence_model(name), ids(BATCH, 17)
    with torch.no_grad():
        close(in_pieces(model, tokens, pieces, model.init_state(BATCH, 17)), model(tokens))


@pytest.mark.parametrize("name", MIXED)
def test_pieces_written_out(name: str) -> None:
    model, tokens = sequence_model(name), ids(BATCH, LENGTH)
    with torch.no_grad():
        whole = model(tokens)
        close(in_pieces(model, tokens, (3, 1, 3), model.init_state(BATCH, 9), fused=False), whole)


@pytest.mark.parametrize("name", MIXED)
def test_pieces_with_gradients_on(name: str) -> None:
    model, tokens = sequence_model(name), ids(BATCH, LENGTH)
    pieces = in_pieces(model, tokens, (3, 1, 3), model.init_state(BATCH, LENGTH))
    close(pieces.detach(), model(tokens).detach())


@pytest.mark.parametrize(("name", "side"), [(name, "right") for name in CAUSAL] + [(name, "left") for name in MIXED])
def test_ragged_rows_are_decoded_on(name: str, side: str) -> None:
    """Prompts of 5, 2 and 4 tokens, then 1, 1 and 2 more of each, in one batch and alone."""
    model, texts = sequence_model(name), [row[:n] for row, n in zip(ids(3, 9), (9, 6, 8), strict=True)]
    prompts, readable = padded([text[:-4] for text in texts], side)
    rest = torch.stack([text[-4:] for text in texts])
    with torch.no_grad():
        state = model.init_state(3, 9)
        first = model(prompts, readable=readable, state=state)
        assert state.lengths.tolist() == [5, 2, 4]
        after = in_pieces(model, rest, (1, 1, 2), state)
        for i, text in enumerate(texts):
            close(torch.cat((first[i][readable[i]], after[i])), model(text[None])[0])
    assert state.lengths.tolist() == [9, 6, 8]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MIXED)
def test_rows_may_be_ragged_at_every_step(name: str, side: str) -> None:
    """Chunks of different lengths per row, some rows with none at all, until every row is whole."""
    model, length = sequence_model(name), 10
    texts = ids(3, length)
    chunks = ((3, 1, 0), (1, 0, 1), (2, 5, 4), (4, 3, 0), (0, 1, 5))
    got: list[list[Tensor]] = [[], [], []]
    state, done = model.init_state(3, length + 1), [0, 0, 0]
    with torch.no_grad():
        for sizes in chunks:
            rows = [texts[i, done[i] : done[i] + n] for i, n in enumerate(sizes)]
            tokens, readable = padded(rows, side)
            out = model(tokens, readable=readable, state=state)
            for i, n in enumerate(sizes):
                got[i].append(out[i][readable[i]])
                done[i] += n
        assert done == state.lengths.tolist() == [length] * 3
        close(torch.stack([torch.cat(parts) for parts in got]), model(texts))


@pytest.mark.parametrize("name", CAUSAL)
def test_rows_are_selected_as_beam_search_does(name: str) -> None:
    model, tokens = sequence_model(name), ids(3, 5)
    more, again = ids(4, 2, seed=8), ids(2, 2, seed=9)
    rows, fewer = torch.tensor([2, 0, 0, 1]), torch.tensor([3, 1])
    with torch.no_grad():
        state = model.init_state(3, 9)
        model(tokens, state=state)
        state.select(rows)
        second = model(more, state=state)
        state.select(fewer)
        third = model(again, state=state)
        want = model(torch.cat((tokens[rows], more), 1))[:, 5:]
        last = model(torch.cat((tokens[rows][fewer], more[fewer], again), 1))[:, 7:]
    close(second, want)
    close(third, last)


def test_a_finished_row_needs_no_learned_position() -> None:
    model, tokens = sequence_model("position: learned"), ids(2, POSITIONS)
    readable = torch.ones(2, POSITIONS, dtype=torch.bool)
    readable[1, 2:] = False
    with torch.no_grad():
        state = model.init_state(2, POSITIONS + 1)
        model(tokens, readable=readable, state=state)
        out = model(tokens[:, 2:3], readable=torch.tensor([[False], [True]]), state=state)
        close(out[1, 0], model(tokens[1:, :3])[0, 2])


@pytest.mark.parametrize("name", ["window; pre", "latent; pre", "recurrent hybrid", "mamba; pre"])
def test_a_state_keeps_no_graph(name: str) -> None:
    """Or every token decoded with gradients on would hold on to all before it, and the state could not be copied."""
    model = sequence_model(name)
    state = model.init_state(BATCH, LENGTH)
    model(ids(BATCH, 2), state=state)
    assert not any(buffer.requires_grad for buffer in buffers(state))


def test_a_selected_row_is_a_copy() -> None:
    model, tokens = sequence_model("mha; pre"), ids(1, 4)
    with torch.no_grad():
        state = model.init_state(1, 6)
        model(tokens, state=state)
        state.select(torch.tensor([0, 0]))
        branches = ids(2, 2, seed=8)
        assert not torch.equal(branches[0], branches[1])
        out = in_pieces(model, branches, (1, 1), state)
        close(out, model(torch.cat((tokens.expand(2, -1), branches), 1))[:, 4:])


@pytest.mark.parametrize("name", ["two windows", "hybrid"])
def test_ragged_rows_in_a_ring_are_selected(name: str) -> None:
    model, texts = sequence_model(name), ids(3, 16)
    prompts, readable = padded([texts[0, :9], texts[1, :2], texts[2, :6]], "right")
    rows, lengths = torch.tensor([1, 2, 2, 0]), torch.tensor([2, 6, 6, 9])
    more = ids(4, 7, seed=8)
    with torch.no_grad():
        state = model.init_state(3, 16)
        model(prompts, readable=readable, state=state)
        state.select(rows)
        out = in_pieces(model, more, (1, 4, 1, 1), state)
        for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
            whole = torch.cat((texts[row, :length], more[i]))
            close(out[i], model(whole[None])[0, length:])


@pytest.mark.parametrize("name", [name for name in once_each(STREAMS) if name not in CAUSAL])
def test_who_reads_later_tokens_has_no_state(name: str) -> None:
    with pytest.raises(ValueError, match="reads later tokens"):
        sequence_model(name).init_state(BATCH, LENGTH)


@pytest.mark.parametrize("name", TRANSLATORS)
def test_a_translator_decodes_in_pieces(name: str) -> None:
    model, source, target = translator_model(name), ids(BATCH, SOURCE, seed=2), ids(BATCH, LENGTH)
    readable = torch.ones(BATCH, SOURCE, dtype=torch.bool)
    readable[1, 5:] = False
    with torch.no_grad():
        for mask in (None, readable):
            whole, memory = model(source, target, source_readable=mask), model.encode(source, readable=mask)
            for pieces in PIECES:
                state = model.init_state(memory, LENGTH, readable=mask)
                parts = [model.decode(piece, state) for piece in target.split(pieces, dim=1)]
                close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", TRANSLATORS)
def test_a_translators_ragged_rows_are_decoded_on(name: str, side: str) -> None:
    model, texts = translator_model(name), [row[:n] for row, n in zip(ids(3, 7), (7, 4, 6), strict=True)]
    sources = [row[:n] for row, n in zip(ids(3, 8, seed=2), (8, 5, 3), strict=True)]
    (source, source_readable), (start, readable) = padded(sources, side), padded([t[:-2] for t in texts], side, seed=5)
    rest = torch.stack([text[-2:] for text in texts])
    with torch.no_grad():
        state = model.init_state(model.encode(source, readable=source_readable), 7, readable=source_readable)
        first = model.decode(start, state, readable=readable)
        after = torch.cat([model.decode(piece, state) for piece in rest.split(1, dim=1)], 1)
        for i, text in enumerate(texts):
            close(torch.cat((first[i][readable[i]], after[i])), model(sources[i][None], text[None])[0])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", TRANSLATORS)
def test_a_translators_rows_are_selected(name: str, fused: bool) -> None:
    model, source, target, more = translator_model(name), ids(3, SOURCE, seed=2), ids(3, 4), ids(4, 3, seed=8)
    readable = torch.ones(3, SOURCE, dtype=torch.bool)
    readable[1, 5:] = False
    rows = torch.tensor([2, 1, 0, 1])
    with torch.no_grad():
        state = model.init_state(model.encode(source, readable=readable), LENGTH, readable=readable)
        model.decode(target, state, fused=fused)
        state.select(rows)
        got = model.decode(more, state, fused=fused)
        whole = model(source[rows], torch.cat((target[rows], more), 1), source_readable=readable[rows])
    close(got, whole[:, 4:])


def buffers(state: DecodeState) -> list[Tensor]:
    found: list[Tensor] = []
    for remembered in state.blocks:
        for part in (remembered.mixer, remembered.cross):
            found += [value for value in vars(part or object).values() if isinstance(value, Tensor)]
    return found


@pytest.mark.parametrize("name", [*CAUSAL, *TRANSLATORS])
def test_a_state_holds_what_the_config_says(name: str) -> None:
    model, config, length = model_of(name), CASES[name], 11
    if isinstance(model, SequenceModel):
        state = model.init_state(BATCH, length)
    else:
        state = model.init_state(model.encode(ids(BATCH, SOURCE)), length)
    shapes = config.state(Scope({"B": BATCH, "S": length, "source": SOURCE}))
    assert sum(buffer.numel() for buffer in buffers(state)) == sum(math.prod(shape) for shape in shapes.values())


@pytest.mark.parametrize("name", MIXED)
def test_a_refused_call_leaves_the_state_as_it_was(name: str) -> None:
    """A server that refuses one request can continue with the same state."""
    model, tokens = sequence_model(name), ids(BATCH, LENGTH)
    bad = tokens.clone()
    bad[1, 5] = VOCABULARY
    with torch.no_grad():
        state = model.init_state(BATCH, LENGTH)
        first = model(tokens[:, :4], state=state)
        with pytest.raises(ValueError, match=f"token {VOCABULARY} "):
            model(bad[:, 4:], state=state)
        second = model(tokens[:, 4:], state=state)
        close(torch.cat((first, second), 1), model(tokens))


FILLED = ["mha; pre", "two windows", "hybrid", "latent; pre", "window, then all"]


@pytest.mark.parametrize("name", FILLED)
def test_a_full_state_refuses_more_and_stays_as_it_was(name: str) -> None:
    window_first = sequence(block(MIXERS["window"]), block(MIXERS["mha"]))
    model = fresh(window_first) if name == "window, then all" else sequence_model(name)
    tokens = ids(BATCH, LENGTH)
    with torch.no_grad():
        state = model.init_state(BATCH, LENGTH)
        first = model(tokens[:, :5], state=state)
        if name != "two windows":  # rings never fill up
            with pytest.raises(ValueError, match="position 8 does not fit a state made for 7 positions"):
                model(ids(BATCH, 4), state=state)
        with pytest.raises(ValueError, match="the state holds 3 rows, but the inputs have 2"):
            model(tokens[:2, 5:], state=state)
        close(torch.cat((first, model(tokens[:, 5:], state=state)), 1), model(tokens))


@pytest.mark.parametrize("name", MIXED)
def test_a_row_that_is_done_takes_no_room(name: str) -> None:
    """A full row may stand in a batch whose other rows go on: its column is padding."""
    model, tokens = sequence_model(name), ids(2, 4)
    with torch.no_grad():
        state = model.init_state(2, 4)
        model(tokens, readable=torch.tensor([[True] * 4, [True, True, False, False]]), state=state)
        out = model(tokens[:, 2:3], readable=torch.tensor([[False], [True]]), state=state)
        close(out[1, 0], model(tokens[1:, :3])[0, 2])
    assert state.lengths.tolist() == [4, 3]
