"""The documentation is Markdown that GitHub renders: its formulas, its links, and nothing of one machine in it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for page in (
        *(ROOT / f"{name}.md" for name in ("README", "README.zh", "CONTRIBUTING", "CHANGELOG")),
        *ROOT.glob("docs/**/*.md"),
    )
    if page.exists()
]
FENCE = re.compile(r"^\s*(`{3,}|~{3,})(.*)$")
INLINE = re.compile(r"\$([^$]+)\$")
LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]*(?:\([^()]*\)[^()\s]*)*)\)")
MACHINE = re.compile(r"(?<![\w.~/-])/(?:home|root|work|Users|tmp|mnt|private)/\w|\b[A-Z]:\\|file://")
FORBIDDEN = (r"\operatorname", r"\newcommand", r"\def", r"\require", r"\href")  # GitHub refuses to render these

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def split(text: str) -> tuple[list[tuple[int, str]], list[tuple[int, str, str]], bool]:
    """Prose by line, fenced blocks as (line, language, body), and whether every fence was closed."""
    prose: list[tuple[int, str]] = []
    blocks: list[tuple[int, str, str]] = []
    fence, language, start, body = "", "", 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = FENCE.match(line)
        if fence and mark and mark[1][0] == fence[0] and len(mark[1]) >= len(fence) and not mark[2].strip():
            blocks.append((start, language, body))
            fence = ""
        elif fence:
            body += f"{line}\n"
        elif mark:
            fence, language, start, body = mark[1], mark[2].strip(), number, ""
        else:
            prose.append((number, line))
    return prose, blocks, not fence


def without_code(line: str) -> str:
    """A line of prose without its `code spans`."""
    return re.sub(r"(`+)(?:(?!\1).)*?\1", lambda span: " " * len(span[0]), line)


def faults_of_prose(text: str) -> list[str]:
    """What GitHub would not render, or would render wrongly, outside of fenced blocks."""
    faults = []
    for number, raw in split(text)[0]:
        line = without_code(raw)
        if "$$" in line:
            faults.append(f"{number}: $$; a block formula goes into a ```math block")
            continue
        faults += [f"{number}: {mark}; inline formulas go between dollars" for mark in (r"\[", r"\(") if mark in line]
        if line.count("$") % 2:
            faults.append(f"{number}: a dollar without its partner on the line")
            continue
        for match in INLINE.finditer(line):
            before, after = line[: match.start()][-1:], line[match.end() :][:1]
            if match[1] != match[1].strip():
                faults.append(f"{number}: space just inside the dollars of {match[0]}")
            if before.isalnum() or after.isalnum():
                faults.append(f"{number}: {match[0]} touches a word, and is then not a formula")
            if re.search(r"\\[^A-Za-z]", match[1]):
                faults.append(f"{number}: {match[0]}: Markdown takes a backslash before punctuation; use ```math")
            faults += faults_of_formula(match[1], number)
    return faults


def faults_of_formula(formula: str, number: int) -> list[str]:
    faults = [f"{number}: {macro} is not rendered by GitHub" for macro in FORBIDDEN if macro in formula]
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", formula):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            break
    if depth:
        faults.append(f"{number}: braces do not balance")
    if len(re.findall(r"\\left\b", formula)) != len(re.findall(r"\\right\b", formula)):
        faults.append(f"{number}: \\left and \\right do not balance")
    if re.findall(r"\\begin\{(\w+)\}", formula) != re.findall(r"\\end\{(\w+)\}", formula):
        faults.append(f"{number}: \\begin and \\end do not balance")
    return faults


def faults_of_blocks(text: str) -> list[str]:
    _, blocks, closed = split(text)
    faults = [] if closed else ["a fence is not closed"]
    for number, language, body in blocks:
        if language == "math":
            faults += faults_of_formula(body, number)
            if not body.strip():
                faults.append(f"{number}: an empty formula")
            if "$" in body:
                faults.append(f"{number}: a dollar inside a ```math block")
    return faults


def anchors(page: Path) -> set[str]:
    """The fragments that GitHub gives a page's headings."""
    found: set[str] = set()
    for _, line in split(page.read_text(encoding="utf-8"))[0]:
        heading = re.match(r"#{1,6}\s+(.*)", line)
        if heading:
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).strip().lower()
            slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
            count = sum(name == slug or re.fullmatch(re.escape(slug) + r"-\d+", name) is not None for name in found)
            found.add(f"{slug}-{count}" if count else slug)
    return found


def broken_links(page: Path) -> list[str]:
    broken = []
    for number, raw in split(page.read_text(encoding="utf-8"))[0]:
        for target in LINK.findall(re.sub(r"`[^`]*`", "code", raw)):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, fragment = target.partition("#")
            aim = (page.parent / path).resolve() if path else page
            if not aim.exists():
                broken.append(f"{number}: {target} does not exist")
            elif fragment and aim.suffix == ".md" and fragment not in anchors(aim):
                broken.append(f"{number}: {target}: no such heading; there are {sorted(anchors(aim))}")
    return broken


@each_page
def test_formulas_render_on_github(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    faults = faults_of_prose(text) + faults_of_blocks(text)
    assert not faults, "\n".join(faults)


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    broken = broken_links(page)
    assert not broken, "\n".join(broken)


@each_page
def test_no_machine_shows_through(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    found = [f"{number}: {line.strip()}" for number, line in enumerate(lines, 1) if MACHINE.search(line)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "so $$x$$ is",
        r"so \(x\) is",
        r"so \[x\] is",
        "so $ x$ is",
        "so $x $ is",
        "costs 5$ or so",
        "the$x$ is",
        r"so $a\,b$ is",
        "so $x_{i$ is",
        r"so $\operatorname{f}$ is",
        "```math\nx_{i\n```",
        "```math\nx",
        "```math\n\\left( x\n```",
        "```math\n\\begin{matrix}\n```",
        "```math\n$x$\n```",
        "```math\n```",
    ],
)
def test_what_github_cannot_render_is_seen(text: str) -> None:
    assert faults_of_prose(text) + faults_of_blocks(text)


@pytest.mark.parametrize(
    "text",
    [
        "so $x_i$, or ($y$), is `$ x $` and `$$`",
        "```math\n\\left\\{ x_{i} \\right\\}\n```",
        "```bash\necho $HOME\n```",
        "| $d$ | $2n^2d$ |",
    ],
)
def test_what_github_renders_is_let_through(text: str) -> None:
    assert not faults_of_prose(text) + faults_of_blocks(text)


def test_broken_links_and_paths_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# The Title: `x` & y\n## Twice\n## Twice\n[a](page.md#the-title-x--y) [b](#twice-1) [c](https://x.y)\n"
    )
    assert anchors(page) == {"the-title-x--y", "twice", "twice-1"}
    assert not broken_links(page)
    page.write_text("# Title\n[a](none.md)\n[b](#nowhere)\n[`c`](missing.py)\n")
    assert len(broken_links(page)) == 3
    assert MACHINE.search("free in /home/someone")
    assert MACHINE.search("`/tmp/x`")
    assert not MACHINE.search("~/.config/fish, ../job/main.py, https://a.b/home/x")
