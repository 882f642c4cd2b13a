"""Attach a LoRA to a live model or pipeline (`attach_lora`), change it while it is attached, and take it off.

Each layer also runs the low-rank branch, and no weight is touched: y = W·x + scale · s · up(down(x)). For a
convolution, `down` runs with the layer's own stride, padding and dilation, and `up` is 1×1. A change that is more than
up and down is formed once from the weight as it is then, and runs as one such layer: y = W·x + scale · ΔW·x. The change of
a bias is added to the output. The change of any other parameter, such as a norm's, is added where the module reads it.
"""

import inspect
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import frexp, isfinite
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.hooks import RemovableHandle

from sigmascope.errors import ConfigError, ModelMismatchError, NonFiniteError
from sigmascope.lora.adapters import DiffChange, WeightChange
from sigmascope.lora.changed_reads import ChangedReads, change_reads
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.layer_names import matches, nearest_layers, require_matches, require_pattern
from sigmascope.lora.linalg import at_least_float32
from sigmascope.lora.live_layers import (
    Convolution,
    Layer,
    LoraTarget,
    Matched,
    Place,
    finite_scale,
    for_this_model,
    formed_for,
    log_unapplied,
    match_modules,
    modules_of,
    paths_in,
    tensor_of,
    weight_shape_of,
)
from sigmascope.lora.reader import load_lora
from sigmascope.probes.models import components_of, named_modules_in
from sigmascope.units import counted, first_few

__all__ = ["AttachedLora", "attach_lora"]

logger = logging.getLogger(__name__)

_VARIADIC_PARAMETERS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
_CONVOLUTION_BY_WEIGHT_AXES = {3: functional.conv1d, 4: functional.conv2d, 5: functional.conv3d}


def attach_lora(
    model: Any,
    lora: LoraFile | str | Path,
    scale: float = 1.0,
    *,
    parts: Collection[str] | None = None,
    blocks: Mapping[str, float] | None = None,
    only: str | None = None,
) -> "AttachedLora":
    """Apply a LoRA while the model runs, through forward hooks; the weights stay as they are.

    Several LoRAs may be attached to one model; their changes add up. If layers share a weight, all of them get the
    change. The model may be compiled afterwards: the scale, the blocks' weights, `swap` and `detach` still work, and only
    `detach` compiles anew.

    Args:
        model: A module (`pipe.unet`, `pipe.text_encoder`), or a pipeline with `components`. It needs a Linear or
            convolution layer for every module of the LoRA, or any parameter for a whole difference, except for modules of
            other models of the pipeline, and for layers that only other variants of the model have (`not_in_variant`).
        lora: The changes, of any kind, or their file. Those that are more than up and down factors are formed from the weights, and
            take as much memory as the weights do.
        scale: Strength; it can be set later. At 0 the outputs are those of the bare model, bit for bit.
        parts: Components of the pipeline to which it is applied, such as ["unet"]; all by default.
        blocks: A weight for the layers of a block, by its path, such as {"down_blocks.1": 0.5}; 1 by default. Of
            several that hold a layer, the longest path counts.
        only: A regular expression; other layers are left out.

    Returns:
        A handle that is also a context manager; leaving it detaches the LoRA.

    Raises:
        ModelMismatchError: A module does not fit the model, or its layer's hooks do not run: in a compiled model,
            in nn.MultiheadAttention's output projection, or in a convolution that pads its own input.
        NonFiniteError: A factor holds NaN or Inf, or overflows the layer's dtype.
        ConfigError: `scale` is NaN or infinite, or `parts`, `blocks` or `only` match nothing.
    """
    lora = lora if isinstance(lora, LoraFile) else load_lora(lora)
    (targets, not_in_variant), left_out = hooked_targets(model, lora, any_kind=True)
    paths = paths_in(model)
    chosen = _chosen(model, targets, paths, parts, only)
    log_unapplied(model, lora, left_out, not_in_variant)
    return AttachedLora(model, chosen, scale, left_out, not_in_variant, lora.path, blocks)


