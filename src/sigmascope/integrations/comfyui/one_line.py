"""The line in ComfyUI's log that says what a prompt took, and what was odd about it."""

from collections import Counter
from collections.abc import Iterator

from sigmascope.integrations.comfyui.recording import COMFYUI, NODE
from sigmascope.plain_text import printable
from sigmascope.records.run import Run, Stage
from sigmascope.units import format_size, percent, seconds

_LEAST_SHARE = 0.01
_LEAST_WAIT_SECONDS = 1.0
_BEFORE = {"validation": "of validation", "queue": "in the queue"}
_NO_NODE = "outside nodes"


def line_of(run: Run) -> str:
    """Such as "12.4 s, 71 % KSampler, peak 9.8 GB in VAEDecode (tiled fallback), LoRA x: 0 of 264 modules used"."""
    return printable(", ".join(parts_of_line(run)))


def parts_of_line(run: Run) -> Iterator[str]:
    """What the line consists of; the first is the prompt's time."""
    facts, nodes = run.facts[COMFYUI], [stage for stage in run.walk() if NODE in stage.facts]
    yield seconds(run.seconds)
    own, inside = Counter[str](), Counter[str | None]()
    for stage in nodes:
        inside[stage.facts[NODE].get("parent")] += stage.seconds  # type: ignore[assignment]
    for stage in nodes:
        own[stage.name] += max(0.0, stage.seconds - inside[stage.facts[NODE]["id"]])  # type: ignore[assignment]
    own[_NO_NODE] = facts.get("seconds_of_no_node") or 0.0  # type: ignore[assignment]
    if nodes:
        name, longest = own.most_common(1)[0]
        if longest >= _LEAST_SHARE * run.seconds:
            yield f"{percent(longest, run.seconds)} {name}"
    before = facts.get("seconds_before") or {}
    for what, words in _BEFORE.items():
        if (waited := before.get(what) or 0.0) >= _LEAST_WAIT_SECONDS:
            yield f"{seconds(waited)} {words} before"
    states = Counter(node["state"] for node in facts["nodes"])
    if states["cached"]:
        yield f"{states['cached']} of {sum(states.values())} nodes cached"
    if (peak := _peak(run, nodes)) is not None:
        yield peak
    for stage in nodes:
        for tiles in stage.facts.get("tiled", ()):
            if tiles["fallback"]:
                yield f"{stage.name} fell back to tiles"
                break
    verdicts = [verdict for stage in nodes for verdict in stage.facts.get("lora_verdicts", ())]
    yield from (f"LoRA {verdict['says']}" for verdict in [*verdicts, *facts.get("loras_kept", ())])
    if (odd := facts.get("first_odd_output")) is not None:
        where = "what was kept of " if odd.get("kept") else ""
        yield f"{odd['what']} first in {where}{odd['class_type']} (node {odd['node']})"
    if (stopped := facts.get("stopped_by")) is not None:
        how = "interrupted" if stopped["how"] == "execution_interrupted" else "failed"
        kinds = {node["id"]: node["class_type"] for node in facts["nodes"]}
        yield f"{how} in {kinds.get(stopped['node'], 'an unknown node')} (node {stopped['node']})"


def _peak(run: Run, nodes: list[Stage]) -> str | None:
    """The highest memory of the device in use, else of the process, and the node in which it was seen."""
    whole = run.peak()
    device = whole.busiest_device()
    known = [
        (peak_bytes(stage, device) or 0, stage.name)
        for stage in nodes
        if not any(NODE in child.facts for child in stage.children)
    ]
    if not known or (highest := max(known))[0] == 0:
        return None
    return f"peak {format_size(highest[0])}{' of RAM' if device is None else ''} in {highest[1]}"


def peak_bytes(stage: Stage, device: str | None) -> int | None:
    """The peak inside a stage, of a device's allocated memory, or of the process's RAM for no device."""
    if stage.peak is None:
        return None
    return stage.peak.rss_bytes if device is None else stage.peak.accelerator(device).allocated_bytes
