"""Set Accelerate up as the settings say, and undo it afterwards, so that one process can train twice.

`prepare_step` lets Accelerate take over the training step: in one process, copied (DDP), sharded (FSDP), or with
DeepSpeed's engine. A backend then computes a step's gradients and combines those of all processes.

`Stepper` makes an optimizer step: forward and backward for each batch of its group, clipping, and the update of the
weights. If the loss or the gradient is NaN or Inf, it runs the step's batches again and checks every layer, to say
where it first appeared.

Trackers (TensorBoard, Weights & Biases, …) show losses and pictures, through Accelerate too.
"""

import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, patch_environment, send_to_device
from PIL import Image
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from sigmascope.errors import ConfigError, NonFiniteError
from sigmascope.installation import install_packages
from sigmascope.lbm.devices import resolve_device
from sigmascope.lbm.model import LbmModel, is_finite, listed
from sigmascope.lbm.samples import Batch
from sigmascope.lbm.training.distributed import (
    EngineOptimizer,
    Processes,
    StepBatches,
    deepspeed_plugin,
    full_tensor,
    launched_processes,
    local_tensor,
    log_to_stderr,
)
from sigmascope.lbm.training.objective import Objective
from sigmascope.lbm.training.settings import TrainSettings

Losses = tuple[Tensor, Tensor, Tensor]
"""The loss with its gradient, its latent and its pixel term."""

_ASKED_FOR: Final = {
    DistributedType.DEEPSPEED: ("DeepSpeed", "use_deepspeed"),
    DistributedType.FSDP: ("FSDP", "use_fsdp"),
}
"""What the launcher's flags ask for, which Accelerate has not on every device."""
_NOT_UNDER_FSDP: Final = ("adafactor", "rprop")
"""Optimizers whose in-place operations PyTorch 2.13 refuses on a DTensor; all others were tried."""

LOGS: Final = "logs"
"""The folder of trackers that write files, in `save_ckpt_path`."""
RUN: Final = "lbm"
"""The run's name in trackers, without a `wandb_project`."""
_TAKES_PICTURES: Final = ("tensorboard", "wandb")
MAX_SKIPPED_STEPS = 30
"""Steps in a row that the gradient scaler may skip while it looks for its scale (2^16 halves to below 2^-13)."""
NAMED: Final = 3
"""How many modules or samples a message names."""


@contextmanager
def accelerated(settings: TrainSettings) -> Iterator[Accelerator]:
    """Make the accelerator of one training; under `accelerate launch` it joins the other processes.

    Raises:
        ConfigError: The device is not there or cannot compute in the requested precision, or the launcher contradicts
            the settings or asks to spread the model over processes in an unsupported way.
    """
    is_ours = not PartialState._shared_state
    plugin = deepspeed_plugin(settings)
    device = resolve_device(settings.device, "device")
    # It takes a device only from its environment; a launcher has said it already.
    told = (
        {}
        if settings.device in ("auto", "cpu") or "LOCAL_RANK" in os.environ
        else {"ACCELERATE_TORCH_DEVICE": device}
    )
    with patch_environment(**told):
        try:
            accelerator = Accelerator(
                # Without a GPU, auto is the CPU too: not told so, it would leave each process alone.
                cpu=device.type == "cpu",
                # Under DeepSpeed it would turn the model itself into bfloat16.
                mixed_precision=settings.mixed_precision if plugin is None else "no",
                log_with=settings.tracker,
                project_dir=settings.save_ckpt_path / LOGS,
                deepspeed_plugin=plugin,
            )
        except NotImplementedError as error:
            raise ConfigError(
                f"accelerate: this process has trained under DeepSpeed before ({error}).",
                hint="Train in a new process.",
            ) from error
        except ImportError as error:
            raise ConfigError(
                f"accelerate: the launcher needs a package that is not installed ({error}).",
                hint="Install it, or launch without it.",
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"mixed_precision, device: Accelerate refuses {settings.mixed_precision} on {settings.device} "
                f"({error}).",
                hint="Use bf16 or no, or run on an accelerator.",
            ) from error
    kind = accelerator.distributed_type
    try:
        _check_kind(accelerator)
        check_spreading(kind, settings, fsdp2=accelerator.is_fsdp2)
        # Set here: the launcher's environment would win over an argument.
        accelerator.gradient_accumulation_steps = settings.gradient_accumulation_steps
        yield accelerator
    finally:
        # DeepSpeed keeps a state of its own, which nothing undoes: a second training is refused above.
        if is_ours and accelerator.num_processes == 1 and kind != DistributedType.DEEPSPEED:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def _check_kind(accelerator: Accelerator) -> None:
    """Refuse to train otherwise than the launcher asks: Accelerate does so without a word, on the CPU for one.

    Raises:
        ConfigError: It has not what was asked for on this device, or leaves each process alone.
    """
    kind, device = accelerator.distributed_type, accelerator.device.type
    for asked, (name, flag) in _ASKED_FOR.items():
        variable = f"ACCELERATE_{flag.upper()}"
        if os.environ.get(variable, "false").lower() == "true" and kind != asked:
            raise ConfigError(
                f"device: Accelerate has no {name} on {device} here, and would train without it.",
                hint=f"Use device auto on a machine with GPUs, or launch without --{flag}.",
            )
    count = launched_processes()
    if accelerator.num_processes != count:
        raise ConfigError(
            f"device: Accelerate would not connect the {count} processes on {device}.",
            hint="Start them with torchrun or accelerate launch, on GPUs or with device cpu.",
        )


