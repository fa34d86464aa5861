"""Your own training loop with Clearhead's parts: a config, a model, batches, an optimizer, a loss.

    python examples/training_loop.py

`clearhead train` does all of this and more: evaluation, checkpoints, resuming. This is the loop inside it.
"""

import torch
import torch.nn.functional as F

import clearhead

TEXT = "the cat sat on the mat. the dog sat on the log. " * 40


def main(steps: int = 60) -> float:
    torch.manual_seed(0)
    letters = sorted(set(TEXT))
    ids = torch.tensor([letters.index(letter) for letter in TEXT])
    config = clearhead.preset("tiny-llama")
    model = clearhead.build(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    for step in range(steps):
        starts = torch.randint(0, len(ids) - 33, (16,))
        rows = torch.stack([ids[start : start + 33] for start in starts])  # B T+1
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:3}  loss {loss.item():.3f}")
    model.eval()
    written = model.generate([ids[:4].tolist()], max_new_tokens=30)[0]
    print("".join(letters[token] for token in written.tokens if token < len(letters)))
    return loss.item()


if __name__ == "__main__":
    main()
