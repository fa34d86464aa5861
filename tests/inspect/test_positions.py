"""`clearhead positions`: the numbers against direct transcriptions, and pictures that show them, light and dark."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.testing import assert_allclose

from clearhead.cli.main import cli
from clearhead.inspect.plotting import STOPS, figure
from clearhead.inspect.positions import (
    FIGURES,
    Positions,
    draw_positions,
    draw_products,
    draw_table,
    numbers,
    products,
    rotation,
    wavelengths,
)
from clearhead.reference.positions import sinusoidal_positions

matplotlib_image = pytest.importorskip("matplotlib.image")
SMALL = {"length": 13, "dim": 10, "step": 3, "heads": 6}


def test_the_rotation_is_the_exponential_of_its_generator_and_moves_every_position() -> None:
    from scipy.linalg import expm

    dim, step = 10, 7
    generator = np.zeros((dim, dim))
    for i in range(0, dim, 2):
        generator[i, i + 1], generator[i + 1, i] = 10000 ** (-i / dim), -(10000 ** (-i / dim))
    turn = rotation(dim, step)
    assert_allclose(turn, expm(step * generator), atol=1e-12)
    table = sinusoidal_positions(50, dim)
    assert_allclose(table[:-step] @ turn.T, table[step:], atol=1e-12)
    assert_allclose(turn @ turn.T, np.eye(dim), atol=1e-12)


def test_products_are_those_of_the_table_at_any_place() -> None:
    table = sinusoidal_positions(60, 14, 500.0)
    for start in (0, 9):
        assert_allclose(products(np.arange(40.0), 14, 500.0), table[start : start + 40] @ table[start], atol=1e-12)


def test_wavelengths() -> None:
    waves = wavelengths(Positions(dim=16, factor=4.0, trained=512))
    plain = 2 * np.pi * 10000 ** (np.arange(8) / 8)
    assert_allclose(waves["plain"], plain)
    assert_allclose(waves["linear"], 4 * plain)
    assert_allclose(waves["NTK"][[0, -1]], plain[[0, -1]] * [1, 4])
    for name in ("Llama 3", "YaRN"):
        assert_allclose(waves[name][[0, -1]], plain[[0, -1]] * [1, 4])
        assert (np.diff(waves[name] / plain) >= -1e-12).all()


def test_numbers_for_programs() -> None:
    found = numbers(Positions(**SMALL))
    assert found["sinusoidal"]["rotation_error"] < 1e-12
    assert_allclose(found["alibi"], [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8])  # Press et al.'s own rule for six
    assert len(found["rotary"]["plain"]) == 5


@pytest.mark.parametrize("name", FIGURES)
def test_each_figure_is_drawn(name: str, tmp_path: Path) -> None:
    draw_positions(name, tmp_path / "dark.png", Positions(**SMALL, theme="dark"))
    pixels = matplotlib_image.imread(tmp_path / "dark.png")[..., :3]
    assert pixels[0, 0].mean() < 0.3
    assert pixels.std() > 0.05, "something is drawn"


def test_products_of_many_positions_are_those_of_some_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.inspect.positions.PAIRED", 8)
    with figure(10, 4.4) as picture:
        draw_products(picture, Positions(length=30, dim=8))
        picture.draw_without_rendering()
        left = picture.axes[0]
        shown = np.asarray(left.collections[0].get_array()).reshape(8, 8)
        places = [(tick.get_text(), tick.get_position()[0]) for tick in left.get_xticklabels()]
    table = sinusoidal_positions(30, 8)
    assert_allclose(shown, (table @ table.T / 4)[::4, ::4])
    assert all(float(text) == 4 * place for text, place in places)


def test_a_light_figure_is_the_same_file_twice(tmp_path: Path) -> None:
    draw_positions("table", tmp_path / "light.png", Positions(**SMALL))
    assert matplotlib_image.imread(tmp_path / "light.png")[0, 0].min() == 1
    draw_positions("table", tmp_path / "once.svg", Positions(**SMALL))
    draw_positions("table", tmp_path / "again.svg", Positions(**SMALL))
    assert ElementTree.parse(tmp_path / "once.svg").getroot().tag.endswith("svg")
    assert (tmp_path / "once.svg").read_bytes() == (tmp_path / "again.svg").read_bytes()


def test_the_heat_map_is_the_table() -> None:
    asked = Positions(**SMALL)
    with figure(5, 4) as picture:
        draw_table(picture, asked)
        mesh = picture.axes[0].collections[0]
    assert_allclose(mesh.get_array().reshape(13, 10), asked.table)
    assert picture.axes[0].get_ylim() == (12.5, -0.5), "position 0 is on top"


def test_the_stops_are_matplotlibs() -> None:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    for name, stops in STOPS.items():
        assert [to_hex(colormaps[name](n / (len(stops) - 1))) for n in range(len(stops))] == stops


def test_the_command(tmp_path: Path) -> None:
    run = CliRunner().invoke(cli, ["positions", "alibi", "curves", "--out", str(tmp_path), "--format", "svg"])
    assert run.output.split() == [str(tmp_path / "alibi.svg"), str(tmp_path / "curves.svg")]
    assert (tmp_path / "alibi.svg").exists()
    one = CliRunner().invoke(cli, ["positions", "table", "--out", str(tmp_path / "mine.png")])
    assert (one.exit_code, (tmp_path / "mine.png").exists()) == (0, True)
    assert json.loads(CliRunner().invoke(cli, ["positions", "--json", "--heads", "2"]).output)["alibi"] == [
        1 / 16,
        1 / 256,
    ]
    assert set(json.loads(CliRunner().invoke(cli, ["positions", "alibi", "--json"]).output)) == {"alibi"}
    two = CliRunner().invoke(cli, ["positions", "alibi", "curves", "--out", str(tmp_path / "two.svg")])
    assert two.exit_code == 2
    assert "two.svg is one file, but there are 2 figures; name a folder" in two.output
    table = CliRunner().invoke(cli, ["positions", "alibi", "--out", "alibi.csv"])
    assert "alibi.csv ends in '.csv'" in table.output


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"dim": 9}, "dim is 9, but must be even"),
        ({"length": 1}, "length is 1, but must be from 2 to 65,536"),
        ({"step": 10**12}, "step is 1000000000000, but must be from 1 to 65,536"),
        ({"factor": float("nan")}, "factor at least 1, not 10000.0 and nan"),
        ({"base": float("inf")}, "base must be above 1"),
        ({"theme": "pink"}, "theme is 'pink', but must be one of light, dark"),
    ],
)
def test_bad_sizes_get_one_sentence(sizes: dict, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        draw_positions("table", tmp_path / "x.png", Positions(**{**SMALL, **sizes}))
    with pytest.raises(ValueError, match="there is no figure 'waves'"):
        draw_positions("waves", tmp_path / "x.png")
