"""`clearhead compare`: its numbers equal those of a counter, a formula and a plain fit."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch.utils.flop_counter import FlopCounterMode

from clearhead.cli.compare import command, contestant, train_model
from clearhead.cli.main import describe_error
from clearhead.configs import (
    AttentionConfig,
    Causal,
    LinearAttentionConfig,
    LongformerConfig,
    MixerConfig,
    RMSNormConfig,
    Window,
    dumps,
)
from clearhead.measure.cost import cost
from clearhead.measure.growth import (
    PASSES,
    Contestant,
    Measured,
    ModelSize,
    compare,
    configs,
    error_of,
    fit,
    match_size,
    measure,
    mixers,
    of_mixer,
    parameters,
    peak_memory,
)
from clearhead.models.gpt import gpt
from clearhead.models.model import SequenceModel, build
from clearhead.models.presets import preset
from clearhead.training import loop

SMALL = ModelSize(dim=32, layers=1, heads=2, vocabulary=128)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # the counter of FLOPs sees one


def run(*arguments: str) -> str:
    result = CliRunner().invoke(command, list(arguments), catch_exceptions=False, env={"COLUMNS": "250"})
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: str) -> str:
    """The error message. Nothing may be measured before it appears."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clearhead.measure.growth.measure", lambda *_: pytest.fail("measured before the error"))
        result = CliRunner().invoke(command, list(arguments))
    assert result.exit_code != 0
    return result.output + str(result.exception)


def test_a_power_is_fitted_with_its_margin() -> None:
    growth = fit([1, 2, 4, 8, 16], [3 * n**1.5 for n in (1, 2, 4, 8, 16)])
    assert growth.exponent == pytest.approx(1.5)
    assert growth.margin == pytest.approx(0, abs=1e-9)
    assert fit([2, 4], [1.0, 2.0]).margin is None
    from scipy.stats import linregress, t

    lengths, values = [128, 256, 512, 1024, 2048], [1.1, 1.9, 4.5, 7.6, 17.0]
    growth, line = fit(lengths, values), linregress(np.log(lengths), np.log(values))
    assert growth.exponent == pytest.approx(line.slope)
    assert growth.margin == pytest.approx(line.stderr * t.ppf(0.975, 3), rel=2e-3)


@pytest.mark.parametrize("name", ["full", "window", "longformer", "bigbird"])
def test_the_flops_told_are_the_flops_done(name: str) -> None:
    """What torch's own counter sees of every matrix product."""
    length = 1200
    config = of_mixer(name, mixers(SMALL)[name], SMALL).make(length)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model = build(config)
        assert isinstance(model, SequenceModel)
        model(torch.zeros(1, length, dtype=torch.long), fused=name != "full")
    counted = cost(config, length=length).flops.forward
    assert counted == pytest.approx(counter.get_total_flops(), rel=1e-6)
    full = cost(of_mixer("full", mixers(SMALL)["full"], SMALL).make(length), length=length).flops.forward
    assert counted == full if name == "full" else counted < 0.8 * full


@pytest.mark.parametrize(("equal", "length"), [("parameters", 300), ("compute", 300), ("compute", 10_000)])
def test_made_equal(equal: str, length: int) -> None:
    named = mixers(SMALL)
    like, lstm = (of_mixer(name, named[name], SMALL).make(length) for name in ("flash", "lstm"))
    config = match_size(lstm, like, equal, length, "lstm")

    def amount(config: object) -> int:
        return parameters(config) if equal == "parameters" else cost(config, length=length).flops.forward

    assert amount(lstm) != amount(like)
    assert amount(config) == pytest.approx(amount(like), rel=0.02)


def test_what_cannot_be_made_equal_is_said() -> None:
    contestants = [of_mixer(name, mixers(SMALL)[name], SMALL) for name in ("flash", "linformer")]
    with pytest.raises(ValueError, match="linformer has more parameters than the first even with hardly any"):
        compare(contestants, [2000], equal="parameters")


def test_the_linformer_can_be_made_equal_at_the_lengths_that_nobody_chose() -> None:
    full, linformer = (of_mixer(name, mixers(ModelSize())[name], ModelSize()) for name in ("full", "linformer"))
    like, config = configs([full, linformer], 2048, "parameters")
    assert parameters(config) == pytest.approx(parameters(like), rel=0.01)


