"""What all pictures have in common, and the terminal's."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from clearhead.inspect.grid import Grid
from clearhead.inspect.plotting import FAMILIES, figure, rc_settings, save, set_title
from clearhead.inspect.terminal import print_grid, print_inspection, print_next_tokens

from .tools import letters, writer


@pytest.mark.parametrize("width", [2.0, 3.5, 9.0])
def test_a_title_is_no_wider_than_its_picture(width: float) -> None:
    with figure(width, 3.0) as picture:
        set_title(picture, "stories15M reads “Once upon a time there was a little dog who liked to run”")
        picture.draw_without_rendering()
        box = picture._suptitle.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= picture.bbox.width


def test_fonts_that_are_installed_stand_in_for_what_the_usual_one_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = pytest.importorskip("matplotlib.font_manager")
    usual = rc_settings("light")["font.family"]
    assert usual[0] == "sans-serif"
    for family in usual[1:]:
        manager.findfont(family, fallback_to_default=False)
    more = manager.FontEntry(name=FAMILIES[-1])
    monkeypatch.setattr(manager.fontManager, "ttflist", [*manager.fontManager.ttflist, more])
    assert rc_settings("light")["font.family"][-1] == FAMILIES[-1]


def test_characters_that_no_font_has_get_one_sentence(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with figure(3, 2) as picture:
            picture.suptitle("\U0010fff0 and \U0010fff1, \U0010fff0 again")
            warnings.warn("something else", stacklevel=1)
            save(picture, tmp_path / "a.png")
            save(picture, tmp_path / "a.svg")
    assert [str(one.message) for one in caught] == [
        "something else",
        "no installed font has the characters \U0010fff0\U0010fff1; the figure shows boxes instead. "
        "For Chinese, Japanese and Korean, install Noto Sans CJK",
    ]
    assert {Path(one.filename) for one in caught} == {Path(__file__)}


def terminal(width: int) -> Console:
    return Console(file=io.StringIO(), width=width, no_color=True, highlight=False)


def printed(out: Console) -> list[str]:
    return out.file.getvalue().split("\n")  # type: ignore[attr-defined]


def test_heads_beyond_the_terminals_width_are_printed_below() -> None:
    inspection = writer().inspect("a cat", tokenizer=letters())
    wide, narrow = terminal(100), terminal(16)
    print_inspection(inspection, wide)
    print_inspection(inspection, narrow)
    assert "          0  1  2  3" in printed(wide)
    lines = printed(narrow)
    for heading, heads in (("          0  1", slice(0, 2)), ("          2  3", slice(2, 4))):
        below = lines[lines.index(heading) + 1 : lines.index(heading) + 3]
        for layer, line in enumerate(below):
            line_of_wide = next(each for each in printed(wide) if each.startswith(f"stack {layer} "))
            assert line.split() == ["stack", str(layer), *line_of_wide.split()[2:][heads]]


@pytest.mark.parametrize("texts", [None, [["日本語日本語", "a"], ["b", "한국"]]])
def test_wide_characters_line_up(texts: list[list[str]] | None) -> None:
    names = ["日本", "a"]
    grid = Grid("", np.ones((2, 2)), names, names, "reads", "is read", "weight", texts=texts)
    out = terminal(60)
    print_grid(grid, out)
    width = 4 + 1 + 2 * (9 if texts else 2)
    named = printed(out)[2:5] if texts else printed(out)[2:6]
    assert [cell_len(line) for line in named] == [width] * len(named)
    assert texts or named[:2] == ["     日  ", "     本a "]
    out = terminal(60)
    print_next_tokens([("日本", 1, 0.5), ("a", 2, 0.5)], "next", out)
    assert [cell_len(line) for line in printed(out)[2:4]] == [6 + 2 + 6 + 2 + 15] * 2


def test_a_title_is_text_in_a_notebook() -> None:
    grid = Grid('a "<b>" reads', np.ones((1, 1)), ["a"], ["b"], "reads", "is read", "weight")
    assert grid._repr_html_().startswith('<img alt="a &quot;&lt;b&gt;&quot; reads" src="data:image/png;base64,')
