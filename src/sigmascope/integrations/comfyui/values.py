"""The instrument that finds where a picture went black: the first output with NaN or infinity, or all of one value.

One reduction for each tensor is queued on the host's thread, on the tensor's own device. Its two numbers are read at the
prompt's end, when the device has long passed it. An empty latent is constant and meant to be: a constant counts only where
something was made of a latent, or of a picture that was not constant itself.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from sigmascope.integrations.comfyui.findings import tell
from sigmascope.integrations.comfyui.instruments import Instrument
from sigmascope.integrations.comfyui.needs import output_data
from sigmascope.integrations.comfyui.recording import NodeWatch, PromptRecording
from sigmascope.integrations.comfyui.wraps import Call, Wrap
from sigmascope.probes.tensors import leaves_of

Kind = Literal["latent", "image", "other"]
_MOST_TENSORS: Final = 32
_ODD: Final = "odd_outputs"


class _Look(NamedTuple):
    node: str
    slot: int
    kind: Kind
    place: str
    lowest_and_highest: tuple[Tensor, Tensor] | None
    why_not: str | None


class Values(Instrument):
    """Wraps `execution.get_output_data`, and looks at what it gives."""

    name = "values"
    gives = "where NaN, infinity or a constant begins"
    needs = (output_data("obj"),)

    def put_on(self) -> None:
        """See `Instrument`."""
        self.wraps.append(Wrap(self.needs[0], self, after=self._outputs))

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
        outputs, kinds = result[0], getattr(call.get("obj"), "RETURN_TYPES", ())
        for slot, values in enumerate(outputs if isinstance(outputs, list) else ()):
            kind: Kind = _KINDS.get(str(kinds[slot]) if slot < len(kinds) else "", "other")
            for place, tensor in _tensors(values):
                looks.append(_look(str(call.get("unique_id")), slot, kind, place, tensor))

    def at_the_end(self, prompt: PromptRecording) -> None:
        """See `Instrument`."""
        looks: list[_Look] = prompt.until_the_end(self.name, list)
        constant: dict[tuple[str, int], bool] = {}
        odd: list[dict[str, Any]] = []
        for look in looks:
            what = look.why_not if look.lowest_and_highest is None else _what(*look.lowest_and_highest)
            node = prompt.nodes.get(look.node)
            if look.kind != "other" and look.place in ("", "samples"):
                constant[look.node, look.slot] = what == "constant"
            if look.lowest_and_highest is None or what is None or node is None:
                continue
            if what == "constant" and not _matters(look, node, prompt, constant):
                continue
            node.add(_ODD, {"what": what, "output": look.slot, "place": look.place})
            odd.append({"what": what, "node": node.id, "class_type": node.class_type, "output": look.slot})
        if odd:
            prompt.facts["first_odd_output"] = odd[0]
            tell(prompt.nodes[odd[0]["node"]], "comfyui.odd_output", what=odd[0]["what"])


_KINDS: Final[Mapping[str, Kind]] = {"LATENT": "latent", "IMAGE": "image"}


def _tensors(values: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors with floating-point numbers in an output, with the innermost name on the way to each."""
    for number, leaf in enumerate(leaves_of(values)):
        if number >= _MOST_TENSORS:
            return
        if leaf.tensor.is_floating_point() and leaf.tensor.numel() and leaf.tensor.device.type != "meta":
            yield leaf.name, leaf.tensor


def _look(node: str, slot: int, kind: Kind, place: str, tensor: Tensor) -> _Look:
    try:
        lowest, highest = torch.aminmax(tensor.detach())
    except RuntimeError as failure:  # a type that has no such reduction, such as float8, on this device
        return _Look(node, slot, kind, place, None, f"{tensor.dtype}: {type(failure).__name__}")
    return _Look(node, slot, kind, place, (lowest, highest), None)


def _what(lowest: Tensor, highest: Tensor) -> str | None:
    low, high = float(lowest), float(highest)
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
    links = (prompt.info(node.id).get("inputs") or {}).values()
    sources = [(str(link[0]), link[1]) for link in links if isinstance(link, list) and len(link) == 2]
    return any(constant.get(source) is False for source in sources)


INSTRUMENT = Values
