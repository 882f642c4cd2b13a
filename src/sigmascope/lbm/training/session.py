"""The state of one training run: made from its settings, restored from a checkpoint, and written at the end.

`resume_identity` collects the settings that determine the result: resuming with different ones would mix two trainings.
`planned_steps` says how many optimizer steps a run will have, if its settings and shards show it.

`write_result` writes the result: LoRA files in every requested format, or a whole checkpoint. `add_lora` puts the LoRA
into each checkpoint on the way.
"""

import hashlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from sigmascope.__about__ import __version__
from sigmascope.checkpoints import StreamingWriter, atomic_path, open_checkpoint
from sigmascope.errors import CheckpointError, ConfigError, NonFiniteError, SigmascopeError
from sigmascope.lbm.data import DataOptions, DataPosition, TrainingData, count_batches
from sigmascope.lbm.devices import DTYPES
from sigmascope.lbm.images import Size
from sigmascope.lbm.model import LbmModel, is_finite
from sigmascope.lbm.shards import PIPE
from sigmascope.lbm.training.accelerate import Stepper, prepare_step
from sigmascope.lbm.training.checkpoints import TrainingState, random_state, restore_random_state
from sigmascope.lbm.training.distributed import Processes, gather_state, shard_like, shard_optimizer_state
from sigmascope.lbm.training.lora_layers import Trainable, TrainableFull, TrainableLora, make_trainable
from sigmascope.lbm.training.objective import Objective
from sigmascope.lbm.training.settings import LENGTH_INDEPENDENT, TrainSettings, make_optimizer
from sigmascope.lora.file import LoraFile, as_text, kept_metadata
from sigmascope.lora.fingerprint import BASE_FINGERPRINT, denoiser_fingerprint
from sigmascope.lora.writer import stored_factors
from sigmascope.pipeline.lora_loading import save_lora

_NUMPY_SEED_LIMIT: Final = 2**32
"""NumPy takes seeds below this."""

MAY_CHANGE: Final = frozenset(
    {
        "backbone_signature",
        "save_ckpt_path",
        "resume_from_checkpoint",
        "device",
        "gradient_checkpointing",
        "max_member",
        "log_interval",
        "save_interval",
        "keep_checkpoints",
        "validation_shards",
        "validation_interval",
        "validation_samples",
        "num_steps",
        "wandb_project",
        "report_to",
        "output_formats",
        "save_precision",
        "max_epochs",
        "max_steps",
    }
)
"""Settings that may change between a checkpoint and the run that resumes it; all others must agree."""
_FILE_SETTINGS: Final = frozenset({"train_shards", "base_model_path", "lora_weights_path"})
"""Settings that name files: the files' content counts, not their path."""
_STEP_SAMPLE_FACTORS: Final = ("batch_size", "gradient_accumulation_steps", "processes")
"""Their product is the number of samples in an optimizer step."""
_SAMPLED_BYTES: Final = 2**20
"""Bytes of a file's head, and of its tail, that identify it."""
MAX_COUNTED_BYTES: Final = 64 * 2**30
"""Shards of more bytes together are not counted unless a schedule needs it: it would hold up the start."""


@dataclass
class Session:
    """A training run in one process.

    Attributes:
        settings: The run's settings.
        accelerator: The run's accelerator.
        team: All of the run's processes.
        model: The model without Accelerate's wrappers. Under FSDP it has a part of the denoiser.
        trainable: The trained LoRA or weights in it.
        parameters: The parameters that the optimizer changes, by name, in its order.
        data: This process's data.
        objective: The loss.
        stepper: Makes the steps.
        average: Moving average of the trained weights, if asked for.
        identity: Settings that determine the result.
        sizes: Samples of an epoch by size; None where they were not counted.
        total_steps: Number of steps of the whole run; None if it is not known.
        step: Optimizer steps done.
        epoch: That the next batch belongs to.
        position: Where the data stands, the same in all processes; None at an epoch's beginning.
    """

    settings: TrainSettings
    accelerator: Accelerator
    team: Processes
    model: LbmModel
    trainable: Trainable
    parameters: Mapping[str, nn.Parameter]
    data: TrainingData
    objective: Objective
    stepper: Stepper
    average: "MovingAverage | None"
    identity: Mapping[str, Any]
    sizes: Mapping[Size, int] | None
    total_steps: int | None
    step: int = 0
    epoch: int = 0
    position: DataPosition | None = None


