"""The pictures in a folder, told apart from what only has a picture's name."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sigmascope.errors import ConfigError, FileError
from sigmascope.lbm.images import load_image

PICTURES: Final = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
"""Suffixes of the files that are taken for pictures."""


@dataclass(frozen=True, slots=True)
class UnreadablePicture:
    """A file that is no picture though it is named like one, and why."""

    file: str
    reason: str


def find_pictures(folder: str | Path) -> tuple[list[Path], list[UnreadablePicture]]:
    """The pictures of a folder that can be read, by name, and those that cannot. Each is decoded once.

    Args:
        folder: Only its own files count, not those of folders in it.

    Raises:
        ConfigError: It is no folder, or holds no picture that can be read.
    """
    place = Path(folder)
    try:
        files = sorted(path for path in place.iterdir() if path.suffix.lower() in PICTURES)
    except OSError as error:
        raise ConfigError(
            f"--images {place} cannot be looked into ({error.strerror}).", hint="Name a folder of pictures."
        ) from error
    pictures: list[Path] = []
    unreadable: list[UnreadablePicture] = []
    for path in files:
        try:
            load_image(path)
        except FileError as error:
            unreadable.append(UnreadablePicture(path.name, error.message.removeprefix(f"{path}: ")))
        else:
            pictures.append(path)
    if not pictures:
        found = (
            f"{len(files)} damaged, first {files[0].name}: {unreadable[0].reason}" if files else "none at all"
        )
        raise ConfigError(
            f"--images {place} holds no picture that can be read ({found}).",
            hint=f"Put pictures into it ({', '.join(PICTURES)}).",
        )
    return pictures, unreadable
