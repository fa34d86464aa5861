"""From the shell to the first token of a small trained model, and to the first step of training, beside `import torch`
alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .turns import report, take_turns

SHARED = Path(os.environ.get("CLEARHEAD_SHARED", Path(__file__).parents[2] / "shared"))
STORIES = SHARED / "models/stories15M"


def main() -> None:
    torch = {"python -c 'import torch'": lambda: ran("-c", "import torch")}
    for name, recipe in {"lm, on Python's own sources": "lm", "vit, on digits": "vit"}.items():
        seconds = take_turns(torch | {f"clearhead train {name}": lambda recipe=recipe: began(recipe)}, rounds=3)
        print_table("From the shell to the first step", seconds)
    if not STORIES.exists():
        print(f"{STORIES} is not there; set CLEARHEAD_SHARED")
        return
    ours = ["-m", "clearhead", "generate", str(STORIES), "Once upon a time", "--max-new-tokens", "1"]
    seconds = take_turns(torch | {"clearhead generate, one token": lambda: ran(*ours)}, rounds=7)
    print_table("From the shell to the first token of stories15M", seconds)


def print_table(title: str, seconds: dict[str, float]) -> None:
    report(title, seconds, list(seconds)[-1])
    alone, whole = seconds.values()
    print(f"  beyond torch: {whole - alone:.2f} s")


def began(recipe: str) -> None:
    """Train until the first step is printed: tokenizer, tokens, model and step, all from nothing."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "clearhead", "train", recipe, "--out", f"{folder}/run"]
        with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            first = next((line for line in process.stderr if line.startswith("step 1/")), None)
            process.kill()
        if first is None:
            raise RuntimeError(f"clearhead train {recipe} took no step")


def ran(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment())


def environment() -> dict[str, str]:
    """Bytecode is kept, as it is of an installed package; the warm-up writes it."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


if __name__ == "__main__":
    main()
