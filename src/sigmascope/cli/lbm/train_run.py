"""The work of `sigmascope lbm train`: settings, training with its progress, the outcome, the exit code."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from sigmascope.cli.extras import needs_extra
from sigmascope.cli.lbm.train_report import print_dry_run, print_report, say_log, say_validation
from sigmascope.cli.progress import progress_bar
from sigmascope.cli.stdout import stdout_for_results

if TYPE_CHECKING:
    from sigmascope.lbm.train import Listeners
    from sigmascope.lbm.training.settings import TrainSettings
    from sigmascope.lbm.training.validation import Validation


@dataclass(frozen=True)
class TrainOptions:
    """The command's options, one field each."""

    path_config: Path
    resume: bool = True
    max_steps: int | None = None
    device: str | None = None
    allow_pipe: bool = False
    dry_run: bool = False
    live: bool | None = None
    as_json: bool = False


def run_train(options: TrainOptions) -> None:
    """Train as the options say, or show what would be trained.

    Raises:
        SigmascopeError: Whatever was wrong with the settings, the files or the training.
        typer.Exit: With 143 or 130 when a signal stopped it.
    """
    with needs_extra("train"):
        from sigmascope.lbm.devices import resolve_device
        from sigmascope.lbm.train import train as train_lbm
        from sigmascope.lbm.training.dry_run import dry_run
        from sigmascope.lbm.training.stopping import EXIT_CODES

    settings = _settings(options)
    console = Console(stderr=True, highlight=False)
    if options.dry_run:
        with stdout_for_results():
            found = dry_run(settings, resume=options.resume)
        print_dry_run(found, as_json=options.as_json)
        return
    if options.device is not None:
        resolve_device(options.device)  # else training would name the YAML's key
    # DeepSpeed is imported, and may compile, while training begins.
    with stdout_for_results(), _listening(options, console) as listeners, _warnings(console):
        report = train_lbm(settings, resume=options.resume, progress=listeners.progress, listeners=listeners)
    if _is_main_process():
        print_report(report, settings, as_json=options.as_json)
    if report.stopped_by is not None:
        raise typer.Exit(EXIT_CODES[report.stopped_by])


def _settings(options: TrainOptions) -> "TrainSettings":
    """The YAML's, with what the command line says instead."""
    from sigmascope.lbm.training.settings import load_train_settings

    settings = load_train_settings(options.path_config)
    said = {
        "max_steps": options.max_steps,
        "device": options.device,
        "allow_pipe": options.allow_pipe or None,
    }
    changed = {key: value for key, value in said.items() if value is not None}
    return settings.model_copy(update=changed)


@contextmanager
def _listening(options: TrainOptions, console: Console) -> "Iterator[Listeners]":
    """A bar on a terminal; elsewhere, in a log file say, a line now and then."""
    from sigmascope.lbm.train import Listeners

    live = console.is_terminal if options.live is None else options.live

    def on_validation(found: "Validation", sheet: Path) -> None:
        say_validation(console, found, sheet)

    if not _is_main_process():
        yield Listeners()
    elif live:
        with progress_bar("Training") as progress:
            yield Listeners(progress=progress, on_validation=on_validation)
    else:
        totals: list[int] = []
        yield Listeners(
            progress=lambda done, total, what: totals.append(total),
            on_log=lambda log: say_log(console, log, totals[-1] if totals else None),
            on_validation=on_validation,
        )


@contextmanager
def _warnings(console: Console) -> Iterator[None]:
    """Show what training warns of (a damaged checkpoint passed over, samples left out) while it runs."""
    handler = _ConsoleHandler(console)
    logger = logging.getLogger("sigmascope")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _is_main_process() -> bool:
    """Whether this is the process that speaks, among those that a launcher started."""
    return int(os.environ.get("RANK", "0")) == 0


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line."""
        self._console.print(f"Note: {record.getMessage()}", style="yellow", markup=False, soft_wrap=True)
