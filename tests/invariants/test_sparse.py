"""Attention by tiles: the same as the written-out attention under the same mask, and nothing beyond it is computed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from clearhead import reference
from clearhead.configs import (
    AttentionConfig,
    Band,
    Blockwise,
    Causal,
    ConfigError,
    Full,
    Global,
    Mask,
    Scattered,
    Window,
    tiles,
)
from clearhead.functional import blocked
from clearhead.functional.blocked import attention_by_tiles, sparse_attention
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.context import Context

from .cases import CASES
from .tools import BATCH, CAUSAL, SEQUENCES, close, ids, kinds, model_of, once_each, sequence_model

BIGBIRD = Blockwise(4, Window(2) | Global(1) | Scattered(2, among=9, seed=3))
MASKS: dict[str, Mask] = {
    "full": Full(),
    "causal": Causal(),
    "window": Window(5),
    "window of one": Window(1),
    "window wider than the text": Window(1000),
    "causal window": Causal() & Window(6),
    "longformer": Window(4) | Global(3),
    "longformer without global tokens": Window(4) | Global(0),
    "global alone": Global(2),
    "causal longformer": Causal() & (Window(4) | Global(2)),
    "bigbird": BIGBIRD,
    "causal bigbird": Causal() & BIGBIRD,
    "scattered keys": Scattered(3, among=29, seed=1),
    "band": Band(2, 9),
    "band both ways": Band(-3, 1),
    "past but not near": Band(4),
    "blocks of a band": Blockwise(5, Band(1, 1)),
    "nothing": Window(3) & Band(20),
}


@pytest.fixture
def small_cells(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cells of 4 positions, so that a short text has many; and no table of all pairs, however small."""
    monkeypatch.setattr(tiles, "CELL", 4)
    monkeypatch.setattr(tiles, "ROWS", 8)
    monkeypatch.setattr(tiles, "FEW", -1)
    monkeypatch.setattr(tiles, "MANY", -1)
    tiles.tiles_within.cache_clear()
    yield
    tiles.tiles_within.cache_clear()


@pytest.mark.parametrize("name", MASKS)
def test_what_a_mask_says_of_spans_holds_for_their_members(name: str) -> None:
    mask, ends = MASKS[name], list(itertools.combinations_with_replacement(range(0, 40, 3), 2))
    first, last = np.array(ends).T
    some, every = (
        np.broadcast_to(bound, (len(ends),) * 2)
        for bound in mask.over((first[:, None], last[:, None]), (first[None], last[None]))
    )
    for (a, (i, to)), (b, (j, end)) in itertools.product(enumerate(ends), enumerate(ends)):
        pairs = mask(np.arange(i, to + 1)[:, None], np.arange(j, end + 1)[None])
        assert some[a, b] or not pairs.any()
        assert pairs.all() or not every[a, b]
    assert name in ("full", "window wider than the text") or not some.all()


def test_scattered_keys_are_as_many_as_asked_and_the_seed_decides_which() -> None:
    i, j = np.arange(64)[:, None], np.arange(64)[None]
    table = Scattered(3, among=64)(i, j)
    assert (table.sum(1) == 3).all()
    assert (Scattered(3, among=64)(i, j) == table).all()
    assert not (Scattered(3, among=64, seed=1)(i, j) == table).all()
    assert (Scattered(3, among=64)(torch.arange(64)[:, None], torch.arange(64)[None]).numpy() == table).all()
    assert [bool(Scattered(3, among=64)(5, key)) for key in range(64)] == table[5].tolist()
    assert table.sum(0).std() > 1, "every key is read equally often, which no draw does"
    for keys in (9, 0):
        with pytest.raises(ConfigError, match=rf"Scattered\.keys is {keys}, but must be between 1 and among=8"):
            Scattered(keys, among=8)
    with pytest.raises(ConfigError, match=r"Band\.most is 2, but must be at least 3"):
        Band(3, 2)


