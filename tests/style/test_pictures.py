"""The pictures of README and docs: small, in both themes, shown somewhere, and drawn by a command of a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs import figures

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
LINK = re.compile(r"""(?:!\[[^\]]*\]\(|src(?:set)?=")([^")]*\.(?:svg|png))""")
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", *sorted((ROOT / "docs").rglob("*.md"))]


def shown_on(page: Path) -> set[Path]:
    return {(page.parent / link).resolve() for link in LINK.findall(page.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pictures_on_a_page_exist(page: Path) -> None:
    missing = [path for path in shown_on(page) if not path.exists()]
    assert not missing, f"{page.name} shows {missing}"


def test_every_picture_is_small_and_has_both_themes() -> None:
    pictures = sorted(IMAGES.iterdir())
    assert len(pictures) >= 20
    for path in pictures:
        assert path.stat().st_size <= figures.LIMIT, f"{path.name} has {path.stat().st_size:,} bytes"
        other = {"light": "dark", "dark": "light"}[path.stem.rpartition("-")[2]]
        assert path.with_stem(f"{path.stem.rpartition('-')[0]}-{other}").exists(), f"{path.name} has no {other} twin"


def test_every_picture_is_shown_and_drawn_by_a_page() -> None:
    shown = {path for page in PAGES for path in shown_on(page)}
    drawn = {file.partition(".")[0] for page in figures.pages() for file in figures.drawn_files(page)}
    drawn |= {f"studio-{name}" for name in figures.SCREENSHOTS}
    for path in IMAGES.glob("*-light.*"):
        assert {path, path.with_name(path.name.replace("-light", "-dark"))} & shown, f"no page shows {path.name}"
        assert path.stem.removesuffix("-light") in drawn, f"no page draws {path.name}"


def test_readme_shows_pictures() -> None:
    assert len(shown_on(ROOT / "README.md")) >= 4
    assert len(shown_on(ROOT / "README.zh.md")) >= 2
