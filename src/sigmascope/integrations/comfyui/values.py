"""The instrument that finds where a picture went black: the first output with NaN or infinity, or all of one value.

One reduction for each tensor is queued on the host's thread, on the tensor's own device. Its two numbers are read at the
prompt's end, when the device has long passed it. An empty latent is constant and meant to be: a constant counts only where
something was made of a latent, or of a picture that was not constant itself. What a node takes of one that did not run in
this prompt, because ComfyUI kept its output, is looked at too: it may have been black before, or been changed since.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from sigmascope.integrations.comfyui.findings import tell
from sigmascope.integrations.comfyui.instruments import Instrument
from sigmascope.integrations.comfyui.needs import output_data
from sigmascope.integrations.comfyui.posted_graph import links_of
from sigmascope.integrations.comfyui.recording import NodeWatch, PromptRecording
from sigmascope.integrations.comfyui.wraps import Call, Wrap
from sigmascope.probes.reading import attempt
from sigmascope.probes.tensors import leaves_of

Kind = Literal["latent", "image", "other"]
_MOST_TENSORS: Final = 32
_ODD: Final = "odd_outputs"
_KEPT: Final = "values that were kept"


class _Look(NamedTuple):
    node: str
    slot: int
    kind: Kind
    place: str
    lowest_and_highest: tuple[Tensor, Tensor] | None
    why_not: str | None
    taken_by: str | None = None
    """The first node that took it, of an output that was kept from an earlier prompt."""


class Values(Instrument):
    """Wraps `execution.get_output_data`, and looks at what it gives, and takes of what was kept."""

    name = "values"
    gives = "where NaN, infinity or a constant begins"
    needs = (output_data("obj", "input_data_all"),)

    def put_on(self) -> None:
        """See `Instrument`."""
        self.wraps.append(Wrap(self.needs[0], self, before=self._inputs, after=self._outputs))

    def _inputs(self, call: Call) -> None:
        prompt, inputs = self.session.prompt_of(call.get("prompt_id")), call.get("input_data_all")
        if prompt is None or not isinstance(inputs, dict):
            return
        node_id = str(call.get("unique_id"))
        looks: list[_Look] = prompt.until_the_end(self.name, list)
        seen: set[tuple[str, int]] = prompt.until_the_end(_KEPT, set)
        for name, source in links_of(prompt.info(node_id)):
            if source[0] in prompt.nodes or source in seen:
                continue
            seen.add(source)
            nodes = getattr(sys.modules.get("nodes"), "NODE_CLASS_MAPPINGS", {})
            kind = _kind(nodes.get(prompt.info(source[0]).get("class_type")), source[1])
            for place, tensor in _tensors(inputs.get(name)):
                looks.append(_look(*source, kind, place, tensor)._replace(taken_by=node_id))

    def _outputs(self, call: Call, _known: None, result: Any, error: BaseException | None) -> None:
        prompt = self.session.prompt_of(call.get("prompt_id"))
        if (
            prompt is None
            or error is not None
            or not isinstance(result, tuple)
            or len(result) < 3
            or result[2]
        ):
            return  # of a node that expands, the outputs are those of its nodes
        looks: list[_Look] = prompt.until_the_end(self.name, list)
        outputs = result[0]
        for slot, values in enumerate(outputs if isinstance(outputs, list) else ()):
            kind = _kind(call.get("obj"), slot)
            for place, tensor in _tensors(values):
                looks.append(_look(str(call.get("unique_id")), slot, kind, place, tensor))

    def at_the_end(self, prompt: PromptRecording) -> None:
        """See `Instrument`."""
        looks: list[_Look] = prompt.until_the_end(self.name, list)
        constant: dict[tuple[str, int], bool] = {}
        odd: list[dict[str, Any]] = []
        for look in looks:
            what = None if look.lowest_and_highest is None else _what(*look.lowest_and_highest)
            node = prompt.nodes.get(look.node)
            if look.kind != "other" and look.place in ("", "samples"):
                constant[look.node, look.slot] = what == "constant"
            if look.lowest_and_highest is None or what is None:
                continue
            if look.taken_by is not None:
                if what != "constant":
                    odd.append(_odd(what, look, prompt) | {"kept": True, "taken_by": look.taken_by})
                continue
            if node is None:
                continue
            if what == "constant" and not _matters(look, node, prompt, constant):
                continue
            node.add(_ODD, {"what": what, "output": look.slot, "place": look.place})
            odd.append(_odd(what, look, prompt))
        if not odd:
            return
        first = prompt.facts["first_odd_output"] = odd[0]
        if first.get("kept"):
            source = {"source": first["node"], "source_class": first["class_type"]}
            tell(prompt.nodes[first["taken_by"]], "comfyui.odd_kept_output", what=first["what"], **source)
        else:
            tell(prompt.nodes[first["node"]], "comfyui.odd_output", what=first["what"])


_KINDS: Final[Mapping[str, Kind]] = {"LATENT": "latent", "IMAGE": "image"}


def _kind(node: Any, slot: int) -> Kind:
    """What an output of a node, or of its class, is."""
    kinds = getattr(node, "RETURN_TYPES", ())
    return _KINDS.get(str(kinds[slot]) if slot < len(kinds) else "", "other")


def _odd(what: str, look: _Look, prompt: PromptRecording) -> dict[str, Any]:
    class_type = str(prompt.info(look.node).get("class_type", "unknown"))
    return {"what": what, "node": look.node, "class_type": class_type, "output": look.slot}


def _tensors(values: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors with floating-point numbers in an output, with the innermost name on the way to each."""
    for number, leaf in enumerate(leaves_of(values)):
        if number >= _MOST_TENSORS:
            return
        if attempt(partial(_has_values, leaf.tensor)).value:
            yield leaf.name, leaf.tensor


def _has_values(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0 and tensor.device.type != "meta"


def _look(node: str, slot: int, kind: Kind, place: str, tensor: Tensor) -> _Look:
    # A type may have no such reduction on this device, as float8; a library's own tensors may know nothing of it.
    looked = attempt(lambda: torch.aminmax(tensor.detach()))
    if looked.value is None:
        return _Look(node, slot, kind, place, None, f"{type(tensor).__name__}: {looked.reason}")
    return _Look(node, slot, kind, place, (looked.value[0], looked.value[1]), None)


def _what(lowest: Tensor, highest: Tensor) -> str | None:
    read = attempt(lambda: (float(lowest), float(highest)))
    if read.value is None:
        return None
    low, high = read.value
    if math.isnan(low) or math.isnan(high):
        return "NaN"
    if math.isinf(low) or math.isinf(high):
        return "infinity"
    return "constant" if low == high else None


def _matters(
    look: _Look, node: NodeWatch, prompt: PromptRecording, constant: Mapping[tuple[str, int], bool]
) -> bool:
    """Whether a constant is no intention: it was sampled, or made of a latent or picture that was not constant."""
    if look.kind == "other" or look.place not in ("", "samples"):
        return False
    if node.is_sampler:
        return True
    return any(constant.get(source) is False for _, source in links_of(prompt.info(node.id)))


INSTRUMENT = Values
