"""Samples as they lie in shards: names and bytes. The tar files are read and grouped by WebDataset.

No member is decoded here, and none is ever unpickled: WebDataset's own decoders are not used.
"""

import contextlib
import lzma
import re
import tarfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from webdataset.gopen import Pipe, gopen_pipe
from webdataset.tariterators import group_by_keys, tar_file_expander

from sigmascope.errors import FileError
from sigmascope.lbm.shards.members import wanted_members
from sigmascope.lbm.shards.names import PIPE
from sigmascope.records.os_errors import reading_hint, reason_of

_READ_ERRORS = (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError, ValueError)


@dataclass(frozen=True, slots=True)
class RawSample:
    """One sample before it is decoded.

    Attributes:
        shard: The file or command that it comes from.
        key: What its members' names begin with; None stands for the rest of a shard that cannot be read.
        members: The bytes of those that the config asks for, by the rest of the name, in lower case.
        names: Of all its members, for messages.
        fault: Why it cannot be used, where reading showed that.
    """

    shard: str
    key: str | None
    members: dict[str, bytes] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    fault: str | None = None

    @property
    def nbytes(self) -> int:
        """Memory that its members take."""
        return sum(len(data) for data in self.members.values())


def read_shard(shard: str, keys: Collection[str]) -> Iterator[RawSample]:
    """Read a shard from its beginning, holding one sample at a time.

    Args:
        shard: A path, or a command behind `pipe:`.
        keys: The config's; other members are passed over.

    Yields:
        Its samples in their order. Where it breaks off, a last one with `fault` says so.

    Raises:
        FileError: The file cannot be opened.
    """
    with _opened(shard) as stream:
        good = 0
        doubled: list[Exception] = []

        def note(error: Exception) -> bool:
            doubled.append(error)
            return True

        files = tar_file_expander([{"url": shard, "stream": stream}])
        try:
            for sample in group_by_keys(files, handler=note):
                yield _raw(shard, sample, keys, doubled)
                doubled.clear()
                good += 1
        except _READ_ERRORS as error:
            what = f"breaks off after {good} samples" if good else "cannot be read as a tar file"
            yield RawSample(shard, None, fault=f"{what} ({_first_words(error)})")


def _raw(shard: str, sample: dict[str, Any], keys: Collection[str], doubled: list[Exception]) -> RawSample:
    names = tuple(name for name in sample if not name.startswith("__"))
    wanted = {name for key in keys for name in wanted_members(key, names)}
    return RawSample(
        shard,
        sample["__key__"],
        {name: sample[name] for name in names if name in wanted},
        names,
        f"holds a member twice ({_first_words(doubled[0])})" if doubled else None,
    )


def _first_words(error: Exception) -> str:
    """What happened; the reading code appends streams and addresses to the arguments."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    words = re.split(r" @ | dict_keys\(", str(error.args[0]))[0] if error.args else ""
    return words or type(error).__name__


@contextlib.contextmanager
def _opened(shard: str) -> Iterator[IO[bytes] | Pipe]:
    if shard.startswith(PIPE):
        pipe = gopen_pipe(shard)
        try:
            yield pipe
        finally:
            _end(pipe)
        return
    try:
        stream = Path(shard).open("rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise FileError(shard, f"cannot be read ({reason_of(error)}).", hint=reading_hint(error)) from error
    with closing(stream):
        yield stream


def _end(pipe: Pipe) -> None:
    """Stop a command that still runs because its reader has seen enough, and leave no process behind."""
    if pipe.proc.poll() is None:
        pipe.proc.terminate()
    with contextlib.suppress(OSError):  # its exit status was looked at while it was read
        pipe.close()
