"""The studio's views as notebook widgets, for Jupyter, VS Code and Colab, through anywidget.

    import clearhead
    import clearhead.notebook as nb

    model = clearhead.load("runs/mine")
    nb.atlas(model, "To be or not to be")

Each function returns a widget that asks this kernel. Where widgets cannot run (GitHub, nbconvert), the saved output is
the same view as static HTML with the values enclosed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.extras import install_command
from clearhead.inspect.bundle import style, widget_module
from clearhead.inspect.questions import Session, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from clearhead.models.model import Model


def make_widget(session: Session, view: str, state: dict[str, Any] | None = None, fallback: str = "") -> Any:
    """A widget of one view; its questions are answered by `session`."""
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
            if fallback and data is not None:
                data["text/html"] = fallback
            return bundle

    widget = StudioWidget(options={"views": [view], "state": {"view": view, **(state or {})}})

    def answer(_: Any, message: Any, buffers: Any) -> None:
        try:
            found = encode(session.ask(str(message["question"]), message["args"]))
            widget.send({"id": message["id"], "answer": found})
        except (ValueError, TypeError) as error:
            widget.send({"id": message["id"], "error": str(error)})

    widget.on_msg(answer)
    return widget


def view_of(view: str, model: Model, text: Any, **state: Any) -> Any:
    session = Session.of_model(model, text, "model" if model.origin is None else model.origin.name)
    return make_widget(session, view, state, session.pass_of({})[0]._repr_html_())


def write(model: Model, text: Any) -> Any:
    """Tokens, next-token probabilities and sampling."""
    return view_of("write", model, text)


def flow(model: Model, text: Any, step: str = "") -> Any:
    """Every step of the model with its numbers."""
    return view_of("flow", model, text, step=step)


def atlas(model: Model, text: Any) -> Any:
    """All attention heads."""
    return view_of("atlas", model, text)


def lens(model: Model, text: Any, token: str = "") -> Any:
    """The most likely token by layer and position."""
    return view_of("lens", model, text, token=token)


def intervene(model: Model, text: Any) -> Any:
    """Switch heads off and compare predictions."""
    return view_of("intervene", model, text)


def train(run: str | Path) -> Any:
    """Curves, samples and heads of a run, live."""
    import clearhead.studio.runs  # noqa: F401  registers its questions

    folder = Path(run)
    return make_widget(Session({}, runs=folder.parent, only_run=folder.name), "train")


def check(thing: Callable[..., Any] | type | str) -> Any:
    """The report on a function or class that you wrote, as text."""
    from clearhead.checker.check import check as run_check

    return run_check(thing)