def _chosen(
    model: Any,
    targets: "list[LoraTarget]",
    paths: Mapping[nn.Module, str],
    parts: Collection[str] | None,
    only: str | None,
) -> "list[LoraTarget]":
    """The targets in the parts and with the path that are asked for."""
    components = components_of(model)
    for part in parts or ():
        if part not in components:
            near = get_close_matches(part, components, n=1) or list(components)
            raise ConfigError(
                f"parts: this {type(model).__name__} has no component {part}.",
                hint=f"The nearest: {first_few(near)}." if near else "Leave parts out for a single model.",
            )
    if parts is not None:
        targets = [target for target in targets if paths[target.layers[0]].split(".")[0] in parts]
        if not targets:
            raise ConfigError(
                f"parts: the LoRA changes nothing in {first_few(list(parts))}.", hint="Give other parts."
            )
    if only is not None:
        require_pattern(only, "only")
        require_matches(only, [paths[target.layers[0]] for target in targets], "only")
        targets = [target for target in targets if matches(only, paths[target.layers[0]])]
    return targets


def _weight_in(blocks: Mapping[str, float], path: str) -> float:
    """The weight of the innermost block that holds a layer."""
    holding = [block for block in blocks if f".{block}." in f".{path}."]
    return blocks[max(holding, key=len)] if holding else 1.0


def hooked_targets(
    model: Any, lora: LoraFile, *, any_kind: bool = False
) -> "tuple[Matched, tuple[str, ...]]":
    """The weights that a LoRA changes through hooks, and the names of its modules for other models of the pipeline.

    Raises:
        ModelMismatchError: As of `attach_lora`.
        LoraFormatError: The LoRA holds more than up and down factors, and not `any_kind`.
    """
    lora, left_out = for_this_model(model, lora)
    matched = match_modules(model, lora, any_kind=any_kind)
    _require_hooks_run(model, matched.targets)
    return matched, left_out


def _require_hooks_run(model: Any, targets: list[LoraTarget]) -> None:
    """Refuse layers whose hooks would never run: the LoRA would silently do nothing there."""
    names = {layer: target.name for target in targets for layer in target.layers}
    modules = (
        (f"{prefix}{path}", inner)
        for prefix, part in modules_of(model)
        for path, inner in part.named_modules()
    )
    for path, module in modules:
        if _is_compiled(module) and any(inner in names for inner in module.modules()):
            raise ModelMismatchError(
                f"{path or 'the model'} is already compiled, and a LoRA attached to it now would not run.",
                hint="Attach it before torch.compile, or use merge_into_model, which changes the weights.",
            )
    bypassed = [name for layer, name in names.items() if isinstance(layer, NonDynamicallyQuantizableLinear)]
    if bypassed:
        raise ModelMismatchError(
            f"{', '.join(bypassed)}: nn.MultiheadAttention reads this weight without calling the layer.",
            hint="Use merge_into_model, which changes the weight.",
        )
    padding = [name for layer, name in names.items() if _pads_its_input(layer)]
    if padding:
        raise ModelMismatchError(
            f"{first_few(padding)}: this convolution pads its own input (a causal video convolution, for example), "
            "and a hook does not see the padded input.",
            hint="Use merge_into_model, which changes the weight.",
        )


def _pads_its_input(layer: nn.Module) -> bool:
    """Whether a convolution's `forward` takes more than the input; a hook then does not see what is convolved."""
    if not isinstance(layer, Convolution):
        return False
    parameters = inspect.signature(layer.forward).parameters.values()
    return sum(parameter.kind not in _VARIADIC_PARAMETERS for parameter in parameters) > 1


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile(module) wraps it, or module.compile() was called."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