def check_spreading(kind: DistributedType, settings: TrainSettings, *, fsdp2: bool) -> None:
    """Refuse unsupported ways to spread the model over processes.

    Raises:
        ConfigError: It is Megatron-LM, FSDP 1, or FSDP in float16 or with an optimizer that does not support it.
    """
    if kind == DistributedType.MEGATRON_LM:
        raise ConfigError(
            "accelerate: Megatron-LM only trains its own language models.",
            hint="Launch with --use_fsdp --fsdp_version 2, or without --use_megatron_lm.",
        )
    if kind != DistributedType.FSDP:
        return
    if not fsdp2:
        raise ConfigError(
            "accelerate: FSDP 1 keeps weights in flat buffers, from which Sigmascope cannot write checkpoints.",
            hint="Set fsdp_version: 2 in Accelerate's configuration, or launch with --fsdp_version 2.",
        )
    if settings.optimizer.lower() in _NOT_UNDER_FSDP:
        raise ConfigError(
            f"optimizer: PyTorch's {settings.optimizer} does not work on weights that FSDP shards.",
            hint="Use AdamW, or any other than Adafactor and Rprop.",
        )
    if settings.mixed_precision == "fp16":
        raise ConfigError(
            "mixed_precision: fp16 does not work with FSDP: all processes would have to skip the same steps.",
            hint="Use bf16 or no.",
        )


class AcceleratedBackend:
    """Computes gradients with Accelerate, in one process or with DDP or FSDP."""

    def __init__(self, accelerator: Accelerator, synchronised: nn.Module) -> None:
        self._accelerator = accelerator
        self._synchronised = synchronised

    def autocast(self) -> AbstractContextManager[object]:
        """The precision of training."""
        context: AbstractContextManager[object] = self._accelerator.autocast()
        return context

    def backward(self, loss: Tensor) -> None:
        """Add a batch's gradients; after a step's last batch they are brought together."""
        self._accelerator.backward(loss)

    def clip(self, max_norm: float) -> Tensor | None:
        """Clip the gradients.

        Returns:
            Their norm before clipping; None if the backend does not report it.
        """
        norm: Tensor | None = self._accelerator.clip_grad_norm_(
            list(self._synchronised.parameters()), max_norm
        )
        return norm

    def release(self) -> None:
        """Do nothing: the model's wrapper only acts in its own calls."""


class EngineBackend:
    """Computes gradients with DeepSpeed's engine.

    Args:
        accelerator: Made by `accelerated`; knows which batch is a step's last.
        engine: The `DeepSpeedEngine`.
        precision: `bf16` or `no`.
    """

    def __init__(self, accelerator: Accelerator, engine: Any, precision: str) -> None:
        self._accelerator = accelerator
        self._engine = engine
        self._precision = precision

    def autocast(self) -> AbstractContextManager[object]:
        """The precision of training; Accelerate has none under DeepSpeed."""
        return torch.autocast(
            self._accelerator.device.type, torch.bfloat16, enabled=self._precision == "bf16"
        )

    def backward(self, loss: Tensor) -> None:
        """Add a batch's gradients; after a step's last batch they are brought together."""
        # Not Accelerate's, which makes the step at once, before anybody has seen whether the gradient is finite.
        self._engine.set_gradient_accumulation_boundary(is_boundary=self._accelerator.sync_gradients)
        self._engine.backward(loss)

    def clip(self, max_norm: float) -> Tensor:
        """Return the gradient's norm; the engine itself clips to the `max_norm` of its configuration in its step."""
        if self._engine.zero_optimization_stage() == 0:
            return torch.nn.utils.get_total_norm(
                [
                    parameter.grad
                    for parameter in self._engine.module.parameters()
                    if parameter.grad is not None
                ]
            )
        norm = torch.as_tensor(self._engine.optimizer.scaled_global_norm())
        return torch.where(norm < 0, math.nan, norm)  # DeepSpeed says -1 where it is not finite

    def release(self) -> None:
        """Remove the engine's hooks from the model, which is not trained further, so that a backward pass works as
        usual.
        """
        self._engine.destroy()


