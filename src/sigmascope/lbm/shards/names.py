"""Which shards a config means: braces, globs, folders, home folders and, where allowed, commands."""

import glob
import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from webdataset.shardlists import expand_urls

from sigmascope.errors import ConfigError, FileError

PIPE = "pipe:"
SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")
"""Of the files that are taken from a folder."""
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:(?=//)")


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
    shards = [shard for pattern in patterns for shard in _expand(pattern, allow_pipe)]
    if not shards:
        raise ConfigError("no shards are named.", hint="Name at least one, for example train-{000..099}.tar.")
    return tuple(shards)


def _expand(pattern: str, allow_pipe: bool) -> list[str]:
    try:
        names = expand_urls(pattern)
    except (AssertionError, ValueError) as error:  # ${NAME} that is not set, or braces that do not close
        raise ConfigError(
            f"shards {pattern!r}: cannot be expanded ({error}).",
            hint="Check the braces; ${NAME} stands for the environment variable WDS_NAME.",
        ) from error
    return [shard for name in names for shard in _resolve(name, pattern, allow_pipe)]


def _resolve(name: str, pattern: str, allow_pipe: bool) -> list[str]:
    if name.startswith(PIPE):
        return [_checked_pipe(name, allow_pipe)]
    if (scheme := _SCHEME.match(name)) and scheme[0].lower() != "file:":
        raise ConfigError(
            f"shards {pattern!r}: {name} is no local file.",
            hint=f"Download it, or stream it with allow_pipe and 'pipe:curl -s -f -L {name}'.",
        )
    path = Path(unquote(urlsplit(name).path) if scheme else name).expanduser()
    if path.is_file() or path.is_fifo():
        return [str(path)]
    if path.is_dir():
        return _in_folder(path, pattern)
    if glob.has_magic(name):
        matches = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 - absolute patterns too
        if found := [match for match in matches if not Path(match).is_dir()]:
            return found
        raise ConfigError(f"shards {pattern!r}: no file matches {name}.", hint="Check the path and the glob.")
    raise FileError(path, f"no such shard (named by {pattern!r}).", hint="Check the path and the braces.")


def _checked_pipe(name: str, allow_pipe: bool) -> str:
    if not allow_pipe:
        raise ConfigError(
            f"shards {name!r}: commands are run only when that is allowed.",
            hint="Set allow_pipe: true in the config if you trust it; the command runs in a shell.",
        )
    if not name.removeprefix(PIPE).strip():
        raise ConfigError(f"shards {name!r}: no command follows.", hint="Write pipe:cat shard.tar.")
    return name


def _in_folder(folder: Path, pattern: str) -> list[str]:
    shards = sorted(str(path) for path in folder.iterdir() if path.name.lower().endswith(SUFFIXES))
    if not shards:
        raise ConfigError(
            f"shards {pattern!r}: the folder {folder} holds no {SUFFIXES[0]} file.",
            hint="Make shards of pictures with: sigmascope lbm make-shards.",
        )
    return shards