@pytest.mark.usefixtures("small_cells")
@pytest.mark.parametrize("length", [(29, 29), (32, 32), (1, 1), (3, 40), (40, 3)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_sparse_attention_is_attention_under_the_mask(name: str, length: tuple[int, int]) -> None:
    rng, (T, S) = np.random.default_rng(0), length
    q, k, v = rng.normal(size=(2, 6, T, 5)), rng.normal(size=(2, 2, S, 5)), rng.normal(size=(2, 2, S, 7))
    inputs = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    mixed = sparse_attention(*inputs, MASKS[name], scale=0.7)
    aim = rng.normal(size=mixed.shape)
    gradients = torch.autograd.grad(mixed, inputs, torch.from_numpy(aim))
    allowed = np.broadcast_to(MASKS[name](np.arange(S - T, S)[:, None], np.arange(S)[None]), (T, S))
    grouped = q.reshape(2, 2, 3, T, 5), k[:, :, None], v[:, :, None]
    want = reference.attention(*grouped, mask=allowed, scale=0.7).reshape(2, 6, T, 7)
    close(mixed, torch.from_numpy(want))
    backward = reference.attention_backward(aim.reshape(2, 2, 3, T, 7), *grouped, mask=allowed, scale=0.7)
    for one, other in zip(gradients, backward[:3], strict=True):
        close(one, torch.from_numpy(other.reshape(one.shape)))


@pytest.mark.usefixtures("small_cells")
@pytest.mark.parametrize("name", ["window", "longformer", "bigbird", "past but not near"])
def test_how_many_tiles_and_heads_are_computed_together_changes_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [torch.randn(2, heads, 53, 4, dtype=torch.float64, requires_grad=True) for heads in (6, 3, 3)]
    found = []
    for cached in (1, 300, 3000, 2**20):
        monkeypatch.setattr(blocked, "CACHED", cached)
        mixed = sparse_attention(*inputs, MASKS[name])
        found.append([mixed, *torch.autograd.grad(mixed.sin().sum(), inputs)])
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            close(one, same)


def with_masks(names: list[str]) -> list[str]:
    """Every case of a mixer whose mask decides what is computed."""
    attention = {"Attention", "LatentAttention", "Longformer"}
    return [name for name in once_each(names) if "; pre" in name and kinds(CASES[name]) & attention]


@pytest.mark.usefixtures("small_cells")
@pytest.mark.parametrize("name", [*with_masks(SEQUENCES), "hybrid", "two windows"])
def test_models_by_tiles_equal_the_written_out(name: str) -> None:
    """Every mixer, with padding on either side, inside, and packed documents; forward and backward."""
    model, tokens = model_of(name), ids(BATCH, 19)
    left, right = torch.arange(19) >= torch.tensor([[0], [7], [3]]), torch.arange(19) < torch.tensor([[19], [5], [11]])
    holes = torch.arange(19) % 5 != torch.tensor([[7], [1], [2]])
    documents = torch.arange(19) // torch.tensor([[4], [19], [7]])
    options = [{}, {"readable": left}, {"readable": right}, {"readable": holes}, {"documents": documents}]
    for option in options:
        real = option.get("readable", torch.ones(BATCH, 19, dtype=torch.bool))
        fused, written = (model(tokens, fused=fused, **option)[real] for fused in (True, False))
        close(fused, written)
        weights = list(model.parameters())
        aim = torch.randn(fused.shape, generator=torch.Generator().manual_seed(1), dtype=fused.dtype)
        for one, other in zip(*(torch.autograd.grad((x * aim).sum(), weights) for x in (fused, written)), strict=True):
            close(one, other)


@pytest.mark.usefixtures("small_cells")
@pytest.mark.parametrize("name", with_masks(CAUSAL))
def test_decoding_by_tiles_in_pieces_equals_one_pass(name: str) -> None:
    model, tokens = sequence_model(name), ids(BATCH, 17)
    with torch.no_grad():
        state, whole = model.init_state(BATCH, 17), model(tokens, fused=False)
        close(torch.cat([model(piece, state=state) for piece in tokens.split((6, 1, 7, 3), dim=1)], dim=1), whole)


@pytest.mark.usefixtures("small_cells")
def test_dropout_is_the_same_backward_as_forward() -> None:
    plan = tiles.tiles_within((Causal() & Window(5),), 9)
    q, k, v = (torch.randn(2, 1, 9, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def mixed(*inputs: Tensor) -> Tensor:
        torch.manual_seed(5)
        return attention_by_tiles(inputs[:1], *inputs[1:], [plan], dropout=0.4)

    assert torch.autograd.gradcheck(mixed, (q, k, v), fast_mode=True)
    many = [x[:1].expand(200, -1, -1, -1).detach() for x in (q, k, v)]
    plain, drawn = (attention_by_tiles(many[:1], *many[1:], [plan], dropout=rate) for rate in (0.0, 0.4))
    assert ((drawn.mean(0) - plain[0]).abs() < 6 * drawn.std(0) / 200**0.5 + 1e-9).all()
    assert (drawn.std(0) > 1e-3).all()


class Largest(TorchDispatchMode):
    """The most numbers that any tensor had."""

    numbers = 0

    def __torch_dispatch__(self, function, kinds, arguments=(), keywords=None):
        made = function(*arguments, **(keywords or {}))
        if isinstance(made, Tensor) and not function.is_view:
            self.numbers = max(self.numbers, made.numel())
        return made


SPARSE = {
    "window": lambda n: Window(33),
    "causal window": lambda n: Causal() & Window(64),
    "longformer": lambda n: Window(33) | Global(2),
    "bigbird": lambda n: Blockwise(16, Window(2) | Global(1) | Scattered(3, among=n // 16)),
}


@pytest.mark.parametrize("name", SPARSE)
def test_work_and_memory_grow_with_the_length_alone(name: str) -> None:
    """Twice the length: twice the products and no tensor more than twice as large, forward and backward."""

    def run(n: int) -> tuple[int, int]:
        layer = MultiHeadAttention(AttentionConfig(heads=2, mask=SPARSE[name](n)), 16)
        x, positions = torch.randn(1, n, 16, requires_grad=True), torch.arange(n)[None]
        with FlopCounterMode(display=False) as flops, Largest() as largest:
            layer(x, Context(positions, positions, aligned=True)).sum().backward()
        return flops.get_total_flops(), largest.numbers

    (work, room), (more_work, more_room) = run(1024), run(2048)
    assert more_work < 2.2 * work
    assert more_room <= 2.2 * room
    assert more_room < 2048 * 2048 / 4


@pytest.mark.parametrize("padded", [False, True])
def test_no_table_of_all_pairs_for_a_long_text(padded: bool) -> None:
    n = 5000
    layer = MultiHeadAttention(AttentionConfig(heads=1, mask=Causal() & Window(100)), 4)
    positions = torch.arange(n)[None]
    readable = torch.arange(n)[None] < 4900 if padded else None
    with torch.no_grad(), Largest() as largest:
        mixed = layer(torch.randn(1, n, 4), Context(positions, positions, readable))
    assert mixed.isfinite().all()
    assert largest.numbers < n * n / 20
