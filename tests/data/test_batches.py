"""Batches are a function of seed and step, cover the corpus, and keep documents apart; so do evaluation's windows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from clearhead.configs.data import CharactersConfig
from clearhead.data import IGNORED, Batch, Batches, DataError, Document, Shards, build, windows
from clearhead.data.hashing import derive_keys, permute
from clearhead.tokenize import make

from .tools import by_bytes, plain


def numbered(count: int, folder: Path) -> Shards:
    """One document in which each token is its own place."""
    text = "".join(map(chr, range(0x4E00, 0x4E00 + count)))
    return build(plain(text), make(CharactersConfig(), [text]), folder)


def scored(batch: Batch) -> list[int]:
    return batch.targets[batch.targets != IGNORED].tolist()


@pytest.mark.parametrize("context", [1, 2, 7, 8, 11, 50, 99, 100, 101, 150])
@pytest.mark.parametrize("count", [2, 3, 100, 101, 104, 111])
def test_every_token_is_a_target_once_an_epoch(count: int, context: int, tmp_path: Path) -> None:
    batches = Batches(numbered(count, tmp_path), batch=1, context=context, seed=5)
    orders = []
    for epoch in range(4):
        rows = [batches.at(epoch * batches.rows + step) for step in range(batches.rows)]
        targets = [target for row in rows for target in scored(row)]
        assert sorted(targets) == list(range(1, count))
        assert all(scored(row) for row in rows), "no row is empty"
        for row in rows:
            assert row.inputs.shape == row.targets.shape == (1, context)
            learned = row.targets != IGNORED
            np.testing.assert_array_equal(row.inputs[learned] + 1, row.targets[learned])
        orders.append(targets)
    assert batches.rows <= (count - 1) / context + 2
    if batches.rows > 9:
        assert len({tuple(order) for order in orders}) == 4, "each epoch has its own order"


def test_words_change_their_places(tmp_path: Path) -> None:
    """Where the windows begin differs from epoch to epoch."""
    for count in (1000, 1005, 1030, 1020):
        batches = Batches(numbered(count, tmp_path / str(count)), batch=1, context=32, seed=0)
        firsts = {int(batches.at(step).inputs[0, 0]) % 32 for step in range(40 * batches.rows)}
        assert len(firsts) >= 12


def test_a_row_depends_on_its_number_alone(tmp_path: Path) -> None:
    shards = numbered(5000, tmp_path)

    def rows(batch: int, steps: int) -> np.ndarray:
        batches = Batches(shards, batch=batch, context=13, seed=7)
        return np.concatenate([batches.at(step).targets for step in range(steps)])

    want = rows(1, 240)
    np.testing.assert_array_equal(rows(12, 20), want)
    np.testing.assert_array_equal(rows(80, 3), want)
    batches = Batches(shards, batch=12, context=13, seed=7)
    for step in (19, 0, 70, 3):  # in any order, and by any number of processes
        whole = batches.at(step)
        shares = [batches.at(step, slice(rank * 4, rank * 4 + 4)) for rank in range(3)]
        np.testing.assert_array_equal(whole.inputs, np.concatenate([share.inputs for share in shares]))
    assert not np.array_equal(Batches(shards, batch=12, context=13, seed=8).at(0).inputs, batches.at(0).inputs)


def test_the_order_is_the_same_on_every_machine(tmp_path: Path) -> None:
    """A golden: a change here breaks the resuming of every run that was begun before it."""
    batches = Batches(numbered(1000, tmp_path), batch=6, context=10, seed=42)
    assert [int(row) for step in (0, 1000) for row in batches.at(step).inputs[:, 0]] == GOLDEN


GOLDEN = [547, 207, 967, 917, 707, 427, 758, 0, 388, 728, 888, 868]


def test_shards_make_no_difference(tmp_path: Path) -> None:
    pieces = [Document(str(n), ((f"{n} asks: ", False), ("x" * (n % 17), True))) for n in range(300)]
    one, many = by_bytes(pieces, tmp_path / "1"), by_bytes(pieces, tmp_path / "n", shard_tokens=100)
    for step in range(100):
        a, b = (Batches(shards, batch=3, context=29, seed=1).at(step) for shards in (one, many))
        np.testing.assert_array_equal(a.inputs, b.inputs)
        np.testing.assert_array_equal(a.targets, b.targets)
        assert a.documents is not None
        np.testing.assert_array_equal(a.documents, b.documents)


def test_documents_are_kept_apart(tmp_path: Path) -> None:
    shards = by_bytes(plain("abcd", "ef", "ghijklm"), tmp_path)
    (batch,) = windows(shards, 15)
    end, no = 256, IGNORED
    assert batch.inputs[0].tolist() == [*b"abcd", end, *b"ef", end, *b"ghijklm"]
    assert batch.targets[0].tolist() == [*b"bcd", end, no, *b"f", end, no, *b"hijklm", end]
    assert batch.documents is not None
    assert batch.documents[0].tolist() == [0] * 5 + [1] * 3 + [2] * 7
    (together,) = windows(shards, 15, apart=False)
    assert together.documents is None
    assert together.targets[0].tolist() == [*b"bcd", end, *b"ef", end, *b"ghijklm", end]


def test_no_documents_where_no_row_has_an_edge(tmp_path: Path) -> None:
    shards = by_bytes(plain("a" * 9, "b" * 30), tmp_path)  # 0–9 are a's and their end, 10–40 b's
    found = list(windows(shards, 10))
    assert [batch.documents is None for batch in found] == [True, True, True, True]
    assert found[0].targets[0].tolist() == [97] * 8 + [256, IGNORED], "the first of the next is nobody's target"
    assert next(windows(shards, 11)).documents.tolist() == [[0] * 10 + [1]]  # type: ignore[union-attr]
    both = next(windows(shards, 11, batch=2))
    assert both.documents is not None
    assert both.documents[1].tolist() == [0] * 11


def test_loss_is_taken_on_the_answers_only(tmp_path: Path) -> None:
    pieces = (("ask ", False), ("yes", True), (" more ", False), ("no", True))
    shards = by_bytes([Document("chat", pieces)], tmp_path)
    (batch,) = windows(shards, 15)
    shown = "".join(chr(target) if target < 256 else "$" for target in scored(batch))
    assert shown == "yesno$"
    assert [int(i) for i in np.flatnonzero(batch.targets[0] != IGNORED)] == [3, 4, 5, 12, 13, 14]


def test_a_corpus_shorter_than_the_context_is_padded(tmp_path: Path) -> None:
    shards = by_bytes(plain("ab", "cd"), tmp_path)
    for batch in (Batches(shards, batch=1, context=9, seed=0).at(0), next(windows(shards, 9))):
        assert batch.inputs[0].tolist() == [97, 98, 256, 99, 100, 0, 0, 0, 0]
        assert batch.targets[0].tolist() == [98, 256, IGNORED, 100, 256, *[IGNORED] * 4]
        assert batch.documents is not None
        assert batch.documents[0].tolist() == [0, 0, 0, 1, 1, -1, -1, -1, -1]


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize(("context", "stride"), [(10, None), (10, 10), (10, 3), (10, 1), (1, 1), (200, 7)])
@pytest.mark.parametrize("count", [2, 11, 12, 100])
def test_evaluation_sees_every_token_once(
    count: int, context: int, stride: int | None, batch: int, tmp_path: Path
) -> None:
    found = list(windows(numbered(count, tmp_path), context, stride, batch=batch))
    assert [target for window in found for target in scored(window)] == list(range(1, count))
    for window in found:
        learned = window.targets != IGNORED
        np.testing.assert_array_equal(window.inputs[learned] + 1, window.targets[learned])
        for row in range(len(window.inputs)):
            for at in np.flatnonzero(learned[row]):
                token = int(window.targets[row, at])
                full = min(token, context)
                assert full >= at + 1 >= min(full, context - (stride or context) + 1)


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    shards = numbered(20, tmp_path / "a")
    with pytest.raises(DataError, match="the stride is 9, but must be between 1 and the context, 8"):
        next(windows(shards, 8, 9))
    with pytest.raises(DataError, match="the context is 0, but must be at least 1"):
        Batches(shards, batch=1, context=0, seed=0)
    with pytest.raises(DataError, match="the batch is 0, but must be at least 1"):
        Batches(shards, batch=0, context=3, seed=0)
    with pytest.raises(DataError, match="the corpus is a single token, so there is nothing to predict"):
        Batches(numbered(1, tmp_path / "b"), batch=1, context=3, seed=0)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 97, 1000])
def test_shuffling_is_a_permutation_and_a_fair_one(count: int) -> None:
    places = np.arange(count)
    sums, trials = Counter(), 300
    for seed in range(trials):
        result = permute(places, count, derive_keys(seed, np.zeros(count, dtype=np.int64)))
        assert sorted(result.tolist()) == places.tolist()
        sums[int(result[0]) * 4 // count] += 1
    if count >= 97:
        assert all(abs(sums[quarter] - trials / 4) < 5 * (trials * 3 / 16) ** 0.5 for quarter in range(4))
        assert abs(np.corrcoef(result, places)[0, 1]) < 5 / count**0.5
