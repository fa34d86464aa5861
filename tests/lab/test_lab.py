"""Every experiment from the command line: a table, a claim, a figure, light and dark; and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from clearhead.cli.lab import command
from clearhead.cli.main import cli
from clearhead.lab.result import Result, format_value, require
from tests.studio.tools import ENGLISH, translate

matplotlib_image = pytest.importorskip("matplotlib.image")

SMALL = {
    "scores": ("--widths", "4,64", "--draws", "64"),
    "dictionary": ("--draws", "8"),
    "routing": ("--length", "4", "--trials", "1", "--gaps", "4.0,128.0"),
    "icl": ("--steps", "2", "--examples", "2", "--dim", "8", "--batch", "2", "--layers", "1"),
    "powerlaw": ("--skills", "2000", "--largest", "2048", "--tests", "500"),
    "gradients": (
        "--depths",
        "1,2",
        "--dim",
        "8",
        "--heads",
        "2",
        "--length",
        "4",
        "--train-depth",
        "1",
        "--steps",
        "4",
    ),
    "induction": ("--steps", "3", "--dim", "8", "--heads", "2", "--half", "4", "--batch", "2"),
    "shape": ("--ratios", "2,4", "--heads", "1,2", "--dim", "16", "--steps", "1", "--batch", "1", "--context", "8"),
    "lstm": ("--lengths", "8,16", "--dim", "16", "--steps", "1", "--half", "4", "--rounds", "1", "--batch", "2"),
    "turing": ("--steps", "12"),
    "permutation": ("--draws", "1", "--length", "5", "--dim", "8", "--heads", "2"),
}


def test_every_experiment_has_its_file_and_is_tried_here() -> None:
    files = {path.stem for path in Path(__file__).parents[2].joinpath("clearhead/lab").glob("*.py")}
    assert set(command.commands) == set(SMALL)
    assert set(command.commands) <= files


@pytest.mark.parametrize("name", SMALL)
def test_an_experiment_prints_and_draws(name: str, tmp_path: Path) -> None:
    drawn = tmp_path / f"{name}.svg"
    result = CliRunner().invoke(cli, ["lab", name, *SMALL[name], "--out", str(drawn), "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["experiment"] == name
    assert report["claim"].endswith(".")
    assert report["found"].endswith(".")
    assert "nan" not in result.stdout.lower()
    assert len(report["rows"]) > 1
    assert ElementTree.parse(drawn).getroot().tag.endswith("svg")
    for sentence in (report["claim"], report["found"]):
        assert not ENGLISH.search(re.sub(r"：[^；。]*", "", translate(sentence))), translate(
            sentence
        )  # lists of names stay
    assert "<!-- " in drawn.read_text()  # matplotlib writes each text as a comment beside its shapes


def test_a_person_sees_a_table_a_claim_and_where_the_figure_is(tmp_path: Path) -> None:
    for theme in ("light", "dark"):
        out = tmp_path / theme
        result = CliRunner().invoke(cli, ["lab", "scores", *SMALL["scores"], "--out", str(out), "--theme", theme])
        assert result.exit_code == 0, result.output
        assert "var q·k" in result.output
        assert "Claim  q·k of independent" in result.output
        assert "Found  The variance is" in result.output
        assert str(out / "scores.png") in result.output.replace("\n", "")
    light, dark = (matplotlib_image.imread(tmp_path / theme / "scores.png") for theme in ("light", "dark"))
    assert light[0, 0, :3].mean() > 0.9
    assert dark[0, 0, :3].mean() < 0.2


def test_the_same_seed_finds_the_same() -> None:
    def run(seed: str) -> str:
        return CliRunner().invoke(cli, ["lab", "scores", *SMALL["scores"], "--seed", seed, "--json"]).stdout

    assert run("3") == run("3") != run("4")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("scores", "--widths", "4,x"), "'4,x' is not whole numbers separated by commas"),
        (("scores", "--widths", "4,0"), "0 is not positive"),
        (("scores", "--keys", "1"), "keys is 1, but must be at least 2"),
        (("dictionary", "--temperatures", "0"), "0.0 is not positive"),
        (("dictionary", "--temperatures", "nan"), "nan is not positive and finite"),
        (("icl", "--noise", "nan"), "noise is nan, but must be at least 0 and finite"),
        (("gradients", "--lr", "nan"), "lr is nan, but must be at least 1e-12 and finite"),
        (("powerlaw", "--alpha", "nan"), "alpha is nan, but must be above 0 and finite"),
        (("permutation", "--length", "2"), "length is 2, but must be at least 3"),
        (("permutation", "--dim", "10", "--heads", "4"), "dim=10 is not a multiple of heads=4"),
        (("scores", "--draws", "8", "--out", "x.gif"), "must end in one of .png, .svg, .pdf"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    result = CliRunner().invoke(cli, ["lab", *arguments])
    assert result.exit_code != 0
    assert isinstance(result.exception, ValueError | SystemExit)  # `main` prints the first, click printed the second
    assert sentence in result.output + str(result.exception)
    assert "Found" not in result.output  # the error comes before any work


def test_help_does_not_load_torch() -> None:
    code = "import sys; from clearhead.cli.main import cli\ntry: cli(['lab', 'scores', '--help'])\n"
    code += "except SystemExit: pass\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"
    assert "√d_k" in done.stdout


def test_results_as_data() -> None:
    result = Result(name="x", claim="a.", found="b.", columns=("n", "y"), rows=[(1, 2.5), (1234, None)], draw=print)
    assert result.column("y") == [2.5, None]
    assert result.to_dict()["rows"] == [{"n": 1, "y": 2.5}, {"n": 1234, "y": None}]
    assert [format_value(value) for value in (1234, 2.5, None, "z")] == ["1,234", "2.5", "–", "z"]
    with pytest.raises(ValueError, match="steps is empty"):
        require(1, steps=())
