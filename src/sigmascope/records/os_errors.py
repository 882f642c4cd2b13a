"""What the operating system refused, as a reason and a next step for the user."""

import errno

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers that mean there is no room left, on the disk or in the quota."""

_NO_PERMISSION = (errno.EACCES, errno.EPERM)
_WRONG_PATH = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


def reason_of(error: OSError | ValueError) -> str:
    """Why the system refused, in its own words. A ValueError is a path with a NUL or without an encoding."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def reading_hint(error: OSError | ValueError) -> str:
    """What to do about a path that cannot be looked at or read."""
    number = error.errno if isinstance(error, OSError) else errno.ENOENT
    if number in _NO_PERMISSION:
        return "Check the permissions of it and of the folders above it."
    if number == errno.ENAMETOOLONG:
        return "Check the path: no file can have a name that long."
    return "Check the path." if number in _WRONG_PATH else "Check the disk, and try again."


def writing_hint(error: OSError | ValueError) -> str:
    """What to do about a target that cannot be written."""
    number = error.errno if isinstance(error, OSError) else errno.ENOENT
    if number in DISK_FULL:
        return "Free some space or choose another disk."
    if number == errno.ENAMETOOLONG:
        return "Choose a shorter name."
    return "Check the path." if number in _WRONG_PATH else "Choose a folder that you can write to."
