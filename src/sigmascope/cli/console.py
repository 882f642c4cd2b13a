"""Output that all commands share: tables of 80 columns, progress, pictures, a clean stdout, missing extras, SIGTERM.

Text from files is shown as plain text: brackets in a name or header field must not become markup, and control
characters must not reach the terminal. Stdout is only for results (`stdout_for_results`): whatever libraries print
goes to stderr, like the progress bar. `save_picture` draws a list of plain shapes as
SVG or PNG.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from rich import box
from rich.console import Console as RichConsole
from rich.console import ConsoleRenderable, Group, RenderableType, RenderHook
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from sigmascope.errors import ConfigError
from sigmascope.files import atomic_path, require_writable
from sigmascope.installation import install_extra
from sigmascope.plain_text import Harmless, in_one_line, printable
from sigmascope.progress import Progress as ProgressCallback
from sigmascope.progress import no_progress
from sigmascope.svg import PICTURES, Shape, drawn
from sigmascope.units import format_size, rough_percent

if TYPE_CHECKING:
    from sigmascope.lora.loadable import WrittenLoads
    from sigmascope.records.run import Finding


_TABLE_PADDING = (0, 1, 0, 0)
_LONGEST_VALUE = 300  # characters of one value that are shown
_LONGEST_FINDING = 600
_MOST_LISTED = 10
SEVERITY_STYLE = {"info": "cyan", "warning": "yellow", "error": "red", "critical": "bold red"}


_PROGRESS_WIDTH = 40
_STDOUT, _STDERR = 1, 2


_LBM_PACKAGES = (
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "pydantic",
    "pydantic_core",
)
PACKAGES = {
    "lbm": _LBM_PACKAGES,
    "train": (*_LBM_PACKAGES, "webdataset", "tensorboard"),
    "ui": (*_LBM_PACKAGES, "starlette", "uvicorn", "jinja2"),
}
"""The packages of each extra, by the names that are imported."""


TERMINATED = 128 + signal.SIGTERM
"""As shells report a process that SIGTERM ended."""


class Console(RichConsole):
    """The console of all commands, which shows names from files as plain text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.push_render_hook(_HARMLESS)


class _HarmlessHook(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return list(map(Harmless, renderables))


_HARMLESS = _HarmlessHook()


def plain(value: object, *, limit: int = _LONGEST_VALUE, style: str = "") -> Text:
    """Text from a file, on one line: control characters become U+FFFD, and very long text is cut."""
    clean = in_one_line(value)
    shown = clean if len(clean) <= limit else f"{clean[: limit - 1]}…"
    return Text(shown, style=style, overflow="fold")


def say(text: str, *, err: bool = False) -> None:
    """Print a line that names files, uncut, without control characters that a terminal would obey."""
    put(f"{printable(text)}\n", err=err)


def print_json(values: object, *, indent: int | None = 2) -> None:
    """Print a report for programs, on stdout."""
    put(f"{json.dumps(values, indent=indent)}\n")


def put(text: str, *, err: bool = False) -> None:
    """Write to the program's own streams, whose encodings `run` has made harmless; Click would replace some of them."""
    stream = sys.stderr if err else sys.stdout
    if stream is not None:  # a program without a console has none
        stream.write(text)
        stream.flush()


def title(what: str, name: object) -> Text:
    """The first line of a report."""
    return Text.assemble((f"{what}: ", "bold"), plain(name))


def layer(name: str) -> Text:
    """A module's name without the prefix that all names of a file share."""
    return plain(name.removeprefix("denoiser.").removeprefix("lora_unet_"))


def table(
    *headings: str,
    left: Sequence[str] = (),
    title: str | None = None,
    rows: Iterable[Sequence[RenderableType]] = (),
) -> Table:
    """A table whose columns are right-aligned numbers, except those named in `left`; the first column wraps."""
    made = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=_TABLE_PADDING, pad_edge=False
    )
    for index, heading in enumerate(headings):
        if index == 0:
            made.add_column(heading, overflow="fold")
        else:
            made.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


def facts(rows: Iterable[tuple[str, RenderableType | None]]) -> Table:
    """Labels and values; rows without a value are left out."""
    made = Table(box=None, show_header=False, pad_edge=False)
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for label, value in rows:
        if value is not None:
            made.add_row(Text(label), Text(value) if isinstance(value, str) else value)
    return made


def listed(console: Console, heading: str, names: Sequence[str], *, style: str = "yellow") -> None:
    """Print a few names under a heading; nothing without any."""
    if not names:
        return
    console.print(Text(f"{heading}: {len(names)}", style=style))
    for name in names[:_MOST_LISTED]:
        console.print(Text("  ").append_text(plain(name, limit=_LONGEST_FINDING)))
    if len(names) > _MOST_LISTED:
        console.print(Text(f"  and {len(names) - _MOST_LISTED} more; --json lists all"))


def findings(shown: "Iterable[Finding]") -> Group:
    """Print a line for each finding: its severity, what was found, and what to do."""
    return Group(
        *(
            Text.assemble(
                (f"{finding.severity}: ", SEVERITY_STYLE[finding.severity]),
                plain(finding.message, limit=_LONGEST_FINDING),
                f" {finding.advice}" if finding.advice else "",
            )
            for finding in shown
        )
    )


def print_written(console: Console, path: Path, file_bytes: int) -> None:
    """Say which file was written, and its size."""
    console.print(Text("Written: ").append_text(plain(path)).append(f" ({format_size(file_bytes)})"))


def print_loads(console: Console, loads: "WrittenLoads | None") -> None:
    """Say what the hosts make of a LoRA that was written."""
    if loads is not None:
        console.print(Text(f"Loads: {loads.in_words}", overflow="fold"))


