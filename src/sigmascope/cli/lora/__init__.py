"""`sigmascope lora`: make LoRAs, prove them, and work on them. Commands of one subject share a module."""

import typer

from sigmascope.cli.options import commands_on_demand

app = typer.Typer(
    cls=commands_on_demand(
        {
            "extract": "sigmascope.cli.lora.extract",
            "plan": "sigmascope.cli.lora.plan",
            "statistics": "sigmascope.cli.lora.statistics",
            "fit": "sigmascope.cli.lora.statistics",
            "validate": "sigmascope.cli.lora.validate",
            "grid": "sigmascope.cli.lora.grid",
            "convert": "sigmascope.cli.lora.merge",
            "resize": "sigmascope.cli.lora.merge",
            "merge": "sigmascope.cli.lora.merge",
            "inspect": "sigmascope.cli.lora.inspect",
            "diff": "sigmascope.cli.lora.inspect",
        }
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@app.callback()
def group() -> None:
    """Make LoRAs from fine-tuned models, prove them, and work on them."""
