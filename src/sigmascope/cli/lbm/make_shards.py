"""`sigmascope lbm make-shards`: pairs of pictures as WebDataset shards to train on."""

import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from sigmascope.cli import options
from sigmascope.cli.console import needs_extra, print_json, progress_bar
from sigmascope.errors import ConfigError

if TYPE_CHECKING:
    from sigmascope.lbm.make_shards import SkippedFile, WrittenShard

EPILOG = """Examples:

sigmascope lbm make-shards my_pairs shards

sigmascope lbm make-shards my_pairs shards --keys source,target,mask --shard_size 500

sigmascope lbm make-shards shards --pocket_scenes 1000-1255 --light cool
"""

WHAT, WHERE = "What goes in", "Where it goes"

SHOWN = 10
"""Files left out that are named on the console; --json names all."""

MOST_WORKERS = 8


@dataclass(frozen=True, kw_only=True)
class MakeShardsOptions:
    """What `lbm make-shards` takes."""

    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="[FOLDER] OUT",
            help="The folder with the pairs (none with --pocket_scenes), and the folder for the shards.",
            show_default=False,
        ),
    ]
    keys: Annotated[
        str | None,
        typer.Option(
            "--keys",
            help="What every pair must have; by default source,target, and a mask where there is one.",
            rich_help_panel=WHAT,
        ),
    ] = None
    pocket_scenes: Annotated[
        str | None,
        typer.Option(
            "--pocket_scenes",
            help="Render these scenes of the pocket model instead, for example 1000-1255; those below 1000 are "
            "for judging.",
            rich_help_panel=WHAT,
        ),
    ] = None
    light: Annotated[
        str | None,
        typer.Option(
            "--light", help="With --pocket_scenes: the targets' light, cool or warm.", rich_help_panel=WHAT
        ),
    ] = None
    shard_size: Annotated[
        int | None,
        typer.Option(
            "--shard_size",
            help="Pairs in a shard; by default 1000, with --pocket_scenes 128.",
            rich_help_panel=WHERE,
        ),
    ] = None
    prefix: Annotated[
        str, typer.Option("--prefix", help="Shards are PREFIX-000000.tar and on.", rich_help_panel=WHERE)
    ] = "train"
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace all shards of that name.", rich_help_panel=WHERE),
    ] = False
    as_json: options.AsJson = False


@options.option_groups
def make_shards(options: MakeShardsOptions) -> None:
    """Make WebDataset shards of pairs of pictures.

    Two layouts are known: [bold]a_source.png[/bold] beside [bold]a_target.png[/bold], or
    [bold]source/a.png[/bold] and [bold]target/a.png[/bold]. Pictures go in as
    they are, after each was decoded once. Files that belong to no pair are named.
    """
    made = _make_from_folder(options) if options.pocket_scenes is None else _make_from_scenes(options)
    if options.as_json:
        print_json(made.as_dict())
    else:
        _report(made)


@dataclass(frozen=True)
class Made:
    """The shards, and what went into none."""

    shards: "list[WrittenShard]"
    left_out: "list[SkippedFile]"

    def as_dict(self) -> dict[str, object]:
        """As JSON values."""
        from sigmascope.lbm.make_shards import shard_pattern

        return {
            "train_shards": shard_pattern(self.shards),
            "samples": sum(shard.samples for shard in self.shards),
            "shards": [
                {"path": str(shard.path), "samples": shard.samples, "bytes": shard.nbytes}
                for shard in self.shards
            ],
            "left_out": [asdict(item) for item in self.left_out],
        }


