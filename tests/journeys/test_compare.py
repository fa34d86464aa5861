"""`clearhead compare`: what is told is what a counter, a formula and a plain fit say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch.utils.flop_counter import FlopCounterMode

from clearhead.cli.compare import command
from clearhead.configs import AttentionConfig, Causal, Window, dumps
from clearhead.measure.compare import (
    Contestant,
    Size,
    compare,
    error_of,
    fit,
    matched,
    measure,
    mixers,
    of_mixer,
    parameters,
    peak_memory,
)
from clearhead.measure.cost import cost
from clearhead.models.assemble import SequenceModel, build

SMALL = Size(dim=32, layers=1, heads=2, vocabulary=128)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # the counter of FLOPs sees one


def run(*arguments: str) -> str:
    result = CliRunner().invoke(command, list(arguments), catch_exceptions=False, env={"COLUMNS": "250"})
    assert result.exit_code == 0, result.output
    return result.stdout


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
    told = cost(config, length=length).flops.forward
    assert told == pytest.approx(counter.get_total_flops(), rel=1e-6)
    full = cost(of_mixer("full", mixers(SMALL)["full"], SMALL).make(length), length=length).flops.forward
    assert told == full if name == "full" else told < 0.8 * full


@pytest.mark.parametrize("equal", ["parameters", "compute"])
def test_made_equal(equal: str) -> None:
    length, named = 300, mixers(SMALL)
    like, lstm = (of_mixer(name, named[name], SMALL).make(length) for name in ("flash", "lstm"))
    config = matched(lstm, like, equal, length, "lstm")

    def amount(config: object) -> int:
        return parameters(config) if equal == "parameters" else cost(config, length=length).flops.forward

    assert amount(lstm) != amount(like)
    assert amount(config) == pytest.approx(amount(like), rel=0.02)


def test_what_cannot_be_made_equal_is_said() -> None:
    contestants = [of_mixer(name, mixers(SMALL)[name], SMALL) for name in ("flash", "linformer")]
    with pytest.raises(ValueError, match="linformer has more parameters than the first even with hardly any"):
        compare(contestants, [2000], equal="parameters")


def test_the_error_is_against_full_attention_with_the_same_weights() -> None:
    assert error_of(AttentionConfig(heads=2, mask=Causal()), 32, 40) == pytest.approx(0, abs=1e-6)
    assert error_of(AttentionConfig(heads=2, mask=Causal() & Window(50)), 32, 40) == pytest.approx(0, abs=1e-6)
    near, far = (error_of(AttentionConfig(heads=2, mask=Causal() & Window(size)), 32, 200) for size in (100, 10))
    assert near is not None
    assert far is not None
    assert 0 < near < far
    assert error_of(mixers(SMALL)["lstm"](40), 32, 40) is None


def test_what_is_measured_has_the_weights_that_it_starts_with(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SequenceModel] = []
    monkeypatch.setattr("clearhead.measure.compare.backward", lambda model, tokens, fused: seen.append(model) or 1.0)
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
    names = ("full", "linformer", str(mixer), "tiny-llama")
    options = ("--lengths", "16,32", "--dim", "32", "--heads", "2", "--layers", "1", "--equal", "no", "--rounds", "1")
    told = json.loads(run(*names, *options, "--json", "--out", str(picture)))
    assert [model["name"] for model in told["models"]] == ["full", "linformer", "mine", "tiny-llama"]
    for model in told["models"]:
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
    lines = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip()}
    assert lines["linformer"][1:] == ["–", "–", "–"]
    assert 0 < float(lines["flash"][1]) < 3
    assert 0 < float(lines["lstm"][1]) < 3


def test_bad_names_and_lengths_are_said() -> None:
    for arguments, words in {
        ("fulll",): "there is no mixer or model 'fulll'; did you mean 'full'?",
        ("full", "--lengths", "a,b"): "'a,b' is not whole numbers separated by commas",
        ("tiny-transformer",): "is an encoder–decoder",
    }.items():
        result = CliRunner().invoke(command, list(arguments))
        assert result.exit_code != 0
        assert words in result.output + str(result.exception)
    with pytest.raises(ValueError, match="equal is 'all'"):
        compare([Contestant("x", lambda n: None)], [1], equal="all")  # type: ignore[arg-type,return-value]