def counts(occurrences: Mapping[Any, int], *, most: int = 6) -> str:
    """`64 (700), 32 (92)`: values with their counts; if not all fit, the most frequent ones."""
    items = list(occurrences.items())
    if len(items) > most:
        items = sorted(items, key=lambda item: -item[1])[:most]
    shown = [f"{_short(value)} ({count})" for value, count in items]
    if len(occurrences) > most:
        shown.append(f"{len(occurrences) - most} more")
    return ", ".join(shown) or "-"


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def number(value: float | None) -> str:
    """Three significant digits, or `-` for None."""
    return "-" if value is None else f"{value:.3g}"


def percent(fraction: float | None) -> str:
    """A fraction in per cent; a small one as 4e-05 % instead of a misleading 0."""
    if fraction is None:
        return "-"
    value = 100.0 * fraction
    if 0 < abs(value) < 0.001:
        return f"{value:.0e} %"
    return f"{value:.3f} %" if 0 < abs(value) < 1 else rough_percent(fraction, 3)


def span(ranks: tuple[int, int] | None) -> str:
    """`16` or `4-64`."""
    if ranks is None:
        return "-"
    return str(ranks[0]) if ranks[0] == ranks[1] else f"{ranks[0]}-{ranks[1]}"


@contextmanager
def progress_bar(description: str) -> Iterator[ProgressCallback]:
    """Show a bar on stderr while the block runs, or nothing if stderr is not a terminal.

    Yields:
        A callback taking (done, total, what is being worked on); a total of 0 means that it is not known.
    """
    console = RichConsole(stderr=True)  # which moves the cursor
    if not console.is_terminal:  # Rich before 14.3 ends even a disabled bar with a line break
        yield no_progress
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("[dim]{task.fields[what]}", markup=True),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(description, total=None, what="")

        def report(done: int, total: int, what: str) -> None:
            progress.update(
                task, completed=done, total=total or None, what=printable(_shortened(what)).replace("[", "(")
            )

        yield report


def _shortened(what: str) -> str:
    """The last word loses its beginning first: a layer's path says most at its end."""
    head, space, name = what.rpartition(" ")
    return head + space + name[-max(_PROGRESS_WIDTH - len(head), 10) :]


@contextmanager
def stdout_for_results() -> Iterator[None]:
    """Send everything that is written to stdout in the block to stderr.

    The file descriptor is redirected too, because compilers and communication libraries bypass `sys.stdout`. Results
    must not be printed inside the block.
    """
    with suppress(AttributeError, OSError, ValueError):  # there is none, it is broken, or closed
        sys.stdout.flush()
    kept = _turn_stdout_descriptor()
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if kept is not None:
            os.dup2(kept, _STDOUT)
            os.close(kept)


def _turn_stdout_descriptor() -> int | None:
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


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Say which extra to install if an import in the block fails; the block must contain only imports.

    Whatever packages print while they are imported goes to stderr.

    Args:
        extra: A key of `PACKAGES`.

    Raises:
        ConfigError: A package of the extra is not installed. Any other missing module raises as it is.
    """
    try:
        with stdout_for_results():
            yield
    except ModuleNotFoundError as error:
        missing = missing_extra(error, [extra])
        if missing is None:
            raise
        raise missing from error


def missing_extra(error: ModuleNotFoundError, extras: Iterable[str] = PACKAGES) -> ConfigError | None:
    """The error that says which of the extras to install; None if the module belongs to none of them."""
    package = (error.name or "").partition(".")[0]
    for extra in extras:
        if package in PACKAGES[extra]:
            return ConfigError(
                f"This command needs {package}, which is not installed.",
                hint=f"Install it with: {install_extra(extra)}",
            )
    return None


@contextmanager
def leaving_on_sigterm() -> Iterator[None]:
    """Within the block SIGTERM raises `SystemExit` with 143, so that every `finally` runs.

    Further signals are ignored until the block is left: a service manager may send several, and they must not interrupt
    the clean-up. Only the main thread receives signals; in another thread the block changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _exit_on_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _exit_on_sigterm(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(TERMINATED)


def check_picture(path: Path | None, uses: Mapping[Path, str]) -> None:
    """Refuse a bad place for the picture before the work begins.

    Args:
        path: As typed.
        uses: What other files are for, whose place it cannot take.

    Raises:
        ConfigError: The name does not end in a picture's suffix, or another file would be replaced.
        WriteError: It cannot be written, or its folder cannot be made.
    """
    if path is None:
        return
    from sigmascope.checkpoints.checkpoint import is_same_file

    if path.suffix.lower() not in PICTURES:
        kinds = " or ".join(ending.removeprefix(".").upper() for ending in PICTURES)
        raise ConfigError(
            f"--picture {path} is not {kinds}.",
            hint=f"Give a name that ends in {' or '.join(PICTURES)}.",
        )
    require_writable(path)
    for other, use in uses.items():
        if is_same_file(path, other):
            raise ConfigError(f"--picture {path} {use}.", hint="Give the name of a new file.")


def save_picture(path: Path, size: tuple[int, int], shapes: Sequence[Shape]) -> None:
    """Write a picture whole or not at all, as PNG if it is named so and as SVG otherwise.

    Args:
        path: The file, replaced if it is there.
        size: Width and height in pixels of the SVG; a PNG has twice as many.
        shapes: From back to front.

    Raises:
        WriteError: The file cannot be written.
        ConfigError: A PNG is wanted and Pillow is not installed.
    """
    content = drawn(path.suffix, size, shapes)
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)
