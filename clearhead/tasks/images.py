"""Image files to numbers, as a checkpoint's `preprocessor_config.json` says."""

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

Edge = Annotated[int, Meta(ge=1, le=2**15)]
PREPROCESSING: dict[str, Any] = {
    **dict.fromkeys(("size", "crop_size"), Edge | dict[str, Edge] | None),
    **dict.fromkeys(("do_resize", "do_center_crop", "do_rescale", "do_normalize"), bool | None),
    **dict.fromkeys(("image_mean", "image_std"), float | list[float] | None),
    "resample": Annotated[int, Meta(ge=0, le=5)] | None,
    "rescale_factor": float | None,
}
"""The fields of `preprocessor_config.json` that are used, with their types."""


def read_image(path: Path, embedding: PatchEmbeddingConfig, said: dict[str, Any]) -> Float[Tensor, "Ch Y X"]:
    """Resized, cropped, rescaled and normed; where nothing is said, as ViT was trained: to ±1, by bilinear resizing."""
    image = open_image(path, embedding.channels)
    if said.get("do_resize", True):
        image = image.resize(resized(image.size, said.get("size") or embedding.image), said.get("resample", BILINEAR))
    if said.get("do_center_crop", False):
        image = cropped(image, *sides(said.get("crop_size") or embedding.image))
    pixels = torch.tensor(np.asarray(image, dtype=np.float32)).reshape(image.height, image.width, -1).permute(2, 0, 1)
    if said.get("do_rescale", True):
        pixels = pixels * said.get("rescale_factor", 1 / 255)
    if said.get("do_normalize", True):
        mean, std = (torch.tensor(said.get(f"image_{name}", 0.5)).reshape(-1, 1, 1) for name in ("mean", "std"))
        pixels = (pixels - mean) / std
    return pixels


def sides(size: Any) -> tuple[int, int]:
    """Height and width."""
    return (size["height"], size["width"]) if isinstance(size, dict) else (size, size)


def resized(now: tuple[int, int], size: Any) -> tuple[int, int]:
    """Width and height to resize to; a shortest edge keeps the proportions."""
    if isinstance(size, dict) and "shortest_edge" in size:
        scale = size["shortest_edge"] / min(now)
        return (round(now[0] * scale), round(now[1] * scale))
    height, width = sides(size)
    return width, height


def cropped(image: Any, height: int, width: int) -> Any:
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
