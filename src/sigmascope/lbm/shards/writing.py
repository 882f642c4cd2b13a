"""Shards that appear whole or not at all, with the same bytes for the same samples."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from webdataset import TarWriter

from sigmascope.errors import ConfigError, WriteError
from sigmascope.records.atomic import atomic_path
from sigmascope.records.os_errors import reason_of, writing_hint

SHARD_SIZE = 1000
"""Samples in a shard unless the caller says."""

EncodedSample = tuple[str, Mapping[str, bytes]]
"""A sample's name, and its members by the rest of the name (`source.jpg`)."""


@dataclass(frozen=True, slots=True)
class ShardTarget:
    """Where shards go.

    Attributes:
        folder: Created if it is not there.
        prefix: The files are `<prefix>-000000.tar` and on.
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
        except OSError as error:
            raise _unusable(self.folder, error) from error


@dataclass(frozen=True, slots=True)
class WrittenShard:
    """A finished shard."""

    path: Path
    samples: int
    nbytes: int


def check_target(target: ShardTarget) -> None:
    """Refuse a target that cannot be written, before work is spent on what would go there.

    Raises:
        ConfigError: An option makes no sense, or there are shards that may not be replaced.
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


def write_shards(samples: Iterable[EncodedSample], target: ShardTarget) -> list[WrittenShard]:
    """Write samples into shards; all of them appear together at the end, or none does.

    The bytes depend on the samples alone: members are sorted, and times and owners are fixed.

    Args:
        samples: Consumed once, each held only while it is written.
        target: Where to.

    Raises:
        ConfigError: As `check_target`.
        WriteError: The folder or a shard cannot be written; what was there before is unchanged.
    """
    check_target(target)
    try:
        target.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(target.folder, error) from error
    written: list[WrittenShard] = []
    stream = iter(samples)
    with ExitStack() as unfinished:
        while (first := next(stream, None)) is not None:
            path = target.path(len(written))
            temporary = unfinished.enter_context(atomic_path(path))
            count = _write_shard(temporary, _up_to(target.shard_size, first, stream))
            written.append(WrittenShard(path, count, temporary.stat().st_size))
    if written:  # without new ones the old ones stay
        _remove(set(target.existing()) - {shard.path for shard in written})
    return written


def shard_pattern(written: list[WrittenShard]) -> str:
    """The pattern with braces that stands for shards, as a config names them."""
    first, last = written[0].path, written[-1].path
    if first == last:
        return str(first)
    stem, _, low = first.stem.rpartition("-")
    return str(first.with_name(f"{stem}-{{{low}..{last.stem.rpartition('-')[2]}}}.tar"))


def _up_to(count: int, first: EncodedSample, stream: Iterator[EncodedSample]) -> Iterator[EncodedSample]:
    yield first
    for _ in range(count - 1):
        following = next(stream, None)
        if following is None:
            return
        yield following


def _write_shard(path: Path, samples: Iterator[EncodedSample]) -> int:
    count = 0
    with (
        path.open("wb") as stream,
        TarWriter(stream, user="", group="", mtime=0, encoder=False) as writer,
    ):
        for name, members in samples:
            writer.write({"__key__": name, **members})
            count += 1
    return count


def _remove(stale: Iterable[Path]) -> None:
    for path in stale:
        try:
            path.unlink()
        except OSError as error:
            message = f"is of older shards and cannot be removed ({reason_of(error)})."
            raise WriteError(path, message, hint="Remove it, or training would read it too.") from error


def _unusable(folder: Path, error: OSError) -> WriteError:
    return WriteError(folder, f"cannot be used ({reason_of(error)}).", hint=writing_hint(error))
