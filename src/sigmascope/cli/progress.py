"""A progress bar on stderr, handed to library code as a plain callback."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sigmascope.progress import Progress as ProgressCallback

_WIDTH = 40


@contextmanager
def progress_bar(description: str) -> Iterator[ProgressCallback]:
    """Show a bar on stderr while the block runs, and nothing where stderr is no terminal.

    Yields:
        A callback taking (done, total, what is being worked on); a total of 0 is one that nobody knows.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("[dim]{task.fields[what]}", markup=True),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=None, what="")

        def report(done: int, total: int, what: str) -> None:
            progress.update(
                task, completed=done, total=total or None, what=_shortened(what).replace("[", "(")
            )

        yield report


def _shortened(what: str) -> str:
    """The last word loses its beginning first: a layer's path says most at its end."""
    head, space, name = what.rpartition(" ")
    return head + space + name[-max(_WIDTH - len(head), 10) :]
