"""The corpus: implementations in the styles that people use, right and wrong, and the mistake of each wrong one.

A file of `bank/` holds one part. A snippet starts with a line `=== right | engine | title` or
`=== wrong | engine | title | key`, and is a file of its own, with the usual imports before it. Lines
`--- key | old => new` after a right snippet are its twin faults: the same code with one text replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BANK = Path(__file__).parent / "bank"
IMPORTS = {
    "numpy": "import math\nimport numpy as np\n\n",
    "torch": "import math\nimport torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n\n",
}


@dataclass(frozen=True)
class Snippet:
    part: str
    is_right: bool
    engine: str
    title: str
    key: str
    code: str

    @property
    def text(self) -> str:
        return IMPORTS[self.engine] + self.code

    @property
    def id(self) -> str:
        return f"{self.part}: {self.title} ({self.engine})"


def snippets() -> list[Snippet]:
    return [snippet for path in sorted(BANK.glob("*.txt")) for snippet in read_bank(path)]


def read_bank(path: Path) -> Iterator[Snippet]:
    """Yield the snippets of a file, each followed by its twin faults."""
    for section in path.read_text(encoding="utf-8").split("\n=== "):
        head, _, body = section.removeprefix("=== ").partition("\n")
        verdict, engine, title, *key = (word.strip() for word in head.split("|"))
        lines = body.splitlines()
        code = "\n".join(line for line in lines if not line.startswith("--- ")).strip() + "\n"
        yield Snippet(path.stem, verdict == "right", engine, title, key[0] if key else "", code)
        for index, line in enumerate(line for line in lines if line.startswith("--- ")):
            mistake, change = line.removeprefix("--- ").split(" | ", 1)
            old, new = change.split(" =>", 1)
            if code.count(old) != 1:
                raise ValueError(f"{path.name}, {title}: {old!r} occurs {code.count(old)} times")
            twin = f"{title}, fault {index + 1}"
            yield Snippet(path.stem, False, engine, twin, mistake, code.replace(old, new.removeprefix(" ")))
