"""Apply a LoRA to a live model or pipeline, hot (attach_lora) or merged (merge_into_model), and undo it.

A file may change several models of a pipeline. A single model gets the changes that are for it; `left_out` names the
others.

Attached, each layer also runs the low-rank branch, and no weight is touched: y = W·x + scale · s · up(down(x)). For a
convolution, `down` runs with the layer's own stride, padding and dilation, and `up` is 1×1. A change that is more than
up and down is formed once from the weight as it is then, and runs as one such layer: y = W·x + scale · ΔW·x.

Merged, W + scale · ΔW is written into the weights. In floating point, subtracting ΔW again does not restore W, so the
original values are kept on the CPU. They take as many bytes as the changed weights.
"""

import inspect
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import combinations
from math import frexp, isfinite
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.hooks import RemovableHandle
from xxhash import xxh3_128, xxh3_128_digest

from sigmascope.errors import ConfigError, LoraFormatError, ModelMismatchError, NonFiniteError
from sigmascope.lora.adapters import DiffChange, WeightChange
from sigmascope.lora.alignment import AlignedLora, align
from sigmascope.lora.factors import LoraFactors, add_product, row_pieces
from sigmascope.lora.families import layout_of
from sigmascope.lora.file import LoraFile
from sigmascope.lora.layer_names import matches, nearest_layers, require_matches, require_pattern
from sigmascope.lora.linalg import at_least_float32, same_matrix, where_float64_is
from sigmascope.lora.module_names import parse_name
from sigmascope.lora.reader import load_lora
from sigmascope.probes.models import components_of, modules_in
from sigmascope.units import counted, first_few

__all__ = ["AttachedLora", "LoraTarget", "MergedLora", "attach_lora", "match_modules", "merge_into_model"]

logger = logging.getLogger(__name__)

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
Layer = nn.Linear | Convolution
ChecksumMethod = Literal["xxh3", "sums"]

_MAX_DESCRIBED = 5
_VARIADIC_PARAMETERS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
_CONVOLUTION_BY_WEIGHT_AXES = {3: functional.conv1d, 4: functional.conv2d, 5: functional.conv3d}
_TENSOR_ALIGNMENT_BYTES = 64  # as PyTorch aligns tensors
_CHECKSUM_WORDS_PER_ROW = 1024
# Wrappers put these into a layer's path; a checkpoint's keys do not have them.
_WRAPPER_PARTS = frozenset({"_orig_mod", "base_layer"})


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
            convolution layer for every module of the LoRA, except modules for other models of the pipeline.
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
    targets, left_out = hooked_targets(model, lora, any_kind=True)
    paths = {layer: path for path, layer in layers_of(model)}
    chosen = _chosen(model, targets, paths, parts, only)
    _log_unapplied(model, lora, left_out)
    return AttachedLora(model, chosen, scale, left_out, lora.path, blocks)


def _chosen(
    model: Any,
    targets: "list[LoraTarget]",
    paths: Mapping[Layer, str],
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
) -> "tuple[list[LoraTarget], tuple[str, ...]]":
    """The weights that a LoRA changes through hooks, and the names of its modules for other models of the pipeline.

    Raises:
        ModelMismatchError: As of `attach_lora`.
        LoraFormatError: The LoRA holds more than up and down factors, and not `any_kind`.
    """
    lora, left_out = _for_this_model(model, lora)
    targets = match_modules(model, lora, any_kind=any_kind)
    _require_hooks_run(model, targets)
    return targets, left_out


def _for_this_model(model: Any, lora: LoraFile) -> tuple[LoraFile, tuple[str, ...]]:
    """The LoRA without its modules for other models of the pipeline, and their names.

    A single model does not say which part of a pipeline it is; its layers' names and shapes tell.
    """
    names_by_part: defaultdict[str, list[str]] = defaultdict(list)
    for name in lora.names:
        names_by_part[next(iter(parse_name(name).parts), "")].append(name)
    if len(names_by_part) < 2:
        return lora, ()
    layers = dict(layers_of(model))
    fitting: dict[str, frozenset[str]] = {}
    complete = []
    for part, names in names_by_part.items():
        aligned = _aligned(model, lora.only(frozenset(names)), layers)
        own = aligned.lora
        fitting[part] = frozenset(
            name for name in own.names if name in layers and _may_fit(own.shape_of(name), layers[name])
        )
        if fitting[part] and len(fitting[part]) == len(own.names) and not aligned.unmatched:
            complete.append(part)
    for part, other in combinations(complete, 2):
        if fitting[part] & fitting[other]:
            raise ModelMismatchError(
                f"{lora}: its modules for {part} and those for {other} both fit this {type(model).__name__}.",
                hint="Apply it to the whole pipeline, which says which is which.",
            )
    # Both text encoders name their layers alike; only the shapes differ.
    kept = [
        part
        for part, layers_of_part in fitting.items()
        if part in complete
        or (layers_of_part and not any(layers_of_part & fitting[other] for other in complete))
    ]
    if not kept:
        return lora, ()
    left_out = tuple(name for part, names in names_by_part.items() if part not in kept for name in names)
    return lora.only({name for part in kept for name in names_by_part[part]}), left_out


