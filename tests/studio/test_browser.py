"""The studio in a real browser: what is on screen equals the Python API, and nothing leaves this machine."""

from __future__ import annotations

import contextlib
import io
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

import clearhead
from clearhead.inspect.questions import Session
from clearhead.nn.tap import Taps
from clearhead.studio.app import SMALL_MODEL

from .tools import CHROMIUM, Watched, running_studio

TEXT = "To be or not to be"
VIEWS = ("write", "flow", "atlas", "lens", "intervene", "train", "lab", "check", "build")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("uvicorn")
    runs = tmp_path_factory.mktemp("runs")
    others = ("tiny-bert", "tiny-vit", "tiny-mamba", "tiny-mixtral", "tiny-transformer")
    with running_studio(str(SMALL_MODEL), *others, "--text", TEXT, "--runs", str(runs)) as address:
        yield address


@pytest.fixture(scope="module")
def context(chromium: Any, studio: str) -> Iterator[Any]:
    made = chromium.new_context(viewport={"width": 1440, "height": 900}, locale="en-US")
    page = made.new_page()
    page.goto(studio)
    page.close()
    yield made
    made.close()


@pytest.fixture
def seen(context: Any, studio: str) -> Iterator[Watched]:
    watched = Watched(context.new_page())
    watched.base = "http://" + urlsplit(studio).netloc + "/"
    yield watched
    assert watched.messages == []
    assert all(url.startswith((watched.base, "data:", "about:", "blob:")) for url in watched.requests)
    watched.page.close()


@pytest.fixture(scope="module")
def inspection() -> Any:
    return clearhead.load(SMALL_MODEL).inspect(TEXT)


def test_all_nine_views_open_in_both_languages_and_themes(seen: Watched) -> None:
    for lang, theme in (("en", "light"), ("zh", "dark")):
        seen.go(seen.base, f"#lang={lang}&theme={theme}", "main .panel")
        for view in VIEWS:
            seen.open(view)
            assert seen.page.locator("h1").count() == 1
            assert not seen.page.locator("main .error").count(), view
        assert seen.page.locator(".studio").get_attribute("data-theme") == theme
        shown = seen.page.locator("nav").inner_text()
        assert ("注意力" in shown) == (lang == "zh")


def test_flow_lists_every_step_and_cells_equal_taps(seen: Watched, inspection: Any) -> None:
    whole = Taps(read=["*"])
    inspection.model_input.run(whole)
    seen.go(seen.base, "#view=flow", "[data-step]")
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
        seen.go(seen.base, f"#view=flow&step={path}&cell={at}", f"[data-cell='{path}:{at}']")
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
    seen.go(seen.base, "#view=atlas", ".thumb")
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
    seen.go(seen.base, "", ".tok")
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
    seen.go(seen.base, "#view=intervene", "[data-after]")

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


@pytest.mark.parametrize("name", ["tiny-bert", "tiny-vit", "tiny-mamba", "tiny-mixtral", "tiny-transformer"])
def test_other_architectures_open_without_a_message(name: str, seen: Watched) -> None:
    seen.go(seen.base, f"#model={name}", "main .panel")
    for view in ("flow", "atlas"):
        seen.open(view)
        assert seen.messages == []


def test_hostile_text_stays_text(seen: Watched) -> None:
    hostile = "<img src=x onerror=alert(1)> {{script}} </script><b>"
    seen.go(seen.base, "", ".tok")
    seen.page.locator("[data-act=text]").fill(hostile)
    seen.until("document.querySelectorAll('.panel .tok').length > 15")
    for view in ("flow", "atlas", "lens", "intervene"):
        seen.open(view)
    assert seen.page.locator("main img, main b[onerror], main script").count() == 0


def test_chinese_text_shows_characters_everywhere(seen: Watched) -> None:
    seen.go(seen.base, "#lang=zh", ".tok")
    seen.page.locator("[data-act=text]").fill("从前有一个小女孩")
    seen.until("document.body.innerText.includes('从·1/3')")
    for view in ("write", "flow", "atlas", "lens"):
        seen.open(view)
        shown = seen.page.locator("main").inner_text()
        assert not re.search("[\ufffdĠÄäå]", shown), view


def test_the_tour_points_at_real_numbers(seen: Watched) -> None:
    seen.go(seen.base, "#tour=1", ".tour")
    for number in range(2, 11):
        seen.page.locator(".tour .main").click()
        seen.until(f"document.querySelector('.tour').innerText.includes('{number} of 10')")
    seen.go(seen.base, "#tour=3&view=flow", ".tour")
    seen.page.locator(".tour .main").click()
    seen.page.wait_for_selector("[data-step$='mixer.scores'][aria-current=true]")


def test_a_phone_loses_nothing(seen: Watched) -> None:
    seen.page.set_viewport_size({"width": 390, "height": 800})
    seen.go(seen.base, "", "main .panel")
    for view in VIEWS:
        seen.open(view)
        wide = seen.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 1, f"{view} is wider than the screen by {wide}"


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


