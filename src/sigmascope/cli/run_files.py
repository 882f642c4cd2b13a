"""Saved runs as arguments: files, and folders of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from sigmascope.errors import RecordError
from sigmascope.printable import printable

if TYPE_CHECKING:
    from sigmascope.records.run import Run


def load_runs(paths: Sequence[Path]) -> "list[Run]":
    """The runs in these files, and in the .json files of these folders, by name.

    Raises:
        RecordError: A path does not exist, a folder holds no .json, a file is no run or holds times that cannot be, or two
            files are the same run.
    """
    from sigmascope.records.serialization import load_run
    from sigmascope.records.times import impossible_times

    found = {path: load_run(path) for given in paths for path in _files(given)}  # each file once
    for path, run in found.items():
        for wrong in impossible_times(run):
            raise RecordError(path, f"is damaged: {wrong}.", hint="Leave it out, or record the run again.")
    _refuse_copies(found)
    return list(found.values())


def load_sides(new: Sequence[Path], baseline: Sequence[Path]) -> "tuple[list[Run], list[Run]]":
    """The runs of both sides of a comparison.

    Raises:
        RecordError: As `load_runs`; and for a run that both sides have, which would be found the same as itself.
    """
    ours, theirs = load_runs(new), load_runs(baseline)
    ids = {run.id for run in theirs}
    twin = next((run for run in ours if run.id in ids and run in theirs), None)
    if twin is not None:
        message = f"the run {printable(twin.id)} is in the baseline too."
        raise RecordError(new[0], message, hint="Compare runs with earlier ones, not with themselves.")
    return ours, theirs


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*.json"))
    if not found:
        raise RecordError(
            path, "holds no saved run.", hint="Name a folder of .json files written by Run.save."
        )
    return found


def _refuse_copies(runs: "dict[Path, Run]") -> None:
    """A run that counted twice would be taken for two that agree."""
    seen: dict[str, list[Path]] = {}
    for path, run in runs.items():
        known = seen.setdefault(run.id, [])
        twin = next((one for one in known if runs[one] == run), None)
        if twin is not None:
            raise RecordError(path, f"is the same run as {twin}.", hint="Give each run once.")
        known.append(path)


class ManyBaselines(TyperCommand):
    """A command whose `--baseline` takes all that follows it up to the next option, as a shell's `*.json` gives."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the option before each of its values."""
        return super().parse_args(ctx, repeated(args, "--baseline"))


def repeated(args: Sequence[str], option: str) -> list[str]:
    """The arguments with `option a b` written as `option a option b`. What follows `--` stays as it is."""
    written: list[str] = []
    takes = False
    for index, arg in enumerate(args):
        if arg == "--":
            return written + list(args[index:])
        if arg == option:
            takes = True
        elif arg.startswith("-") and arg != "-":
            takes = False
            written.append(arg)
        elif takes:
            written += [option, arg]
        else:
            written.append(arg)
    return written + ([option] if takes and args[-1] == option else [])


def path_argument(help_text: str) -> Any:
    """An argument of runs, shown without a default."""
    return typer.Argument(help=help_text, show_default=False)