def _log_unapplied(model: Any, lora: LoraFile, left_out: Sequence[str]) -> None:
    if lora.unused_keys:
        logger.warning("%s: %d keys are not applied: %s", lora, len(lora.unused_keys), lora.unused_keys[:3])
    if left_out:
        logger.warning(
            "%s: %d modules are for other models than this %s and are not applied, such as %s. "
            "Pass the whole pipeline to apply all of them.",
            lora,
            len(left_out),
            type(model).__name__,
            left_out[0],
        )


@dataclass(frozen=True, eq=False)
class LoraTarget:
    """One weight of the model and the change that the LoRA makes to it.

    Attributes:
        names: The LoRA modules for this weight; several if layers share it.
        change: What is added to the weight, in its shape if it is plain factors.
        layers: Every layer that holds the weight.
    """

    names: tuple[str, ...]
    change: LoraFactors | WeightChange
    layers: tuple[Layer, ...]

    @property
    def factors(self) -> LoraFactors:
        """The change of a LoRA of plain factors."""
        assert isinstance(self.change, LoraFactors)  # `match_modules` refuses others, unless they are merged
        return self.change

    @property
    def name(self) -> str:
        """The first of the names."""
        return self.names[0]

    @property
    def weight(self) -> Tensor:
        """The weight, as the first layer holds it now."""
        return self.layers[0].weight