def make_session(settings: TrainSettings, accelerator: Accelerator, model: LbmModel) -> Session:
    """Put together what a run needs; nothing is trained yet.

    Raises:
        SigmascopeError: Something is wrong with the settings, the data or the LoRA to continue.
        OtherProcessError: Another process failed.
    """
    team = Processes(accelerator)
    with team.together():
        data = open_data(settings, accelerator.process_index, team.size)
        # For libraries that draw; training's own draws have their generators.
        set_seed(settings.seed % _NUMPY_SEED_LIMIT)
        trainable = make_trainable(model, settings)
        model.denoiser.train()
        if settings.gradient_checkpointing:
            model.denoiser.enable_gradient_checkpointing()
        sizes = sizes_if_needed(settings, data)
        length = planned_steps(settings, sizes, team.size)
        parameters = [parameter for _, parameter in trainable.parameters()]
        optimizer = make_optimizer(
            settings.optimizer, parameters, settings.learning_rate, settings.optimizer_kwargs
        )
        schedule = make_schedule(settings, optimizer, length)
        objective = Objective(settings)
        identity = resume_identity(settings, data.shards, team.size, length)
    prepared = prepare_step(accelerator, model, objective, optimizer, settings.mixed_precision)
    named = dict(trainable.parameters())
    average = None if settings.ema_decay is None else MovingAverage(list(named.values()), settings.ema_decay)
    return Session(
        settings=settings,
        accelerator=accelerator,
        team=team,
        model=model,
        trainable=trainable,
        parameters=named,
        data=data,
        objective=objective,
        stepper=Stepper(accelerator, prepared, schedule, settings.max_grad_norm, team),
        average=average,
        identity=identity,
        sizes=sizes,
        total_steps=length,
    )


def make_schedule(
    settings: TrainSettings, optimizer: torch.optim.Optimizer, steps: int | None
) -> LRScheduler:
    """Make the schedule, which scales the learning rate at each optimizer step.

    Raises:
        ConfigError: An argument or the number of steps is not right.
    """
    name, kwargs = settings.lr_scheduler, settings.lr_scheduler_kwargs
    if follows_length(settings):
        if steps is None:
            raise ConfigError(
                f"lr_scheduler: {name} needs to know the number of steps.",
                hint="Set max_steps, or use constant.",
            )
        if settings.warmup_steps >= steps:
            raise ConfigError(
                f"warmup_steps: {settings.warmup_steps} is too many for a run of {steps} steps.",
                hint="Use fewer.",
            )
    try:
        schedule: LRScheduler = get_scheduler(
            name, optimizer, num_warmup_steps=settings.warmup_steps, num_training_steps=steps, **kwargs
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"lr_scheduler: {name} refuses {kwargs} ({error}).", hint="Correct lr_scheduler_kwargs."
        ) from error
    return schedule


def follows_length(settings: TrainSettings) -> bool:
    """Whether the learning rate depends on the total number of steps."""
    return settings.lr_scheduler not in LENGTH_INDEPENDENT


def open_data(settings: TrainSettings, process: int = 0, processes: int = 1) -> TrainingData:
    """The training data of one process.

    Raises:
        ConfigError: A pattern matches nothing.
        FileError: A shard does not exist.
    """
    return TrainingData(
        settings.lbm,
        DataOptions(
            shards=settings.train_shards,
            batch_size=settings.batch_size,
            seed=settings.seed,
            shuffle_buffer=settings.shuffle_buffer,
            allow_pipe=settings.allow_pipe,
            max_member=settings.max_member,
            crop=settings.crop,
            size=settings.image_size,
            process=process,
            processes=processes,
        ),
    )


def capture_state(session: Session) -> TrainingState:
    """Return everything that is needed to continue from here. Every process calls this; each knows its own part.

    If FSDP shards the weights, the main process's state has all of them and the other processes' states have none, so
    that the files are the same as those of a training in one process.
    """
    scaler, average = session.accelerator.scaler, session.average
    keep = session.accelerator.is_main_process
    here = {
        "position": None if session.position is None else session.position.to_dict(),
        "random": random_state(session.accelerator.device),
    }
    progress = {
        "optimizer": gather_state(session.stepper.optimizer.state_dict(), keep=keep),
        "schedule": session.stepper.schedule.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "average": None if average is None else average.numbers(),
    }
    return TrainingState(
        step=session.step,
        epoch=session.epoch,
        identity=session.identity,
        weights=gather_state(session.parameters, keep=keep),
        average=None
        if average is None
        else gather_state(average.weights(list(session.parameters)), keep=keep),
        progress=progress,
        processes=tuple(session.team.objects(here)),
    )


