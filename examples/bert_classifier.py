"""A BERT-style encoder that learns to tell questions from statements, with a class head.

    python examples/bert_classifier.py

The sentences are made up here, so nothing is downloaded.
"""

import random

import torch
import torch.nn.functional as F

import clearhead
from clearhead.configs import ClassHeadConfig, FirstTokenConfig
from clearhead.models.bert import bert

WORDS = [
    "the",
    "cat",
    "a",
    "dog",
    "my",
    "friend",
    "the",
    "house",
    "runs",
    "sleeps",
    "sings",
    "waits",
    "here",
    "there",
    "now",
    "today",
]
QUESTIONS = ["who", "what", "where", "when", "why", "does", "is", "can", "will"]
CLS, PAD = 0, 1
VOCABULARY = {word: index + 2 for index, word in enumerate(sorted({*WORDS, *QUESTIONS}))}


def make_sentence(rng: random.Random) -> tuple[list[int], int]:
    words, question = rng.choices(WORDS, k=rng.randint(3, 7)), rng.random() < 0.5
    if question:
        words.insert(rng.randrange(len(words)), rng.choice(QUESTIONS))
    return [CLS, *(VOCABULARY[word] for word in words)], int(question)


def make_batch(rng: random.Random, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids padded to one length, which of them are real, and the classes."""
    rows, classes = zip(*(make_sentence(rng) for _ in range(size)), strict=True)
    width = max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
    return ids, ids != PAD, torch.tensor(classes)


def main(steps: int = 60) -> float:
    torch.manual_seed(0)
    rng = random.Random(0)
    head = ClassHeadConfig(classes=2, pool=FirstTokenConfig())
    config = bert(vocabulary=len(VOCABULARY) + 2, dim=32, layers=2, heads=4, length=16, head=head)
    model = clearhead.build(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        ids, real, classes = make_batch(rng, 32)
        loss = F.cross_entropy(model(ids, readable=real), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:3}  loss {loss.item():.3f}")
    ids, real, classes = make_batch(rng, 500)
    with torch.no_grad():
        right = (model.eval()(ids, readable=real).argmax(-1) == classes).float().mean().item()
    print(f"{right:.1%} of 500 new sentences classified correctly")
    return right


if __name__ == "__main__":
    main()
