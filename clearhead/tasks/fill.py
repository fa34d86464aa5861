"""Predict masked words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from clearhead.configs import MaskedLMHeadConfig
from clearhead.models.model import Model
from clearhead.tokenize import Tokenizer

from .texts import TextReader, describe_model

KNOWN_MASKS = ("[MASK]", "<mask>")


@dataclass(frozen=True)
class Filling:
    """One prediction for a mask."""

    score: float  # its probability
    token: int
    word: str
    text: str  # the whole text with this token filled in; other masks are removed


@torch.inference_mode()
def fill_mask(
    model: Model, texts: Sequence[str], *, top: int = 5, tokenizer: Tokenizer | None = None
) -> list[list[list[Filling]]]:
    """Return the `top` likeliest tokens for each mask: a list per text, in it a list per mask."""
    reader = TextReader.of(model, tokenizer)
    if not isinstance(reader.model.config.head, MaskedLMHeadConfig):
        raise ValueError(
            f"this {describe_model(model)} has no masked-LM head, so it cannot fill masks; "
            "use a masked language model, such as BERT"
        )
    if top < 1:
        raise ValueError(f"top is {top}, but must be at least 1")
    mask = mask_token(reader.tokenizer)
    found: list[list[list[Filling]]] = [[]] * len(texts)
    for order, tokens, readable in reader.batches(texts):
        logits = reader.model(tokens, readable=readable)
        for row, ids in enumerate(tokens.tolist()):
            places = [place for place, token in enumerate(ids) if token == mask]
            if not places:
                named = reader.tokenizer.inner.id_to_token(mask)
                raise ValueError(f"there is no {named} in {texts[order[row]]!r}, so there is nothing to predict")
            length = len(ids) if readable is None else int(readable[row].sum())
            found[order[row]] = [
                rank_tokens(reader.tokenizer, logits[row, place], ids[:length], place, top) for place in places
            ]
    return found


def rank_tokens(tokenizer: Tokenizer, logits: torch.Tensor, ids: list[int], place: int, top: int) -> list[Filling]:
    best = logits.float().softmax(dim=0).topk(min(top, len(logits)))
    return [
        Filling(score, token, token_text(tokenizer, token), tokenizer.decode([*ids[:place], token, *ids[place + 1 :]]))
        for score, token in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token, special tokens included."""
    return tokenizer.inner.decode([token], skip_special_tokens=False)


def mask_token(tokenizer: Tokenizer) -> int:
    named = [tokenizer.token("mask_token"), *(tokenizer.inner.token_to_id(name) for name in KNOWN_MASKS)]
    mask = next((token for token in named if token is not None), None)
    if mask is None:
        raise ValueError(
            f"the tokenizer has no mask token, such as {KNOWN_MASKS[0]}; name it as mask_token in tokenizer_config.json"
        )
    return mask
