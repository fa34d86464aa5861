"""Train an encoder–decoder on dates in many languages, then translate some.

    python examples/translation.py

"7 mars 2021" becomes "2021-03-07". The pairs are made by `babel`; nothing is downloaded. 300 steps show the idea; the
recipe's own number of steps gets nearly every date right.
"""

import sys
import tempfile
from pathlib import Path

import clearhead
from clearhead.tasks.translate import translate

DATES = ["7 March 2021", "12 avril 1999", "3. Oktober 2010"]


def main(steps: int = 300) -> list[str]:
    recipe = clearhead.recipe("dates").with_value("steps", steps)
    with tempfile.TemporaryDirectory() as folder:
        clearhead.train(recipe, (), Path(folder) / "run")
        model = clearhead.load(Path(folder) / "run")
        found = [best[0].text for best in translate(model, DATES, num_beams=4)]
    for date, text in zip(DATES, found, strict=True):
        print(f"{date:>20} → {text}")
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