@dataclass(frozen=True)
class Prepared:
    """The objects of a training step, as Accelerate prepared them.

    Attributes:
        module: A `TrainingStep`; calling it gives the loss.
        synchronised: The module whose gradients Accelerate combines: `module`, or the denoiser alone.
        optimizer: Of the trained weights, as Accelerate wraps it.
        backend: Computes the gradients.
    """

    module: nn.Module
    synchronised: nn.Module
    optimizer: Any
    backend: AcceleratedBackend | EngineBackend


def prepare_step(
    accelerator: Accelerator,
    model: LbmModel,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    precision: str = "no",
) -> Prepared:
    """Let Accelerate take over model and optimizer. All processes call this together.

    Under FSDP the denoiser's parameters are different objects afterwards.

    Args:
        accelerator: Made by `accelerated`.
        model: On the accelerator's device; if FSDP shards the denoiser, it is moved there piece by piece.
        objective: The loss.
        optimizer: Optimizer of the trained weights.
        precision: `mixed_precision`, for DeepSpeed, under which Accelerate does not know it.

    Raises:
        ConfigError: The launcher's configuration of FSDP or DeepSpeed does not fit.
    """
    step = TrainingStep(model, objective)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return _by_engine(accelerator, step, optimizer, precision)
    if not accelerator.is_fsdp2:
        module, prepared = accelerator.prepare(step, optimizer)
        _keep_group_to_the_last(module)
        return Prepared(module, module, prepared, AcceleratedBackend(accelerator, module))
    _fit_plugin(accelerator.state.fsdp_plugin, model.denoiser)
    # The VAE is not part of it: pictures of several sizes are decoded in several numbers of tiles, so that processes
    # would wait for each other's layers at different places.
    try:
        denoiser, prepared = accelerator.prepare(model.denoiser, optimizer)
    except ValueError as error:
        raise ConfigError(
            f"accelerate: FSDP cannot wrap the denoiser as the launcher's configuration asks ({error}).",
            hint="Set fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, without fsdp_transformer_layer_cls_to_wrap.",
        ) from error
    return Prepared(step, denoiser, prepared, AcceleratedBackend(accelerator, denoiser))


def _keep_group_to_the_last(module: nn.Module) -> None:
    """Let DDP's reducer die before the process group.

    What lets go of a gloo group last waits for the group's threads, and these may wait for Python's lock, to let go of
    their tensors. Python gives its lock up for that; the reducer, which is C++, does not: about one training in a
    hundred stood still at its end (PyTorch 2.13; pytorch/pytorch#56297 has the cause). An object lets go of its
    attributes in the order in which they came.
    """
    if isinstance(module, DistributedDataParallel):
        vars(module)["group_until_last"] = module.process_group


class TrainingStep(nn.Module):
    """The loss as a module's forward call, so that wrappers of the module (DDP, autocast) see all of it."""

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


