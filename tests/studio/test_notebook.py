"""The widgets in a real Jupyter kernel: they answer over its protocol, and a saved notebook shows them without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest

pytest.importorskip("anywidget")
jupyter_client = pytest.importorskip("jupyter_client")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

VIEW = "application/vnd.jupyter.widget-view+json"
CODE = """
import numpy as np
import clearhead
import clearhead.notebook as nb
from IPython.display import display

model = clearhead.load("shakespeare")
def attention(q, k, v):
    s = q @ np.swapaxes(k, -1, -2)
    w = np.exp(s - s.max(-1, keepdims=True))
    return (w / w.sum(-1, keepdims=True)) @ v
for widget in (
    nb.atlas(model, "To be or not"), nb.flow(model, "To be or not"), nb.lens(model, "To be or not"),
    nb.train({run!r}), nb.check(attention),
):
    display(widget)
"""
NAMES = ("atlas", "flow", "lens", "train", "check")


class Kernel:
    """A Jupyter kernel, the outputs of one cell, and questions to its widgets."""

    def __init__(self, client: Any) -> None:
        self.client, self.outputs = client, []

    def run(self, code: str) -> None:
        messages: list[Any] = []
        reply = self.client.execute_interactive(code, timeout=180, output_hook=messages.append)
        assert reply["content"]["status"] == "ok", reply["content"]
        kinds = ("display_data", "execute_result", "stream", "error")
        self.outputs = [nbformat.v4.output_from_msg(each) for each in messages if each["msg_type"] in kinds]

    def ask(self, output: Any, question: str, **arguments: Any) -> Any:
        """Send what the widget's script sends, as a frontend does."""
        content = {"id": 1, "question": question, "args": arguments}
        data = {"method": "custom", "content": content}
        message = {"comm_id": output.data[VIEW]["model_id"], "data": data}
        self.client.shell_channel.send(self.client.session.msg("comm_msg", message))
        while True:
            try:
                heard = self.client.get_iopub_msg(timeout=60)
            except Empty:
                raise AssertionError(f"the kernel did not answer {question}") from None
            found = heard["content"].get("data", {})
            if heard["msg_type"] == "comm_msg" and found.get("method") == "custom":
                return found["content"]


@pytest.fixture(scope="module")
def kernel(short_run: Path) -> Iterator[Kernel]:
    manager, client = jupyter_client.manager.start_new_kernel(kernel_name="python3", startup_timeout=120)
    try:
        made = Kernel(client)
        made.run(CODE.format(run=str(short_run)))
        yield made
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::RuntimeWarning")
def test_widgets_answer_over_the_kernels_protocol_and_leave_a_static_copy(
    kernel: Kernel, chromium: Any, tmp_path: Path
) -> None:
    shown = dict(zip(NAMES, kernel.outputs, strict=True))
    assert all(VIEW in output.data for output in shown.values())
    assert len(kernel.ask(shown["atlas"], "atlas")["answer"]["maps"]) == 3
    assert kernel.ask(shown["flow"], "cell", path="stack.final_norm", index=[1, 2])["answer"]["stages"]
    assert kernel.ask(shown["lens"], "lens")["answer"]["labels"][0] == "To"
    assert kernel.ask(shown["train"], "runs")["answer"]["runs"][0]["state"] == "done"
    (part,) = kernel.ask(shown["check"], "report", lang="zh")["answer"]["result"]["parts"]
    assert part["diagnostics"][0]["key"] == "no-scale"
    assert "除以" in part["diagnostics"][0]["text"]
    assert "there is no question 'x'" in kernel.ask(shown["atlas"], "x")["error"]

    # The notebook as it is saved: without a kernel, pictures and tables are there, and the pages open.
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CODE, outputs=list(shown.values()))])
    nbformat.validate(notebook)
    saved = nbformat.reads(nbformat.writes(notebook), as_version=4).cells[0].outputs
    html = dict(zip(NAMES, (output.data["text/html"] for output in saved), strict=True))
    for name in ("atlas", "train"):
        assert saved[NAMES.index(name)].data["image/png"]
    path = tmp_path / "saved.html"
    path.write_text("<meta charset=utf-8>" + "".join(f"<div id={name}>{html[name]}</div>" for name in NAMES))
    page = chromium.new_page()
    messages: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.goto(path.as_uri())
    assert page.evaluate("[...document.images].map((one) => one.complete && one.naturalWidth > 100)") == [True, True]
    assert page.locator("#flow > table tr").count() > 30
    assert page.locator("#lens > table tr").count() == 5
    assert page.locator("#check table td").count() > 8
    for name, inside in {
        "atlas": ".thumb",
        "flow": "[data-step]",
        "lens": "table.lens",
        "train": "[data-frame]",
    }.items():
        page.click(f"#{name} summary")
        page.frame_locator(f"#{name} iframe").locator(inside).first.wait_for()
    page.close()
    assert messages == []


def test_a_run_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    import clearhead.notebook as nb

    with pytest.raises(ValueError, match=r"there is no run in .*nowhere: start one with `clearhead train --out"):
        nb.train(tmp_path / "nowhere")
