"""Fit a LoRA's factors to the tuned model's outputs, so that its layers make up for each other's errors.

A truncation takes each layer's change by itself, and the errors of the layers add up in the picture. `fit_lora` fits
all layers together: the tuned model runs on a few inputs and its calls are recorded (`record_calls`). Base and LoRA are
called with the same arguments, and Adam (arXiv 1412.6980) minimises the mean squared difference of the outputs. That is
distillation (Hinton, Vinyals and Dean, arXiv 1503.02531), with the tuned model as the teacher and no other data. The
file's ranks, names and size stay the same.

Some inputs are held out. If the fit comes no nearer on those, the factors stay unchanged.
"""

import inspect
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from sigmascope.__about__ import __version__
from sigmascope.errors import ConfigError, ModelMismatchError, NonFiniteError
from sigmascope.lora.alignment import align_all
from sigmascope.lora.apply import LoraBranch, Strength, hooked_targets
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile, as_text, check_target, refuse_files
from sigmascope.lora.linalg import as_float64
from sigmascope.lora.live_layers import Layer
from sigmascope.lora.loadable import WrittenLoads
from sigmascope.lora.reader import load_lora
from sigmascope.lora.statistics_collection import copied, first_tensor, frozen
from sigmascope.lora.writer import names_to_keep, writer_of_aligned
from sigmascope.progress import Progress, no_progress
from sigmascope.units import counted

__all__ = ["FitOptions", "FittedLora", "RecordedCall", "fit_lora", "record_calls", "save_fitted"]

_INPUTS_PER_HELD_OUT: Final = 8  # one input of so many
_BETAS: Final = (0.9, 0.99)


@dataclass(frozen=True, slots=True)
class FitOptions:
    """How a LoRA is fitted.

    Attributes:
        steps: Of the optimizer. The learning rate falls to 0 over them, along a cosine.
        learning_rate: As a share of each factor's root mean square.
        gradient_accumulation_steps: Calls whose gradients are added up for a step of the optimizer.
        seed: Of the order of the calls.

    Raises:
        ConfigError: A number makes no sense.
    """

    steps: int = 400
    learning_rate: float = 0.01
    gradient_accumulation_steps: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "gradient_accumulation_steps"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"--{name} {value} does not fit anything.", hint="Use 1 or more.")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ConfigError(
                f"--learning_rate {self.learning_rate:g} is out of range.",
                hint="Use more than 0, such as 0.01.",
            )


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """A call of the tuned model, in the memory of the CPU.

    Attributes:
        args: Its positional arguments; a tensor is a `KeptTensor`.
        kwargs: Those by name.
        output: The first tensor of what it gave.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class KeptTensor:
    """A tensor of a call's arguments.

    Attributes:
        values: On the CPU.
        device: Where the call had it.
    """

    values: Tensor
    device: torch.device


@dataclass(frozen=True, eq=False)
class FittedLora:
    """A LoRA after a fit.

    Attributes:
        lora: The LoRA with fitted factors; the given one itself if the fit came no nearer.
        before: Error of the outputs with the LoRA as it was given, as a share of what tuning changed in them: 0 is the
            tuned model, 1 is the base.
        after: The same after the fit. If it is above `before`, the fit was discarded.
        held_out: Number of held-out calls on which both are measured; 0 if there was a single input, whose own calls
            are then used.
        calls: Number of calls that the LoRA was fitted to.
        steps: Steps of the optimizer.
        seconds: How long the fit took, without recording.
        loads: What hosts make of the file, if `save_fitted` wrote one; see `loadable.loads_of_written`.
    """

    lora: LoraFile
    before: float
    after: float
    held_out: int
    calls: int
    steps: int
    seconds: float
    loads: WrittenLoads | None = None

    @property
    def is_nearer(self) -> bool:
        """Whether the fit came nearer to the tuned model, and its factors are the LoRA's."""
        return self.after < self.before


