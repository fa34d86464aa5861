"""`model.save`: a folder that `clearhead.load` reads, and `transformers` too if it has the architecture."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from clearhead.configs import Blocks, dumps
from clearhead.tokenize.gguf import from_gguf

from .convert import CheckpointError, family, listing, to_hf
from .convert.card import model_card
from .convert.differences import differences
from .folder import (
    COMPANIONS,
    INDEX,
    TOKENIZER,
    WEIGHTS,
    Writers,
    companion_files,
    index_text,
    json_text,
    refuse_model,
    remove_stale,
    replace_files,
    split,
    tensor_writer,
    text_writer,
)
from .model import Model
from .origin import origin_fields
from .quantize import dequantize

SHARD_BYTES = 5 * 10**9


def save(
    model: Model,
    folder: str | Path,
    *,
    tokenizer: Any = None,
    shard_bytes: int = SHARD_BYTES,
    extra: Mapping[str, Any] | None = None,
    force: bool = False,
) -> None:
    """Write the model to a folder that `load` reads, and `transformers` too if it has the architecture.

    tokenizer    anything with a method `save(folder)`; its `end`, if it has one, becomes `eos_token_id`
    shard_bytes  larger weights are split into several files
    extra        fields for `config.json` that our config does not have: `eos_token_id`, `max_position_embeddings`, …
    force        replace a model that the folder already holds; without it, that is an error

    A model that was loaded keeps its family (`model_type`) as long as its config still belongs to it. All files are
    written under temporary names and then renamed, so a crash leaves the old files intact.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file, not a folder")
    if shard_bytes <= 0:
        raise ValueError(f"shard_bytes is {shard_bytes}, but must be positive")
    origin = model.origin if model.origin is not None and model.origin.is_dir() else None
    if tokenizer is None and origin is None and model.origin is not None:
        tokenizer = from_gguf(model.origin)
    fields = {**origin_fields(model.origin), **(extra or {})}
    own = model.precision is not None and not isinstance(model.precision, Blocks)
    hf, tensors = quantised_checkpoint(model, fields) if own else family_checkpoint(dequantize(model), fields)
    if "eos_token_id" in hf and hf["eos_token_id"] is None:
        hf["eos_token_id"] = getattr(tokenizer, "end", None)
    shards = split(tensors, shard_bytes)
    files: Writers = {name: tensor_writer(part) for name, part in shards.items()}
    texts = {"config.json": json_text(hf), "clearhead.json": dumps(model.config)}
    if WEIGHTS not in shards:
        texts = {INDEX: index_text(shards)} | texts
    if not (folder / "README.md").exists():
        texts["README.md"] = model_card(folder.resolve().name, model.config, hf)
    files |= {name: text_writer(text) for name, text in texts.items()}
    folder.mkdir(parents=True, exist_ok=True)
    if origin is not None and origin.resolve() != folder.resolve():
        copied = COMPANIONS if tokenizer is None else COMPANIONS - TOKENIZER
        files |= {name: partial(copyfile, path) for name, path in companion_files(origin, copied).items()}
    with TemporaryDirectory() as aside:
        if tokenizer is not None:
            tokenizer.save(Path(aside))
        files |= {path.name: partial(copyfile, path) for path in Path(aside).iterdir()}
        if not force:
            refuse_model(folder, set(files))
        replace_files(folder, files)
    remove_stale(folder, keep=set(files))


def quantised_checkpoint(model: Model, extra: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` and the tensors of a quantised model, which only Clearhead can read."""
    assert model.precision is not None
    stored = {"quant_method": "clearhead", "precision": model.precision.to_dict()}
    hf = {"model_type": "clearhead", "architectures": [model.config.kind()], "dtype": "float32"}
    return hf | {"quantization_config": stored} | dict(extra), dict(model.state_dict())


def family_checkpoint(model: Model, extra: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` and tensors in the format of `transformers`, or in our own if it does not have the architecture."""
    config, weights = model.config, named_weights(model)
    dtype = {"dtype": str(next(iter(weights.values())).dtype).removeprefix("torch.")}
    hf = to_hf(config, model.family)
    if hf is None:
        return {"model_type": "clearhead", "architectures": [config.kind()]} | dtype | dict(extra), weights
    hf |= dtype | dict(extra)
    kind = family(hf)
    if found := differences(config, kind.config(hf)):
        raise CheckpointError(f"extra would change the model: {found[0]}")
    return hf, kind.theirs(weights, config, hf["architectures"][0])


def named_weights(model: Model) -> dict[str, Tensor]:
    """The model's weights by name. Raise if they do not match its config, as after adding adapters."""
    weights, wanted = model.state_dict(), model.config.weights()
    missing, unknown = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
    if missing or unknown:
        found = "; ".join(filter(None, (listing("missing", missing), listing("unknown", unknown))))
        raise CheckpointError(f"the model no longer matches its config: {found}")
    if any(weight.is_meta for weight in weights.values()):
        raise CheckpointError(
            "the model is on the meta device and has no weights to save; build it on the CPU, or load its weights first"
        )
    return {name: weights[name] for name in wanted}
