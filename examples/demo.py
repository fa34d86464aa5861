"""From Python's own library to a model that writes Python: tokenizer, training, samples, curve and attention map.

`make demo` runs it: a few minutes on two cores, nothing is downloaded.
"""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

from clearhead.cli.train import watching
from clearhead.tokenize import Tokenizer
from clearhead.training.curves import draw_curves
from clearhead.training.loop import RunStopped, train
from clearhead.training.recipes import recipe
from clearhead.training.text import continue_text

PROMPTS = ("def ", "class ", "import os\n\n\n", "    for i in range(")
WRITTEN = 200  # tokens
LINE = "def add(self, other):\n    return self"


def main(steps: int | None = None, folder: Path = Path("runs")) -> Path:
    out = next(path for number in count(1) if not (path := folder / f"demo-{number}").exists())
    wanted = recipe("lm") if steps is None else recipe("lm").changed("steps", steps)
    with watching(wanted.steps) as callbacks:
        model = train(wanted, (), out, callbacks=callbacks)
    tokenizer = Tokenizer.load(out)
    for prompt in PROMPTS:
        print(f"\n――― {prompt!r}\n{continue_text(model, tokenizer, prompt, WRITTEN)}")
    model.inspect(LINE, tokenizer=tokenizer, layers=[-2], name=out.name).save(out / "attention.png")
    model.inspect(LINE, tokenizer=tokenizer, name=out.name).save(out / "attention.html")
    draw_curves([out], out / "loss.png")
    print(f"\nThe run is in {out}: loss.png, attention.png, attention.html, metrics.jsonl, and the model. Next:")
    print(f"  clearhead train lm --data YOUR_TEXT --out {folder}/mine")
    print(f"  clearhead plot {out} {folder}/mine --out compared.png")
    print(f"  clearhead trace {out}")
    return out


if __name__ == "__main__":
    try:
        main()
    except RunStopped as left:
        sys.exit(str(left))
