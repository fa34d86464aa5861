"""Pairs: read from files, split, batched by length; and the dates that need no file."""

from __future__ import annotations

import gzip
import re
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from clearhead.configs.data import BytesConfig
from clearhead.data import IGNORED, DataError, Shards, build
from clearhead.data.pairs import PairBatches, Pairs, cut_batches, pairs
from clearhead.tokenize import Tokenizer, make


def written(tmp_path: Path, **files: str) -> list[Path]:
    found = []
    for name, text in files.items():
        path = tmp_path / name.replace("_", ".")
        data = text.encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        found.append(path)
    return found


def test_two_files_and_a_table_gzipped_or_not_give_the_same_pairs(tmp_path: Path) -> None:
    wanted = [("one", "eins"), ("two words", "zwei Wörter")]
    aligned = written(tmp_path, a_en="one\ntwo words\n", a_de_gz="eins\nzwei Wörter\n")
    assert list(pairs(aligned)) == wanted
    for name in ("t_tsv", "t_tsv_gz"):
        assert list(pairs(written(tmp_path, **{name: "one\teins\ntwo words\tzwei Wörter\tmore\n"}))) == wanted
    assert list(pairs([*aligned, *written(tmp_path, t_tsv="x\ty\n")])) == [("x", "y"), *wanted]


def test_a_pair_with_an_empty_side_is_passed_over_and_odd_line_ends_stay_in_their_line(tmp_path: Path) -> None:
    files = written(tmp_path, a_en="one\n\n three\r\nfo\u2028ur\n", a_de="eins\nzwei\ndrei\nvier")
    assert list(pairs(files)) == [("one", "eins"), ("three", "drei"), ("fo\u2028ur", "vier")]


@pytest.mark.parametrize("first", ["1\n2\n3\n", "1\n"])
def test_files_of_different_length_are_refused(tmp_path: Path, first: str) -> None:
    files = written(tmp_path, a_en=first, a_de="1\n2\n")
    count = first.count("\n")
    longer, shorter = (files[0], files[1]) if count > 2 else (files[1], files[0])
    message = f"{longer} has {max(count, 2)} lines, but {shorter} has {min(count, 2)}"
    with pytest.raises(DataError, match=re.escape(message)):
        list(pairs(files))


def test_files_that_hold_no_pairs_are_refused(tmp_path: Path) -> None:
    (one,) = written(tmp_path, a_en="1\n")
    with pytest.raises(DataError, match=r"a\.en is alone"):
        pairs([one])
    with pytest.raises(DataError, match="nowhere is not a file"):
        pairs([one, tmp_path / "nowhere"])
    with pytest.raises(DataError, match=r"t\.tsv, line 2 has no tab"):
        list(pairs(written(tmp_path, t_tsv="a\tb\nc d\n")))
    blank = pairs(written(tmp_path, blank_tsv="a\tb\n\nc\td\textra\n"))
    assert list(blank.read()) == [("a", "b"), ("", ""), ("c", "d")]
    assert list(blank) == [("a", "b"), ("c", "d")]
    broken = tmp_path / "b.tsv.gz"
    broken.write_bytes(gzip.compress(b"a\tb\n" * 1000)[:30])
    with pytest.raises(DataError, match="damaged or cut short"):
        list(pairs([broken]))
    (tmp_path / "latin.tsv").write_bytes("é\tb\n".encode("latin-1"))
    with pytest.warns(UserWarning, match=r"latin\.tsv is not UTF-8; its other bytes were read as Windows-1252"):
        assert list(pairs([tmp_path / "latin.tsv"])) == [("é", "b")]


def test_a_split_is_of_whole_pairs_and_the_same_whenever_asked() -> None:
    all_of_them = [(str(i), str(-i)) for i in range(1, 1000)]
    training, validation = Pairs(lambda: iter(all_of_them), "numbers").split(0.1, seed=3)
    assert sorted([*training, *validation]) == sorted(all_of_them)
    assert len(list(validation)) == pytest.approx(100, abs=1)
    assert list(validation) == list(validation)


# ---- batches


def sides(tmp_path: Path, count: int = 300, seed: int = 0) -> tuple[Shards, Shards, Tokenizer]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, (count, 2))
    texts = [("a" * s, "b" * t) for s, t in lengths.tolist()]
    known = Pairs(lambda: iter(texts), "letters")
    tokenizer = make(BytesConfig(), [])
    source, target = (build(known.side(n), tokenizer, tmp_path / str(n)) for n in (0, 1))
    return source, target, tokenizer


def test_an_epoch_has_every_pair_once_and_no_batch_is_too_large(tmp_path: Path) -> None:
    source, target, tokenizer = sides(tmp_path)
    batches = PairBatches(source, target, "training", tokens=256, length=40, seed=1, start=tokenizer.end)
    count = len(batches.cuts)
    lengths: list[tuple[int, int]] = []
    for step in range(count):
        batch = batches.at(step)
        assert batch.inputs.shape == batch.targets.shape
        assert max(batch.source.size, batch.inputs.size) <= 256
        readable = np.ones_like(batch.source, dtype=bool) if batch.readable is None else batch.readable
        real = (batch.targets != IGNORED).sum(axis=1)
        lengths += zip(readable.sum(axis=1).tolist(), real.tolist(), strict=True)
        assert (batch.source[~readable] == 0).all()
        assert (batch.inputs[:, 0] == tokenizer.end).all()
        for row, n in zip(range(len(real)), real.tolist(), strict=True):
            assert batch.targets[row, n - 1] == tokenizer.end
            assert (batch.inputs[row, 1:n] == batch.targets[row, : n - 1]).all()
    wanted = zip(*(np.diff(np.append(s.document_starts, len(s))).tolist() for s in (source, target)), strict=True)
    assert sorted(lengths) == sorted(wanted)


