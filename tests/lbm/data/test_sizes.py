"""What headers tell of pictures before they are decoded, and of an epoch before it is read."""

import io
import struct
import zlib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.lbm.data.test_data import tiny
from tests.lbm.shard_files import encoded, noise, pair, plain, write_tar

from sigmascope.lbm.data import DataOptions, TrainingData
from sigmascope.lbm.samples import decode_picture, picture_size

FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "PPM")


@pytest.mark.parametrize("orientation", [None, 1, 3, 5, 6, 8])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_header_tells_the_size_that_decoding_gives(kind: str, orientation: int | None) -> None:
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    options = {"exif": exif} if kind in ("PNG", "JPEG", "WEBP", "TIFF") else {}
    data = encoded(noise(0, 30, 20), kind, **options)
    assert picture_size(io.BytesIO(data)) == decode_picture(data).size


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def test_png_may_say_behind_its_pixels_how_it_is_turned() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    whole = encoded(noise(0, 30, 20))
    end = whole.rindex(b"IEND") - 4
    turned = whole[:end] + chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")) + whole[end:]
    assert picture_size(io.BytesIO(turned)) == decode_picture(turned).size == (20, 30)


def test_xmp_may_say_how_a_picture_is_turned() -> None:
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><a tiff:Orientation="6"/></x:xmpmeta>'
    turned = encoded(noise(0, 30, 20), "JPEG", xmp=xmp)
    assert picture_size(io.BytesIO(turned)) == decode_picture(turned).size == (20, 30)


def read_sizes(data: TrainingData) -> Counter[tuple[int, int]]:
    """By what is given in an epoch."""
    found: Counter[tuple[int, int]] = Counter()
    for batch, _ in data.batches(0):
        height, width = batch.source.shape[-2:]
        found[width, height] += len(batch)
    return found


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Pairs of two aspects, some of which cannot be used for what their headers or names say."""
    members = [
        item
        for number, shape in enumerate([(16, 8), (8, 8)] * 4)
        for item in pair(f"{number}", 1, **{"source.png": plain(1, *shape), "target.png": plain(2, *shape)})
    ]
    members += [("8.source.png", plain(1)), ("9.source.png", plain(1)), ("9.target.png", b"")]
    members += pair("A", 1, **{"target.png": plain(1, 8, 24)})
    members += pair("B", 1, **{"source.webp": plain(1)})
    members += [("__notes__/a", b"x"), *pair("C", 1, **{"readme.txt": b"words", "json": bytes(700)})]
    members += [("D.source.png", bytes(700)), *pair("E", 1)]  # larger than is allowed, which ends the shard
    return write_tar(tmp_path_factory.mktemp("shard") / "0.tar", members).read_bytes()


@settings(deadline=None, max_examples=30)
@example(end=6 * 1024 + 512 + 10)  # in the pixels of a sample's first picture
@given(end=st.integers(4096, 50_000))
def test_counting_finds_what_reading_gives_wherever_a_shard_breaks_off(
    shard: bytes, end: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cut") / "0.tar"
    path.write_bytes(shard[:end])
    data = TrainingData(tiny(), DataOptions((str(path),), 2, workers=0, max_member="600B"))
    assert data.count_sizes() == read_sizes(data)


def test_nobody_counts_what_only_reading_all_of_it_would_tell(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", pair("a", 1))
    write_tar(tmp_path / "1.tar.gz", pair("b", 1), "w:gz")
    for shards in ((str(tmp_path),), (f"pipe:cat {tmp_path / '0.tar'}",)):
        assert TrainingData(tiny(), DataOptions(shards, 2, allow_pipe=True)).count_sizes() is None
