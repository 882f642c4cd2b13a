"""What a training would do, found out without loading weights: the table, the data, the memory, what it resumes.

Memory is an estimate for one process.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import DataError, ModelMismatchError, WriteError
from sigmascope.lbm.data import Batch
from sigmascope.lbm.devices import LESS_FOR_TRAINING, explain_out_of_memory
from sigmascope.lbm.model import LbmModel, build_lbm, compare_keys, listed
from sigmascope.lbm.training.accelerate import check_tracker
from sigmascope.lbm.training.checkpoints import newest_readable, read_facts
from sigmascope.lbm.training.lora_layers import PlanRow, make_trainable, plan_training
from sigmascope.lbm.training.metrics import read_samples
from sigmascope.lbm.training.objective import lpips_package
from sigmascope.lbm.training.optimizers import make_optimizer, make_schedule
from sigmascope.lbm.training.session import (
    count_samples,
    open_data,
    planned_steps,
    require_same_settings,
    resume_identity,
)
from sigmascope.lbm.training.settings import TrainSettings


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes in one process that holds the whole model.

    Attributes:
        weights: Of the model and the LoRA.
        gradients: Of what is trained.
        optimizer: Its state.
        average: The moving average of the weights.
        activations: What the backward pass needs of one batch; with gradient checkpointing, without what it
            computes again. Neither LPIPS nor temporary buffers are in it.
    """

    weights: int
    gradients: int
    optimizer: int
    average: int
    activations: int

    @property
    def total(self) -> int:
        """All together."""
        return self.weights + self.gradients + self.optimizer + self.average + self.activations


@dataclass(frozen=True)
class DryRun:
    """What would be trained, on what.

    Attributes:
        rows: The table of what is trained and what is frozen.
        trained_parameters: In all.
        frozen_parameters: In all.
        shards: Of training.
        samples: In them; None where they cannot be counted.
        picture_size: (width, height) of the first batch, which was read and decoded.
        validation_samples: That were read.
        total_steps: Optimizer steps; None where nobody knows.
        memory: Of one process.
        resumes: The checkpoint that training would go on from.
    """

    rows: Sequence[PlanRow]
    trained_parameters: int
    frozen_parameters: int
    shards: Sequence[str]
    samples: int | None
    picture_size: tuple[int, int]
    validation_samples: int
    total_steps: int | None
    memory: MemoryEstimate
    resumes: Path | None


