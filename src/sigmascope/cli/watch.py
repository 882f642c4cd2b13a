"""`sigmascope watch`: a script watched from outside."""

import os
from pathlib import Path
from typing import Annotated

import typer

from sigmascope.cli.console import say
from sigmascope.cli.options import Full
from sigmascope.errors import ConfigError, WriteError
from sigmascope.files import require_writable
from sigmascope.records.prompts import check_privacy
from sigmascope.records.run import KEEP_GENERATIONS

EPILOG = "Example: sigmascope watch --output run.json generate.py --steps 4"

CONTEXT = {"allow_interspersed_args": False}
"""All that follows the script's name is the script's own."""


def watch(
    script: Annotated[
        str | None,
        typer.Argument(
            metavar="SCRIPT",
            help="The script, - for stdin, or with -m the module and with -c the code.",
            show_default=False,
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Its arguments.", show_default=False)
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="Run a module, as python -m does.")] = False,
    code: Annotated[bool, typer.Option("-c", help="Run code, as python -c does.")] = False,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="File or folder for the record; without it, a new file in this folder.",
        ),
    ] = None,
    trace: Annotated[
        str | None, typer.Option("--trace", metavar="FILE", help="Write a trace for Perfetto too.")
    ] = None,
    prompts: Annotated[
        str, typer.Option("--prompts", help="What is kept of prompts: full, hash or none.")
    ] = "full",
    name: Annotated[
        str | None, typer.Option("--name", help="What the run is called; without it, as the script.")
    ] = None,
    sample_hz: Annotated[
        float, typer.Option("--sample_hz", help="How often memory is looked at, at most 10 a second.")
    ] = 10.0,
    keep_generations: Annotated[
        int,
        typer.Option(
            "--keep_generations",
            min=1,
            help="How many generations, the last ones, the record holds in full; of earlier ones it holds sums.",
        ),
    ] = KEEP_GENERATIONS,
    step_memory: Annotated[
        bool,
        typer.Option("--step_memory/--no_step_memory", help="Look at memory at the end of each step too."),
    ] = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no summary.")] = False,
    full: Full = False,
    install: Annotated[
        bool, typer.Option("--install", help="Let SIGMASCOPE=1 do the same for any Python process here.")
    ] = False,
    uninstall: Annotated[bool, typer.Option("--uninstall", help="Undo --install.")] = False,
) -> None:
    """Run a script unchanged and see where its time and memory go.

    Every diffusers pipeline in it is watched, and every stage that it names
    itself. Its output, exit code and signals are its own; the summary goes to
    stderr when it ends.
    """
    if install or uninstall:
        _startup_file(install=install, uninstall=uninstall, script=script)
        return
    _check(script, module=module, code=code, sample_hz=sample_hz)
    from sigmascope.integrations.launch import launch
    from sigmascope.integrations.watch_settings import Settings

    check_privacy(prompts)
    settings = Settings(
        output=_writable(output, may_be_folder=True),
        trace=_writable(trace),
        prompts=prompts,
        name=name,
        sample_hz=str(sample_hz),
        keep_generations=str(keep_generations),
        step_memory=None if step_memory else "0",
        quiet="1" if quiet else None,
        full="1" if full else None,
        launched="1",
    )
    how = ["-m"] if module else ["-c"] if code else []
    launch([*how, script or "", *(arguments or [])], settings)


def _startup_file(*, install: bool, uninstall: bool, script: str | None) -> None:
    from sigmascope.integrations import launch

    if script is not None or (install and uninstall):
        raise ConfigError("--install and --uninstall stand alone.", hint="Give one of them, and no script.")
    if install:
        path = launch.install()
        say(f"{path} is there: SIGMASCOPE=1 now watches any Python process of this environment.")
    elif launch.uninstall():
        say(f"{launch.startup_file()} is gone.")
    else:
        say("Nothing was installed.")


def _check(script: str | None, *, module: bool, code: bool, sample_hz: float) -> None:
    if not script:
        raise ConfigError("No script is named.", hint="Write: sigmascope watch SCRIPT [ARGUMENTS]")
    if module and code:
        raise ConfigError("-m and -c exclude each other.", hint="Give one of them.")
    if not (module or code or script == "-") and not Path(script).exists():
        raise ConfigError(
            f"The script {script} does not exist.", hint="Check the path; a module is run with -m."
        )
    if not 0 < sample_hz < float("inf"):
        raise ConfigError(
            f"--sample_hz {sample_hz:g} is not above 0 and finite.", hint="Choose one from 0.1 to 10."
        )


def _writable(path: str | None, *, may_be_folder: bool = False) -> str | None:
    """The whole path, refused now rather than when the script is done."""
    if path is None:
        return None
    from sigmascope.integrations.process_recording import SEPARATORS

    if not (may_be_folder and os.path.isdir(path)):  # noqa: PTH112 - False of a name that is too long, where `Path` raises
        if path.endswith(SEPARATORS):
            raise WriteError(path, "is no folder.", hint="Create it, or name a file.")
        require_writable(path)
    return str(Path(path).absolute())
