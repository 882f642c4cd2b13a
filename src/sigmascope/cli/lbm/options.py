"""Options that several commands of the group have, said once; each command shows them in a panel of its own."""

from typing import Any

import typer


def base_model_path(panel: str) -> Any:
    """`--base_model_path`: the LBM."""
    return typer.Option(
        "--base_model_path",
        help="LBM checkpoint: .safetensors, .ckpt, or a folder.",
        show_default=False,
        rich_help_panel=panel,
    )


def config_path(panel: str) -> Any:
    """`--config_path`: what the checkpoint is."""
    return typer.Option(
        "--config_path",
        help="The model's YAML; by default the one beside the checkpoint, else the full-size model.",
        rich_help_panel=panel,
    )


def torch_dtype(panel: str) -> Any:
    """`--torch_dtype`: what the model computes in."""
    return typer.Option("--torch_dtype", help="float32, bf16 or fp16.", rich_help_panel=panel)


def device(panel: str, help_text: str = "auto, cpu, cuda, cuda:1, mps or xpu.") -> Any:
    """`--device`: where the model computes."""
    return typer.Option("--device", help=help_text, rich_help_panel=panel)


def tile_size(panel: str) -> Any:
    """`--tile_size`: of the VAE's tiles."""
    return typer.Option(
        "--tile_size",
        help="Run the VAE in tiles of this many pixels: large pictures in little memory.",
        rich_help_panel=panel,
    )


def as_json(panel: str) -> Any:
    """`--json`: for programs."""
    return typer.Option("--json", help="Print the outcome as JSON on stdout.", rich_help_panel=panel)
