"""Pictures with a class each: a folder for every class, or the handwritten digits that scikit-learn carries."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from .corpus import DataError
from .hashing import GOLDEN, keys, mix, shuffled
from .sources import Found, visible

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
TRAINING, HELD_OUT = {"train", "training"}, {"val", "valid", "validation", "test"}
HELD_AT_ONCE = 2**30  # bytes: more than this is read from the files for every batch
BILINEAR = 2  # Pillow's number for it

Pixels = UInt8[np.ndarray, "B Ch Y X"]


@dataclass(frozen=True)
class Pictures:
    """`read` gives the pixels of some pictures by number; `classes` has the class of each, `names` those of classes."""

    names: tuple[str, ...]
    classes: Int[np.ndarray, " n"]
    read: Callable[[Int[np.ndarray, " B"]], Pixels]
    held_out: Int[np.ndarray, " m"] | None  # numbers, where the folders themselves say what to validate with

    def __len__(self) -> int:
        return len(self.classes)

    def split(self, share: float, seed: int) -> tuple[Int[np.ndarray, " t"], Int[np.ndarray, " v"]]:
        """Numbers to train on and to validate with."""
        everything = np.arange(len(self))
        if self.held_out is not None:
            return np.setdiff1d(everything, self.held_out), self.held_out
        order = shuffled(everything, len(self), keys(seed, np.zeros_like(everything)))
        count = max(1, round(share * len(self))) if share else 0
        return np.sort(order[count:]), np.sort(order[:count])


def pictures(folders: Sequence[str | Path], size: int, channels: int, besides: Path | None = None) -> Pictures:
    """Every picture under the folders that is not hidden, `size` × `size`; its class is the folder it lies in.

    Folders named train and val (or test) between are no classes: they say what is held out. In the folder `besides`,
    the run's own, nobody looks for pictures.
    """
    files: list[tuple[Path, str, bool]] = []
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise DataError(f"{folder} is not a folder; pictures come in folders, one for each class")
        for path in sorted(visible(folder, besides, Found())):
            if path.suffix.lower() in SUFFIXES:
                between = path.relative_to(folder).parts[:-1]
                inside = [part for part in between if part.lower() not in TRAINING | HELD_OUT]
                if not inside:
                    raise DataError(f"{path} lies in no class's folder; put it under {folder}/NAME/")
                files.append((path, inside[0], any(part.lower() in HELD_OUT for part in between)))
    names = tuple(sorted({name for _, name, _ in files}))
    if len(names) < 2:
        there = f"only the class {names[0]!r}" if names else "no pictures"
        raise DataError(f"there is {there} in {', '.join(map(str, folders))}; at least two classes are needed")
    classes = np.array([names.index(name) for _, name, _ in files])
    held_out = np.flatnonzero([held for *_, held in files])
    paths = [path for path, *_ in files]

    def read(numbers: Int[np.ndarray, " B"]) -> Pixels:
        with ThreadPoolExecutor() as pool:
            return np.stack(list(pool.map(lambda i: read_picture(paths[i], size, channels), numbers)))

    everything = np.arange(len(files))
    found = Pictures(names, classes, read, held_out if len(held_out) else None)
    return held(found, everything) if len(files) * channels * size**2 <= HELD_AT_ONCE else found


def digits(size: int, channels: int) -> Pictures:
    """1,797 handwritten digits of 8 × 8 pixels (Alpaydin & Kaynak 1998)."""
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(
            "the built-in digits come with scikit-learn; pip install 'clearhead[vision]', or give --data a folder "
            "that has a folder of pictures for each class"
        ) from None
    found = load_digits()
    pixels = np.round(found.images * (255 / 16)).astype(np.uint8)
    if size != pixels.shape[1]:
        small = [Image.fromarray(one).resize((size, size), BILINEAR) for one in pixels]
        pixels = np.stack([np.asarray(one) for one in small])
    pixels = np.repeat(pixels[:, None], channels, axis=1)
    return Pictures(tuple(map(str, range(10))), found.target.astype(np.int64), lambda numbers: pixels[numbers], None)


def held(source: Pictures, everything: Int[np.ndarray, " n"]) -> Pictures:
    """The same, read once."""
    pixels = source.read(everything)
    return Pictures(source.names, source.classes, lambda numbers: pixels[numbers], source.held_out)


def read_picture(path: Path, size: int, channels: int) -> UInt8[np.ndarray, "Ch Y X"]:
    square = open_picture(path, channels).resize((size, size), BILINEAR)
    return np.asarray(square).reshape(size, size, channels).transpose(2, 0, 1)


def open_picture(path: Path, channels: int) -> Any:
    """Pillow's picture of a file, in 8 bits of grey (1 channel) or of each colour (3)."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError("pictures are read by pillow: pip install 'clearhead[vision]'") from None
    try:
        with warnings.catch_warnings(), Image.open(path) as image:
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # a large one is large, no more
            return in_eight_bits(image).convert("L" if channels == 1 else "RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read as a picture: {reason}") from None


def in_eight_bits(image: Any) -> Any:
    """The same picture, its grey scaled where it has more bits: Pillow would make white of all above 255. Integers
    have 16 bits, as Pillow gives them; fractions are shares of white, unless some are above 1."""
    from PIL import Image

    if not image.mode.startswith(("I", "F")):
        return image
    pixels = np.nan_to_num(np.asarray(image, dtype=np.float32))
    white = 2**16 - 1 if image.mode.startswith("I") else 1 if pixels.max() <= 1 else 255
    return Image.fromarray(np.clip(np.round(pixels * (255 / white)), 0, 255).astype(np.uint8))


def augmented(pixels: Pixels, numbers: Int[np.ndarray, " B"], seed: int, shift: int, flip: bool) -> Pixels:
    """Each picture moved by up to `shift` pixels and perhaps mirrored, as its number in the run says."""
    draw = keys(seed, numbers)
    padded = np.pad(pixels, ((0, 0), (0, 0), (shift, shift), (shift, shift)))
    size, steps = pixels.shape[2], np.uint64(2 * shift + 1)
    down, right = (draw % steps).astype(int), (mix(draw + GOLDEN) % steps).astype(int)
    moved = np.stack([one[:, y : y + size, x : x + size] for one, y, x in zip(padded, down, right, strict=True)])
    mirrored = (draw >> np.uint64(63)).astype(bool) & flip
    return np.where(mirrored[:, None, None, None], moved[..., ::-1], moved)
