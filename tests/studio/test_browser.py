"""The studio in a real browser: what is on screen equals the Python API, and nothing leaves this machine."""

from __future__ import annotations

import contextlib
import io
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clearhead
from clearhead.inspect.questions import Session
from clearhead.nn.tap import Taps
from clearhead.studio.app import SMALL_MODEL
from clearhead.training.steps import load_step

from .tools import STUDIO_TEXT, Watched

TEXT = STUDIO_TEXT
VIEWS = ("write", "flow", "atlas", "lens", "intervene", "train", "lab", "check", "build")


@pytest.fixture(scope="module")
def page(chromium: Any, studio: str) -> Iterator[Any]:
    """One page for all tests: they change its address, which the studio follows without reloading."""
    context = chromium.new_context(viewport={"width": 1440, "height": 900}, locale="en-US")
    made = context.new_page()
    made.watched = Watched(made)
    made.goto(studio)
    made.wait_for_selector("main .panel")  # until then the page does not follow its address
    yield made
    context.close()


@pytest.fixture
def seen(page: Any) -> Iterator[Watched]:
    watched: Watched = page.watched
    watched.forget()
    yield watched
    assert watched.messages == []
    assert all(url.startswith((watched.base, "data:", "about:", "blob:")) for url in watched.requests)


@pytest.fixture(scope="module")
def inspection() -> Any:
    return clearhead.load(SMALL_MODEL).inspect(TEXT)


def test_all_nine_views_open_in_both_languages_and_themes_and_fit_a_phone(seen: Watched) -> None:
    for lang, theme in (("en", "light"), ("zh", "dark")):
        seen.go(f"#lang={lang}&theme={theme}", "main .panel")
        for view in VIEWS:
            seen.open(view)
            assert seen.page.locator("h1").count() == 1
            assert not seen.page.locator("main .error").count(), view
            for width, height in ((390, 800), (720, 450), (1440, 900)):  # a phone, and 1440 × 900 at 200 %
                seen.page.set_viewport_size({"width": width, "height": height})
                over = seen.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                assert over <= 1, f"{view} is wider than {width} pixels by {over}"
            panels = seen.page.evaluate(PANELS_WITHOUT_CODE)
            assert set(panels) <= WITHOUT_NUMBERS, f"{view}: no copy as Python in {panels}"
        assert seen.page.locator(".studio").get_attribute("data-theme") == theme
        shown = seen.page.locator("nav").inner_text()
        assert ("注意力" in shown) == (lang == "zh")


WITHOUT_NUMBERS = {
    "explanation",
    "generated",
    "edit",
    "patch",
    "switches",
    "start",
    "runs",
    "verdict",
    "instrument",
    "track",
    "",
}
"""Panels that ask or explain, or show numbers only after a click."""
PANELS_WITHOUT_CODE = """[...document.querySelectorAll("main .panel")]
  .filter((one) => !one.querySelector("[data-python]")).map((one) => one.dataset.part || "")"""


def test_flow_lists_every_step_and_cells_equal_taps(seen: Watched, inspection: Any) -> None:
    whole = Taps(read=["*"])
    inspection.model_input.run(whole)
    seen.go("#view=flow", "[data-step]")
    listed = []
    for section in seen.page.locator("[data-section]").all():
        section.click()
        name = section.get_attribute("data-section") or ""
        seen.until(f"document.querySelector('[data-section][aria-current=true]').dataset.section === '{name}'")
        listed += seen.page.evaluate("[...document.querySelectorAll('[data-step]')].map((one) => one.dataset.step)")
    session = Session.of_model(inspection.model_input.model, TEXT)
    steps = [step["name"] for step in session.ask("flow")["steps"]]
    assert listed == steps
    generator = random.Random(0)
    cells = []
    for path in generator.choices(steps, k=50):
        cells.append([path, [generator.randrange(size) for size in whole.values[path].shape[1:]]])
    answers = seen.page.evaluate(ASK_CELLS, [TEXT, cells])
    for (path, index), answer in zip(cells, answers, strict=True):
        assert answer["value"] == pytest.approx(float(whole.values[path][(0, *index)]), abs=1e-5), path
        assert answer["stages"][-1]["value"] == pytest.approx(answer["value"], rel=1e-5, abs=1e-5), path
    for path, index in (
        ("stack.blocks.1.mixer.scores", (2, 4, 3)),
        ("stack.blocks.0.mixer.weights", (1, 5, 2)),
        ("stack.blocks.2.ffn.down", (3, 17)),
        ("head.logits", (5, 40)),
    ):
        at = ",".join(map(str, index))
        seen.go(f"#view=flow&step={path}&cell={at}", f"[data-cell='{path}:{at}']")
        value = float(seen.page.locator("[data-cell]").get_attribute("data-value") or "nan")
        assert value == pytest.approx(float(whole.values[path][(0, *index)]), abs=1e-5)
    seen.page.locator("[data-part=explanation] .bars button").first.click()
    seen.page.wait_for_selector("[data-cell^='stack.final_norm']")
    seen.page.go_back()
    seen.page.wait_for_selector("[data-cell^='head.logits']")


