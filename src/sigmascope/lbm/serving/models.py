"""The model and the LoRA that the page serves, loaded once."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sigmascope.errors import ConfigError
from sigmascope.lbm.buckets import check_resolution
from sigmascope.lbm.devices import resolve_device, resolve_dtype
from sigmascope.lbm.infer import check_tile_size
from sigmascope.lbm.model import LbmModel, load_lbm
from sigmascope.lbm.pocket import BASE_PATH, CONFIG_PATH, TUNED_PATH
from sigmascope.lora.apply import AttachedLora, attach_lora
from sigmascope.lora.extract import ExtractOptions, extract_lora
from sigmascope.lora.file import LoraFile
from sigmascope.lora.formats.opening import load_lora
from sigmascope.progress import Progress, no_progress

POCKET_RANK: Final = 8
POCKET_RESOLUTION: Final = 256
"""At which the pocket model works on a picture of the user's. It knows 128, where a photograph has no detail."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What to serve.

    Attributes:
        base_model_path: LBM checkpoint; None with `pocket`.
        lora_path: LoRA of any format; None serves the base alone.
        config_path: The model's YAML; None looks beside the checkpoint.
        pocket: Serve the model that ships with the package, with a LoRA extracted here and now.
        torch_dtype: Name of a dtype.
        device: Name of a device, or "auto".
        tile_size: Run the VAE in tiles of this many pixels.
        resolution: Side of the square bucket; None is the config's.
    """

    base_model_path: Path | None = None
    lora_path: Path | None = None
    config_path: Path | None = None
    pocket: bool = False
    torch_dtype: str = "float32"
    device: str = "auto"
    tile_size: int | None = None
    resolution: int | None = None

    def check(self) -> None:
        """Refuse what cannot work, before minutes are spent on loading.

        Raises:
            ConfigError: Names the flags.
        """
        named = {
            "--base_model_path": self.base_model_path,
            "--lora_path": self.lora_path,
            "--config_path": self.config_path,
        }
        given = [flag for flag, path in named.items() if path is not None]
        if self.pocket and given:
            raise ConfigError(
                f"--pocket brings its own model, so {' and '.join(given)} would have no effect.",
                hint="Leave out one of the two.",
            )
        if not self.pocket and self.base_model_path is None:
            raise ConfigError(
                "There is no model to serve.", hint="Name one with --base_model_path, or try --pocket."
            )
        check_resolution(self.resolution, "bucket")
        resolve_dtype(self.torch_dtype)
        resolve_device(self.device)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model in memory, ready to translate. `lora` is attached and its scale may be set."""

    model: LbmModel
    base_name: str
    resolution: int
    lora: AttachedLora | None = None
    lora_name: str | None = None
    lora_ranks: dict[int, int] | None = None
    tile_size: int | None = None
    load_seconds: float = 0.0
    pocket: bool = False

    def facts(self) -> dict[str, Any]:
        """What the page says of it."""
        weight = next(self.model.denoiser.parameters())
        return {
            "model": self.base_name,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "dtype": str(weight.dtype).removeprefix("torch."),
            "device": str(weight.device),
            "resolution": self.resolution,
            "load_seconds": self.load_seconds,
            "lora": self.lora_name,
            "lora_modules": 0 if self.lora is None else len(self.lora.applied),
            "lora_ranks": sorted(self.lora_ranks or {}),
            "pocket": self.pocket,
        }


def load_served(options: ModelOptions, *, progress: Progress = no_progress) -> ServedModel:
    """Load model and LoRA.

    Args:
        options: What to load.
        progress: Told after each tensor of the model.

    Raises:
        ConfigError: An option makes no sense, or the model needs more than a source picture.
        SigmascopeError: A file cannot be read, or LoRA and model do not belong together.
    """
    options.check()
    started = time.perf_counter()
    base = BASE_PATH if options.pocket else options.base_model_path
    assert base is not None  # checked
    model = load_lbm(
        base,
        CONFIG_PATH if options.pocket else options.config_path,
        dtype=resolve_dtype(options.torch_dtype),
        device=resolve_device(options.device),
        progress=progress,
    ).requires_grad_(False)
    _require_source_only(model, base)
    check_tile_size(options.tile_size, model)
    lora = _pocket_lora() if options.pocket else load_lora(options.lora_path) if options.lora_path else None
    return ServedModel(
        model,
        base_name="pocket model" if options.pocket else base.name,
        resolution=options.resolution or (POCKET_RESOLUTION if options.pocket else model.config.resolution),
        lora=None if lora is None else attach_lora(model, lora),
        lora_name=_lora_name(options),
        lora_ranks=None if lora is None else dict(lora.ranks),
        tile_size=options.tile_size,
        load_seconds=time.perf_counter() - started,
        pocket=options.pocket,
    )


def _lora_name(options: ModelOptions) -> str | None:
    if options.pocket:
        return f"cool light, extracted at rank {POCKET_RANK}"
    return None if options.lora_path is None else options.lora_path.name


def _pocket_lora() -> LoraFile:
    """Extract the pocket model's LoRA; the file is gone once it is read."""
    with tempfile.TemporaryDirectory(prefix="sigmascope-") as folder:
        path = Path(folder) / "pocket_lora.safetensors"
        extract_lora(BASE_PATH, TUNED_PATH, path, ExtractOptions(rank=POCKET_RANK, conv_rank=POCKET_RANK))
        return load_lora(path)


def _require_source_only(model: LbmModel, base: Path) -> None:
    keys = [*model.config.conditioning_images_keys, *model.config.conditioning_masks_keys]
    if keys:
        raise ConfigError(
            f"--base_model_path: {base} needs more than a source picture ({', '.join(keys)}).",
            hint="Run it with sigmascope lbm infer and --conditioning.",
        )