EXACT: dict[str, MixerConfig] = {
    "attention": AttentionConfig(heads=2, mask=Causal()),
    "a wide window": AttentionConfig(heads=2, mask=Causal() & Window(50)),
    "biases and norms": AttentionConfig(
        heads=2, mask=Causal() & Window(50), qkv_bias=True, out_bias=True, qk_norm=RMSNormConfig(), dropout=0.5
    ),
    "grouped": AttentionConfig(heads=4, kv_heads=2, head_dim=6, mask=Causal() & Window(50)),
    "longformer": LongformerConfig(heads=2, window=50, tokens=0, qkv_bias=True, out_bias=True),
}


@pytest.mark.parametrize("name", EXACT)
def test_the_error_is_against_full_attention_with_the_same_weights(name: str) -> None:
    assert error_of(EXACT[name], 32, 40) == pytest.approx(0, abs=1e-6)


def test_the_error_grows_with_what_is_not_read() -> None:
    near, far = (error_of(AttentionConfig(heads=2, mask=Causal() & Window(size)), 32, 200) for size in (100, 10))
    assert near is not None
    assert far is not None
    assert 0 < near < far
    assert error_of(LinearAttentionConfig(heads=2, qkv_bias=True, head_dim=8), 32, 40) is not None
    assert error_of(mixers(SMALL)["lstm"](40), 32, 40) is None