class AttachedLora:
    """A LoRA attached to a running model. Made by `attach_lora`.

    Attributes:
        applied: The LoRA's modules that act, in the LoRA's order.
        left_out: Modules for other models of the pipeline.
        not_in_variant: Modules for layers that the model's family has and this variant does not; a warning is logged.
    """

    def __init__(
        self,
        model: Any,
        targets: list[LoraTarget],
        scale: float,
        left_out: Sequence[str] = (),
        not_in_variant: Sequence[str] = (),
        path: Path | None = None,
        blocks: Mapping[str, float] | None = None,
    ) -> None:
        self.applied: tuple[str, ...] = tuple(name for target in targets for name in target.names)
        self.left_out: tuple[str, ...] = tuple(left_out)
        self.not_in_variant: tuple[str, ...] = tuple(not_in_variant)
        self._model = model
        self._strength = Strength(finite_scale(scale), path)
        paths = paths_in(model)
        file = "" if path is None else f"{path}: "
        self._branches: dict[Place, LoraBranch[SwappableFactors]] = {
            place: _branch_for(place)(
                target.name, _placed(file + target.name, target.change, place), self._strength
            )
            for target in targets
            for place in target.places
        }
        self._paths = {place: paths[place.layer] for place in self._branches}
        self._blocks: dict[str, float] = {}
        self.blocks = blocks or {}
        self._handles: list[RemovableHandle | ChangedReads] = [
            place.layer.register_forward_hook(branch, with_kwargs=True)
            for place, branch in self._branches.items()
        ]
        self._handles += [
            change_reads(place.layer, place.of, branch.added_to)
            for place, branch in self._branches.items()
            if isinstance(branch, ParameterBranch)
        ]

    @property
    def blocks(self) -> Mapping[str, float]:
        """The weights of blocks, by their paths; new ones replace all and take effect at each layer's next call."""
        return dict(self._blocks)

    @blocks.setter
    def blocks(self, weights: Mapping[str, float]) -> None:
        for block, weight in weights.items():
            finite_scale(weight)
            if not any(f".{block}." in f".{path}." for path in self._paths.values()):
                nearest = nearest_layers(block, list(self._paths.values()))
                raise ConfigError(
                    f"blocks: no layer of the LoRA is in {block}.",
                    hint=f"The nearest layers are {first_few(nearest)}.",
                )
        self._blocks = dict(weights)
        for place, branch in self._branches.items():
            branch.weigh(_weight_in(self._blocks, self._paths[place]))

    def swap(self, lora: LoraFile | str | Path) -> None:
        """Put another LoRA in this one's place, with the scale and weights as they are; compiled code stays valid.

        It may change fewer layers, and have smaller ranks. If it does not fit, the present one stays.

        Raises:
            ConfigError: This LoRA is detached.
            ModelMismatchError: The new one does not fit the model, or changes more layers or has larger ranks.
            NonFiniteError: A factor holds NaN or Inf, or overflows the layer's dtype.
        """
        if not self.attached:
            raise ConfigError("this LoRA is detached.", hint="Use attach_lora for the new one.")
        lora = lora if isinstance(lora, LoraFile) else load_lora(lora)
        own, left_out = for_this_model(self._model, lora)
        targets, not_in_variant = match_modules(self._model, own, any_kind=True)
        log_unapplied(self._model, lora, left_out, not_in_variant)
        changes = {place: target for target in targets for place in target.places}
        beyond = [target.name for place, target in changes.items() if place not in self._branches]
        larger = [
            target.name
            for place, target in changes.items()
            if place in self._branches and not self._branches[place].factors.takes(target.change)
        ]
        if beyond or larger:
            what = "are not among those attached" if beyond else "do not fit into the attached ranks"
            raise ModelMismatchError(
                f"{lora}: {counted(len(beyond or larger), 'module')} {what}: {first_few(beyond or larger)}.",
                hint="Attach the larger LoRA first, or detach this one and attach the new one.",
            )
        file = "" if lora.path is None else f"{lora.path}: "
        with torch.inference_mode(mode=False), torch.no_grad():
            placed = {
                place: branch.factors.replaced(
                    file + branch.name, changes[place].change if place in changes else None, place
                )
                for place, branch in self._branches.items()
            }
        for place, branch in self._branches.items():
            branch.factors = placed[place]
            branch.weigh(branch.weight)
        self.applied = tuple(name for target in targets for name in target.names)
        self.left_out, self.not_in_variant = left_out, not_in_variant
        self._strength.path = lora.path

    @property
    def scale(self) -> float:
        """The current strength. A new value takes effect at each layer's next call."""
        return self._strength.value

    @scale.setter
    def scale(self, value: float) -> None:
        self._strength.value = finite_scale(value)

    @property
    def attached(self) -> bool:
        """Whether the hooks are still in place."""
        return bool(self._handles)

    @property
    def dormant(self) -> tuple[str, ...]:
        """Modules whose layer has not run since the LoRA was attached; they had no effect yet."""
        return tuple(dict.fromkeys(branch.name for branch in self._branches.values() if not branch.has_run))

    def detach(self) -> None:
        """Remove this LoRA's hooks and set its scale to 0. A second call does nothing."""
        self._strength.value = 0.0  # compiled code with the hooks inlined reads it
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> "AttachedLora":
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()


