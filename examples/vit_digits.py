"""A small Vision Transformer learns handwritten digits, then says which patches it looked at.

    python examples/vit_digits.py

The digits come with scikit-learn; nothing is downloaded.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import clearhead
from clearhead.configs import ClassHeadConfig
from clearhead.models.vit import vit


def main(steps: int = 150) -> float:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1  # N 1 8 8
    classes = torch.tensor(digits.target)
    train, test = slice(0, 1500), slice(1500, None)
    model = clearhead.build(
        vit(dim=48, layers=2, heads=4, hidden=96, image=8, patch=2, channels=1, head=ClassHeadConfig(classes=10))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        rows = torch.randint(0, 1500, (64,))
        loss = F.cross_entropy(model(images[train][rows]), classes[train][rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:3}  loss {loss.item():.3f}")
    taps = clearhead.Taps(read=["stack.blocks.1.mixer.weights"])
    with torch.no_grad():
        right = (model.eval()(images[test]).argmax(-1) == classes[test]).float().mean().item()
        model(images[test][:1], taps=taps)
    print(f"{right:.1%} of {len(classes[test])} unseen digits read correctly")
    looked = taps.values["stack.blocks.1.mixer.weights"].mean(1)[0, 0, 1:].view(4, 4)  # class token → patches
    print(f"patches of the first one (a {classes[test][0]}) that the class token reads, in percent:")
    print((100 * looked).round().int())
    return right


if __name__ == "__main__":
    main()
