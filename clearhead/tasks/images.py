"""Read image files as a checkpoint's `preprocessor_config.json` describes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Float
from msgspec import Meta
from torch import Tensor

from clearhead.configs import PatchEmbeddingConfig
from clearhead.data.images import BILINEAR, open_image
from clearhead.typed_json import quote_repr

Edge = Annotated[int, Meta(ge=1, le=2**15)]
PREPROCESSING: dict[str, Any] = {
    **dict.fromkeys(("size", "crop_size"), Edge | dict[str, Edge] | None),
    **dict.fromkeys(("do_resize", "do_center_crop", "do_rescale", "do_normalize"), bool | None),
    **dict.fromkeys(("image_mean", "image_std"), float | list[float] | None),
    "resample": Annotated[int, Meta(ge=0, le=5)] | None,
    "rescale_factor": float | None,
}
"""The fields of `preprocessor_config.json` that are used, with their types."""


def read_image(path: Path, embedding: PatchEmbeddingConfig, settings: dict[str, Any]) -> Float[Tensor, "Ch Y X"]:
    """Resize, crop, rescale and normalise an image. Defaults are those of ViT: bilinear resizing, values in ±1."""
    settings = {name: value for name, value in settings.items() if value is not None}
    image = open_image(path, embedding.channels)
    if settings.get("do_resize", True):
        image = image.resize(
            target_size(image.size, settings.get("size") or embedding.image), settings.get("resample", BILINEAR)
        )
    if settings.get("do_center_crop", False):
        image = crop_center(image, *sides(settings.get("crop_size") or embedding.image))
    pixels = torch.tensor(np.asarray(image, dtype=np.float32)).reshape(image.height, image.width, -1).permute(2, 0, 1)
    if settings.get("do_rescale", True):
        pixels = pixels * settings.get("rescale_factor", 1 / 255)
    if settings.get("do_normalize", True):
        mean, std = (per_channel(settings, f"image_{name}", len(pixels)) for name in ("mean", "std"))
        pixels = (pixels - mean) / std
    return pixels


def per_channel(settings: dict[str, Any], name: str, channels: int) -> Float[Tensor, "#Ch 1 1"]:
    """A setting that has one number, or one for each channel."""
    values = torch.tensor(settings.get(name, 0.5)).reshape(-1, 1, 1)
    if len(values) not in (1, channels):
        raise ValueError(
            f"preprocessor_config.json: {name} has {len(values)} numbers, but must have 1 or {channels}, "
            "one for each channel of the model"
        )
    return values


def sides(size: Any) -> tuple[int, int]:
    """Height and width."""
    if not isinstance(size, dict):
        return size, size
    if not {"height", "width"} <= size.keys():
        raise ValueError(
            f"preprocessor_config.json: a size has {quote_repr(size)}, but must have height and width, or shortest_edge"
        )
    return size["height"], size["width"]


def target_size(now: tuple[int, int], size: Any) -> tuple[int, int]:
    """The width and height to resize to. A `shortest_edge` keeps the proportions."""
    if isinstance(size, dict) and "shortest_edge" in size:
        scale = size["shortest_edge"] / min(now)
        return (round(now[0] * scale), round(now[1] * scale))
    height, width = sides(size)
    return width, height


def crop_center(image: Any, height: int, width: int) -> Any:
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
