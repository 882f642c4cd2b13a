import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sigmascope.errors import ConfigError, FileError, WriteError
from sigmascope.lbm.images import (
    image_to_tensor,
    load_image,
    pad_to,
    resize,
    save_image,
    tensor_to_image,
    to_rgb,
)

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
ORIENTATION = 0x0112


@pytest.fixture
def corners() -> Image.Image:
    """Three wide, two high; top left red, top right green, bottom left blue."""
    image = Image.new("RGB", (3, 2), WHITE)
    image.putpixel((0, 0), RED)
    image.putpixel((2, 0), GREEN)
    image.putpixel((0, 1), BLUE)
    return image


# For each EXIF orientation, where the stored top left pixel is in the upright picture.
@pytest.mark.parametrize(
    ("orientation", "size", "red_at"),
    [
        (1, (3, 2), (0, 0)),
        (2, (3, 2), (2, 0)),
        (3, (3, 2), (2, 1)),
        (4, (3, 2), (0, 1)),
        (5, (2, 3), (0, 0)),
        (6, (2, 3), (1, 0)),
        (7, (2, 3), (1, 2)),
        (8, (2, 3), (0, 2)),
    ],
)
def test_exif_orientation_is_applied(
    orientation: int, size: tuple[int, int], red_at: tuple[int, int], corners: Image.Image, tmp_path: Path
) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    corners.save(tmp_path / "turned.png", exif=exif)
    upright = load_image(tmp_path / "turned.png")
    assert upright.size == size
    assert upright.getpixel(red_at) == RED


def test_transparency_lies_over_white() -> None:
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (255, 0, 0, 128))
    flat = to_rgb(image)
    assert flat.getpixel((0, 0)) == WHITE
    assert flat.getpixel((1, 0)) == (255, 127, 127)


def test_transparent_palette_lies_over_white(tmp_path: Path) -> None:
    image = Image.new("P", (2, 1), 0)
    image.putpalette([0, 0, 0, 255, 0, 0])
    image.putpixel((1, 0), 1)
    image.save(tmp_path / "palette.gif", transparency=0)
    loaded = load_image(tmp_path / "palette.gif")
    assert [loaded.getpixel((x, 0)) for x in (0, 1)] == [WHITE, RED]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_sixteen_bit_grey_keeps_its_brightness(dtype: type, tmp_path: Path) -> None:
    levels: Any = np.array([[0, 257 * 100, 65535]], dtype=dtype)
    Image.fromarray(levels).save(tmp_path / "deep.tiff")
    loaded = load_image(tmp_path / "deep.tiff")
    assert [loaded.getpixel((x, 0)) for x in range(3)] == [(0, 0, 0), (100, 100, 100), WHITE]


def test_float_grey_is_a_fraction_and_nan_is_black() -> None:
    image = Image.fromarray(np.array([[0.0, 0.5, 1.0, np.nan]], dtype=np.float32))
    assert [to_rgb(image).getpixel((x, 0)) for x in range(4)] == [
        (0, 0, 0),
        (128, 128, 128),
        WHITE,
        (0, 0, 0),
    ]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "CMYK", "YCbCr", "HSV", "LAB", "RGBX"])
def test_any_mode_becomes_rgb(mode: str) -> None:
    assert to_rgb(Image.new(mode, (3, 2))).mode == "RGB"


def test_first_frame_is_taken(tmp_path: Path) -> None:
    first, second = Image.new("RGB", (2, 2), RED), Image.new("RGB", (2, 2), BLUE)
    first.save(tmp_path / "moving.gif", save_all=True, append_images=[second])
    assert load_image(tmp_path / "moving.gif").getpixel((0, 0)) == RED


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".tiff", ".bmp", ".gif"])
def test_truncated_picture_is_named(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"cut{suffix}"
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(FileError) as caught:
        load_image(path)
    assert caught.value.path == path
    assert caught.value.hint


@pytest.mark.skipif(sys.platform != "linux", reason="limits its memory as Linux does")
def test_a_chunk_that_claims_gigabytes_is_named(tmp_path: Path) -> None:
    import resource

    path = tmp_path / "picture.png"
    Image.new("RGB", (16, 16), RED).save(path)
    raw = path.read_bytes()
    begin = raw.index(b"IDAT") - 4
    path.write_bytes(raw[:begin] + struct.pack(">I", 0xF000_0000) + raw[begin + 4 :])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), limits[1]))
    try:
        with pytest.raises(FileError, match="cannot be decoded"):
            load_image(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_damaged_bytes_never_escape_as_another_error(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    generator = np.random.default_rng(0)
    Image.fromarray(generator.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(path)
    sound = path.read_bytes()
    refused = 0
    for _ in range(200):
        damaged = bytearray(sound)
        for position in generator.integers(8, len(sound), 4):
            damaged[position] = generator.integers(0, 256)
        path.write_bytes(damaged)
        try:
            load_image(path)
        except FileError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "the file is empty"), (b"not a picture", "is not a picture that Pillow can read")],
)
def test_what_is_no_picture_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.png"
    path.write_bytes(content)
    with pytest.raises(FileError, match=message):
        load_image(path)


