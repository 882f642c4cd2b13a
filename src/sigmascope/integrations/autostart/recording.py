"""Beginning and ending the watch of a whole process, and what is left of it: a record, a summary, a trace."""

import os
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from sigmascope.errors import SigmascopeError
from sigmascope.integrations.autostart import frames
from sigmascope.integrations.autostart.process import say
from sigmascope.integrations.autostart.settings import Settings
from sigmascope.records.prompts import PromptPrivacy


def begin(settings: Settings) -> Any:
    """Open a watch of every pipeline in the process."""
    from sigmascope import watch

    opened = watch(
        prompts=cast(PromptPrivacy, settings.prompts or "full"),
        name=settings.name or program(),
        sample_hz=float(settings.sample_hz or 10.0),
    )
    opened.__enter__()
    frames.hide_own()
    return opened


def end(opened: Any, settings: Settings, folder: str) -> None:
    """Close the watch, write the record, print the summary.

    Args:
        opened: What `begin` gave.
        settings: Where the result goes.
        folder: Where relative paths begin: that in which the program started.
    """
    error = unhandled()
    opened.__exit__(None if error is None else type(error), error, None)
    if not opened.stages:
        if settings.launched:
            say("nothing was there to watch: no pipeline was called and no stage was opened.")
        return
    with suppress(OSError, ValueError):  # what the program wrote comes before what we say of it
        sys.stdout.flush()
    if not settings.quiet and sys.__stderr__ is not None:
        with suppress(OSError, ValueError):
            opened.print(Console(file=sys.__stderr__))
    _write("record", record_path(settings.output, folder), opened.save)
    if settings.trace is not None:
        _write("trace", Path(folder, settings.trace), opened.to_trace)


def _write(what: str, path: Path, write: Any) -> None:
    try:
        write(path)
    except SigmascopeError as error:
        say(f"the {what} is not written: {error}")
    else:
        say(f"the {what} is in {path}")


def record_path(output: str | None, folder: str) -> Path:
    """The file for the record: a name with program, time and process, unless one is given.

    Args:
        output: A file, or a folder to put such a name in.
        folder: Where relative paths begin.
    """
    path = Path(folder, output or "")
    if path.is_dir() or (output or "").endswith(os.sep):
        now = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
        return path / f"sigmascope-{program()}-{now}-{os.getpid()}.json"
    return path


def program() -> str:
    """What runs, in a word: the script's or the module's name."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name.removesuffix(".__main__"))
    return Path(getattr(main, "__file__", None) or "python").stem


def unhandled() -> BaseException | None:
    """The exception that ended the program, which Python leaves in `sys`; None if none did."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) else None