ASK_CELLS = """async ([text, cells]) => Promise.all(cells.map(async ([path, index]) => (await fetch("/ask/cell", {
  method: "POST", headers: {"content-type": "application/json", "x-clearhead": "studio"},
  body: JSON.stringify({text, path, index}),
})).json()))"""


def test_from_all_heads_to_a_cell_by_mouse_and_keyboard(seen: Watched, inspection: Any) -> None:
    seen.go("#view=atlas", ".thumb")
    assert seen.page.locator(".thumb").count() == sum(len(map.heads) for map in inspection.maps)
    seen.page.focus("[data-head='stack.1.2']")
    seen.page.keyboard.press("Enter")
    seen.page.wait_for_selector("[data-part=explanation] [data-cell]")
    assert seen.page.evaluate("document.activeElement.tagName") == "H2"
    path, at = (seen.page.locator("[data-cell]").get_attribute("data-cell") or "").split(":")
    head, query, key = map(int, at.split(","))
    weights = inspection.map(1, 2).values
    assert (path, head) == ("stack.blocks.1.mixer.weights", 2)
    inside = [(r, c) for r in range(2, len(weights)) for c in range(1, len(weights)) if r != c]
    assert (query, key) == max(inside, key=lambda cell: weights[cell])
    seen.page.focus(".heat")
    seen.page.keyboard.press("ArrowUp")
    seen.page.wait_for_selector(f"[data-cell='{path}:2,{query - 1},{key}']")
    shown = float(seen.page.locator("[data-cell]").get_attribute("data-value") or "nan")
    assert shown == pytest.approx(float(weights[query - 1, key]), abs=1e-6)
    seen.page.go_back()
    seen.page.wait_for_selector(".thumb")


def test_of_two_quick_edits_only_the_last_is_shown(seen: Watched) -> None:
    seen.go("", ".tok")
    box = seen.page.locator("[data-act=text]")
    box.fill("My lord the king")
    box.fill("My lord the queen")
    model = clearhead.load(SMALL_MODEL)
    want = model.inspect("My lord the queen")
    count = len(want.model_input.labels)
    seen.until(f"document.querySelectorAll('.panel .tok').length === {count}")
    best = want.next(-1, 1)[0]
    seen.page.wait_for_selector("[data-part=predictions] .bars li")
    shown = best[0].replace(" ", "·").replace("\n", "⏎")
    seen.until(f"document.querySelector('[data-part=predictions] .bars button').textContent === '{shown}'")