class Strength:
    """The scale that all hooks of one LoRA read, and the LoRA's file, if any.

    Compiled code reads `tensor`: it is an input there, where a number would be a constant and a new one compile anew.
    """

    def __init__(self, value: float, path: Path | None = None) -> None:
        self.tensor = _compiled_number()
        self.path = path
        self.value = value

    @property
    def value(self) -> float:
        """The scale."""
        return self._value

    @value.setter
    def value(self, value: float) -> None:
        self._value = value
        self.tensor.fill_(value)


def _compiled_number() -> Tensor:
    """A number that compiled code reads anew at each call; also if made under inference mode, it can be set outside it."""
    with torch.inference_mode(mode=False):
        return torch.zeros((), dtype=torch.float64, device="cpu")


@dataclass(frozen=True, slots=True)
class AttachedFacts:
    """One LoRA that is attached to a model.

    Attributes:
        handle: Identifies the attachment: the same object as long as the LoRA stays attached and is not swapped.
        path: The LoRA's file; None if it was made in memory.
        scale: Its current strength.
        layers: The names of the model's layers that it changes.
        factors: up, down and scale, by the LoRA's module name.
    """

    handle: object
    path: Path | None
    scale: float
    layers: tuple[str, ...]
    factors: Mapping[str, tuple[Tensor, Tensor, float]]


def attached_to(model: nn.Module) -> list[AttachedFacts]:
    """The LoRAs that `attach_lora` put on a model and that are still attached, in the order of the model's layers."""
    branches: dict[Strength, list[LoraBranch[Any]]] = {}
    layers: dict[Strength, list[str]] = {}
    for name, layer in named_modules_in(model):
        own = [hook for hook in layer._forward_hooks.values() if isinstance(hook, LoraBranch)]
        for hook in own:
            branches.setdefault(hook.strength, []).append(hook)
        for strength in {hook.strength for hook in own}:
            layers.setdefault(strength, []).append(name)
    return [
        AttachedFacts(
            own[0].factors,
            strength.path,
            strength.value,
            (*layers[strength],),
            {b.name: b.factors.whole for b in own},
        )
        for strength, own in branches.items()
    ]


@runtime_checkable
class BranchFactors(Protocol):
    """The factors of one branch, on any device and in any dtype that the layer runs in."""

    scale: float

    @property
    def whole(self) -> tuple[Tensor, Tensor, float]:
        """Up, down and their scale."""

    def near(self, tensor: Tensor) -> tuple[Tensor | None, Tensor]:
        """Up and down on the tensor's device and in its dtype; no up if down is the whole ΔW, or the change of a bias."""


class SwappableFactors(BranchFactors, Protocol):
    """Those of an attached file, which another's may replace."""

    def takes(self, change: LoraFactors | WeightChange) -> bool:
        """Whether a change fits into tensors of these shapes."""

    def replaced(
        self, name: str, change: LoraFactors | WeightChange | None, place: Place
    ) -> "SwappableFactors":
        """A change, or none, in tensors of these shapes."""


def _placed(name: str, change: LoraFactors | WeightChange, place: Place) -> SwappableFactors:
    """A layer's change, placed beside its weight."""
    if isinstance(change, LoraFactors) and isinstance(place.layer, Layer):
        return PlacedFactors(name, change, place.layer)
    return PlacedDelta(name, change, place)


