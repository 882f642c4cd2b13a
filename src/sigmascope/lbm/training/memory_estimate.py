"""About how much memory one process of a training takes, reckoned without any weights."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from sigmascope.lbm.batches import Batch
from sigmascope.lbm.model import LbmModel, build_lbm
from sigmascope.lbm.training.injection import prepare
from sigmascope.lbm.training.optimizers import make_optimizer
from sigmascope.lbm.training.settings import TrainSettings

COMPUTE_DTYPES: Final = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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


def weight_dtype(settings: TrainSettings) -> torch.dtype:
    """Of the base while training: what is trained itself stays float32."""
    return torch.float32 if settings.full_finetune else COMPUTE_DTYPES[settings.mixed_precision]


def estimate_memory(settings: TrainSettings, batch: Batch) -> MemoryEstimate:
    """Reckon the memory of a training on batches such as this one.

    Args:
        settings: Of the run.
        batch: Only its shape counts.
    """
    stored = build_lbm(settings.lbm, device="meta", dtype=weight_dtype(settings))
    trained = [parameter for _, parameter in prepare(stored, settings).parameters()]
    trained_bytes = _bytes(trained)
    return MemoryEstimate(
        weights=_bytes(stored.parameters()),
        gradients=trained_bytes,
        optimizer=round(trained_bytes * _state_share(settings)),
        average=trained_bytes if settings.ema_decay is not None else 0,
        activations=_saved_bytes(settings, batch),
    )


def _saved_bytes(settings: TrainSettings, batch: Batch) -> int:
    """Bytes that autograd keeps of a forward pass, counted on tensors without storage."""
    model = build_lbm(settings.lbm, device="meta", dtype=COMPUTE_DTYPES[settings.mixed_precision])
    prepare(model, settings)
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
        side = settings.pixel_crop
        part = slice(None) if side is None else slice(max(1, side // model.vae.factor))
        return model.vae.decode(result[..., part, part])
    return result


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


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
