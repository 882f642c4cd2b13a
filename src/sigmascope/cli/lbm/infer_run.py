"""The work of `sigmascope lbm infer`: check, load, apply, translate, save."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sigmascope.cli.extras import needs_extra
from sigmascope.cli.lbm.infer_options import InferOptions, check_files, check_options, conditioning_paths_of
from sigmascope.cli.lbm.infer_report import report
from sigmascope.cli.progress import progress_bar
from sigmascope.errors import SigmascopeError

if TYPE_CHECKING:
    from PIL import Image

    from sigmascope.lbm.model import LbmModel
    from sigmascope.lora.apply import AttachedLora, MergedLora
    from sigmascope.monitor.recorder import Recorder

_log = logging.getLogger(__name__)


def run_infer(options: InferOptions) -> None:
    """Translate one picture as the options say.

    Raises:
        SigmascopeError: Whatever was wrong with the options, the files or the model. The run is saved even
            then, when `run_path` is given.
    """
    with needs_extra("lbm"):
        from sigmascope.lbm.images import load_image, save_image
        from sigmascope.lbm.memory_errors import LESS_FOR_INFERENCE, within_memory
        from sigmascope.lbm.watched import load_watched  # noqa: F401 - refused now if a package is missing
        from sigmascope.monitor.recorder import Recorder

    conditioning_paths = conditioning_paths_of(options.conditioning)
    check_options(options)
    check_files(options, conditioning_paths)
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


def _save_failed_run(recorder: "Recorder", path: Path | None) -> None:
    """Keep the record of a failure; when that fails too, the failure itself is what the user must see."""
    if path is None:
        return
    try:
        recorder.run().save(path)
    except (SigmascopeError, OSError) as error:
        _log.warning("The record of the failed run was not saved: %s", error)


def _load_model(options: InferOptions) -> "LbmModel":
    from sigmascope.lbm.devices import resolve_device, resolve_dtype
    from sigmascope.lbm.watched import load_watched

    with progress_bar("Loading") as progress:
        return load_watched(
            options.base_model_path,
            options.config_path,
            dtype=resolve_dtype(options.torch_dtype),
            device=resolve_device(options.device),
            progress=progress,
        )


def _apply_lora(
    options: InferOptions, model: "LbmModel", recorder: "Recorder"
) -> "AttachedLora | MergedLora | None":
    if options.lora_path is None:
        return None
    from sigmascope.lora.apply import attach_lora, merge_lora
    from sigmascope.lora.formats.opening import load_lora

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
    options: InferOptions, model: "LbmModel", picture: "Image.Image", conditioning: "dict[str, Image.Image]"
) -> "Image.Image":
    from sigmascope.lbm.buckets import parse_size
    from sigmascope.lbm.infer import translate_image

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
    options: InferOptions, result: "Image.Image", applied: "AttachedLora | MergedLora | None"
) -> dict[str, Any]:
    from sigmascope.lora.apply import AttachedLora

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
