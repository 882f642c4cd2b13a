"""Run a model on a few inputs, and sum up what goes into each of its layers and what its output feels of them.

The pipeline calls the model as it always does. Each call is made a second time, with gradients, and a random
projection of its output is taken back through it: with r of standard normal values, the mean square of rᵀJ over
probes is JᵀJ, so the gradients' second moments say how much of a layer's change arrives at the output. The result that
the pipeline gets is that of its own call, bit for bit.

Weights need no gradient, so a Linear layer keeps nothing for the way back. What memory the second call takes beside
that is the activations of the other operations; `enable_gradient_checkpointing` of a diffusers model makes it small.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sigmascope.errors import ConfigError, NonFiniteError
from sigmascope.lora.linalg import matrix_shape
from sigmascope.lora.statistics import (
    FULL_UP_TO,
    RANK,
    LayerStatistics,
    ModelStatistics,
    MomentSum,
    sketch_columns,
)
from sigmascope.progress import Progress, no_progress

__all__ = ["collect_statistics"]

_LAYERS: Final = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PIECE: Final = 1 << 24  # elements of patches at a time: 64 MiB in float32
_WRAPPED: Final = ("base_layer", "_orig_mod")
"""What PEFT's adapters and `torch.compile` call the module that they stand around."""


def collect_statistics(
    model: nn.Module,
    run: Callable[[], object],
    *,
    probes: int = 1,
    calls: int | None = None,
    full_up_to: int = FULL_UP_TO,
    rank: int = RANK,
    seed: int = 0,
    fingerprint: str = "",
    progress: Progress = no_progress,
) -> ModelStatistics:
    """Sum up second moments for every Linear and convolution layer of a model while a pipeline runs.

    Args:
        model: The denoiser: a module whose calls give a tensor, or a tuple, dict or object with one first. Its
            weights are not changed, and it is as it was afterwards.
        run: Calls the model, directly or through a pipeline, any number of times.
        probes: Random projections of each call's output.
        calls: How many calls `run` makes, for the progress; None where it is not known.
        full_up_to: Width up to which a layer's moments are kept whole.
        rank: Directions that are kept of wider ones.
        seed: Of the projections.
        fingerprint: Of the model's weights, for the file.
        progress: Told after each call.

    Returns:
        The statistics, by the path of the layer in the model.

    Raises:
        ConfigError: The model was not called, has no layers, or gives no tensor.
        NonFiniteError: NaN or Inf went through a layer; the message names the first.
        Exception: Whatever `run` raises.
    """
    if probes < 1:
        raise ConfigError(f"--probes {probes} looks at nothing.", hint="Use 1 or more.")
    if rank < 1 or full_up_to < 1:
        raise ConfigError(f"--rank {rank} and --full_up_to {full_up_to}: both are 1 or more.")
    if getattr(model, "is_cache_enabled", False):
        raise ConfigError(
            f"{type(model).__name__} skips layers by its cache.", hint="Call disable_cache() on it first."
        )
    sketches = Sketches(full_up_to, rank, seed)
    known = _layers_of(model)
    of_module = {module: LayerSums(module, sketches) for module in known.values() if _is_plain(module)}
    sums = {name: of_module.get(module) for name, module in known.items()}
    if not of_module:
        raise ConfigError(
            f"{type(model).__name__} has no Linear or convolution layer.", hint="Pass the denoiser itself."
        )
    made = 0

    given: list[tuple[Any, Any]] = []

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.append((_copied(args), _copied(kwargs)))  # before the model can change them in place

    def again(_module: nn.Module, _args: object, _kwargs: object, _output: object) -> None:
        nonlocal made
        _take_back(model, of_module.values(), *given.pop(), probes, seed + 7919 * made)
        made += 1
        progress(made, calls or made, "call")

    with ExitStack() as hooks:
        for layer in of_module.values():
            hooks.callback(layer.remove)
        handle = model.register_forward_pre_hook(before, with_kwargs=True)
        hooks.callback(handle.remove)
        handle = model.register_forward_hook(again, with_kwargs=True)
        hooks.callback(handle.remove)
        run()
    if made == 0:
        raise ConfigError(
            f"the model ({type(model).__name__}) was not called.",
            hint="Pass the module that the pipeline calls at each step, such as pipe.unet or pipe.transformer.",
        )
    facts = {"calls": made, "probes": probes, "seed": seed, "full_up_to": full_up_to, "rank": rank}
    return _finished(sums, made, facts, fingerprint)


