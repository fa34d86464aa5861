"""What a checkpoint says besides its weights and architecture: special tokens, decoding defaults, labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .folder import read_config
from .gguf.read import gguf_fields

IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id")
SAMPLING = ("temperature", "top_k", "top_p", "min_p")  # used only if do_sample is true
LIMITS = ("max_new_tokens", "repetition_penalty", "num_beams", "length_penalty", "early_stopping", "bad_words_ids")
DECODING = (*IDS, "do_sample", *SAMPLING, *LIMITS)
"""Decoding defaults: fields of `generation_config.json`, or of `config.json` in older checkpoints."""
COMPANION_FIELDS = (*DECODING, "max_position_embeddings", "id2label", "label2id", "problem_type")
"""Fields of `config.json` that our configs do not have, and that are copied along."""


def origin_fields(origin: Path | None) -> dict[str, Any]:
    """The fields to copy from the folder or file that a model was loaded from."""
    hf = config_json(origin)
    return {name: hf[name] for name in COMPANION_FIELDS if hf.get(name) is not None}


def config_json(origin: Path | None) -> dict[str, Any]:
    """The `config.json` of the folder that a model was loaded from, or its equivalent for a GGUF file; else empty."""
    if origin is not None and origin.suffix == ".gguf" and origin.is_file():
        return gguf_fields(origin)
    return {} if origin is None or not (origin / "config.json").exists() else read_config(origin / "config.json")
