"""Reading the host's objects: whatever its code raises becomes a reason."""

from collections.abc import Callable
from typing import TypeVar

from sigmascope.probes.reading import Reading, describe

T = TypeVar("T")


def read_host(read: Callable[[], T]) -> Reading[T]:
    """What `read` gives, or None and why it failed.

    `probes.reading.attempt` knows what torch and the system raise. The objects that a stage looks at are the
    host's, whose properties, tokenizers and wrappers may raise anything.
    """
    try:
        return Reading(read())
    except Exception as error:  # noqa: BLE001 - see above
        return Reading(None, describe(error))