def restore(session: Session, state: TrainingState, checkpoint: Path) -> None:
    """Continue from a checkpoint of this training.

    Raises:
        CheckpointError: It lacks something that this training needs.
    """
    weights = state.weights
    different = [
        name
        for name in session.parameters.keys() | weights.keys()
        if name not in session.parameters
        or name not in weights
        or session.parameters[name].shape != weights[name].shape
    ]
    if different:
        raise CheckpointError(
            checkpoint,
            f"does not hold the weights that this run trains, first {min(different)}.",
            hint="Start over with --no_resume.",
        )
    with torch.no_grad():
        for name, parameter in session.parameters.items():
            parameter.copy_(shard_like(weights[name], parameter))
    progress, scaler = state.progress, session.accelerator.scaler
    parameters = list(session.parameters.values())
    session.stepper.optimizer.load_state_dict(shard_optimizer_state(progress["optimizer"], parameters))
    session.stepper.schedule.load_state_dict(progress["schedule"])
    if scaler is not None and progress["scaler"] is not None:
        scaler.load_state_dict(progress["scaler"])
    if session.average is not None and state.average is not None:
        shadows = [shard_like(state.average[name], like) for name, like in session.parameters.items()]
        session.average.restore(progress["average"], shadows)
    session.step, session.epoch = state.step, state.epoch
    session.total_steps = planned_steps(session.settings, session.sizes, session.team.size, state.identity)
    index, position = session.accelerator.process_index, state.processes[0]["position"]
    session.position = None if position is None else DataPosition.from_dict(position)
    if index < len(state.processes):
        restore_random_state(state.processes[index]["random"], session.accelerator.device)


def resume_identity(
    settings: TrainSettings, shards: Sequence[str], processes: int, steps: int | None
) -> dict[str, Any]:
    """Describe a training by the settings that determine its result, as JSON values.

    Files are identified by name, size and a part of their content, so that a folder may be moved.
    """
    values = settings.model_dump(mode="json", exclude=set(MAY_CHANGE | _FILE_SETTINGS))
    values["train_shards"] = [
        [Path(shard).name, Path(shard).stat().st_size] if Path(shard).is_file() else [shard, None]
        for shard in shards
    ]
    values["base_model_path"] = _weights_facts(settings.base_model_path)
    start = settings.lora_weights_path
    values["lora_weights_path"] = None if start is None else _weights_facts(start)
    values["processes"] = processes
    values["schedule_steps"] = steps if follows_length(settings) else None
    return values


def _weights_facts(path: Path) -> list[Any]:
    """Name, bytes, and a digest of each file's head and tail: reading all of a large base would take minutes."""
    digest = hashlib.blake2b(digest_size=8)
    with open_checkpoint(path) as checkpoint:
        files = list(checkpoint.files)
        for file in files:
            with file.open("rb") as stream:
                digest.update(stream.read(_SAMPLED_BYTES))
                stream.seek(max(0, file.stat().st_size - _SAMPLED_BYTES))
                digest.update(stream.read(_SAMPLED_BYTES))
    return [Path(path).name, sum(file.stat().st_size for file in files), digest.hexdigest()]


def require_same_settings(before: Mapping[str, Any], now: Mapping[str, Any], checkpoint: Path) -> None:
    """Refuse to resume a training with different settings.

    The number of processes may change where a step has as many samples as before, and where the learning rate
    follows the length, batches too: an epoch of several sizes may have another number of steps otherwise.

    Raises:
        ConfigError: Names every key that differs, with both values.
    """
    different = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    as_long = now.get("schedule_steps") is None or _has_same_batches(before, now)
    if "processes" in different and _step_samples(before) == _step_samples(now) and as_long:
        different = [key for key in different if key not in _STEP_SAMPLE_FACTORS]
    if different:
        listed = "; ".join(
            f"{key}: {_shortened(before.get(key))} then, {_shortened(now.get(key))} now" for key in different
        )
        raise ConfigError(
            f"{checkpoint}: was trained with other settings ({listed}).",
            hint="Set them back, choose another save_ckpt_path, or start over with --no_resume.",
        )


