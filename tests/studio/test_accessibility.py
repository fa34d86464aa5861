"""axe-core finds nothing to complain about, in every view, theme and language.

axe-core comes from npm and is used in development only: `npm pack axe-core`, then set CLEARHEAD_AXE to its axe.min.js.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .test_browser import VIEWS
from .tools import Watched

AXE = Path(os.environ.get("CLEARHEAD_AXE", "node_modules/axe-core/axe.min.js"))


@pytest.fixture(scope="module")
def page(chromium: Any, studio: str) -> Iterator[Watched]:
    if not AXE.is_file():
        pytest.skip("axe-core is not here: npm pack axe-core, and set CLEARHEAD_AXE to its axe.min.js")
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, locale="en-US", bypass_csp=True)
    watched = Watched(context.new_page())
    watched.page.goto(studio)
    watched.page.add_script_tag(path=str(AXE))
    yield watched
    context.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_axe_finds_nothing(page: Watched, lang: str, theme: str) -> None:
    places = [f"view={view}" for view in VIEWS] + [
        "view=atlas&open=true&layer=1&head=2",
        "view=flow&step=stack.blocks.1.mixer.scores&cell=1,3,2&tour=4",
        "view=lens&token=s",
        "view=atlas&compare=true&otherText=To be or not to do",
        'view=intervene&changes=[{"kind":"head","place":"stack","layer":1,"head":2,"do":"zero"}]',
    ]
    found = {}
    for place in places:
        page.go(f"#{place}&lang={lang}&theme={theme}", "main .panel")
        page.until("!document.querySelector('.busy, .stale')")
        result = page.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        for one in result["violations"]:
            found[f"{place}: {one['id']}"] = [node["html"][:160] for node in one["nodes"][:3]]
    assert found == {}
