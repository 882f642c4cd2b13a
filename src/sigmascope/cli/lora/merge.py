"""`sigmascope lora merge`, `lora resize` and `lora convert`: one LoRA from others.

`merge` joins several into one LoRA or into a checkpoint, `resize` changes ranks, `convert` changes the format.
"""

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sigmascope.cli.console import (
    Console,
    counts,
    facts,
    findings,
    layer,
    listed,
    number,
    percent,
    plain,
    print_json,
    print_loads,
    print_written,
    progress_bar,
    span,
    table,
    title,
)
from sigmascope.cli.options import (
    AsJson,
    Format,
    Precision,
    ResizeFlags,
    Ridge,
    SavePrecision,
    SaveTo,
    Statistics,
    Verbose,
    found_model,
    numbers_in,
    option_groups,
)
from sigmascope.errors import ConfigError
from sigmascope.lora.families import FAMILIES
from sigmascope.lora.format_names import FormatName

if TYPE_CHECKING:
    from sigmascope.lora.checkpoint_merge import CheckpointMergeReport, MergedTensor
    from sigmascope.lora.convert import ConversionReport
    from sigmascope.lora.merge import MergeMethod
    from sigmascope.lora.resize import InputLora, ReductionReport, ResizedModule


_LEFT_OUT_WORDS = {"excluded": "excluded", "rank_0": "no rank", "no_change": "no change"}


app = typer.Typer(rich_markup_mode="rich")
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


