"""How a checkpoint wants to be decoded, by its own files: `generation_config.json`, `config.json`, the tokenizer's."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from clearhead.configs import DecodingConfig, LearnedConfig, Power
from clearhead.models.folder import read_json
from clearhead.models.model import EncoderDecoder, Model
from clearhead.models.origin import DECODING, SAMPLING, config_json
from clearhead.tokenize import Tokenizer

NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("diversity_penalty", "epsilon_cutoff", "eta_cutoff"), 0.0),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_decoder_ids")),
    "typical_p": 1.0,
    "stop_strings": None,
    "sequence_bias": None,
}
"""Fields of others that change what is written, and are not known here unless they say nothing."""


def defaults(model: Model, tokenizer: Tokenizer | None) -> DecodingConfig:
    """How the model wants to be decoded, where the caller does not say."""
    said = asked(model.origin)
    ends = said.get("eos_token_id")
    if ends is None and tokenizer is not None:
        ends = tokenizer.end
    given: dict[str, Any] = {"ends": () if ends is None else tuple(ends) if isinstance(ends, list) else (ends,)}
    given["start"] = start(model, said, tokenizer)
    given["forced_end"] = said.get("forced_eos_token_id") if isinstance(model, EncoderDecoder) else None
    if said.get("do_sample"):
        given |= {"temperature": 1.0} | {name: said[name] for name in SAMPLING if said.get(name) is not None}
        given["top_k"] = given.get("top_k") or None  # transformers' 0 is no top_k
    elif said.get("num_beams"):
        given["beams"] = said["num_beams"]
    for name in ("max_new_tokens", "repetition_penalty", "early_stopping"):
        if said.get(name) is not None:
            given[name] = said[name]
    if said.get("length_penalty") is not None:
        given["length_penalty"] = Power(float(said["length_penalty"]))
    given["never"] = tuple(word[0] for word in said.get("bad_words_ids") or () if len(word) == 1)
    return DecodingConfig(**given)


def start(model: Model, said: dict[str, Any], tokenizer: Tokenizer | None) -> int | None:
    """The token that a text begins with: for want of one of its own, the one that ends the text before."""
    if isinstance(model, EncoderDecoder):
        chosen = said.get("decoder_start_token_id")
        return said.get("bos_token_id") if chosen is None else chosen
    if tokenizer is not None and (around := tokenizer.prompt("")):
        return around[0]
    if said.get("bos_token_id") is not None:
        return said["bos_token_id"]
    return None if tokenizer is None else tokenizer.end


def context_length(model: Model) -> int | None:
    """How many tokens the model reads at most: as many as its table of positions has, or as its files say."""
    embedding = model.config.source if isinstance(model, EncoderDecoder) else model.config.embedding
    if isinstance(embedding.position, LearnedConfig):
        return embedding.position.length
    said = files(model.origin)["config.json"]
    return said.get("max_position_embeddings") or said.get("n_positions")


def asked(origin: Path | None) -> dict[str, Any]:
    """What the files ask for: `generation_config.json`, and `config.json`, where older checkpoints have it."""
    both = files(origin)
    older = {name: value for name, value in both["config.json"].items() if name in DECODING}
    newer = {name: value for name, value in both["generation_config.json"].items() if value is not None}
    said = both["config.json"] | newer
    odd = [name for name, neutral in NEUTRAL.items() if said.get(name, neutral) not in (neutral, None)]
    odd += ["bad_words_ids"] if any(len(word) > 1 for word in said.get("bad_words_ids") or ()) else []
    if odd:
        warnings.warn(f"the checkpoint asks for {', '.join(odd)}, which is not done here", stacklevel=2)
    return older | newer


def files(origin: Path | None) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {"config.json": config_json(origin), "generation_config.json": {}}
    if origin is not None and (path := origin / "generation_config.json").is_file():
        found["generation_config.json"] = read_json(path)
    return found
