"""`sigmascope lbm`: make, train and run Latent Bridge Matching models. Commands of one subject share a module."""

import typer

from sigmascope.cli.lbm import create_base, infer, train

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Translate pictures with a Latent Bridge Matching model, and make and train such models.",
)


@app.callback()
def group() -> None:
    """Translate pictures with a Latent Bridge Matching model, and make and train such models."""


app.command("create-base", no_args_is_help=True, epilog=create_base.EPILOG)(create_base.create_base)
app.command("infer", no_args_is_help=True, epilog=infer.EPILOG)(infer.infer)
app.command("make-shards", no_args_is_help=True, epilog=train.SHARDS_EPILOG)(train.make_shards)
app.command("serve", no_args_is_help=True, epilog=infer.SERVE_EPILOG)(infer.serve)
app.command("train", no_args_is_help=True, epilog=train.EPILOG)(train.train)
