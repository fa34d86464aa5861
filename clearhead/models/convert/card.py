"""The model card: a README.md with the front matter that the Hugging Face Hub reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from clearhead.configs import (
    ClassHeadConfig,
    EncoderDecoderConfig,
    LMHeadConfig,
    MaskedLMHeadConfig,
    ModelConfig,
    PatchEmbeddingConfig,
)


def model_card(name: str, config: ModelConfig, hf: Mapping[str, Any]) -> str:
    """Write a card from the config. The author must add the training data and the intended use."""
    theirs = hf["model_type"] != "clearhead"
    kind, architecture = hf["model_type"], hf["architectures"][0]
    stack = config.encoder if isinstance(config, EncoderDecoderConfig) else config.stack
    blocks = f"{len(stack.blocks)} blocks"
    if isinstance(config, EncoderDecoderConfig):
        blocks = f"{len(stack.blocks)} encoder and {len(config.decoder.blocks)} decoder blocks"
    count = sum(math.prod(shape) for shape in config.weights().values())
    loading = f'import clearhead\n\nmodel = clearhead.load("{name}")\n'
    if theirs:
        loading += (
            f'\n# or\nfrom transformers import {architecture}\n\nmodel = {architecture}.from_pretrained("{name}")\n'
        )
    return f"""---
library_name: {"transformers" if theirs else "clearhead"}
pipeline_tag: {task(config)}
tags:
- clearhead
- {kind if theirs else architecture}
---

# {name}

{architecture} ({kind}) with {count:,} parameters in {hf["dtype"]}: {blocks} of width {stack.dim}.
The whole architecture is in `clearhead.json`.

```python
{loading}```
"""


def task(config: ModelConfig) -> str:
    """Return the Hub's name for the model's task."""
    if isinstance(config, EncoderDecoderConfig):
        return "translation"
    images = isinstance(config.embedding, PatchEmbeddingConfig)
    match config.head:
        case LMHeadConfig():
            return "text-generation"
        case MaskedLMHeadConfig():
            return "fill-mask"
        case ClassHeadConfig():
            return "image-classification" if images else "text-classification"
    return "image-feature-extraction" if images else "feature-extraction"
