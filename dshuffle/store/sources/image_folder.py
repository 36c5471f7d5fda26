"""Folders of images as sources: one folder for each class, decoded block by block."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from dshuffle.checks import as_integer
from dshuffle.errors import DatasetError, DatasetNotFound, InvalidParameter
from dshuffle.store.sources.source import RowSource, unreadable

SUFFIXES = (".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
CHANNELS = {"L": (), "RGB": (3,)}
"""Axes of a pixel in each mode: grey, and red, green and blue."""

STORED_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")
"""Modes of files with at most eight bits for each channel. Pillow would clip the values of others."""

TRANSPARENT = ("LA", "PA", "RGBA")

FILES_AT_A_TIME = 4096
"""Files of which the sizes are compared before the next ones are opened."""


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

    Examples
    --------
    >>> import tempfile
    >>> from dshuffle.store import create_dataset
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("cats", "dogs"):
    ...         Path(folder, name).mkdir()
    ...         Image.new("RGB", (60, 40)).save(f"{folder}/{name}/0.png")
    ...     images = ImageFolder.of(folder, size=(32, 32))
    ...     dataset = create_dataset("memory://doc-images", images.arrays, overwrite=True)
    >>> images.classes, dataset
    (('cats', 'dogs'), <Dataset 'memory://doc-images', 2 samples of 3080 bytes (x: uint8 (32, 32, 3), y: int64 ())>)
    """

    arrays: dict[str, RowSource]
    classes: tuple[str, ...]
    other_files: tuple[Path, ...] = ()

    @classmethod
    def of(cls, folder: str | os.PathLike[str], *, size: Sequence[int] | None = None, mode: str = "RGB") -> Self:
        """Find the images. They are read when the dataset is written.

        Parameters
        ----------
        folder
            Folder with one folder for each class, in which images may be at any depth. Hidden files and folders, and
            files of other kinds, are left out. Links to folders are not followed.
        size
            Height and width in pixels. Images of another size are scaled to cover it, and cut around their centre. By
            default all images must have the same size, and all files are opened to check that.
        mode
            ``"RGB"`` or ``"L"`` (grey).

        Raises
        ------
        DatasetNotFound
            If the folder does not exist.
        DatasetError
            If a file cannot be read, or has more than eight bits for each channel.
        InvalidParameter
            If ``size`` or ``mode`` is not allowed, if there are no folders or one has no images, or if sizes differ.
        """
        if mode not in CHANNELS:
            raise InvalidParameter.of("mode", mode, f"one of {', '.join(CHANNELS)}")
        root = Path(folder)
        if not root.is_dir():
            raise DatasetNotFound(f"{root} is not a folder")
        files_of = {path.name: _files(path) for path in sorted(root.iterdir()) if _is_visible_folder(path)}
        images_of = {name: [path for path in files if _is_image(path)] for name, files in files_of.items()}
        if not images_of or not all(images_of.values()):
            empty = next((name for name, images in images_of.items() if not images), None)
            raise InvalidParameter.of(
                "folder",
                str(root),
                f"a folder with a folder of images ({', '.join(SUFFIXES)}) for each class",
                "" if empty is None else f"{root / empty} has no image. Convert its files, or move the folder away.",
            )
        images = [(path, label) for label, paths in enumerate(images_of.values()) for path in paths]
        paths = [path for path, _ in images]
        height, width = _common_size(paths) if size is None else _checked_size(size)
        labels = np.array([label for _, label in images], np.int64)
        classes = tuple(images_of)
        arrays = {"x": _Images(str(root), paths, (height, width), mode), "y": _Labels(str(root), labels, classes)}
        return cls(arrays, classes, tuple(path for path in chain(*files_of.values()) if not _is_image(path)))


class _Images(RowSource):
    def __init__(self, origin: str, paths: Sequence[Path], size: tuple[int, int], mode: str) -> None:
        super().__init__(origin, (len(paths), *size, *CHANNELS[mode]), np.dtype(np.uint8))
        self._paths, self._size, self._mode = paths, size, mode

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        paths = self._paths[rows]
        block = np.empty((len(paths), *self.shape[1:]), self.dtype)

        def decode(place: int) -> None:
            block[place] = _pixels(paths[place], self._size, self._mode)

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # decoders release the GIL
            for _ in pool.map(decode, range(len(paths))):
                pass
        return block


class _Labels(RowSource):
    def __init__(self, origin: str, labels: NDArray[np.int64], classes: tuple[str, ...]) -> None:
        super().__init__(origin, labels.shape, labels.dtype)
        self._labels, self.classes = labels, classes

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        return self._labels[rows]


def _is_visible_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not path.name.startswith(".")


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def _files(folder: Path) -> list[Path]:
    """The visible files of a folder and those below."""
    files: list[Path] = []
    for path in sorted(folder.iterdir()):
        if _is_visible_folder(path):
            files += _files(path)
        elif path.is_file() and not path.name.startswith("."):
            files.append(path)
    return files


def _checked_size(size: Sequence[int]) -> tuple[int, int]:
    if np.shape(size) != (2,):
        raise InvalidParameter.of("size", size, "height and width, such as (64, 64)")
    return as_integer("size[0]", size[0], 1), as_integer("size[1]", size[1], 1)


def _common_size(paths: Sequence[Path]) -> tuple[int, int]:
    first_height, first_width = first = _size(paths[0])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for begin in range(0, len(paths), FILES_AT_A_TIME):
            some = paths[begin : begin + FILES_AT_A_TIME]
            for path, (height, width) in zip(some, pool.map(_size, some), strict=True):
                if (height, width) != first:
                    raise InvalidParameter(
                        f"size is needed, as images differ in size: {paths[0]} has {first_height} x {first_width} "
                        f"pixels (height x width), and {path} {height} x {width}. Give the height and width that all "
                        "should have"
                    )
    return first


def _size(path: Path) -> tuple[int, int]:
    """Height and width of an image, as its orientation in the EXIF data shows it."""
    try:
        with Image.open(path) as image:
            turned = image.getexif().get(0x0112, 1) >= 5
            return (image.width, image.height) if turned else (image.height, image.width)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise unreadable(str(path), error) from error


def _pixels(path: Path, size: tuple[int, int], mode: str) -> NDArray[np.uint8]:
    height, width = size
    try:
        with Image.open(path) as image:
            if image.mode not in STORED_MODES:
                raise DatasetError(
                    f"{path} has the mode {image.mode}, with more than eight bits for each channel, which would be "
                    "clipped. Scale it to eight bits, or write the values yourself with create_dataset"
                )
            upright = ImageOps.exif_transpose(image)
            if image.mode in TRANSPARENT or "transparency" in image.info:  # hidden colours must not show
                upright = Image.alpha_composite(Image.new("RGBA", upright.size, "black"), upright.convert("RGBA"))
            upright = upright.convert(mode)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise unreadable(str(path), error) from error
    if upright.size != (width, height):
        upright = ImageOps.fit(upright, (width, height), Image.Resampling.BILINEAR)
    return np.asarray(upright)