def _layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Linear and convolution layers by the names that a checkpoint has for them; a shared one by each of its names."""
    layers: dict[str, nn.Module] = {}
    adapted: list[str] = []  # prefixes of what PEFT has put its adapters around
    for name, module in model.named_modules(remove_duplicate=False):
        inside = next((prefix for prefix in adapted if name.startswith(prefix)), None)
        if isinstance(getattr(module, "base_layer", None), nn.Module):
            adapted.append(f"{name}.")
        elif isinstance(module, _LAYERS) and (inside is None or name == f"{inside}base_layer"):
            layers[".".join(part for part in name.split(".") if part not in _WRAPPED)] = module
    return layers


def _is_plain(module: nn.Module) -> bool:
    """Whether it multiplies its weight with what PyTorch's own layer does: a causal convolution pads by itself."""
    if isinstance(module, nn.Linear):
        return module.weight.shape == (module.out_features, module.in_features)  # packed weights are not
    own = next(kind for kind in _LAYERS if isinstance(module, kind))
    is_own = all(getattr(type(module), name) is getattr(own, name) for name in ("forward", "_conv_forward"))
    return is_own and getattr(module, "groups", 1) == 1


def _finished(
    sums: "Mapping[str, LayerSums | None]", calls: int, facts: Mapping[str, Any], fingerprint: str
) -> ModelStatistics:
    layers: dict[str, LayerStatistics] = {}
    unmet: list[str] = []
    for name, layer in sums.items():
        if layer is None or not layer.is_met:
            unmet.append(name)
            continue
        try:
            statistics = layer.result(calls)
        except NonFiniteError as error:
            raise NonFiniteError(
                f"{name}: {error.message}",
                hint="Use float32 or bfloat16 for the model, and check that its pictures are right.",
            ) from error
        if statistics.weight > 0.0:
            layers[name] = statistics
        else:  # as before a projection of zeros
            unmet.append(name)
    if not layers:
        raise ConfigError(
            "no layer was met while the model was called.",
            hint="Its forward may forbid gradients, or call none of the layers themselves.",
        )
    return ModelStatistics(layers, fingerprint, facts, tuple(unmet))


class Sketches:
    """Makes sums, those of wide layers as sketches; layers of one width share the sketch's columns.

    Args:
        full_up_to: Width up to which a sum is kept whole.
        rank: Directions that are kept of wider ones.
        seed: Of the columns.
    """

    def __init__(self, full_up_to: int, rank: int, seed: int) -> None:
        self._full_up_to = full_up_to
        self._rank = rank
        self._seed = seed
        self._columns: dict[tuple[int, torch.device], Tensor] = {}

    def new_sum(self, size: int, device: torch.device) -> MomentSum:
        """An empty sum over rows of a width."""
        if size <= self._full_up_to:
            return MomentSum(size, device)
        columns = self._columns.get((size, device))
        if columns is None:
            columns = sketch_columns(size, self._rank, self._seed + size).to(device)
            self._columns[size, device] = columns
        return MomentSum(size, device, columns)


