"""A model in a folder: `config.json` and safetensors as Hugging Face lays them out, and our own `clearhead.json`.

    clearhead.json     the config, exactly
    config.json        what `transformers` reads, where it has the architecture
    model.safetensors  the weights, under the names of `transformers` if it has the architecture, else under ours
    README.md          the model card

Nothing is ever pickled, and no code of a checkpoint is ever run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from clearhead.configs import (
    ConfigError,
    EncoderDecoderConfig,
    ModelConfig,
    Precision,
    SequenceModelConfig,
    dumps,
    loads,
)
from clearhead.configs.base import parse
from clearhead.files import TargetError, flush_to_disk, stage_file
from clearhead.models.convert.resolve import differences
from clearhead.tokenize.gguf import from_gguf

from .assemble import Model, bare
from .convert import FAMILIES, OWN, CheckpointError, Family, family, listing, to_hf
from .convert.card import model_card
from .hub import located
from .quantize import replace_matrices

Writers = dict[str, Callable[[Path], object]]
"""By a file's name, what writes it to a path."""

SHARD_BYTES = 5 * 10**9
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHT_FILES = r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
TOKENIZER = {
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "source.spm",
    "target.spm",
}
KEPT = {*TOKENIZER, "generation_config.json", "chat_template.jinja", "preprocessor_config.json"}
"""Files that go along when a model is loaded from one folder and saved to another."""
IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id")
DRAWN = ("temperature", "top_k", "top_p", "min_p")  # of use only where do_sample says so
WRITING = ("max_new_tokens", "repetition_penalty", "num_beams", "length_penalty", "early_stopping", "bad_words_ids")
DECODING = (*IDS, "do_sample", *DRAWN, *WRITING)
"""How a checkpoint wants to be decoded: fields of `generation_config.json` and, of older ones, of `config.json`."""
KEPT_FIELDS = (*DECODING, "max_position_embeddings", "id2label", "label2id", "problem_type")
"""What a `config.json` says that no config of ours knows, and that goes along."""
EXACT = "choice.bias"  # of experts, which stays in float32 among others of fewer bits
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CONVERT = (
    "Convert it where you trust it: load it in transformers with from_pretrained, and write safetensors with "
    "save_pretrained"
)


