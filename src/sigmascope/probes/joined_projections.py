"""The layers that diffusers' `fuse_qkv_projections` joins others into, whose weights are copies without adapters."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from sigmascope.probes.adapted_modules import bare, roots_of
from sigmascope.probes.models import own_parameters
from sigmascope.probes.module_tree import ModuleTree, tree_of

_JOINED: Final = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_kv": ("to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "to_added_kv": ("add_k_proj", "add_v_proj"),
}
"""What diffusers' `fuse_qkv_projections` makes of an attention's layers, and of which: of their weights without adapters."""


def is_joined_as_it_is(layer: nn.Module, rows: Mapping[int, Tensor]) -> bool:
    """Whether the joined layer has a layer's weight as it is now, with what was merged into it.

    An accelerator is not asked: it would be waited for.
    """
    both = ((tensor, rows.get(id(tensor))) for _, tensor in own_parameters(layer))
    return all(joined is None or own.device.type != "cpu" or torch.equal(own, joined) for own, joined in both)


def bypassed_layers(model: object) -> frozenset[int]:
    """By `id` the layers that a forward pass leaves out, since their attention has joined their weights into another."""
    return frozenset(
        id(layer) for _, layers, is_run in _joined_projections(model) if is_run for layer in layers
    )


def _joined_projections(model: object) -> Iterator[tuple[nn.Module, list[nn.Module], bool]]:
    """Each joined layer, the layers that it was made of with adapters around them, and whether it runs in their place."""
    for _, root in roots_of(model):
        tree = tree_of(root)
        places: list[int] = tree.derive("attentions that join", partial(_places_that_join, tree))
        for place in places:
            own = tree.own[place]
            layers = own["_modules"]
            if _JOINED.keys().isdisjoint(layers):
                continue
            is_joined = own.get("fused_projections") is True
            is_run = is_joined and _runs_joined(tree.modules[place], own.get("processor"))
            for joined, names in _JOINED.items():
                parts = [layers[name] for name in names if layers.get(name) is not None]
                if parts and layers.get(joined) is not None:
                    yield layers[joined], parts, is_run


def _places_that_join(tree: ModuleTree) -> list[int]:
    return tree.of_class(lambda kind: hasattr(kind, "fuse_projections"))


def joined_weights(model: object) -> tuple[dict[int, Tensor], frozenset[int]]:
    """What joined layers compute with: by the `id` of a weight or bias its rows of theirs; and the `id`s of theirs.

    Older attentions keep joined layers that they run no more: of these the `id`s alone.
    """
    rows: dict[int, Tensor] = {}
    joined: set[int] = set()
    for layer, parts, is_run in _joined_projections(model):
        for name, whole in own_parameters(layer):
            own = [dict(own_parameters(bare(part))).get(name) for part in parts]
            sizes = [tensor.shape[0] for tensor in own if tensor is not None]
            if len(sizes) != len(parts) or sum(sizes) != whole.shape[0]:
                continue
            joined.add(id(whole))
            if is_run:
                pieces = torch.split(whole.detach(), sizes)
                rows |= {id(tensor): piece for tensor, piece in zip(own, pieces, strict=True)}
    return rows, frozenset(joined)


def _runs_joined(attention: nn.Module, processor: object) -> bool:
    """Whether its joined layers are in use: diffusers' older attentions keep them once they are separated again."""
    return hasattr(type(attention), "unfuse_projections") or type(processor).__name__.startswith("Fused")
