"""The bank: small implementations as learners write them, right and wrong, and the mistake that each wrong one has.

A file of `bank/` holds one part. A snippet starts with a line `=== right | engine | title` or
`=== wrong | engine | title | key`, and is a file of its own, with the usual imports before it.
"""

from __future__ import annotations

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
    found = []
    for path in sorted(BANK.glob("*.txt")):
        for section in path.read_text(encoding="utf-8").split("=== ")[1:]:
            head, _, code = section.partition("\n")
            verdict, engine, title, *key = (word.strip() for word in head.split("|"))
            found.append(
                Snippet(path.stem, verdict == "right", engine, title, key[0] if key else "", code.strip() + "\n")
            )
    return found
