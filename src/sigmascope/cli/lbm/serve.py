"""`sigmascope lbm serve`: a page on which to try a model and its LoRA."""

from pathlib import Path
from typing import Annotated

import typer

from sigmascope.cli.extras import needs_extra
from sigmascope.cli.lbm import options
from sigmascope.cli.lbm.serve_run import run_serve

EPILOG = (
    "Examples: sigmascope lbm serve --pocket\n\n"
    "sigmascope lbm serve --base_model_path base.safetensors --lora_path my_lora.safetensors --port 8080"
)

MODEL, ADDRESS, OUTPUT = "Model", "Address", "What to show"


def serve(
    base_model_path: Annotated[Path | None, options.base_model_path(MODEL)] = None,
    lora_path: Annotated[
        Path | None,
        typer.Option("--lora_path", help="A LoRA to compare with the base.", rich_help_panel=MODEL),
    ] = None,
    config_path: Annotated[Path | None, options.config_path(MODEL)] = None,
    pocket: Annotated[
        bool,
        typer.Option(
            "--pocket",
            help="Serve the small model that ships with Sigmascope, with a LoRA extracted at rank 8.",
            rich_help_panel=MODEL,
        ),
    ] = False,
    torch_dtype: Annotated[str, options.torch_dtype(MODEL)] = "float32",
    device: Annotated[str, options.device(MODEL)] = "auto",
    tile_size: Annotated[int | None, options.tile_size(MODEL)] = None,
    resolution: Annotated[
        int | None,
        typer.Option(
            "--resolution",
            help="Side of the square bucket; by default the config's (256 with --pocket).",
            rich_help_panel=MODEL,
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            "--host",
            help="Interface to bind to. Others than loopback let anyone in.",
            rich_help_panel=ADDRESS,
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", help="0 takes any that is free.", rich_help_panel=ADDRESS)
    ] = 7860,
    open_browser: Annotated[
        bool,
        typer.Option(
            "--open/--no_open", help="Open the page in the browser when it is ready.", rich_help_panel=OUTPUT
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the address as one line of JSON when it is ready.", rich_help_panel=OUTPUT
        ),
    ] = False,
) -> None:
    """Show a page to try a model and its LoRA on: base and result side by side, with what each took.

    Upload a picture, move the LoRA's strength, and see what changes. Pictures and
    results stay in memory; nothing is written to disk. Ctrl-C ends it.
    """
    with needs_extra("ui"):
        from sigmascope.lbm.serving.models import ModelOptions

    run_serve(
        ModelOptions(
            base_model_path=base_model_path,
            lora_path=lora_path,
            config_path=config_path,
            pocket=pocket,
            torch_dtype=torch_dtype,
            device=device,
            tile_size=tile_size,
            resolution=resolution,
        ),
        host=host,
        port=port,
        open_browser=open_browser,
        as_json=as_json,
    )
