"""`sigmascope lbm create-base`: make the model that LBM training starts from."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from sigmascope.cli import options
from sigmascope.cli.console import Console, leaving_on_sigterm, needs_extra, print_json, progress_bar
from sigmascope.units import MIB, counted, mebibytes, seconds

if TYPE_CHECKING:
    import torch

    from sigmascope.lbm.base import BaseCheck, BaseReport
    from sigmascope.lbm.config import LbmConfig

app = typer.Typer(rich_markup_mode="rich")
EPILOG = """Examples:

sigmascope lbm create-base --config_path config.yaml --save_path exact_base.ckpt

sigmascope lbm create-base --config_path config.yaml --save_path exact_base.safetensors
--backbone_signature sd_xl_base_1.0.safetensors --test_baseline
"""

FILES, MODEL, OUTPUT = "Files", "How to make it", "What to show"

KEEP = "backbone"
"""The value of --torch_dtype that keeps the backbone's dtype."""

PART = "denoiser."
"""The prefix of the LBM's own weights; names of dropped ones never had it."""


@dataclass(frozen=True, kw_only=True)
class CreateBaseOptions:
    """What `lbm create-base` takes."""

    config_path: Annotated[
        Path, options.flag("--config_path", "The model's YAML.", FILES, show_default=False)
    ]
    save_path: Annotated[
        Path,
        options.flag(
            "--save_path",
            "The .ckpt or .safetensors file to write; the other kind is written beside it. Existing files are replaced.",
            FILES,
            show_default=False,
        ),
    ]
    backbone_signature: Annotated[
        str | None,
        options.flag(
            "--backbone_signature",
            "The backbone: a diffusers folder, single-file SDXL checkpoint, or hub name in the local cache.",
            FILES,
            show_default="the config's",
        ),
    ] = None
    download: Annotated[
        bool,
        options.flag(
            "--download", "Download the backbone from the hub if its local cache does not have it.", FILES
        ),
    ] = False
    variant: Annotated[
        str | None,
        options.flag(
            "--variant",
            "Variant of the folder's or repository's files, such as fp16.",
            FILES,
            show_default="the plain files",
        ),
    ] = None
    torch_dtype: Annotated[
        str,
        options.flag(
            "--torch_dtype",
            "Dtype of the weights: float32, bf16 (LBM's own), fp16, or backbone to keep the backbone's.",
            MODEL,
        ),
    ] = "bf16"
    device: Annotated[
        str, options.device(MODEL, "Where --test_baseline runs: auto, cpu, cuda, cuda:1, mps or xpu.")
    ] = "auto"
    test_baseline: Annotated[
        bool,
        options.flag(
            "--test_baseline",
            "Load what was written, compare both files and translate one generated picture.",
            OUTPUT,
        ),
    ] = False
    as_json: Annotated[bool, options.as_json(OUTPUT)] = False
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Show every weight that was adapted or dropped.", rich_help_panel=OUTPUT
        ),
    ] = False


@app.command("create-base", no_args_is_help=True, epilog=EPILOG)
@options.option_groups
def create_base(options: CreateBaseOptions) -> None:
    """Make the exact base of an LBM from a text-to-image backbone.

    The backbone's UNet and VAE become an LBM with the config's architecture, as
    at the start of LBM training. The first convolution and the keys and values
    of attention are cut, or padded with zeros; add_embedding is dropped; all
    other weights are copied. A LoRA holds the difference between a fine-tuned
    LBM and this base. The config is saved beside the base for later commands.
    """
    with needs_extra("lbm"):
        from sigmascope.lbm.base import create_base as make_base
        from sigmascope.lbm.config import load_config
        from sigmascope.lbm.devices import resolve_device, resolve_dtype

    dtype = None if options.torch_dtype == KEEP else resolve_dtype(options.torch_dtype)
    device = resolve_device(options.device)
    config = load_config(options.config_path)
    with leaving_on_sigterm(), progress_bar("Creating base") as progress:
        report = make_base(
            options.config_path,
            options.save_path,
            backbone=options.backbone_signature,
            variant=options.variant,
            dtype=dtype,
            download=options.download,
            progress=progress,
        )
    baseline = _try_out(report, config, dtype, device) if options.test_baseline else None
    if options.as_json:
        tried = {"baseline": None if baseline is None else baseline.as_dict()}
        print_json(report.as_dict() | tried)
    else:
        _print(Console(), report, baseline, verbose=options.verbose)


def _try_out(
    report: "BaseReport", config: "LbmConfig", dtype: "torch.dtype | None", device: "torch.device"
) -> "BaseCheck":
    from sigmascope.lbm.base import check_base
    from sigmascope.lbm.devices import resolve_dtype

    with progress_bar("Testing base") as progress:
        return check_base(
            report.paths, config, dtype=dtype or resolve_dtype("float32"), device=device, progress=progress
        )


def _print(console: Console, report: "BaseReport", baseline: "BaseCheck | None", *, verbose: bool) -> None:
    console.print(Text.assemble(("Exact base: ", "bold"), report.paths[0].stem))
    console.print(_base_facts(report))
    if verbose:
        console.print(_changed_weights(report), soft_wrap=True)
    for path in (*report.paths, *filter(None, [report.config_path])):
        console.print(Text(f"Written: {path}", overflow="fold"))
    if baseline is not None:
        console.print(Text(_baseline_line(baseline), overflow="fold"))
    following = "sigmascope lora extract --base_model_path"
    console.print(Text(f"Next: {following} {report.paths[0]} --tuned_model_path ...", overflow="fold"))


def _base_facts(report: "BaseReport") -> Table:
    changes = Counter(weight.change for weight in report.adapted.values())
    dtypes = ", ".join(f"{count:,} in {name}" for name, count in report.dtypes.items())
    facts = {
        "Backbone": str(report.backbone),
        "Denoiser": f"{report.parameters:,} parameters, {report.modules} Linear and Conv2d layers",
        "Weights": f"{dtypes}; {mebibytes(report.nbytes / MIB)} MiB a file",
        "Adapted": ", ".join(f"{count} {change}" for change, count in changes.items()) or "none",
        "Dropped": ", ".join(name.removeprefix(PART) for name in report.dropped) or "none",
        "Time": seconds(report.seconds),
    }
    if report.outside:
        facts["Not read"] = ", ".join(
            f"{name} ({counted(count, 'tensor')})" for name, count in report.outside.items()
        )
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, Text(value))
    return table


def _changed_weights(report: "BaseReport") -> Text:
    """A line for every weight that changed, because names are longer than a table's columns."""
    lines = [
        f"  {key}: {_shape(weight.had)} -> {_shape(weight.shape)}, {weight.change}"
        for key, weight in report.adapted.items()
    ]
    lines += [
        f"  {name.removeprefix(PART)}: {_shape(shape)}, dropped" for name, shape in report.dropped.items()
    ]
    return Text("\n".join(lines), overflow="fold")


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def _baseline_line(baseline: "BaseCheck") -> str:
    width, height = baseline.size
    return (
        f"Tested: {baseline.compared:,} tensors equal in every file; loaded in {seconds(baseline.load_seconds)}; "
        f"a {width}×{height} picture in {seconds(baseline.inference_seconds)} ({baseline.dtype}, {baseline.device}), "
        f"finite, {baseline.source_psnr:.1f} dB from its source. The VAE alone: {baseline.vae_psnr:.1f} dB."
    )
