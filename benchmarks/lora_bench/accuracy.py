"""How far a LoRA is from the best one of its rank, layer by layer."""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from safetensors import safe_open

from lora_bench.optimum import Optimum, changes


@dataclass(frozen=True)
class LayerError:
    """What a stored LoRA leaves of one layer's change: ‖Δ − s·BA‖, in float64."""

    rank: int
    error: float


@dataclass(frozen=True)
class ClassRatio:
    """Error over optimum in the layers of one shape: 1 is the best that the rank allows.

    Attributes:
        shape: Of the weights.
        layers: How many were compared.
        mean, worst: Of error / optimum; None where the rank leaves nothing to compare with.
    """

    shape: tuple[int, ...]
    layers: int
    mean: float | None
    worst: float | None


def stored_errors(folder: Path, lora: Path) -> dict[str, LayerError]:
    """Measure every layer that a LoRA in native names holds.

    Args:
        folder: With the pair that it was made from.
        lora: The file.
    """
    errors = {}
    with safe_open(lora, "pt") as file:
        held = set(file.keys())
        for layer, change in changes(folder):
            if f"{layer}.lora_up.weight" not in held:
                continue
            up = file.get_tensor(f"{layer}.lora_up.weight").double().flatten(1)
            down = file.get_tensor(f"{layer}.lora_down.weight").double().flatten(1)
            rank = down.shape[0]
            scale = float(file.get_tensor(f"{layer}.alpha")) / rank
            residual = change.flatten(1).addmm_(up, down, alpha=-scale)
            errors[layer] = LayerError(rank, float(residual.norm()))
    return errors


def layer_ratios(errors: dict[str, LayerError], optimum: Optimum) -> dict[str, float]:
    """Error over optimum of each layer that has an optimum above 0 at the rank it was stored at.

    A rank that could hold the whole change, or a layer without one, has nothing to compare with: what is left is the
    storage's rounding.
    """
    ratios = {}
    for layer, stored in errors.items():
        best = optimum.layers[layer]
        if stored.rank < min(best.shape[0], math.prod(best.shape[1:])) and best.error(stored.rank) > 0:
            ratios[layer] = stored.error / best.error(stored.rank)
    return ratios


def class_ratios(errors: dict[str, LayerError], optimum: Optimum) -> list[ClassRatio]:
    """Mean and worst ratio of each shape, the commonest shape first."""
    ratios = layer_ratios(errors, optimum)
    classes: dict[tuple[int, ...], list[str]] = {}
    for layer in errors:
        classes.setdefault(optimum.layers[layer].shape, []).append(layer)
    rows = []
    for shape, layers in sorted(classes.items(), key=lambda item: -len(item[1])):
        known = [ratios[layer] for layer in layers if layer in ratios]
        rows.append(
            ClassRatio(shape, len(layers), mean(known) if known else None, max(known) if known else None)
        )
    return rows
