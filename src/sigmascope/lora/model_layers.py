"""A model's layers that a LoRA can change, by their paths in the model's checkpoint."""

from collections.abc import Iterator

from torch import nn

Layer = nn.Linear | nn.Conv2d

# Wrappers put these into a layer's path; the checkpoint knows nothing of them.
_WRAPPER_PARTS = frozenset({"_orig_mod", "base_layer"})


def layers_of(model: nn.Module) -> Iterator[tuple[str, Layer]]:
    """Every Linear and Conv2d by its path in the checkpoint."""
    inner = (
        model.module if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel) else model
    )
    for path, module in inner.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear | nn.Conv2d):
            yield checkpoint_path(path), module


def checkpoint_path(path: str) -> str:
    """The path without the parts that wrappers put into it."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPER_PARTS)


def weight_shape_of(layer: Layer) -> tuple[int, ...]:
    """The shape from the layer's settings: a quantised layer stores its weight packed in another."""
    if isinstance(layer, nn.Linear):
        return (layer.out_features, layer.in_features)
    return (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size)


def weight_identity(layer: Layer) -> int:
    """The same for layers of one weight. A parametrized layer computes its own anew at each access."""
    return id(layer.weight if holds_weight(layer) else layer)


def holds_weight(layer: Layer) -> bool:
    """Whether the weight is a parameter of the layer, not computed from others (weight_norm, parametrize)."""
    return layer._parameters.get("weight") is not None
