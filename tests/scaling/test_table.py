"""Tables are read as they are meant, and what is wrong with one is reported in a sentence that names the line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from clearhead.cli.scaling import command
from clearhead.scaling import Table, TableError, fit, read_table
from clearhead.scaling.figures import draw_fit

from .tools import CHINCHILLA, REANALYSIS, curves_table, isoflop_table


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def write_table(path: Path, table: Table) -> str:
    rows = zip(table.n.tolist(), table.d.tolist(), table.loss.tolist(), strict=True)
    write(path, "N,D,loss\n" + "".join(f"{n:.9g},{d:.9g},{loss:.9g}\n" for n, d, loss in rows))
    return str(path)


@pytest.mark.parametrize(
    "text",
    [
        "N,D,loss\n1e6,1e8,3.5\n2e6,1e8,3.25\n",
        "\ufeffrun, LOSS ,c,n\na,3.5,6e14,1e6\n\nb,3.25,1.2e15,2000000\n",
        "C,D,loss\n6e14,1e8,3.5\n1.2e15,1e8,3.25\n",
        "N,D,C,loss\n1e6,1e8,6.3e14,3.5\n2e6,1e8,1.2e15,3.25\n",
    ],
)
def test_two_of_three_columns_tell_the_third(tmp_path: Path, text: str) -> None:
    table = read_table(write(tmp_path / "t.csv", text))
    np.testing.assert_allclose(table.n, [1e6, 2e6])
    np.testing.assert_allclose(table.d, [1e8, 1e8])
    np.testing.assert_allclose(table.loss, [3.5, 3.25])
    np.testing.assert_allclose(table.flops, [6e14, 1.2e15])
    assert len(table.budgets()) == 2


BAD = {
    "": "is empty",
    "N,D\n1,2\n": "columns N, D, but loss and two of N, D and C are needed",
    "N,loss\n1,2\n": "two of N, D and C are needed",
    "N,N,D,loss\n1,1,2,3\n": "the column N twice",
    "N,D,loss\n": "holds no runs",
    "N,D,loss\n1e6,1e8,2\n1e6,many,2\n": "line 3: D is 'many', which is not a number",
    "N,D,loss\n1e6,1e8\n": "line 2: loss is '', which is not a number",
    "N,D,loss\n1e6,-1e8,2\n": "line 2: D is -1e+08, but must be a number above 0",
    "N,D,loss\n1e6,1e8,nan\n": "line 2: loss is nan, but must be a number above 0",
    "N,D,C,loss\n1e6,1e8,6e16,2\n": "line 2: C is 6e+16, but 6·N·D is 6e+14",
}


@pytest.mark.parametrize(("text", "words"), BAD.items())
def test_bad_tables_are_refused_in_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(TableError) as error:
        read_table(write(tmp_path / "t.csv", text))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_bytes_that_are_no_text_are_said(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"\xff\xfe\x00N")
    with pytest.raises(TableError, match="not a CSV in UTF-8"):
        read_table(tmp_path / "t.csv")
    with pytest.raises(TableError, match="not a CSV: field larger than"):
        read_table(write(tmp_path / "t.csv", f"N,D,loss\n{'1' * 200_000},1,1\n"))


def call(*arguments: str) -> str:
    result = CliRunner().invoke(command, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_fits_keeps_draws_and_plans(tmp_path: Path) -> None:
    table = write_table(tmp_path / "t.csv", isoflop_table(REANALYSIS, 0.003))
    saved, picture = str(tmp_path / "fit.json"), str(tmp_path / "fit.svg")
    fitted = json.loads(call("fit", table, "--draws", "50", "--json"))
    for key in ("E", "A", "B", "alpha", "beta"):
        low, high = fitted[key]["interval"]
        assert low <= fitted[key]["value"] <= high
    shown = call("fit", table, "--draws", "50", "--out", saved, "--out", picture)
    assert fitted["equation"] in shown
    assert Path(picture).read_text().startswith("<?xml")
    plan = json.loads(call("plan", "--flops", "1e21", "--from", saved, "--json"))["plans"][0]
    low, high = plan["N"]["interval"]
    assert low <= plan["N"]["value"] <= high
    assert plan["N"]["value"] * plan["D"]["value"] * 6 == pytest.approx(1e21)
    again = json.loads(call("plan", "--flops", "1e21", "--from", table, "--draws", "50", "--json"))["plans"][0]
    assert again["D"]["interval"] == pytest.approx(plan["D"]["interval"], rel=1e-5)
    shown = call("plan", "--flops", "1e21", "--flops", "1e22", "--from", "chinchilla")
    assert "L(N, D) = 1.69 + 406.4/N^0.340 + 410.7/D^0.280" in shown
    assert shown.count("tokens per parameter") == 2


def test_all_laws_are_told_or_why_not(tmp_path: Path) -> None:
    table = write_table(tmp_path / "t.csv", isoflop_table(CHINCHILLA, 0.003))
    fitted = json.loads(call("fit", table, "--law", "all", "--draws", "20", "--json"))
    assert "training curve" in fitted["envelope"].pop("refused")
    assert [law for law in fitted if "equation" in fitted[law]] == ["parametric", "isoflop", "size", "data"]
    shown = call("fit", table, "--law", "all", "--draws", "20")
    assert "N = " in shown
    assert "envelope: a training curve" in shown


def test_bad_sources_and_options_are_refused(tmp_path: Path) -> None:
    for arguments, words in {
        ("plan", "--flops", "1e21", "--from", "chinchila"): "did you mean 'chinchilla'?",
        ("plan", "--flops", "0"): "must be a number above 0",
        ("plan", "--flops", "1e21", "--law", "isoflop"): "--law needs a table.csv; reanalysis already has its law",
        ("plan", "--flops", "1e21", "--from", "fit.json", "--law", "size"): "fit.json already has its law",
        ("plan", "--flops", "much"): "not a valid float",
        ("plan", "--flops", "1e20", "--from", str(tmp_path / "none.csv")): "No such file",
        ("fit", str(tmp_path / "none.csv")): "No such file",
        ("sweep", "--dims", "8,x"): "--dims takes whole numbers",
        ("sweep", "--dims", "12"): "must be a multiple of 8",
        ("sweep", "--budgets", "-1"): "must be a number of FLOPs above 0",
    }.items():
        result = CliRunner().invoke(command, list(arguments))
        assert result.exit_code != 0
        assert words in result.output + str(result.exception)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("law", ["parametric", "isoflop", "envelope", "size", "data"])
def test_every_law_has_its_picture(tmp_path: Path, law: str, theme: str) -> None:
    table = curves_table(REANALYSIS, 7, 8) if law == "envelope" else isoflop_table(REANALYSIS, 0.003)
    draw_fit(fit(table, law, draws=20), table, tmp_path / "p.svg", theme)
    drawn = (tmp_path / "p.svg").read_text()
    assert ("#15181c" in drawn) == (theme == "dark")
    for words in {"size": ["parameters N"], "data": ["tokens D"]}.get(
        law, ["loss, nats per token", "compute C, FLOPs"]
    ):
        assert f"<!-- {words} -->" in drawn


def test_a_comma_too_many_is_said(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("N,D,loss\n1e6,1e7,3.5\n1e6,1,000,3.0\n")
    with pytest.raises(TableError, match="line 3 has more cells than the first line"):
        read_table(path)