def _step_samples(values: Mapping[str, Any]) -> int:
    return math.prod(values[key] for key in _STEP_SAMPLE_FACTORS)


def _has_same_batches(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a batch of all processes together, of as many samples in a step, is the same."""
    key = "gradient_accumulation_steps"
    return bool(before[key] == now[key])


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def planned_steps(
    settings: TrainSettings,
    sizes: Mapping[Size, int] | None,
    processes: int,
    before: Mapping[str, Any] | None = None,
) -> int | None:
    """Optimizer steps of the whole run, or None where they cannot be known beforehand.

    Args:
        settings: Of the run.
        sizes: Samples of an epoch by size; None where nobody has counted them.
        processes: That train together.
        before: The `resume_identity` of the checkpoint that is resumed.
    """
    steps = _steps_of_epochs(settings, sizes, processes, before)
    if steps is None:
        return settings.max_steps
    return steps if settings.max_steps is None else min(steps, settings.max_steps)


def reached_limits(
    settings: TrainSettings,
    sizes: Mapping[Size, int] | None,
    processes: int,
    before: Mapping[str, Any],
    step: int,
) -> tuple[str, ...]:
    """The settings that let a checkpoint of that step be trained no further; the others are as of `planned_steps`."""
    limits = {
        "max_steps": settings.max_steps,
        "max_epochs": _steps_of_epochs(settings, sizes, processes, before),
    }
    return tuple(name for name, steps in limits.items() if steps is not None and step >= steps)


def _steps_of_epochs(
    settings: TrainSettings,
    sizes: Mapping[Size, int] | None,
    processes: int,
    before: Mapping[str, Any] | None,
) -> int | None:
    """Steps until `max_epochs`; None where they are unknown, or it does not count."""
    epochs = epoch_limit(settings)
    if epochs is None or sizes is None:
        return None
    accumulated = settings.gradient_accumulation_steps
    # Samples of one size take as many steps however a step's samples are cut into batches; of several sizes, the
    # steps before the checkpoint were others.
    if before is not None and before["gradient_accumulation_steps"] != accumulated and len(sizes) > 1:
        return None
    return epochs * -(-count_batches(sizes, processes * settings.batch_size) // accumulated)


def sizes_if_needed(settings: TrainSettings, data: TrainingData) -> Mapping[Size, int] | None:
    """The samples by size, unless no plan needs them or a look at so many would hold up the start."""
    if epoch_limit(settings) is None:
        return None
    needed = follows_length(settings) and settings.max_steps is None
    files = [Path(shard) for shard in data.shards if not shard.startswith(PIPE)]
    return (
        data.count_sizes()
        if needed or sum(file.stat().st_size for file in files) <= MAX_COUNTED_BYTES
        else None
    )


def epoch_limit(settings: TrainSettings) -> int | None:
    """Epochs to train at most; None if only `max_steps` was given, which then decides."""
    if settings.max_steps is not None and "max_epochs" not in settings.model_fields_set:
        return None
    return settings.max_epochs


_log = logging.getLogger(__name__)


_EXTRACTION_PREFIX: Final = "sigmascope_"
"""Keys of a continued file's header that begin so are dropped: they tell how that file was made."""
_ITERATIONS: Final = "num_iterations"
"""The model's counter of steps, to which this training's are added."""


def write_result(session: Session, folder: Path) -> list[Path]:
    """Write the training's result. Every process calls this; the main one writes.

    Returns:
        The files of weights; none in other processes.

    Raises:
        NonFiniteError: A trained value is NaN or Inf.
        WriteError: A file cannot be written.
        OtherProcessError: The main process failed with one of these.
    """
    average = session.average
    trained = session.parameters if average is None else average.weights(list(session.parameters))
    weights = gather_state(trained, keep=session.accelerator.is_main_process)
    files: list[Path] = []
    with session.team.together():
        if session.accelerator.is_main_process:
            files = write_trained(session.trainable, session.settings, session.step, folder, weights)
    return files


def add_lora(session: Session, state: TrainingState, folder: Path) -> None:
    """Put the LoRA of a checkpoint into its folder, so that it can be tried before the end."""
    if isinstance(session.trainable, TrainableFull):
        return  # the checkpoint holds these weights already, and a whole model more would fill disks
    weights = state.weights if state.average is None else state.average
    try:
        write_trained(session.trainable, session.settings, session.step, folder, weights)
    except NonFiniteError as error:
        _log.warning("The checkpoint has no LoRA file: %s", error)


def write_trained(
    trainable: Trainable,
    settings: TrainSettings,
    step: int,
    folder: str | Path,
    weights: Mapping[str, Tensor] | None = None,
) -> list[Path]:
    """Write the result of a run; each file appears whole or not at all.

    A LoRA is written once for each of `output_formats`: `lora.safetensors` for native naming,
    `lora-kohya.safetensors`, `lora-peft.safetensors`. Trained factors have the dtype of `save_precision`; frozen
    ones keep theirs, so that they are unchanged. Full fine-tuning writes `model.safetensors` in native
    naming, and `model.yaml`, which loading finds beside it. The same weights give the same bytes.

    Args:
        trainable: The trained LoRA or weights.
        settings: The run's settings.
        step: Optimizer steps done.
        folder: Created if it is not there.
        weights: Weights to use instead of the model's current ones, by the names of `trainable.parameters`.

    Returns:
        The files of weights, in the order of `output_formats`.

    Raises:
        NonFiniteError: A trained value is NaN or Inf, or becomes so in `save_precision`; names the layer.
        WriteError: A file cannot be written.
    """
    folder = Path(folder)
    metadata = training_metadata(settings, step)
    if isinstance(trainable, TrainableFull):
        path = folder / "model.safetensors"
        _write_checkpoint(trainable.state(weights), settings, step, path, metadata)
        return [path]
    lora = stored_lora(trainable, DTYPES[settings.save_precision], weights)
    paths = []
    for output_format in settings.output_formats:
        suffix = "" if output_format == "native" else f"-{output_format}"
        path = folder / f"lora{suffix}.safetensors"
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
    """The LoRA as it is stored: trained factors with alpha = rank in `dtype`, frozen ones unchanged.

    Fields of a continued file's header are kept if they are still true.
    """
    lora, frozen = trainable.state(weights), set(trainable.plan.frozen)
    modules = {
        layer: factors if layer in frozen else stored_factors(factors, dtype)
        for layer, factors in lora.modules.items()
    }
    inherited = {
        key: text
        for key, text in kept_metadata(trainable.plan.metadata).items()
        if not key.startswith(_EXTRACTION_PREFIX)
    }
    return LoraFile(modules, inherited)


def training_metadata(settings: TrainSettings, step: int) -> dict[str, str]:
    """The facts about a training for a file's header, under the names of kohya's tools.

    They include no time of day, so that a resumed run writes the same bytes as an uninterrupted one.
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


class MovingAverage:
    """Follows parameters (diffusers' `EMAModel`): shadow ← decay·shadow + (1 − decay)·parameter after each step.

    The decay rises from 0 as (1 + step)/(10 + step), so that the beginning is soon forgotten.

    Args:
        parameters: The parameters to follow, always in this order.
        decay: The final decay, below 1.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        self._parameters = list(parameters)
        self._average = EMAModel(self._parameters, decay=decay)

    def update(self) -> None:
        """Update the average with the parameters after a step."""
        self._average.step(self._parameters)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the parameters hold the average; after it, bit for bit what they held before."""
        self._average.store(self._parameters)
        self._average.copy_to(self._parameters)
        try:
            yield
        finally:
            self._average.restore(self._parameters)

    def weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The average by the parameters' names, given in their order."""
        return dict(zip(names, self._average.shadow_params, strict=True))

    def numbers(self) -> dict[str, Any]:
        """Everything that is needed to continue, except the weights."""
        state: dict[str, Any] = self._average.state_dict()
        return {key: value for key, value in state.items() if key != "shadow_params"}

    def restore(self, numbers: Mapping[str, Any], weights: Sequence[Tensor]) -> None:
        """Go on from `numbers` and `weights`."""
        places = [shadow.device for shadow in self._average.shadow_params]
        shadows = [weight.to(place) for weight, place in zip(weights, places, strict=True)]
        self._average.load_state_dict({**numbers, "shadow_params": shadows})
