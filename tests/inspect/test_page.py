"""The one-file page: complete, of bounded size, and with text that stays text. `tests/studio` opens it in a browser."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from numpy.testing import assert_allclose

from clearhead.inspect.bundle import WEB, bundle, hash_source, one_file, style
from clearhead.inspect.inspection import Inspection, inspect
from clearhead.inspect.page import enclose, page, rank_heads

from .tools import letters, small, writer


def answers_of(text: str) -> dict[str, Any]:
    found = re.search(r'id="answers">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])["answers"]


@pytest.fixture(scope="module")
def inspection() -> Inspection:
    return inspect(writer(), "the cat sat on the mat.", tokenizer=letters(), name="writer")


def test_every_module_of_the_page_is_bundled_once(inspection: Inspection) -> None:
    script = bundle("page.js")
    for path in [*WEB.glob("views/*.js"), *WEB.glob("parts/*.js"), WEB / "ui.js", WEB / "source.js"]:
        assert script.count(f"__modules['{path.relative_to(WEB).as_posix()}'] = (()") == 1
    assert not re.search(r"^(import|export) ", script, re.MULTILINE)


def test_the_policy_allows_only_the_page_itself(inspection: Inspection) -> None:
    text = page(inspection)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert hash_source(bundle("page.js")).strip("'") in policy[1]
    assert hash_source(style()).strip("'") in policy[1]
    assert "unsafe" not in policy[1]
    assert "http" not in policy[1]


def test_enclosed_numbers_are_the_models(inspection: Inspection) -> None:
    answers = answers_of(page(inspection))
    assert answers["tokens"][0][1]["labels"] == inspection.model_input.labels
    heads = sum(len(map.heads) for map in inspection.maps)
    assert len(answers["head"]) == heads
    place, answer = answers["head"][0]
    import base64

    import numpy as np

    weights = np.frombuffer(base64.b64decode(answer["weights"]["data"]), "<f4").reshape(answer["weights"]["shape"])
    assert_allclose(weights, inspection.map(place["layer"], place["head"], place["place"]).values)


@pytest.mark.parametrize("text", ["{{script}}", "</script><script>alert(1)</script>", "<!--<script>", "{{answers}}"])
def test_text_stays_text(text: str) -> None:
    given = inspect(writer(), [1, 2, 3], tokenizer=None, labels=[text, "a", text], name=text)
    made = page(given)
    assert made.count("<script") == 2
    assert answers_of(made)["tokens"][0][1]["labels"][0] == text
    assert text in answers_of(made)["models"][0][1]["models"]


def test_placeholders_are_filled_in_one_pass() -> None:
    made = one_file("{{style}} {{script}}", {"models": []}, {})
    assert "<title>{{style}} {{script}}</title>" in made


def test_a_page_stays_below_its_limit_and_says_what_is_missing() -> None:
    given = inspect(small("tiny-llama"), list(range(60)))
    whole = page(given)
    limit = len(bundle("page.js")) + len(style()) + 300_000
    assert len(whole) > limit
    made = page(given, limit)
    assert len(made.encode()) <= limit
    assert "heads are enclosed as thumbnails only" in answers_of(made)["models"][0][1]["notes"][0]


def test_the_most_telling_heads_come_first(inspection: Inspection) -> None:
    heads = [(map, head) for map in inspection.maps for head in map.head_summaries]
    ranked = rank_heads(heads)
    assert len(ranked) == len(heads)
    tags = [head.tag for _, head in ranked if head.tag]
    assert len(set(tags[: len(set(tags))])) == len(set(tags))


def test_the_lens_of_a_page_is_that_of_the_inspection(inspection: Inspection) -> None:
    (_, lens), *_ = enclose(inspection, 10_000_000, ())["lens"]
    grid = inspection.lens()
    assert grid.texts is not None
    assert [[best[0][0] for best in line] for line in lens["top"]] == grid.texts


def test_a_notebook_shows_the_page_in_a_frame(inspection: Inspection) -> None:
    assert inspection._repr_html_().startswith('<iframe title="attention" srcdoc="&lt;!doctype html&gt;')