def load(path: str | Path) -> Model:
    """The model in a folder of ours or of a family that `convert` knows, in the precision it was saved in.

    `path` may also be a GGUF file, or the name of a model on the Hub. The weights are memory-mapped where theirs and
    ours lie alike.
    """
    folder = located(path)
    if folder.suffix == ".gguf" and folder.is_file():
        from .gguf import load_gguf  # whose writing needs this file

        return load_gguf(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is {'not a folder' if folder.exists() else 'missing'}")
    if (folder / "adapter.json").exists():
        from .adapter import load_adapted  # which loads what it adapts by this function

        return load_adapted(folder)
    hf = read_json(folder / "config.json")
    config, kind = describe(folder, hf)
    tensors = read_tensors(folder)
    with told_of(folder):
        if (precision := stored_precision(hf)) is not None:
            model = load_packed(config, precision, tensors)
            model.origin = folder
            return model
        weights = kind.ours(tensors, config)
        check_floating(weights)
        dtype = common_type(weights, hf)
    model = bare(config)
    weights = {name: weight if name.endswith(EXACT) else weight.to(dtype) for name, weight in weights.items()}
    model.load_state_dict({name: weight.contiguous() for name, weight in weights.items()}, assign=True)
    model.origin = folder
    return model.eval()


def save(
    model: Model,
    folder: str | Path,
    *,
    tokenizer: Any = None,
    shard_bytes: int = SHARD_BYTES,
    extra: Mapping[str, Any] | None = None,
    force: bool = False,
) -> None:
    """Write the model to a folder that `load` reads, and `transformers` too where it has the architecture.

    tokenizer    anything with a method `save(folder)`; its `end`, if it has one, becomes `eos_token_id`
    shard_bytes  weights beyond this size are spread over several files
    extra        more of `config.json` that the config does not know: `eos_token_id`, `max_position_embeddings`, …
    force        replace a model that the folder holds already; without it, that is an error

    All files are first written under other names and then renamed: a crash leaves the old ones, whole.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file, not a folder")
    if shard_bytes <= 0:
        raise ValueError(f"shard_bytes is {shard_bytes}, but must be positive")
    origin = model.origin if model.origin is not None and model.origin.is_dir() else None
    if tokenizer is None and origin is None and model.origin is not None:
        tokenizer = from_gguf(model.origin)
    said = {**kept_fields(model.origin), **(extra or {})}
    packed = model.precision is not None
    hf, tensors = as_packed(model, said) if packed else as_theirs(model.config, named_weights(model), said)
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
        kept = KEPT if tokenizer is None else KEPT - TOKENIZER
        files |= {path.name: partial(copyfile, path) for path in origin.iterdir() if path.name in kept}
    with TemporaryDirectory() as aside:
        if tokenizer is not None:
            tokenizer.save(Path(aside))
        files |= {path.name: partial(copyfile, path) for path in Path(aside).iterdir()}
        if not force:
            refuse_model(folder, set(files))
        replace_files(folder, files)
    remove_stale(folder, keep=set(files))


def kept_fields(origin: Path | None) -> dict[str, Any]:
    """What the place that a model came from says of tokens and lengths, which no config of ours knows."""
    hf = config_json(origin)
    return {name: hf[name] for name in KEPT_FIELDS if hf.get(name) is not None}


def config_json(origin: Path | None) -> dict[str, Any]:
    """The `config.json` of the place that a model came from, or what a GGUF file amounts to; empty without one."""
    if origin is not None and origin.suffix == ".gguf" and origin.is_file():
        from .gguf import gguf_fields  # whose writing needs this file

        return gguf_fields(origin)
    return {} if origin is None or not (origin / "config.json").exists() else read_json(origin / "config.json")


# ---- what a folder says it holds


def describe(folder: Path, hf: Mapping[str, Any]) -> tuple[ModelConfig, Family]:
    """The config, and the family whose names the tensors have. `clearhead.json` says it best, where there is one."""
    refuse_foreign(folder, hf)
    ours = folder / "clearhead.json"
    with told_of(folder):
        kind = family(hf)
        if kind is OWN and not ours.exists():
            raise CheckpointError("clearhead.json is missing, and config.json alone does not describe the model")
        if not ours.exists():
            return kind.config(hf), kind
        config = loads(ours.read_text(encoding="utf-8"))
        if not isinstance(config, SequenceModelConfig | EncoderDecoderConfig):
            raise CheckpointError(f"clearhead.json describes a {config.kind()}, not a whole model")
        if kind is not OWN and (found := differences(config, kind.config(hf))):
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            raise CheckpointError(
                f"clearhead.json and config.json describe different models: {found[0]}{more}; "
                "remove clearhead.json to go by config.json"
            )
    return config, kind


def refuse_foreign(folder: Path, hf: Mapping[str, Any]) -> None:
    """What only foreign code can open."""
    kind = FAMILIES.get(str(hf.get("model_type")))
    known = kind is not None and (hf.get("architectures") or kind.architectures)[0] in kind.architectures
    if hf.get("auto_map") and not known:
        raise CheckpointError(
            f"{folder} needs trust_remote_code: its model is a program that came with it, which is never run here. "
            "Convert it where you trust it: load it in transformers, copy its weights into one of the known families "
            f"({', '.join(sorted(FAMILIES))}), and write that with save_pretrained"
        )
    if hf.get("quantization_config") and stored_precision(hf) is None:
        method = hf["quantization_config"].get("quant_method", "an unnamed method")
        raise CheckpointError(f"{folder} is quantised by {method}, which is not read; load the model it was made from")


def stored_precision(hf: Mapping[str, Any]) -> Precision | None:
    """What our own `quantize` stored the matrices in, if it did."""
    stored = hf.get("quantization_config")
    if not isinstance(stored, Mapping) or stored.get("quant_method") != "clearhead":
        return None
    precision = parse(stored.get("precision"), "config.json: precision")
    if not isinstance(precision, Precision):
        raise CheckpointError(f"config.json: {stored.get('precision')!r} is no precision")
    return precision


def common_type(weights: Mapping[str, Tensor], hf: Mapping[str, Any]) -> torch.dtype:
    """The one type to compute in: their only one; of several, as adapters leave behind, the one that is asked for, or
    else that of most numbers."""
    sizes: dict[torch.dtype, int] = {}
    for name, weight in weights.items():
        if not name.endswith(EXACT):
            sizes[weight.dtype] = sizes.get(weight.dtype, 0) + weight.numel()
    asked = getattr(torch, str(hf.get("dtype") or hf.get("torch_dtype")), None)
    return asked if len(sizes) > 1 and asked in DTYPES else max(sizes, key=lambda dtype: sizes[dtype])


def as_packed(model: Model, extra: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` and the tensors of a quantised model, which only we can read."""
    assert model.precision is not None
    stored = {"quant_method": "clearhead", "precision": model.precision.to_dict()}
    hf = {"model_type": "clearhead", "architectures": [model.config.kind()], "dtype": "float32"}
    return hf | {"quantization_config": stored} | dict(extra), dict(model.state_dict())


def load_packed(config: ModelConfig, precision: Precision, tensors: Mapping[str, Tensor]) -> Model:
    """A quantised model from its own tensors."""
    model = bare(config)
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
    return model.eval()


def as_theirs(
    config: ModelConfig, weights: Mapping[str, Tensor], extra: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` and the tensors: the family's, or else our own."""
    dtype = {"dtype": str(next(iter(weights.values())).dtype).removeprefix("torch.")}
    hf = to_hf(config)
    if hf is None:
        name = config.kind()
        return {"model_type": "clearhead", "architectures": [name]} | dtype | dict(extra), dict(weights)
    hf |= dtype | dict(extra)
    kind = family(hf)
    if found := differences(config, kind.config(hf)):
        raise CheckpointError(f"extra changes the model: {found[0]}")
    return hf, kind.theirs(weights, config, hf["architectures"][0])


def named_weights(model: Model) -> dict[str, Tensor]:
    """The model's weights; they must be those of its config, neither adapted nor quantised."""
    weights, wanted = model.state_dict(), model.config.weights()
    missing, unknown = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
    if missing or unknown:
        found = "; ".join(filter(None, (listing("missing", missing), listing("unknown", unknown))))
        raise CheckpointError(f"the model no longer is what its config describes: {found}")
    if any(weight.is_meta for weight in weights.values()):
        raise CheckpointError("the model is on the meta device, so it has no weights to save")
    return {name: weights[name] for name in wanted}


# ---- reading


@contextmanager
def told_of(folder: Path) -> Iterator[None]:
    """Errors that begin with the folder they are about."""
    try:
        yield
    except (CheckpointError, ConfigError) as error:
        raise type(error)(f"{folder}: {error}") from None


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's one or many safetensors files, memory-mapped."""
    names = shard_names(folder)
    if missing := [name for name in names if not (folder / name).is_file()]:
        refuse_pickles(folder)
        pickles = f"; pickles are neither fetched nor opened. If it has only those: {CONVERT}"
        told = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        raise CheckpointError(f"{folder}: {told}{pickles if missing == [WEIGHTS] else ''}")
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            with safe_open(folder / name, framework="pt") as file:
                tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise CheckpointError(f"{folder / name} is damaged: {error}") from None
    return tensors


def shard_names(folder: Path) -> list[str]:
    """One file before many, as `transformers` looks for them."""
    if (folder / WEIGHTS).exists() or not (folder / INDEX).exists():
        return [WEIGHTS]
    table = read_json(folder / INDEX).get("weight_map")
    if not isinstance(table, dict) or not all(Path(str(name)).name == name for name in table.values()):
        raise CheckpointError(f"{folder / INDEX} has no weight_map from tensors to files of its folder")
    return sorted(set(table.values()))


def refuse_pickles(folder: Path) -> None:
    """Of a model on the Hub only their index is here, to tell of them."""
    if pickled := sorted(path.name for path in folder.glob("pytorch_model*.bin*")):
        raise CheckpointError(
            f"{folder} has its weights only as pickles ({pickled[0]}), which can run any code when opened. {CONVERT}"
        )


def check_floating(weights: Mapping[str, Tensor]) -> None:
    odd = {name: weight.dtype for name, weight in weights.items() if weight.dtype not in DTYPES}
    if odd:
        names = [f"{name} is {str(dtype).removeprefix('torch.')}" for name, dtype in odd.items()]
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise CheckpointError(f"{listing('unreadable', names)}; weights are one of {known}")


def read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise CheckpointError(f"{path} is missing, so {path.parent} is not a checkpoint folder")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds no object")
    return data


# ---- writing


def split(tensors: Mapping[str, Tensor], most: int) -> dict[str, dict[str, Tensor]]:
    """The tensors by file, in order, no file above `most` bytes unless one tensor alone is."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.nbytes > most:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    if len(parts) == 1:
        return {WEIGHTS: parts[0]}
    return {f"model-{i:05}-of-{len(parts):05}.safetensors": part for i, part in enumerate(parts, 1)}


def index_text(shards: Mapping[str, Mapping[str, Tensor]]) -> str:
    total = sum(tensor.nbytes for part in shards.values() for tensor in part.values())
    table = {name: file for file, part in shards.items() for name in part}
    return json_text({"metadata": {"total_size": total}, "weight_map": table})


def json_text(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def text_writer(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text, encoding="utf-8")


def tensor_writer(tensors: Mapping[str, Tensor]) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        try:
            save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path, {"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"the weights could not be written to {path.parent}: {error}") from None

    return write


def refuse_model(folder: Path, names: set[str]) -> None:
    """Raise if the folder holds one of the files that a save would write, or weights that it would remove."""
    for path in sorted(folder.iterdir()):
        if path.name in names or re.fullmatch(WEIGHT_FILES, path.name):
            raise TargetError(
                f"{folder} holds {path.name}; add --force (in Python: force=True) to replace the model there, "
                "or choose another folder"
            )


def replace_files(folder: Path, files: Writers) -> None:
    """Write all files under temporary names, flush them to the disk, then rename each."""
    with ExitStack() as staged:
        for name, write in reversed(files.items()):  # they are renamed in the opposite order: the weights first
            part = staged.enter_context(stage_file(folder / name))
            write(part)
            flush_to_disk(part)
    flush_to_disk(folder)


def remove_stale(folder: Path, keep: set[str]) -> None:
    """Remove weights of an earlier save that this one does not replace, and files that a killed save left."""
    unfinished = re.compile(rf"\.({WEIGHT_FILES}|config\.json|clearhead\.json|README\.md|tokenizer.*)\.\w{{8}}\.part")
    for path in folder.iterdir():
        if path.name not in keep and (re.fullmatch(WEIGHT_FILES, path.name) or unfinished.fullmatch(path.name)):
            path.unlink()
