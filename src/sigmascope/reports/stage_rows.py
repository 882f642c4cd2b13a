"""What tables with a row for each stage have in common."""

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from sigmascope.records.run import Run, Stage


def new_table(title: str) -> Table:
    """An empty table whose rows fit 80 columns."""
    # One space between columns
    return Table(
        title=title, title_justify="left", box=None, padding=(0, 1), pad_edge=False, collapse_padding=True
    )


def with_depth(run: Run) -> Iterator[tuple[int, Stage]]:
    """Each stage, outer ones before those in them, with the number of stages around it."""

    def below(stage: Stage, depth: int) -> Iterator[tuple[int, Stage]]:
        yield depth, stage
        for child in stage.children:
            yield from below(child, depth + 1)

    for stage in run.stages:
        yield from below(stage, 0)


def stage_name(depth: int, stage: Stage) -> Text:
    """Whether it went well, and its name, further in the deeper it lies."""
    mark, style = ("✓", "green") if stage.success else ("✗", "red")
    return Text("  " * depth).append(mark, style).append(f" {stage.name}")
