"""Links from a page to a file of the repository that is not a page open that file where the sources are hosted."""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
PAGES = (".md", ".ipynb")


def resolve(app: Sphinx, doctree: nodes.document) -> None:
    here = Path(app.env.doc2path(app.env.docname)).parent
    for kind in (addnodes.download_reference, addnodes.pending_xref):
        for node in list(doctree.findall(kind)):
            path, _, anchor = node.get("reftarget", "").partition("#")
            found = (here / path).resolve()
            if path and found.exists() and not is_page(found):
                uri = source_uri(app, found) + (f"#{anchor}" if anchor else "")
                node.replace_self(nodes.reference("", "", *node.children, refuri=uri, internal=False))


def is_page(path: Path) -> bool:
    return path.suffix in PAGES and path.is_relative_to(ROOT / "docs")


def source_uri(app: Sphinx, path: Path) -> str:
    base = app.config.html_theme_options["source_repository"]
    return f"{base}/{'tree' if path.is_dir() else 'blob'}/main/{path.relative_to(ROOT).as_posix()}"


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