def _make_from_folder(options: MakeShardsOptions) -> Made:
    with needs_extra("train"):
        from sigmascope.lbm.make_shards import (
            SHARD_SIZE,
            PairEncoder,
            ShardTarget,
            check_target,
            find_pairs,
            write_shards,
        )

    if len(options.paths) != 2:
        raise ConfigError(
            f"make-shards: expected FOLDER and OUT, got {len(options.paths)} paths.",
            hint="For example: sigmascope lbm make-shards my_pairs shards",
        )
    if options.light is not None:
        raise ConfigError("--light has no effect without --pocket_scenes.", hint="Leave it out.")
    folder, out = options.paths
    target = ShardTarget(
        out,
        options.prefix,
        SHARD_SIZE if options.shard_size is None else options.shard_size,
        options.overwrite,
    )
    check_target(target)
    keys, optional = _keys(options.keys)
    folder_pairs = find_pairs(folder, keys, optional)
    encoder = PairEncoder()
    with progress_bar("Reading pairs") as progress:
        written = write_shards(encoder.samples(folder_pairs.pairs, progress), target)
    if not written:
        first = encoder.left_out[0]
        raise ConfigError(
            f"{folder}: none of {len(folder_pairs.pairs)} pairs can be used (first {first.name}: {first.reason}).",
            hint="Check the pictures.",
        )
    return Made(written, [*folder_pairs.left_out, *encoder.left_out])


def _keys(text: str | None) -> tuple[list[str], list[str]]:
    if text is None:
        return ["source", "target"], ["mask"]
    keys = [key.strip() for key in text.split(",")]
    if len(keys) < 2:
        raise ConfigError(
            f"--keys: expected at least two, joined by commas, got {text!r}.",
            hint="For example --keys source,target,mask.",
        )
    return keys, []


def _make_from_scenes(options: MakeShardsOptions) -> Made:
    with needs_extra("train"):
        from sigmascope.lbm.make_shards import LIGHTS, POCKET_SHARD_SIZE, write_pocket_shards

    if len(options.paths) != 1:
        raise ConfigError(
            f"--pocket_scenes: expected OUT alone, got {len(options.paths)} paths.",
            hint="For example: sigmascope lbm make-shards shards --pocket_scenes 1000-1255",
        )
    if options.keys is not None:
        raise ConfigError(
            "--keys has no effect with --pocket_scenes.", hint="Leave it out: they have source and target."
        )
    light = options.light or "cool"
    if light not in LIGHTS:
        raise ConfigError(f"--light: expected {' or '.join(LIGHTS)}, got {light!r}.", hint="Use cool.")
    numbers = _scene_numbers(options.pocket_scenes or "")
    with progress_bar("Rendering") as progress:
        written = write_pocket_shards(
            options.paths[0],
            numbers,
            LIGHTS[light],
            shard_size=POCKET_SHARD_SIZE if options.shard_size is None else options.shard_size,
            prefix=options.prefix,
            overwrite=options.overwrite,
            workers=_workers(len(numbers)),
            progress=progress,
        )
    return Made(written, [])


def _scene_numbers(text: str) -> range:
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
    if last < first:
        raise ConfigError(
            f"--pocket_scenes: expected FIRST-LAST, got {text!r}.", hint="For example 1000-1255."
        )
    return range(first, last + 1)


def _workers(scenes: int) -> int:
    """Starting workers takes about as long as rendering a few dozen scenes."""
    return 1 if scenes < 64 else min(os.cpu_count() or 1, MOST_WORKERS)


def _report(made: Made) -> None:
    from sigmascope.lbm.make_shards import shard_pattern

    warnings = Console(stderr=True, highlight=False, soft_wrap=True)
    for item in made.left_out[:SHOWN]:
        warnings.print(f"[yellow]Left out:[/yellow] {escape(item.name)} {escape(item.reason)}")
    if len(made.left_out) > SHOWN:
        warnings.print(f"[yellow]and {len(made.left_out) - SHOWN} more[/yellow] (--json names all)")
    samples = sum(shard.samples for shard in made.shards)
    mb = sum(shard.nbytes for shard in made.shards) / 1024**2
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{samples} pairs in {len(made.shards)} shards, {mb:.1f} MB")
    console.print(f"train_shards: {escape(shard_pattern(made.shards))}")