def fit_lora(
    model: nn.Module,
    lora: LoraFile,
    recorded: Sequence[Sequence[RecordedCall]],
    options: FitOptions | None = None,
    *,
    progress: Progress = no_progress,
) -> FittedLora:
    """Fit the factors of a LoRA to the tuned model's outputs.

    This takes as much memory as training the LoRA: activations of one call, and four float32 copies of the factors.

    Args:
        model: The base's denoiser. Afterwards it is as it was before.
        lora: Plain factors, such as `extract_lora` makes; modules for other parts of the pipeline stay as they are.
        recorded: Calls of the tuned model's denoiser, a list for each input.
        options: Steps, learning rate and so on.
        progress: Called after each step, and after each call that the error is measured on.

    Raises:
        ConfigError: Nothing was recorded, the base's outputs equal the tuned model's, or the model is in float16.
        ModelMismatchError: The LoRA does not fit the model, or fuses layers that the model has separately.
        LoraFormatError: The LoRA holds more than up and down factors.
        NonFiniteError: The outputs or the loss became NaN or infinite.
    """
    how = options or FitOptions()
    require_fittable(model, lora)
    if not any(recorded):
        raise ConfigError("no call of the tuned model was recorded.", hint="Give it an input to run on.")
    started = time.perf_counter()
    fitting, held_out = _divided(recorded)
    judged = held_out or fitting
    own = replace(lora, modules=dict(lora.modules), changes=dict(lora.changes), source=None)
    with _trained(model, own) as (factors, strength):
        strength.value = 0.0
        untouched = [
            _call(model, call).cpu() for call in _told(judged, progress, "test call without the LoRA")
        ]
        scale = _mean_square(zip(untouched, (call.output for call in judged), strict=True))
        if not math.isfinite(scale):
            raise NonFiniteError("the model's outputs hold NaN or Inf.", hint="Use float32 or bfloat16.")
        if scale == 0.0:
            raise ConfigError(
                "the tuned model's outputs equal the base model's.", hint="Check the paths of both models."
            )
        strength.value = 1.0
        before = _error(model, _told(judged, progress, "test call before the fit"), scale)
        _descend(model, factors, fitting, scale, how, progress)
        for trained in factors.values():
            trained.round()
        after = _error(model, _told(judged, progress, "test call after the fit"), scale)
        fitted = {name: trained.as_stored() for name, trained in factors.items()}
    result = replace(own, modules={**own.modules, **fitted}, facts={}) if after < before else lora
    seconds = time.perf_counter() - started
    return FittedLora(result, before, after, len(held_out), len(fitting), how.steps, seconds)


def require_fittable(model: nn.Module, lora: LoraFile) -> None:
    """Refuse, before anything is recorded, a model and a LoRA that `fit_lora` would refuse.

    Args:
        model: The base's denoiser, or the tuned one, which has the same layers.
        lora: As of `fit_lora`.

    Raises:
        SigmascopeError: As of `fit_lora`.
    """
    if any(parameter.dtype == torch.float16 for parameter in model.parameters()):
        raise ConfigError(
            f"{type(model).__name__} is in float16, where small gradients vanish.",
            hint="Use --torch_dtype bf16 or float32.",
        )
    hooked_targets(model, lora)


