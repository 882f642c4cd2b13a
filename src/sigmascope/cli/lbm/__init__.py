"""`sigmascope lbm`: make, train and run Latent Bridge Matching models. Commands of one subject share a module."""

import typer

from sigmascope.cli.options import commands_on_demand

app = typer.Typer(
    cls=commands_on_demand(
        {
            "create-base": "sigmascope.cli.lbm.create_base",
            "infer": "sigmascope.cli.lbm.infer",
            "make-shards": "sigmascope.cli.lbm.train",
            "serve": "sigmascope.cli.lbm.infer",
            "train": "sigmascope.cli.lbm.train",
        }
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@app.callback()
def group() -> None:
    """Translate pictures with a Latent Bridge Matching model, and make and train such models."""