def test_the_last_tokens_of_a_text_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that has no more positions than the text is long, and that knows few tokens."""
    config = gpt(dim=32, layers=2, heads=4, vocabulary=7, length=64)
    monkeypatch.setattr("clearhead.measure.growth.peak_memory", lambda run, device: len(run.args))
    for length in (64, 3):
        measured = measure(config, length, 2, 1, True)
        assert all(measured.seconds.values())
        kept = 2 * 2 * 2 * length * 32 * 4  # keys and values, layers, rows, tokens, width, bytes
        assert measured.peak == {"forward": 3, "backward": 3, "decode": kept + 4}


def test_what_is_measured_has_the_weights_that_it_starts_with(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SequenceModel] = []
    monkeypatch.setattr("clearhead.measure.growth.backward", lambda model, tokens, fused: seen.append(model) or 1.0)
    measure(of_mixer("mamba", mixers(SMALL)["mamba"], SMALL).make(16), 16, 1, 1, True)
    mixer = seen[0].stack.blocks[0].mixer
    assert (mixer.skip == 1).all()
    assert (mixer.filter_bias == 0).all()


def test_peak_memory_is_what_was_held() -> None:
    peak = peak_memory(lambda: torch.ones(30_000_000).sum())
    assert peak is None or 110_000_000 < peak < 140_000_000


def test_models_side_by_side(tmp_path: Path) -> None:
    picture, mixer = tmp_path / "growth.svg", tmp_path / "mine.json"
    mixer.write_text(dumps(AttentionConfig(heads=2, mask=Causal() & Window(7))))
    names = ("linformer", str(mixer), "tiny-llama")
    options = ("--lengths", "16,32", "--dim", "32", "--heads", "2", "--layers", "1", "--equal", "no", "--rounds", "1")
    counted = json.loads(run(*names, *options, "--json", "--out", str(picture)))
    assert [model["name"] for model in counted["models"]] == ["linformer", "mine", "tiny-llama"]
    for model in counted["models"]:
        assert [m["length"] for m in model["measured"]] == [16, 32]
        for m in model["measured"]:
            assert m["seconds"]["forward"] > 0
            assert m["seconds"]["backward"] > 0
            assert (m["seconds"]["decode"] is None) == (model["name"] == "linformer")
        assert set(model["growth"]["seconds"]["forward"]) == {"exponent", "margin"}
    assert picture.read_text().startswith("<?xml")


def test_the_table_and_the_loss_at_equal_budget(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abcabcabd" * 300)
    shown = run(
        *("flash", "lstm", "linformer", "--lengths", "16,32", "--dim", "32", "--heads", "2", "--rounds", "1"),
        *("--equal", "no", "--train", str(text), "--steps", "12", "--context", "16"),
    )
    assert "validation loss" in shown
    titles = [line.split() for line in shown.splitlines()]
    assert ["parameters", "FLOPs", "error"] in titles
    assert [["time", *PASSES], ["memory", *PASSES]] == [title for title in titles if title[1:] == list(PASSES)]
    assert max(map(len, shown.splitlines())) <= 80
    lines = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip()}
    assert lines["linformer"][1:] == ["–", "–", "–"]
    assert 0 < float(lines["flash"][1]) < 3
    assert 0 < float(lines["lstm"][1]) < 3


def test_an_interrupt_while_it_trains_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(*given: object, **options: object) -> None:
        raise loop.RunStopped("Stopped at step 3 of 20")

    monkeypatch.setattr(loop, "train", leave)
    with pytest.raises(click.Abort):
        train_model(SimpleNamespace(recipe=None))  # type: ignore[arg-type]
    assert describe_error(loop.TrainingError("the loss of step 3 is nan")) == "the loss of step 3 is nan"


def test_what_a_name_stands_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "full.json"
    mine.write_text(dumps(AttentionConfig(heads=2, mask=Causal())))
    assert [contestant(name, SMALL).fused for name in ("full", "flash", str(mine))] == [False, True, True]
    (tmp_path / "clearhead.json").write_text(dumps(preset("tiny-llama")))
    monkeypatch.setattr("clearhead.models.hub.find_checkpoint", lambda path, files: tmp_path)
    assert contestant("somebody/llama", SMALL).make(8) == preset("tiny-llama")


def test_what_cannot_be_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abc" * 100)
    short = tmp_path / "short.txt"
    short.write_text("ab")
    for arguments, words in {
        ("fulll",): "there is no mixer or model 'fulll'; did you mean 'full'?",
        ("full", "--lengths", "a,b"): "'a,b' is not whole numbers separated by commas",
        ("tiny-transformer",): "is an encoder–decoder",
        ("tiny-vit",): "tiny-vit reads images",
        ("flash", "tiny-gpt"): "length is 256, but this model has 64 learned positions",
        ("flash", "linformer", "--lengths", "16,8192"): "linformer has more parameters than the first",
        ("flash", "--out", "growth.txt"): "must end in one of .png, .svg, .pdf",
        ("flash", "--train", str(tmp_path / "nothing")): "there is no file or folder",
        ("flash", "--train", str(short)): "nothing to predict",
        ("flash", "--dim", "0"): "x>=1",
        ("flash", "--rounds", "0"): "x>=1",
        ("flash", "--train", str(text), "--steps", "0"): "x>=1",
        ("flash", "--train", str(text), "--context", "0"): "x>=1",
        ("tiny-gpt", "--lengths", "16", "--train", str(text), "--context", "65"): "64 learned positions",
    }.items():
        assert words in refused(*arguments)
    with pytest.raises(ValueError, match="equal is 'all'"):
        compare([Contestant("x", lambda n: None)], [1], equal="all")  # type: ignore[arg-type,return-value]


def test_the_examples_of_the_help_can_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "text.txt").write_text("abc" * 100)
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []
    monkeypatch.setattr("clearhead.measure.growth.measure", lambda *_: seen.append("measured") or MEASURED)
    monkeypatch.setattr("clearhead.measure.growth.match_size", lambda config, *_: config)
    monkeypatch.setattr("clearhead.inspect.growth_figure.draw_growth", lambda counted, path, theme: None)
    monkeypatch.setattr("clearhead.cli.compare.train_model", lambda task: dict.fromkeys(TRAINED, 1.0))
    examples = [line.split()[2:] for line in (command.help or "").splitlines() if line.strip().startswith("clearhead")]
    assert len(examples) == 3
    for arguments in examples:
        run(*arguments)
    assert len(seen) == 3 * (1 + 3) + 2 * (1 + 4) + 2 * (1 + 3), "every model warms up once"


TRAINED = ("loss", "bits_per_byte", "seconds")
MEASURED = Measured(16, 1, 1, dict.fromkeys(PASSES, 1.0), dict.fromkeys(PASSES, 1), None)