class LayerSums:
    """Sums up one layer's inputs and output gradients while it listens.

    Args:
        module: The layer.
        sketches: Makes its sums.
    """

    def __init__(self, module: nn.Module, sketches: Sketches) -> None:
        weight = module.weight
        assert isinstance(weight, Tensor)
        self._sizes = matrix_shape(tuple(weight.shape))
        self._module = module
        self._sketches = sketches
        self._inputs: MomentSum | None = None
        self._outputs: MomentSum | None = None
        self._handle: RemovableHandle | None = None

    @property
    def is_met(self) -> bool:
        """Whether something went through it and came back."""
        return self._inputs is not None and self._outputs is not None

    def listen(self) -> None:
        """Sum up inputs, and gradients of what comes out."""
        self._handle = self._module.register_forward_hook(self._called, with_kwargs=True)

    def remove(self) -> None:
        """Take the hook off."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def result(self, calls: int) -> LayerStatistics:
        """The moments.

        Raises:
            NonFiniteError: NaN or Inf was among them.
        """
        assert self._inputs is not None
        assert self._outputs is not None
        return LayerStatistics(
            self._inputs.result(calls), self._outputs.result(self._outputs.rows), self._inputs.rows // calls
        )

    def _called(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor:
        given = args[0] if args else kwargs.get("input", next(iter(kwargs.values()), None))
        if not (isinstance(given, Tensor) and torch.is_grad_enabled()):
            return output  # where the model itself forbids gradients, none can come back
        for rows in _rows_in(module, given):
            self._inputs = self._inputs or self._sketches.new_sum(self._sizes[1], rows.device)
            self._inputs.add(rows)
        if not output.requires_grad:
            # Nothing before it needs a gradient, as in a time embedding. A leaf could not be changed in place.
            output = output.detach().requires_grad_() + 0
        output.register_hook(self._felt)  # type: ignore[no-untyped-call]
        return output

    def _felt(self, gradient: Tensor) -> None:
        rows = _rows_out(self._module, gradient)
        self._outputs = self._outputs or self._sketches.new_sum(self._sizes[0], rows.device)
        self._outputs.add(rows)


def _take_back(
    model: nn.Module,
    layers: "Iterable[LayerSums]",
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    probes: int,
    seed: int,
) -> None:
    """Call the model again with gradients, and take random projections of its output back."""
    devices = {tensor.device for tensor in model.parameters() if tensor.is_cuda}
    # Dropout of a model in training must not move the host's random numbers.
    fork = torch.random.fork_rng(devices=list(devices))
    with fork, torch.inference_mode(False), torch.enable_grad(), _frozen(model):
        args, kwargs = _tracked(args), _tracked(kwargs)
        with ExitStack() as hooks:
            for layer in layers:
                layer.listen()
                hooks.callback(layer.remove)
            inner = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped, without its graphs
            output = _first_tensor(inner.forward(*args, **kwargs))
        if output is None:
            raise ConfigError(
                f"{type(model).__name__} gives no tensor.", hint="Pass the denoiser itself, not the pipeline."
            )
        if not output.requires_grad:
            return  # no layer was met, or none under gradients
        generator = torch.Generator().manual_seed(seed)
        for number in range(probes):
            probe = torch.randn(output.shape, generator=generator).to(output)
            output.backward(probe, retain_graph=number + 1 < probes)  # type: ignore[no-untyped-call]


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No weight takes a gradient, which would cost as much memory as the model; no buffer stays changed."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    # A batch norm in training counts what goes through it.
    buffers = [
        (buffer, buffer.clone())
        for module in model.modules()
        if module.training
        for buffer in module.buffers(recurse=False)
    ]
    try:
        for name in trained:
            model.get_parameter(name).requires_grad_(False)
        yield
    finally:
        for name in trained:  # by name: offloading puts other objects in their places
            model.get_parameter(name).requires_grad_(True)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _copied(value: Any) -> Any:
    """The same arguments with tensors of their own, made outside inference mode: autograd may see them."""
    if isinstance(value, Tensor):
        with torch.inference_mode(False), torch.no_grad():
            return value.detach().clone()
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return value


def _tracked(value: Any) -> Any:
    """The same with gradients, so that a checkpointed block sees alike tensors both times.

    None is a leaf, which could not be changed in place.
    """
    if isinstance(value, Tensor):
        return value.requires_grad_() + 0 if value.is_floating_point() else value
    if type(value) is dict:
        return {key: _tracked(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_tracked(item) for item in value)
    return value


def _first_tensor(output: object) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        output = list(output.values())
    elif not isinstance(output, list | tuple):
        output = list(vars(output).values()) if hasattr(output, "__dict__") else []
    return next((found for item in output if (found := _first_tensor(item)) is not None), None)


def _rows_in(module: nn.Module, given: Tensor) -> Iterator[Tensor]:
    """What the weight is multiplied with, (positions, columns of the weight's matrix), a piece at a time."""
    given = given.detach()
    if isinstance(module, nn.Linear):
        yield given.reshape(-1, given.shape[-1])
        return
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    dimensions = len(module.kernel_size)
    batched = given if given.dim() == dimensions + 2 else given[None]
    padding = module._reversed_padding_repeated_twice
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padded = nn.functional.pad(batched, padding, mode=mode)
    patches = padded
    for axis, (kernel, stride, dilation) in enumerate(
        zip(module.kernel_size, module.stride, module.dilation, strict=True)
    ):
        reach = dilation * (kernel - 1) + 1
        patches = patches.unfold(axis + 2, reach, stride)[..., ::dilation]
    # (batch, channels, positions…, kernel…) to (batch, positions…, channels, kernel…)
    order = [0, *range(2, 2 + dimensions), 1, *range(2 + dimensions, 2 + 2 * dimensions)]
    patches = patches.permute(order)
    columns = math.prod(patches.shape[1 + dimensions :])
    step = max(1, _PIECE // max(1, columns * math.prod(patches.shape[2 : 1 + dimensions])))
    for picture in patches:
        for start in range(0, picture.shape[0], step):
            yield picture[start : start + step].reshape(-1, columns)


def _rows_out(module: nn.Module, gradient: Tensor) -> Tensor:
    """(positions, rows of the weight's matrix)."""
    if isinstance(module, nn.Linear):
        return gradient.reshape(-1, gradient.shape[-1])
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    batched = gradient if gradient.dim() == len(module.kernel_size) + 2 else gradient[None]
    return batched.movedim(1, -1).reshape(-1, batched.shape[1])
