"""The studio's views as notebook widgets, for Jupyter, VS Code and Colab, through anywidget.

    import clearhead
    import clearhead.notebook as nb

    model = clearhead.load("runs/mine")
    nb.atlas(model, "To be or not to be")

Each function returns a widget that asks this kernel. Where widgets cannot run (GitHub, nbconvert), the saved output is
a picture or a table, and under it the same view as a page with its values enclosed.
"""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.extras import install_command
from clearhead.inspect.bundle import one_file, style, widget_module
from clearhead.inspect.page import page
from clearhead.inspect.questions import Session, encode

if TYPE_CHECKING:
    from clearhead.inspect.inspection import Inspection
    from clearhead.models.model import Model

STORED_BYTES = 6_000_000  # the most that a saved output carries
FRAMES = 12  # frames of a run that a saved output carries
Ask = Callable[[str, Mapping[str, Any]], Any]


def make_widget(
    ask: Ask, view: str, state: dict[str, Any] | None = None, saved: Mapping[str, str] | None = None
) -> Any:
    """A widget of one view. `ask` answers its questions; `saved` is what is stored where widgets cannot run."""
    try:
        import anywidget
        import traitlets
    except ImportError:
        raise ValueError(f"notebook widgets need anywidget: {install_command('notebook')}") from None

    class StudioWidget(anywidget.AnyWidget):
        _esm = widget_module()
        _css = style()
        options = traitlets.Dict().tag(sync=True)

        def _repr_mimebundle_(self, **keywords: Any) -> Any:
            bundle = super()._repr_mimebundle_(**keywords)
            data = bundle[0] if isinstance(bundle, tuple) else bundle
            if data is not None:
                data.update(saved or {})
            return bundle

    widget = StudioWidget(options={"views": [view], "state": {"view": view, **(state or {})}})

    def answer(_: Any, message: Any, buffers: Any) -> None:
        try:
            found = encode(ask(str(message["question"]), message["args"]))
            widget.send({"id": message["id"], "answer": found})
        except (ValueError, TypeError) as error:
            widget.send({"id": message["id"], "error": str(error)})

    widget.on_msg(answer)
    return widget


def view_of(view: str, model: Model, text: Any, still: Callable[[Inspection], dict[str, str]], **state: Any) -> Any:
    """A widget of a view of a model. `still` makes its picture or table."""
    session = Session.of_model(model, text, "model" if model.origin is None else model.origin.name)
    inspection, _ = session.pass_of({})
    saved = still(inspection)
    shown = view if view != "intervene" else "write"  # a page without a model cannot change it
    saved["text/html"] += as_frame(page(inspection, STORED_BYTES, state={"view": shown, **state}))
    return make_widget(session.ask, view, state, saved)


def write(model: Model, text: Any) -> Any:
    """Tokens, next-token probabilities and sampling."""
    return view_of("write", model, text, predictions_table)


def flow(model: Model, text: Any, step: str = "") -> Any:
    """Every step of the model with its numbers."""
    return view_of("flow", model, text, steps_table, step=step)


def atlas(model: Model, text: Any) -> Any:
    """All attention heads."""
    return view_of("atlas", model, text, heads_picture)


def lens(model: Model, text: Any, token: str = "") -> Any:
    """The most likely token by layer and position."""
    return view_of("lens", model, text, lens_table, token=token)


def intervene(model: Model, text: Any) -> Any:
    """Switch heads off and compare predictions."""
    return view_of("intervene", model, text, predictions_table)


def train(run: str | Path) -> Any:
    """Curves, samples and heads of a run, live."""
    import clearhead.studio.runs  # noqa: F401  registers its questions
    from clearhead.training.curves import draw_curves
    from clearhead.training.run import Run

    folder = Path(run)
    session = Session({}, runs=folder.parent, only_run=folder.name)
    if not session.ask("runs")["runs"]:
        raise ValueError(f"there is no run in {folder}: start one with `clearhead train --out {folder}`")
    saved = {"text/html": Run(folder)._repr_html_()}
    if find_spec("matplotlib") is not None:
        saved = picture(lambda path: draw_curves([folder], path), f"loss of {folder.name}")
    saved["text/html"] += as_frame(one_file(folder.name, enclose_run(session, folder.name), {"views": ["train"]}))
    return make_widget(session.ask, "train", saved=saved)


