"""`sigmascope comfyui`: put the watch of every prompt into a ComfyUI, take it away, and say what it sees there."""

import typer

from sigmascope.cli.groups import OnDemand, commands_on_demand

_MODULE = "sigmascope.cli.comfyui.node_pack"
app = typer.Typer(
    cls=commands_on_demand(
        {
            "install": OnDemand(
                _MODULE, "Put a loader of a few lines into custom_nodes; restart ComfyUI after it."
            ),
            "uninstall": OnDemand(_MODULE, "Take the loader away again; records stay."),
            "status": OnDemand(
                _MODULE, "Say what is installed, what fits this version of ComfyUI, and what is off and why."
            ),
        }
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@app.callback()
def group() -> None:
    """Record every prompt of a ComfyUI, with no node placed."""
