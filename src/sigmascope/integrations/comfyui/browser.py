"""What ComfyUI's page shows of prompts: plain JSON made of their records, and nothing that a record does not hold.

`summary_of` is a row of the list, `view_of` a prompt with its nodes. `Shelf` has the records of a folder by name. Texts
are given as they are, and the page writes them as text.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

from sigmascope.integrations.comfyui.kept_loras import KEPT
from sigmascope.integrations.comfyui.lora import VERDICTS
from sigmascope.integrations.comfyui.one_line import parts_of_line, peak_bytes
from sigmascope.integrations.comfyui.recording import COMFYUI, NODE
from sigmascope.integrations.comfyui.session import PATTERN
from sigmascope.records.run import Run, Stage
from sigmascope.records.serialization import load_run
from sigmascope.reports.html import to_html
from sigmascope.units import counted, format_size, percent, seconds

Mark = Literal["good", "warning", "bad"]
_MARKS: Final[Mapping[str, Mark]] = {"critical": "bad", "error": "bad", "warning": "warning"}
"""Of a finding, by how grave it is; others are no reason for a mark."""
_ORDER: Final[Sequence[Mark]] = ("good", "warning", "bad")
_LONGEST: Final = 120
"""Characters of a setting."""


class Shelf:
    """The records of a folder, the newest first; of each file the summary is made once.

    Args:
        folder: Where they are; None: they are written nowhere.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._summaries: dict[str, dict[str, Any]] = {}
        self._graphs: dict[str, frozenset[tuple[str, str]]] = {}

    def names(self) -> list[str]:
        """What the records are called: their files without the suffix."""
        if self._folder is None:
            return []
        return sorted((file.stem for file in self._folder.glob(PATTERN)), reverse=True)

    def run(self, name: str) -> Run:
        """A record.

        Raises:
            KeyError: There is none of this name.
            RecordError: It is damaged.
        """
        if self._folder is None or name not in self.names():
            raise KeyError(name)
        return load_run(self._folder / f"{name}.json")

    def summaries(self) -> list[dict[str, Any]]:
        """The rows of the list; records that cannot be read are left out."""
        names = self.names()
        for name in [known for known in self._summaries if known not in names]:
            del self._summaries[name], self._graphs[name]
        return [self._summaries[name] for name in names if self._look(name)]

    def view(self, name: str) -> dict[str, Any]:
        """A prompt with its nodes, and the name of the one before.

        Raises:
            KeyError, RecordError: As of `run`.
        """
        return {**view_of(self.run(name), name), "before": self.before(name)}

    def before(self, name: str) -> str | None:
        """The last earlier record of a prompt with the same nodes; None: there is none."""
        older = [other for other in self.names() if other < name]
        if not self._look(name):
            return None
        graph = self._graphs[name]
        return next((other for other in older if self._look(other) and self._graphs[other] == graph), None)

    def report(self, name: str) -> str:
        """The report of a record, as HTML.

        Raises:
            KeyError, RecordError: As of `run`.
        """
        return to_html(self.run(name))

    def comparison(self, name: str) -> str:
        """The report of a record beside the one before it, as HTML.

        Raises:
            KeyError: There is no such record, or none before it.
            RecordError: One of them is damaged.
        """
        before = self.before(name)
        if before is None:
            raise KeyError(f"before {name}")
        return to_html([self.run(before), self.run(name)])

    def _look(self, name: str) -> bool:
        """Whether the record can be read; then its summary is there."""
        if name not in self._summaries:
            try:
                run = self.run(name)
                self._summaries[name], self._graphs[name] = summary_of(run, name), _graph_of(run)
            except Exception:  # noqa: BLE001 - removed meanwhile, damaged, or written by another version
                return False
        return True


def summary_of(run: Run, name: str) -> dict[str, Any]:
    """A prompt in the list: when, how long, what stood out, and how grave it is.

    Args:
        run: The record.
        name: What its file is called, without the suffix.
    """
    facts = run.facts[COMFYUI]
    _, *words = parts_of_line(run)
    return {
        "name": name,
        "prompt_id": facts["prompt_id"],
        "workflow": facts.get("workflow"),
        "started_at": run.started_at,
        "seconds": run.seconds,
        "time": seconds(run.seconds),
        "words": words,
        "mark": _worst(_mark_of(node, stage, run)[0] for node, stage in _nodes(run)),
    }


def view_of(run: Run, name: str) -> dict[str, Any]:
    """A prompt with all its nodes, those that hold others in the workflow, and what changed since the one before."""
    device = run.peak().busiest_device()
    nodes = [_node_view(node, stage, run, device) for node, stage in _nodes(run)]
    return {
        **summary_of(run, name),
        "nodes": nodes,
        "subgraphs": list(_subgraphs(nodes)),
        "changed": list(_changes(run)),
    }


