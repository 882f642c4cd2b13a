"""What is known of LoRAs of nodes that do not run again, because ComfyUI kept their outputs.

ComfyUI keeps an output for as long as the node's class, its values and those of all nodes before it are the same. So does
this keep what was found out of the node's LoRAs when it ran.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from sigmascope.integrations.comfyui.recording import PromptRecording

KEPT: Final = "loras_kept"
"""The prompt's fact: verdicts on the LoRAs of nodes whose outputs were kept, each with its `node`."""
_MOST: Final = 200
T = TypeVar("T")


class Kept(Generic[T]):
    """What was found out of the LoRAs of the last nodes that ran."""

    def __init__(self) -> None:
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
        while len(self._known) > _MOST:
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


def links_of(graph: Mapping[str, Any], node_id: str) -> Iterator[tuple[str, Any]]:
    """What a node of a graph takes: another one's id, and the number of its output."""
    for link in (graph[node_id].get("inputs") or {}).values():
        if _is_link(link):
            yield str(link[0]), link[1]


def following(prompt: PromptRecording, node_id: str, slot: int) -> frozenset[str]:
    """The nodes of the posted graph that an output of a node leads to."""
    takers: dict[str, list[tuple[str, Any]]] = {}
    for taker in prompt.graph:
        for source, at in links_of(prompt.graph, taker):
            takers.setdefault(source, []).append((taker, at))
    found = {taker for taker, at in takers.get(node_id, ()) if at == slot}
    todo = list(found)
    while todo:
        fresh = {taker for taker, _ in takers.get(todo.pop(), ())} - found
        found |= fresh
        todo += fresh
    return frozenset(found)


def signature_of(graph: Mapping[str, Any], node_id: str, known: dict[str, str]) -> str:
    """A digest of what a node's outputs depend on: its class and values, and those of all nodes before it.

    Args:
        graph: As it was posted.
        node_id: A node of it.
        known: The signatures so far, by node; filled.
    """
    todo = [node_id]
    while todo:
        at = todo[-1]
        before = {source for source, _ in links_of(graph, at) if source in graph} - known.keys()
        if fresh := before.difference(todo):  # one that is on the way already lies in a circle
            todo += fresh
            continue
        todo.pop()
        inputs = graph[at].get("inputs") or {}
        values = {
            name: [known.get(str(value[0])), value[1]] if _is_link(value) else value
            for name, value in inputs.items()
        }
        text = json.dumps([graph[at].get("class_type"), values], sort_keys=True, default=repr)
        known[at] = hashlib.sha256(text.encode(errors="replace")).hexdigest()
    return known[node_id]


def _is_link(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2
