"""The instrument that finds nodes of which nothing of a latent or picture that they are given may be left in what they give.

As in a blend with factor 1, or a latent multiplied with 0: what such a node gives is all of one value, or another one of its
inputs. Both are queued on the tensor's own device, and read at the prompt's end; of pictures, which are large, the second alone.
What was found of a node whose output ComfyUI kept is kept too.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from sigmascope.integrations.comfyui.instruments import Instrument
from sigmascope.integrations.comfyui.kept_loras import Kept
from sigmascope.integrations.comfyui.needs import output_data
from sigmascope.integrations.comfyui.posted_graph import links_of
from sigmascope.integrations.comfyui.recording import PromptRecording
from sigmascope.integrations.comfyui.sampling import first_of
from sigmascope.integrations.comfyui.wraps import Call, Wrap
from sigmascope.probes.reading import attempt, lookup
from sigmascope.probes.tensors import why_unreadable

_NAME: Final = "latents"
_MOST: Final = 1000
LOST: Final = "a node after the sampler gave all of one value, or another of its inputs, so that nothing may be left of what was sampled with it"


class _Seen:
    """Of one prompt: by node and input, whether it leaves nothing of a latent; and at the end, these inputs by node."""

    def __init__(self) -> None:
        self.looks: dict[str, dict[str, Tensor]] = {}
        self.lost: dict[str, frozenset[str]] = {}


class Latents(Instrument):
    """Wraps `execution.get_output_data`."""

    name = _NAME
    gives = "which nodes leave nothing of a latent or picture"
    needs = (output_data("obj", "input_data_all"),)

    def put_on(self) -> None:
        """See `Instrument`."""
        self._kept: Kept[frozenset[str]] = Kept(_MOST)
        self.wraps.append(Wrap(self.needs[0], self, after=self._outputs))

    def _outputs(self, call: Call, _known: None, result: Any, error: BaseException | None) -> None:
        prompt, inputs = self.session.prompt_of(call.get("prompt_id")), call.get("input_data_all")
        node = None if prompt is None else prompt.nodes.get(str(call.get("unique_id")))
        if prompt is None or node is None or error is not None or not isinstance(inputs, Mapping):
            return
        kinds = map(str, getattr(call.get("obj"), "RETURN_TYPES", ()))
        made = [
            (kind, first_of(values))
            for kind, values in zip(kinds, result[0] or (), strict=False)
            if kind in ("LATENT", "IMAGE") and isinstance(values, list) and len(values) == 1
        ]
        if not made or node.is_sampler:
            return
        given = {name: first_of(inputs.get(name)) for name, _ in links_of(prompt.info(node.id))}
        looks = attempt(partial(_looks, given, made)).value
        if looks:
            prompt.until_the_end(_NAME, _Seen).looks[node.id] = looks

    def at_the_end(self, prompt: PromptRecording) -> None:
        """See `Instrument`."""
        seen = prompt.until_the_end(_NAME, _Seen)
        now = {
            node_id: frozenset(name for name, lost in looks.items() if attempt(partial(bool, lost)).value)
            for node_id, looks in seen.looks.items()
        }
        kept = self._kept.of_prompt(prompt, {node_id: [lost] for node_id, lost in now.items()})
        seen.lost = {**{node_id: lost for node_id, _, lost in kept}, **now}


def lost_in(prompt: PromptRecording) -> Mapping[str, frozenset[str]]:
    """By node, the inputs of which nothing may be left in what it gives. At the prompt's end."""
    return prompt.until_the_end(_NAME, _Seen).lost


def _tensor_of(value: object) -> Tensor | None:
    held = lookup(value, "samples") if isinstance(value, Mapping) else value
    return held if isinstance(held, Tensor) and why_unreadable(held) is None and held.numel() else None


def _looks(given: Mapping[str, object], gave: Sequence[tuple[str, object]]) -> dict[str, Tensor]:
    """Whether nothing is left of each input: what was given is all of one value, or another one than it.

    Args:
        given: By input.
        gave: Each output, and its type before it.
    """
    known = {name: one for name, value in given.items() if (one := _tensor_of(value)) is not None}
    made = [(one, kind == "LATENT") for kind, value in gave if (one := _tensor_of(value)) is not None]
    if not known or len(made) < len(gave) or not (len(known) > 1 or any(is_latent for _, is_latent in made)):
        return {}
    found = {}
    is_flat = [one.amin() == one.amax() if is_latent else _never(one) for one, is_latent in made]
    for name, own in known.items():
        others = [one for other, one in known.items() if other != name]
        lost = [
            torch.stack([flat, *(_is_same(one, other) & ~_is_same(own, other) for other in others)]).any()
            for (one, _), flat in zip(made, is_flat, strict=True)
        ]
        found[name] = torch.stack(lost).all()
    return found


def _never(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.bool, device=like.device)


def _is_same(one: Tensor, other: Tensor) -> Tensor:
    if one.shape != other.shape or one.device != other.device:
        return _never(one)
    return (one == other).all()


INSTRUMENT = Latents
