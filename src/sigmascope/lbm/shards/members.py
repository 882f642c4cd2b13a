"""Which member of a sample a key of the config means."""

from collections.abc import Sequence

from sigmascope.errors import DataError

EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff")
"""Of members that are taken for pictures."""


def wanted_members(key: str, names: Sequence[str]) -> list[str]:
    """Members that a key may mean.

    Args:
        key: `source` means `source.jpg`, `source.png` and so on; a key that is or has an extension (`jpg`,
            `normal.png`) means itself. Case does not count.
        names: The sample's members, without the sample's own name, in lower case.
    """
    key = key.lower()
    if key in names:
        return [key]
    return [name for extension in EXTENSIONS if (name := f"{key}.{extension}") in names]


def find_member(key: str, names: Sequence[str]) -> str:
    """The one member that a key means.

    Raises:
        DataError: There is none, or more than one.
    """
    found = wanted_members(key, names)
    if len(found) == 1:
        return found[0]
    if not found:
        raise DataError(f"has no member for the key {key!r} (it has {', '.join(names) or 'none'})")
    raise DataError(f"has {' and '.join(found)} for the key {key!r}")