def dry_run(settings: TrainSettings, *, resume: bool | None = None) -> DryRun:
    """Check everything that can go wrong before the first step, and tell what would be trained.

    Args:
        settings: Of the run.
        resume: Whether training would resume; None: as `resume_from_checkpoint` says.

    Raises:
        SigmascopeError: What `train` would raise before its first step, where loading weights is not needed to see it.
    """
    check_tracker(settings.tracker)
    resume = settings.resume_from_checkpoint if resume is None else resume
    model = build_lbm(settings.lbm, device="meta")
    _check_base(settings.base_model_path, model)
    plan = plan_training(model, settings)
    data = open_data(settings)
    with explain_out_of_memory("the first batch", LESS_FOR_TRAINING):
        first = next(iter(data.batches(0)), None)
    if first is None:
        raise DataError("train_shards hold no sample that can be used.", hint="Check the keys in the YAML.")
    batch = first[0]
    height, width = batch.source.shape[-2:]
    steps = planned_steps(settings, data.shards, 1)
    nothing = make_optimizer("SGD", [nn.Parameter(torch.zeros(1))], settings.learning_rate, {})
    make_schedule(
        settings.lr_scheduler,
        nothing,
        steps=steps,
        warmup_steps=settings.warmup_steps,
        kwargs=settings.lr_scheduler_kwargs,
    )
    if settings.pixel_loss_weight > 0 and settings.pixel_loss_type == "lpips":
        lpips_package()
    # Whether checkpoints can be written there, without making the folder.
    path = settings.save_ckpt_path
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise WriteError(
            path, f"cannot be made: {there} is no folder.", hint="Choose another save_ckpt_path."
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise WriteError(
            path, f"cannot be written to: {there} is read-only.", hint="Choose another save_ckpt_path."
        )
    resumes = None
    if resume and (newest := newest_readable(path, read_facts)) is not None:
        resumes, facts = newest
        now = resume_identity(settings, data.shards, 1, steps)
        require_same_settings(facts["identity"], now, resumes)
    return DryRun(
        rows=plan.rows,
        trained_parameters=plan.trained_parameters,
        frozen_parameters=plan.frozen_parameters,
        shards=data.shards,
        samples=count_samples(data.shards),
        picture_size=(width, height),
        validation_samples=len(read_samples(settings)),
        total_steps=steps,
        memory=estimate_memory(settings, batch),
        resumes=resumes,
    )


def _check_base(path: Path, model: LbmModel) -> None:
    """Compare keys and shapes, which are in the file's header."""
    with open_checkpoint(path) as checkpoint:
        state = model.state_dict()
        missing, _ = compare_keys(state, checkpoint)
        shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
        wrong = [
            f"{key} is {list(checkpoint.info(key).shape)} and should be {list(shape)}"
            for key, shape in shapes.items()
            if key not in missing and tuple(checkpoint.info(key).shape) != shape
        ]
    if missing or wrong:
        problems = [f"{key} is missing" for key in missing] + wrong
        raise ModelMismatchError(
            f"{path}: is no such model as the YAML describes: {listed(problems, 3, '; ')}.",
            hint="Correct base_model_path, or the model's keys in the YAML.",
        )


def estimate_memory(settings: TrainSettings, batch: Batch) -> MemoryEstimate:
    """Reckon the memory of a training on batches such as this one.

    Args:
        settings: Of the run.
        batch: Only its shape counts.
    """
    stored = build_lbm(settings.lbm, device="meta", dtype=settings.weight_dtype)
    trained = [parameter for _, parameter in make_trainable(stored, settings).parameters()]
    trained_bytes = _bytes(trained)
    return MemoryEstimate(
        weights=_bytes(stored.parameters()),
        gradients=trained_bytes,
        optimizer=round(trained_bytes * _state_share(settings)),
        average=trained_bytes if settings.ema_decay is not None else 0,
        activations=_saved_bytes(settings, batch),
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _state_share(settings: TrainSettings) -> float:
    """Bytes of the optimizer's state for a byte of weights, from one step on a small weight."""
    weight = nn.Parameter(torch.zeros(64, 64))
    optimizer = make_optimizer(
        settings.optimizer, [weight], settings.learning_rate, settings.optimizer_kwargs
    )
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    state = [value for value in optimizer.state[weight].values() if isinstance(value, Tensor)]
    return _bytes(state) / _bytes([weight])


def _saved_bytes(settings: TrainSettings, batch: Batch) -> int:
    """Bytes that autograd keeps of a forward pass, counted on tensors without storage."""
    model = build_lbm(settings.lbm, device="meta", dtype=settings.compute_dtype)
    make_trainable(model, settings)
    model.denoiser.train()
    if settings.gradient_checkpointing:
        model.denoiser.enable_gradient_checkpointing()
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = tensor  # kept alive, so that no other storage gets its address
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        _forward(model, settings, batch)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _forward(model: LbmModel, settings: TrainSettings, batch: Batch) -> Tensor:
    height, width = (side // model.vae.factor for side in batch.source.shape[-2:])
    channels = settings.unet_input_channels
    inputs = torch.zeros(len(batch), channels, height, width, device="meta", dtype=model.denoiser.dtype)
    result: Tensor = model.denoiser(
        inputs, torch.zeros(len(batch), device="meta"), encoder_hidden_states=None, return_dict=False
    )[0]
    if settings.pixel_loss_weight > 0:
        side = settings.pixel_loss_side
        part = slice(None) if side is None else slice(max(1, side // model.vae.factor))
        return model.vae.decode(result[..., part, part])
    return result
