"""The work of `sigmascope lbm infer`: check, load, apply, translate, save.

Imports torch through the lbm room, so `cli/lbm/infer.py` imports this module only when the command runs.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from sigmascope.cli.lbm.infer_report import report
from sigmascope.cli.lbm.infer_targets import check_targets, model_files
from sigmascope.cli.progress import progress_bar
from sigmascope.errors import ConfigError, SigmascopeError
from sigmascope.lbm.bridge import bridge_sigmas
from sigmascope.lbm.buckets import check_resolution, parse_size
from sigmascope.lbm.devices import resolve_device, resolve_dtype
from sigmascope.lbm.images import image_format, load_image, save_image
from sigmascope.lbm.infer import translate_image
from sigmascope.lbm.loading import find_config
from sigmascope.lbm.memory_errors import LESS_FOR_INFERENCE, within_memory
from sigmascope.lbm.model import LbmModel
from sigmascope.lbm.watched import load_watched
from sigmascope.lora.apply import AttachedLora, MergedLora, attach_lora, merge_lora
from sigmascope.lora.formats import load_lora
from sigmascope.monitor.recorder import Recorder

_log = logging.getLogger(__name__)

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


def run_infer(options: InferOptions) -> None:
    """Translate one picture as the options say.

    Raises:
        SigmascopeError: Whatever was wrong with the options, the files or the model. The run is saved even
            then, when `run_path` is given.
    """
    conditioning_paths = _conditioning_paths(options.conditioning)
    _check_options(options)
    _check_targets(options, conditioning_paths)
    picture = load_image(options.source_image)
    conditioning = {key: load_image(path) for key, path in conditioning_paths.items()}
    recorder = Recorder(name="lbm infer", sample_hz=10.0)
    try:
        with within_memory("the model with this picture", LESS_FOR_INFERENCE), recorder:
            model = _load_model(options)
            applied = _apply_lora(options, model, recorder)
            result = _translate(options, model, picture, conditioning)
            save_image(result, options.output_path)
    except BaseException:
        _save_failed_run(recorder, options.run_path)
        raise
    run = recorder.run()
    if options.run_path is not None:
        run.save(options.run_path)
    report(run, _summary(options, result, applied), as_json=options.as_json, verbose=options.verbose)


def _save_failed_run(recorder: Recorder, path: Path | None) -> None:
    """Keep the record of a failure; when that fails too, the failure itself is what the user must see."""
    if path is None:
        return
    try:
        recorder.run().save(path)
    except (SigmascopeError, OSError) as error:
        _log.warning("The record of the failed run was not saved: %s", error)


def _check_options(options: InferOptions) -> None:
    """Refuse what cannot work before minutes are spent on it."""
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


def _check_targets(options: InferOptions, conditioning: dict[str, Path]) -> None:
    """Refuse to write over anything that is read, before anything is read."""
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


def _conditioning_paths(entries: tuple[str, ...]) -> dict[str, Path]:
    paths = {}
    for entry in entries:
        key, _, path = entry.partition("=")
        if not key or not path:
            raise ConfigError(
                f"--conditioning: expected KEY=PICTURE, got {entry!r}.", hint="For example depth=depth.png."
            )
        paths[key] = Path(path)
    return paths


def _load_model(options: InferOptions) -> LbmModel:
    with progress_bar("Loading") as progress:
        return load_watched(
            options.base_model_path,
            options.config_path,
            dtype=resolve_dtype(options.torch_dtype),
            device=resolve_device(options.device),
            progress=progress,
        )


def _apply_lora(
    options: InferOptions, model: LbmModel, recorder: Recorder
) -> AttachedLora | MergedLora | None:
    if options.lora_path is None:
        return None
    with recorder.stage("lora_application") as stage:
        lora = load_lora(options.lora_path)
        stage.fact("file", str(options.lora_path))
        stage.fact("modules", len(lora))
        stage.fact("ranks", {str(rank): count for rank, count in lora.ranks.items()})
        stage.fact("scale", options.lora_scale)
        stage.fact("mode", "merged" if options.merge else "hot")
        apply = merge_lora if options.merge else attach_lora
        applied = apply(model, lora, options.lora_scale)
        stage.fact("applied_modules", len(applied.applied))
    return applied


def _translate(
    options: InferOptions, model: LbmModel, picture: Image.Image, conditioning: dict[str, Image.Image]
) -> Image.Image:
    with progress_bar("Translating") as progress:
        return translate_image(
            model,
            picture,
            num_inference_steps=options.num_inference_steps,
            seed=options.seed,
            size=parse_size(options.size),
            resolution=options.resolution,
            tile_size=options.tile_size,
            conditioning=conditioning,
            progress=progress,
        )


def _summary(
    options: InferOptions, result: Image.Image, applied: AttachedLora | MergedLora | None
) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "output_path": str(options.output_path),
        "width": result.width,
        "height": result.height,
        "run_path": None if options.run_path is None else str(options.run_path),
        "lora": None,
    }
    if applied is not None:
        summary["lora"] = {
            "path": str(options.lora_path),
            "mode": "merged" if options.merge else "hot",
            "scale": options.lora_scale,
            "applied_modules": len(applied.applied),
            # A layer that never ran had no effect: the user should know.
            "dormant_modules": list(applied.dormant) if isinstance(applied, AttachedLora) else [],
        }
    return summary