def _nodes(run: Run) -> Iterator[tuple[Mapping[str, Any], Stage | None]]:
    """Each node of the prompt as the record's table has it, with its stage if it ran."""
    stages = {stage.facts[NODE]["id"]: stage for stage in run.walk() if NODE in stage.facts}
    for node in run.facts[COMFYUI]["nodes"]:
        yield node, stages.get(node["id"])


def _graph_of(run: Run) -> frozenset[tuple[str, str]]:
    return frozenset(
        (node["id"], node["class_type"]) for node, _ in _nodes(run) if node.get("parent") is None
    )


def _mark_of(node: Mapping[str, Any], stage: Stage | None, run: Run) -> tuple[Mark, list[str]]:
    """How a node did, and why it is not good."""
    marks: list[Mark] = ["good"]
    reasons: list[str] = []
    if node["state"] in ("error", "interrupted"):
        marks.append("bad" if node["state"] == "error" else "warning")
        error = None if stage is None else stage.error
        reasons.append(error or ("it failed" if node["state"] == "error" else "it was interrupted"))
    kept = [one for one in run.facts[COMFYUI].get(KEPT, ()) if one["node"] == node["id"]]
    for verdict in kept if stage is None else stage.facts.get(VERDICTS, ()):
        if verdict.get("effective") is not True:
            marks.append("bad" if verdict.get("effective") is False else "warning")
        reasons.append(f"LoRA {verdict['says']}")
    if stage is None:
        return _worst(marks), reasons
    analysis = stage.facts.get(stage.name)
    for finding in analysis.get("findings", ()) if isinstance(analysis, Mapping) else ():
        if (mark := _MARKS.get(finding["severity"])) is not None:
            marks.append(mark)
            if not any(finding["message"] in reason for reason in reasons):
                reasons.append(finding["message"])
    return _worst(marks), reasons


def _worst(marks: "Iterator[Mark] | Sequence[Mark]") -> Mark:
    return max(marks, key=_ORDER.index, default="good")


def _node_view(node: Mapping[str, Any], stage: Stage | None, run: Run, device: str | None) -> dict[str, Any]:
    mark, reasons = _mark_of(node, stage, run)
    peak = None if stage is None else peak_bytes(stage, device)
    return {
        "id": node["id"],
        "class_type": node["class_type"],
        "title": node.get("title") or node["class_type"],
        "parent": node.get("parent"),
        "state": node["state"],
        "started_seconds": None if stage is None else stage.started_seconds,
        "seconds": None if stage is None else stage.seconds,
        "time": None if stage is None else seconds(stage.seconds),
        "peak_bytes": peak,
        "peak": None if peak is None else format_size(peak),
        "mark": mark,
        "reasons": reasons,
        "details": [] if stage is None else list(_details(stage, run, peak, device)),
    }


def _details(stage: Stage, run: Run, peak: int | None, device: str | None) -> Iterator[str]:
    yield f"{seconds(stage.seconds)}, {percent(stage.seconds, run.seconds)} of the prompt"
    if peak is not None:
        yield f"peak {format_size(peak)} of {'RAM' if device is None else device}"
    if len(stage.steps):
        yield f"{counted(len(stage.steps), 'step')}, {seconds(median(stage.steps.seconds))} each"
    for file in stage.facts.get("files", ()):
        size = "" if file["bytes"] is None else f", {format_size(file['bytes'])}"
        yield f"read {file['file']}{size} in {seconds(file['seconds'])}"


def _subgraphs(nodes: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The nodes of the workflow that stand for a graph of their own: the browser names what is inside `outer:inner`."""
    inside: dict[str, list[Mapping[str, Any]]] = {}
    for node in nodes:
        path = node["id"].split(":")
        for depth in range(1, len(path)):
            inside.setdefault(":".join(path[:depth]), []).append(node)
    for path_id, held in inside.items():
        ran = [node for node in held if node["seconds"] is not None]
        peaks = [node for node in ran if node["peak_bytes"] is not None]
        whole = sum(node["seconds"] for node in ran if node["parent"] is None)
        yield {
            "id": path_id,
            "state": "run" if ran else held[0]["state"],
            "time": seconds(whole) if ran else None,
            "peak": max(peaks, key=lambda node: node["peak_bytes"])["peak"] if peaks else None,
            "mark": _worst([node["mark"] for node in held]),
            "reasons": [f"{node['title']}: {reason}" for node in held for reason in node["reasons"]],
            "details": [f"{len(ran)} of {counted(len(held), 'node')} ran"],
        }


def _changes(run: Run) -> Iterator[dict[str, str]]:
    classes = {node["id"]: node["class_type"] for node in run.facts[COMFYUI]["nodes"]}
    for change in run.facts[COMFYUI].get("changed", {}).get("settings", ()):
        yield {
            "where": f"{classes.get(change['node'], 'node')} ({change['node']})",
            "input": change["input"],
            "was": str(change["was"])[:_LONGEST],
            "now": str(change["now"])[:_LONGEST],
        }
