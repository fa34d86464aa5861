"""The IPython extension: `%load_ext clearhead`, then `%%check` at the top of a cell."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any


def load_ipython_extension(shell: Any) -> None:
    """Register the cell magic `%%check [PART]`.

    >>> get_ipython().run_line_magic("load_ext", "clearhead")  # doctest: +SKIP
    """
    shell.register_magic_function(lambda line, cell: check_cell(shell, line, cell), "cell", "check")


def check_cell(shell: Any, line: str, cell: str) -> Any:
    """Run the cell, then check the functions and classes that it defines. The line may name the part."""
    from .check import check

    shell.run_cell(cell)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cell.py"
        path.write_text(imports_of(shell) + cell, encoding="utf-8")
        report = check(path, line.strip() or None)
    report.where = "cell"
    return report


def imports_of(shell: Any) -> str:
    """Return import lines for the modules of the notebook, so that the cell runs on its own."""
    modules = {name: value for name, value in shell.user_ns.items() if type(value).__name__ == "module"}
    names = [f"import {m.__name__} as {name}" for name, m in modules.items() if not name.startswith("_")]
    return "\n".join(names) + "\n" if names else ""
