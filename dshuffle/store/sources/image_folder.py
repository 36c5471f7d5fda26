"""Folders of images as sources: one folder for each class, decoded block by block. Needs Pillow."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from dshuffle.checks import as_integer
from dshuffle.errors import DatasetError, DatasetNotFound, InvalidParameter
from dshuffle.store.sources.source import RowSource, files_below, unreadable

SUFFIXES = (".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
CHANNELS = {"L": (), "RGB": (3,)}
"""Axes of a pixel in each mode: grey, and red, green and blue."""

FILES_AT_A_TIME = 4096
"""Files of which the headers are looked at before the next ones are opened."""


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """Images and their classes, for :func:`~dshuffle.store.create_dataset`.

    Parameters
    ----------
    arrays
        ``x``: ``(n, height, width, 3)`` uint8, or ``(n, height, width)`` if the images are grey. ``y``: ``(n,)`` int64,
        the number of the class. In the dataset this array has the attribute ``classes``, a list of the names.
    classes
        Names of the folders in ascending order. Class k is ``classes[k]``.
    other_files
        Visible files beside the images, which were left out.
    """

    arrays: dict[str, RowSource]
    classes: tuple[str, ...]
    other_files: tuple[Path, ...] = ()

    @classmethod
    def of(cls, folder: str | os.PathLike[str], *, size: Sequence[int] | None = None, mode: str | None = None) -> Self:
        """Find the images. They are read when the dataset is written."""
        if mode not in (None, *CHANNELS):
            raise InvalidParameter.of("mode", mode, f"one of {', '.join(CHANNELS)}, or None")
        root = Path(folder)
        if not root.is_dir():
            raise DatasetNotFound(f"{root} is not a folder")
        classes = [path.name for path in sorted(root.iterdir()) if path.is_dir() and path.name[0] != "."]
        files = [[Path(f) for f in files_below(str(root / n), ".", str, (os.path.realpath(root),))] for n in classes]
        images = [(path, label) for label, paths in enumerate(files) for path in paths if _is_image(path)]
        if missing := sorted(set(range(len(classes) or 1)) - {label for _, label in images}):
            empty = "" if not classes else f"{root / classes[missing[0]]} has no image."
            raise InvalidParameter.of(
                "folder",
                str(root),
                f"a folder with a folder of images ({', '.join(SUFFIXES)}) for each class",
                f"{empty} Convert its files, or move the folder away." if classes else "",
            )
        paths = [path for path, _ in images]
        asked = None
        if size is not None:
            if np.shape(size) != (2,):
                raise InvalidParameter.of("size", size, "height and width, such as (64, 64)")
            asked = as_integer("size[0]", size[0], 1), as_integer("size[1]", size[1], 1)
        (height, width), mode = _common(paths, asked, mode)
        labels = np.array([label for _, label in images], np.int64)
        others = tuple(path for paths in files for path in paths if not _is_image(path))

        def read(rows: slice) -> NDArray[Any]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:  # decoders release the GIL
                return np.stack(list(pool.map(lambda path: _pixels(path, (height, width), mode), paths[rows])))

        pixels = RowSource(str(root), (len(images), height, width, *CHANNELS[mode]), np.dtype(np.uint8), read)
        numbers = RowSource(str(root), labels.shape, labels.dtype, labels.__getitem__, tuple(classes))
        return cls({"x": pixels, "y": numbers}, tuple(classes), others)


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def _common(paths: Sequence[Path], size: tuple[int, int] | None, mode: str | None) -> tuple[tuple[int, int], str]:
    """The size and the mode of all images: as asked for, or by their headers."""
    if size is not None and mode is not None:
        return size, mode
    first, all_grey = size, True
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for begin in range(0, len(paths), FILES_AT_A_TIME):
            for path, found, is_grey in pool.map(_header, paths[begin : begin + FILES_AT_A_TIME]):
                first, all_grey = first or found, all_grey and is_grey
                if size is None and found != first:
                    raise InvalidParameter(
                        f"size is needed, as images differ in size: {paths[0]} has {first[0]} x {first[1]} pixels "
                        f"(height x width), and {path} {found[0]} x {found[1]}. Give the height and width that all "
                        "should have"
                    )
            if size is not None and not all_grey:
                break
    assert first is not None
    return first, mode or ("L" if all_grey else "RGB")


def _header(path: Path) -> tuple[Path, tuple[int, int], bool]:
    """Height and width of an image, as its orientation in the EXIF data shows it, and whether it is grey."""
    with _opened(path) as image:
        turned = image.getexif().get(0x0112, 1) >= 5
        return path, (image.size if turned else image.size[::-1]), image.mode in ("1", "L", "LA")


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    try:
        with Image.open(path) as image:
            yield image
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise unreadable(str(path), error) from error


def _pixels(path: Path, size: tuple[int, int], mode: str) -> NDArray[np.uint8]:
    with _opened(path) as image:
        if image.mode.startswith(("I", "F")):  # Pillow would clip the values
            raise DatasetError(
                f"{path} has the mode {image.mode}, with more than eight bits for each channel, which would be "
                "clipped. Scale it to eight bits, or write the values yourself with create_dataset"
            )
        upright = ImageOps.exif_transpose(image)
        if image.has_transparency_data:  # hidden colours must not show
            upright = Image.alpha_composite(Image.new("RGBA", upright.size, "black"), upright.convert("RGBA"))
        upright = upright.convert(mode)
    if upright.size != size[::-1]:
        upright = ImageOps.fit(upright, size[::-1], Image.Resampling.BILINEAR)
    return np.asarray(upright)
