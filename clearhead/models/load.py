"""`clearhead.load`: a model from a checkpoint folder, a GGUF file, an adapter or a name on the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.configs import (
    EncoderDecoderConfig,
    ModelConfig,
    Precision,
    SequenceModelConfig,
)
from clearhead.configs.base import from_json, parse
from clearhead.configs.lora import ADAPTER, read_adapter
from clearhead.kernels.accelerate import accelerate
from clearhead.typed_json import read_json

from .convert import FAMILIES, OWN, CheckpointError, Family, family, listing
from .convert.differences import differences
from .convert.multimodal import text_tensors
from .convert.mxfp4 import expand_mxfp4
from .convert.tolerate import fit_head, unwrap_names
from .folder import INDEX, WEIGHTS, prefix_errors, read_config, read_tensors
from .gguf.read import load_gguf
from .hub import FILES, find_checkpoint
from .lora import base_digest, merge
from .model import Model, build_empty
from .pickles import pickle_names, read_pickles
from .presets import PRESETS
from .quantize import replace_matrices

EXACT = "choice.bias"  # the experts' bias stays in float32, whatever the other weights are
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def load(path: str | Path, *, convert: bool = False, family: str | None = None) -> Model:
    """Load a model, in the precision it was saved in.

    path     a checkpoint folder (ours, or of a supported Hugging Face family), a GGUF file, a LoRA adapter, a name on
             the Hub, or "shakespeare", a small model that comes with the package
    convert  read weights that are pickles (`pytorch_model.bin`): tensors only, in a child process with limits
    family   the `model_type`, if `config.json` has none or one that is not supported

    Weights are memory-mapped if they are stored in the layout that the model uses.

    >>> load("shakespeare").config.stack.repeats
    3
    """
    if not isinstance(path, str | Path):
        raise TypeError(f"load takes the path of a checkpoint or a name on the Hub, not {path!r}")
    try:
        folder = find_checkpoint(path, [*FILES, "*.bin"] if convert else FILES)
    except CheckpointError as error:
        if str(path) not in PRESETS:
            raise
        raise CheckpointError(f'{error}; clearhead.build("{path}") makes this architecture with new weights') from None
    if folder.suffix == ".gguf" and folder.is_file():
        return load_gguf(folder)
    if not folder.is_dir():
        raise CheckpointError(describe_missing(folder))
    if (folder / ADAPTER).exists():
        return load_adapted(folder)
    hf = as_family(read_config(folder / "config.json"), family)
    config, kind = describe(folder, hf)
    pickled = convert and not any((folder / name).exists() for name in (WEIGHTS, INDEX)) and pickle_names(folder)
    tensors = unwrap_names(read_pickles(folder) if pickled else read_tensors(folder))
    tensors = text_tensors(hf, tensors)
    if quantised_by(hf) == "mxfp4":
        tensors = expand_mxfp4(tensors, named_dtype(hf) or torch.bfloat16)
    with prefix_errors(folder):
        if (precision := stored_precision(hf)) is not None:
            model = load_quantised(config, precision, tensors)
            model.origin = folder
            return model
        config = config if kind is OWN else fit_head(kind, config, tensors)
        weights = kind.ours(tensors, config)
        check_floating(weights)
        dtype = common_dtype(weights, hf)
    model = build_empty(config)
    weights = {name: weight if name.endswith(EXACT) else weight.to(dtype) for name, weight in weights.items()}
    model.load_state_dict({name: weight.contiguous() for name, weight in weights.items()}, assign=True)
    model.origin = folder
    model.family = None if kind is OWN else hf["model_type"]
    return model.eval()


def as_family(hf: dict[str, Any], family: str | None) -> dict[str, Any]:
    """The fields of `config.json` with another `model_type`. Its class must belong to that, or is the usual one."""
    if family is None:
        return hf
    if family not in FAMILIES:
        raise CheckpointError(f"the family {family!r} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    named = (hf.get("architectures") or [None])[0]
    known = [named] if named in FAMILIES[family].architectures else None
    return hf | {"model_type": family, "architectures": known}


def describe_missing(folder: Path) -> str:
    """One sentence for a path that is not a checkpoint, and what to do about it."""
    if folder.exists():
        return f"{folder} is not a folder, and only a folder or a .gguf file holds a model"
    return f"there is no folder {folder}; give a checkpoint folder, a .gguf file, or a name on the Hub such as org/name"


def load_adapted(folder: Path) -> Model:
    """The adapter's base with the adapter added. The adapter's own tokenizer and defaults are preferred."""
    about = read_adapter(folder)
    base = Path(about.base)
    if not base.is_dir():
        raise CheckpointError(f"{folder} adapts {base}, which does not exist; restore it, or change base in {ADAPTER}")
    if base_digest(base) != about.digest:
        raise CheckpointError(f"{folder} adapts {base}, but the weights there have changed since")
    model = load(base)
    merge(model, folder)
    if (folder / "config.json").exists():
        model.origin = folder
    return model.eval()


def describe(folder: Path, hf: Mapping[str, Any]) -> tuple[ModelConfig, Family]:
    """The config, and the family that names the tensors. `clearhead.json` is preferred if there is one."""
    refuse_foreign(folder, hf)
    ours = folder / "clearhead.json"
    with prefix_errors(folder):
        kind = family(hf)
        if kind is OWN and not ours.exists():
            raise CheckpointError(
                "clearhead.json is missing, and this config.json alone does not describe the model; "
                "copy clearhead.json from the folder that was saved"
            )
        if not ours.exists():
            return kind.config(hf), kind
        config = from_json(read_json(ours))
        if not isinstance(config, SequenceModelConfig | EncoderDecoderConfig):
            raise CheckpointError(f"clearhead.json describes a {config.kind()}, not a whole model")
        if kind is not OWN and (found := differences(config, kind.config(hf))):
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            raise CheckpointError(
                f"clearhead.json and config.json describe different models: {found[0]}{more}; "
                "to use config.json, remove clearhead.json"
            )
    return config, kind


def refuse_foreign(folder: Path, hf: Mapping[str, Any]) -> None:
    """Raise for checkpoints that need their own code, or were quantised by another tool."""
    kind = FAMILIES.get(str(hf.get("model_type")))
    known = kind is not None and (hf.get("architectures") or kind.architectures)[0] in kind.architectures
    if hf.get("auto_map") and not known:
        raise CheckpointError(
            f"{folder} needs trust_remote_code: it runs a program that comes with the checkpoint, which Clearhead "
            "never does. If you trust it, load it in transformers, copy its weights into a supported family "
            f"({', '.join(sorted(FAMILIES))}), and save that with save_pretrained"
        )
    if hf.get("quantization_config") and quantised_by(hf) not in ("clearhead", "mxfp4"):
        method = quantised_by(hf) or "an unnamed method"
        raise CheckpointError(f"{folder} is quantised by {method}, which is not supported; load the original model")


def quantised_by(hf: Mapping[str, Any]) -> str | None:
    """The method that quantised the matrices of a checkpoint."""
    stored = hf.get("quantization_config")
    return stored.get("quant_method") if isinstance(stored, Mapping) else None


def stored_precision(hf: Mapping[str, Any]) -> Precision | None:
    """The precision in which `clearhead quantize` stored the matrices, if it did."""
    if quantised_by(hf) != "clearhead":
        return None
    stored = hf["quantization_config"].get("precision")
    precision = parse(stored, "config.json: precision")
    if not isinstance(precision, Precision):
        raise CheckpointError(f"config.json: {stored!r} is not a precision")
    return precision


def common_dtype(weights: Mapping[str, Tensor], hf: Mapping[str, Any]) -> torch.dtype:
    """The dtype to compute in. If the tensors have several, use the one `config.json` names, or else the commonest."""
    sizes: dict[torch.dtype, int] = {}
    for name, weight in weights.items():
        if not name.endswith(EXACT):
            sizes[weight.dtype] = sizes.get(weight.dtype, 0) + weight.numel()
    named = named_dtype(hf)
    return named if len(sizes) > 1 and named is not None else max(sizes, key=lambda dtype: sizes[dtype])


def named_dtype(hf: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that `config.json` names, if weights can have it."""
    named = getattr(torch, str(hf.get("dtype") or hf.get("torch_dtype")), None)
    return named if named in DTYPES else None


def load_quantised(config: ModelConfig, precision: Precision, tensors: Mapping[str, Tensor]) -> Model:
    """A model that `clearhead quantize` saved."""
    model = build_empty(config)
    replace_matrices(model, precision, model.state_dict(), {})
    wanted = model.state_dict()
    wrong = [
        f"{name} is {tuple(tensors[name].shape)} of {tensors[name].dtype}, not {tuple(want.shape)} of {want.dtype}"
        for name, want in wanted.items()
        if name in tensors and (tensors[name].shape, tensors[name].dtype) != (want.shape, want.dtype)
    ]
    missing, unknown = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    found = (listing("missing", missing), listing("unknown", unknown), listing("misshapen", wrong))
    if any(found):
        raise CheckpointError("; ".join(filter(None, found)))
    model.load_state_dict(tensors, assign=True)
    return accelerate(model.eval())


def check_floating(weights: Mapping[str, Tensor]) -> None:
    odd = {name: weight.dtype for name, weight in weights.items() if weight.dtype not in DTYPES}
    if odd:
        names = [f"{name} is {str(dtype).removeprefix('torch.')}" for name, dtype in odd.items()]
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise CheckpointError(f"{listing('unsupported', names)}; weights must be one of {known}")
