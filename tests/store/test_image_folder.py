"""Folders of images become arrays of pixels and labels."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

import dshuffle
from dshuffle.errors import DatasetError, DatasetNotFound, InvalidParameter
from dshuffle.store import ImageFolder

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 12, 16, 3), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path):
    """Two images of cats, two of dogs, one of which is in a folder below, and one of ants."""
    root = tmp_path / "images"
    names = ("cats/b.png", "cats/a.bmp", "dogs/young/c.PNG", "dogs/d.tiff", "ants/e.png")
    for name, pixels in zip(names, PIXELS, strict=True):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(root / name)
    (root / "cats" / "notes.txt").write_text("no image")
    (root / "cats" / "._b.png").write_bytes(b"of another system")
    for hidden in (root / ".thumbnails", root / "dogs" / ".ipynb_checkpoints"):
        hidden.mkdir()
        Image.fromarray(PIXELS[0]).save(hidden / "b.png")
    (root / "dogs" / "all").symlink_to(root)
    return root


def rows_of(folder, **options):
    arrays = ImageFolder.of(folder, **options).arrays
    dataset = dshuffle.create_dataset("memory://test-images", arrays, chunk_rows=2, overwrite=True)
    return dataset.read_rows(np.arange(dataset.n_samples))


def saved(folder, *images, **options):
    """A folder of one class with these images."""
    (folder / "a").mkdir()
    for number, image in enumerate(images):
        (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(
            folder / "a" / f"{number}.png", **options
        )
    return folder


def test_pixels_and_labels_are_those_of_the_files(folder):
    images = ImageFolder.of(folder)
    assert images.classes == ("ants", "cats", "dogs")
    assert images.other_files == (folder / "cats" / "notes.txt",)
    rows = rows_of(folder)
    assert rows["y"].tolist() == [0, 1, 1, 2, 2]
    np.testing.assert_array_equal(rows["x"], PIXELS[[4, 1, 0, 3, 2]])


@pytest.mark.parametrize("size", [None, (12, 16)])
def test_a_folder_of_grey_images_has_one_value_for_each_pixel(tmp_path, size):
    modes = zip(PIXELS, ("L", "1", "LA"), strict=False)
    saved(tmp_path, *(Image.fromarray(pixels).convert("L").convert(mode) for pixels, mode in modes))
    grey = rows_of(tmp_path, size=size)["x"]
    assert grey.shape == (3, 12, 16)
    np.testing.assert_array_equal(grey[0], np.asarray(Image.fromarray(PIXELS[0]).convert("L")))
    Image.fromarray(PIXELS[3]).save(tmp_path / "a" / "9.png")
    np.testing.assert_array_equal(rows_of(tmp_path, size=size)["x"][0], np.repeat(grey[0][..., None], 3, axis=-1))


def test_images_are_scaled_to_cover_a_size_and_cut_around_their_centre(tmp_path):
    pixels = np.zeros((30, 60, 3), np.uint8)
    pixels[:, 20:40] = 200
    wide, high = rows_of(saved(tmp_path, pixels, pixels.swapaxes(0, 1)), size=(10, 10))["x"][..., 0].astype(int)
    np.testing.assert_array_equal(high, wide.T)
    assert (wide[:, 3:7] == 200).all()  # of 20 columns, the 5 at each side are cut, and 7 to 13 are bright
    assert (wide[:, [0, -1]] == 0).all()


def test_photographs_are_turned_as_their_camera_says(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise
    np.testing.assert_array_equal(rows_of(saved(tmp_path, PIXELS[0], exif=exif))["x"][0], np.rot90(PIXELS[0], -1))


def test_images_of_different_sizes_need_a_size(folder):
    Image.fromarray(PIXELS[0][:5]).save(folder / "dogs" / "z.png")
    with pytest.raises(InvalidParameter, match=r"size is needed.*e.png has 12 x 16 pixels .*z.png 5 x 16. Give the"):
        ImageFolder.of(folder)
    assert rows_of(folder, size=(8, 8))["x"].shape == (6, 8, 8, 3)


def test_a_damaged_image_is_named(folder):
    path = folder / "ants" / "e.png"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(DatasetError, match=r"cannot read .*e.png: OSError: .*truncated"):
        rows_of(folder, size=(12, 16))
    path.write_bytes(b"not an image")
    with pytest.raises(DatasetError, match=r"cannot read .*e.png"):
        ImageFolder.of(folder)


@pytest.mark.parametrize(
    ("size", "message"), [((8,), "must be height and width"), (64, r"\(64, 64\)"), ((8, 0), "size.1.=0")]
)
def test_sizes_that_are_not_allowed(folder, size, message):
    with pytest.raises(InvalidParameter, match=message):
        ImageFolder.of(folder, size=size)


def test_a_class_without_images_is_refused_and_not_left_out(folder):
    """Without it, all later classes would have other numbers."""
    with pytest.raises(DatasetNotFound, match="missing is not a folder"):
        ImageFolder.of(folder / "missing")
    with pytest.raises(InvalidParameter, match="a folder with a folder of images"):
        ImageFolder.of(folder / "cats")
    (folder / "birds").mkdir()
    (folder / "birds" / "a.heic").write_bytes(b"of another kind")
    with pytest.raises(InvalidParameter, match=r"folder=.*birds has no image. Convert its files, or move it"):
        ImageFolder.of(folder)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_images_that_pillow_would_clip_are_refused(folder, dtype):
    pixels = np.linspace(0, 30000, 12 * 16).reshape(12, 16).astype(dtype)
    Image.fromarray(pixels).save(folder / "cats" / "deep.tiff")
    with pytest.raises(DatasetError, match=r"deep.tiff has the mode .*more than eight bits"):
        rows_of(folder)


def test_colours_below_transparent_pixels_do_not_show(tmp_path):
    pixels = np.zeros((4, 4, 4), np.uint8)
    pixels[..., 0] = 200
    pixels[:2, :, 3] = 255
    assert rows_of(saved(tmp_path, pixels))["x"][0, ..., 0].tolist() == [[200] * 4] * 2 + [[0] * 4] * 2
