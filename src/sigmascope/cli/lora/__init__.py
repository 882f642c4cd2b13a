"""`sigmascope lora`: make LoRAs, prove them, and work on them. Commands of one subject share a module."""

import typer

from sigmascope.cli.lora import calibration, extract, grid, inspect, merge, plan, validate

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Make LoRAs from fine-tuned models, prove them, and work on them.",
)
app.command("extract", epilog=extract.EPILOG)(extract.extract)
app.command("plan", epilog=plan.EPILOG)(plan.plan)
app.command("statistics", epilog=calibration.EPILOG)(calibration.statistics)
app.command("fit", epilog=calibration.FIT_EPILOG)(calibration.fit)
app.command("validate", epilog=validate.EPILOG)(validate.validate)
app.command("grid", epilog=grid.EPILOG)(grid.grid)
app.command("convert", epilog=merge.CONVERT_EPILOG)(merge.convert)
app.command("resize", epilog=merge.RESIZE_EPILOG)(merge.resize)
app.command("merge", epilog=merge.EPILOG)(merge.merge)
app.command("inspect", epilog=inspect.EPILOG)(inspect.inspect)
app.command("diff", epilog=inspect.DIFF_EPILOG)(inspect.diff)