class PlacedDelta:
    """A change that is more than up and down, formed once from the layer's weight or bias as it is now.

    Args:
        name: The layer, for messages.
        change: LoHa, LoKr, DoRA, OFT, a whole difference, …
        place: The weight or bias. It is not changed.

    Raises:
        ModelMismatchError: The tensor is quantised or on the meta device, or the change does not fit it.
        NonFiniteError: The change holds NaN or Inf in the weight's dtype.
    """

    scale = 1.0

    def __init__(self, name: str, change: LoraFactors | WeightChange, place: Place) -> None:
        self.kind = "lora" if isinstance(change, LoraFactors) else change.kind
        weight = tensor_of(*place).detach()
        if weight.is_meta or not weight.is_floating_point() or tuple(weight.shape) != place.shape:
            held = "is on the meta device" if weight.is_meta else f"is stored as {weight.dtype}"
            raise ModelMismatchError(
                f"{name}: a change of kind {self.kind} is formed from the weight, which {held}.",
                hint="Load the model unquantised, with its weights in memory, or use merge_into_model there.",
            )
        with torch.inference_mode(mode=False), torch.no_grad():
            formed = formed_for(name, change, weight, at_least_float32(weight.dtype))
            delta = formed.to(weight.device, weight.dtype).reshape(weight.shape)
        if not bool(torch.isfinite(delta).all()):
            raise NonFiniteError(
                f"{name}: the change of kind {self.kind} holds NaN or Inf in {weight.dtype}.",
                hint="Check the file, or run the model in bfloat16 or float32.",
            )
        self._delta = delta
        self._placed = {(delta.device, delta.dtype): delta}

    @property
    def whole(self) -> tuple[Tensor, Tensor, float]:
        """ΔW, and 1 in the place of down."""
        return self._delta, self._delta.new_ones(()), 1.0

    def takes(self, change: LoraFactors | WeightChange) -> bool:
        """Every change can be formed."""
        return True

    def replaced(self, name: str, change: LoraFactors | WeightChange | None, place: Place) -> "PlacedDelta":
        """Another change, formed; of none, zeros."""
        return PlacedDelta(name, change or DiffChange({"diff": torch.zeros_like(self._delta)}), place)

    def near(self, tensor: Tensor) -> tuple[None, Tensor]:
        """ΔW on the tensor's device and in its dtype."""
        place = tensor.device, tensor.dtype
        if place not in self._placed:
            with torch.inference_mode(mode=False), torch.no_grad():
                self._placed[place] = self._delta.to(*place)
        return None, self._placed[place]


