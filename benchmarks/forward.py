"""A GPT-2 and a grouped-query LLaMA of 12 layers, forward and forward with backward, beside transformers' own."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

import clearhead

from .turns import report, take_turns


def main() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    models = {
        "GPT-2, d 768, 12 layers": transformers.GPT2LMHeadModel(transformers.GPT2Config()),
        "LLaMA, d 768, 12 heads on 4": transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=768,
                intermediate_size=2048,
                num_hidden_layers=12,
                num_attention_heads=12,
                num_key_value_heads=4,
                vocab_size=32000,
            )
        ),
    }
    for name, theirs in models.items():
        compare(name, theirs.eval())


def compare(name: str, theirs: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = clearhead.load(folder)
    tokens = torch.randint(0, 1000, (1, 512))
    with torch.inference_mode():
        difference = (ours(tokens) - theirs(tokens).logits).abs().max()
        forward = take_turns(
            {
                "clearhead": lambda: ours(tokens),
                "clearhead, written out": lambda: ours(tokens, fused=False),
                "transformers": lambda: theirs(tokens),
            }
        )
    report(f"{name}: forward of 1 × 512 tokens", forward, "clearhead")
    print(f"  the logits differ by {difference:.1e}")

    def step(model: Any, logits: Any) -> None:
        logits().float().mean().backward()
        model.zero_grad()

    both = take_turns(
        {
            "clearhead": lambda: step(ours, lambda: ours(tokens)),
            "transformers": lambda: step(theirs, lambda: theirs(tokens).logits),
        },
        rounds=5,
    )
    report(f"{name}: forward and backward", both, "clearhead")


if __name__ == "__main__":
    main()
