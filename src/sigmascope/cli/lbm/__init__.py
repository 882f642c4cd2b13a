"""`sigmascope lbm`: make, train and run Latent Bridge Matching models. One module a command."""

import typer

from sigmascope.cli.lbm import create_base, infer, make_shards, serve, train

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
app.command("make-shards", no_args_is_help=True, epilog=make_shards.EPILOG)(make_shards.make_shards)
app.command("serve", no_args_is_help=True, epilog=serve.EPILOG)(serve.serve)
app.command("train", no_args_is_help=True, epilog=train.EPILOG)(train.train)
