"""`sigmascope lbm`: make, train and run Latent Bridge Matching models. Commands of one subject share a module."""

import typer

from sigmascope.cli.groups import OnDemand, commands_on_demand

app = typer.Typer(
    cls=commands_on_demand(
        {
            "create-base": OnDemand(
                "sigmascope.cli.lbm.create_base",
                "Make the exact base of an LBM from a text-to-image backbone.",
            ),
            "infer": OnDemand(
                "sigmascope.cli.lbm.infer",
                "Translate a picture, with or without a LoRA, and record every stage.",
            ),
            "make-shards": OnDemand(
                "sigmascope.cli.lbm.train", "Make WebDataset shards from pairs of pictures."
            ),
            "serve": OnDemand(
                "sigmascope.cli.lbm.infer",
                "Serve a page to try a model and its LoRA: base and result side by side, with time and memory.",
            ),
            "train": OnDemand(
                "sigmascope.cli.lbm.train",
                "Train on pairs of pictures in WebDataset shards, and write LoRA files.",
            ),
        },
        imports_torch=True,
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@app.callback()
def group() -> None:
    """Translate pictures with a Latent Bridge Matching model, and make and train such models."""
