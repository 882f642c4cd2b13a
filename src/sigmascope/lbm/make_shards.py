"""Write WebDataset shards: from pairs of picture files in a folder, or from rendered scenes of the pocket model.

Shards appear whole or not at all, with the same bytes for the same samples.

`find_pairs` says which files of a folder belong together, and which are left over. `encode_pairs` checks each picture
before it is written. The pocket model's scenes let anyone try training without data of their own.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path

from webdataset import TarWriter

from sigmascope.errors import ConfigError, DataError, FileError, WriteError
from sigmascope.files import atomic_path, reading_hint, reason_of, writing_hint
from sigmascope.lbm.data import prefetch
from sigmascope.lbm.images import PICTURES
from sigmascope.lbm.pocket.scenes import COOL, WARM, Light, render_pair
from sigmascope.lbm.samples import decode_picture, same_shape
from sigmascope.progress import Progress, no_progress
from sigmascope.units import counted

EncodedSample = tuple[str, Mapping[str, bytes]]
"""A sample's name, and its members by the rest of the name (`source.jpg`)."""

SHARD_SIZE = 1000
"""Samples in a shard by default."""
WORKERS = 4
"""Threads that look at pairs of files, or render scenes."""
SAMPLES_AHEAD = 16
"""Samples that are made before they are asked for."""

LIGHTS = {"cool": COOL, "warm": WARM}
"""Of rendered scenes, by the name that the command line gives them."""
POCKET_SHARD_SIZE = 128
"""Scenes in a shard by default: so few that a few hundred scenes make several shards."""


@dataclass(frozen=True, slots=True)
class ShardTarget:
    """Where shards go.

    Attributes:
        folder: Created if it is not there.
        prefix: The files are called `<prefix>-000000.tar` and so on.
        shard_size: Samples in a shard.
        overwrite: Replace shards of that name, and remove those beyond the new ones.
    """

    folder: Path
    prefix: str = "train"
    shard_size: int = SHARD_SIZE
    overwrite: bool = False

    def path(self, number: int) -> Path:
        """The file of a shard, counted from 0."""
        return self.folder / f"{self.prefix}-{number:06d}.tar"

    def existing(self) -> list[Path]:
        """Shards of this name that are there."""
        pattern = re.compile(rf"{re.escape(self.prefix)}-\d{{6,}}\.tar")
        try:
            return sorted(path for path in self.folder.iterdir() if pattern.fullmatch(path.name))
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise _unusable(self.folder, error) from error


@dataclass(frozen=True, slots=True)
class WrittenShard:
    """A finished shard."""

    path: Path
    samples: int
    nbytes: int


def write_shards(samples: Iterable[EncodedSample], target: ShardTarget) -> list[WrittenShard]:
    """Write samples into shards; all of them appear together at the end, or none does.

    The bytes depend on the samples alone: members are sorted, and times and owners are fixed.

    Raises:
        ConfigError: As `check_target`.
        WriteError: The folder or a shard cannot be written; what was there before is unchanged.
    """
    check_target(target)
    try:
        target.folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise _unusable(target.folder, error) from error
    written: list[WrittenShard] = []
    stream = iter(samples)
    with ExitStack() as unfinished:
        for first in stream:
            path = target.path(len(written))
            temporary = unfinished.enter_context(atomic_path(path))
            size = 0
            with (
                temporary.open("wb") as shard,
                TarWriter(shard, user="", group="", mtime=0, encoder=False) as writer,
            ):
                for name, members in chain([first], islice(stream, target.shard_size - 1)):
                    writer.write({"__key__": name, **members})
                    size += 1
            written.append(WrittenShard(path, size, temporary.stat().st_size))
    stale = set(target.existing()) - {shard.path for shard in written}
    for path in stale if written else ():  # without new ones the old ones stay
        try:
            path.unlink()
        except OSError as error:
            message = f"belongs to older shards and cannot be removed ({reason_of(error)})."
            raise WriteError(path, message, hint="Remove it, or training would read it too.") from error
    return written


def check_target(target: ShardTarget) -> None:
    """Refuse a target that cannot be written, before any work is done.

    Raises:
        ConfigError: An option makes no sense, or shards exist that may not be replaced.
        WriteError: The folder cannot be read.
    """
    if target.shard_size < 1:
        raise ConfigError(f"--shard_size: expected 1 or more, got {target.shard_size}.", hint="Use 1000.")
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", target.prefix):
        raise ConfigError(
            f"--prefix: expected letters, digits, -, _ and dots, got {target.prefix!r}.", hint="Use train."
        )
    existing = target.existing()
    if existing and not target.overwrite:
        raise ConfigError(
            f"{target.folder}: holds {len(existing)} shards of that name already ({existing[0].name}).",
            hint="Choose another folder or --prefix, or replace them with --overwrite.",
        )


