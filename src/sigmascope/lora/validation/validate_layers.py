"""Measure every compared tensor of two models against what a LoRA adds to it."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from sigmascope.errors import ModelMismatchError
from sigmascope.lora.extraction.layer_pool import run_layers
from sigmascope.lora.models.layer_kinds import WEIGHT
from sigmascope.lora.models.pairs import CheckpointPair
from sigmascope.lora.names.changed_keys import ChangedKeys, require_shape
from sigmascope.lora.validation.module_errors import ModuleError
from sigmascope.lora.validation.reconstruction import ResidualMeter
from sigmascope.progress import Progress


@dataclass(frozen=True, slots=True)
class Measured:
    """All that was measured.

    Attributes:
        modules: The layers that changed, and whatever else the LoRA changes.
        unchanged_layers: How many layers did not change and have no module.
        uncovered: ‖Δ‖ by key of other tensors (biases, norms) that changed and are not in the LoRA.
    """

    modules: tuple[ModuleError, ...]
    unchanged_layers: int
    uncovered: Mapping[str, float]


def measure_layers(
    pair: CheckpointPair,
    targets: ChangedKeys,
    *,
    workers: int | None,
    progress: Progress,
) -> Measured:
    """Measure all compared tensors of a pair, several at a time.

    Args:
        pair: The two models.
        targets: The LoRA, whose modules are read one at a time.
        workers: Threads; as many as cores when None.
        progress: Told after each tensor.
    """
    layers = [layer + WEIGHT for layer in pair.layers]
    sizes = {key: prod(pair.base.info(key).shape) for key in (*layers, *pair.others)}
    meter = ResidualMeter(pair)
    found: dict[str, ModuleError] = {}
    for key, module in run_layers(sizes, lambda key: _measure(meter, pair, targets, key), workers=workers):
        found[key] = module
        progress(len(found), len(sizes), module.name)
    changed = [found[key] for key in layers if key in targets.names or found[key].delta_norm > 0]
    covered = [found[key] for key in pair.others if key in targets.names]
    uncovered = {key: found[key].delta_norm for key in pair.others if key not in targets.names}
    return Measured(
        (*changed, *covered),
        len(layers) - len(changed),
        {key: norm for key, norm in uncovered.items() if norm > 0},
    )


def _measure(meter: ResidualMeter, pair: CheckpointPair, targets: ChangedKeys, key: str) -> ModuleError:
    layer, shape = key.removesuffix(WEIGHT), pair.base.info(key).shape
    name = targets.names.get(key)
    if name is None:
        norm = meter.measure(key).delta_norm
        return ModuleError(layer, shape, "missing", None, norm, norm)
    kind, rank = targets.lora.kind_of(name), targets.lora.rank_of(name)
    try:
        change = targets.change(key)
        require_shape(change, shape)
        residual = meter.measure(key, change)
    except ModelMismatchError as error:
        norm = meter.measure(key).delta_norm
        return ModuleError(layer, shape, "wrong_shape", rank, norm, norm, error.message, kind)
    return ModuleError(layer, shape, "applied", rank, residual.delta_norm, residual.error_norm, None, kind)
