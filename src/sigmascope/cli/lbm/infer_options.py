"""The options of `sigmascope lbm infer`, and the refusal of those that cannot work."""

from dataclasses import dataclass
from pathlib import Path

from sigmascope.cli.lbm.infer_targets import check_targets, model_files
from sigmascope.errors import ConfigError

LORA_SCALES = (0.0, 2.0)
"""Range of --lora_scale (SPEC section 7)."""


@dataclass(frozen=True)
class InferOptions:
    """The command's options, one field each."""

    base_model_path: Path
    source_image: Path
    output_path: Path
    lora_path: Path | None = None
    config_path: Path | None = None
    conditioning: tuple[str, ...] = ()
    lora_scale: float = 1.0
    merge: bool = False
    num_inference_steps: int = 1
    torch_dtype: str = "float32"
    device: str = "auto"
    size: str = "bucket"
    resolution: int | None = None
    tile_size: int | None = None
    seed: int | None = None
    run_path: Path | None = None
    as_json: bool = False
    verbose: bool = False


def check_options(options: InferOptions) -> None:
    """Refuse what cannot work before minutes are spent on it."""
    from sigmascope.lbm.bridge import bridge_sigmas
    from sigmascope.lbm.buckets import check_resolution, parse_size
    from sigmascope.lbm.devices import resolve_device, resolve_dtype
    from sigmascope.lbm.images import image_format

    low, high = LORA_SCALES
    if not low <= options.lora_scale <= high:
        raise ConfigError(
            f"--lora_scale: expected {low} to {high}, got {options.lora_scale}.",
            hint="1.0 applies the LoRA as it was made.",
        )
    bridge_sigmas(options.num_inference_steps)
    check_resolution(options.resolution, parse_size(options.size))
    resolve_dtype(options.torch_dtype)
    resolve_device(options.device)
    image_format(options.output_path)


def check_files(options: InferOptions, conditioning: dict[str, Path]) -> None:
    """Refuse to write over anything that is read, before anything is read."""
    from sigmascope.lbm.loading import find_config

    inputs = {
        "--base_model_path": model_files(options.base_model_path),
        "--source_image": [options.source_image],
        **{f"--conditioning {key}": [path] for key, path in conditioning.items()},
    }
    if options.lora_path is not None:
        inputs["--lora_path"] = [options.lora_path]
    config = options.config_path or find_config(options.base_model_path)
    if config is not None:
        inputs["--config_path" if options.config_path else "the model's config"] = [config]
    targets = {"--output_path": options.output_path}
    if options.run_path is not None:
        targets["--run_path"] = options.run_path
    check_targets(inputs, targets)


def conditioning_paths_of(entries: tuple[str, ...]) -> dict[str, Path]:
    """The pictures of `--conditioning KEY=PICTURE` by key.

    Raises:
        ConfigError: An entry is not of that form.
    """
    paths = {}
    for entry in entries:
        key, _, path = entry.partition("=")
        if not key or not path:
            raise ConfigError(
                f"--conditioning: expected KEY=PICTURE, got {entry!r}.", hint="For example depth=depth.png."
            )
        paths[key] = Path(path)
    return paths
