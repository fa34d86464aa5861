"""Pictures as files, drawn with matplotlib without a screen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SUFFIXES = (".png", ".svg", ".pdf")


@contextmanager
def figure(width: float, height: float) -> Iterator[Any]:
    """An empty figure of so many inches."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("drawing needs matplotlib: pip install 'clearhead[plot]'") from None
    picture = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(picture)
    yield picture


def save(picture: Any, path: str | Path) -> None:
    """The suffix decides the format."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path} ends in {path.suffix!r}, but a picture is one of {', '.join(SUFFIXES)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=144)
