import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sigmascope.lbm.images import load_image
from sigmascope.ui import lbm_model
from sigmascope.ui.lbm_model import Pictures, as_png, decode
from sigmascope.ui.security import Limits, Refusal


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    written = io.BytesIO()
    image.save(written, format=kind, **options)
    return written.getvalue()


def png_claiming(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header promises that many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: the camera was held on its side
    return encoded(Image.linear_gradient("L").resize((40, 20)).convert("RGB"), "JPEG", exif=exif)


@pytest.mark.parametrize(
    "data",
    [
        turned(),
        encoded(Image.new("RGBA", (6, 4), (255, 0, 0, 128)), "PNG"),
        encoded(Image.fromarray(np.full((4, 6), 40000, np.uint16)), "TIFF"),
        encoded(Image.new("P", (6, 4), 3), "GIF"),
        encoded(Image.new("CMYK", (6, 4), (0, 90, 0, 20)), "JPEG"),
    ],
    ids=["turned", "transparent", "16 bit", "palette", "CMYK"],
)
def test_an_upload_is_read_as_the_command_line_reads_the_file(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "picture").write_bytes(data)
    expected = load_image(tmp_path / "picture")
    found = decode(data, Limits())
    assert found.size == expected.size
    assert np.array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (b"", 415, "empty"),
        (b"no picture at all", 415, "not a readable picture"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", 415, "not a readable picture"),
        (turned()[:200], 415, "damaged"),
        (png_claiming(60_000, 60_000), 413, "megapixels"),
        (png_claiming(10_000, 5_001), 413, "10000×5001"),
    ],
)
def test_what_is_no_picture_or_too_much_of_one_is_refused(data: bytes, status: int, message: str) -> None:
    with pytest.raises(Refusal) as caught:
        decode(data, Limits())
    assert caught.value.status == status
    assert message in caught.value.message
    assert caught.value.hint


def test_a_picture_is_decoded_and_encoded_once_though_it_is_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[bytes] = []

    def noting(image: Image.Image) -> bytes:
        made.append(as_png(image))
        return made[-1]

    monkeypatch.setattr(lbm_model, "as_png", noting)
    pictures, image = Pictures(Limits()), Image.linear_gradient("L").convert("RGB")
    for _ in range(3):
        picture = pictures.add(encoded(image, "TIFF"))
        assert pictures.get(picture.id).png is made[0]
    assert len(made) == 1
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(made[0]))), np.asarray(image))


def test_the_same_file_has_the_same_id_and_another_another() -> None:
    pictures = Pictures(Limits())
    red, blue = (encoded(Image.new("RGB", (3, 2), colour), "PNG") for colour in ("red", "blue"))
    assert pictures.add(red).id == pictures.add(red).id
    assert pictures.add(red).id != pictures.add(blue).id


def test_the_longest_unused_picture_is_forgotten_and_says_so() -> None:
    files = [encoded(Image.new("RGB", (3, 2), colour), "PNG") for colour in ("red", "blue", "lime")]
    sizes = [3 * 2 * 3 + len(as_png(Image.open(io.BytesIO(file)))) for file in files]
    pictures = Pictures(Limits(kept_pictures_bytes=sizes[1] + sizes[2]))
    first, second, third = map(pictures.add, files)
    assert pictures.get(second.id).image.getpixel((0, 0)) == (0, 0, 255)
    assert pictures.get(third.id) is third
    with pytest.raises(Refusal, match="no longer kept"):
        pictures.get(first.id)
