"""Figures with matplotlib: light and dark themes, colour-blind safe palettes, fonts for CJK text."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np

from clearhead.extras import install_command
from clearhead.files import stage_file

SUFFIXES = (".png", ".svg", ".pdf")
LETTERS = 11  # characters of a title per inch
THEMES = ("light", "dark")

# Okabe & Ito's colour-blind safe palette; the last entry is the text colour
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
ON_DARK = ("#56B4E9", "#E69F00", "#2BC8A0", "#E6A0C8", "#F0E442", "#FF8A3D", "#FFFFFF")
SEQUENTIAL, DIVERGING = "cividis", "PuOr"
# evenly spaced stops of both colour maps, for terminals and web pages
STOPS = {
    SEQUENTIAL: ["#00224e", "#002e6a", "#1a386f", "#32436d", "#434e6c", "#535a6d", "#61656f", "#6f7073", "#7d7c78",
                 "#8c8878", "#9b9476", "#aba072", "#bcae6c", "#cdbb63", "#dec958", "#f0d846", "#fee838"],
    DIVERGING: ["#7f3b08", "#b25706", "#e08214", "#fcb761", "#fee0b6", "#f6f6f7",
                "#d8daeb", "#b1aad1", "#8073ac", "#532687", "#2d004b"],
}  # fmt: skip
# fallback fonts for characters that matplotlib's default font lacks, on Linux, macOS and Windows
FAMILIES = ("Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans JP", "Noto Sans SC", "Noto Sans KR", "Source Han Sans",
            "WenQuanYi Zen Hei", "WenQuanYi Micro Hei", "Droid Sans Fallback", "IPAexGothic", "IPAGothic",
            "NanumGothic", "Hiragino Sans", "PingFang SC", "PingFang HK", "Apple SD Gothic Neo", "Arial Unicode MS",
            "Yu Gothic", "Microsoft YaHei", "SimHei", "Malgun Gothic", "MS Gothic", "Unifont")  # fmt: skip
VECTOR_CELLS = 40_000  # larger heat maps are bitmaps, even in an SVG


def check_theme(theme: str) -> None:
    if theme not in THEMES:
        raise ValueError(f"theme is {theme!r}, but must be one of {', '.join(THEMES)}")


def colours(theme: str = "light") -> tuple[str, ...]:
    return COLOURS if theme == "light" else ON_DARK


def rc_settings(theme: str) -> Any:
    """matplotlib rcParams of a theme."""
    paper, ink, rule = ("#ffffff", "#1a1a1a", "#c8c8c8") if theme == "light" else ("#15181c", "#e8e6e3", "#4a5058")
    inked = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.titlecolor")
    papers = ("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor")
    from cycler import cycler
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    return {
        **dict.fromkeys(inked, ink),
        **dict.fromkeys(papers, paper),
        "axes.edgecolor": rule,
        "grid.color": rule,
        "axes.prop_cycle": cycler(color=colours(theme)),
        "font.family": ["sans-serif", *(family for family in FAMILIES if family in installed)],
        "font.size": 9,
        "axes.titlesize": 10,
        "svg.hashsalt": "clearhead",  # makes SVG files reproducible
    }


@contextmanager
def figure(width: float, height: float, theme: str = "light") -> Iterator[Any]:
    """An empty figure of the given size in inches. Draw and save it inside the `with` block."""
    check_theme(theme)
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(f"figures need matplotlib: {install_command('plot')}") from None
    with rc_context(rc_settings(theme)), missing_glyphs():
        picture = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(picture)
        yield picture


@contextmanager
def missing_glyphs() -> Iterator[None]:
    """Replace matplotlib's warning per missing glyph by one warning for all."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.filterwarnings("always", r"Glyph \d+")
        yield
    missing: dict[str, None] = {}
    for one in heard:
        if glyph := re.match(r"Glyph (\d+)", str(one.message)):
            missing[chr(int(glyph[1]))] = None
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    if missing:
        some = "".join(missing)
        such = f"{some[:8]}…" if len(some) > 8 else some
        warnings.warn(
            f"no installed font has the characters {such}; the figure shows boxes instead. "
            "For Chinese, Japanese and Korean, install Noto Sans CJK",
            stacklevel=5,
        )


def heat(
    axis: Any,
    values: np.ndarray,
    low: float = 0.0,
    high: float = 1.0,
    cmap: str = SEQUENTIAL,
    cells: int | None = None,
) -> Any:
    """Draw a matrix as a heat map with row 0 on top. Small ones are vector squares, so an SVG stays sharp.

    cells  total cells of a figure with several heat maps
    """
    rows, columns = values.shape
    if (cells or values.size) > VECTOR_CELLS:
        return axis.imshow(values, cmap=cmap, vmin=low, vmax=high, interpolation="nearest", aspect="auto")
    edges = np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5
    image = axis.pcolormesh(*edges, values, cmap=cmap, vmin=low, vmax=high, linewidth=0, antialiased=False)
    axis.set_ylim(rows - 0.5, -0.5)
    return image


def label(axis: Any, rows: Sequence[str], columns: Sequence[str], most: int = 40) -> None:
    """Label the ticks with tokens, skipping some if there are more than `most`."""
    for names, put, turned in ((rows, axis.set_yticks, 0), (columns, axis.set_xticks, 90)):
        step = -(-len(names) // most) or 1
        at = range(0, len(names), step)
        shown = [escape_label(names[i]) for i in at]
        put(at, shown, rotation=turned if max(map(len, shown), default=0) > 2 else 0, fontsize=7)


def set_title(picture: Any, text: str) -> None:
    """Set the figure's title, wrapped to its width."""
    picture.suptitle("\n".join(wrap(text, max(16, int(LETTERS * picture.get_figwidth())))), fontsize=10)


def escape_label(text: str) -> str:
    """A token as a label: whitespace is escaped, and $ does not start math mode."""
    return repr(text)[1:-1].replace("$", r"\$") or "∅"


def check_file(path: str | Path, also: Sequence[str] = ()) -> None:
    """Raise ValueError unless the file name has a supported suffix."""
    suffix, known = Path(path).suffix, (*SUFFIXES, *also)
    if suffix.lower() not in known:
        raise ValueError(f"{path} ends in {suffix!r}, but must end in one of {', '.join(known)}")
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder; name a file in it")


def save(picture: Any, path: str | Path) -> None:
    """Save a figure; the suffix decides the format."""
    path = Path(path)
    check_file(path)
    kind = path.suffix.lower().removeprefix(".")
    undated = {"Date": None} if kind == "svg" else {}
    with stage_file(path) as part:
        picture.savefig(part, format=kind, dpi=144, metadata=undated)
