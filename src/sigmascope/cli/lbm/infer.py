"""`sigmascope lbm infer`: translate a picture with a Latent Bridge Matching model."""

from pathlib import Path
from typing import Annotated

import typer

from sigmascope.cli.lbm import options
from sigmascope.cli.lbm.infer_options import InferOptions
from sigmascope.cli.lbm.infer_run import run_infer

EPILOG = (
    "Example: sigmascope lbm infer --base_model_path base.safetensors --lora_path my_lora.safetensors "
    "--source_image in.jpg --output_path out.png --lora_scale 1.0 --verbose"
)

FILES, MODEL, OUTPUT = "Files", "How to run", "What to show"


def infer(
    base_model_path: Annotated[Path, options.base_model_path(FILES)],
    source_image: Annotated[
        Path,
        typer.Option(
            "--source_image", help="The picture to translate.", show_default=False, rich_help_panel=FILES
        ),
    ],
    output_path: Annotated[
        Path,
        typer.Option(
            "--output_path",
            help="Where to write: .png, .jpg or .webp.",
            show_default=False,
            rich_help_panel=FILES,
        ),
    ],
    lora_path: Annotated[
        Path | None, typer.Option("--lora_path", help="A LoRA to apply.", rich_help_panel=FILES)
    ] = None,
    config_path: Annotated[Path | None, options.config_path(FILES)] = None,
    conditioning: Annotated[
        list[str] | None,
        typer.Option(
            "--conditioning",
            help="KEY=PICTURE for each conditioning key of the config; repeatable.",
            rich_help_panel=FILES,
        ),
    ] = None,
    lora_scale: Annotated[
        float, typer.Option("--lora_scale", help="Strength, 0.0 to 2.0.", rich_help_panel=MODEL)
    ] = 1.0,
    merge: Annotated[
        bool,
        typer.Option(
            "--merge/--hot",
            help="Merge the LoRA into the weights in memory, or compute it beside them.",
            rich_help_panel=MODEL,
        ),
    ] = False,
    num_inference_steps: Annotated[
        int, typer.Option("--num_inference_steps", help="Steps along the bridge.", rich_help_panel=MODEL)
    ] = 1,
    torch_dtype: Annotated[str, options.torch_dtype(MODEL)] = "float32",
    device: Annotated[str, options.device(MODEL)] = "auto",
    size: Annotated[
        str,
        typer.Option(
            "--size",
            help="bucket (nearest aspect bucket), keep (the picture's own size), or WIDTHxHEIGHT.",
            rich_help_panel=MODEL,
        ),
    ] = "bucket",
    resolution: Annotated[
        int | None,
        typer.Option(
            "--resolution",
            help="Side of the square bucket (--size bucket); by default the config's.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    tile_size: Annotated[int | None, options.tile_size(MODEL)] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            help="Of the noise between steps; drawn and recorded if left out.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    run_path: Annotated[
        Path | None,
        typer.Option("--run_path", help="Save what was recorded, as JSON.", rich_help_panel=OUTPUT),
    ] = None,
    as_json: Annotated[bool, options.as_json(OUTPUT)] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Show time and memory of every stage.", rich_help_panel=OUTPUT),
    ] = False,
) -> None:
    """Translate a picture, with or without a LoRA, and record every stage.

    The result has the picture's own size. Without --seed, the seed that was drawn is in the record.
    """
    run_infer(
        InferOptions(
            base_model_path=base_model_path,
            source_image=source_image,
            output_path=output_path,
            lora_path=lora_path,
            config_path=config_path,
            conditioning=tuple(conditioning or ()),
            lora_scale=lora_scale,
            merge=merge,
            num_inference_steps=num_inference_steps,
            torch_dtype=torch_dtype,
            device=device,
            size=size,
            resolution=resolution,
            tile_size=tile_size,
            seed=seed,
            run_path=run_path,
            as_json=as_json,
            verbose=verbose,
        )
    )
