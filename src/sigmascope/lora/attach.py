"""Hot application: the layers also run the low-rank branch, and no weight is touched.

y = W·x + scale · s · up(down(x)). For a convolution, `down` runs with the layer's own stride, padding and
dilation, and `up` is 1×1: together they are the convolution by ΔW.
"""

import logging
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.hooks import RemovableHandle

from sigmascope.errors import ModelMismatchError
from sigmascope.lora.applying.placed_factors import PlacedFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.matching import LoraTarget, match_modules
from sigmascope.lora.model_layers import Layer
from sigmascope.lora.scale import finite_scale

logger = logging.getLogger(__name__)


def attach_lora(model: nn.Module, lora: LoraFile, scale: float = 1.0) -> "AttachedLora":
    """Apply a LoRA while the model runs, through forward hooks; the weights stay as they are.

    Several LoRAs may be attached to one model; their changes add up. Layers that share a weight all get it.
    A model may be compiled after this: the scale and `detach` still act.

    Args:
        model: Holds a Linear or Conv2d for every module of the LoRA.
        lora: The changes.
        scale: Strength, settable later. At 0 the outputs are those of the bare model, bit for bit.

    Returns:
        A handle that is also a context manager; leaving it detaches.

    Raises:
        ModelMismatchError: A module does not fit the model, or sits where hooks do not run: in a model that
            is already compiled, or in nn.MultiheadAttention's output projection.
        NonFiniteError: Factors that hold NaN or Inf, or do so in the layer's dtype however they share the change.
        ConfigError: `scale` is NaN or infinite.
    """
    targets = match_modules(model, lora)
    _require_hooks_run(model, targets)
    if lora.unused_keys:
        logger.warning("%s: %d keys are not applied: %s", lora, len(lora.unused_keys), lora.unused_keys[:3])
    return AttachedLora(targets, scale)


class AttachedLora:
    """A LoRA attached to a running model. Made by `attach_lora`.

    Attributes:
        applied: The LoRA's modules that act, in the LoRA's order.
    """

    def __init__(self, targets: list[LoraTarget], scale: float) -> None:
        self.applied: tuple[str, ...] = tuple(name for target in targets for name in target.names)
        self._strength = _Strength(finite_scale(scale))
        self._branches = [
            _Branch(target.name, PlacedFactors(target.name, target.factors, layer), self._strength)
            for target in targets
            for layer in target.layers
        ]
        layers = [layer for target in targets for layer in target.layers]
        self._handles: list[RemovableHandle] = [
            layer.register_forward_hook(branch, with_kwargs=True)
            for layer, branch in zip(layers, self._branches, strict=True)
        ]

    @property
    def scale(self) -> float:
        """The strength now; setting it acts from the next call of each layer."""
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
        """Modules whose layer has not run since the LoRA was attached, so that it had no effect there."""
        return tuple(dict.fromkeys(branch.name for branch in self._branches if not branch.has_run))

    def detach(self) -> None:
        """Remove this LoRA's hooks and nothing else; the scale is then 0. A second call does nothing."""
        self._strength.value = 0.0  # code compiled with the hooks in it looks at this
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> "AttachedLora":
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.detach()


@dataclass
class _Strength:
    """The scale that all hooks of one LoRA read."""

    value: float


class _Branch:
    """The forward hook of one layer: adds the low-rank branch to the layer's output."""

    def __init__(self, name: str, factors: PlacedFactors, strength: _Strength) -> None:
        self.name = name
        self.has_run = False
        self._factors = factors
        self._strength = strength

    def __call__(
        self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        self.has_run = True
        strength = self._strength.value
        if strength == 0.0:
            return None  # the output itself, not a copy plus zero
        x = args[0] if args else kwargs["input"]
        up, down = self._factors.near(x)
        if isinstance(layer, nn.Conv2d):
            # The layer's own convolution, because it alone knows padding modes such as "reflect".
            branch = functional.conv2d(layer._conv_forward(x, down, None), up)
        else:
            branch = functional.linear(functional.linear(x, down), up)
        return torch.add(output, branch.to(output.dtype), alpha=strength * self._factors.scale)


def _require_hooks_run(model: nn.Module, targets: list[LoraTarget]) -> None:
    """Refuse layers whose hooks would never run, because the LoRA would silently do nothing there."""
    names = {layer: target.name for target in targets for layer in target.layers}
    for path, module in model.named_modules():
        if _is_compiled(module) and any(inner in names for inner in module.modules()):
            raise ModelMismatchError(
                f"{path or 'the model'} is already compiled, and a LoRA attached to it now would not run.",
                hint="Attach it before torch.compile, or use merge_lora, which changes the weights.",
            )
    bypassed = [name for layer, name in names.items() if isinstance(layer, NonDynamicallyQuantizableLinear)]
    if bypassed:
        raise ModelMismatchError(
            f"{', '.join(bypassed)}: nn.MultiheadAttention reads this weight without calling the layer.",
            hint="Use merge_lora, which changes the weight.",
        )


def _is_compiled(module: nn.Module) -> bool:
    """By torch.compile(module), which wraps it, or by module.compile()."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None
