"""Three nodes for those who want Sigmascope on the graph: LoRA verdict, Tensor dump, Sigmascope report.

What they are given goes through them untouched. What they cannot find out is said in their text or in the log, and raises
nothing. They belong to no other node's inputs, so that what ComfyUI keeps of others is as without them.
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from torch import Tensor

from sigmascope.checkpoints.tensor_dumps import TensorDumps, flatten
from sigmascope.files import atomic_path
from sigmascope.integrations.comfyui import session
from sigmascope.integrations.comfyui.lora import in_words, judge, without_loras
from sigmascope.integrations.comfyui.lora_names import path_of
from sigmascope.integrations.comfyui.posted_graph import links_of
from sigmascope.integrations.comfyui.recording import COMFYUI
from sigmascope.probes.reading import describe
from sigmascope.probes.tensors import tensor_facts
from sigmascope.records.run import Run, TensorFacts
from sigmascope.reports.html import to_html
from sigmascope.units import counted, statistic

_log = logging.getLogger("sigmascope")
REPORTS: Final = "reports"
"""The prompt's fact that lists the names of the reports that its nodes want."""
_CATEGORY: Final = "sigmascope"
_DUMPS: Final = "dumps"
"""The folder of tensor dumps, beside the records."""
_BOTH, _FIGURES, _FILE = "statistics and file", "statistics", "file"
_MOST_LINKS: Final = 100


class LoraVerdictNode:
    """Says of each LoRA on a model whether it acts there, as the model stands at this node."""

    TITLE: ClassVar = "LoRA verdict"
    DESCRIPTION: ClassVar = (
        "Says how many modules of each LoRA before this node act on the model, and why others do not."
    )
    CATEGORY: ClassVar = _CATEGORY
    FUNCTION: ClassVar = "judge"
    RETURN_TYPES: ClassVar = ("MODEL", "STRING", "CLIP")
    RETURN_NAMES: ClassVar = ("model", "verdict", "clip")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """The node's inputs, as ComfyUI asks for them."""
        return {
            "required": {"model": ("MODEL", {"tooltip": "After the LoRA loaders."})},
            "optional": {"clip": ("CLIP", {"tooltip": "For LoRAs that change the text encoder too."})},
            "hidden": {"graph": "PROMPT", "node": "UNIQUE_ID"},
        }

    def judge(
        self, model: Any, clip: Any = None, graph: Any = None, node: Any = None
    ) -> tuple[Any, str, Any]:
        """Hand the model through, with the verdict as text."""
        return model, _said(lambda: _verdicts(model, clip, graph or {}, str(node))), clip


class TensorDumpNode:
    """Keeps statistics of what passes, and the tensors themselves in a file that `compare-tensors` reads."""

    TITLE: ClassVar = "Tensor dump"
    DESCRIPTION: ClassVar = (
        "Keeps statistics of what passes in the prompt's record, and its tensors in a file."
    )
    CATEGORY: ClassVar = _CATEGORY
    FUNCTION: ClassVar = "dump"
    RETURN_TYPES: ClassVar = ("LATENT", "IMAGE", "CONDITIONING", "STRING")
    RETURN_NAMES: ClassVar = ("latent", "image", "conditioning", "text")
    OUTPUT_NODE: ClassVar = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """The node's inputs, as ComfyUI asks for them."""
        return {
            "required": {
                "keep": ([_BOTH, _FIGURES, _FILE],),
                "name": ("STRING", {"default": "dump", "tooltip": "Of the file in user/sigmascope/dumps."}),
            },
            "optional": {"latent": ("LATENT",), "image": ("IMAGE",), "conditioning": ("CONDITIONING",)},
            "hidden": {"node": "UNIQUE_ID"},
        }

    def dump(
        self,
        keep: str,
        name: str,
        latent: Any = None,
        image: Any = None,
        conditioning: Any = None,
        node: Any = None,
    ) -> dict[str, Any]:
        """Hand everything through, with what was kept as text."""
        given = {"latent": latent, "image": image, "conditioning": conditioning}
        given = {kind: value for kind, value in given.items() if value is not None}
        text = _said(lambda: _kept(keep, name, given, str(node)))
        return {"ui": {"text": (text,)}, "result": (latent, image, conditioning, text)}


class ReportNode:
    """Writes the prompt's report into ComfyUI's output folder, once the prompt is over."""

    TITLE: ClassVar = "Sigmascope report"
    DESCRIPTION: ClassVar = (
        "Writes the report of each prompt into the output folder, when the prompt is over."
    )
    CATEGORY: ClassVar = _CATEGORY
    FUNCTION: ClassVar = "want"
    RETURN_TYPES: ClassVar = ()
    OUTPUT_NODE: ClassVar = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """The node's inputs, as ComfyUI asks for them."""
        return {"required": {"name": ("STRING", {"default": "sigmascope/report"})}}

    @classmethod
    def IS_CHANGED(cls, **_: Any) -> float:
        """Each prompt has a report of its own. NaN equals nothing, so that the node runs each time."""
        return float("nan")

    def want(self, name: str) -> dict[str, Any]:
        """Note that a report is wanted."""
        return {"ui": {"text": (_said(lambda: _wanted(name)),)}}


