"""The training step as Accelerate prepares it: alone, copied (DDP), spread (FSDP), or given to DeepSpeed's engine."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from sigmascope.errors import ConfigError
from sigmascope.lbm.batches import Batch
from sigmascope.lbm.model import LbmModel
from sigmascope.lbm.training.accelerating import is_sharded
from sigmascope.lbm.training.backends import AcceleratedBackend, EngineBackend
from sigmascope.lbm.training.deepspeed_engine import EngineOptimizer, log_to_stderr
from sigmascope.lbm.training.objective import Objective

Losses = tuple[Tensor, Tensor, Tensor]


class TrainingStep(nn.Module):
    """The loss as a module's forward call, so that what wraps the module (DDP, autocast) sees all of it.

    Args:
        model: With what is trained in it.
        objective: Its loss.
    """

    def __init__(self, model: LbmModel, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(self, batch: Batch) -> Losses:
        """Give the loss with its gradient, and its latent and pixel terms (NaN for one that is not computed)."""
        terms = self.objective.loss(self.model, batch)
        missing = torch.full_like(terms.total.detach(), math.nan)
        return (
            terms.total,
            missing if terms.latent is None else terms.latent,
            missing if terms.pixel is None else terms.pixel,
        )


@dataclass(frozen=True)
class Prepared:
    """What training works with.

    Attributes:
        module: A `TrainingStep`; calling it gives the loss.
        synchronised: The module whose gradients Accelerate brings together: `module`, or the denoiser alone.
        optimizer: Of the trained weights, as Accelerate wraps it.
        backend: Computes the gradients.
        sharded: Whether each process holds a part of the denoiser.
    """

    module: nn.Module
    synchronised: nn.Module
    optimizer: Any
    backend: AcceleratedBackend | EngineBackend
    sharded: bool


def prepare_step(
    accelerator: Accelerator,
    model: LbmModel,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    precision: str = "no",
) -> Prepared:
    """Let Accelerate take over model and optimizer. All processes call this together.

    Under FSDP the denoiser's parameters are other objects afterwards.

    Args:
        accelerator: Of `accelerated`.
        model: On the accelerator's device; where FSDP spreads the denoiser, that is moved piece by piece.
        objective: The loss.
        optimizer: Of what is trained.
        precision: `mixed_precision`, for DeepSpeed, under which Accelerate does not know it.

    Raises:
        ConfigError: The launcher's configuration of FSDP or DeepSpeed does not fit.
    """
    step = TrainingStep(model, objective)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return _by_engine(accelerator, step, optimizer, precision)
    if not is_sharded(accelerator):
        module, prepared = accelerator.prepare(step, optimizer)
        return Prepared(module, module, prepared, AcceleratedBackend(accelerator, module), sharded=False)
    _fit_plugin(accelerator.state.fsdp_plugin, model.denoiser)
    # The VAE is no part of it: pictures of several sizes are decoded in several numbers of tiles, so that processes
    # would wait for each other's layers at different places.
    try:
        denoiser, prepared = accelerator.prepare(model.denoiser, optimizer)
    except ValueError as error:
        raise ConfigError(
            f"accelerate: FSDP does not take the denoiser as the launcher's configuration says ({error}).",
            hint="Set fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, without fsdp_transformer_layer_cls_to_wrap.",
        ) from error
    return Prepared(step, denoiser, prepared, AcceleratedBackend(accelerator, denoiser), sharded=True)


def _by_engine(
    accelerator: Accelerator, step: TrainingStep, optimizer: torch.optim.Optimizer, precision: str
) -> Prepared:
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    log_to_stderr()
    try:
        engine, _ = accelerator.prepare(step, optimizer)
    except (ValueError, AssertionError) as error:  # DeepSpeed asserts what it checks
        raise ConfigError(
            f"accelerate: DeepSpeed does not take its configuration ({error}).",
            hint="Correct the file that --deepspeed_config_file names.",
        ) from error
    own = EngineOptimizer(engine, optimizer, trained, keep=accelerator.is_main_process)
    return Prepared(engine, engine, own, EngineBackend(accelerator, engine, precision), sharded=False)


def _fit_plugin(plugin: Any, denoiser: nn.Module) -> None:
    """What follows from this loop in the launcher's configuration of FSDP; the rest stays as it says."""
    # Every process has read the base already.
    plugin.cpu_ram_efficient_loading = False
    # Autocast chooses the precision, as in one process: factors are added up and reduced in float32 over any base.
    plugin.mixed_precision_policy = MixedPrecisionPolicy()
    if plugin.auto_wrap_policy is transformer_auto_wrap_policy and not plugin.transformer_cls_names_to_wrap:
        present = {type(module).__name__ for module in denoiser.modules()}
        wished = getattr(denoiser, "_no_split_modules", None) or ()
        plugin.transformer_cls_names_to_wrap = [name for name in wished if name in present]