def test_missing_picture_and_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"gone\.png: no such file"):
        load_image(tmp_path / "gone.png")
    with pytest.raises(FileError, match="cannot be read"):
        load_image(tmp_path)


@pytest.mark.parametrize("limit", [10, 50])
def test_decompression_bomb_is_refused(limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow warns above its limit and raises above twice the limit; both are refused."""
    Image.new("RGB", (9, 9)).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(FileError, match="too large"):
        load_image(tmp_path / "bomb.png")


def test_tensor_spans_minus_one_to_one(corners: Image.Image) -> None:
    tensor = image_to_tensor(corners)
    assert tensor.shape == (1, 3, 2, 3)
    assert tensor[0, :, 0, 0].tolist() == [1.0, -1.0, -1.0]


def test_every_level_survives_the_tensor() -> None:
    levels = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    assert np.array_equal(np.asarray(tensor_to_image(image_to_tensor(Image.fromarray(levels)))), levels)


def test_values_outside_are_clipped() -> None:
    tensor = torch.tensor([-3.0, 0.0, 3.0]).reshape(1, 3, 1, 1)
    assert tensor_to_image(tensor).getpixel((0, 0)) == (0, 128, 255)


@pytest.mark.parametrize("size", [(1, 1), (3, 100), (64, 64)])
def test_resize_gives_the_size_and_stays_in_range(size: tuple[int, int]) -> None:
    images = torch.rand(1, 3, 17, 31, generator=torch.Generator().manual_seed(0)).round() * 2 - 1
    resized = resize(images, size)
    assert resized.shape == (1, 3, size[1], size[0])
    assert resized.abs().max() <= 1.0


def test_resize_to_its_own_size_is_the_image_itself() -> None:
    images = torch.rand(1, 3, 5, 7)
    assert resize(images, (7, 5)) is images


def test_downscaling_is_antialiased() -> None:
    stripes = torch.tensor([-1.0, 1.0]).repeat(32).expand(1, 3, 64, 64)
    assert resize(stripes, (8, 8)).abs().max() < 0.05


def test_padding_repeats_the_edge() -> None:
    images = torch.arange(6.0).reshape(1, 1, 2, 3).expand(1, 3, 2, 3)
    padded = pad_to(images, (5, 4))
    assert padded[0, 0].tolist() == [[0, 1, 2, 2, 2], [3, 4, 5, 5, 5], [3, 4, 5, 5, 5], [3, 4, 5, 5, 5]]


@pytest.mark.parametrize(
    ("suffix", "kind"), [(".png", "PNG"), (".JPG", "JPEG"), (".jpeg", "JPEG"), (".webp", "WEBP")]
)
def test_suffix_chooses_the_format(suffix: str, kind: str, corners: Image.Image, tmp_path: Path) -> None:
    save_image(corners, tmp_path / f"out{suffix}")
    with Image.open(tmp_path / f"out{suffix}") as saved:
        assert (saved.format, saved.size) == (kind, (3, 2))


def test_unknown_suffix_is_an_error(corners: Image.Image, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write a picture with the suffix '\.psd'"):
        save_image(corners, tmp_path / "out.psd")
    assert list(tmp_path.iterdir()) == []


def test_failed_write_leaves_the_old_file(
    corners: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.png"
    path.write_bytes(b"old")

    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full_disk)
    with pytest.raises((WriteError, OSError), match="No space left"):
        save_image(corners, path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