def _require_hooks_run(model: Any, targets: list[LoraTarget]) -> None:
    """Refuse layers whose hooks would never run: the LoRA would silently do nothing there."""
    names = {layer: target.name for target in targets for layer in target.layers}
    modules = (
        (f"{prefix}{path}", inner)
        for prefix, part in _modules_of(model)
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


def _pads_its_input(layer: Layer) -> bool:
    """Whether a convolution's `forward` takes more than the input; a hook then does not see what is convolved."""
    if isinstance(layer, nn.Linear):
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
    """

    def __init__(
        self,
        model: Any,
        targets: list[LoraTarget],
        scale: float,
        left_out: Sequence[str] = (),
        path: Path | None = None,
        blocks: Mapping[str, float] | None = None,
    ) -> None:
        self.applied: tuple[str, ...] = tuple(name for target in targets for name in target.names)
        self.left_out: tuple[str, ...] = tuple(left_out)
        self._model = model
        self._strength = Strength(finite_scale(scale), path)
        paths = {layer: path for path, layer in layers_of(model)}
        file = "" if path is None else f"{path}: "
        self._branches: dict[Layer, LoraBranch[SwappableFactors]] = {
            layer: LoraBranch(target.name, _placed(file + target.name, target.change, layer), self._strength)
            for target in targets
            for layer in target.layers
        }
        self._paths = {layer: paths[layer] for layer in self._branches}
        self._blocks: dict[str, float] = {}
        self.blocks = blocks or {}
        self._handles: list[RemovableHandle] = [
            layer.register_forward_hook(branch, with_kwargs=True) for layer, branch in self._branches.items()
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
        for layer, branch in self._branches.items():
            branch.weigh(_weight_in(self._blocks, self._paths[layer]))

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
        own, left_out = _for_this_model(self._model, lora)
        targets = match_modules(self._model, own, any_kind=True)
        changes = {layer: target for target in targets for layer in target.layers}
        beyond = [target.name for layer, target in changes.items() if layer not in self._branches]
        larger = [
            target.name
            for layer, target in changes.items()
            if layer in self._branches and not self._branches[layer].factors.takes(target.change)
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
                layer: branch.factors.replaced(
                    file + branch.name, changes[layer].change if layer in changes else None, layer
                )
                for layer, branch in self._branches.items()
            }
        for layer, branch in self._branches.items():
            branch.factors = placed[layer]
            branch.weigh(branch.weight)
        self.applied = tuple(name for target in targets for name in target.names)
        self.left_out = left_out
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
        layers: How many of the model's layers it changes.
        factors: up, down and scale, by the LoRA's module name.
    """

    handle: object
    path: Path | None
    scale: float
    layers: int
    factors: Mapping[str, tuple[Tensor, Tensor, float]]


def attached_to(model: nn.Module) -> list[AttachedFacts]:
    """The LoRAs that `attach_lora` put on a model and that are still attached, in the order of the model's layers."""
    branches: dict[Strength, list[LoraBranch[Any]]] = {}
    for layer in modules_in(model):
        for hook in layer._forward_hooks.values():
            if isinstance(hook, LoraBranch):
                branches.setdefault(hook.strength, []).append(hook)
    return [
        AttachedFacts(
            own[0].factors, strength.path, strength.value, len(own), {b.name: b.factors.whole for b in own}
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
        """Up and down on the tensor's device and in its dtype; no up if down is the whole ΔW."""


class SwappableFactors(BranchFactors, Protocol):
    """Those of an attached file, which another's may replace."""

    def takes(self, change: LoraFactors | WeightChange) -> bool:
        """Whether a change fits into tensors of these shapes."""

    def replaced(
        self, name: str, change: LoraFactors | WeightChange | None, layer: Layer
    ) -> "SwappableFactors":
        """A change, or none, in tensors of these shapes."""


def _placed(name: str, change: LoraFactors | WeightChange, layer: Layer) -> SwappableFactors:
    """A layer's change, placed beside its weight."""
    if isinstance(change, LoraFactors):
        return PlacedFactors(name, change, layer)
    return PlacedDelta(name, change, layer)


class PlacedDelta:
    """A change that is more than up and down, formed once from the layer's weight as it is now.

    Args:
        name: The layer, for messages.
        change: LoHa, LoKr, DoRA, OFT, a whole difference, …
        layer: The Linear or convolution. It is not changed.

    Raises:
        ModelMismatchError: The weight is quantised or on the meta device, or the change does not fit it.
        NonFiniteError: The change holds NaN or Inf in the weight's dtype.
    """

    scale = 1.0

    def __init__(self, name: str, change: LoraFactors | WeightChange, layer: Layer) -> None:
        self.kind = "lora" if isinstance(change, LoraFactors) else change.kind
        weight = layer.weight.detach()
        if weight.is_meta or not weight.is_floating_point() or tuple(weight.shape) != weight_shape_of(layer):
            held = "is on the meta device" if weight.is_meta else f"is stored as {weight.dtype}"
            raise ModelMismatchError(
                f"{name}: a change of kind {self.kind} is formed from the weight, which {held}.",
                hint="Load the model unquantised, with its weights in memory, or use merge_into_model there.",
            )
        with torch.inference_mode(mode=False), torch.no_grad():
            formed = _formed_for(name, change, weight, at_least_float32(weight.dtype))
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

    def replaced(self, name: str, change: LoraFactors | WeightChange | None, layer: Layer) -> "PlacedDelta":
        """Another change, formed; of none, zeros."""
        return PlacedDelta(name, change or DiffChange({"diff": torch.zeros_like(layer.weight)}), layer)

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

    def replaced(self, name: str, change: LoraFactors | WeightChange | None, layer: Layer) -> "PlacedFactors":
        """Other factors, filled up with zeros to this rank; of none, zeros alone."""
        up, down = self._up.flatten(1), self._down.flatten(1)
        if change is None:
            filled = LoraFactors(torch.zeros_like(up), torch.zeros_like(down), 1.0, weight_shape_of(layer))
        else:
            assert isinstance(change, LoraFactors)  # `takes` refuses others
            missing = len(down) - change.rank
            filled = LoraFactors(
                functional.pad(change.up, (0, missing)),
                functional.pad(change.down, (0, 0, 0, missing)),
                change.scale * len(down),
                weight_shape_of(layer),
            )
        return PlacedFactors(name, filled, layer)

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
        compiling = torch.compiler.is_compiling()
        if not compiling and self.strength.value * self.weight == 0.0:
            return None  # PyTorch then keeps the layer's own output
        x = args[0] if args else kwargs["input"]
        up, down = self.factors.near(x)
        if isinstance(layer, nn.Linear):
            branch = functional.linear(x, down)
        else:
            # The layer's own convolution handles padding modes such as "reflect".
            branch = layer._conv_forward(x, down, None)
        if up is not None:
            branch = (
                functional.linear(branch, up)
                if isinstance(layer, nn.Linear)
                else _CONVOLUTION_BY_WEIGHT_AXES[up.ndim](branch, up)
            )
        if not compiling:
            alpha = self.strength.value * self.weight * self.factors.scale
            return torch.add(output, branch.to(output.dtype), alpha=alpha)
        wide = torch.promote_types(output.dtype, torch.float32)
        scale = (self.strength.tensor * self.tensor).to(output.device, wide)
        return torch.where(scale == 0.0, output, output + branch.to(output.dtype) * scale)


def merge_into_model(
    model: Any,
    lora: LoraFile,
    scale: float = 1.0,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> "MergedLora":
    """Add a LoRA to the model's weights, in place: parameters stay the same objects.

    Each sum is formed in `compute_dtype` (float64 for a float64 weight), on the weight's device if that has this dtype,
    and rounded once to the weight's dtype. A weight that several layers share changes once. If anything fails, the
    model stays unchanged.

    Args:
        model: As for `attach_lora`.
        lora: The changes, of any kind: LoHa, LoKr, DoRA and whole differences too.
        scale: Strength. At 0 no weight is touched.
        compute_dtype: float32 or float64.

    Returns:
        A handle that is also a context manager; leaving it unmerges the LoRA.

    Raises:
        ModelMismatchError: A module does not fit the model, or its weight is quantised, on the meta device, or
            an inference tensor.
        NonFiniteError: A merged weight would hold NaN or Inf.
        ConfigError: `scale` is NaN or infinite.
    """
    finite_scale(scale)
    lora, left_out = _for_this_model(model, lora)
    targets = match_modules(model, lora, any_kind=True)
    _require_mergeable(targets)
    _log_unapplied(model, lora, left_out)
    return MergedLora(targets, scale, compute_dtype, left_out)


def _require_mergeable(targets: Sequence[LoraTarget]) -> None:
    for target in targets:
        if not all(holds_weight(layer) for layer in target.layers):
            raise ModelMismatchError(
                f"{target.name} computes its weight from other parameters (weight_norm or parametrize).",
                hint="Use attach_lora, which leaves the weights as they are.",
            )
        weight = target.weight
        if weight.is_meta:
            raise ModelMismatchError(
                f"{target.name} is on the meta device and holds no values.",
                hint="Load the model's weights first.",
            )
        if weight.is_inference():
            raise ModelMismatchError(
                f"{target.name} was created under torch.inference_mode and cannot be changed outside it.",
                hint="Use attach_lora, which leaves the weights as they are, or load the model under torch.no_grad.",
            )
        if not weight.is_floating_point() or tuple(weight.shape) != weight_shape_of(target.layers[0]):
            raise ModelMismatchError(
                f"{target.name} is quantised: its weight is stored as {weight.dtype} {tuple(weight.shape)}.",
                hint="Use attach_lora, which leaves the weights as they are.",
            )


class MergedLora:
    """A LoRA that is part of a model's weights. Made by `merge_into_model`.

    Attributes:
        applied: The LoRA's modules that were merged, in the LoRA's order.
        left_out: Modules for other models of the pipeline.
        scale: The strength of the merge.
    """

    def __init__(
        self,
        targets: Sequence[LoraTarget],
        scale: float,
        compute_dtype: torch.dtype,
        left_out: Sequence[str] = (),
    ) -> None:
        self.applied: tuple[str, ...] = tuple(name for target in targets for name in target.names)
        self.left_out: tuple[str, ...] = tuple(left_out)
        self.scale = scale
        self._changed: list[ChangedWeight] = []
        if scale == 0.0:
            return  # W + 0·ΔW would still turn -0.0 into 0.0
        try:
            copies = _memory_for([target.weight for target in targets])
            for target, copy in zip(targets, copies, strict=True):
                self._changed.append(ChangedWeight.merge(target, scale, compute_dtype, copy))
        except BaseException:
            self._restore()
            raise

    @property
    def merged(self) -> bool:
        """Whether there are weights to restore."""
        return bool(self._changed)

    def unmerge(self, *, force: bool = False) -> None:
        """Put the original weights back, bit for bit. A second call does nothing.

        Args:
            force: Also restore weights that something else has changed since the merge; those changes are lost.

        Raises:
            ModelMismatchError: A weight was changed since the merge, or (even with `force`) now has another shape or
                no values. Nothing is restored then.
        """
        require_restorable(self._changed)
        touched = (
            [] if force else [changed.target.name for changed in self._changed if not changed.is_intact()]
        )
        if touched:
            raise ModelMismatchError(
                f"{len(touched)} of {len(self._changed)} merged weights were changed since the merge, "
                f"first {touched[0]}; restoring would lose those changes.",
                hint="Undo later merges first, or call unmerge(force=True).",
            )
        self._restore()

    def _restore(self) -> None:
        while self._changed:
            self._changed[-1].restore()
            self._changed.pop()  # after restoring, so that a failure loses no original

    def __enter__(self) -> "MergedLora":
        return self

    def __exit__(self, *exception: object) -> None:
        self.unmerge()


def _memory_for(weights: Sequence[Tensor]) -> list[Tensor]:
    """An uninitialised tensor on the CPU for each weight, of its shape and dtype.

    NumPy allocates them as one block because it asks Linux for huge pages: page faults at every 4 KiB would take a
    third of a merge's processor time.
    """
    sizes = [-(-weight.nbytes // _TENSOR_ALIGNMENT_BYTES) * _TENSOR_ALIGNMENT_BYTES for weight in weights]
    parts = torch.from_numpy(np.empty(sum(sizes), np.uint8)).split_with_sizes(sizes)
    return [
        part[: weight.nbytes].view(weight.dtype).view(weight.shape)
        for weight, part in zip(weights, parts, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class ChangedWeight:
    """A merged weight, with what is needed to restore it safely.

    Attributes:
        target: The weight and its change.
        original: The values before the merge, on the CPU.
        checksum: Of the values after the merge; see `checksum_of`.
    """

    target: LoraTarget
    original: Tensor
    checksum: tuple[ChecksumMethod, bytes]

    @classmethod
    def merge(
        cls, target: LoraTarget, scale: float, compute_dtype: torch.dtype, copy: Tensor
    ) -> "ChangedWeight":
        """Change a weight to W + scale·ΔW, rounded once. After an error it is unchanged.

        Args:
            target: The weight.
            scale: Strength.
            compute_dtype: What the sum is formed in; float64 for a float64 weight.
            copy: Takes the original values: a tensor on the CPU of the weight's shape and dtype.

        Raises:
            NonFiniteError: The weight would hold NaN or Inf.
        """
        weight, change = target.weight.detach(), target.change
        compute = at_least_float32(compute_dtype, weight.dtype)
        place = where_float64_is(weight) if compute == torch.float64 else weight
        strength, down = scale, None
        if isinstance(change, LoraFactors):
            strength = scale * change.scale
            up, down = (factor.to(place.device, compute) for factor in (change.up, change.down))
        else:
            up = _formed_for(target.name, change, place, compute).to(place.device).reshape(len(place), -1)
        on_cpu = weight.device.type == "cpu"
        values = place.contiguous().view(len(up), -1)
        original = copy.view(values.shape)
        checksum, kept = xxh3_128(), 0
        try:
            for piece, old, part in row_pieces(
                values, original, up
            ):  # every step while the piece is in the cache
                old.copy_(piece)
                kept += len(old)
                wide = piece if piece.dtype == compute else piece.to(compute)
                if down is None:
                    wide.add_(part, alpha=strength)
                else:
                    add_product(wide, part, down, strength)
                if wide is not piece:
                    wide.copy_(piece.copy_(wide))
                # A finite sum proves finite values, ten times faster; a sum that overflows proves nothing.
                if not isfinite(float(wide.sum())) and not bool(torch.isfinite(wide).all()):
                    raise NonFiniteError(
                        f"{target.name}: the merged weight would hold NaN or Inf in {weight.dtype}.",
                        hint="Check the weights, or merge at a smaller scale.",
                    )
                if on_cpu:
                    checksum.update(piece.view(torch.uint8).numpy().data)
            if values.data_ptr() != weight.data_ptr():
                write_values(weight, values.view(weight.shape))
        except BaseException:
            values[:kept].copy_(original[:kept])
            write_values(weight, values.view(weight.shape))
            raise
        return cls(target, copy, ("xxh3", checksum.digest()) if on_cpu else checksum_of(values))

    def is_intact(self) -> bool:
        """Whether the weight still holds the merged values."""
        return all(
            weight.dtype == self.original.dtype
            and weight.shape == self.original.shape
            and checksum_of(weight, self.checksum[0]) == self.checksum
            for weight in self._weights()
        )

    def can_be_restored(self) -> bool:
        """Whether the original values can be written back.

        PyTorch refuses to change a tensor created under torch.inference_mode outside that mode.
        """
        return all(
            weight.shape == self.original.shape
            and not weight.is_meta
            and (not weight.is_inference() or torch.is_inference_mode_enabled())
            for weight in self._weights()
        )

    def restore(self) -> None:
        """Put the original values back."""
        for weight in self._weights():
            write_values(weight, self.original)

    def _weights(self) -> list[Tensor]:
        """The layers' weights: one, unless the layers were untied after the merge."""
        return list({id(layer.weight): layer.weight for layer in self.target.layers}.values())


def _formed(change: LoraFactors | WeightChange, weight: Tensor, compute: torch.dtype) -> Tensor:
    """The change of a weight; DoRA's depends on it."""
    if isinstance(change, LoraFactors):
        return change.delta(compute)
    return change.delta(weight.detach().to(compute), compute)


def _formed_for(
    name: str, change: LoraFactors | WeightChange, weight: Tensor, compute: torch.dtype
) -> Tensor:
    """The change of a weight; an error names the layer."""
    try:
        return _formed(change, weight, compute)
    except (LoraFormatError, ModelMismatchError) as error:
        raise type(error)(f"{name}: {error.message}", hint=error.hint) from error


def checksum_of(tensor: Tensor, method: ChecksumMethod | None = None) -> tuple[ChecksumMethod, bytes]:
    """A checksum of the tensor's bytes, computed at about memory speed.

    On the CPU it is XXH3. An accelerator lays the bytes out as a table of 64-bit words and sums its columns and rows
    modulo 2⁶⁴. Both guard against accidents, not against intent: a cryptographic hash would take longer than the merge.

    Args:
        tensor: On any device.
        method: The method of an earlier checksum to compare with; by default the one that suits the device.

    Returns:
        The method, and the checksum.
    """
    # A single element counts as contiguous whatever its stride, and a view as bytes wants a stride of 1.
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    method = method or ("xxh3" if tensor.device.type == "cpu" else "sums")
    if method == "xxh3":
        return method, xxh3_128_digest(flat.cpu().numpy().data)
    words = functional.pad(flat, (0, -flat.numel() % (8 * _CHECKSUM_WORDS_PER_ROW))).view(torch.int64)
    table = words.view(-1, _CHECKSUM_WORDS_PER_ROW)
    return method, torch.cat([table.sum(dim=0), table.sum(dim=1)]).cpu().numpy().tobytes()


def write_values(weight: Tensor, values: Tensor) -> None:
    """Overwrite a weight in place, without autograd noticing."""
    with torch.no_grad():
        weight.copy_(values)


def require_restorable(changes: Sequence[ChangedWeight]) -> None:
    """Refuse to restore any weight if one of them cannot be restored.

    Raises:
        ModelMismatchError: Names the first that cannot.
    """
    lost = [changed.target.name for changed in changes if not changed.can_be_restored()]
    if lost:
        raise ModelMismatchError(
            f"{len(lost)} of {len(changes)} merged weights cannot be restored: their shape has changed, they are on "
            f"the meta device, or they are inference tensors; first {lost[0]}.",
            hint="Give these layers ordinary weights of the original shape, then unmerge.",
        )


def match_modules(model: Any, lora: LoraFile, *, any_kind: bool = False) -> list[LoraTarget]:
    """Find the layer of every LoRA module; if one is missing, none is returned.

    Names may be those of the model's checkpoint, or of any format that `align` understands. Path parts that
    torch.compile, DataParallel and PEFT add are ignored. If the model is one part of the checkpoint (a U-Net, for
    keys that begin with "denoiser."), the leading parts that all names share may be missing.

    Args:
        model: A module, or a pipeline with `components`, whose layers' names begin with the component's.
        lora: At least one module, and no changes of other kinds unless `any_kind`.
        any_kind: Whether changes that are more than up and down factors are targets too.

    Returns:
        A target for each weight, in the LoRA's order. Layers that share one weight are one target.

    Raises:
        ModelMismatchError: A module has no layer, or its layer has another kind or shape, or two modules change one
            shared weight differently. The message counts all of them and names the first few.
        LoraFormatError: The LoRA holds LoHa, LoKr, DoRA, Tucker cores or whole differences, and not `any_kind`.
    """
    if not any_kind:
        _require_plain(lora)
    if not lora.names:
        raise ModelMismatchError(f"{lora} changes no module.", hint="Check what it was made from.")
    layers = dict(layers_of(model))
    cut = _prefix_to_cut(lora.names, layers)
    if any(name.removeprefix(cut) not in layers for name in lora.names):
        aligned = _aligned(model, lora, layers)
        lost = [name for path in aligned.lora.names if path not in layers for name in aligned.sources[path]]
        _require_present(model, lora, [*aligned.unmatched, *lost], layers)
        lora = aligned.lora
    _require_fitting(lora, layers, cut)
    return _targets(lora, layers, cut)


def _require_plain(lora: LoraFile) -> None:
    """Refuse changes that a low-rank branch cannot make; without them it would be another LoRA."""
    if lora.changes:
        changes = [f"{name} ({lora.kind_of(name)})" for name in lora.changes]
        raise LoraFormatError(
            f"{counted(len(lora.changes), 'module')} of {lora} {'is' if len(lora.changes) == 1 else 'are'} more than up and down factors: {first_few(changes)}.",
            hint="Use merge_into_model, which forms them, or merge into the checkpoint (sigmascope lora merge).",
        )


def _prefix_to_cut(names: Iterable[str], layers: Mapping[str, Layer]) -> str:
    """The shortest prefix, shared by all names, without which every name is a layer's."""
    wanted = list(names)
    parts = wanted[0].split(".")[:-1]
    for depth in range(len(parts) + 1):
        prefix = "".join(f"{part}." for part in parts[:depth])
        if all(name.startswith(prefix) and name.removeprefix(prefix) in layers for name in wanted):
            return prefix
    return ""


def _aligned(model: Any, lora: LoraFile, layers: Mapping[str, Layer]) -> AlignedLora:
    """The LoRA under the layers' own names."""
    shapes = {
        f"{prefix}{checkpoint_path(name)}": tuple(parameter.shape)
        for prefix, module in _modules_of(model)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    shapes |= {f"{path}.weight": weight_shape_of(layer) for path, layer in layers.items()}
    layout = layout_of(shapes)
    own_parts = {parse_name(name).parts[:1] for name in lora.names}
    if layout.prefixes == {"text_encoder": ""} and len(own_parts) == 1:
        # On its own, the second text encoder of a pipeline looks like the first.
        layout = replace(layout, prefixes=dict.fromkeys(own_parts.pop(), "") or layout.prefixes)
    return align(lora, list(layers), layout)


def _require_present(model: Any, lora: LoraFile, missing: Sequence[str], layers: Mapping[str, Layer]) -> None:
    if not missing:
        return
    others = {
        f"{prefix}{checkpoint_path(path)}": type(module).__name__
        for prefix, part in _modules_of(model)
        for path, module in part.named_modules()
    }
    described = [_describe_missing(name, layers, others) for name in missing[:_MAX_DESCRIBED]]
    raise ModelMismatchError(
        f"{len(missing)} of {counted(len(lora), 'module')} of {lora} {'has' if len(missing) == 1 else 'have'} no Linear or convolution layer in this "
        f"{type(model).__name__}: {first_few([*described, *missing[_MAX_DESCRIBED:]], _MAX_DESCRIBED, between='; ')}.",
        hint="Apply the LoRA to the model it was made for.",
    )


def _describe_missing(name: str, layers: Mapping[str, Layer], others: Mapping[str, str]) -> str:
    if name in others:
        return f"{name} (a {others[name]} has that name)"
    near = get_close_matches(name, layers, n=1)
    return f"{name} (nearest: {near[0]})" if near else name


def _require_fitting(lora: LoraFile, layers: Mapping[str, Layer], cut: str) -> None:
    wrong: list[str] = []
    for name in lora.names:
        layer, own = layers[name.removeprefix(cut)], lora.shape_of(name)
        shape = weight_shape_of(layer)
        if not isinstance(layer, nn.Linear) and layer.groups > 1:
            wrong.append(f"{name} is a grouped convolution ({layer.groups} groups), which is not supported")
        elif not _may_fit(own, layer):
            wrong.append(f"{name} is {own} in the LoRA and {shape} in the model")
    if wrong:
        raise ModelMismatchError(
            f"{len(wrong)} of {counted(len(lora), 'module')} of {lora} {'does' if len(wrong) == 1 else 'do'} not fit: {first_few(wrong, between='; ')}.",
            hint="Apply the LoRA to the model it was made for.",
        )


def _may_fit(own: tuple[int, ...], layer: Layer) -> bool:
    """Whether a change of this shape is for the layer's weight; if its tensors do not tell a shape, forming it will show."""
    return not own or same_matrix(own, weight_shape_of(layer))


def _targets(lora: LoraFile, layers: Mapping[str, Layer], cut: str) -> list[LoraTarget]:
    sharing: dict[int, list[Layer]] = {}
    for layer in layers.values():
        sharing.setdefault(weight_identity(layer), []).append(layer)
    names_by_weight: dict[int, list[str]] = {}
    for name in lora.names:
        names_by_weight.setdefault(weight_identity(layers[name.removeprefix(cut)]), []).append(name)
    return [
        LoraTarget(
            tuple(names), _one_change(lora, names, sharing[weight][0]), tuple(dict.fromkeys(sharing[weight]))
        )
        for weight, names in names_by_weight.items()
    ]


def _one_change(lora: LoraFile, names: list[str], layer: Layer) -> LoraFactors | WeightChange:
    """The change that all modules of one weight agree on, in the layer's own shape if it is plain factors."""
    first, *others = (lora.change(name) for name in names)
    if others:
        whole = _formed(first, layer.weight, torch.float32).flatten()
        formed = (_formed(other, layer.weight, torch.float32).flatten() for other in others)
        if any(not torch.allclose(whole, other) for other in formed):
            raise ModelMismatchError(
                f"{', '.join(names)} share one weight in the model, but {lora} changes them differently.",
                hint="Untie the weights before applying this LoRA.",
            )
    return replace(first, weight_shape=weight_shape_of(layer)) if isinstance(first, LoraFactors) else first


def layers_of(model: Any) -> Iterator[tuple[str, Layer]]:
    """Every Linear and convolution by its path in the checkpoint; in a pipeline, with the component's name before it."""
    for prefix, module in _modules_of(model):
        for path, layer in module.named_modules(remove_duplicate=False):
            if isinstance(layer, Layer):
                yield f"{prefix}{checkpoint_path(path)}", layer


def _modules_of(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules that hold the weights, each with the prefix of its layers' names."""
    parts = {f"{name}.": part for name, part in components_of(model).items()} or {"": model}
    for prefix, part in parts.items():
        if isinstance(part, nn.DataParallel | nn.parallel.DistributedDataParallel):
            yield prefix, part.module
        elif isinstance(part, nn.Module):
            yield prefix, part
        elif not prefix:
            raise ConfigError(
                f"a {type(model).__name__} is neither a module nor a pipeline with components.",
                hint="Pass the model that holds the layers, such as pipe.unet.",
            )


def checkpoint_path(path: str) -> str:
    """The path without the parts that wrappers add."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPER_PARTS)


def weight_shape_of(layer: Layer) -> tuple[int, ...]:
    """The shape from the layer's settings, because a quantised layer packs its weight into another shape."""
    if isinstance(layer, nn.Linear):
        return (layer.out_features, layer.in_features)
    return (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size)


def weight_identity(layer: Layer) -> int:
    """Equal for layers that share a weight. A parametrized layer computes a new tensor at each access."""
    return id(layer.weight if holds_weight(layer) else layer)


def holds_weight(layer: Layer) -> bool:
    """Whether the weight is a parameter of the layer, not computed from others (weight_norm, parametrize)."""
    return layer._parameters.get("weight") is not None


def finite_scale(scale: float) -> float:
    """Return the scale if it is finite.

    Raises:
        ConfigError: It is NaN or infinite.
    """
    if not isfinite(scale):
        raise ConfigError(f"the LoRA scale {scale} is not a finite number.", hint="Use a scale such as 1.0.")
    return scale
