"""Keep stdout for results: what libraries print while they are imported or at work goes to stderr."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress

_STDOUT, _STDERR = 1, 2


@contextmanager
def stdout_for_results() -> Iterator[None]:
    """Send to stderr what anybody writes on stdout in the block, Python or not.

    Also the file descriptor is turned, since compilers and communication libraries print past `sys.stdout`.
    Nothing of our own that belongs on stdout may be printed in the block.
    """
    with suppress(AttributeError, OSError, ValueError):  # there is none, it is broken, or closed
        sys.stdout.flush()
    kept = _turned()
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if kept is not None:
            os.dup2(kept, _STDOUT)
            os.close(kept)


def _turned() -> int | None:
    """Turn the descriptor.

    Returns:
        Where stdout went before; None where stdout or stderr is closed, so that there is nothing to turn.
    """
    try:
        kept = os.dup(_STDOUT)
    except OSError:
        return None
    try:
        os.dup2(_STDERR, _STDOUT)
    except OSError:
        os.close(kept)
        return None
    return kept
