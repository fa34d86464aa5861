"""`clearhead translate` and `clearhead eval --pairs` as a person types them, and what they stand on."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import clearhead as package
from clearhead.configs import BytesConfig, Wu
from clearhead.generate.complete import Completion, TextGenerator, complete_batch
from clearhead.inspect.alignment import alignment, inspect_translation
from clearhead.measure.bleu import Moses, bleu, chrf, scores, tokenised_bleu
from clearhead.tasks.translate import Translating, complete_in_workers, translate
from clearhead.tokenize import make

from .test_generate import error_of, run, run_json

LINES = ["abc", "", "a longer line than the first", "x", "  ", "yes", "ünknown ✓ letters 日本", "abc"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An encoder–decoder of random weights that ends its texts now and then."""
    config = package.preset("tiny-transformer")
    config = replace(config, source=replace(config.source, vocabulary=257), head=replace(config.head, vocabulary=257))
    torch.manual_seed(3)
    model = package.build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        model.source.tokens.weight[128:256].zero_()  # bytes of ASCII only
    path = tmp_path_factory.mktemp("model")
    model.save(path, tokenizer=make(BytesConfig(), []).with_end())
    (path / "generation_config.json").write_text(json.dumps({"decoder_start_token_id": 256, "eos_token_id": 256}))
    return str(path)


