"""What differs from the last prompt of the same graph: settings of nodes, then times.

Two prompts are of one graph where their nodes and links are the same; values typed into nodes may differ.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from sigmascope.integrations.comfyui.recording import PromptRecording
from sigmascope.records.prompts import HIDDEN, privacy_of

CHANGED: Final = "changed"
"""The prompt's fact that holds this; without an earlier prompt of the graph there is none."""
_MOST_GRAPHS: Final = 50


class _Prompt(NamedTuple):
    prompt_id: str
    values: dict[tuple[str, str], Any]
    seconds: dict[str, float]
    read_from_disk: bool


class Earlier:
    """The last prompt of each of the last graphs. No text of a prompt leaves it where these are private."""

    def __init__(self) -> None:
        self._by_graph: OrderedDict[Any, _Prompt] = OrderedDict()

    def compare(self, prompt: PromptRecording) -> None:
        """Say on a prompt that is over what differs from the one before, and keep it in that one's place."""
        shape, values = _shape_and_values(prompt.graph)
        now = _Prompt(
            prompt.prompt_id,
            values,
            {node.id: node.stage.seconds for node in prompt.nodes.values() if node.ended_ns is not None},
            any(
                file["from"] == "disk"
                for node in prompt.nodes.values()
                for file in node.facts.get("files", ())
            ),
        )
        before = self._by_graph.pop(shape, None)
        self._by_graph[shape] = now
        while len(self._by_graph) > _MOST_GRAPHS:
            self._by_graph.popitem(last=False)
        if before is not None:
            prompt.facts[CHANGED] = _changes(before, now, keeps_words=privacy_of(prompt.privacy).keeps_words)


def _shape_and_values(graph: Mapping[str, Any]) -> tuple[Any, dict[tuple[str, str], Any]]:
    shape, values = [], {}
    for node_id, node in graph.items():
        links = []
        for name, value in (node.get("inputs") or {}).items():
            if isinstance(value, list) and len(value) == 2:  # another node's id and the number of its output
                links.append((name, str(value[0]), value[1]))
            else:
                values[str(node_id), name] = value
        shape.append((str(node_id), node.get("class_type"), tuple(sorted(links))))
    return tuple(sorted(shape)), values


def _changes(before: _Prompt, now: _Prompt, *, keeps_words: bool) -> dict[str, Any]:
    def shown(value: Any) -> Any:
        return HIDDEN if isinstance(value, str) and not keeps_words else value

    keys = sorted(before.values.keys() | now.values.keys())
    settings = [
        {
            "node": key[0],
            "input": key[1],
            "was": shown(before.values.get(key)),
            "now": shown(now.values.get(key)),
        }
        for key in keys
        if before.values.get(key) != now.values.get(key)
    ]
    both = [node_id for node_id in now.seconds if node_id in before.seconds]
    times = [
        {"node": node_id, "was_seconds": before.seconds[node_id], "now_seconds": now.seconds[node_id]}
        for node_id in both
    ]
    return {
        "since_prompt": before.prompt_id,
        "settings": settings,
        "times": times,
        # Only a prompt that reads no model from disk can be called slower: the other has paid for it.
        "files_read_then": before.read_from_disk,
        "files_read_now": now.read_from_disk,
    }