def test_a_widget_asks_its_kernel(chromium: Any, inspection: Any) -> None:
    """The widget's module in a page, with a stand-in for the notebook that passes messages on to Python."""
    pytest.importorskip("anywidget")
    import json

    import clearhead.notebook as nb
    from clearhead.inspect.bundle import widget_module
    from clearhead.inspect.questions import encode

    widget = nb.atlas(inspection.model_input.model, TEXT)
    sent: list[dict[str, Any]] = []
    widget.send = sent.append  # type: ignore[method-assign]
    watched = Watched(chromium.new_page())

    def kernel(message: str) -> str:
        widget._handle_custom_msg(json.loads(message), [])
        return json.dumps(encode(sent[-1]))

    watched.page.expose_function("kernel", kernel)
    watched.page.set_content("<div id=el></div>")
    watched.page.evaluate(
        """async ([source, options]) => {
          const module = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
          const heard = [];
          const model = {
            get: () => options,
            on: (_, callback) => heard.push(callback),
            send: async (message) => {
              const answer = JSON.parse(await kernel(JSON.stringify(message)));
              heard.forEach((callback) => callback(answer));
            },
          };
          module.default.render({ model, el: document.getElementById("el") });
        }""",
        [widget_module(), dict(widget.options)],
    )
    watched.page.wait_for_selector(".thumb")
    assert watched.page.locator(".thumb").count() == 12
    assert "text/html" in widget._repr_mimebundle_()[0]
    assert watched.messages == []


def run_code(code: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "copied", "exec"), {})
    return out.getvalue()


def test_python_copied_from_every_view_runs(seen: Watched) -> None:
    change = '[{"kind":"head","place":"stack","layer":1,"head":2,"do":"zero"}]'
    for place in ("view=write", "view=flow&step=head.logits&cell=3,40", "view=lens&token=s", "view=build", "view=lab"):
        seen.go(seen.base, f"#{place}", "[data-python]")
        seen.page.wait_for_load_state("networkidle")
        codes = seen.page.evaluate("[...document.querySelectorAll('[data-python]')].map((one) => one.dataset.python)")
        assert codes
        for code in dict.fromkeys(codes):
            assert run_code(code).strip(), code
    seen.go(seen.base, f"#view=intervene&changes={change}", "[data-part=effect] [data-python]")
    code = seen.page.locator("[data-part=effect] [data-python]").get_attribute("data-python") or ""
    best = seen.page.locator("[data-after]").first
    shown = float(best.get_attribute("data-value") or "nan")
    assert f"{shown:.4f}" in run_code(code).replace("\n", " ")


def test_a_saved_file_is_read_by_numpy(seen: Watched, inspection: Any, tmp_path: Path) -> None:
    seen.go(seen.base, "#view=atlas&open=true&layer=1&head=2", "[data-part=explanation] [data-cell]")
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
    seen.go(seen.base, "#view=write", "[data-act=compare]")
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


def test_a_mistake_is_shown_with_its_counterexample_in_both_languages(seen: Watched) -> None:
    for lang in ("en", "zh"):
        seen.go(seen.base, f"#view=check&lang={lang}", "textarea.code")
        assert seen.page.locator("[data-exercise]").count() == 19
        seen.page.fill("textarea.code", NO_SCALE)
        seen.page.click("[data-act=check]")
        seen.page.wait_for_selector("[data-code=no-scale]", timeout=90_000)
        said = seen.page.locator("[data-code=no-scale]").inner_text()
        assert bool(re.search("[\u4e00-\u9fff]", said)) == (lang == "zh")
        assert seen.page.locator("[data-part=example] .matrix").count() == 3
    seen.page.fill("textarea.code", "while True:\n    pass\n")
    seen.page.click("[data-act=check]")
    seen.open("build", "[data-cost=parameters]")
    assert seen.page.locator("[data-cost=parameters]").get_attribute("data-value")


def test_a_part_chosen_in_build_changes_the_cost(seen: Watched) -> None:
    seen.go(seen.base, "#view=build", "[data-cost=parameters]")
    seen.page.select_option("select[data-field='stack.pattern.0.mixer']", "Mamba")
    config = clearhead.preset("tiny-llama").with_value("stack.pattern.0.mixer", {"kind": "Mamba"})
    want = clearhead.cost(config, length=128).parameters.total
    seen.until(f"document.querySelector('[data-cost=parameters]').dataset.value === '{want}'")
    seen.page.get_by_role("button", name="Undo").click()
    want = clearhead.cost(clearhead.preset("tiny-llama"), length=128).parameters.total
    seen.until(f"document.querySelector('[data-cost=parameters]').dataset.value === '{want}'")


def test_a_run_started_in_the_page_shows_curves_and_heads(seen: Watched) -> None:
    seen.go(seen.base, "#view=train", "[data-act=start]")
    steps, name = seen.page.locator("[data-part=start] input[type=number]"), "browser"
    steps.fill("4")
    seen.page.locator("[data-part=start] input").nth(2).fill(name)
    seen.page.click("[data-act=start]")
    seen.page.wait_for_selector(f"[data-run={name}]", timeout=90_000)
    seen.page.wait_for_selector(f"[data-run={name}][data-state=done]", timeout=180_000)
    seen.page.wait_for_selector("[data-part=curves] path")
    seen.page.wait_for_selector("[data-frame='4'] .thumb canvas")
    seen.page.locator("[data-part=frames] input[type=range]").fill("0")
    seen.page.wait_for_selector("[data-frame='1'] .thumb canvas")
    code = seen.page.locator("[data-part=curves] [data-python]").get_attribute("data-python") or ""
    assert run_code(code).splitlines()[-1].startswith("4 ")
    seen.page.get_by_role("button", name="Look inside").click()
    seen.page.wait_for_selector("main[data-view=atlas] .thumb", timeout=60_000)


def test_focus_stays_inside_the_page(seen: Watched) -> None:
    seen.go(seen.base, "#view=atlas", ".thumb")
    for _ in range(30):
        seen.page.keyboard.press("Tab")
        assert seen.page.evaluate("document.activeElement !== document.body || document.activeElement === null")
    seen.page.focus(".thumb")
    seen.page.keyboard.press("Enter")
    seen.page.wait_for_selector(".heat")
    seen.until("document.activeElement.tagName === 'H2'")
    seen.page.set_viewport_size({"width": 720, "height": 450})  # 1440 × 900 at 200 %
    wide = seen.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 1
