"""`sigmascope lora merge`: several LoRAs into one, or into a checkpoint."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from sigmascope.cli.console import print_json, progress_bar
from sigmascope.cli.lora.tables import print_bake, print_reduction
from sigmascope.cli.options import AsJson, Format, ResizeFlags, SavePrecision, SaveTo, Verbose, option_groups
from sigmascope.errors import ConfigError

if TYPE_CHECKING:
    from sigmascope.lora.merge_methods import MergeMethod

EPILOG = """Examples:

sigmascope lora merge a.safetensors b.safetensors --weights 0.7,0.3 --save_to both.safetensors --rank 32

sigmascope lora merge a.safetensors b.safetensors --into model.safetensors --save_to merged.safetensors
"""


class Method(StrEnum):
    """`--method` of a merge."""

    LINEAR = "linear"
    TIES = "ties"
    TIES_MERGEKIT = "ties_mergekit"
    DARE = "dare"


@option_groups
def merge(
    *,
    loras: Annotated[
        list[Path], typer.Argument(metavar="LORA", help="LoRAs of any format.", show_default=False)
    ],
    save_to: SaveTo,
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights", metavar="<numbers>", help="Strength of each: 0.7,0.3.", show_default="1 each"
        ),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(
            "--into", help="Checkpoint to merge into; --save_to is then one too.", show_default=False
        ),
    ] = None,
    method: Annotated[
        Method,
        typer.Option(
            "--method",
            metavar="<name>",
            help="linear: weighted sum. ties: largest values, one sign each, elected before the weights count "
            "(ties_mergekit: after). dare: random values, rescaled.",
        ),
    ] = Method.LINEAR,
    density: Annotated[
        float | None,
        typer.Option("--density", help="Share of the values that ties and dare keep.", show_default="0.5"),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of dare's choice.", show_default="0")] = None,
    ranks: ResizeFlags,
    save_precision: SavePrecision = None,
    lora_format: Format = None,
    base_model_path: Annotated[
        Path | None,
        typer.Option(
            "--base_model_path", help="Model, for DoRA: its change depends on it.", show_default=False
        ),
    ] = None,
    allow_unmatched: Annotated[
        bool,
        typer.Option(
            "--allow_unmatched", help="With --into: go on without modules that the checkpoint lacks."
        ),
    ] = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Merge LoRAs into one LoRA, or into a checkpoint.

    Formats may differ. The weighted sum of LoRAs is exact: its rank is the
    sum of their ranks, less with a rank option. Into a checkpoint the changes
    are added in float32 and rounded once; all else is copied bit for bit.
    """
    plan = ranks.plan()
    strengths, how = _parse_weights(weights), _method(method, density, seed)
    if into is not None:
        given = (save_precision, lora_format, base_model_path, plan)
        _refuse_for_checkpoints(*(value is not None for value in given))
        _into(loras, into, save_to, strengths, how, allow_unmatched, verbose=verbose, as_json=as_json)
        return
    _refuse(["--allow_unmatched"] if allow_unmatched else [], "--into")
    from sigmascope.lora.merge import CombineOptions, merge_loras

    options = CombineOptions(
        weights=strengths,
        method=how,
        plan=plan,
        save_precision=None if save_precision is None else save_precision.value,
        format=None if lora_format is None else lora_format.value,
        base=base_model_path,
    )
    with progress_bar("Merging") as progress:
        report = merge_loras(loras, save_to, options, progress=progress)
    if as_json:
        print_json(report.as_dict())
    else:
        print_reduction(Console(), "LoRA merge", report, verbose=verbose)


def _parse_weights(text: str | None) -> tuple[float, ...] | None:
    """Read `0.7,0.3`.

    Raises:
        ConfigError: A part is no number.
    """
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"--weights {text} are no numbers.", hint="Write one for each LoRA: --weights 0.7,0.3."
        ) from error


def _method(method: Method, density: float | None, seed: int | None) -> "MergeMethod":
    from sigmascope.lora.merge_methods import MergeMethod

    if density is not None and method is Method.LINEAR:
        raise ConfigError("--density has no effect on a weighted sum.", hint="Add --method ties or dare.")
    if seed is not None and method is not Method.DARE:
        raise ConfigError("--seed has no effect without chance.", hint="Add --method dare.")
    return MergeMethod(method.value, 0.5 if density is None else density, seed or 0)


def _refuse_for_checkpoints(*given: bool) -> None:
    names = ("--save_precision", "--format", "--base_model_path", "a rank option")
    _refuse(
        [name for name, is_there in zip(names, given, strict=True) if is_there], "LoRAs that become one LoRA"
    )


def _refuse(flags: list[str], what: str) -> None:
    if flags:
        raise ConfigError(f"{', '.join(flags)}: for {what} only.", hint="Leave it out.")


def _into(
    loras: list[Path],
    into: Path,
    save_to: Path,
    weights: tuple[float, ...] | None,
    method: "MergeMethod",
    allow_unmatched: bool,
    *,
    verbose: bool,
    as_json: bool,
) -> None:
    from sigmascope.lora.bake import bake_loras

    with progress_bar("Merging") as progress:
        report = bake_loras(
            loras,
            into,
            save_to,
            weights=weights,
            method=method,
            allow_unmatched=allow_unmatched,
            progress=progress,
        )
    if as_json:
        print_json(report.as_dict())
    else:
        print_bake(Console(), report, verbose=verbose)
