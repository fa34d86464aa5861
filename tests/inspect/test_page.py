"""The page in a real browser: thumbnails, one head, one cell, by mouse and by keyboard, and nothing leaves the file."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from clearhead.configs import AlibiConfig, Window
from clearhead.inspect.grid import Grid
from clearhead.inspect.inspection import Inspection, inspect
from clearhead.inspect.page import grid_data, page, shrink_thumbnails
from clearhead.models.model import build
from clearhead.models.presets import preset
from tests.invariants.tools import randomise

from .tools import letters, small, writer

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
TEXT = "the cat sat on the mat. the cat"
ROW = "Array.from(row(data.maps[{map}], {head}, {i}).weights)"


class Watched:
    """A page that remembers what it asked the network for and what it complained of."""

    def __init__(self, page: Any) -> None:
        self.page, self.asked, self.complaints = page, [], []
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    """Opens an inspection or a file; at the end no page has asked for anything but itself, nor complained."""
    all_opened: list[Watched] = []

    def show(what: Inspection | Path, **options: Any) -> Watched:
        path = what if isinstance(what, Path) else tmp_path / "page.html"
        if isinstance(what, Inspection):
            what.save(path)
        watched = Watched(browser.new_page(viewport={"width": 1300, "height": 900}, **options))
        all_opened.append(watched)
        watched.page.goto(path.as_uri())
        return watched

    yield show
    for watched in all_opened:
        assert [url for url in watched.asked if not url.startswith(("file:", "data:"))] == []
        assert watched.complaints == []
        watched.page.close()


def test_from_thumbnails_to_a_head_to_a_cell(opened: Callable[..., Watched]) -> None:
    inspection = writer().inspect(TEXT, tokenizer=letters())
    seen = opened(inspection)
    assert seen.page.locator(".thumb").count() == 8
    assert TEXT in seen.text(".text")
    seen.page.locator(".thumb").nth(6).hover()
    described = inspection.heads[6]
    assert f"layer 1, head 2{': ' * bool(described.tag)}{described.tag}" in seen.text("#tip")
    assert f"entropy {described.entropy:.2f} bits" in seen.text("#tip")
    seen.page.locator(".thumb").nth(6).click()
    assert "layer 1, head 2" in seen.text("#crumbs")
    weights = inspection.at(1).weights(2)[0]
    assert_allclose(seen.page.evaluate(ROW.format(map=1, head=2, i=30)), weights[30], atol=2e-3)
    box = seen.page.locator("#matrix").bounding_box()
    cell = (box["width"] - 78) / 31
    seen.page.mouse.move(box["x"] + 78 + 4.5 * cell, box["y"] + 78 + 20.5 * cell)
    assert seen.text("#tip").startswith("“a” (20) reads “c” (4)")
    assert float(seen.text("#tip").rsplit(" ", 1)[1]) == pytest.approx(weights[20, 4], abs=2e-3)
    seen.page.mouse.click(box["x"] + 78 + 4.5 * cell, box["y"] + 78 + 20.5 * cell)
    heading = seen.text("#cell")
    assert float(heading.rsplit(" ", 1)[1]) == pytest.approx(weights[20, 4], abs=2e-3)
    attending = inspection.at(1).attending
    steps = seen.page.locator(".steps li").all_inner_texts()
    dot = float((attending.q[0, 2, 20] * attending.k[0, 1, 4]).sum())
    assert float(re.search(r"q·k = (\S+)", steps[0])[1]) == pytest.approx(dot, abs=0.02)
    assert float(re.search(r"= (\S+)", steps[1])[1]) == pytest.approx(dot / 8**0.5, abs=0.01)
    assert "may read 21 of 31 positions" in steps[2]
    mixed = weights[20] @ attending.v[0, 1].numpy()
    said = re.search(r"sum over all keys\s+(.*?)(?:  …|\n)", steps[4])[1].split()
    assert_allclose([float(number) for number in said], mixed[: len(said)], atol=5e-3)


def test_the_keyboard_alone(opened: Callable[..., Watched]) -> None:
    seen = opened(writer().inspect(TEXT, tokenizer=letters()))
    seen.press("ArrowDown", "ArrowRight", "ArrowRight")
    assert "layer 1, head 2" in seen.text("#live")
    seen.press("Enter")
    assert "layer 1, head 2" in seen.text("#crumbs")
    assert "(30) reads “t” (0)" in seen.text("#readout")
    seen.press("ArrowUp", "ArrowRight", "Shift+ArrowRight")
    assert "“a” (29) reads “␣” (11)" in seen.text("#readout")
    assert "reads" in seen.text("#live")
    seen.press("Enter")
    assert "(29)" in seen.text("#cell")
    seen.press("ArrowLeft")
    assert "(10)" in seen.text("#cell")
    seen.press("Escape", "]")
    assert "layer 1, head 3" in seen.text("#crumbs")
    seen.page.evaluate("move(0, 0)")
    seen.press("[", "]")
    assert "(0) reads “t” (0)" in seen.text("#readout")
    seen.press("+")
    assert seen.page.evaluate("window_(data.maps[state.map]).span") == 16
    seen.press("0", "Escape")
    assert seen.page.locator(".thumb").count() == 8
    assert seen.page.evaluate("document.activeElement.dataset.head") == "3"


def test_what_is_hidden_is_said(opened: Callable[..., Watched]) -> None:
    seen = opened(writer().inspect(TEXT, tokenizer=letters()))
    seen.page.evaluate("open(0, 0); move(3, 9); state.view = 'cell'; draw()")
    assert "may not read" in seen.page.locator(".steps li").nth(2).inner_text()
    assert seen.text("#cell").endswith("weight 0")
    seen.page.evaluate("state.view = 'head'; draw()")
    seen.page.locator("#nofirst").check()
    row = seen.page.evaluate(ROW.format(map=0, head=0, i=30))
    assert row[0] == 0
    assert sum(row) == pytest.approx(1, abs=1e-5)


def test_enter_on_a_button_is_the_buttons(opened: Callable[..., Watched]) -> None:
    seen = opened(writer().inspect("a cat", tokenizer=letters()), color_scheme="light")
    seen.page.evaluate("open(0, 0)")
    seen.page.locator("#theme").focus()
    seen.press("Enter")
    assert seen.page.evaluate("[state.view, document.documentElement.dataset.theme]") == ["head", "dark"]
    seen.page.locator("#matrix").focus()
    seen.press("Enter")
    assert seen.page.evaluate("state.view") == "cell"


def test_a_point_of_a_thumbnail_stands_for_its_neighbours(opened: Callable[..., Watched]) -> None:
    """259 tokens are 87 points, the last of a single token; where q and k were left out, cells are told by them."""
    model = small("tiny-llama")
    inspection = inspect(model, np.random.default_rng(0).integers(0, 50, 259).tolist())
    seen = opened(inspection)
    seen.page.evaluate("data.maps[0].detail[1] = null; open(0, 1)")
    weights = inspection.at(0).weights(1)[0]
    for i, j in ((131, 131), (200, 20), (258, 257)):
        block = weights[i // 3 * 3 : i // 3 * 3 + 3, j // 3 * 3 : j // 3 * 3 + 3]
        said = seen.page.evaluate(f"cellText(data.maps[0], {i}, {j})")
        assert said.endswith(f"at most {np.ceil(block.max() * 255) / 255:.2f}")
    whole = "thumbPart(data.maps[0], window_(data.maps[0])).slice(1)"
    assert_allclose(seen.page.evaluate(whole), [0, 0, 259 / 3, 259 / 3])
    seen.page.evaluate("move(128, 100); zoom(0.25, [128, 100])")
    shown = seen.page.evaluate("window_(data.maps[0])")
    part = [shown[key] / 3 for key in ("c", "r", "columns", "rows")]
    assert_allclose(seen.page.evaluate(whole), part)


def test_thumbnails_without_the_first_token(opened: Callable[..., Watched]) -> None:
    ids = np.random.default_rng(0).integers(0, 50, 140).tolist()
    for count, left_out in ((31, "the first token"), (140, "the first 2 tokens")):
        seen = opened(inspect(small("tiny-llama"), ids[:count]))
        drawn = "document.querySelector('.thumb canvas').getContext('2d')"
        inks = f"(({{ data }}) => [data[3], data[7]])({drawn}.getImageData(0, 9, 2, 1))"
        assert seen.page.evaluate(inks) == [255, 255]
        assert "without the first" not in seen.text("main")
        seen.page.locator("#nofirst").check()
        assert seen.page.evaluate(inks) == [0, 255]
        assert f"Thumbnails are without {left_out}, other weights as they are." in seen.text("main")
        seen.page.evaluate("data.maps[0].detail[0] = null; open(0, 0); move(20, 0)")
        assert f"without {left_out}, other weights as they are" in seen.text(".legend")
        assert seen.text("#readout").endswith("left out")


def test_masks_and_biases_travel(opened: Callable[..., Watched]) -> None:
    """Sparse masks as runs of keys, ALiBi by distance: rows in the page are those of the model."""
    config = preset("tiny-llama").changed("stack.pattern.0.mixer.score_bias", AlibiConfig())
    config = config.changed("stack.pattern.0.mixer.rotary", None).changed("stack.pattern.0.mixer.mask", Window(3))
    model = build(config)
    randomise(model)
    inspection = inspect(model.eval(), list(range(20)))
    seen = opened(inspection)
    for i in (0, 9, 19):
        assert_allclose(
            seen.page.evaluate(ROW.format(map=1, head=0, i=i)), inspection.at(1).weights(0)[0, i], atol=2e-3
        )
    assert len(seen.page.evaluate("data.masks")) == 1
    assert seen.page.evaluate("vectors(data.maps[0], 0).bias.length") == 39


def test_the_decoder_reads_the_source(opened: Callable[..., Watched]) -> None:
    inspection = inspect(small("tiny-transformer"), [3, 4, 5, 6, 7], [1, 2, 9])
    seen = opened(inspection)
    assert seen.page.locator(".heads").count() == 3
    assert "decoder reads the source" in seen.text("main")
    seen.page.locator(".thumb").nth(18).click()
    assert "cross layer 0, head 2" in seen.text("#crumbs")
    row = seen.page.evaluate(ROW.format(map=4, head=2, i=1))
    assert_allclose(row, inspection.at(0, "cross").weights(2)[0, 1], atol=2e-3)


def test_patches_over_the_image(opened: Callable[..., Watched]) -> None:
    image = np.zeros((1, 16, 16), np.float32)
    image[:, 4:8, 8:12] = 1
    inspection = inspect(small("tiny-vit"), image)
    seen = opened(inspection)
    seen.page.locator(".thumb").nth(5).click()
    assert "Query class" in seen.text("main")
    box = seen.page.locator("#image").bounding_box()
    seen.page.mouse.click(box["x"] + 0.6 * box["width"], box["y"] + 0.4 * box["height"])
    assert "Query 1,2" in seen.text("main")
    assert_allclose(seen.page.evaluate(ROW.format(map=1, head=1, i=7)), inspection.at(1).weights(1)[0, 7], atol=2e-3)


def test_light_and_dark(opened: Callable[..., Watched]) -> None:
    inspection = writer().inspect("a cat", tokenizer=letters())
    paper = "getComputedStyle(document.body).backgroundColor"
    for scheme, colour, other in (
        ("light", "rgb(255, 255, 255)", "rgb(21, 24, 28)"),
        ("dark", "rgb(21, 24, 28)", "rgb(255, 255, 255)"),
    ):
        seen = opened(inspection, color_scheme=scheme)
        assert seen.page.evaluate(paper) == colour
        seen.press("t")
        assert seen.page.evaluate(paper) == other


def test_a_link_opens_the_cell_again(opened: Callable[..., Watched]) -> None:
    seen = opened(writer().inspect("a cat", tokenizer=letters()))
    seen.page.evaluate("open(1, 2); move(4, 2); state.view = 'cell'; draw()")
    address = seen.page.url
    heading = seen.text("#cell")
    seen.page.goto("about:blank")
    seen.page.goto(address)
    assert seen.text("#cell") == heading


def test_a_notebook_shows_it_in_a_frame(opened: Callable[..., Watched], tmp_path: Path) -> None:
    (tmp_path / "notebook.html").write_text(
        writer().inspect("a cat", tokenizer=letters())._repr_html_(), encoding="utf-8"
    )
    seen = opened(tmp_path / "notebook.html")
    frame = seen.page.frame_locator("iframe")
    frame.locator(".thumb").nth(3).click()
    assert "layer 0, head 3" in frame.locator("#crumbs").inner_text()


def test_large_grids_are_pooled() -> None:
    values = np.random.default_rng(0).normal(size=(300, 260))
    names = [str(n) for n in range(300)]
    grid = Grid("effects", values, names, names[:260], "layer", "position", "nats", signed=True, note="of one run")
    small = grid_data(grid)
    assert small["note"] == "each cell is the largest of 3 × 3; of one run"
    assert (small["rows"][1], small["columns"][1]) == ("3", "3")
    far = values[:3, :3].flat[abs(values[:3, :3]).argmax()]
    assert np.shape(small["values"]) == (100, 87)
    assert small["values"][0][0] == pytest.approx(far, rel=1e-4)
    assert small["limits"] == grid.limits


def test_each_pooling_of_thumbnails_is_said() -> None:
    maps = [{"thumbRows": 9, "thumbColumns": 9, "thumb": "", "pool": pool} for pool in ([1, 1], [1, 3], [2, 3], [1, 3])]
    assert shrink_thumbnails(maps, 10) == ["A point of a thumbnail is the largest of 1 × 3 or 2 × 3 weights."]


def test_text_cannot_end_the_script() -> None:
    nasty = ["</script><script>alert(1)</script>", "<!--", "&amp;"]
    text = page(inspect(small("tiny-gpt"), [1, 2, 3], labels=nasty))
    assert "alert(1)" in text
    assert text.count("<script") == 2
    found = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert json.loads(found[1])["labels"] == nasty


LARGE = """
import pathlib, re, sys, torch
import clearhead
from clearhead.inspect.inspection import inspect

