"""From the shell to the first token of a small trained model, beside `import torch` alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .turns import report, take_turns

SHARED = Path(os.environ.get("CLEARHEAD_SHARED", Path(__file__).parents[2] / "shared"))
STORIES = SHARED / "models/stories15M"


def main() -> None:
    if not STORIES.exists():
        print(f"{STORIES} is not there; set CLEARHEAD_SHARED")
        return
    ours = ["-m", "clearhead", "generate", str(STORIES), "Once upon a time", "--max-new-tokens", "1"]
    seconds = take_turns(
        {
            "python -c 'import torch'": lambda: ran("-c", "import torch"),
            "clearhead generate, one token": lambda: ran(*ours),
        },
        rounds=7,
    )
    report("From the shell to the first token of stories15M", seconds, "clearhead generate, one token")
    alone, whole = seconds.values()
    print(f"  beyond torch: {whole - alone:.2f} s")


def ran(*arguments: str) -> None:
    # bytecode is kept, as it is of an installed package; the warm-up writes it
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment)


if __name__ == "__main__":
    main()
