"""Write what was trained: LoRA files in every format asked for, or a whole checkpoint.

`write_result` does so at the end of a training; `add_lora` puts the LoRA into each checkpoint on the way.
"""

import logging
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from sigmascope.__about__ import __version__
from sigmascope.checkpoints import StreamingWriter, atomic_path, open_checkpoint
from sigmascope.errors import NonFiniteError, SigmascopeError
from sigmascope.lbm.devices import DTYPES
from sigmascope.lbm.model import is_finite
from sigmascope.lbm.training.checkpoints import TrainingState
from sigmascope.lbm.training.lora_layers import Trainable, TrainableFull, TrainableLora
from sigmascope.lbm.training.session import Session, trained_weights
from sigmascope.lbm.training.settings import TrainSettings
from sigmascope.lora.families import BASE_FINGERPRINT, denoiser_fingerprint
from sigmascope.lora.file import LoraFile, as_text, kept_metadata
from sigmascope.lora.writer import save_lora, stored_factors

_log = logging.getLogger(__name__)

_OF_AN_EXTRACTION: Final = "sigmascope_"
"""Keys of a continued file's header that begin so are dropped: they tell how that file was made."""
_ITERATIONS: Final = "num_iterations"
"""The model's counter of steps, to which this training's are added."""


def write_result(session: Session, folder: Path) -> list[Path]:
    """Write what was trained. Every process calls this; the main one writes.

    Returns:
        The files of weights; none in other processes.

    Raises:
        NonFiniteError: A trained value is NaN or Inf.
        WriteError: A file cannot be written.
        OtherProcessError: Either was so in the main process.
    """
    weights = trained_weights(session)
    files: list[Path] = []
    with session.team.together():
        if session.accelerator.is_main_process:
            files = _write_session(session, folder, weights)
    return files


def _write_session(session: Session, folder: Path, weights: Mapping[str, Tensor]) -> list[Path]:
    name = "model" if isinstance(session.trainable, TrainableFull) else "lora"
    return write_trained(
        session.trainable, session.settings, session.step, folder, name=name, weights=weights
    )


def add_lora(session: Session, state: TrainingState, folder: Path) -> None:
    """Put the LoRA of a checkpoint into its folder, so that it can be tried before the end.

    Args:
        session: Of the run.
        state: That the checkpoint holds.
        folder: Its folder, while it is being written.
    """
    if isinstance(session.trainable, TrainableFull):
        return  # the checkpoint holds these weights already, and a whole model more would fill disks
    try:
        _write_session(session, folder, state.weights if state.average is None else state.average)
    except NonFiniteError as error:
        _log.warning("The checkpoint has no LoRA file: %s", error)


def write_trained(
    trainable: Trainable,
    settings: TrainSettings,
    step: int,
    folder: str | Path,
    *,
    name: str | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> list[Path]:
    """Write the result of a run; each file appears whole or not at all.

    A LoRA is written once for each of `output_formats`: `<name>.safetensors` for native naming,
    `<name>-kohya.safetensors`, `<name>-peft.safetensors`. Trained factors have the dtype of `save_precision`; frozen
    ones keep theirs, so that they come out as they went in. Full fine-tuning writes `<name>.safetensors` in native
    naming, and `<name>.yaml`, which loading finds beside it. The same weights give the same bytes.

    Args:
        trainable: What was trained.
        settings: Of the run.
        step: Optimizer steps done.
        folder: Made if it is not there.
        name: Of the files; `lora-step000500` or `model-step000500` when left out.
        weights: By the names of `trainable.parameters`, in place of what the model holds now.

    Returns:
        The files of weights, in the order of `output_formats`.

    Raises:
        NonFiniteError: A trained value is NaN or Inf, or becomes so in `save_precision`; names the layer.
        WriteError: A file cannot be written.
    """
    folder = Path(folder)
    metadata = training_metadata(settings, step)
    if isinstance(trainable, TrainableFull):
        path = folder / f"{name or f'model-step{step:06d}'}.safetensors"
        _write_checkpoint(trainable.state(weights), settings, step, path, metadata)
        return [path]
    lora = stored_lora(trainable, DTYPES[settings.save_precision], weights)
    stem = name or f"lora-step{step:06d}"
    paths = []
    for output_format in settings.output_formats:
        suffix = "" if output_format == "native" else f"-{output_format}"
        path = folder / f"{stem}{suffix}.safetensors"
        save_lora(path, lora, metadata, format=output_format)
        paths.append(path)
    return paths


def _write_checkpoint(
    state: Mapping[str, Tensor], settings: TrainSettings, step: int, path: Path, metadata: Mapping[str, str]
) -> None:
    dtype = DTYPES[settings.save_precision]
    with StreamingWriter(path, {"format": "pt", **metadata}, expected=state) as writer:
        for key, tensor in state.items():
            stored = tensor.detach() + step if key == _ITERATIONS else tensor.detach().to(dtype)
            if not is_finite(stored):
                raise NonFiniteError(
                    f"{key} holds NaN or Inf in {dtype}.",
                    hint="Lower the learning rate; store in bf16 or float32 if it was fp16.",
                )
            writer.write(key, stored)
    with atomic_path(path.with_suffix(".yaml")) as temporary:
        temporary.write_text(settings.lbm.to_yaml(), encoding="utf-8")


def stored_lora(
    trainable: TrainableLora, dtype: torch.dtype, weights: Mapping[str, Tensor] | None = None
) -> LoraFile:
    """The LoRA as it is stored: trained factors with alpha = rank in `dtype`, frozen ones as they came.

    The header of a continued file goes along, as far as it is still true.
    """
    lora, frozen = trainable.state(weights), set(trainable.plan.frozen)
    modules = {
        layer: factors if layer in frozen else stored_factors(factors, dtype)
        for layer, factors in lora.modules.items()
    }
    inherited = {
        key: text
        for key, text in kept_metadata(trainable.plan.metadata).items()
        if not key.startswith(_OF_AN_EXTRACTION)
    }
    return LoraFile(modules, inherited)


def training_metadata(settings: TrainSettings, step: int) -> dict[str, str]:
    """What a file's header says of its training, with the names of kohya's tools.

    No time of day is in it, so that a resumed run writes the file of an uninterrupted one, byte for byte.
    """
    batch = settings.batch_size * settings.gradient_accumulation_steps
    return {
        "sigmascope_version": __version__,
        "sigmascope_step": str(step),
        **_base_facts(settings.base_model_path),
        "ss_sd_model_name": as_text(settings.base_model_path.name),
        "ss_output_name": as_text(settings.save_ckpt_path.name),
        "ss_steps": str(step),
        "ss_learning_rate": repr(settings.learning_rate),
        "ss_optimizer": settings.optimizer,
        "ss_lr_scheduler": settings.lr_scheduler,
        "ss_batch_size_per_device": str(settings.batch_size),
        "ss_gradient_accumulation_steps": str(settings.gradient_accumulation_steps),
        "ss_total_batch_size": str(batch),
        "ss_mixed_precision": settings.mixed_precision,
        "ss_seed": str(settings.seed),
    }


@lru_cache(maxsize=8)
def _base_facts(base: Path) -> Mapping[str, str]:
    """The base's name and fingerprint, by which `lora validate` knows another base. Read once."""
    named = {"sigmascope_base": as_text(base.name)}
    try:
        with open_checkpoint(base) as checkpoint:
            return {**named, BASE_FINGERPRINT: denoiser_fingerprint(checkpoint)}
    except SigmascopeError as error:  # gone since it was loaded: no reason to lose what was trained
        _log.warning("The base's fingerprint is left out of the header: %s", error)
        return named