def peak():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1])

torch.manual_seed(0)
config = clearhead.preset("tiny-gpt")
for name, value in {"stack.dim": 144, "stack.repeats": 12, "stack.pattern.0.mixer.heads": 12,
                    "embedding.position.length": 2048}.items():
    config = config.changed(name, value)
model = clearhead.build(config).eval()
tokens = torch.randint(0, 101, (1, 2048))
inspect(model, tokens[:, :64]).heads
before = peak()
inspection = inspect(model, tokens)
assert sum(len(map.thumbnails) for map in inspection.maps) == 144
print(peak() - before)
inspection.save(sys.argv[1])
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """The bytes that 2,048 tokens × 144 heads took, and their page."""
    if not sys.platform.startswith("linux"):
        pytest.skip("peak memory is read from /proc")
    path = tmp_path_factory.mktemp("large") / "page.html"
    done = subprocess.run([sys.executable, "-c", LARGE, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout), path


def test_thumbnails_of_2048_tokens_fit_a_gigabyte(large: tuple[int, Path]) -> None:
    took, path = large
    assert took < 2**30 / 2  # the maps themselves would be 2.4 GB
    assert path.stat().st_size <= 25_000_000


def test_2048_tokens_in_the_page(large: tuple[int, Path], opened: Callable[..., Watched]) -> None:
    seen = opened(large[1])
    assert seen.page.locator(".thumb").count() == 144
    assert "were left out to keep the page small" in seen.text("#notes")
    assert "the largest of 16 × 16 weights" in seen.text("#notes")
    whole = seen.page.locator(".thumb.whole")
    assert 100 < whole.count() < 144
    whole.first.click()
    assert "each point is the largest of 16 × 16 weights" in seen.text(".legend")
    box, query = (seen.page.locator(name).bounding_box() for name in (".text", ".text .query"))
    assert box["y"] <= query["y"] <= box["y"] + box["height"] - query["height"]
    for _ in range(5):
        seen.press("+")
    assert seen.page.evaluate("window_(data.maps[state.map]).span") == 64
    seen.press("ArrowUp", "Enter")
    assert "may read 2047 of 2048 positions" in seen.text(".steps")
    seen.press("Escape", "Escape")
    seen.page.locator(".thumb:not(.whole)").first.click()
    assert "q, k and v of this head were left out" in seen.text("main")
    assert "at most" in seen.text("#readout")
