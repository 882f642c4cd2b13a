"""`sigmascope compare-tensors`: do two files or folders of tensors agree, and if not, where and why."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from sigmascope.cli.compare_tensors_tables import print_comparison
from sigmascope.cli.progress import progress_bar
from sigmascope.errors import CheckpointError, ConfigError, SigmascopeError, WriteError

if TYPE_CHECKING:
    from sigmascope.analysis.dump_results import DumpComparison, RunComparison

EPILOG = """Examples:

sigmascope compare-tensors comfyui.safetensors diffusers.safetensors
--name positive.0.cond=prompt_embeds --picture tokens.svg

sigmascope compare-tensors runs/before_lora runs/after_lora --json
"""

BEYOND_TOLERANCE = 1
TROUBLE = 2
"""Exit code of every error, so that a script can tell it from a difference, as with `diff`."""

_PICTURES = (".svg", ".png")


def compare_tensors(
    a: Annotated[
        Path, typer.Argument(help="The reference: a dump, or a folder of them.", show_default=False)
    ],
    b: Annotated[Path, typer.Argument(help="What is compared with it.", show_default=False)],
    name: Annotated[
        list[str] | None,
        typer.Option(
            "--name", help="Tensor to compare, or A's name=B's name; again for more.", show_default="all"
        ),
    ] = None,
    rtol: Annotated[
        float | None,
        typer.Option(
            "--rtol", help="Allowed difference, relative to the value.", show_default="by dtype", min=0
        ),
    ] = None,
    atol: Annotated[
        float | None,
        typer.Option("--atol", help="Allowed absolute difference.", show_default="by dtype", min=0),
    ] = None,
    token_axis: Annotated[
        int | None,
        typer.Option("--token_axis", help="Axis of the tokens.", show_default="1 of 3 axes, 0 of 2"),
    ] = None,
    any_layout: Annotated[
        bool,
        typer.Option("--any_layout", help="Tensors that agree once transposed, padded, … agree."),
    ] = False,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Draw the errors by token into this .svg or .png.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show details of every tensor.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Compare dumped tensors: where do two pipelines begin to differ, and is it rounding?

    Verdicts: identical, rounding (the dtypes explain it), close (a lower
    precision inside would), different. The exit code is 0 up to close, 1 for
    different values or another layout, 2 for an error.
    """
    try:
        _check_picture(picture, (a, b))
        comparison = _compare(a, b, _names(name), (rtol, atol, token_axis))
        if picture is not None:
            from sigmascope.cli.compare_tensors_picture import save_token_picture

            save_token_picture(picture, comparison, f"{a.name} against {b.name}")
    except SigmascopeError as error:
        error.exit_code = TROUBLE
        raise
    if as_json:
        typer.echo(json.dumps({"path_a": str(a), "path_b": str(b), **comparison.as_dict()}, indent=2))
    else:
        print_comparison(Console(), comparison, (a, b), verbose=verbose)
        if picture is not None:
            Console().print(f"Picture: {picture}", markup=False, highlight=False)
    if not (comparison.agrees and (any_layout or comparison.same_layout)):
        raise typer.Exit(BEYOND_TOLERANCE)


def _compare(
    a: Path, b: Path, names: dict[str, str], asked: tuple[float | None, float | None, int | None]
) -> "DumpComparison | RunComparison":
    from sigmascope.analysis.tensors import Options, compare_dumps, compare_runs
    from sigmascope.checkpoints.dump_folder import TensorDumps
    from sigmascope.checkpoints.paths import is_folder
    from sigmascope.checkpoints.tensor_dumps import open_tensors

    options = Options(*asked)
    folders = [is_folder(path) for path in (a, b)]
    if folders[0] != folders[1]:
        folder, file = (a, b) if folders[0] else (b, a)
        raise ConfigError(
            f"{folder} is a folder and {file} is none.", hint="Give two files, or two folders of dumps."
        )
    with progress_bar("Comparing") as progress:
        if all(folders):
            runs = [TensorDumps(path) for path in (a, b)]
            for run in runs:
                if not run.index:
                    raise CheckpointError(
                        run.folder, "holds no dump.", hint="Name the folder of a run's dumps."
                    )
            return compare_runs(runs[0], runs[1], options, names=names, progress=progress)
        with ExitStack() as stack:
            dumps = [stack.enter_context(open_tensors(path)) for path in (a, b)]
            return compare_dumps(dumps[0], dumps[1], options, names=names, progress=progress)


def _names(asked: list[str] | None) -> dict[str, str]:
    """A's name to B's.

    Raises:
        ConfigError: A side is empty, or a name of A's comes twice.
    """
    names: dict[str, str] = {}
    for text in asked or ():
        first, equals, second = text.partition("=")
        second = second if equals else first
        if not first or not second:
            raise ConfigError(
                f"--name {text!r} lacks a name.", hint="Write --name NAME or --name A_NAME=B_NAME."
            )
        if first in names:
            raise ConfigError(f"--name {first} is given twice.", hint="Give each name of A once.")
        names[first] = second
    return names


def _check_picture(path: Path | None, inputs: tuple[Path, Path]) -> None:
    """Refuse a place that a picture cannot go to, before the work.

    Raises:
        ConfigError: It is named neither `.svg` nor `.png`, or is an input.
        WriteError: Its folder does not exist.
    """
    if path is None:
        return
    from sigmascope.checkpoints.paths import is_existing

    if path.suffix.lower() not in _PICTURES:
        raise ConfigError(
            f"--picture {path} is no SVG or PNG.", hint="Give a name that ends in .svg or .png."
        )
    if not is_existing(path.parent):
        raise WriteError(path, "its folder does not exist.", hint=f"Create {path.parent}.")
    if is_existing(path) and any(is_existing(other) and path.samefile(other) for other in inputs):
        raise ConfigError(f"--picture {path} is an input.", hint="Give the name of a new file.")
