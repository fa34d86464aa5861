"""How quick the studio is: start, first paint, edit to view, arrow keys, memory, ablation."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import clearhead
from clearhead.tokenize import Tokenizer
from tests.studio.tools import CHROMIUM, running_studio

MODEL = Path(os.environ.get("CLEARHEAD_SHARED", "../shared")) / "models" / "stories15M"
SENTENCE = "Once upon a time there was a little girl who had a red ball and a big dog . "
LENGTHS = (13, 200, 850, 1000)


def text_of(tokens: int) -> str:
    """A text of about `tokens` tokens."""
    words = (SENTENCE * (tokens // 15 + 1)).split()
    tokenizer = Tokenizer.load(MODEL)
    while len(tokenizer.encode(" ".join(words))) > tokens and len(words) > 2:
        words = words[: -max(1, len(words) // 20)]
    return " ".join(words)


def main() -> None:
    from playwright.sync_api import sync_playwright

    if not MODEL.exists():
        raise SystemExit(f"{MODEL} is missing: set CLEARHEAD_SHARED to a folder with models/stories15M")
    model = clearhead.load(MODEL)
    texts = {length: text_of(length) for length in LENGTHS}
    start = time.monotonic()
    with running_studio() as address:
        print(f"clearhead studio without arguments, to its address: {time.monotonic() - start:.1f} s")
        assert address
    with running_studio(str(MODEL), "--text", texts[13]) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1440, "height": 900}, locale="en-US")
        page.goto(address)
        page.wait_for_selector(".tok")
        page.reload()
        page.wait_for_selector(".tok")
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        print(f"first paint, warm: {paint:.0f} ms")
        page.click("button[data-view=atlas]")
        page.wait_for_selector(".thumb")
        for length, text in texts.items():
            page.evaluate("document.querySelectorAll('.thumb').forEach((each) => each.remove())")
            page.evaluate("window.before = performance.now()")
            with page.expect_response(lambda answer: answer.url.endswith("/ask/atlas"), timeout=120_000):
                page.fill("[data-act=text]", text + " and")  # not what is on screen already
            page.wait_for_selector(".panel:not(.stale) .thumb canvas")
            took = page.evaluate("performance.now() - window.before")
            heap = page.evaluate("performance.memory ? performance.memory.usedJSHeapSize / 1e6 : 0")
            print(f"edit to all thumbnails, {length} tokens: {took / 1000:.2f} s; browser heap {heap:.0f} MB")
        base = page.url.partition("#")[0]
        page.goto("about:blank")
        page.goto(f"{base}#view=atlas&open=true&layer=2&head=1&text={texts[200]}")
        page.wait_for_selector(".heat")
        page.focus(".heat")
        works, frames = zip(*(page.evaluate(ARROW, key) for key in ["ArrowDown", "ArrowRight"] * 25), strict=True)
        print(
            f"arrow keys at 200 tokens: median {statistics.median(works):.1f} ms, worst {max(works):.1f} ms; "
            f"until the next frame: median {statistics.median(frames):.1f} ms"
        )
        times = sorted(page.evaluate(HOVER, [n, n % 37]) for n in range(1, 120))
        print(f"hover at 200 tokens: 95th percentile {times[int(0.95 * len(times))]:.1f} ms")
        page.goto("about:blank")
        page.goto(f"{base}#view=intervene&text={texts[850]}")
        page.click("[data-act=measure]")
        start = time.monotonic()
        page.wait_for_selector("[data-measured]", timeout=120_000)
        print(f"first head of an ablation, 850 tokens: {time.monotonic() - start:.1f} s")
        start = time.monotonic()
        page.click("[data-act=stop]")
        page.wait_for_selector("[data-act=measure]")
        print(f"ablation stopped after {time.monotonic() - start:.2f} s")
        browser.close()
    inspection = model.inspect(texts[850])
    start = time.monotonic()
    inspection.ablate()
    print(f"ablate, {len(inspection.model_input.labels)} tokens, all heads: {time.monotonic() - start:.1f} s")


ARROW = """async (key) => {
  const start = performance.now();
  document.querySelector(".heat").dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  await Promise.resolve();  // the page renders in a microtask
  document.querySelector(".heat .mark").getBoundingClientRect();  // and its layout is computed
  const work = performance.now() - start;
  await new Promise((next) => requestAnimationFrame(next));
  return [work, performance.now() - start];
}"""


HOVER = """([x, y]) => {
  const canvas = document.querySelector(".heat canvas"), area = canvas.getBoundingClientRect();
  const start = performance.now();
  const place = { bubbles: true, clientX: area.left + x, clientY: area.top + y };
  canvas.dispatchEvent(new PointerEvent("pointermove", place));
  document.querySelector(".tip").getBoundingClientRect();
  return performance.now() - start;
}"""


if __name__ == "__main__":
    main()