class PlacedFactors:
    """The factors of one layer, copied once for each device and dtype that the layer runs in.

    Safe to use from several threads, as nn.DataParallel does with one hook.

    Args:
        name: The layer, for messages.
        factors: The change, (out, in) or (out, in, *kernel).
        layer: The Linear or convolution; the factors are placed beside its weight at once.

    Raises:
        NonFiniteError: Here and in `near`: a factor holds NaN or Inf, or overflows the dtype.
    """

    def __init__(self, name: str, factors: LoraFactors, layer: Layer) -> None:
        kernel = factors.weight_shape[2:]
        out_features, rank = factors.up.shape
        self.scale = factors.scale
        self._name = name
        self._up = factors.up.reshape(out_features, rank, *(1 for _ in kernel))
        self._down = factors.down.reshape(rank, *factors.weight_shape[1:])
        self._largest = _largest(factors.up), _largest(factors.down)
        self._placed: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        if layer.weight.is_floating_point() and not layer.weight.is_meta:
            self.near(layer.weight)

    def takes(self, change: LoraFactors | WeightChange) -> bool:
        """Whether it is plain factors of no larger rank."""
        return isinstance(change, LoraFactors) and change.rank <= self._down.shape[0]

    def replaced(self, name: str, change: LoraFactors | WeightChange | None, place: Place) -> "PlacedFactors":
        """Other factors, filled up with zeros to this rank; of none, zeros alone."""
        up, down = self._up.flatten(1), self._down.flatten(1)
        assert isinstance(place.layer, Layer)  # as `_placed` sees to
        if change is None:
            filled = LoraFactors(torch.zeros_like(up), torch.zeros_like(down), 1.0, place.shape)
        else:
            assert isinstance(change, LoraFactors)  # `takes` refuses others
            missing = len(down) - change.rank
            filled = LoraFactors(
                functional.pad(change.up, (0, missing)),
                functional.pad(change.down, (0, 0, 0, missing)),
                change.scale * len(down),
                place.shape,
            )
        return PlacedFactors(name, filled, place.layer)

    @property
    def whole(self) -> tuple[Tensor, Tensor, float]:
        """Up, down and their scale, as the file has them."""
        return self._up, self._down, self.scale

    def near(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Up and down on the tensor's device and in its dtype."""
        place = tensor.device, tensor.dtype
        placed = self._placed.get(place)
        if placed is None:
            placed = self._place(*place)
            self._placed[place] = placed
        return placed

    def _place(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        shift = _balancing_shift(self._name, *self._largest, dtype)
        # A cached inference tensor would fail in a later call that records gradients.
        with torch.inference_mode(mode=False), torch.no_grad():
            if shift == 0:
                return self._up.to(device, dtype), self._down.to(device, dtype)
            # Powers of two, applied before narrowing, leave the product bit-identical.
            wide = at_least_float32(self._up.dtype, self._down.dtype)
            up, down = self._up.to(wide) * 2.0**-shift, self._down.to(wide) * 2.0**shift
            return up.to(device, dtype), down.to(device, dtype)


def _largest(factor: Tensor) -> float:
    return float(factor.detach().to(at_least_float32(factor.dtype)).abs().max())


def _balancing_shift(name: str, up: float, down: float, dtype: torch.dtype) -> int:
    """The n for which up·2⁻ⁿ and down·2ⁿ fit a dtype; 0 if the factors fit as they are.

    Args:
        name: The layer, for the message.
        up: The largest magnitude in that factor.
        down: The same for the other factor.
        dtype: What the factors must fit. Subnormal numbers do not count as fitting.
    """
    if not dtype.is_floating_point:
        return 0
    limits = torch.finfo(dtype)
    if all(value == 0.0 or limits.smallest_normal <= value <= limits.max for value in (up, down)):
        return 0
    shift = 0
    if isfinite(up) and isfinite(down):
        apart = frexp(up)[1] - frexp(down)[1]
        shift = apart // 2 if up and down else apart  # a factor of zeros takes any shift
        up, down = up * 2.0**-shift, down * 2.0**shift
    if not (up <= limits.max and down <= limits.max):
        raise NonFiniteError(
            f"{name}: the LoRA's factors hold NaN or Inf in {dtype}.",
            hint="Run the model in bfloat16 or float32, which hold larger values than float16.",
        )
    return shift


Factors = TypeVar("Factors", bound=BranchFactors)


class LoraBranch(Generic[Factors]):
    """The forward hook of one layer: adds the low-rank branch to the layer's output."""

    def __init__(self, name: str, factors: Factors, strength: Strength) -> None:
        self.name = name
        self.has_run = False
        self.factors = factors
        self.strength = strength
        self.tensor = _compiled_number()
        self.weigh(1.0)

    def weigh(self, weight: float) -> None:
        """Set the layer's own weight; compiled code reads `tensor`, as in `Strength`."""
        self.weight = weight
        self.tensor.fill_(weight * self.factors.scale)

    def __call__(
        self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        self.has_run = True
        if self._is_off():
            return None  # PyTorch then keeps the layer's own output
        return self._sum(output, self._branch(layer, args[0] if args else kwargs["input"]))

    def _is_off(self) -> bool:
        """Whether nothing is added; compiled code asks the tensors instead."""
        return not torch.compiler.is_compiling() and self.strength.value * self.weight == 0.0

    def _sum(self, output: Tensor, branch: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            alpha = self.strength.value * self.weight * self.factors.scale
            # Rounded before the sum, as compiled code and PEFT do: in half precision the outputs are theirs to the bit.
            return output + branch.to(output.dtype) * alpha
        wide = torch.promote_types(output.dtype, torch.float32)
        scale = (self.strength.tensor * self.tensor).to(output.device, wide)
        return torch.where(scale == 0.0, output, output + branch.to(output.dtype) * scale)

    def _branch(self, layer: Layer, x: Tensor) -> Tensor:
        """What is added to the layer's output at strength 1, before the factors' own scale."""
        up, down = self.factors.near(x)
        if down.ndim == 1:
            return down.reshape(-1, *(1 for _ in weight_shape_of(layer)[2:]))
        if isinstance(layer, nn.Linear):
            inner = functional.linear(x, down)
            return inner if up is None else functional.linear(inner, up)
        # The layer's own convolution handles padding modes such as "reflect".
        inner = layer._conv_forward(x, down, None)
        return inner if up is None else _CONVOLUTION_BY_WEIGHT_AXES[up.ndim](inner, up)


class ParameterBranch(LoraBranch[Factors]):
    """The change of a parameter that is no layer's: added where the module reads it (`change_reads`).

    As the module's forward hook it adds nothing, and notes that the module has run.
    """

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.has_run = True

    def added_to(self, parameter: Tensor) -> Tensor:
        """The parameter with the change; itself at strength 0."""
        if self._is_off():
            return parameter
        _, delta = self.factors.near(parameter)
        return self._sum(parameter, delta).to(parameter.dtype)


def _branch_for(place: Place) -> type[LoraBranch[Any]]:
    return LoraBranch if isinstance(place.layer, Layer) else ParameterBranch
