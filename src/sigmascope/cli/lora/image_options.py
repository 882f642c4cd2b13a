"""`sigmascope lora validate --images`: its options and what it does."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sigmascope.cli.extras import needs_extra
from sigmascope.cli.progress import progress_bar
from sigmascope.errors import ConfigError

if TYPE_CHECKING:
    from sigmascope.lbm.image_errors import ImageReport

_PANEL = "On pictures (LBM only)"

Images = Annotated[
    Path | None,
    typer.Option(
        "--images",
        metavar="<folder>",
        help="Also translate its pictures with base, base + LoRA and tuned model, and compare the results.",
        rich_help_panel=_PANEL,
    ),
]
ConfigPath = Annotated[
    Path | None,
    typer.Option(
        "--config_path",
        help="YAML of the models.",
        show_default="beside each model",
        rich_help_panel=_PANEL,
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(
        "--num_inference_steps", help="Steps along the bridge.", show_default="1", rich_help_panel=_PANEL
    ),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", help="Of the noise, the same for all.", show_default="0", rich_help_panel=_PANEL),
]
Resolution = Annotated[
    int | None,
    typer.Option(
        "--resolution",
        help="Side of the square working size.",
        show_default="the config's",
        rich_help_panel=_PANEL,
    ),
]
TorchDtype = Annotated[
    str | None,
    typer.Option(
        "--torch_dtype",
        help="Of the models: float32, bf16, fp16.",
        show_default="float32",
        rich_help_panel=_PANEL,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", help="Where the models run: auto, cpu, cuda.", show_default="auto", rich_help_panel=_PANEL
    ),
]


@dataclass(frozen=True, slots=True)
class ImageFlags:
    """The flags as given; None where they were not."""

    images: Path | None = None
    config_path: Path | None = None
    num_inference_steps: int | None = None
    seed: int | None = None
    resolution: int | None = None
    torch_dtype: str | None = None
    device: str | None = None


def check_image_flags(flags: ImageFlags, models: Mapping[str, Path]) -> None:
    """Refuse what cannot work before the weights are measured.

    Args:
        flags: As given.
        models: The base and the tuned model.

    Raises:
        ConfigError: Flags without --images, values that make no sense, no picture in the folder, a model that
            needs more than pictures, or the extra is not installed.
    """
    if flags.images is None:
        lonely = [name for name, value in asdict(flags).items() if value is not None]
        if lonely:
            raise ConfigError(f"--{lonely[0]} is for --images only.", hint="Add a folder, or leave it out.")
        return
    with needs_extra("lbm"):
        from sigmascope.lbm.bridge import bridge_sigmas
        from sigmascope.lbm.buckets import check_resolution
        from sigmascope.lbm.devices import resolve_device, resolve_dtype
        from sigmascope.lbm.image_validation import require_source_only
        from sigmascope.lbm.infer import SEEDS
        from sigmascope.lbm.picture_folder import find_pictures
    bridge_sigmas(1 if flags.num_inference_steps is None else flags.num_inference_steps)
    check_resolution(flags.resolution, "bucket")
    if flags.seed is not None and not 0 <= flags.seed < SEEDS:
        raise ConfigError(f"--seed: expected 0 to {SEEDS - 1}, got {flags.seed}.", hint="Leave it out for 0.")
    resolve_dtype(flags.torch_dtype or "float32")
    resolve_device(flags.device or "auto")
    require_source_only(tuple(models.values()), flags.config_path)
    find_pictures(flags.images)


def run_images(flags: ImageFlags, models: Mapping[str, Path], lora: Path) -> "ImageReport | None":
    """Compare the models on the folder's pictures, if there is one.

    Args:
        flags: As given.
        models: `base` and `tuned`.
        lora: The LoRA.
    """
    if flags.images is None:
        return None
    with needs_extra("lbm"):
        from sigmascope.lbm.devices import resolve_device, resolve_dtype
        from sigmascope.lbm.image_validation import ImageOptions, validate_images
    options = ImageOptions(
        num_inference_steps=1 if flags.num_inference_steps is None else flags.num_inference_steps,
        seed=0 if flags.seed is None else flags.seed,
        resolution=flags.resolution,
        dtype=resolve_dtype(flags.torch_dtype or "float32"),
        device=resolve_device(flags.device or "auto"),
    )
    with progress_bar("Translating") as progress:
        return validate_images(
            models["base"],
            models["tuned"],
            lora,
            flags.images,
            options,
            config=flags.config_path,
            progress=progress,
        )
