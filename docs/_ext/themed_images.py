"""A picture `NAME-light.*` with a `NAME-dark.*` beside it follows the reader's theme. GitHub shows the light one."""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx


def add_dark(app: Sphinx, doctree: nodes.document) -> None:
    """Put the dark picture after each light one; Furo hides the one that does not match the theme."""
    here = Path(app.env.doc2path(app.env.docname)).parent
    for node in list(doctree.findall(nodes.image)):
        uri = node["uri"]
        other = uri.replace("-light.", "-dark.")
        if other != uri and (here / other).exists():
            twin = node.deepcopy()
            twin["uri"] = other
            node["classes"] = [*node["classes"], "only-light"]
            twin["classes"] = [*twin["classes"], "only-dark"]
            node.parent.insert(node.parent.index(node) + 1, twin)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", add_dark, priority=100)  # before Sphinx collects the files of images
    return {"parallel_read_safe": True, "parallel_write_safe": True}