NODES: Final[Mapping[str, type[LoraVerdictNode | TensorDumpNode | ReportNode]]] = {
    "SigmascopeLoraVerdict": LoraVerdictNode,
    "SigmascopeTensorDump": TensorDumpNode,
    "SigmascopeReport": ReportNode,
}
"""By the name that workflows have for them."""


def write_wanted_reports(run: Run, _: Path | None) -> None:
    """Write the reports that nodes of a prompt asked for, each under a number of its own; see `Session.listeners`."""
    folders = sys.modules["folder_paths"]
    for name in run.facts[COMFYUI].get(REPORTS, ()):
        folder, base, number, *_ = folders.get_save_image_path(name, folders.get_output_directory())
        path = Path(folder) / f"{base}_{number:05}_.html"
        with atomic_path(path) as temporary:
            temporary.write_text(to_html(run), encoding="utf-8")
        _log.info("sigmascope: wrote %s", path)


def _said(find_out: Any) -> str:
    """What was found out, or why it could not be: a node of ours fails no prompt."""
    try:
        text: str = find_out()
    except Exception as failure:  # noqa: BLE001 - as above
        _log.warning("sigmascope: a node could not do its work (%s)", describe(failure))
        return f"unknown ({describe(failure)})"
    return text


def _verdicts(model: Any, clip: Any, graph: Mapping[str, Any], node: str) -> str:
    models = {"unet": model, "unet before": without_loras(model)}
    if clip is not None:
        models |= {"clip": clip, "clip before": without_loras(clip)}
    names = list(dict.fromkeys(_loras_before(graph, node)))
    if not names:
        verdict, _ = judge(models, None, frozenset())
        return f"LoRAs of unknown name: {in_words(verdict)}"
    lines = []
    for name in reversed(names):
        verdict, _ = judge(models, path_of(name), frozenset())
        lines.append(f"{name}: {in_words(verdict)}")
    return "\n".join(lines)


def _loras_before(graph: Mapping[str, Any], node: str) -> Iterator[str]:
    """The files that nodes before this one name, the nearest first."""
    todo, seen = [node], {node}
    while todo and len(seen) <= _MOST_LINKS:
        node_before = graph.get(todo.pop(0)) or {}
        if isinstance(name := (node_before.get("inputs") or {}).get("lora_name"), str):
            yield name
        links = [source for _, (source, _) in links_of(node_before)]
        todo += [link for link in links if link not in seen]
        seen.update(links)


def _kept(keep: str, name: str, given: Mapping[str, Any], node: str) -> str:
    if not given:
        return "nothing is connected"
    watching = session.current()
    lines = []
    if keep in (_BOTH, _FIGURES):
        prompt = None if watching is None else watching.prompt
        watched = None if prompt is None else prompt.node(node)
        for name_of_tensor, tensor in _tensors(given).items():
            lines.append(_line(name_of_tensor, tensor_facts(tensor, statistics=True)))
            if watched is not None:
                watched.stage.tensor(name_of_tensor, tensor, statistics=True)
    if keep in (_BOTH, _FILE):
        folder = session.records_folder() if watching is None else watching.folder
        if folder is None:
            return "\n".join([*lines, "not kept in a file: records are written nowhere"])
        privacy = "hash" if watching is None else watching.privacy
        path = TensorDumps(folder / _DUMPS, prompt_privacy=privacy).save(name, given)
        lines.append(f"kept in {path.name}")
    return "\n".join(lines)


def _tensors(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """By the names that they have in a dump."""
    return flatten(given, lambda _: False, private=True).tensors


def _line(name: str, facts: TensorFacts) -> str:
    spread = ", ".join(f"{what} {statistic(getattr(facts, what))}" for what in ("min", "max", "mean", "std"))
    odd = [
        f"{count:,} {what}"
        for what, count in (("NaN", facts.nan_count), ("infinite", facts.inf_count))
        if count
    ]
    shape = "×".join(map(str, facts.shape))
    return ", ".join([f"{name}: {shape} {facts.dtype}", spread, *odd])


def _wanted(name: str) -> str:
    watching = session.current()
    prompt = None if watching is None else watching.prompt
    if prompt is None:
        return "no report: prompts are not watched"
    prompt.facts.setdefault(REPORTS, []).append(name)
    wanted = counted(len(prompt.facts[REPORTS]), "report")
    return f"{wanted} to be written when the prompt is over"
