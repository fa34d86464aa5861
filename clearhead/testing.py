"""Check learners' code in tests.

    from clearhead.testing import assert_right

    def test_attention():
        assert_right("student.py", "attention")

The pytest plugin `clearhead` offers the same function as the fixture `assert_right`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clearhead.checker.check import check

__all__ = ["assert_right"]


def assert_right(
    thing: Any, part: str | None = None, *, example: str | None = None, allow: tuple[str, ...] = ()
) -> None:
    """Raise AssertionError with the report unless the thing is right.

    `thing` is a path (`"student.py"` or `"student.py:attend"`), a function, a class or an object. With a path and a
    part, only the functions and classes of that part count. `allow=("fragile",)` lets fragile code pass.

    >>> from clearhead.reference import softmax
    >>> assert_right(softmax)
    """
    report = check(thing, None if is_plain_path(thing) else part, example=example, lang="en")
    if part is not None and is_plain_path(thing):
        report.parts = [found for found in report.parts if found.part == part]
        if not report.parts and not report.file_diagnostics:
            raise AssertionError(f"{thing} defines no {part}")
    if not report.passes(allow):
        raise AssertionError(f"\n{report}")


def is_plain_path(thing: Any) -> bool:
    return isinstance(thing, str | Path) and Path(thing).exists()
