"""Put the ES modules of `clearhead/web` into one script, for pages and widgets that cannot import files.

Modules use two forms only: `import { a, b } from "./x.js"` and `export` before a declaration (or a list). Each becomes
a function that returns what it exports, in the order in which they depend on each other.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

WEB = Path(__file__).parent.parent / "web"
IMPORT = re.compile(r'^import \{([^}]*)\} from "([^"]+)";$', re.MULTILINE)
DECLARED = re.compile(r"^export (?:async )?(?:function|const|class) (\w+)", re.MULTILINE)
LISTED = re.compile(r"^export \{([^}]*)\};?$", re.MULTILINE)
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{{policy}}">
<link rel="icon" href="data:,">
<title>{{title}}</title>
<style>{{style}}</style>
</head>
<body>
<div id="root"></div>
<script type="application/json" id="answers">{{answers}}</script>
<script type="module">{{script}}</script>
</body>
</html>
"""


@cache
def bundle(entry: str) -> str:
    """One script that runs the module `entry` and ends with its exports in `__entry`."""
    order: list[Path] = []
    visit(WEB / entry, order)
    parts = ["const __modules = {};"]
    parts += [f"__modules[{key(path)!r}] = (() => {{\n{convert(path)}\n}})();" for path in order]
    return "\n".join([*parts, f"const __entry = __modules[{key(WEB / entry)!r}];"])


def key(path: Path) -> str:
    return path.relative_to(WEB).as_posix()


def visit(path: Path, order: list[Path]) -> None:
    """Depth first, so that a module comes after those it imports."""
    if path in order:
        return
    for _, target in IMPORT.findall(path.read_text(encoding="utf-8")):
        visit((path.parent / target).resolve(), order)
    if path not in order:
        order.append(path)


def convert(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.parent.name == "vendor":
        text, _, exports = text.rpartition("export{")
        names = re.findall(r"(\w+) as (\w+)", exports)
        return f"{text}\nreturn {{ {', '.join(f'{new}: {old}' for old, new in names)} }};"
    exported = [*DECLARED.findall(text)]
    for names in LISTED.findall(text):
        exported += [name.strip() for name in names.split(",") if name.strip()]
    text = LISTED.sub("", text)
    text = IMPORT.sub(lambda found: f"const {{{found[1]}}} = __modules[{resolve_import(path, found[2])!r}];", text)
    text = re.sub(r"^export (?=(?:async )?(?:function|const|class) )", "", text, flags=re.MULTILINE)
    return f"{text}\nreturn {{ {', '.join(exported)} }};"


def resolve_import(path: Path, target: str) -> str:
    return key((path.parent / target).resolve())


def style() -> str:
    return (WEB / "studio.css").read_text(encoding="utf-8")


def hash_source(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def as_json(data: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def one_file(title: str, answers: dict[str, Any], options: dict[str, Any]) -> str:
    """The whole page in one HTML file; scripts and styles are allowed by their hashes, and nothing else is."""
    script = bundle("page.js")
    policy = (
        f"default-src 'none'; script-src {hash_source(script)}; style-src {hash_source(style())}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": html.escape(policy, quote=True),
        "title": html.escape(title),
        "style": style(),
        "answers": as_json({"answers": answers, "options": options}),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], PAGE)  # one pass: inserted text stays


def widget_module() -> str:
    """The ES module that anywidget runs, with the style inside."""
    return f"{bundle('widget.js')}\nexport default {{ render: __entry.renderWidget }};\n"
