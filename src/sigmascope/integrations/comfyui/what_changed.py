"""What differs from the last prompt of the same graph: ComfyUI's version, settings of nodes, then times.

Two prompts are of one graph where their nodes and links are the same; values typed into nodes may differ. A record holds
what the comparison needs, so that a prompt after a restart or an update is compared with the last one before.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from sigmascope.integrations.comfyui.posted_graph import link_of
from sigmascope.integrations.comfyui.recording import COMFYUI, NODE, PromptRecording
from sigmascope.integrations.comfyui.texts import is_choice
from sigmascope.records.prompts import HIDDEN, Privacy, privacy_of, prompt_sha256
from sigmascope.records.run import Run

CHANGED: Final = "changed"
"""The prompt's fact that holds this; without an earlier prompt of the graph there is none."""
GRAPH: Final = "graph"
"""The prompt's fact that holds the digest of its nodes and links, and the values typed into nodes."""
_HASH: Final = "sha256"
_MOST_GRAPHS: Final = 50
_Values = dict[tuple[str, str], Any]


class _Prompt(NamedTuple):
    prompt_id: str
    version: str | None
    values: _Values
    seconds: dict[str, float]
    read_from_disk: bool


class Earlier:
    """The last prompt of each of the last graphs. No text of a prompt leaves it where these are private."""

    def __init__(self) -> None:
        self._by_graph: OrderedDict[str, _Prompt] = OrderedDict()

    def remember(self, run: Run) -> None:
        """Know of a prompt that an earlier process recorded; those of this process come before it."""
        facts = run.facts[COMFYUI]
        ran = {
            stage.facts[NODE]["id"]: stage
            for stage in run.walk()
            if NODE in stage.facts and "end" not in stage.unavailable
        }
        known = _Prompt(
            facts["prompt_id"],
            facts["version"],
            {(node, name): value for node, name, value in facts[GRAPH]["values"]},
            {node_id: stage.seconds for node_id, stage in ran.items()},
            any(_is_read(stage.facts) for stage in ran.values()),
        )
        digest = facts[GRAPH]["digest"]
        if digest not in self._by_graph:
            self._by_graph[digest] = known
            self._by_graph.move_to_end(digest, last=False)

    def compare(self, prompt: PromptRecording, version: str | None) -> None:
        """Say on a prompt that is over what differs from the one before, and keep it in that one's place."""
        digest, values = _digest_and_values(prompt.graph, privacy_of(prompt.privacy))
        now = _Prompt(
            prompt.prompt_id,
            version,
            values,
            {node.id: node.stage.seconds for node in prompt.nodes.values() if node.ended_ns is not None},
            any(_is_read(node.facts) for node in prompt.nodes.values()),
        )
        prompt.facts[GRAPH] = {
            "digest": digest,
            "values": [[*key, value] for key, value in values.items()],
        }
        before = self._by_graph.pop(digest, None)
        self._by_graph[digest] = now
        while len(self._by_graph) > _MOST_GRAPHS:
            self._by_graph.popitem(last=False)
        if before is not None:
            prompt.facts[CHANGED] = _changes(before, now)


def _is_read(facts: Mapping[str, Any]) -> bool:
    return any(file["from"] == "disk" for file in facts.get("files", ()))


def _digest_and_values(graph: Mapping[str, Any], privacy: Privacy) -> tuple[str, _Values]:
    shape, values = [], {}
    for node_id, node in graph.items():
        class_type, links = str(node.get("class_type")), []
        for name, value in (node.get("inputs") or {}).items():
            if (link := link_of(value)) is not None:
                links.append([name, *link])
            else:
                values[str(node_id), name] = _kept(class_type, name, value, privacy)
        shape.append([str(node_id), class_type, sorted(links)])
    return hashlib.sha256(json.dumps(sorted(shape)).encode()).hexdigest(), values


def _kept(class_type: str, name: str, value: Any, privacy: Privacy) -> Any:
    """A value as a record has it: of what somebody wrote the hash, if any, since records are also made into reports."""
    if isinstance(value, int | float | bool | None):
        return value
    if isinstance(value, str) and is_choice(class_type, name, value):
        return value
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=repr)
    return {_HASH: prompt_sha256(text) if privacy.keeps_hash else None}


def _changes(before: _Prompt, now: _Prompt) -> dict[str, Any]:
    def shown(value: Any) -> Any:
        return HIDDEN if isinstance(value, dict) else value

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
        "version_then": before.version,
        "settings": settings,
        "times": times,
        # Only a prompt that reads no model from disk can be called slower: the other has paid for it.
        "files_read_then": before.read_from_disk,
        "files_read_now": now.read_from_disk,
    }
