"""What all pictures have in common."""

from __future__ import annotations

import pytest

from clearhead.inspect.draw import figure, headline


@pytest.mark.parametrize("width", [2.0, 3.5, 9.0])
def test_a_title_is_no_wider_than_its_picture(width: float) -> None:
    with figure(width, 3.0) as picture:
        headline(picture, "stories15M reads “Once upon a time there was a little dog who liked to run”")
        picture.draw_without_rendering()
        box = picture._suptitle.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= picture.bbox.width
