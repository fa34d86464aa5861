"""Images with a class each: a folder for every class, or the handwritten digits that come with scikit-learn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from clearhead.extras import install_command

from .corpus import DataError
from .hashing import GOLDEN, derive_keys, mix, permute
from .sources import FileList, visible_files

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
TRAINING, HELD_OUT = {"train", "training"}, {"val", "valid", "validation", "test"}
CACHED_BYTES = 2**30  # larger sets are read from the files for every batch
BILINEAR = 2  # Pillow's number for it

Pixels = UInt8[np.ndarray, "B Ch Y X"]


@dataclass(frozen=True)
class ImageSet:
    """`read` returns the pixels of images by number; `classes` has the class of each image, `names` the class names."""

    names: tuple[str, ...]
    classes: Int[np.ndarray, " n"]
    read: Callable[[Int[np.ndarray, " B"]], Pixels]
    held_out: Int[np.ndarray, " m"] | None  # numbers of held-out images, if the folders say so

    def __len__(self) -> int:
        return len(self.classes)

    def split(self, share: float, seed: int) -> tuple[Int[np.ndarray, " t"], Int[np.ndarray, " v"]]:
        """The numbers of the images for training and for validation."""
        everything = np.arange(len(self))
        if self.held_out is not None:
            return np.setdiff1d(everything, self.held_out), self.held_out
        order = permute(everything, len(self), derive_keys(seed, np.zeros_like(everything)))
        count = max(1, round(share * len(self))) if share else 0
        return np.sort(order[count:]), np.sort(order[:count])


def image_folders(folders: Sequence[str | Path], size: int, channels: int, besides: Path | None = None) -> ImageSet:
    """Every visible image under the folders, resized to `size` × `size`; its class is the name of its folder.

    Folders named train and val (or test) are not classes: they say what is held out. The folder `besides`, the run's
    own, is skipped.
    """
    files: list[tuple[Path, str, bool]] = []
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise DataError(f"{folder} is not a folder; give a folder that has a folder of images for each class")
        for path in sorted(visible_files(folder, besides, FileList())):
            if path.suffix.lower() in SUFFIXES:
                between = path.relative_to(folder).parts[:-1]
                inside = [part for part in between if part.lower() not in TRAINING | HELD_OUT]
                if not inside:
                    raise DataError(f"{path} is not in the folder of a class; move it to {folder}/NAME/")
                files.append((path, inside[0], any(part.lower() in HELD_OUT for part in between)))
    names = tuple(sorted({name for _, name, _ in files}))
    if len(names) < 2:
        there = f"only the class {names[0]!r}" if names else "no image"
        raise DataError(f"there is {there} in {', '.join(map(str, folders))}; at least two classes are needed")
    classes = np.array([names.index(name) for _, name, _ in files])
    held_out = np.flatnonzero([held for *_, held in files])
    paths = [path for path, *_ in files]

    def read(numbers: Int[np.ndarray, " B"]) -> Pixels:
        with ThreadPoolExecutor() as pool:
            return np.stack(list(pool.map(lambda i: read_image_file(paths[i], size, channels), numbers)))

    everything = np.arange(len(files))
    found = ImageSet(names, classes, read, held_out if len(held_out) else None)
    return read_all(found, everything) if len(files) * channels * size**2 <= CACHED_BYTES else found


def digits(size: int, channels: int) -> ImageSet:
    """1,797 handwritten digits of 8 × 8 pixels (Alpaydin & Kaynak 1998)."""
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(
            f"the built-in digits come with scikit-learn; {install_command('vision')}, or give --data a folder "
            "that has a folder of images for each class"
        ) from None
    found = load_digits()
    pixels = np.round(found.images * (255 / 16)).astype(np.uint8)
    if size != pixels.shape[1]:
        small = [Image.fromarray(one).resize((size, size), BILINEAR) for one in pixels]
        pixels = np.stack([np.asarray(one) for one in small])
    pixels = np.repeat(pixels[:, None], channels, axis=1)
    return ImageSet(tuple(map(str, range(10))), found.target.astype(np.int64), lambda numbers: pixels[numbers], None)


def read_all(source: ImageSet, everything: Int[np.ndarray, " n"]) -> ImageSet:
    """The same images, read once and kept in memory."""
    pixels = source.read(everything)
    return ImageSet(source.names, source.classes, lambda numbers: pixels[numbers], source.held_out)


def read_image_file(path: Path, size: int, channels: int) -> UInt8[np.ndarray, "Ch Y X"]:
    square = open_image(path, channels).resize((size, size), BILINEAR)
    return np.asarray(square).reshape(size, size, channels).transpose(2, 0, 1)


def open_image(path: Path, channels: int) -> Any:
    """The image in a file as Pillow's 8-bit grey (1 channel) or colour (3 channels)."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError(f"reading images needs pillow: {install_command('vision')}") from None
    try:
        with warnings.catch_warnings(), Image.open(path) as image:
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # large images are fine
            return to_eight_bits(image).convert("L" if channels == 1 else "RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read as an image: {reason}") from None


def to_eight_bits(image: Any) -> Any:
    """The image with its grey values scaled to 8 bits; Pillow alone would turn everything above 255 white.

    Integer modes have 16 bits. Float modes range from 0 to 1, or to 255 if some value is above 1.
    """
    from PIL import Image

    if not image.mode.startswith(("I", "F")):
        return image
    pixels = np.nan_to_num(np.asarray(image, dtype=np.float32))
    white = 2**16 - 1 if image.mode.startswith("I") else 1 if pixels.max() <= 1 else 255
    return Image.fromarray(np.clip(np.round(pixels * (255 / white)), 0, 255).astype(np.uint8))


def augment(pixels: Pixels, numbers: Int[np.ndarray, " B"], seed: int, shift: int, flip: bool) -> Pixels:
    """Each image shifted by up to `shift` pixels and perhaps mirrored, depending on its number in the run."""
    draw = derive_keys(seed, numbers)
    padded = np.pad(pixels, ((0, 0), (0, 0), (shift, shift), (shift, shift)))
    size, steps = pixels.shape[2], np.uint64(2 * shift + 1)
    down, right = (draw % steps).astype(int), (mix(draw + GOLDEN) % steps).astype(int)
    moved = np.stack([one[:, y : y + size, x : x + size] for one, y, x in zip(padded, down, right, strict=True)])
    mirrored = (draw >> np.uint64(63)).astype(bool) & flip
    return np.where(mirrored[:, None, None, None], moved[..., ::-1], moved)
