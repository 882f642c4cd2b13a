"""Read WebDataset shards: the files that a config means, their samples, and an epoch's order of these.

Names are expanded and members are grouped as WebDataset does. No member is decoded here, and none is ever unpickled. A
shard may come from anywhere, so the sizes in its headers are checked before a member is read: see `read_shard`.

The order of an epoch is the same in every run, and in every process, with the same seed.
"""

import contextlib
import glob
import io
import lzma
import os
import random
import re
import stat
import tarfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from webdataset.gopen import Pipe, gopen_pipe
from webdataset.shardlists import expand_urls
from webdataset.tariterators import base_plus_ext, group_by_keys

from sigmascope.errors import ConfigError, DataError, FileError
from sigmascope.files import reading_hint, reason_of
from sigmascope.lbm.images import ByteFile
from sigmascope.units import format_size, parse_size

PIPE = "pipe:"
SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")
"""Of the files that are taken from a folder."""
EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff")
"""Of members that are taken for pictures."""
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:(?=//)")
_READ_ERRORS = (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError, ValueError)
_NOTE_NAME = re.compile(r"__[^/]*__($|/)")  # WebDataset's own notes
MEMBER_LIMIT = "SIGMASCOPE_MAX_MEMBER"
"""The environment variable that says how large a picture in a shard may be."""
_MEMBER_BYTES = "256MB"
_HEADER_BYTES = (
    1 << 20
)  # of a name or note before a member, and of all notes about the whole archive together
_MAX_NOTES_IN_A_ROW = 16  # a member has two or three
_MAX_COMPRESSION_RATIO = 100  # that a compressed shard may grow by: pictures hardly do
BUFFER_BYTES = 1 << 30
"""Most that the shuffle buffer holds, whatever the number of samples: 256 large ones may not fit in memory."""


def expand_shards(patterns: Iterable[str], *, allow_pipe: bool = False) -> tuple[str, ...]:
    """List the shards that patterns stand for, in their order.

    A pattern may hold braces (`train-{000..099}.tar`), a glob (`train-*.tar`), `~`, several of these joined by
    `::`, or be a folder, which stands for the tar files in it. `pipe:` runs a command and reads what it writes.

    Args:
        patterns: At least one.
        allow_pipe: Whether commands may be run.

    Returns:
        Paths of files that exist, and `pipe:` commands.

    Raises:
        ConfigError: A pattern matches nothing, or is a command or an address that may not be read.
        FileError: A shard does not exist.
    """
    shards: list[str] = []
    for pattern in patterns:
        try:
            names = expand_urls(pattern)
        except (AssertionError, ValueError) as error:  # ${NAME} that is not set, or braces that do not close
            raise ConfigError(
                f"shards {pattern!r}: cannot be expanded ({error}).",
                hint="Check the braces; ${NAME} stands for the environment variable WDS_NAME.",
            ) from error
        for name in names:
            shards += _resolve(name, pattern, allow_pipe)
    if not shards:
        raise ConfigError("no shards are named.", hint="Name at least one, for example train-{000..099}.tar.")
    return tuple(shards)


def _resolve(name: str, pattern: str, allow_pipe: bool) -> list[str]:
    if name.startswith(PIPE) and not allow_pipe:
        raise ConfigError(
            f"shards {name!r}: it is a command, and commands run only with --allow_pipe.",
            hint="Give --allow_pipe on the command line if you trust it; the command runs in a shell.",
        )
    if name.startswith(PIPE) and not name.removeprefix(PIPE).strip():
        raise ConfigError(
            f"shards {name!r}: there is no command after pipe:.", hint="Write pipe:cat shard.tar."
        )
    if name.startswith(PIPE):
        return [name]
    if (scheme := _SCHEME.match(name)) and scheme[0].lower() != "file:":
        raise ConfigError(
            f"shards {pattern!r}: {name} is not a local file.",
            hint=f"Download it, or stream it with --allow_pipe and 'pipe:curl -s -f -L {name}'.",
        )
    path = Path(unquote(urlsplit(name).path) if scheme else name).expanduser()
    if path.is_file() or path.is_fifo():
        return [str(path)]
    if path.is_dir():
        files = sorted(str(file) for file in path.iterdir() if file.name.lower().endswith(SUFFIXES))
        if not files:
            raise ConfigError(
                f"shards {pattern!r}: the folder {path} holds no {SUFFIXES[0]} file.",
                hint="Make shards of pictures with: sigmascope lbm make-shards.",
            )
        return files
    if glob.has_magic(name):
        matches = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 - absolute patterns too
        if files := [match for match in matches if not Path(match).is_dir()]:
            return files
        raise ConfigError(f"shards {pattern!r}: no file matches {name}.", hint="Check the path and the glob.")
    raise FileError(path, f"no such shard (named by {pattern!r}).", hint="Check the path and the braces.")


@dataclass(frozen=True, slots=True)
class RawSample:
    """One sample before it is decoded.

    Attributes:
        shard: The file or command that it comes from.
        key: What its members' names begin with; None stands for the rest of a shard that cannot be read.
        members: The bytes of those that the config asks for, by the rest of the name, in lower case.
        names: Of all its members, for messages.
        fault: Why it cannot be used, where reading showed that.
        files: In place of `members`, where these are left unread.
    """

    shard: str
    key: str | None
    members: dict[str, bytes] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    fault: str | None = None
    files: dict[str, ByteFile] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Memory that its members take."""
        return sum(len(data) for data in self.members.values())

    def opened(self, member: str) -> ByteFile:
        """A member as a file."""
        return self.files[member] if member in self.files else io.BytesIO(self.members[member])


def read_shard(
    shard: str, keys: Collection[str], max_member: str | int | None = None, *, unread: bool = False
) -> Iterator[RawSample]:
    """Read a shard from its beginning, holding one sample at a time.

    Members that no key means are skipped unread. A member that is sparse or larger than `SIGMASCOPE_MAX_MEMBER` (256 MB
    by default) ends the shard, and so do compressed bytes that grow a hundredfold.

    Args:
        shard: A path, or a command behind `pipe:`.
        keys: The config's keys; other members are skipped.
        max_member: Such as `2GB`, in place of `SIGMASCOPE_MAX_MEMBER`.
        unread: Give files in place of bytes, to look at their beginnings before the next sample. The shard is a
            file that is not compressed.

    Yields:
        Its samples in order. If the shard breaks off, a last sample says so in its `fault`.

    Raises:
        FileError: The file cannot be opened, or the system refuses to read on.
        ConfigError: `max_member` is not a size.
    """
    most = parse_size(str(max_member or os.environ.get(MEMBER_LIMIT) or _MEMBER_BYTES), MEMBER_LIMIT)
    with _opened(shard) as stream:
        good = 0
        doubled: list[Exception] = []

        def note(error: Exception) -> bool:
            doubled.append(error)
            return True

        try:
            for sample in group_by_keys(_members(shard, stream, keys, most, unread), handler=note):
                yield _raw(shard, sample, keys, doubled, unread)
                doubled.clear()
                good += 1
        except _READ_ERRORS as error:
            if isinstance(error, OSError) and error.errno is not None and not isinstance(stream, Pipe):
                # The system's, about a disk that may answer the next time, and not about what is in the file.
                raise _unreadable(shard, error) from error
            what = f"breaks off after {good} samples" if good else "cannot be read as a tar file"
            yield RawSample(shard, None, fault=f"{what} ({_first_words(error)})")


def _members(
    shard: str, stream: IO[bytes] | Pipe, keys: Collection[str], most: int, unread: bool
) -> Iterator[dict[str, Any]]:
    """Members one by one, as `group_by_keys` takes them; those that no key can mean without their bytes."""
    room: int | None = None  # the most bytes that it may unpack to; of a command nobody knows
    length = None
    if not isinstance(stream, Pipe):
        facts = os.fstat(stream.fileno())
        length = facts.st_size if stat.S_ISREG(facts.st_mode) else None
        room = None if length is None else length * _MAX_COMPRESSION_RATIO
    try:
        opened = _CheckedTar.open(fileobj=stream, mode="r:" if unread else "r|*")
    except TypeError as error:  # tarfile's own of a gzip header that ends after its first bytes
        raise tarfile.ReadError("its gzip header breaks off") from error
    with opened as tar:
        for info in tar:
            if not info.isreg() or _NOTE_NAME.match(info.name):
                continue
            if info.issparse():
                raise tarfile.ReadError(f"{info.name} is a sparse file, which a picture never is")
            if room is not None and info.offset_data + info.size > room:
                raise tarfile.ReadError(
                    f"{info.name} declares {format_size(info.size)}, more than the compressed bytes can hold"
                )
            data: bytes | IO[bytes] = b""
            ending = (base_plus_ext(info.name)[1] or "").lower()
            if any(wanted_members(key, [ending]) for key in keys):
                if info.size > most:
                    raise tarfile.ReadError(
                        f"{info.name} declares {format_size(info.size)}; {MEMBER_LIMIT} allows {format_size(most)}"
                    )
                if unread and length is not None and info.offset_data + info.size > length:
                    raise tarfile.ReadError("unexpected end of data")  # as reading it would
                file = tar.extractfile(info)
                if file is not None:
                    data = file if unread else file.read()
            yield {"fname": info.name, "data": data, "__url__": shard}
            tar.members = []  # type: ignore[attr-defined]  # it would remember all


class _CheckedInfo(tarfile.TarInfo):
    """Refuses names and notes that fill the memory, before they are read."""

    _NOTES = (
        tarfile.XHDTYPE,
        tarfile.XGLTYPE,
        tarfile.SOLARIS_XHDTYPE,
        tarfile.GNUTYPE_LONGNAME,
        tarfile.GNUTYPE_LONGLINK,
    )

    def _proc_member(self, archive: "_CheckedTar") -> tarfile.TarInfo:
        if self.type in self._NOTES:
            self._note(archive)
        else:
            archive.notes_in_a_row = 0
        member: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc]
        return member

    def _note(self, archive: "_CheckedTar") -> None:
        archive.notes_in_a_row += 1
        if self.type == tarfile.XGLTYPE:  # what these say is kept to the end
            archive.lasting_bytes += self.size
        if max(self.size, archive.lasting_bytes) > _HEADER_BYTES:
            raise tarfile.ReadError(f"headers declare {format_size(max(self.size, archive.lasting_bytes))}")
        if archive.notes_in_a_row > _MAX_NOTES_IN_A_ROW:
            raise tarfile.ReadError(f"more than {_MAX_NOTES_IN_A_ROW} headers stand before one member")


class _CheckedTar(tarfile.TarFile):
    """An archive that counts its notes."""

    tarinfo = _CheckedInfo
    notes_in_a_row = 0
    lasting_bytes = 0


@contextlib.contextmanager
def _opened(shard: str) -> Iterator[IO[bytes] | Pipe]:
    if shard.startswith(PIPE):
        pipe = gopen_pipe(shard)
        try:
            yield pipe
        finally:  # a command that still runs, because its reader has seen enough, is stopped
            if pipe.proc.poll() is None:
                pipe.proc.terminate()
            with contextlib.suppress(OSError):  # its exit status was looked at while it was read
                pipe.close()
        return
    try:
        stream = Path(shard).open("rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise _unreadable(shard, error) from error
    with closing(stream):
        yield stream


def _unreadable(shard: str, error: OSError) -> FileError:
    return FileError(shard, f"cannot be read ({reason_of(error)}).", hint=reading_hint(error))


def _raw(
    shard: str, sample: dict[str, Any], keys: Collection[str], doubled: list[Exception], unread: bool
) -> RawSample:
    names = tuple(name for name in sample if not name.startswith("__"))
    wanted = {name for key in keys for name in wanted_members(key, names)}
    found = {name: sample[name] for name in names if name in wanted}
    return RawSample(
        shard,
        sample["__key__"],
        {} if unread else found,
        names,
        f"holds a member twice ({_first_words(doubled[0])})" if doubled else None,
        found if unread else {},
    )


def _first_words(error: Exception) -> str:
    """What happened; the reading code appends streams and addresses to the arguments."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    words = re.split(r" @ | dict_keys\(", str(error.args[0]))[0] if error.args else ""
    return words or type(error).__name__


def find_member(key: str, names: Sequence[str]) -> str:
    """The one member that a key means.

    Raises:
        DataError: There is none, or more than one.
    """
    members = wanted_members(key, names)
    if len(members) == 1:
        return members[0]
    if not members:
        raise DataError(f"has no member for the key {key!r} (it has {', '.join(names) or 'none'})")
    raise DataError(f"has {' and '.join(members)} for the key {key!r}")


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


def epoch_samples(
    shards: Sequence[str],
    keys: Collection[str],
    epoch: int,
    *,
    seed: int = 0,
    shuffle: bool = True,
    buffer: int = 256,
    buffer_bytes: int = BUFFER_BYTES,
    max_member: str | int | None = None,
) -> Iterator[RawSample]:
    """Read an epoch's samples in its order, from the first.

    Args:
        shards: Read one after the other.
        keys: The config's; members that no key means are dropped.
        epoch: From 0; each has its own order.
        seed: Of the order.
        shuffle: Permute the shards and mix samples in a buffer; otherwise keep the shards' order.
        buffer: Samples in the buffer.
        buffer_bytes: Memory that they may take.
        max_member: As of `read_shard`.
    """
    order = list(shards)
    if shuffle:
        random.Random(f"{seed} {epoch} shards").shuffle(order)
    samples = (sample for shard in order for sample in read_shard(shard, keys, max_member))
    return (
        shuffled(samples, random.Random(f"{seed} {epoch} samples"), buffer, buffer_bytes)
        if shuffle
        else samples
    )


def shuffled(
    samples: Iterator[RawSample], draws: random.Random, size: int, most_bytes: int
) -> Iterator[RawSample]:
    """Give each sample from a random place of a buffer that is refilled from the stream.

    Args:
        samples: Samples in the order of reading.
        draws: Draws the places.
        size: Samples in the buffer; with 0 or 1 the order stays the same.
        most_bytes: The most memory that they may take; the buffer always holds at least one.
    """
    held: list[RawSample] = []
    nbytes = 0
    for sample in samples:
        held.append(sample)
        nbytes += sample.nbytes
        while held and (len(held) >= size or nbytes > most_bytes):
            drawn = _drawn(held, draws)
            nbytes -= drawn.nbytes
            yield drawn
    while held:
        yield _drawn(held, draws)


def _drawn(held: list[RawSample], draws: random.Random) -> RawSample:
    place = draws.randrange(len(held))
    held[place], held[-1] = held[-1], held[place]
    return held.pop()
