"""Whether a LoRA is on late layers of a text encoder alone: pipelines leave some of them out, and nobody sees which.

SDXL's pipelines take the state before the last layer of their first encoder, others one after three quarters of the
layers, and `clip_skip` counts from the end. None begins in the first half.
"""

import re
from collections.abc import Iterator
from typing import Final

from torch import nn

from sigmascope.integrations.diffusers.recipe import attached_layers
from sigmascope.probes.adapted_modules import adapted_modules, adapter_layers
from sigmascope.probes.peft import adapter_states, adapters_of, number_for

_PLACE: Final = re.compile(r"(.*?)\.(\d+)(?:\.|$)")
"""The name of the list that a layer is in, and its place there."""
_AFTER_ALL: Final = re.compile(r"(norm|text_projection|lm_head)(\.weight|\.bias)?$")


def is_on_late_layers(component: str, model: nn.Module, lora: str) -> bool:
    """Whether a LoRA acts on layers alone that come in the second half of a text encoder, or after all of them.

    Args:
        component: What the pipeline calls the encoder.
        model: The encoder.
        lora: As `loras_of` names it: "text_encoder.style".
    """
    is_on_any = False
    for layer in attached_layers(component, model).get(lora) or _layers_of(model, lora.partition(".")[2]):
        if not _is_late(model, layer):
            return False
        is_on_any = True
    return is_on_any


def _layers_of(model: nn.Module, adapter: str) -> Iterator[str]:
    """The layers on which an adapter of PEFT acts."""
    for name, layer in adapter_layers(model):
        states = adapter_states(layer)
        is_on = adapter in states.active and not states.disabled and not states.merged
        is_on = is_on and adapter in adapters_of(layer) and number_for(layer, "scaling", adapter) != 0.0
        if is_on or adapter in states.merged:
            yield name


def _is_late(model: nn.Module, layer: str) -> bool:
    place = _PLACE.match(layer)
    if place is None:
        return _AFTER_ALL.search(layer) is not None
    return int(place[2]) > 0 and 2 * int(place[2]) >= _length_of(model, place[1])


def _length_of(model: nn.Module, name: str) -> int:
    """How many layers a list of a model has; 0 if it has no such list."""
    lists = (module for own, module in adapted_modules(model) if own == name)
    return next((len(found) for found in lists if isinstance(found, nn.ModuleList)), 0)
