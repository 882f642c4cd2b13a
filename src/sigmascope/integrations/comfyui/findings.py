"""What a node is found to have done amiss, of what only a watch in ComfyUI sees: a table, and how a node is told.

They lie where analyses of stages put theirs, so that every report shows them.
"""

from typing import Final, NamedTuple

from sigmascope.integrations.comfyui.recording import NodeWatch
from sigmascope.records.run import JsonScalar, Severity


class Row(NamedTuple):
    """One kind of finding: how grave it is, its words, and what to do."""

    severity: Severity
    words: str
    advice: str


FINDINGS: Final = {
    "comfyui.odd_output": Row(
        "error",
        "{what} begins in {class_type} (node {node}): no node before it gave any.",
        "Look at what this node was given: its model, its VAE's precision, its settings.",
    ),
    "comfyui.odd_kept_output": Row(
        "error",
        "{what} came into {class_type} (node {node}) with what ComfyUI had kept of {source_class} (node {source}).",
        "Change a value of that node, so that it runs anew. If it gives none then, a node has changed what it was given.",
    ),
    "comfyui.tiled_fallback": Row(
        "warning",
        "{class_type} (node {node}) fell back to tiles, because memory ran out for the whole picture.",
        "Decode a smaller picture, free memory before this node, or choose the tiled node and its sizes yourself.",
    ),
}


def tell(node: NodeWatch, id: str, **evidence: JsonScalar) -> None:
    """Put a finding on a node's stage."""
    row = FINDINGS[id]
    known = {"class_type": node.class_type, "node": node.id, **evidence}
    analysis = node.facts.setdefault(node.name, {})
    analysis.setdefault("findings", []).append(
        {
            "id": id,
            "severity": row.severity,
            "message": row.words.format(**known),
            "evidence": known,
            "advice": row.advice,
        }
    )