def _unusable(folder: Path, error: OSError | ValueError) -> WriteError:
    return WriteError(folder, f"cannot be used ({reason_of(error)}).", hint=writing_hint(error))


def shard_pattern(written: list[WrittenShard]) -> str:
    """The pattern with braces that stands for shards, as a config names them."""
    first, last = written[0].path, written[-1].path
    if first == last:
        return str(first)
    stem, _, low = first.stem.rpartition("-")
    return str(first.with_name(f"{stem}-{{{low}..{last.stem.rpartition('-')[2]}}}.tar"))


@dataclass(frozen=True, slots=True)
class Pair:
    """Files that make one sample, by key; `name` is unique and is what the shard calls it."""

    name: str
    files: Mapping[str, Path]


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A file or a pair that goes into no shard, and why."""

    name: str
    reason: str


def find_pairs(
    folder: str | Path, keys: Sequence[str], optional: Sequence[str] = ()
) -> tuple[list[Pair], list[SkippedFile]]:
    """Find the pairs of a folder and of the folders in it.

    Two layouts: a subfolder for each key with files of equal names (`source/a.png`, `target/a.jpg`), or names
    that end in the key (`a_source.png`, `a_target.png`; `-` and `.` work too, and so does `a/source.png`).

    Args:
        folder: Hidden files are passed over.
        keys: Every sample needs a picture for each.
        optional: Keys of pictures that a sample may have too.

    Returns:
        The complete pairs, and every other file.

    Raises:
        ConfigError: A key is given twice or cannot be part of a file name, or there is no pair.
        FileError: The folder cannot be read.
    """
    known_keys = [*keys, *optional]
    _check_keys(known_keys)
    root = Path(folder)
    files = _visible_files(root)
    in_subfolders = all((root / key).is_dir() for key in keys)
    left_out: list[SkippedFile] = []
    groups: dict[str, dict[str, Path]] = {}
    for file in files:
        place = file.relative_to(root)
        if file.suffix.lower() not in PICTURES:
            left_out.append(SkippedFile(str(place), f"is not named like a picture ({', '.join(PICTURES)})"))
            continue
        candidates: tuple[str, str] | None = None
        if not in_subfolders:
            candidates = _by_ending(place, known_keys)
        elif len(place.parts) > 1 and place.parts[0] in known_keys:
            candidates = place.parts[0], Path(*place.parts[1:]).with_suffix("").as_posix()
        if candidates is None:
            reason = f"its name ends in none of {', '.join(f'_{key}' for key in known_keys)}"
            if in_subfolders:
                reason = f"is in none of the folders {', '.join(known_keys)}"
            left_out.append(SkippedFile(str(place), reason))
            continue
        key, name = candidates
        group = groups.setdefault(name, {})
        if key in group:
            left_out.append(SkippedFile(str(place), f"{group[key].relative_to(root)} is its {key} already"))
        else:
            group[key] = file
    pairs = _complete_pairs(groups, keys, root, left_out)
    if not pairs:
        contents = "empty"
        if left_out:
            contents = f"{counted(len(left_out), 'file')}, first {left_out[0].name}: {left_out[0].reason}"
        raise ConfigError(
            f"{root}: holds no pairs of pictures ({contents}).",
            hint=f"Name files a_{keys[0]}.png and a_{keys[-1]}.png, or put them in folders {keys[0]}/ and "
            f"{keys[-1]}/.",
        )
    return pairs, left_out


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


def _visible_files(root: Path) -> list[Path]:
    try:
        if not root.is_dir():
            raise FileError(root, "is not a folder.", hint="Pass a folder with pairs of pictures.")
        files = [path for path in root.rglob("*") if path.is_file()]
    except OSError as error:
        raise FileError(root, f"cannot be read ({reason_of(error)}).", hint=reading_hint(error)) from error
    return sorted(
        path for path in files if not any(part.startswith(".") for part in path.relative_to(root).parts)
    )


def _by_ending(place: Path, keys: Sequence[str]) -> tuple[str, str] | None:
    endings = "|".join(re.escape(key) for key in sorted(keys, key=len, reverse=True))
    match = re.fullmatch(rf"(?:(.*?)[_.-])?({endings})", place.stem, re.IGNORECASE | re.DOTALL)
    if match is None:
        return None
    key = next(key for key in keys if key.lower() == match[2].lower())
    folder = "" if place.parent == Path() else place.parent.as_posix()
    return key, "/".join(part for part in (folder, match[1]) if part)


def _complete_pairs(
    groups: Mapping[str, Mapping[str, Path]], keys: Sequence[str], root: Path, left_out: list[SkippedFile]
) -> list[Pair]:
    """Keep the groups that have every key, and note the files of the others."""
    pairs: list[Pair] = []
    names: set[str] = set()
    for name, group in sorted(groups.items()):
        missing = [key for key in keys if key not in group]
        if missing:
            left_out += [
                SkippedFile(str(file.relative_to(root)), f"has no {' and no '.join(missing)} beside it")
                for file in group.values()
            ]
            continue
        pairs.append(Pair(_shard_name(name or root.resolve().name or "sample", names), dict(group)))
    return pairs


def _shard_name(name: str, taken: set[str]) -> str:
    """A unique name without dots, because WebDataset ends a sample's name at the first dot."""
    plain = name.replace(".", "_")
    plain = plain.lstrip("_") if plain.startswith("__") else plain  # those are passed over as metadata
    unique = plain = plain or "sample"
    numbers = count(2)
    while unique in taken:
        unique = f"{plain}-{next(numbers)}"
    taken.add(unique)
    return unique


