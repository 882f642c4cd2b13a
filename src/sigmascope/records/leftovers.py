"""Names of temporary files, and the removal of those whose writer was killed.

A name says which process on which machine is writing, so that the next writer of the same target can
tell a leftover from a file that is being written right now, on a shared folder too.
"""

import hashlib
import logging
import os
import platform
import re
import secrets
from pathlib import Path

import psutil

_log = logging.getLogger(__name__)
_STEM_LENGTH = 24
_SUFFIX_LENGTH = 16


def temporary_name(target: Path) -> str:
    """A new hidden name for a file that will become `target`; it keeps the target's suffix."""
    token = f"{_host()}-{os.getpid()}-{secrets.token_hex(4)}"
    return f"{_prefix(target)}{token}.tmp{_suffix(target)}"


def remove_leftovers(target: Path) -> list[Path]:
    """Remove temporary files for `target` that processes of this machine left when they were killed.

    Args:
        target: The file about to be written.

    Returns:
        The files removed. One that cannot be removed stays, which is logged.
    """
    removed = []
    for file in _leftovers(target):
        try:
            file.unlink()
        except OSError as error:
            _log.debug("The leftover %s cannot be removed: %s", file, error)
        else:
            _log.info("Removed %s, left by a process that was killed.", file)
            removed.append(file)
    return removed


def _leftovers(target: Path) -> list[Path]:
    pattern = re.compile(
        f"{re.escape(_prefix(target))}{_host()}-([0-9]+)-[0-9a-f]{{8}}\\.tmp{re.escape(_suffix(target))}"
    )
    try:
        names = [file.name for file in target.parent.iterdir()]
    except OSError as error:  # a folder that one may write to but not list
        _log.debug("%s cannot be searched for leftovers: %s", target.parent, error)
        return []
    matches = [match for name in names if (match := pattern.fullmatch(name))]
    return [target.with_name(match[0]) for match in matches if not psutil.pid_exists(int(match[1]))]


def _host() -> str:
    return hashlib.blake2b(platform.node().encode(), digest_size=3).hexdigest()


def _prefix(target: Path) -> str:
    return f".{target.stem[:_STEM_LENGTH]}."


def _suffix(target: Path) -> str:
    return target.suffix[:_SUFFIX_LENGTH]
