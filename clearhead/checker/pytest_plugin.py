"""The pytest plugin: the fixture `assert_right`."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture(name="assert_right")
def assert_right_fixture() -> Callable[..., None]:
    """Return `clearhead.testing.assert_right`."""
    from clearhead.testing import assert_right

    return assert_right
