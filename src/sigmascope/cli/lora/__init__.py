"""`sigmascope lora`: make LoRAs from fine-tuned models, and prove them. One module a command."""

import typer

from sigmascope.cli.lora import convert, extract, validate

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Make LoRAs from fine-tuned models and prove them.",
)
app.command("extract", epilog=extract.EPILOG)(extract.extract)
app.command("validate", epilog=validate.EPILOG)(validate.validate)
app.command("convert", epilog=convert.EPILOG)(convert.convert)
