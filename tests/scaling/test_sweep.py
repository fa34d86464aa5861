"""A sweep trains its family under the budgets that were sweep for, and goes on where it was stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from clearhead.cli.main import cli
from clearhead.configs import ConfigError
from clearhead.models.model import build
from clearhead.scaling import read_table
from clearhead.scaling.sweep import Sweep, bytes_recipe, matmul_parameters, member_config, run_sweep
from clearhead.training.checkpoint import ResumeError
from clearhead.training.loop import Callbacks, RunStopped

from .test_table import write_table
from .tools import CHINCHILLA, curves_table, isoflop_table

TEXT = "the quick brown fox jumps over the lazy dog. " * 400


def sweep(**changes: object) -> Sweep:
    recipe = bytes_recipe().with_value("batch", 4).with_value("task.context", 16).with_value("evaluate_targets", 256)
    return Sweep(**{"dims": (8, 16), "budgets": (6e7, 1e8), "layers": 1, "recipe": recipe} | changes)  # type: ignore[arg-type]


def test_parameters_are_those_of_products() -> None:
    config = member_config(16, 2, 257)
    model = build(config)
    table = model.embedding.table.numel()
    assert matmul_parameters(config) == sum(p.numel() for p in model.parameters()) - table


def test_a_stopped_sweep_goes_on_and_ends_alike(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    messages: list[str] = []
    whole = run_sweep(sweep(), [text], tmp_path / "whole", callbacks=Callbacks(message=messages.append))
    table = read_table(whole)
    assert len(table) == 4
    assert [len(budget) for budget in table.budgets()] == [2, 2]
    for budget, wanted in zip(table.budgets(), (6e7, 1e8), strict=True):
        assert abs(table.flops[budget] / wanted - 1).max() < 0.03
    assert (table.loss < 5.5).all()
    assert sum(line.startswith("run ") for line in messages) == 4

    def stop(numbers: dict) -> None:
        if (numbers["run"], numbers["step"]) == (2, 3):
            raise KeyboardInterrupt

    stopped = tmp_path / "stopped"
    with pytest.raises((KeyboardInterrupt, RunStopped)):
        run_sweep(sweep(), [text], stopped, callbacks=Callbacks(step=stop))
    assert len(read_table(stopped / "table.csv")) == 1
    with pytest.raises(ConfigError, match="add --resume"):
        run_sweep(sweep(), [text], stopped)
    with pytest.raises(ResumeError, match="was started with another recipe: seed was 1337 and is 7"):
        run_sweep(sweep(recipe=sweep().recipe.with_value("seed", 7)), [text], stopped, resume=True)
    with pytest.raises(ResumeError, match="there is no run in"):
        run_sweep(sweep(), [text], tmp_path / "nowhere", resume=True)
    first = (stopped / "6e+07-8" / "model.safetensors").stat().st_mtime_ns
    again = run_sweep(sweep(), [text], stopped, resume=True)
    assert again.read_text() == whole.read_text()
    assert (stopped / "6e+07-8" / "model.safetensors").stat().st_mtime_ns == first
    with pytest.raises(ResumeError, match=r"6e\+07-8 was started with another recipe"):
        run_sweep(sweep(layers=2, budgets=(4e7,)), [text], stopped, resume=True)
    more = run_sweep(sweep(dims=(8,), budgets=(4e7,)), [text], stopped, resume=True).read_text()
    assert more.startswith(whole.read_text()), "runs that are not sweep for again stay in the table"
    assert more.removeprefix(whole.read_text()).endswith(",4e+07-8\n")


def test_what_cannot_be_trained_is_said(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    with pytest.raises(ConfigError, match="no budget is enough for 20 steps"):
        run_sweep(sweep(budgets=(1e5,)), [text], tmp_path / "out")
    with pytest.raises(ConfigError, match="at least one width"):
        sweep(dims=())
    with pytest.raises(ValueError, match="layers"):
        run_sweep(sweep(layers=0), [text], tmp_path / "none")


def test_the_figure_is_of_the_first_law_that_the_runs_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, table, equation in (
        ("valleys", isoflop_table(CHINCHILLA, budgets=3), "N ="),
        ("none", curves_table(CHINCHILLA, sizes=3, lengths=3), "L(N, D) ="),
        ("few", curves_table(CHINCHILLA, sizes=2, lengths=2), None),
    ):
        (tmp_path / name).mkdir()
        path, figure = Path(write_table(tmp_path / name / "table.csv", table)), tmp_path / name / "fit.svg"
        monkeypatch.setattr("clearhead.scaling.sweep.run_sweep", lambda *given, path=path, **options: path)
        result = CliRunner().invoke(cli, ["scaling", "sweep"])
        assert result.exit_code == 0, result.output
        assert figure.exists() == (str(figure) in result.stdout.split()) == (equation is not None)
        assert ("no figure was drawn" in result.stderr) == (equation is None)
        assert equation is None or f"<!-- {equation}" in figure.read_text()
