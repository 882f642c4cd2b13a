"""The ControlNets of a pipeline whose output is zero in a call: by its scale, or since their last layers are untrained.

A new ControlNet ends in layers of zeros, the zero convolutions of L. Zhang et al., Adding Conditional Control to
Text-to-Image Diffusion Models (arXiv:2302.05543): all that it gives is zero until these are trained, with a LoRA on it
and without. Several ControlNets are one component, and each of them is called by a name of its own here:
"controlnet.nets.0".
"""

from collections.abc import Collection, Iterator, Mapping
from math import inf
from typing import TYPE_CHECKING, Final

from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from sigmascope.probes.adapted_modules import adapter_layers, base_weights
from sigmascope.probes.copies import Pending, copy_to_host
from sigmascope.probes.models import children_of, unwrap
from sigmascope.probes.module_tree import tree_of
from sigmascope.probes.reading import attempt

if TYPE_CHECKING:
    from sigmascope.probes.applied_patch import AppliedPatch

CONTROL: Final = "controlnet"
"""What the names of ControlNets begin with among the components of a pipeline."""
_SEVERAL: Final = "nets"
"""Where a component that is several ControlNets keeps them."""
_LAST_LAYERS: Final = (
    "controlnet_blocks.",
    "controlnet_single_blocks.",
    "controlnet_down_blocks.",
    "controlnet_mid_block.",
)
"""What the names of the layers begin with that diffusers' ControlNets give all their output through."""
_LAST_IN_BLOCK: Final = ".after_proj."
"""What such layers of Z-Image's and Cosmos' are called, one in each block."""


def nets_of(name: str, part: nn.Module) -> dict[str, nn.Module]:
    """The ControlNets of a component, by name: itself, or those that it holds."""
    held = children_of(part).get(_SEVERAL)
    if not isinstance(held, nn.ModuleList):
        return {name: part}
    inner = {f"{name}.{_SEVERAL}.{place}": unwrap(net) for place, net in children_of(held).items()}
    return {net: module for net, module in inner.items() if module is not None}


def scales_by_net(name: str, part: object, scales: object) -> dict[str, float]:
    """The size of what a component's ControlNets multiply their output by in a call; 1 where that is no number."""
    nets = [*nets_of(name, part)] if isinstance(part, nn.Module) else [name]
    if nets != [name] and isinstance(scales, list | tuple) and len(scales) == len(nets):
        return dict(zip(nets, map(_largest, scales), strict=True))
    return dict.fromkeys(nets, _largest(scales))


def _largest(scales: object) -> float:
    """The size of the largest of some scales; 1 where they are no numbers."""
    each = scales if isinstance(scales, list | tuple) else [scales]
    sizes = [abs(scale) if isinstance(scale, int | float) else 1.0 for scale in each]
    return max(sizes, default=1.0)


def net_of(key: str, nets: Collection[str]) -> str | None:
    """The ControlNet that a weight is of, by the weight's name in its pipeline; None if it is of none of these."""
    return next((net for net in nets if key.startswith(f"{net}.")), None)


def begin_mute_nets(models: Mapping[str, nn.Module], components: Collection[str]) -> Pending[frozenset[str]]:
    """The names of ControlNets that give zeros, since all their last layers are zero and no LoRA acts on these.

    An accelerator is not waited for. Of classes that are not diffusers' own none is given: nobody knows their last layers.

    Args:
        models: Those of a pipeline, by name.
        components: The names of those of them that are looked at.
    """
    zeros: dict[str, Pending[bool]] = {}
    for component in components:
        for name, net in nets_of(component, models[component]).items():
            if not _shares_layers(net, [part for other, part in models.items() if other != component]):
                zeros[name] = _begin_gives_zeros(net)
    return Pending(
        lambda: frozenset(name for name, is_zero in zeros.items() if is_zero.result()), zeros.values()
    )


def on_last_layers(patches: "Collection[AppliedPatch]", net: str) -> "list[AppliedPatch]":
    """Those of the changes of a ControlNet that are on the layers which it gives all its output through."""
    return [patch for patch in patches if _is_last(patch.key.removeprefix(f"{net}."))]


def _is_last(weight: str) -> bool:
    return weight.startswith(_LAST_LAYERS) or _LAST_IN_BLOCK in weight


def _shares_layers(net: nn.Module, others: list[nn.Module]) -> bool:
    """Whether a layer with a LoRA is another model's too: Z-Image's ControlNet has some of its denoiser."""
    own = {id(layer) for _, layer in adapter_layers(net)}
    return any(id(module) in own for other in others for module in tree_of(other).modules)


def _begin_gives_zeros(net: nn.Module) -> Pending[bool]:
    return attempt(lambda: _begin_all_zero([*_last_weights(net)])).value or Pending(lambda: False)


def _last_weights(net: nn.Module) -> Iterator[Tensor]:
    if not str(getattr(type(net).forward, "__module__", "")).startswith("diffusers."):
        return
    for name, weight in base_weights(net):
        if _is_last(name):
            yield weight.detach()


def _begin_all_zero(weights: list[Tensor]) -> Pending[bool]:
    """Whether there are some, and all are zero. On the CPU the first that is not ends the look."""
    on_cpu = [weight for weight in weights if weight.device.type == "cpu"]
    others = [weight for weight in weights if weight.device.type not in ("cpu", "meta")]
    are_read = 0 < len(weights) == len(on_cpu) + len(others)
    if not are_read or any(bool(weight.any()) for weight in on_cpu):
        return Pending(lambda: False)
    if not others:
        return Pending(lambda: True)
    copies = [
        copy_to_host(get_total_norm([one for one in others if one.device == device], norm_type=inf))
        for device in {weight.device for weight in others}
    ]
    return Pending(lambda: not any(bool(copy.tensor) for copy in copies), copies)
