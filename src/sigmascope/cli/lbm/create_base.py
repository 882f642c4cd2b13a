"""`sigmascope lbm create-base`: make the model that LBM training starts from."""

from pathlib import Path
from typing import Annotated

import typer

from sigmascope.cli.lbm import options
from sigmascope.cli.lbm.create_base_run import CreateBaseOptions, run_create_base

EPILOG = """Examples:

sigmascope lbm create-base --config_path config.yaml --save_path exact_base.ckpt

sigmascope lbm create-base --config_path config.yaml --save_path exact_base.safetensors
--backbone_signature sd_xl_base_1.0.safetensors --test_baseline
"""

FILES, MODEL, OUTPUT = "Files", "How to make it", "What to show"


def create_base(
    config_path: Annotated[
        Path,
        typer.Option("--config_path", help="YAML of the model.", show_default=False, rich_help_panel=FILES),
    ],
    save_path: Annotated[
        Path,
        typer.Option(
            "--save_path",
            help="Where to write, .ckpt or .safetensors: the other is written beside it. Replaced when there.",
            show_default=False,
            rich_help_panel=FILES,
        ),
    ],
    backbone_signature: Annotated[
        str | None,
        typer.Option(
            "--backbone_signature",
            help="Diffusers folder, single-file SDXL checkpoint, or hub name to start from.",
            show_default="the config's",
            rich_help_panel=FILES,
        ),
    ] = None,
    variant: Annotated[
        str | None,
        typer.Option(
            "--variant",
            help="Of the folder's or repository's files, such as fp16.",
            show_default="the plain files",
            rich_help_panel=FILES,
        ),
    ] = None,
    torch_dtype: Annotated[
        str,
        typer.Option(
            "--torch_dtype",
            help="Of the weights: float32, bf16 (LBM's own), fp16, or backbone to keep the backbone's.",
            rich_help_panel=MODEL,
        ),
    ] = "bf16",
    device: Annotated[
        str, options.device(MODEL, "Where --test_baseline runs: auto, cpu, cuda, cuda:1, mps or xpu.")
    ] = "auto",
    test_baseline: Annotated[
        bool,
        typer.Option(
            "--test_baseline",
            help="Load what was written, compare both files and translate one generated picture.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole report as JSON.", rich_help_panel=OUTPUT)
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Show every weight that was adapted or dropped.", rich_help_panel=OUTPUT
        ),
    ] = False,
) -> None:
    """Make the exact base of an LBM from a text-to-image backbone.

    The backbone's UNet and VAE become an LBM with the config's architecture, as
    LBM training starts: the first convolution and the attentions' keys and
    values are cut or filled with zeros, add_embedding is dropped, all other
    weights are taken over. A fine-tuned LBM minus this base is what its LoRA
    holds. The config is put beside the base, where later commands find it.
    """
    run_create_base(
        CreateBaseOptions(
            config_path=config_path,
            save_path=save_path,
            backbone_signature=backbone_signature,
            variant=variant,
            torch_dtype=torch_dtype,
            device=device,
            test_baseline=test_baseline,
            as_json=as_json,
            verbose=verbose,
        )
    )
