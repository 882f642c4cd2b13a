"""How long operations tell their caller how far they are."""

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""Called with (items done, items in all, what is being worked on)."""


def no_progress(done: int, total: int, what: str) -> None:
    """Take progress reports and show nothing: the default."""
