"""A model by its name on the Hugging Face Hub: its files, from the cache or fetched into it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path

from clearhead.extras import install_command

from .convert import CheckpointError

NAME = re.compile(r"[\w.-]+/[\w.-]+")
FILES = ["*.json", "*.safetensors", "*.jinja", "*.spm", "*.model", "*.txt"]
"""What is read of a model; nobody's pickles or programs are fetched."""


def find_checkpoint(path: str | Path, files: Sequence[str] = FILES) -> Path:
    """The path itself, if it is there; else, where it looks like `org/name`, the Hub's folder of that name.

    What would stand in a folder that is there is a path mistyped, not a name: nobody is asked for it.
    huggingface-hub keeps the cache: HF_HOME says where, HF_HUB_OFFLINE=1 that nothing is fetched.
    """
    if not str(path):
        raise CheckpointError("a model is asked for by an empty name; give the folder of a checkpoint")
    here = Path(path)
    if is_unfinished_run(here):
        return unfinished_model(here)
    if here.exists() or here.parent.is_dir() or not isinstance(path, str) or not NAME.fullmatch(path):
        return here
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled, RepositoryNotFoundError
    except ImportError:
        raise CheckpointError(
            f"{path} is not a folder; if it is the name of a model on the Hub: {install_command('hub')}"
        ) from None
    try:
        return Path(snapshot_download(path, allow_patterns=list(files)))
    except RepositoryNotFoundError:
        raise CheckpointError(f"{path} is neither a folder nor a model on the Hub that you may read") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        raise CheckpointError(
            f"{path} is not a folder, not in the Hub's cache, and the Hub cannot be reached"
        ) from None
    except (OSError, ValueError) as error:
        said = str(error).strip().splitlines()
        raise CheckpointError(f"{path} is not a folder, and the Hub says: {said[0] if said else error!r}") from None


def is_unfinished_run(folder: Path) -> bool:
    """Whether a folder is a training run that has not written its final model yet."""
    final = ("config.json", "clearhead.json", "adapter.json")
    return (folder / "recipe.json").is_file() and not any((folder / name).exists() for name in final)


def unfinished_model(run: Path) -> Path:
    """The model of an unfinished run: the best so far, or the last one if none was evaluated yet."""
    for name in ("best", "last"):
        if any((run / name / file).exists() for file in ("config.json", "clearhead.json", "adapter.json")):
            warnings.warn(f"{run} has not finished training; using its {name} model so far, {run / name}", stacklevel=2)
            return run / name
    raise CheckpointError(
        f"{run} stopped before its first checkpoint, so it holds no model yet; continue it with: clearhead train --out "
        f"{run} --resume, and the --data it was started with"
    )