def encode_pairs(
    pairs: Sequence[Pair], left_out: list[SkippedFile], progress: Progress = no_progress
) -> Iterator[EncodedSample]:
    """Yield the pairs' files unchanged and in order; each picture is decoded once as a check."""
    outcomes = prefetch(_encode, iter(pairs), workers=WORKERS, ahead=SAMPLES_AHEAD)
    for done, (pair, outcome) in enumerate(zip(pairs, outcomes, strict=True), start=1):
        if isinstance(outcome, str):
            left_out.append(SkippedFile(pair.name, outcome))
        else:
            yield pair.name, outcome
        progress(done, len(pairs), pair.name)


def _encode(pair: Pair) -> dict[str, bytes] | str:
    """The members, or why they cannot be used."""
    members: dict[str, bytes] = {}
    shape: tuple[int, int] | None = None
    for key, file in pair.files.items():
        try:
            data = file.read_bytes()
            size = decode_picture(data).size
        except (OSError, DataError) as error:
            reason = f"cannot be read ({reason_of(error)})" if isinstance(error, OSError) else error.message
            return f"{file.name} {reason}"
        shape = shape or size
        if not same_shape(shape, size):
            first = next(iter(pair.files.values()))
            return (
                f"{file.name} has another shape ({size[0]}×{size[1]}) than {first.name} "
                f"({shape[0]}×{shape[1]})"
            )
        members[f"{key.lower()}{file.suffix.lower()}"] = data
    return members


def write_pocket_shards(
    folder: str | Path,
    numbers: Sequence[int],
    light: Light = COOL,
    *,
    shard_size: int = POCKET_SHARD_SIZE,
    prefix: str = "train",
    overwrite: bool = False,
    size: int = 128,
    progress: Progress = no_progress,
) -> list[WrittenShard]:
    """Render relighting pairs into shards of `source.png` and `target.png`.

    Args:
        folder: Created if it is not there.
        numbers: Numbers of the scenes, from 0; those below 1000 are held out.
        light: Light of the targets. Sources have the scenes' own soft light.
        shard_size: Samples in a shard.
        prefix: Of the shards' names.
        overwrite: Replace shards of that name.
        size: Height and width in pixels.
        progress: Told after each scene.

    Returns:
        The shards; their bytes depend only on the scenes, light and size.

    Raises:
        ConfigError: There are no numbers, one is negative, or `write_shards` refuses the target.
        WriteError: A shard cannot be written.
    """
    if not numbers or min(numbers) < 0 or size < 1:
        raise ConfigError("pocket scenes: expected numbers from 0 on.", hint="For example 1000-1255.")
    target = ShardTarget(Path(folder), prefix, shard_size, overwrite)

    def rendered() -> Iterator[EncodedSample]:
        samples = prefetch(
            lambda number: render_pair(number, light, size),
            iter(numbers),
            workers=WORKERS,
            ahead=SAMPLES_AHEAD,
        )
        for done, sample in enumerate(samples, start=1):
            yield sample
            progress(done, len(numbers), sample[0])

    return write_shards(rendered(), target)