def test_switching_a_head_off_equals_taps_and_undo_restores(seen: Watched, inspection: Any) -> None:
    seen.go("#view=intervene", "[data-after]")

    def shown() -> dict[int, float]:
        cells = seen.page.locator("[data-after]").all()
        return {int(c.get_attribute("data-after") or 0): float(c.get_attribute("data-value") or "nan") for c in cells}

    before = shown()
    seen.page.click("button[aria-label='layer 1 head 2']")
    seen.until("!document.querySelector('main').innerText.includes('KL divergence 0 nats')")

    def zero(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[:, 2] = 0
        return x

    want = inspection.model_input.run(Taps(replace={"stack.blocks.1.mixer.mixed": zero}))[0, -1].softmax(-1)
    for id, value in shown().items():
        if value == value:
            assert value == pytest.approx(float(want[id]), abs=1e-6)
    seen.page.get_by_role("button", name="Undo").click()
    seen.until("document.querySelector('main').innerText.includes('KL divergence 0 nats')")
    assert shown() == before
    seen.page.get_by_role("button", name="Measure every head").click()
    seen.page.wait_for_selector("[data-measured='12']", timeout=60_000)


def test_other_architectures_open_without_a_message(seen: Watched) -> None:
    for name in ("tiny-bert", "tiny-vit", "tiny-mamba", "tiny-mixtral", "tiny-transformer"):
        for view, wait in (("flow", "[data-step]"), ("atlas", "[data-part=heads]")):
            seen.go(f"#model={name}&view={view}", f"main[data-view={view}] {wait}")
            seen.until(f"document.title.includes('{name}')")
            assert seen.messages == [], name


def test_hostile_text_stays_text(seen: Watched) -> None:
    hostile = "<img src=x onerror=alert(1)> {{script}} </script><b>"
    seen.go("", ".tok")
    seen.page.locator("[data-act=text]").fill(hostile)
    seen.until("document.querySelectorAll('.panel .tok').length > 15")
    for view in ("flow", "atlas", "lens", "intervene"):
        seen.open(view)
    assert seen.page.locator("main img, main b[onerror], main script").count() == 0


def test_chinese_text_shows_characters_everywhere(seen: Watched) -> None:
    seen.go("#lang=zh", ".tok")
    seen.page.locator("[data-act=text]").fill("从前有一个小女孩")
    seen.until("document.body.innerText.includes('从·1/3')")
    for view in ("write", "flow", "atlas", "lens"):
        seen.open(view)
        shown = seen.page.locator("main").inner_text()
        assert not re.search("[\ufffdĠÄäå]", shown), view


def test_the_tour_points_at_real_numbers(seen: Watched) -> None:
    seen.go("#tour=1", ".tour")
    for number in range(2, 11):
        seen.page.locator(".tour .main").click()
        seen.until(f"document.querySelector('.tour').innerText.includes('{number} of 10')")
    seen.go("#tour=3&view=flow", ".tour")
    seen.page.locator(".tour .main").click()
    seen.page.wait_for_selector("[data-step$='mixer.scores'][aria-current=true]")


def test_one_file_has_the_same_views(chromium: Any, inspection: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    inspection.save(path)
    watched = Watched(chromium.new_page())
    watched.page.goto(path.as_uri())
    watched.page.wait_for_selector(".thumb")
    watched.page.click("[data-head='stack.1.2']")
    watched.page.wait_for_selector("[data-part=explanation] [data-cell]")
    path_and_at = watched.page.locator("[data-cell]").get_attribute("data-cell") or ""
    _, query, key = map(int, path_and_at.split(":")[1].split(","))
    shown = float(watched.page.locator("[data-cell]").get_attribute("data-value") or "nan")
    assert shown == pytest.approx(float(inspection.map(1, 2).values[query, key]), abs=1e-6)
    assert watched.page.locator("[data-part=explanation] .stage").count() == 2
    for view in ("write", "flow", "lens"):
        watched.open(view)
    assert watched.messages == []
    assert watched.requests == [path.as_uri()]


def test_widgets_ask_their_kernel(chromium: Any, inspection: Any, short_run: Path) -> None:
    """The widgets' module in a page, with a stand-in for the notebook that passes messages on to Python."""
    pytest.importorskip("anywidget")
    import json

    import clearhead.notebook as nb
    from clearhead.inspect.bundle import widget_module
    from clearhead.inspect.questions import encode

    def attention(q: Any, k: Any, v: Any) -> Any:
        scores = q @ np.swapaxes(k, -1, -2)
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        return (powers / powers.sum(-1, keepdims=True)) @ v

    widgets = [nb.atlas(inspection.model_input.model, TEXT), nb.check(attention), nb.train(short_run)]
    sent: list[dict[str, Any]] = []
    for widget in widgets:
        widget.send = sent.append
    watched = Watched(chromium.new_page())

    def kernel(number: int, message: str) -> str:
        widgets[number]._handle_custom_msg(json.loads(message), [])
        return json.dumps(encode(sent[-1]))

    watched.page.expose_function("kernel", kernel)
    watched.page.set_content("<div id=el0></div><div id=el1></div><div id=el2></div>")
    watched.page.evaluate(MOUNT, [widget_module(), [dict(widget.options) for widget in widgets]])
    watched.page.wait_for_selector("#el0 .thumb")
    assert watched.page.locator("#el0 .thumb").count() == 12
    watched.page.wait_for_selector("#el1 [data-code=no-scale]")
    assert watched.page.locator("#el1 [data-part=example] .matrix").count() == 3
    watched.page.wait_for_selector("#el2 [data-frame='4'] .thumb canvas")
    assert watched.messages == []
    watched.page.close()


MOUNT = """async ([source, all]) => {
  const module = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
  all.forEach((options, number) => {
    const heard = [];
    const model = {
      get: () => options,
      on: (_, callback) => heard.push(callback),
      send: async (message) => {
        const answer = JSON.parse(await kernel(number, JSON.stringify(message)));
        heard.forEach((callback) => callback(answer));
      },
    };
    module.default.render({ model, el: document.getElementById("el" + number) });
  });
}"""


def run_code(code: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "copied", "exec"), {"__name__": "copied"})
    return out.getvalue()


def test_python_that_the_page_itself_writes_gives_what_is_on_screen(seen: Watched) -> None:
    """Most code comes with an answer, and `test_questions.py` runs it. The page writes the code of these."""
    seen.go("#view=atlas&open=true&layer=1&head=2&query=5&key=1", "[data-part=whatif] [data-python]")
    seen.page.locator("[data-part=whatif] input[type=checkbox]").first.click()  # without the scale
    seen.until("document.querySelector('[data-part=whatif] [data-python]').dataset.python.includes('4.89')")
    best = float(seen.page.locator("[data-part=whatif] .num").nth(1).inner_text())
    numbers = [float(x) for x in re.findall(r"\d\.\d+(?:e-?\d+)?", run_code(seen.code("whatif")))]
    assert max(numbers) == pytest.approx(best, abs=1e-3)
    change = '[{"kind":"head","place":"stack","layer":1,"head":2,"do":"zero"}]'
    seen.go(f"#view=intervene&changes={change}", "[data-part=effect] [data-python*=zero]")
    shown = float(seen.page.locator("[data-after]").first.get_attribute("data-value") or "nan")
    assert f"{shown:.4f}" in run_code(seen.code("effect")).replace("\n", " ")


def test_a_saved_file_is_read_by_numpy(seen: Watched, inspection: Any, tmp_path: Path) -> None:
    seen.go("#view=atlas&open=true&layer=1&head=2", "[data-part=explanation] [data-cell]")
    for name in ("NPZ", "CSV", "SVG"):
        with seen.page.expect_download() as saved:
            seen.page.get_by_role("button", name=name, exact=True).first.click()
        saved.value.save_as(tmp_path / name)
    want = inspection.map(1, 2).values
    assert np.load(tmp_path / "NPZ")["values"] == pytest.approx(want, abs=1e-6)
    rows = (tmp_path / "CSV").read_text().splitlines()
    assert float(rows[-1].rsplit(",", 1)[1]) == pytest.approx(float(want[-1, -1]), abs=1e-6)
    assert (tmp_path / "SVG").read_text().count("<rect") == want.size


def test_two_texts_stand_side_by_side(seen: Watched, inspection: Any) -> None:
    other = "To be or not to do"
    seen.go("#view=write", "[data-act=compare]")
    seen.page.click("[data-act=compare]")
    seen.page.locator("[data-act=other-text]").fill(other)
    seen.page.wait_for_selector("[data-part=versus] [data-after]")
    want = inspection.model_input.model.inspect(other).next(-1, 1)[0]
    shown = seen.page.locator(f"[data-part=versus] [data-after='{want[1]}']").get_attribute("data-value")
    assert float(shown or "nan") == pytest.approx(want[2], abs=1e-6)
    seen.page.click("button[data-view=atlas]")
    seen.page.wait_for_selector(".twins canvas:nth-child(3)")
    seen.page.click("[data-head='stack.0.1']")
    seen.page.wait_for_selector("[data-part=compare] .heat:nth-child(1)")


NO_SCALE = """import numpy as np

def attention(q, k, v):
    s = q @ np.swapaxes(k, -1, -2)
    w = np.exp(s - s.max(-1, keepdims=True))
    return (w / w.sum(-1, keepdims=True)) @ v
"""


def test_a_mistake_is_shown_with_its_counterexample_and_an_endless_loop_leaves_the_page_usable(seen: Watched) -> None:
    seen.go("#view=check&lang=zh", "textarea.code")
    assert seen.page.locator("[data-exercise]").count() == 19
    seen.page.fill("textarea.code", NO_SCALE)
    seen.page.click("[data-act=check]")
    seen.page.wait_for_selector("[data-code=no-scale]", timeout=90_000)
    said = seen.page.locator("[data-code=no-scale]").inner_text()
    assert re.search("[\u4e00-\u9fff]", said)
    assert seen.page.locator("[data-part=example] .matrix").count() == 3
    assert "not divided by √d_k" in run_code(seen.code("verdict"))
    seen.page.fill("textarea.code", "while True:\n    pass\n")
    seen.page.click("[data-act=check]")
    seen.open("build", "[data-cost=parameters]")
    assert seen.page.locator("[data-cost=parameters]").get_attribute("data-value")


def test_a_part_chosen_in_build_changes_the_cost(seen: Watched) -> None:
    seen.go("#view=build", "[data-cost=parameters]")
    seen.page.select_option("select[data-field='stack.pattern.0.mixer']", "Mamba")
    config = clearhead.preset("tiny-llama").with_value("stack.pattern.0.mixer", {"kind": "Mamba"})
    want = clearhead.cost(config, length=128).parameters.total
    seen.until(f"document.querySelector('[data-cost=parameters]').dataset.value === '{want}'")
    seen.page.get_by_role("button", name="Undo").click()
    want = clearhead.cost(clearhead.preset("tiny-llama"), length=128).parameters.total
    seen.until(f"document.querySelector('[data-cost=parameters]').dataset.value === '{want}'")


def test_a_run_started_in_the_page_shows_curves_and_heads(seen: Watched, short_run: Path) -> None:
    seen.go("#view=train", "[data-act=start]")
    steps, name = seen.page.locator("[data-part=start] input[type=number]"), "browser"
    seen.page.locator("[data-part=start] input").nth(0).fill(str(short_run.parent / "text.txt"))
    steps.fill("4")
    seen.page.locator("[data-part=start] input").nth(2).fill(name)
    seen.page.click("[data-act=start]")
    seen.page.wait_for_selector(f"[data-run={name}]", timeout=90_000)
    seen.page.wait_for_selector(f"[data-run={name}][data-state=done]", timeout=180_000)
    seen.page.wait_for_selector("[data-part=curves] path")
    seen.page.wait_for_selector("[data-frame='4'] .thumb canvas")
    seen.page.wait_for_selector("[data-part=samples] pre")
    seen.page.locator("[data-part=frames] input[type=range]").fill("0")
    seen.page.wait_for_selector("[data-frame='1'] .thumb canvas")
    for part, begins in (("curves", "4 "), ("frames", ""), ("samples", "")):
        assert run_code(seen.code(part)).splitlines()[-1].startswith(begins), part
    seen.page.locator(f"[data-run={name}]").get_by_role("button", name="Look inside").click()
    seen.page.wait_for_selector("main[data-view=atlas] .thumb", timeout=60_000)


def test_steps_of_a_run_stand_side_by_side(seen: Watched, short_run: Path) -> None:
    seen.go("#view=train", "[data-run=short] [data-act=before-after]")
    seen.page.click("[data-run=short] [data-act=before-after]")
    seen.page.wait_for_selector("main[data-view=atlas] .twins canvas:nth-child(3)", timeout=60_000)
    assert seen.page.locator(".prompt select").first.input_value() == "short · step 0"
    seen.page.click(".thumb >> nth=0")
    seen.page.wait_for_selector("[data-part=compare] [data-python]")
    one, two = (load_step(short_run, 0), clearhead.load(short_run))
    maps = [model.inspect(TEXT).map(1, 0, "stack").values for model in (one, two)]
    printed = re.findall(r"-?\d\.\d*(?:e-?\d+)?", run_code(seen.code("compare")))
    assert np.array(printed, float) == pytest.approx((maps[1] - maps[0]).ravel(), abs=1e-4)


def test_focus_stays_inside_the_page(seen: Watched) -> None:
    seen.go("#view=atlas", ".thumb")
    for _ in range(30):
        seen.page.keyboard.press("Tab")
        assert seen.page.evaluate("document.activeElement !== document.body || document.activeElement === null")
    seen.page.focus(".thumb")
    seen.page.keyboard.press("Enter")
    seen.page.wait_for_selector(".heat")
    seen.until("document.activeElement.tagName === 'H2'")
