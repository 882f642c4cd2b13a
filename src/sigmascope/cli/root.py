"""The main command: it lists the commands and groups, and turns errors into one line, a hint and an exit code.

What its help needs is all that it imports.
"""

import sys
from typing import Annotated, Any

import typer

from sigmascope.__about__ import __version__
from sigmascope.cli.groups import OnDemand, commands_on_demand, one_line_if_stopped
from sigmascope.errors import STOPPED_BY_USER, SigmascopeError
from sigmascope.plain_text import never_failing, printable

_UsageError: Any = typer.BadParameter.__mro__[2]
"""What Typer raises for a command line that it does not understand; where the class lies depends on its version."""


def _one_name(token: str) -> str:
    """A YAML's option by either of its names, and any option with dashes."""
    name = token.replace("-", "_")
    return "config_path" if name == "path_config" else name


app = typer.Typer(
    name="sigmascope",
    cls=commands_on_demand(
        {
            "compare-tensors": OnDemand(
                "sigmascope.cli.compare_tensors",
                "Compare dumped tensors: where do two pipelines begin to differ, and is it rounding?",
            ),
            "bench": OnDemand(
                "sigmascope.cli.bench",
                "Measure a pipeline: warm-up, repeats, percentiles, throughput and peak memory.",
            ),
            "compare": OnDemand(
                "sigmascope.cli.compare",
                "Compare runs with those before a change: times of stages and steps, and memory peaks.",
            ),
            "check": OnDemand(
                "sigmascope.cli.compare",
                "Check runs against a baseline: times of stages and steps, and memory peaks.",
            ),
            "show": OnDemand(
                "sigmascope.cli.compare",
                "Show where a saved run's time and memory went, what is wrong, and what to do.",
            ),
            "runs": OnDemand(
                "sigmascope.cli.runs",
                "List, find, tag and exchange the runs that were kept, and query them in SQL.",
            ),
            "trend": OnDemand(
                "sigmascope.cli.trend",
                "Show a figure of the kept runs over time: where it changed, when, and what differs there.",
            ),
            "watch": OnDemand(
                "sigmascope.cli.start", "Run a script unchanged and see where its time and memory go."
            ),
            "comfyui": OnDemand(
                "sigmascope.cli.comfyui", "Record every prompt of a ComfyUI, with no node placed."
            ),
            "doctor": OnDemand(
                "sigmascope.cli.start",
                "Examine this machine: versions, devices, optional packages, and what can be measured.",
            ),
            "demo": OnDemand(
                "sigmascope.cli.start",
                "Make, prove, apply and watch a LoRA on a small trained model, in seconds.",
            ),
            "ui": OnDemand(
                "sigmascope.cli.ui",
                "Open the runs that were kept in the browser: one, two side by side, trends, runs in progress, and LoRA files.",
            ),
            "lora": OnDemand(
                "sigmascope.cli.lora", "Make LoRAs from fine-tuned models, prove them, and work on them."
            ),
            "lbm": OnDemand(
                "sigmascope.cli.lbm",
                "Translate pictures with a Latent Bridge Matching model, and make and train such models.",
            ),
        }
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        # --base-model-path is --base_model_path, in every group, and the help shows each option once.
        "token_normalize_func": _one_name,
    },
)


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit
    return wanted  # the callback's result becomes the option's value


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
    for stream in (sys.stdout, sys.stderr):
        never_failing(stream)
    try:
        with one_line_if_stopped():  # before Typer takes care of it, and after
            code = app(standalone_mode=False)
        sys.exit(code or 0)
    except KeyboardInterrupt:
        sys.exit(STOPPED_BY_USER)
    except _UsageError as error:  # which repeats what was typed, such as the names of files
        from typer.rich_utils import rich_format_error

        error.message = printable(_with_value(error))
        rich_format_error(error)
        sys.exit(error.exit_code)
    except typer.Abort:
        from typer.rich_utils import rich_abort_error

        rich_abort_error()
        sys.exit(1)
    except SigmascopeError as error:
        _print_error(error)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:  # imported where it is used, past `needs_extra`
        from sigmascope.cli.console import missing_extra

        missing = missing_extra(error)
        if missing is None:
            raise
        _print_error(missing)
        sys.exit(missing.exit_code)
    except OSError as error:  # whatever writes a file of its own says which; what is printed has no name
        from sigmascope.files import DISK_FULL, reason_of, writing_hint

        if error.errno not in DISK_FULL or error.filename is not None:
            raise
        _print_error(
            SigmascopeError(f"The output cannot be written ({reason_of(error)}).", hint=writing_hint(error))
        )
        sys.exit(SigmascopeError.exit_code)


def _with_value(error: Any) -> str:
    """What an option's check says, with the value that Pydantic, which makes these checks for Typer, leaves out."""
    failed = getattr(error.__cause__, "errors", None)
    if not callable(failed):
        return str(error.message)
    first = failed()[0]
    said = str(first["msg"]).removeprefix("Value error, ")
    if not said.startswith("Input "):
        return said
    return f"{first['input']!r}{said.removeprefix('Input').partition(', unable')[0]}."


def _print_error(error: SigmascopeError) -> None:
    from rich.text import Text

    from sigmascope.cli.console import Console

    # Text, not markup: a file name may hold square brackets.
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text.assemble(("Error: ", "bold red"), printable(error.message)))
    if error.hint:
        console.print(Text.assemble(("Next:  ", "bold"), printable(error.hint)))
