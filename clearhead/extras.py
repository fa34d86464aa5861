"""The commands that install optional packages."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH_CPU = "pip install torch --index-url https://download.pytorch.org/whl/cpu"


def install_command(extra: str) -> str:
    """The line that installs an extra here: from the checkout if this is one, else from the package index."""
    place = f"-e '{ROOT}[{extra}]'" if (ROOT / "pyproject.toml").exists() else f"'clearhead[{extra}]'"
    return f"pip install {place}"


def torch_missing(what: str) -> str:
    """One sentence for something that needs PyTorch."""
    return f"{what} needs PyTorch. Without a GPU: {TORCH_CPU}  With one: {install_command('torch')}"
