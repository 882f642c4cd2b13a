"""What is known of LoRAs of nodes that do not run again, because ComfyUI kept their outputs.

ComfyUI keeps an output for as long as the node's class, its values and those of all nodes before it are the same. So does
this keep what was found out of the node's LoRAs when it ran.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from sigmascope.integrations.comfyui.posted_graph import signature_of
from sigmascope.integrations.comfyui.recording import PromptRecording

KEPT: Final = "loras_kept"
"""The prompt's fact: verdicts on the LoRAs of nodes whose outputs were kept, each with its `node`."""
_MOST: Final = 200
T = TypeVar("T")


class Kept(Generic[T]):
    """What was found out of the last nodes that ran.

    Args:
        most: Nodes of which it is kept.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._known: OrderedDict[str, tuple[str, Sequence[T]]] = OrderedDict()

    def of_prompt(self, prompt: PromptRecording, anew: Mapping[str, Sequence[T]]) -> list[tuple[str, str, T]]:
        """What is known of a prompt's nodes that did not run: a node's id, the prompt's in which it ran, and what was found.

        Args:
            prompt: It is over.
            anew: What it says of those that ran, which is kept for the next ones.
        """
        signatures: dict[str, str] = {}
        for node_id, found in anew.items():
            if node_id in prompt.graph:
                signature = signature_of(prompt.graph, node_id, signatures)
                self._known.pop(signature, None)
                self._known[signature] = prompt.prompt_id, found
        while len(self._known) > self._most:
            self._known.popitem(last=False)
        if not self._known:
            return []
        kept = [node_id for node_id in prompt.graph if node_id in prompt.cached and node_id not in anew]
        nothing: tuple[str, Sequence[T]] = "", ()
        found_of = {
            node_id: self._known.get(signature_of(prompt.graph, node_id, signatures), nothing)
            for node_id in kept
        }
        return [(node_id, since, what) for node_id, (since, found) in found_of.items() for what in found]


def keep_verdict(prompt: PromptRecording, node_id: str, verdict: Mapping[str, Any]) -> None:
    """Put the verdict on a LoRA of a node that did not run on the prompt."""
    prompt.facts.setdefault(KEPT, []).append({"node": node_id, **verdict})