def test_a_batch_is_a_function_of_its_step_and_epochs_differ(tmp_path: Path) -> None:
    source, target, tokenizer = sides(tmp_path)
    a, b = (
        PairBatches(source, target, "training", tokens=256, length=40, seed=1, start=tokenizer.end) for _ in range(2)
    )
    count = len(a.cuts)
    for step in (0, 3 * count + 1, 2):  # b is asked out of order
        a.at(count)
        assert (a.at(step).source == b.at(step).source).all()
    shapes = [[a.at(epoch * count + step).inputs.shape for step in range(count)] for epoch in (0, 1)]
    assert shapes[0] != shapes[1]
    whole, parts = a.at(5), [a.at(5, first, last) for first, last in ((0, 0.5), (0.5, 1))]
    assert sum(len(part.inputs) for part in parts) == len(whole.inputs)


def test_parts_of_a_batch_have_its_targets_once_and_none_is_without_a_row(tmp_path: Path) -> None:
    source, target, tokenizer = sides(tmp_path)
    batches = PairBatches(source, target, "training", tokens=60, length=40, seed=1, start=tokenizer.end)
    few = 0
    for step in range(len(batches.cuts)):
        parts = [batches.at(step, n / 8, (n + 1) / 8) for n in range(8)]
        assert all(len(part.inputs) == len(part.source) > 0 for part in parts)
        counts = [int((part.targets != IGNORED).sum()) for part in parts]
        assert sum(counts) == int((batches.at(step).targets != IGNORED).sum())
        few += 0 in counts
    assert few > 0


def test_what_is_held_out_is_read_in_a_mixture_of_lengths(tmp_path: Path) -> None:
    source, target, tokenizer = sides(tmp_path)
    batches = PairBatches(source, target, "validation", tokens=256, length=40, seed=0, start=tokenizer.end)
    widths = [batch.targets.shape[1] for batch in batches.all()]
    assert widths != sorted(widths)
    half = len(widths) // 2
    assert np.mean(widths[:half]) == pytest.approx(np.mean(widths[half:]), rel=0.4)
    assert sum(len(batch.inputs) for batch in batches.all()) == 300


def test_the_batches_hold_little_padding(tmp_path: Path) -> None:
    source, target, tokenizer = sides(tmp_path, count=3000)
    batches = PairBatches(source, target, "training", tokens=512, length=40, seed=1, start=tokenizer.end)
    found = list(batches.all())
    real = sum(int((batch.targets != IGNORED).sum()) for batch in found)
    assert real / sum(batch.targets.size for batch in found) > 0.9  # at random, half of it would be padding


def test_pairs_that_are_too_long_are_skipped_and_counted(tmp_path: Path) -> None:
    source, target, tokenizer = sides(tmp_path)
    batches = PairBatches(source, target, "training", tokens=256, length=16, seed=1, start=tokenizer.end)
    assert batches.skipped > 0
    assert len(batches) + batches.skipped == 300
    assert all(max(batch.source.shape[1], batch.inputs.shape[1]) <= 16 for batch in batches.all())
    with pytest.raises(DataError, match="every one of 300 pairs for training is longer than 1 tokens"):
        PairBatches(source, target, "training", tokens=256, length=1, seed=1, start=tokenizer.end)


def test_cuts_fill_a_batch_and_a_row_that_is_too_wide_stands_alone() -> None:
    assert cut_batches(np.array([2, 2, 2, 3, 3, 50, 1]), 8) == [(0, 3), (3, 5), (5, 6), (6, 7)]


# ---- dates


def test_dates_are_read_and_written_and_the_days_held_out_are_in_no_training_pair() -> None:
    pytest.importorskip("babel")
    from clearhead.data.dates import LANGUAGES, dates, is_unambiguous

    training, validation = (list(part) for part in dates(0.1, seed=1))

    def days(found: list[tuple[str, str]]) -> set[date]:
        isos = [re.search(r"\d{4}-\d\d-\d\d$", s) or re.search(r"^\d{4}-\d\d-\d\d$", t) for s, t in found]
        return {date.fromisoformat(iso.group()) for iso in isos if iso is not None}

    assert len(days(training)) > 30000
    assert not days(training) & days(validation)
    known = dict(training + validation)
    assert all(known[source] == target for source, target in training + validation)  # one reading each
    assert sum(source.split()[0] in LANGUAGES for source, _ in validation) >= len(validation) // 2
    assert not is_unambiguous("de", "medium")  # 01.02.2019
    assert is_unambiguous("de", "long")
    assert is_unambiguous("ja", "medium")