def _by_engine(
    accelerator: Accelerator, step: TrainingStep, optimizer: torch.optim.Optimizer, precision: str
) -> Prepared:
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    log_to_stderr()
    try:
        engine, _ = accelerator.prepare(step, optimizer)
    except (ValueError, AssertionError) as error:  # DeepSpeed asserts what it checks
        raise ConfigError(
            f"accelerate: DeepSpeed rejects its configuration ({error}).",
            hint="Correct the file that --deepspeed_config_file names.",
        ) from error
    own = EngineOptimizer(engine, optimizer, trained, keep=accelerator.is_main_process)
    return Prepared(engine, engine, own, EngineBackend(accelerator, engine, precision))


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


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step, in this process.

    Attributes:
        loss: Mean over the samples of this process; None where it has none.
        latent: Its latent term; None where it has no weight.
        pixel: Its pixel term; None where it has no weight.
        gradient_norm: Of all processes together, before clipping; None where the backend does not tell.
        skipped: The gradient scaler met Inf and made no step, or there was no sample in any process.
        share: How much this process's means count in those of all samples: the mean over the processes is 1.
    """

    loss: float | None
    latent: float | None
    pixel: float | None
    gradient_norm: float | None
    skipped: bool
    share: float = 1.0


class Stepper:
    """Makes optimizer steps.

    Args:
        accelerator: Of the run.
        prepared: By it.
        schedule: Schedule of the learning rate, not prepared by Accelerate: it counts optimizer steps, for any number
            of processes.
        max_grad_norm: Norm to clip gradients to; None for no clipping.
        team: The processes.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        prepared: Prepared,
        schedule: LRScheduler,
        max_grad_norm: float | None,
        team: Processes,
    ) -> None:
        self.accelerator = accelerator
        self.prepared = prepared
        self.optimizer = prepared.optimizer
        self.schedule = schedule
        self._max_norm = math.inf if max_grad_norm is None else max_grad_norm
        self._team = team
        self._skips = 0

    def make(self, group: StepBatches[Any], step: int, last_checkpoint: str | None) -> StepResult:
        """Make one step. The gradient is the mean over all samples of all processes.

        Where none has a sample, the step counts in the schedule and changes nothing else.

        Raises:
            NonFiniteError: Loss or gradient is NaN or Inf; the weights are the same as before the step.
        """
        if group.samples == 0:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # PyTorch misses the optimizer's own step
                self.schedule.step()
            return StepResult(None, None, None, None, skipped=True, share=0.0)
        size = self.accelerator.gradient_accumulation_steps
        # A short group ends at the same count, so that its last batch is the one that synchronises.
        self.accelerator.step = size - len(group.batches)
        losses: list[Losses] = []
        for batch in group.batches:
            with self.accelerator.accumulate(self.prepared.synchronised):
                # Accelerate puts autocast into a module that it wraps, but not where FSDP spreads it.
                with self.prepared.backend.autocast():
                    terms: Losses = self.prepared.module(to_device(batch, self.accelerator.device))
                # The backend divides by processes and accumulated batches, and samples count alike in all.
                weight = len(batch) * size * self._team.size / group.samples
                self.prepared.backend.backward(terms[0] * weight)
                losses.append(tuple(term.detach() for term in terms))  # type: ignore[arg-type]
        return self._finish(group, step, losses, last_checkpoint)

    def _finish(
        self, group: StepBatches[Any], step: int, losses: Sequence[Losses], last_checkpoint: str | None
    ) -> StepResult:
        norm = self.prepared.backend.clip(self._max_norm)
        samples = [len(batch) for batch in group.batches]
        here = sum(samples)
        total, latent, pixel = (
            sum(count * float(value) for count, value in zip(samples, term, strict=True)) / max(1, here)
            for term in zip(*losses, strict=True)
        )
        gradient_norm = None if norm is None else float(full_tensor(norm))
        # A scaler looks for its scale: a smaller one may help against an infinite gradient.
        scales = self.accelerator.scaler is not None and self._skips < MAX_SKIPPED_STEPS
        bad_gradient = gradient_norm is not None and not math.isfinite(gradient_norm) and not scales
        if self._team.any(not math.isfinite(total) or bad_gradient):
            raise self._nonfinite(group, step, total, last_checkpoint)
        self.optimizer.step()
        skipped = bool(getattr(self.optimizer, "step_was_skipped", False))
        self._skips = self._skips + 1 if skipped else 0
        if not skipped:
            self.schedule.step()
        self.optimizer.zero_grad()
        means = [None if here == 0 or math.isnan(term) else term for term in (total, latent, pixel)]
        share = here * self._team.size / group.samples
        return StepResult(means[0], means[1], means[2], gradient_norm, skipped, share)

    def _nonfinite(
        self, group: StepBatches[Any], step: int, loss: float, last_checkpoint: str | None
    ) -> NonFiniteError:
        keys = [key for batch in group.batches for key in batch.keys]
        where = ""
        self.prepared.backend.release()
        for batch in group.batches:
            layers = self._nonfinite_layers(batch)
            if layers and not where:
                where, keys = layers, list(batch.keys)
            if layers and not self.accelerator.is_fsdp2:  # under FSDP all processes run all of their batches
                break
        what = f"the loss is {loss:g}" if not math.isfinite(loss) else "the gradient is not finite"
        # Empty: no layer showed it again, or it was another process's batch.
        where = where or "in no layer of this process when it was run again"
        intact = f"{last_checkpoint} is intact; lower" if last_checkpoint else "Lower"
        return NonFiniteError(
            f"step {step}: {what}, {where} (samples {listed(keys, NAMED)}). "
            "Training has stopped before it reached the weights.",
            hint=f"{intact} learning_rate, use mixed_precision bf16 or no, or leave the samples out.",
        )

    def _nonfinite_layers(self, batch: Batch) -> str:
        inner = self.accelerator.unwrap_model(self.prepared.module)
        inner.zero_grad()

        def backward() -> float:
            with self.prepared.backend.autocast():
                again = inner(to_device(batch, self.accelerator.device))[0]
            again.backward()
            return float(again.detach())

        return find_nonfinite_layers(inner.model, backward)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with all its pictures on a device."""
    return Batch(**send_to_device(vars(batch), device))


def find_nonfinite_layers(model: nn.Module, backward: Callable[[], float]) -> str:
    """Run a step's computation again, and say in which layers NaN or Inf came first.

    Args:
        model: The model to check; its hooks are removed afterwards.
        backward: Computes the loss and its gradients.

    Returns:
        A part of a sentence that names the layers with non-finite weights, or else outputs, or else gradients; empty if
        all are finite.
    """
    modules = dict(model.named_modules())
    weights = [
        name
        for name, module in modules.items()
        if not all(is_finite(local_tensor(weight)) for weight in module.parameters(recurse=False))
    ]
    outputs: list[str] = []
    gradients: list[str] = []
    handles = [
        module.register_forward_hook(_watch(name, outputs, gradients))
        for name, module in modules.items()
        if not any(module.children())
    ]
    try:
        loss = backward()
    finally:
        for handle in handles:
            handle.remove()
    if math.isfinite(loss) and not gradients:
        gradients += [
            name
            for name, parameter in model.named_parameters()
            if parameter.grad is not None and not is_finite(local_tensor(parameter.grad))
        ]
    found = {"the weights of": weights, "the output of": outputs, "the gradient behind": gradients}
    return next((f"first in {what} {listed(names, NAMED)}" for what, names in found.items() if names), "")


def _watch(
    name: str, outputs: list[str], gradients: list[str]
) -> Callable[[nn.Module, tuple[object, ...], object], None]:
    def gradient(grad: Tensor) -> None:
        if not is_finite(grad) and name not in gradients:
            gradients.append(name)

    def look(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        if not isinstance(output, Tensor):
            return
        if not is_finite(output) and name not in outputs:
            outputs.append(name)
        if torch.is_grad_enabled() and output.requires_grad:
            output.register_hook(gradient)  # type: ignore[no-untyped-call]

    return look


def check_tracker(name: str | None) -> None:
    """Refuse a tracker whose package is not installed, because Accelerate would leave it out silently.

    Raises:
        ConfigError: Names the package and how to install it.
    """
    if name is not None and name not in {tracker.value for tracker in get_available_trackers()}:
        raise ConfigError(
            f"report_to: {name} needs the package {name}, which is not installed.",
            hint=f"Install it with: {install_packages(name)}, or set report_to: none and wandb_project: null.",
        )


def start_trackers(accelerator: Accelerator, settings: TrainSettings, step: int) -> None:
    """Start the run in the accelerator's tracker.

    Args:
        accelerator: Made with `log_with` and `project_dir`.
        settings: Shown as the run's hyperparameters.
        step: The step at which training starts or resumes; TensorBoard's entries of later steps are dropped.
    """
    if settings.tracker is None:
        return
    options: dict[str, dict[str, Any]] = {}
    if settings.tracker == "tensorboard":
        options["tensorboard"] = {"purge_step": step + 1 if step else None}
    # What every tracker takes: flat, and texts for lists and blocks.
    hyperparameters = {
        key: value if isinstance(value, bool | int | float | str) else str(value)
        for key, value in settings.model_dump(mode="json").items()
    }
    name = settings.wandb_project or RUN
    accelerator.init_trackers(name, config=hyperparameters, init_kwargs=options)


def log_pictures(accelerator: Accelerator, name: str, picture: Image.Image, step: int) -> None:
    """Show a picture in the trackers that accept pictures."""
    pixels = np.asarray(picture.convert("RGB"))[None]
    for tracker in accelerator.trackers:
        if tracker.name in _TAKES_PICTURES:
            shape = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
            tracker.log_images({name: pixels}, step=step, **shape)