def check(thing: Callable[..., Any] | type | str, part: str | None = None, *, example: str | None = None) -> Any:
    """The verdict on a function or class that you wrote, with the smallest counterexample as matrices.

    The arguments are those of `clearhead.check`; the widget's `report` is its result.
    """
    from clearhead.checker.check import check as run_check

    report = run_check(thing, part, example=example)

    def ask(question: str, arguments: Mapping[str, Any]) -> Any:
        if question == "models":
            return {"models": ["check"], "text": "", "runs": False, "train": False}
        report.language = "zh" if arguments.get("lang") == "zh" else "en"
        return {"result": report.to_dict()}

    widget = make_widget(ask, "report", saved={"text/html": report._repr_html_()})
    widget.report = report
    return widget


# ---- what is stored where widgets cannot run


def as_frame(text: str) -> str:
    """A whole page under the picture, closed at first."""
    source = escape(text, quote=True)
    return (
        "<details><summary>Explore</summary>"
        f'<iframe title="Clearhead" srcdoc="{source}" style="width:100%;height:760px;border:0"></iframe></details>'
    )


def picture(draw: Callable[[Path], Any], alt: str) -> dict[str, str]:
    """A drawing as PNG, alone and inside HTML."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture.png"
        draw(path)
        data = base64.b64encode(path.read_bytes()).decode()
    return {"image/png": data, "text/html": f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}">'}


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> dict[str, str]:
    def line(cells: Iterable[Any], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    head = line(columns, "th")
    return {"text/html": f"<table><caption>{escape(title)}</caption><thead>{head}</thead><tbody>{body}</tbody></table>"}


def heads_picture(inspection: Inspection) -> dict[str, str]:
    if not inspection.maps:
        return steps_table(inspection)
    if find_spec("matplotlib") is None:
        rows = [(head.name, head.tag, head.entropy) for head in inspection.heads]
        return table("attention heads", ["head", "tag", "entropy"], rows)
    return picture(inspection.save, f"attention of {len(inspection.heads)} heads")


def lens_table(inspection: Inspection) -> dict[str, str]:
    grid = inspection.lens()
    rows = [[name, *line] for name, line in zip(grid.rows, grid.texts or [], strict=True)]
    return table(grid.title, ["", *grid.columns], rows)


def steps_table(inspection: Inspection) -> dict[str, str]:
    steps = Session.of_inspection(inspection).ask("flow")["steps"]
    return table("every step", ["step", "formula", "shape"], [(s["name"], s["formula"], s["shape"]) for s in steps])


def predictions_table(inspection: Inspection) -> dict[str, str]:
    given = inspection.model_input
    if not given.has_predictions:
        return steps_table(inspection)
    found = [(text, f"{probability:.2%}") for text, _, probability in inspection.next()]
    return table(given.describe_position(-1), ["token", "probability"], found)


def enclose_run(session: Session, name: str) -> dict[str, list[Any]]:
    """The answers of the Train view for one run that has stopped changing."""
    (run,) = session.ask("runs")["runs"]
    frames = run["frames"]
    kept = sorted({frames[round(n * (len(frames) - 1) / max(1, FRAMES - 1))] for n in range(FRAMES)}) if frames else []
    points = session.ask("follow", {"run": name})
    later = {"points": [], "next": points["next"], "restart": False}
    answers: dict[str, list[Any]] = {
        "models": [({}, {"models": [], "text": "", "runs": True, "train": False})],
        "runs": [({}, {"runs": [run | {"frames": kept, "job": None}]})],
        "follow": [({"run": name, "since": 0}, points), ({"run": name, "since": points["next"]}, later)],
        "probe": [({"run": name, "step": step}, session.ask("probe", {"run": name, "step": step})) for step in kept],
        "gradients": [({"run": name}, session.ask("gradients", {"run": name}))] if kept else [],
    }
    return {question: encode(found) for question, found in answers.items()}
