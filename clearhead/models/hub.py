"""Find a model by its name on the Hugging Face Hub, in the local cache or by downloading it."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

from clearhead.extras import install_command

from .convert import CheckpointError

NAME = re.compile(r"[\w.-]+/[\w.-]+")
FILES = ["*.json", "*.safetensors", "*.jinja", "*.spm", "*.model", "*.txt"]
"""The files of a model that are downloaded. Pickles and programs are not."""
BUNDLED = {"shakespeare": Path(__file__).parents[1] / "studio" / "model"}
"""Models that come with the package, by name."""
BARE = re.compile(r"\w[\w-]*(\.\d[\w-]*)*")


def find_checkpoint(path: str | Path, files: Sequence[str] = FILES) -> Path:
    """The path itself if it exists; else the folder of a model on the Hub called `org/name`, or `gpt2`.

    `shakespeare` is a small model that comes with the package. A bare name is looked up in the local cache first, then
    on the Hub. A path inside a folder that exists is taken for a typing error, not for a name. HF_HOME says where the
    cache is; with HF_HUB_OFFLINE=1 nothing is downloaded.
    """
    if not str(path):
        raise CheckpointError("the name of the model is empty; give the folder of a checkpoint")
    here = Path(path)
    if is_unfinished_run(here):
        return unfinished_model(here)
    if str(path) in BUNDLED and not here.exists():
        return BUNDLED[str(path)]
    if here.exists() or not isinstance(path, str) or not (BARE.fullmatch(path) or NAME.fullmatch(path)):
        return here
    if NAME.fullmatch(path) and here.parent.is_dir():
        return here
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled, RepositoryNotFoundError
    except ImportError:
        raise CheckpointError(
            f"{path} is not a folder; if it is the name of a model on the Hub: {install_command('hub')}"
        ) from None
    if BARE.fullmatch(path):
        try:
            return Path(snapshot_download(path, allow_patterns=list(files), local_files_only=True))
        except (OSError, ValueError):
            pass
    try:
        return Path(snapshot_download(path, allow_patterns=list(files)))
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"{path} is not a folder, not in the Hub's cache, and not a model on the Hub that you may read"
        ) from None
    except OfflineModeIsEnabled:
        raise CheckpointError(f"{path} is not a folder and not in the Hub's cache, and HF_HUB_OFFLINE is set") from None
    except LocalEntryNotFoundError:
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        reason = "HF_HUB_OFFLINE is set" if offline else "the Hub cannot be reached"
        raise CheckpointError(f"{path} is not a folder and not in the Hub's cache, and {reason}") from None
    except (OSError, ValueError) as error:
        lines = str(error).strip().splitlines()
        raise CheckpointError(f"{path} is not a folder, and the Hub says: {lines[0] if lines else error!r}") from None


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