def test_a_line_is_translated_alone_or_in_company_in_its_place(folder: str, tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    result = run("translate", folder, str(file), "--batch", "3", "-m", "12")
    assert result.returncode == 0, result.stderr
    found = result.stdout.removesuffix("\n").split("\n")
    model = package.load(folder)
    alone = [translate(model, [line], max_new_tokens=12)[0][0].text for line in LINES]
    assert found == alone
    assert [not line for line in found] == [not line.strip() for line in LINES]
    assert len(set(found)) > 3
    assert run("translate", folder, "-m", "12", typed=file.read_text(encoding="utf-8")).stdout == result.stdout
    assert run("translate", folder, typed="").stdout == ""


def test_workers_write_what_one_writes(folder: str) -> None:
    model, progress = package.load(folder), []
    found = translate(model, LINES, max_new_tokens=8, workers=2, batch=2, progress=progress.append)
    alone = translate(model, LINES, max_new_tokens=8)
    assert [[one.tokens for one in best] for best in found] == [[one.tokens for one in best] for best in alone]
    assert progress[-1] == len(LINES)
    assert [one.prompt for (one,) in found] == list(range(len(LINES)))


def test_the_options_are_those_of_the_search(folder: str) -> None:
    model = package.load(folder)
    for beam, alpha in ((1, 0.6), (4, 0.0), (4, 1.5)):
        options = {"max_new_tokens": 12, "beams": beam, "length_penalty": Wu(alpha)}
        (wanted,) = model.generate("abc", **options)
        asked = ("--beams", str(beam), "--length-penalty", f"wu:{alpha}", "-m", "12")
        assert run("translate", folder, *asked, typed="abc\n").stdout == wanted.text.strip() + "\n"
    (best,) = translate(model, ["abc"], beams=4, n=4, max_new_tokens=12)
    assert [one.score for one in best] == sorted((one.score for one in best), reverse=True)
    assert len({tuple(one.tokens) for one in best}) == 4
    lines = run("translate", folder, "--beams", "4", "-n", "2", "-m", "12", typed="abc\nx\n").stdout.split("\n")
    assert [line.split("\t")[0] for line in lines[:4]] == ["1", "1", "2", "2"]
    assert float(lines[0].split("\t")[1]) >= float(lines[1].split("\t")[1])
    as_json = json.loads(run("translate", folder, "--json", "-m", "12", typed="abc\n\n").stdout)
    assert [line["source"] for line in as_json["lines"]] == ["abc", ""]
    assert as_json["lines"][1]["translations"] == [{"text": "", "score": 0.0, "reason": "end"}]


def test_wus_penalty_is_the_default_and_divides_as_the_paper_says(folder: str) -> None:
    model = package.load(folder)
    (best,) = translate(model, ["abc"], max_new_tokens=12, n=3)
    for one in best:
        with torch.no_grad():
            logprobs = model(torch.tensor([[97, 98, 99, 256]]), torch.tensor([[256, *one.tokens[:-1]]])).log_softmax(-1)
        total = logprobs[0].gather(1, torch.tensor(one.tokens)[:, None]).sum().item()
        assert one.score == pytest.approx(total / ((5 + len(one.tokens)) ** 0.6 / (5 + 1) ** 0.6), abs=1e-4)


def test_a_very_long_line_is_bounded_and_it_is_said(folder: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        result = run("translate", folder, "--beams", "1", "-m", "3", typed="x\n" + "ab" * 400 + "\n")
    assert result.returncode == 0, result.stderr
    assert "line 2 has 801 tokens; only the first 512 are translated" in result.stderr
    assert result.stdout.count("\n") == 2


def test_a_text_that_comes_to_no_end_is_cut_off_and_it_is_said(folder: str) -> None:
    result = run("translate", folder, "--beams", "1", "-m", "2", typed="abc\n\na longer line\nx\n")
    assert "the translation of line 1 (3 in all) reached the length limit and was cut off" in result.stderr
    model = package.load(folder)
    task = Translating.of(model, beams=1)
    assert task.limit([1] * 100) == 332
    assert Translating.of(model, beams=1, max_new_tokens=7).limit([1] * 100) == 7


def test_an_end_that_was_forced_is_no_end(folder: str) -> None:
    model = package.load(folder)
    for beams in (1, 3):
        found = translate(model, ["abc", "x"], beams=beams, max_new_tokens=2, forced_end=256)
        assert [(best.tokens[-1], best.reason) for (best,) in found] == [(256, "length")] * 2


def test_whatever_a_source_holds_is_only_text(folder: str) -> None:
    task = Translating.of(package.load(folder))
    assert task.read("a<|endoftext|>b") == [*b"a<|endoftext|>b", 256]


def test_one_beam_is_greedy_even_where_the_checkpoint_asks_for_drawing(folder: str, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "drawn")
    asked = {"decoder_start_token_id": 256, "eos_token_id": 256, "do_sample": True, "temperature": 5.0}
    (tmp_path / "drawn" / "generation_config.json").write_text(json.dumps(asked))
    drawn, plain = (translate(package.load(path), LINES, beams=1) for path in (tmp_path / "drawn", folder))
    assert [best.tokens for (best,) in drawn] == [best.tokens for (best,) in plain]


def test_a_translation_is_one_line_whatever_it_holds(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = [[Completion(0, "a\nb\tc", [1], "end", score=-1.0)]]
    monkeypatch.setattr("clearhead.cli.translate.translate_texts", lambda *given, **options: written)
    assert run("translate", folder, typed="x\n").stdout == "a b c\n"
    assert run("translate", folder, "-n", "2", typed="x\n").stdout == "1\t-1.0000\ta b c\n"


def test_standard_input_is_read_as_files_are(folder: str) -> None:
    empty = run("translate", folder, "-m", "4", typed="\n")
    assert empty.stdout == "\n"
    marked, plain = (run("translate", folder, "-m", "4", typed=text).stdout for text in ("\ufeffabc\n", "abc\r\n"))
    assert marked == plain


def test_who_leaves_early_leaves_nobody_behind(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(task: TextGenerator, part: list) -> list[Completion]:
        with (tmp_path / "parts").open("a") as file:
            file.write(".")
        return complete_batch(task, part)

    monkeypatch.setattr("clearhead.tasks.translate.complete_batch", counted)
    task = Translating.of(package.load(folder), beams=1, max_new_tokens=4)
    parts = [[(i, [97, 98, 256])] for i in range(40)]
    some = complete_in_workers(task, parts, 2)
    assert next(some)[0].reason in ("end", "length")
    some.close()
    assert multiprocessing.active_children() == []
    assert len((tmp_path / "parts").read_text()) <= 4


def test_a_process_that_is_killed_is_said_to_be(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.tasks.translate.complete_batch", lambda task, part: os._exit(9))
    with pytest.raises(ValueError, match=r"a worker process was killed, .*; use a smaller batch"):
        translate(package.load(folder), LINES, workers=2)


def test_what_cannot_be_translated_is_one_sentence(folder: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = tmp_path / "gpt"
    package.build(package.preset("tiny-gpt")).save(plain, tokenizer=make(BytesConfig(), []))
    assert "a SequenceModel has no encoder, so it cannot translate" in error_of("translate", str(plain))
    assert "-n" in run("translate", "--help").stdout
    assert "n=3 is more than beams=2" in error_of("translate", folder, "--beams", "2", "-n", "3")
    assert "batch is 0" in error_of("translate", folder, "--batch", "0")
    assert "alpha of the length penalty is 1000.0, but" in error_of("translate", folder, "--length-penalty", "wu:1000")
    (tmp_path / "latin").write_bytes("é\n".encode("latin-1"))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        latin = run("translate", folder, str(tmp_path / "latin"))
    assert latin.returncode == 0
    assert "latin is not UTF-8; its other bytes were read as Windows-1252" in latin.stderr
    assert "cannot read" in error_of("translate", folder, str(tmp_path / "nowhere"))
    assert "transformer-base is a preset, which has no weights" in error_of("translate", "transformer-base")


def test_the_alignment_is_the_mean_of_the_cross_attention(folder: str, tmp_path: Path) -> None:
    model = package.load(folder)
    ((best,),) = translate(model, ["abc"], max_new_tokens=8)
    grid = alignment(inspect_translation(model, "abc", best), best)
    taps = package.Taps(read=["decoder.blocks.*.cross.weights"])
    target = torch.tensor([[256, *best.tokens[:-1]]])
    with torch.no_grad():
        model(torch.tensor([[97, 98, 99, 256]]), target, taps=taps)
    wanted = torch.stack([weights[0].mean(0) for weights in taps.values.values()]).mean(0)
    np.testing.assert_allclose(grid.values, wanted.numpy(), atol=1e-6)
    assert len(grid.rows) == len(best.tokens)
    ((cut,),) = translate(model, ["abc"], max_new_tokens=2)
    assert cut.reason == "length"
    looked = inspect_translation(model, "abc", cut)
    assert alignment(looked, cut).rows[-1] == looked.model_input.token_text(cut.tokens[-1]) != "end"
    assert len(alignment(inspect_translation(model, "ab" * 400, cut), cut).columns) == 512
    for name in ("a.svg", "a.html", "a.csv"):
        result = run("translate", folder, "-m", "8", "--attention", str(tmp_path / name), typed="\nabc\n")
        assert result.returncode == 0, result.stderr
        assert f"drew line 2 to {tmp_path / name}" in result.stderr
        assert (tmp_path / name).stat().st_size > 100
    assert "'.doc', but must end in one of" in run("translate", folder, "--attention", "a.doc", typed="x\n").stderr
    assert "all lines are empty" in run("translate", folder, "--attention", "a.svg", typed="\n\n").stderr


# ---- scores


def bleu_by_hand(written: list[str], wanted: list[str]) -> float:
    """Papineni et al. (2002), of tokens between spaces."""
    right, count, lengths = [0] * 4, [0] * 4, [0, 0]
    for one, other in zip(written, wanted, strict=True):
        a, b = one.split(), other.split()
        lengths = [lengths[0] + len(a), lengths[1] + len(b)]
        for n in range(4):
            grams = [Counter(tuple(side[i : i + n + 1]) for i in range(len(side) - n)) for side in (a, b)]
            right[n] += sum((grams[0] & grams[1]).values())
            count[n] += max(len(a) - n, 0)
    brevity = min(0.0, 1 - lengths[1] / lengths[0])
    return 100 * math.exp(brevity + sum(math.log(r / c) for r, c in zip(right, count, strict=True)) / 4)


WRITTEN = ["The cat sat on the mat, and it was happy.", "A well-known man (of Rome) walks his dog  today."]
WANTED = ["the cat sat on the Mat, and was it happy?", "A well-known man (from Rome) walks a dog today."]


def test_the_figures_are_what_they_say_and_each_is_named() -> None:
    import sacrebleu

    found = scores(WRITTEN, WANTED)
    assert [one.name for one in found] == ["BLEU", "chrF2", "BLEU, lower-cased and tokenised"]
    assert found[0].score == pytest.approx(sacrebleu.corpus_bleu(WRITTEN, [WANTED]).score)
    assert found[1].score == pytest.approx(sacrebleu.corpus_chrf(WRITTEN, [WANTED]).score)
    moses = Moses("en")
    assert moses("The cat's “well-known” mat, he said.") == "the cat &apos;s &quot; well-known &quot; mat , he said ."
    by_hand = bleu_by_hand([moses(text) for text in WRITTEN], [moses(text) for text in WANTED])
    assert found[2].score == pytest.approx(by_hand)
    assert "tok:13a" in found[0].signature
    assert "case:mixed" in found[0].signature
    assert "moses:en:" in found[2].signature
    assert "case:lc" in found[2].signature
    assert "tok:zh" in scores(WRITTEN, WANTED, "zh")[0].signature
    assert (bleu(WANTED, WANTED).score, chrf(WANTED, WANTED).score) == pytest.approx((100, 100))
    assert tokenised_bleu([text.upper() for text in WANTED], WANTED).score == pytest.approx(100)
    with pytest.raises(ValueError, match="1 translations of 2 texts"):
        bleu(["a"], ["a", "b"])


def test_pairs_are_scored_from_the_command_line(folder: str, tmp_path: Path) -> None:
    model = package.load(folder)
    sources = ["abc", "x", "a longer line than the first", "yes"]
    wanted = [translate(model, [line])[0][0].text for line in sources[:3]] + ["something else"]
    files = tmp_path / "test.en", tmp_path / "test.de"
    for file, texts in zip(files, (sources, wanted), strict=True):
        file.write_text("\n".join(text.strip() or "?" for text in texts) + "\n", encoding="utf-8")
    paths = ("--pairs", str(files[0]), "--pairs", str(files[1]))
    found = run_json("eval", folder, *paths, "--json")["pairs"]
    assert found["sentences"] == 4
    assert found["exact"] == 0.75
    assert [score["name"] for score in found["scores"]] == ["BLEU", "chrF2", "BLEU, lower-cased and tokenised"]
    assert "moses:de:" in found["scores"][2]["signature"]
    output = run("eval", folder, *paths).stdout
    assert output.startswith("4 sentences, 75.0% exact matches\nBLEU ")
    assert f"chrF2 {found['scores'][1]['score']:.2f}  nrefs:1|" in output
    files[1].write_text("one\n\nthree\nfour\n")
    assert run_json("eval", folder, *paths, "--json")["pairs"]["sentences"] == 4
    files[1].write_text("one\n")
    assert "has 4 lines, but" in error_of("eval", folder, *paths)
    assert "give FILES, or --pairs" in error_of("eval", folder)
    empty = tmp_path / "empty.tsv"
    empty.write_text("\t\n")
    assert "there are no pairs in" in error_of("eval", folder, "--pairs", str(empty))


def test_what_is_said_of_a_line_has_its_number_in_the_file(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def repeated(model: object, texts: list[str], *options: object) -> list[list[Completion]]:
        assert texts == ["abc", "", "x", ""], "all lines are handed over, though an empty pair is not scored"
        return [[Completion(i, text, [], "end")] for i, text in enumerate(texts)]

    monkeypatch.setattr("clearhead.cli.eval.translate_texts", repeated)
    (tmp_path / "test.tsv").write_text("abc\tabc\n\nx\ty\n\tz\n")
    found = run_json("eval", folder, "--pairs", str(tmp_path / "test.tsv"), "--json")["pairs"]
    assert (found["sentences"], found["exact"]) == (3, 1 / 3)