@app.command("merge", epilog=EPILOG)
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
            "--weights",
            metavar="<numbers>",
            help="Strength of each LoRA, such as 0.7,0.3.",
            show_default="1 each",
        ),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(
            "--into",
            help="Checkpoint to merge into; --save_to then names the merged checkpoint.",
            show_default=False,
            callback=found_model,
        ),
    ] = None,
    method: Annotated[
        Method,
        typer.Option(
            "--method",
            metavar="<name>",
            help="linear: weighted sum. ties: the largest values, all with one sign, chosen before the weights apply "
            "(ties_mergekit: after). dare: random values, rescaled.",
        ),
    ] = Method.LINEAR,
    density: Annotated[
        float | None,
        typer.Option("--density", help="Share of the values that ties or dare keeps.", show_default="0.5"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Seed of dare's random choice.", show_default="0")
    ] = None,
    ranks: ResizeFlags,
    statistics: Statistics = None,
    ridge: Ridge = 1e-3,
    save_precision: SavePrecision = None,
    lora_format: Format = None,
    base_model_path: Annotated[
        Path | None,
        typer.Option(
            "--base_model_path",
            help="For DoRA: the base model, on which its change depends.",
            show_default=False,
            callback=found_model,
        ),
    ] = None,
    allow_unmatched: Annotated[
        bool,
        typer.Option(
            "--allow_unmatched",
            help="With --into: skip any module that the checkpoint lacks, instead of refusing. Layers that only other variants of "
            "the model have are skipped with a warning in any case.",
        ),
    ] = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Merge LoRAs into one LoRA, or into a checkpoint.

    Formats may differ. The weighted sum of LoRAs is exact: its rank is the sum
    of their ranks, unless you give a rank option. In a checkpoint, changes are
    added in float32 and rounded once; all other weights are copied bit for bit.
    """
    plan = ranks.plan()
    strengths = None if weights is None else numbers_in("--weights", weights)
    how = _method(method, density, seed)
    if into is not None:
        for_loras = {
            "--save_precision": save_precision,
            "--format": lora_format,
            "--base_model_path": base_model_path,
            "a rank option": plan,
            "--statistics": statistics,
        }
        _refuse(
            [name for name, value in for_loras.items() if value is not None], "LoRAs that become one LoRA"
        )
        _into(loras, into, save_to, strengths, how, allow_unmatched, verbose=verbose, as_json=as_json)
        return
    _refuse(["--allow_unmatched"] if allow_unmatched else [], "--into")
    from sigmascope.lora.merge import CombineOptions
    from sigmascope.pipeline.lora_loading import merge_lora_files

    options = CombineOptions(
        weights=strengths,
        method=how,
        plan=plan,
        save_precision=None if save_precision is None else save_precision.value,
        format=lora_format,
        base=base_model_path,
        statistics=statistics,
        ridge=ridge,
    )
    with progress_bar("Merging") as progress:
        report = merge_lora_files(loras, save_to, options, progress=progress)
    if as_json:
        print_json(report.as_dict())
    else:
        print_reduction(Console(), "LoRA merge", report, verbose=verbose)


def _method(method: Method, density: float | None, seed: int | None) -> "MergeMethod":
    from sigmascope.lora.merge import MergeMethod

    if density is not None and method is Method.LINEAR:
        raise ConfigError("--density has no effect on a weighted sum.", hint="Add --method ties or dare.")
    if seed is not None and method is not Method.DARE:
        raise ConfigError("--seed has no effect: this merge is not random.", hint="Add --method dare.")
    return MergeMethod(method.value, 0.5 if density is None else density, seed or 0)


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
    from sigmascope.lora.checkpoint_merge import merge_into_checkpoint

    with progress_bar("Merging") as progress:
        report = merge_into_checkpoint(
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
        print_checkpoint_merge(Console(), report, verbose=verbose)


def print_checkpoint_merge(console: Console, report: "CheckpointMergeReport", *, verbose: bool) -> None:
    """Show what changed in the checkpoint, and how much rounding lost."""
    console.print(title("LoRA merge", report.checkpoint.name))
    console.print(facts(_checkpoint_merge_facts(report)))
    if report.changes_nothing:
        zeros = (
            "each has the weight 0"
            if all(lora.weight == 0 for lora in report.inputs)
            else "all changes are zero"
        )
        console.print(
            Text(
                f"The merge changes nothing: {zeros}. The weights are those of {report.into}.", style="yellow"
            )
        )
    shown = report.tensors if verbose else report.most_lost
    if shown:
        console.print(
            _baked_tensor_table("Every changed tensor" if verbose else "Most lost to rounding", shown)
        )
    for position, names in sorted((*report.not_in_variant.items(), *report.unmatched.items())):
        listed(console, f"Not in the checkpoint, from {report.inputs[position].path.name}", names)
    for position, keys in report.unused_keys.items():
        listed(console, f"Keys that belong to no module, in {report.inputs[position].path.name}", keys)
    skipped = [f"{name} ({reason})" for name, reason in report.skipped.items()]
    listed(console, "In the old file only", skipped, style="cyan")
    console.print(findings(report.findings))
    print_written(console, report.checkpoint, report.file_bytes)


def _checkpoint_merge_facts(report: "CheckpointMergeReport") -> list[tuple[str, RenderableType | None]]:
    return [
        ("Into", plain(report.into)),
        ("LoRAs", _inputs(report.inputs)),
        ("Method", plain(report.method) if len(report.inputs) > 1 else None),
        ("Tensors changed", f"{len(report.tensors)} ({report.copied} copied bit for bit)"),
        ("Strength ‖ΔW‖", number(report.change_norm)),
        ("Energy kept", percent(report.kept_energy) if report.not_in_variant or report.unmatched else None),
        ("Lost to rounding", percent(report.lost_share)),
        ("Arrives", _arrives(report)),
        ("Stored as", ", ".join(dict.fromkeys(tensor.stored for tensor in report.tensors)) or None),
        (
            "Scales made anew",
            str(anew) if (anew := sum(one.has_new_scale for one in report.tensors)) else None,
        ),
        ("Time", f"{report.seconds:.1f} s"),
    ]


def _arrives(report: "CheckpointMergeReport") -> str | None:
    from sigmascope.units import with_noise

    share, noise = report.arrival.share, report.arrival.noise
    return (
        None
        if share is None or noise is None
        else f"{percent(share)}, {with_noise(noise, f'{percent(noise)} of')}"
    )


def _baked_tensor_table(heading: str, tensors: Sequence["MergedTensor"]) -> Table:
    made = table("Tensor", "Weight", "Change", "Lost", title=heading)
    for tensor in tensors:
        made.add_row(
            layer(tensor.name),
            number(tensor.weight_norm),
            number(tensor.change_norm),
            percent(tensor.lost_share),
        )
    return made


RESIZE_EPILOG = """Examples:

sigmascope lora resize big.safetensors small.safetensors --rank 16 --conv_rank 8

sigmascope lora resize big.safetensors small.safetensors --max_size 50MB
"""


@app.command("resize", epilog=RESIZE_EPILOG)
@option_groups
def resize(
    *,
    lora: Annotated[Path, typer.Argument(metavar="IN", help="LoRA of any format.", show_default=False)],
    save_to: Annotated[
        Path, typer.Argument(metavar="OUT", help="The .safetensors file to write.", show_default=False)
    ],
    ranks: ResizeFlags,
    statistics: Statistics = None,
    ridge: Ridge = 1e-3,
    save_precision: SavePrecision = None,
    lora_format: Format = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Change a LoRA's rank, without the models it was made from.

    Every layer gets the closest change of its new rank. The errors shown are
    those of the stored factors. Give a rank, a method that chooses ranks from
    singular values, or a size or error for the whole file.
    """
    plan = ranks.plan()
    if plan is None:
        raise ConfigError(
            "no rank is given.",
            hint="Give --rank 16, --rank_method energy:0.95, --max_size 50MB, or more.",
        )
    from sigmascope.pipeline.lora_loading import resize_lora

    with progress_bar("Resizing") as progress:
        report = resize_lora(
            lora,
            save_to,
            plan,
            save_precision=None if save_precision is None else save_precision.value,
            format=lora_format,
            statistics=statistics,
            ridge=ridge,
            progress=progress,
        )
    if as_json:
        print_json(report.as_dict())
    else:
        print_reduction(Console(), "LoRA resize", report, verbose=verbose)


def print_reduction(console: Console, what: str, report: "ReductionReport", *, verbose: bool) -> None:
    """Show the new ranks and errors of each block or module, the totals, and what is left out."""
    console.print(title(what, report.lora.name))
    console.print(_reduced_block_table(report))
    if verbose:
        console.print(_reduced_module_table(report.modules))
    console.print(facts(_reduction_facts(report)))
    gone = [f"{module.name} ({_LEFT_OUT_WORDS[module.left_out or 'rank_0']})" for module in report.left_out]
    listed(console, "Left out", gone)
    listed(console, "Written as they are", report.carried, style="cyan")
    if report.method == "linear":
        listed(console, "Formed and decomposed (more than up and down factors)", report.formed, style="cyan")
    console.print(findings(report.findings))
    print_written(console, report.lora, report.file_bytes)
    print_loads(console, report.loads)


def _reduced_block_table(report: "ReductionReport") -> Table:
    made = table("Block", "Modules", "Old rank", "Rank", "Energy", "Error")
    for block in report.blocks:
        made.add_row(
            plain(block.name),
            f"{block.kept}/{block.modules}",
            span(block.old_ranks),
            span(block.ranks),
            percent(block.kept_energy),
            percent(block.relative_error),
        )
    return made


def _reduced_module_table(modules: Sequence["ResizedModule"]) -> Table:
    made = table("Layer", "Old rank", "Rank", "Energy", "Error")
    for module in modules:
        made.add_row(
            layer(module.name),
            "-" if module.old_rank is None else str(module.old_rank),
            str(module.rank),
            percent(module.kept_energy),
            percent(module.relative_error),
        )
    return made


def _reduction_facts(report: "ReductionReport") -> list[tuple[str, RenderableType | None]]:
    from sigmascope.units import format_size

    size = f"{format_size(report.bytes_before)} before, {format_size(report.file_bytes)} now"
    several = len(report.inputs) > 1
    return [
        ("LoRAs", _inputs(report.inputs) if several or report.inputs[0].weight != 1.0 else None),
        ("Method", plain(report.method) if several else None),
        ("Ranks asked for", plain(_asked(report.plan))),
        ("Ranks now", counts(report.ranks)),
        ("Energy kept", _kept(report)),
        ("Error, overall", percent(report.relative_error)),
        ("Error, weighted", None if report.weighted_error is None else percent(report.weighted_error)),
        ("Format", f"{report.format}, {report.dtype}"),
        ("Size", size),
        ("Time", f"{report.seconds:.1f} s"),
    ]


def _asked(plan: str) -> str:
    """A plan in words where its text is JSON, as of a size or an error for the whole file."""
    from sigmascope.units import format_size

    if not plan.startswith("{"):
        return plan
    said = {key: value for key, value in json.loads(plan).items() if value not in (None, [], {})}
    size, error = said.pop("max_size", None), said.pop("max_error", None)
    parts = [] if size is None else [f"a file of at most {format_size(size)}"]
    parts += [] if error is None else [f"an error of at most {percent(error)}"]
    return ", ".join([*parts, *(f"{key} {value}" for key, value in said.items())])


def _kept(report: "ReductionReport") -> str:
    return _of_what_was_read(report.kept_energy, len(report.unread))


def _of_what_was_read(share: float | None, unread: int) -> str:
    from sigmascope.units import counted

    kept = percent(share)
    return (
        f"{kept} of what was read; {counted(unread, 'tensor')} of the input belong to no module"
        if unread
        else kept
    )


def _inputs(inputs: Sequence["InputLora"]) -> Group:
    return Group(*(Text(f"{lora.weight:g} × ").append_text(plain(lora.path)) for lora in inputs))


CONVERT_EPILOG = """Examples:

sigmascope lora convert my_lora.safetensors my_lora_kohya.safetensors --format kohya

sigmascope lora convert civitai.safetensors for_diffusers.safetensors --format peft

sigmascope lora convert lycoris.safetensors for_diffusers.safetensors --format peft --rank 32
"""


@app.command("convert", epilog=CONVERT_EPILOG)
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="The LoRA to convert, in any format.")],
    target: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="The .safetensors file to write. An existing file is replaced."),
    ],
    target_format: Annotated[
        FormatName,
        typer.Option(
            "--format",
            metavar="<name>",
            help="kohya: lora_unet_*, for ComfyUI, Forge and sd-scripts. peft: lora_A/lora_B, for diffusers. "
            "comfyui: diffusion_model.*. native: the model's own names, as LBM has them.",
            show_default=False,
        ),
    ],
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            help="The model that the LoRA is for. It resolves flattened names, gives the names for native, and the weights "
            "that OFT, HRA and the like change.",
            callback=found_model,
        ),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(
            "--family",
            help=f"The model's family, if the LoRA does not show it: {', '.join(FAMILIES)}.",
        ),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(
            "--prefix",
            help="Prefix of the denoiser's names in peft and native: unet, transformer, denoiser, or none.",
        ),
    ] = None,
    save_precision: Annotated[
        Precision | None,
        typer.Option("--save_precision", help="Dtype of the stored factors. By default it stays as it is."),
    ] = None,
    drop_unsupported: Annotated[
        bool,
        typer.Option("--drop_unsupported", help="Leave out and list what the format cannot hold."),
    ] = False,
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank",
            metavar="<rank>",
            help="Approximate what the format cannot hold (peft: LoHa, LoKr, whole weights; with --model also OFT, HRA, …) by "
            "factors of this rank. 9999: full rank.",
        ),
    ] = None,
    statistics: Statistics = None,
    ridge: Ridge = 1e-3,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Convert a LoRA to the format of another tool.

    The change of every layer stays the same, unless --rank approximates what the
    format cannot hold. Alpha becomes the rank, and the scale is multiplied into
    the up factor. The header keeps all entries that are still true.
    """
    from sigmascope.lora.writer import STORAGE_DTYPES
    from sigmascope.pipeline.lora_loading import convert_lora

    with progress_bar("Converting") as progress:
        report = convert_lora(
            source,
            target,
            target_format,
            model=model,
            family=family,
            prefix="" if prefix == "none" else prefix,
            dtype=None if save_precision is None else STORAGE_DTYPES[save_precision.value],
            drop_unsupported=drop_unsupported,
            rank=rank,
            statistics=statistics,
            ridge=ridge,
            progress=progress,
        )
    if as_json:
        print_json(report.as_dict())
    else:
        _print_conversion(Console(), report)


def _print_conversion(console: Console, report: "ConversionReport") -> None:
    console.print(title("LoRA conversion", report.source.name))
    console.print(facts(_conversion_facts(report)))
    listed(console, "Left out", [f"{module.name} ({module.reason})" for module in report.left_out])
    console.print(findings(report.findings))
    print_written(console, report.target, report.file_bytes)
    print_loads(console, report.loads)


def _conversion_facts(report: "ConversionReport") -> list[tuple[str, RenderableType | None]]:
    widened = f"{len(report.widened)} (their scale would have rounded them)"
    return [
        ("Format", f"{report.source_format} to {report.format}"),
        ("Model family", _told_family(report)),
        ("Modules", str(report.modules)),
        ("Other changes", str(report.changes) if report.changes else None),
        ("Energy kept", _converted_energy(report) if report.left_out else None),
        ("Made plain factors", _factored(report) if report.factored else None),
        ("Widened to float32", widened if report.widened else None),
        ("For", Text(_usable_in(report))),
    ]


def _converted_energy(report: "ConversionReport") -> str:
    return _of_what_was_read(report.kept_energy, len(report.unread))


def _told_family(report: "ConversionReport") -> str:
    return f"{report.family} (a guess: {report.family_doubt})" if report.family_doubt else report.family


def _factored(report: "ConversionReport") -> str:
    ranks = [module.rank for module in report.factored]
    error = f"error {percent(report.relative_error)}"
    if report.weighted_error is not None:
        error += f", weighted {percent(report.weighted_error)}"
    return f"{len(ranks)}, of rank {span((min(ranks), max(ranks)))}, {error}"


def _usable_in(report: "ConversionReport") -> str:
    from sigmascope.lora.formats import format_named

    diffusers = None if report.loads is None else report.loads.stated.hosts.get("diffusers")
    if report.family == "unknown" and report.format != "native":
        return "unverified: no host is known to take names of an unknown family"
    in_diffusers = report.format == "kohya" and diffusers is not None and diffusers.taken == diffusers.modules
    return format_named(report.format).used_by + (
        "; diffusers through pipeline.load_lora_weights(...)" if in_diffusers else ""
    )
