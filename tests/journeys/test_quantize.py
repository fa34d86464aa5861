"""`clearhead quantize` and `--weights`, as typed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import clearhead
from clearhead.cli.main import cli
from clearhead.configs import Int4
from clearhead.configs.data import CharactersConfig
from clearhead.models.gpt import gpt
from clearhead.models.llama import llama
from clearhead.tokenize import make

TEXT = "the cat sat on the mat, and the dog sat by the cat. " * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    tokenizer = make(CharactersConfig(), [TEXT])
    model = clearhead.build(llama(dim=32, layers=1, heads=2, hidden=48, vocabulary=tokenizer.vocabulary))
    model.save(place / "whole", tokenizer=tokenizer, extra={"max_position_embeddings": 64})
    (place / "text.txt").write_text(TEXT, encoding="utf-8")
    return place


def run(*words: object) -> str:
    result = CliRunner().invoke(cli, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_quantize_writes_a_model_that_goes_on_and_says_what_it_costs(folder: Path) -> None:
    output = run("quantize", folder / "whole", folder / "small", "--weights", "int4", "--text", folder / "text.txt")
    assert "in int4" in output
    assert "before: " in output
    small = clearhead.load(folder / "small")
    assert small.precision == Int4()
    written = run("generate", folder / "small", "the ", "-m", 8)
    assert written == run("generate", folder / "small", "the ", "-m", 8)
    wanted = run("generate", folder / "whole", "the ", "-m", 8)
    assert run("generate", folder / "whole", "the ", "-m", 8, "--weights", "float32") == wanted


def test_rows_are_no_longer_than_the_model_reads(folder: Path) -> None:
    torch.manual_seed(0)
    tokenizer = make(CharactersConfig(), [TEXT])
    model = clearhead.build(gpt(dim=32, layers=1, heads=2, vocabulary=tokenizer.vocabulary, length=48))
    model.save(folder / "short", tokenizer=tokenizer)
    text = folder / "text.txt"
    assert "in int4" in run("quantize", folder / "short", folder / "few", "--weights", "int4", "--text", text)


def test_what_cannot_tell_its_loss_is_said_before_anything_is_written(folder: Path) -> None:
    tokenizer = make(CharactersConfig(), [TEXT])
    model = clearhead.build(clearhead.preset("tiny-bert").with_value("embedding.vocabulary", tokenizer.vocabulary))
    model.save(folder / "bert", tokenizer=tokenizer)
    with pytest.raises(ValueError, match="cannot generate text"):
        run("quantize", folder / "bert", folder / "bert-small", "--text", folder / "text.txt")
    assert not (folder / "bert-small").exists()


def test_eval_in_few_bits_is_near(folder: Path) -> None:
    plain = run("eval", folder / "whole", folder / "text.txt")
    quick = run("eval", folder / "whole", folder / "text.txt", "--weights", "int8")
    first, second = (float(output.split("perplexity ")[1].split(",")[0]) for output in (plain, quick))
    assert first == pytest.approx(second, rel=0.02)


def test_what_is_quantised_is_not_exported(folder: Path) -> None:
    run("quantize", folder / "whole", folder / "eight")
    for form in ("hf", "gguf", "onnx"):
        with pytest.raises(ValueError, match="own format; export the model it was made from"):
            run("export", folder / "eight", "--to", form, folder / "out", "--dtype", "f16")
        assert not (folder / "out").exists()


def test_a_model_or_a_run_is_not_written_over(folder: Path) -> None:
    before = (folder / "whole" / "model.safetensors").read_bytes()
    for words in (
        ["quantize", folder / "whole", folder / "whole"],
        ["export", folder / "whole", "--to", "hf", folder / "whole"],
    ):
        with pytest.raises(ValueError, match=r"whole holds config\.json, so there is a model or a run already"):
            run(*words)
    assert (folder / "whole" / "model.safetensors").read_bytes() == before
    with pytest.raises(ValueError, match="--group is 4096, but the widest matrix has 48 columns; use at most 48"):
        run("quantize", folder / "whole", folder / "wide", "--weights", "int4", "--group", 4096)
    assert not (folder / "wide").exists()


def test_a_bad_group_is_one_sentence(folder: Path) -> None:
    with pytest.raises(ValueError, match="group is 7, but must be a power of two"):
        run("quantize", folder / "whole", folder / "bad", "--group", 7)
    assert not (folder / "bad").exists()
