"""Search by meaning: the lines of a file that are closest to a question.

    python examples/embedding_search.py MODEL "how do plants eat?" notes.txt

MODEL is a sentence encoder: a Hugging Face folder such as all-MiniLM-L6-v2, or its name on the Hub.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import clearhead
from clearhead.tasks.texts import embed


def search(model: str, question: str, lines: list[str], most: int = 3) -> list[tuple[float, str]]:
    """The `most` lines nearest to the question, with their cosine similarity."""
    encoder = clearhead.load(model).eval()
    vectors = F.normalize(torch.stack(embed(encoder, [question, *lines])), dim=-1)
    nearness = vectors[1:] @ vectors[0]
    best = nearness.topk(min(most, len(lines)))
    return [(score.item(), lines[index]) for score, index in zip(best.values, best.indices, strict=True)]


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    lines = [line for line in Path(sys.argv[3]).read_text(encoding="utf-8").splitlines() if line.strip()]
    for score, line in search(sys.argv[1], sys.argv[2], lines):
        print(f"{score:.3f}  {line}")