def _divided(recorded: Sequence[Sequence[RecordedCall]]) -> tuple[list[RecordedCall], list[RecordedCall]]:
    """The calls to fit to, and those of the last inputs, which are held out."""
    inputs = [calls for calls in recorded if calls]
    kept = 0 if len(inputs) < 2 else max(1, len(inputs) // _INPUTS_PER_HELD_OUT)
    first = len(inputs) - kept
    return [call for calls in inputs[:first] for call in calls], [
        call for calls in inputs[first:] for call in calls
    ]


@contextmanager
def _trained(model: nn.Module, lora: LoraFile) -> Iterator[tuple[dict[str, "TrainedFactors"], Strength]]:
    """Factors that take gradients, by the LoRA's names, in branches beside the model's layers."""
    (targets, _), _ = hooked_targets(model, lora)
    names = {id(factors.up): name for name, factors in lora.modules.items()}
    joined = [target.name for target in targets if id(target.factors.up) not in names]
    if joined:
        raise ModelMismatchError(
            f"{lora} and the model fuse layers differently in {counted(len(joined), 'module')}, first {joined[0]}.",
            hint="Fit a LoRA that names its layers as the model does, such as one made by lora extract.",
        )
    strength = Strength(1.0, lora.path)
    factors: dict[str, TrainedFactors] = {}
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(frozen(model))
        for target in targets:
            name = names[id(target.factors.up)]
            trained = factors[name] = TrainedFactors(target.factors, target.layer)
            for layer in target.layers:
                branch = LoraBranch(target.name, trained, strength)
                stack.callback(layer.register_forward_hook(branch, with_kwargs=True).remove)
        yield factors, strength


class TrainedFactors:
    """Up and down of a layer's branch as trainable float32 tensors, with the LoRA's own scale in `up`.

    Args:
        factors: The file's factors.
        layer: The layer that they act on.
    """

    def __init__(self, factors: LoraFactors, layer: Layer) -> None:
        self.scale = 1.0
        self._given = factors
        device = layer.weight.device if not layer.weight.is_meta else torch.device("cpu")
        kernel = factors.weight_shape[2:]
        up = factors.up.detach().to(device, torch.float32) * factors.scale
        down = factors.down.detach().to(device, torch.float32)
        shift = _balancing_power(up, down)
        self.up = (up * 2.0**-shift).reshape(*up.shape, *(1 for _ in kernel)).requires_grad_()
        self.down = (
            (down * 2.0**shift).reshape(down.shape[0], *factors.weight_shape[1:]).clone().requires_grad_()
        )

    @property
    def whole(self) -> tuple[Tensor, Tensor, float]:
        """Up, down and their scale."""
        return self.up.detach(), self.down.detach(), self.scale

    def near(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Up and down on the tensor's device and in its dtype; gradients reach the trained tensors."""
        return self.up.to(tensor.device, tensor.dtype), self.down.to(tensor.device, tensor.dtype)

    def round(self) -> None:
        """Round the trained tensors to the file's dtypes."""
        with torch.no_grad():
            self.up.copy_(self.up.to(self._given.up.dtype))
            self.down.copy_(self.down.to(self._given.down.dtype))

    def as_stored(self) -> LoraFactors:
        """The factors in the dtypes that they were given in, on the CPU."""
        given = self._given
        return LoraFactors(
            self.up.detach().flatten(1).to("cpu", given.up.dtype),
            self.down.detach().flatten(1).to("cpu", given.down.dtype),
            float(given.up.shape[1]),
            given.weight_shape,
        )


def _balancing_power(up: Tensor, down: Tensor) -> int:
    """The n for which up·2⁻ⁿ and down·2ⁿ are about equally large: both then fit float16 alike."""
    sizes = [float(factor.square().mean().sqrt()) for factor in (up, down)]
    if not all(math.isfinite(size) and size > 0 for size in sizes):
        return 0
    return round(math.log2(sizes[0] / sizes[1]) / 2)


def _call(model: nn.Module, call: RecordedCall) -> Tensor:
    """What the model gives to a recorded call, without gradients."""
    with torch.no_grad():
        return _called(model, call)


def _called(model: nn.Module, call: RecordedCall) -> Tensor:
    args, kwargs = _given(call.args), _given(call.kwargs)
    output = first_tensor(model(*args, **kwargs))
    if output is None or output.shape != call.output.shape:
        raise ModelMismatchError(
            f"{type(model).__name__} gives {'nothing' if output is None else tuple(output.shape)} to a call that the "
            f"tuned model answered with {tuple(call.output.shape)}.",
            hint="Record the tuned model's calls with a model of the same kind.",
        )
    return output


def _mean_square(pairs: Any) -> float:
    total = count = 0.0
    for output, wanted in pairs:
        total += float((as_float64(output) - as_float64(wanted)).square().sum())
        count += output.numel()
    return total / count


def _told(calls: Sequence[RecordedCall], progress: Progress, what: str) -> Iterator[RecordedCall]:
    for done, call in enumerate(calls):
        yield call
        progress(done + 1, len(calls), what)


def _error(model: nn.Module, calls: Iterable[RecordedCall], scale: float) -> float:
    """Root of the mean square error of the outputs, as a share of the root of `scale`."""
    missing = _mean_square((_call(model, call).cpu(), call.output) for call in calls)
    return math.sqrt(missing / scale) if math.isfinite(missing) else math.inf


def _descend(
    model: nn.Module,
    factors: Mapping[str, TrainedFactors],
    calls: Sequence[RecordedCall],
    scale: float,
    how: FitOptions,
    progress: Progress,
) -> None:
    groups = []
    for trained in factors.values():
        for leaf in (trained.up, trained.down):
            size = float(leaf.detach().square().mean().sqrt())  # a factor of zeros stays
            groups.append({"params": [leaf], "lr": how.learning_rate * size, "size": size})
    optimizer = torch.optim.Adam(groups, betas=_BETAS)
    order = _order(len(calls), how.steps * how.gradient_accumulation_steps, how.seed)
    for step in range(how.steps):
        fall = how.learning_rate * 0.5 * (1.0 + math.cos(math.pi * step / how.steps))
        for group in optimizer.param_groups:
            group["lr"] = fall * group["size"]
        total = 0.0
        for _ in range(how.gradient_accumulation_steps):
            call = calls[next(order)]
            with torch.enable_grad():
                output = _called(model, call)
                wanted = call.output.to(output.device)
                loss = (output.float() - wanted.float()).square().mean() / (
                    scale * how.gradient_accumulation_steps
                )
                loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        if not math.isfinite(total):
            raise NonFiniteError(
                f"the loss is {total} at step {step + 1} of the fit.",
                hint="Use float32 or bfloat16, or a smaller --learning_rate.",
            )
        optimizer.step()
        optimizer.zero_grad()
        progress(step + 1, how.steps, f"error {math.sqrt(total):.3g}")


def _order(count: int, length: int, seed: int) -> Iterator[int]:
    """Indices below `count`, each equally often, in an order of the seed."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(math.ceil(length / count)):
        yield from torch.randperm(count, generator=generator).tolist()


def record_calls(
    model: nn.Module, run: Callable[[], object], *, progress: Progress = no_progress
) -> list[list[RecordedCall]]:
    """Keep every call of a model while a pipeline runs, in the memory of the CPU.

    Args:
        model: The denoiser of the tuned model.
        run: Calls it, directly or through a pipeline. A generator yields after each input; otherwise each call counts
            as an input.
        progress: Called after each call, with the number of calls so far; in all is not known, so 0.

    Returns:
        The calls of each input, in their order.

    Raises:
        ConfigError: The model was not called, or gave no tensor.
        Exception: Whatever `run` raises.
    """
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    inputs: defaultdict[int, list[RecordedCall]] = defaultdict(list)
    current = count = 0

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        last = inputs[current][-1] if inputs[current] else None
        # The text's embeddings are the same at each step of a picture.
        given.append((_kept(args, last and last.args), _kept(kwargs, last and last.kwargs)))

    def after(module: nn.Module, _args: object, _kwargs: object, output: object) -> None:
        nonlocal count
        made = first_tensor(output)
        if made is None:
            raise ConfigError(
                f"{type(module).__name__} returns no tensor.",
                hint="Pass the denoiser itself, not the pipeline.",
            )
        args, kwargs = given.pop()
        inputs[current].append(RecordedCall(args, kwargs, copied(made).cpu()))
        count += 1
        progress(count, 0, "call")

    handles = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True),
    ]
    try:
        if inspect.isgeneratorfunction(run):
            for _ in run():
                current += 1
            recorded = list(inputs.values())
        else:
            run()
            recorded = [[call] for call in inputs[current]]
    finally:
        for handle in handles:
            handle.remove()
    if count == 0:
        raise ConfigError(
            f"the model ({type(model).__name__}) was not called.",
            hint="Pass the module that the pipeline calls at each step, such as pipe.unet or pipe.transformer.",
        )
    return [calls for calls in recorded if calls]


def _kept(value: Any, last: Any) -> Any:
    """The arguments on the CPU; tensors that the last call had too are kept once."""
    if isinstance(value, Tensor):
        if (
            isinstance(last, KeptTensor)
            and last.values.shape == value.shape
            and last.values.dtype == value.dtype
        ):
            mine = value.detach().cpu()
            if torch.equal(mine, last.values):
                return last
        return KeptTensor(copied(value).cpu(), value.device)
    if type(value) is dict:
        before = last if type(last) is dict else {}
        return {key: _kept(item, before.get(key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        same = type(last) is type(value) and len(last) == len(value)
        return type(value)(_kept(item, last[index] if same else None) for index, item in enumerate(value))
    return value


def _given(value: Any) -> Any:
    """The arguments on the call's devices, as copied tensors: the model may change them in place."""
    if isinstance(value, KeptTensor):
        return value.values.to(value.device, copy=True)
    if type(value) is dict:
        return {key: _given(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_given(item) for item in value)
    return value


def save_fitted(
    lora: str | PathLike[str], save_to: str | PathLike[str], fit: Callable[[LoraFile], FittedLora]
) -> FittedLora:
    """Read a LoRA, fit it, and write it in its own format and dtype, under its own names where a host takes them.

    Args:
        lora: The file.
        save_to: The `.safetensors` file to write; the LoRA itself is refused.
        fit: Gives the fitted LoRA.

    Raises:
        ConfigError: The target is the input or a folder.
        WriteError: The target cannot be written; it is as it was.
        SigmascopeError: As of `load_lora` and of `fit`.
    """
    source, target = Path(lora), Path(save_to)
    check_target(target)
    refuse_files(target, [source])
    original = load_lora(source)
    fitted = fit(original)
    aligned = align_all([fitted.lora])
    metadata = {
        "sigmascope_version": __version__,
        "sigmascope_fitted_from": as_text(source.name),
        "sigmascope_fit": f"{fitted.steps} steps, error of the outputs {fitted.before:.4g} to "
        f"{min(fitted.before, fitted.after):.4g}",
    }
    own_names = names_to_keep(aligned, [fitted.lora], None)
    with writer_of_aligned(
        target, aligned, [fitted.lora], None, metadata, own_names=own_names, compact=True
    ) as writer:
        layers = aligned.loras[0]
        for name in layers.modules:
            writer.write(name, layers.modules[name])
        for name in layers.changes:  # of other parts of the pipeline
            writer.write_change(name, layers.changes[name])
    return replace(fitted, loads=writer.loads)
