"""`sigmascope lora`: make LoRAs, prove them, and work on them. One module a command."""

import typer

from sigmascope.cli.lora import convert, diff, extract, inspect, merge, validate
from sigmascope.cli.lora import merge as resize

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Make LoRAs from fine-tuned models, prove them, and work on them.",
)
app.command("extract", epilog=extract.EPILOG)(extract.extract)
app.command("validate", epilog=validate.EPILOG)(validate.validate)
app.command("convert", epilog=convert.EPILOG)(convert.convert)
app.command("resize", epilog=resize.RESIZE_EPILOG)(resize.resize)
app.command("merge", epilog=merge.EPILOG)(merge.merge)
app.command("inspect", epilog=inspect.EPILOG)(inspect.inspect)
app.command("diff", epilog=diff.EPILOG)(diff.diff)
