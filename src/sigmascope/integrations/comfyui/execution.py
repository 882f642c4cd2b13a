"""The instrument that hears how each node's execution went, and of what was given to it.

ComfyUI's progress says nothing of a node that fails, or of the inputs that a node gets.
"""

import sys
from collections.abc import Mapping
from typing import Any

from sigmascope.integrations.comfyui.instruments import Instrument
from sigmascope.integrations.comfyui.needs import Need, output_data
from sigmascope.integrations.comfyui.sampling import SAMPLING, is_sampler, sampling_facts
from sigmascope.integrations.comfyui.wraps import Call, Wrap


class Execution(Instrument):
    """Wraps `execution.execute` and `execution.get_output_data`."""

    name = "execution"
    gives = "errors of nodes, and samplers' settings"
    needs = (
        Need("execution", "execute", ("current_item", "prompt_id"), True),
        output_data("input_data_all"),
    )

    def put_on(self) -> None:
        """See `Instrument`."""
        self.wraps.append(Wrap(self.needs[0], self, after=self._executed))
        self.wraps.append(Wrap(self.needs[1], self, before=self._begins))

    def _executed(self, call: Call, _known: None, result: object, error: BaseException | None) -> None:
        prompt = self.session.prompt_of(call.get("prompt_id"))
        if prompt is None:
            return
        outcome = result[0] if isinstance(result, tuple) and result else None
        raised = error or (result[2] if isinstance(result, tuple) and len(result) > 2 else None)
        if error is not None or getattr(outcome, "name", None) == "FAILURE":
            prompt.ended(call.get("current_item"), raised if isinstance(raised, BaseException) else None)
        elif getattr(outcome, "name", None) == "SUCCESS":
            begun: set[object] = prompt.until_the_end(self.name, set)
            if (
                call.get("current_item") not in begun
            ):  # ComfyUI has its output, maybe of a node with the same inputs
                prompt.cached |= {str(call.get("current_item"))}

    def _begins(self, call: Call) -> None:
        prompt, inputs = self.session.prompt_of(call.get("prompt_id")), call.get("input_data_all")
        node = None if prompt is None else prompt.nodes.get(call.get("unique_id"))
        if prompt is not None:
            begun: set[object] = prompt.until_the_end(self.name, set)
            begun.add(call.get("unique_id"))
        if prompt is None or node is None or not isinstance(inputs, dict):
            return
        if _is_blocked(inputs):
            node.state = "blocked"
        elif is_sampler(inputs):
            node.is_sampler = True
            node.facts[SAMPLING] = sampling_facts(inputs)
            prompt.step_begins(node)


def _is_blocked(inputs: Mapping[str, Any]) -> bool:
    """Whether ComfyUI leaves the node out, because a node before it said that what follows is not to run."""
    blocker = getattr(sys.modules.get("comfy_execution.graph_utils"), "ExecutionBlocker", None)
    return blocker is not None and any(
        isinstance(values, list) and bool(values) and all(isinstance(value, blocker) for value in values)
        for values in inputs.values()
    )


INSTRUMENT = Execution
