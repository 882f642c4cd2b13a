"""Shards written with the standard library, so that what reads them is judged by another's tar files."""

import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Members = Sequence[tuple[str, bytes]]


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def noise(seed: int, width: int = 24, height: int = 24) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def plain(level: int, width: int = 8, height: int = 8) -> bytes:
    return encoded(Image.new("RGB", (width, height), (level, level, level)))


def write_tar(path: Path, members: Members, mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def pair(key: str, level: int, **members: bytes) -> list[tuple[str, bytes]]:
    """A source and a target whose grey levels say which sample it is, and further members by name."""
    named: Mapping[str, bytes] = {"source.png": plain(level), "target.png": plain(255 - level), **members}
    return [(f"{key}.{name}", data) for name, data in named.items()]


def read_tar(path: Path) -> list[tuple[str, bytes]]:
    with tarfile.open(path) as tar:
        return [(info.name, file.read()) for info in tar if (file := tar.extractfile(info))]
