"""Decoding with a draft, beside decoding without: stories15M drafts for a model of 110M that tells the same stories.

The large model is stories15M laid into zeros: every pass costs what a model of its size costs, and says what the small
one says. Disturbing its weights makes the two disagree now and then, as a real pair does.
"""

from __future__ import annotations

import torch

import clearhead
from clearhead.configs import RMSNormConfig
from clearhead.generate.speculate import Draft
from clearhead.models.llama import llama
from clearhead.models.model import Model

from .starting import STORIES
from .turns import report, take_turns

DIM, LAYERS, HIDDEN, HEAD = 768, 12, 2048, 48
TOKENS = 64


def main() -> None:
    if not STORIES.exists():
        print(f"{STORIES} is not there; set CLEARHEAD_SHARED")
        return
    small = clearhead.load(STORIES)
    for noise in (0.0, 0.02):
        compare(laid_into_zeros(small, noise), small, noise)


def compare(large: Model, small: Model, noise: float) -> None:
    prompt = [1, 9038, 2501, 263, 931]  # Once upon a time
    options = {"max_new_tokens": TOKENS, "ends": ()}
    plain = large.generate(prompt, **options)[0]
    contestants = {"alone": lambda: large.generate(prompt, **options)}
    for count in (3, 5):
        draft = Draft(small, count)
        found = large.generate(prompt, draft=draft, **options)[0]
        assert found.tokens == plain.tokens, "greedy text must be the same word for word"
        share = (found.accepted or 0) / (found.drafted or 1)
        contestants[f"{count} tokens ahead, {share:.0%} kept"] = lambda draft=draft: large.generate(
            prompt, draft=draft, **options
        )
    seconds = take_turns(contestants, rounds=2)
    size = sum(parameter.numel() for parameter in large.parameters())
    title = f"{TOKENS} tokens of {size / 1e6:.0f}M parameters, drafted by stories15M, weights disturbed by {noise}"
    report(title, seconds, "alone")
    for name, taken in seconds.items():
        print(f"  {name:<36} {TOKENS / taken:9.1f} tokens/s   {seconds['alone'] / taken:5.2f}× as fast as alone")


def laid_into_zeros(small: Model, noise: float) -> Model:
    """The same function in a larger model: further blocks add nothing, and a norm over zeros is rescaled."""
    inner = small.config.stack.dim
    config = llama(dim=DIM, layers=LAYERS, heads=DIM // HEAD, hidden=HIDDEN, vocabulary=32000, tied=True)
    norm = RMSNormConfig(eps=small.config.stack.pattern[0].norm.eps * inner / DIM)
    config = config.with_value("stack.pattern.0.norm", norm).with_value("stack.final_norm", norm)
    large = clearhead.build(config).eval()
    rows = {"q": (0, inner), "k": (DIM, inner), "v": (2 * DIM, inner)}
    with torch.no_grad():
        state, theirs = large.state_dict(), small.state_dict()
        for weight in state.values():
            weight.zero_()
        for name, weight in theirs.items():
            if name.endswith("qkv.weight"):
                for part, (start, count) in zip(weight.split(inner), rows.values(), strict=True):
                    state[name][start : start + count, :inner] = part
            elif weight.dim() == 1:
                state[name][:inner] = weight * (inner / DIM) ** 0.5
            else:
                state[name][: weight.shape[0], : weight.shape[1]] = weight
        torch.manual_seed(0)
        for name, weight in theirs.items():
            if weight.dim() == 2 and noise:
                state[name][: weight.shape[0], : weight.shape[1]] += noise * weight.std() * torch.randn_like(weight)
    return large


if __name__ == "__main__":
    main()
