"""Pairs of pictures in a folder: which files belong together, and which belong to nothing."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sigmascope.errors import ConfigError, FileError
from sigmascope.lbm.picture_folder import PICTURES
from sigmascope.records.os_errors import reading_hint, reason_of


@dataclass(frozen=True, slots=True)
class Pair:
    """Files that make one sample, by key; `name` is unique and is what the shard calls it."""

    name: str
    files: Mapping[str, Path]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file or a pair that goes into no shard, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class FoundPairs:
    """What a folder holds, by name.

    Attributes:
        pairs: Complete ones.
        left_out: Every other file.
    """

    pairs: tuple[Pair, ...]
    left_out: tuple[LeftOut, ...]


def find_pairs(folder: str | Path, keys: Sequence[str], optional: Sequence[str] = ()) -> FoundPairs:
    """Find the pairs of a folder and of the folders in it.

    Two layouts: a subfolder for each key with files of equal names (`source/a.png`, `target/a.jpg`), or names
    that end in the key (`a_source.png`, `a_target.png`; `-` and `.` work too, and so does `a/source.png`).

    Args:
        folder: Hidden files are passed over.
        keys: Every sample needs a picture for each.
        optional: Pictures that are taken where they are.

    Raises:
        ConfigError: A key is given twice or makes no file name, or there is not one pair.
        FileError: The folder cannot be read.
    """
    _check_keys([*keys, *optional])
    root = Path(folder)
    files = _files(root)
    in_subfolders = all((root / key).is_dir() for key in keys)
    left_out: list[LeftOut] = []
    groups: dict[str, dict[str, Path]] = {}
    for file in files:
        place = file.relative_to(root)
        if file.suffix.lower() not in PICTURES:
            left_out.append(LeftOut(str(place), f"is not named like a picture ({', '.join(PICTURES)})"))
            continue
        found = (_by_subfolder if in_subfolders else _by_ending)(place, [*keys, *optional])
        if found is None:
            left_out.append(LeftOut(str(place), _no_place([*keys, *optional], in_subfolders)))
            continue
        key, name = found
        group = groups.setdefault(name, {})
        if key in group:
            left_out.append(LeftOut(str(place), f"{group[key].relative_to(root)} is its {key} already"))
        else:
            group[key] = file
    pairs = _complete(groups, keys, root, left_out)
    if not pairs:
        raise _no_pairs(root, keys, left_out)
    return FoundPairs(tuple(pairs), tuple(left_out))


def _complete(
    groups: Mapping[str, Mapping[str, Path]], keys: Sequence[str], root: Path, left_out: list[LeftOut]
) -> list[Pair]:
    """Keep the groups that have every key, and note the files of the others."""
    pairs: list[Pair] = []
    names: set[str] = set()
    for name, group in sorted(groups.items()):
        missing = [key for key in keys if key not in group]
        if missing:
            left_out += [
                LeftOut(str(file.relative_to(root)), f"has no {' and no '.join(missing)} beside it")
                for file in group.values()
            ]
            continue
        pairs.append(Pair(_shard_name(name or root.resolve().name or "sample", names), dict(group)))
    return pairs


def _files(root: Path) -> list[Path]:
    try:
        if not root.is_dir():
            raise FileError(root, "is no folder.", hint="Name a folder with pairs of pictures.")
        found = [path for path in root.rglob("*") if path.is_file()]
    except OSError as error:
        raise FileError(root, f"cannot be read ({reason_of(error)}).", hint=reading_hint(error)) from error
    return sorted(path for path in found if not _hidden(path.relative_to(root)))


def _hidden(place: Path) -> bool:
    return any(part.startswith(".") for part in place.parts)


def _by_subfolder(place: Path, keys: Sequence[str]) -> tuple[str, str] | None:
    if len(place.parts) < 2 or place.parts[0] not in keys:
        return None
    return place.parts[0], Path(*place.parts[1:]).with_suffix("").as_posix()


def _by_ending(place: Path, keys: Sequence[str]) -> tuple[str, str] | None:
    endings = "|".join(re.escape(key) for key in sorted(keys, key=len, reverse=True))
    match = re.fullmatch(rf"(?:(.*?)[_.-])?({endings})", place.stem, re.IGNORECASE | re.DOTALL)
    if match is None:
        return None
    key = next(key for key in keys if key.lower() == match[2].lower())
    folder = "" if place.parent == Path() else place.parent.as_posix()
    return key, "/".join(part for part in (folder, match[1]) if part)


def _shard_name(name: str, taken: set[str]) -> str:
    """A name without dots, where WebDataset ends a sample's name, and not the one of another sample."""
    plain = name.replace(".", "_")
    plain = plain.lstrip("_") if plain.startswith("__") else plain  # those are passed over as metadata
    for unique in _numbered(plain or "sample"):
        if unique not in taken:
            break
    taken.add(unique)
    return unique


def _numbered(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}-{number}"
        number += 1


def _check_keys(keys: Sequence[str]) -> None:
    for key in keys:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", key):
            raise ConfigError(
                f"--keys: expected letters, digits, - and _ in each key, got {key!r}.",
                hint="For example --keys source,target,mask.",
            )
    lowered = [key.lower() for key in keys]
    if doubled := [key for key in keys if lowered.count(key.lower()) > 1]:
        raise ConfigError(f"--keys: {doubled[0]} is named twice.", hint="Name each key once.")


def _no_place(keys: Sequence[str], in_subfolders: bool) -> str:
    if in_subfolders:
        return f"lies in none of the folders {', '.join(keys)}"
    return f"its name ends in none of {', '.join(f'_{key}' for key in keys)}"


def _no_pairs(root: Path, keys: Sequence[str], left_out: Sequence[LeftOut]) -> ConfigError:
    found = f"{len(left_out)} files, first {left_out[0].name}: {left_out[0].reason}" if left_out else "empty"
    first, second = keys[0], keys[-1]
    return ConfigError(
        f"{root}: holds no pairs of pictures ({found}).",
        hint=f"Name files a_{first}.png and a_{second}.png, or put them in folders {first}/ and {second}/.",
    )
