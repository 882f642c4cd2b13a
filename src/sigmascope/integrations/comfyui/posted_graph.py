"""What leads where in a graph as it was posted: by node id, with `class_type` and `inputs`.

An input that another node gives is a link: a list of that node's id and the number of its output.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

Link = tuple[str, int]
"""A node's id, and the number of its output."""


def link_of(value: object) -> Link | None:
    """The link that an input's value is; None: it is a value, such as two numbers."""
    if (
        isinstance(value, list)
        and len(value) == 2
        and isinstance(value[0], str)
        and isinstance(value[1], int)
    ):
        return value[0], value[1]
    return None


def links_of(node: Mapping[str, Any]) -> Iterator[tuple[str, Link]]:
    """The inputs of a node that other nodes give, by name."""
    for name, value in (node.get("inputs") or {}).items():
        if (link := link_of(value)) is not None:
            yield name, link


def following(graph: Mapping[str, Any], node_id: str, slot: int | None) -> frozenset[str]:
    """The nodes that an output of a node leads to; None: any of its outputs."""
    takers: dict[str, list[tuple[str, int]]] = {}
    for taker, node in graph.items():
        for _, (source, at) in links_of(node):
            takers.setdefault(source, []).append((taker, at))
    found = {taker for taker, at in takers.get(node_id, ()) if slot is None or at == slot}
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
    todo, begun = [node_id], set[str]()
    while todo:
        at = todo[-1]
        before = {source for _, (source, _) in links_of(graph[at]) if source in graph} - known.keys() - begun
        if at not in known and before:
            begun.add(at)  # one that is taken by what it takes lies in a circle
            todo += before
            continue
        todo.pop()
        if at in known:
            continue
        values = dict(graph[at].get("inputs") or {})
        values |= {name: [known.get(source), slot] for name, (source, slot) in links_of(graph[at])}
        text = json.dumps([graph[at].get("class_type"), values], sort_keys=True, default=repr)
        known[at] = hashlib.sha256(text.encode(errors="replace")).hexdigest()
    return known[node_id]
