"""`sigmascope comfyui install`, `uninstall` and `status`: the loader in a ComfyUI, and what it can see there."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.text import Text

from sigmascope.cli.console import Console, print_json, say
from sigmascope.cli.options import AsJson
from sigmascope.plain_text import printable

if TYPE_CHECKING:
    from sigmascope.integrations.comfyui.node_pack import PackStatus

app = typer.Typer()
_MARKS: Final = {True: ("fits  ", "green"), False: ("off   ", "yellow"), None: ("?     ", "dim")}
"""Of an instrument, by whether it fits."""
ComfyFolder = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        help="ComfyUI's folder, with main.py, or the one that it is started on with --base-directory.",
        show_default=False,
    ),
]


@app.command("install", epilog="Example: sigmascope comfyui install ~/ComfyUI")
def install(path: ComfyFolder) -> None:
    """Put a loader of a few lines into custom_nodes; restart ComfyUI after it.

    Sigmascope itself has to be installed in ComfyUI's Python.
    """
    from sigmascope.integrations.comfyui import node_pack

    say(f"Wrote {node_pack.install(path)}: from its next start on, ComfyUI's prompts are recorded.")


@app.command("uninstall", epilog="Example: sigmascope comfyui uninstall ~/ComfyUI")
def uninstall(path: ComfyFolder) -> None:
    """Take the loader away again; records stay."""
    from sigmascope.integrations.comfyui import node_pack

    if node_pack.uninstall(path):
        say(f"Removed the loader from {path}. A ComfyUI that is running records prompts until it ends.")
    else:
        say("Nothing was installed.")


@app.command("status", epilog="Example: sigmascope comfyui status ~/ComfyUI")
def status(path: ComfyFolder, as_json: AsJson = False) -> None:
    """Say what is installed, what fits this version of ComfyUI, and what is off and why."""
    from sigmascope.integrations.comfyui import node_pack

    known = node_pack.status(path)
    if as_json:
        print_json(known)
    else:
        _print_status(Console(), known)


def _print_status(console: Console, known: "PackStatus") -> None:
    installed = "installed" if known["installed"] else "not installed"
    console.print(
        Text(printable(f"ComfyUI {known['comfyui'] or 'of unknown version'}: {installed}"), style="bold")
    )
    for part in known["instruments"]:
        words, style = _MARKS[part["fits"]]
        mark = Text(words, style=style)
        line = f"{part['name']}: {part['gives']}" + ("" if part["fits"] else f" ({part['why_not']})")
        console.print(mark.append(printable(line)))
        if part["last_start"] not in (None, "on"):
            console.print(Text(printable(f"      at the last start {part['last_start']}"), style="yellow"))
    count = len(known["records"])
    console.print(
        Text(printable(f"Records: {count}" + (f", the last in {known['records'][-1]}" if count else "")))
    )
