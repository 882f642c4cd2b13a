"""The main command: it mounts the groups and turns errors into one line, a hint and an exit code."""

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from sigmascope.__about__ import __version__
from sigmascope.cli import bench, compare, compare_tensors, demo, doctor, lbm, lora, watch
from sigmascope.cli import compare as check
from sigmascope.errors import SigmascopeError
from sigmascope.units import printable

STOPPED_BY_USER = 130
"""128 + SIGINT, as shells report it."""


app = typer.Typer(
    name="sigmascope",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        # --base-model-path is --base_model_path, in every group, and the help shows each option once.
        "token_normalize_func": lambda token: token.replace("-", "_"),
    },
)
app.add_typer(lora.app, name="lora")
app.add_typer(lbm.app, name="lbm")
app.command("compare-tensors", epilog=compare_tensors.EPILOG)(compare_tensors.compare_tensors)
app.command("bench", epilog=bench.EPILOG)(bench.bench)
app.command("compare", cls=compare.ManyBaselines, epilog=compare.EPILOG)(compare.compare)
app.command("check", cls=compare.ManyBaselines, epilog=check.CHECK_EPILOG)(check.check)
app.command("watch", context_settings=watch.CONTEXT, epilog=watch.EPILOG)(watch.watch)
app.command("doctor", epilog=doctor.EPILOG)(doctor.doctor)
app.command("demo", epilog="Example: sigmascope demo --source-image my.jpg --output relit")(demo.demo)


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit
    return wanted  # what a callback returns becomes the option's value


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Know what your LoRA does and where your diffusion pipeline's time and memory go.

    Start with: [bold]sigmascope demo[/bold]
    """


def run() -> None:
    """Run the command line; a `SigmascopeError` becomes a message on stderr and its exit code."""
    try:
        app()
    except SigmascopeError as error:
        _print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(STOPPED_BY_USER)


def _print_error(error: SigmascopeError) -> None:
    # Text, not markup: a file name may hold square brackets.
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text.assemble(("Error: ", "bold red"), printable(error.message)))
    if error.hint:
        console.print(Text.assemble(("Next:  ", "bold"), printable(error.hint)))
