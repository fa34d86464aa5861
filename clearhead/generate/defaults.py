"""Decoding defaults of a checkpoint, from `generation_config.json`, `config.json` and the tokenizer's files."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from clearhead.configs import DecodingConfig, LearnedConfig, Power
from clearhead.models.folder import read_config
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
"""Settings that Clearhead does not support, and the value that has no effect. Other values cause a warning."""


def default_decoding(model: Model, tokenizer: Tokenizer | None) -> DecodingConfig:
    """The decoding options that the checkpoint asks for."""
    settings = decoding_settings(model.origin)
    ends = settings.get("eos_token_id")
    if ends is None and tokenizer is not None:
        ends = tokenizer.end
    given: dict[str, Any] = {"ends": () if ends is None else tuple(ends) if isinstance(ends, list) else (ends,)}
    given["start"] = start_token(model, settings, tokenizer)
    given["forced_end"] = settings.get("forced_eos_token_id") if isinstance(model, EncoderDecoder) else None
    if settings.get("do_sample"):
        given |= {"temperature": 1.0} | {name: settings[name] for name in SAMPLING if settings.get(name) is not None}
        given["top_k"] = given.get("top_k") or None  # transformers' 0 means no top_k
    elif settings.get("num_beams"):
        given["beams"] = settings["num_beams"]
    for name in ("max_new_tokens", "repetition_penalty", "early_stopping"):
        if settings.get(name) is not None:
            given[name] = settings[name]
    if settings.get("length_penalty") is not None:
        given["length_penalty"] = Power(float(settings["length_penalty"]))
    given["banned"] = tuple(word[0] for word in settings.get("bad_words_ids") or () if len(word) == 1)
    return DecodingConfig(**given)


def start_token(model: Model, settings: dict[str, Any], tokenizer: Tokenizer | None) -> int | None:
    """The first token of a text: the start token, or else the end token of the text before it."""
    if isinstance(model, EncoderDecoder):
        chosen = settings.get("decoder_start_token_id")
        return settings.get("bos_token_id") if chosen is None else chosen
    if tokenizer is not None and (around := tokenizer.prompt("")):
        return around[0]
    if settings.get("bos_token_id") is not None:
        return settings["bos_token_id"]
    return None if tokenizer is None else tokenizer.end


def context_length(model: Model) -> int | None:
    """The longest text the model can read, in tokens, by its position table or its config file; None: no bound."""
    embedding = model.config.source if isinstance(model, EncoderDecoder) else model.config.embedding
    if isinstance(embedding.position, LearnedConfig):
        return embedding.position.length
    settings = read_configs(model.origin)["config.json"]
    return settings.get("max_position_embeddings") or settings.get("n_positions")


def decoding_settings(origin: Path | None) -> dict[str, Any]:
    """Settings of `generation_config.json`, over those of `config.json`, where older checkpoints keep them."""
    both = read_configs(origin)
    older = {name: value for name, value in both["config.json"].items() if name in DECODING}
    newer = {name: value for name, value in both["generation_config.json"].items() if value is not None}
    settings = both["config.json"] | newer
    odd = [name for name, neutral in NEUTRAL.items() if settings.get(name, neutral) not in (neutral, None)]
    odd += ["bad_words_ids"] if any(len(word) > 1 for word in settings.get("bad_words_ids") or ()) else []
    if odd:
        warnings.warn(f"ignoring decoding settings of this checkpoint: {', '.join(odd)} (not supported)", stacklevel=2)
    return older | newer


def read_configs(origin: Path | None) -> dict[str, dict[str, Any]]:
    """The contents of `config.json` and `generation_config.json`; empty if a file is missing."""
    found: dict[str, dict[str, Any]] = {"config.json": config_json(origin), "generation_config.json": {}}
    if origin is not None and (path := origin / "generation_config.json").is_file():
        found["generation_config.json"] = read_config(path)
    return found
