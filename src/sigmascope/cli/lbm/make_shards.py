"""`sigmascope lbm make-shards`: pairs of pictures as WebDataset shards to train on."""

from pathlib import Path
from typing import Annotated

import typer

from sigmascope.cli.lbm.make_shards_run import MakeShardsOptions, run_make_shards

EPILOG = """Examples:

sigmascope lbm make-shards my_pairs shards

sigmascope lbm make-shards my_pairs shards --keys source,target,mask --shard_size 500

sigmascope lbm make-shards shards --pocket_scenes 1000-1255 --light cool
"""

WHAT, WHERE = "What goes in", "Where it goes"


def make_shards(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="[FOLDER] OUT",
            help="The folder with the pairs (none with --pocket_scenes), and the folder for the shards.",
            show_default=False,
        ),
    ],
    keys: Annotated[
        str | None,
        typer.Option(
            "--keys",
            help="What every pair must have; by default source,target, and a mask where there is one.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    pocket_scenes: Annotated[
        str | None,
        typer.Option(
            "--pocket_scenes",
            help="Render these scenes of the pocket model instead, for example 1000-1255; those below 1000 are "
            "for judging.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    light: Annotated[
        str | None,
        typer.Option(
            "--light", help="With --pocket_scenes: the targets' light, cool or warm.", rich_help_panel=WHAT
        ),
    ] = None,
    shard_size: Annotated[
        int | None,
        typer.Option(
            "--shard_size",
            help="Pairs in a shard; by default 1000, with --pocket_scenes 128.",
            rich_help_panel=WHERE,
        ),
    ] = None,
    prefix: Annotated[
        str, typer.Option("--prefix", help="Shards are PREFIX-000000.tar and on.", rich_help_panel=WHERE)
    ] = "train",
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace all shards of that name.", rich_help_panel=WHERE),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was made as JSON on stdout.")] = False,
) -> None:
    """Make WebDataset shards of pairs of pictures.

    Two layouts are known: [bold]a_source.png[/bold] beside [bold]a_target.png[/bold], or
    [bold]source/a.png[/bold] and [bold]target/a.png[/bold]. Pictures go in as
    they are, after each was decoded once. Files that belong to no pair are named.
    """
    run_make_shards(
        MakeShardsOptions(
            paths=tuple(paths),
            keys=keys,
            pocket_scenes=pocket_scenes,
            light=light,
            shard_size=shard_size,
            prefix=prefix,
            overwrite=overwrite,
            as_json=as_json,
        )
    )
