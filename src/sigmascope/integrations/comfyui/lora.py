"""The instrument that judges each LoRA of a prompt by the weights that were used with it.

The loader's models before and after are remembered weakly. They are compared at the prompt's end, when the host has
merged what it merges: by then the weights that the sampler used are there to be read. Of a loader that does not run,
because ComfyUI kept its output, what was said of it then is told again, as of then.
"""

import hashlib
import json
import sys
import uuid
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from sigmascope.integrations.comfyui.instruments import Instrument
from sigmascope.integrations.comfyui.needs import Need, output_data
from sigmascope.integrations.comfyui.recording import NodeWatch, PromptRecording
from sigmascope.integrations.comfyui.sampling import first_of
from sigmascope.integrations.comfyui.wraps import Call, Wrap
from sigmascope.stages.lora_application import (
    analyze_lora_application_results,
    capture_lora_baseline,
    in_short,
)
from sigmascope.stages.lora_on_model import is_for_text
from sigmascope.units import counted

LORA: Final = "lora"
"""The fact of a node's stage: keys of the file and patches made of it, for each time."""
VERDICTS: Final = "lora_verdicts"
"""The fact of a node's stage: whether the LoRA did anything, and why not."""
KEPT: Final = "loras_kept"
"""The prompt's fact that has the LoRAs of loaders that did not run, because ComfyUI kept their outputs, as judged before."""
_MOST_KEPT: Final = 200
_MOST_ANCESTORS: Final = 100
_UNNAMED: Final = "(unnamed)"
_DEEPEST: Final = 8
"""Levels of lists and dicts in which a node is given the names of LoRAs."""
_NO_MODEL: Final = "the node gives no model: its LoRA is applied later, if at all"
_KINDS: Final = {"MODEL": "denoiser", "CLIP": "text encoder"}
"""What a LoRA changes, by the kind of output that has it."""
_ARRIVES: Final = ("lora_arrives_weak", "lora_arrives_noisy")
ZERO: Final = "both strengths are 0"
_ITS_ZERO: Final = "its strength is 0"
_GONE: Final = "the models were gone when the prompt ended"


class _Application(NamedTuple):
    """A LoRA of a node, and why the node left it off, if it was told to.

    `patches` has the identities of those made of its file; None: it is the node's only one.
    """

    node: NodeWatch
    models: Mapping[str, Callable[[], Any]]
    path: str | None
    name: str
    leads_nowhere: frozenset[str]
    patches: frozenset[int] | None
    why_off: str | None


class _Judged(NamedTuple):
    """What was said of a node's LoRAs, in which prompt, and what of its models went to no other node there."""

    prompt_id: str
    verdicts: list[dict[str, Any]]
    leads_nowhere: frozenset[str]


class _Seen:
    """Of one prompt: the LoRAs of its nodes, and the identities of the patches made of each file that a node read."""

    def __init__(self) -> None:
        self.applied: list[_Application] = []
        self.patches: dict[str, list[frozenset[int]]] = {}


class Lora(Instrument):
    """Wraps `comfy.lora.load_lora` and `execution.get_output_data`."""

    name = "lora"
    gives = "LoRA keys and verdicts"
    needs = (
        Need("comfy.lora", "load_lora", ("lora", "to_load"), False),
        output_data("obj", "input_data_all"),
    )

    def put_on(self) -> None:
        """See `Instrument`."""
        self.wraps.append(Wrap(self.needs[0], self, after=self._loaded))
        self.wraps.append(Wrap(self.needs[1], self, after=self._outputs))
        self._judged: OrderedDict[str, _Judged] = OrderedDict()

    def _loaded(self, call: Call, _known: None, result: Any, error: BaseException | None) -> None:
        prompt, node = self.prompt_here(), self.node_here()
        if prompt is not None and node is not None and error is None:
            node.add(LORA, {"keys": len(call.get("lora") or ()), "patches": len(result)})
            patches = prompt.until_the_end(self.name, _Seen).patches
            patches.setdefault(node.id, []).append(frozenset(map(id, result.values())))

    def _outputs(self, call: Call, _known: None, result: Any, error: BaseException | None) -> None:
        inputs = call.get("input_data_all")
        prompt = self.session.prompt_of(call.get("prompt_id"))
        node = None if prompt is None else prompt.nodes.get(str(call.get("unique_id")))
        if prompt is None or node is None or error is not None or not isinstance(inputs, Mapping):
            return
        kinds = getattr(call.get("obj"), "RETURN_TYPES", ())
        # A hook's LoRA is read by the node that samples with it too; `hook_lora` judges it.
        if (LORA not in node.facts and "lora_name" not in inputs) or _is_hooked(node, kinds, inputs):
            return
        outputs = {str(kind): first_of(values) for kind, values in zip(kinds, result[0] or (), strict=False)}
        models = {
            "unet before": first_of(inputs.get("model")),
            "clip before": first_of(inputs.get("clip")),
            "unet": outputs.get("MODEL"),
            "clip": outputs.get("CLIP"),
        }
        kept = {what: weakref.ref(model) for what, model in models.items() if model is not None}
        seen, names = prompt.until_the_end(self.name, _Seen), list(dict.fromkeys(_names_in(inputs)))
        patches = seen.patches.get(node.id, [])
        apart = len(names) > 1 and len(names) == len(patches)
        for at, name in enumerate(names or [_UNNAMED]):
            own, nowhere = patches[at] if apart else None, _leads_nowhere(prompt, node.id, kinds)
            off = _why_off(inputs)
            seen.applied.append(_Application(node, kept, path_of(name), name, nowhere, own, off))

    def at_the_end(self, prompt: PromptRecording) -> None:
        """Judge the LoRAs of the prompt's loader nodes."""
        for one in prompt.until_the_end(self.name, _Seen).applied:
            models = {what: reference() for what, reference in one.models.items()}
            if any(model is None for model in models.values()):
                verdict: dict[str, Any] = {"effective": None, "reason": _GONE}
            elif not models.keys() & {"unet", "clip"}:
                verdict = {"effective": None, "reason": _NO_MODEL}
            else:
                verdict, analysis = judge(_with_own_patches(models, one), one.path, one.leads_nowhere)
                own = one.node.facts.setdefault(one.node.name, {})
                analysis["findings"] = [*own.get("findings", ()), *analysis["findings"]]
                own.update(analysis)
                if one.why_off is not None and verdict["effective"] is False:
                    verdict["why"] = one.why_off
            verdict["says"] = f"{one.name}: {in_words(verdict)}"
            one.node.add(VERDICTS, {"lora": one.name, **verdict})
            self._remember(prompt, one, verdict)
        kept = [
            said
            for node_id in prompt.graph
            if node_id in prompt.cached
            for said in self._kept(prompt, node_id)
        ]
        if kept:
            prompt.facts[KEPT] = kept

    def _remember(self, prompt: PromptRecording, one: _Application, verdict: Mapping[str, Any]) -> None:
        made_of = _made_of(prompt.graph, one.node.id)
        if made_of is None or verdict["effective"] is None:
            return
        before = self._judged.pop(made_of, None)
        is_same = before is not None and before.prompt_id == prompt.prompt_id
        told = before.verdicts if before is not None and is_same else []
        told.append({"lora": one.name, "effective": verdict["effective"], "words": in_words(verdict)})
        self._judged[made_of] = _Judged(prompt.prompt_id, told, one.leads_nowhere)
        while len(self._judged) > _MOST_KEPT:
            self._judged.popitem(last=False)

    def _kept(self, prompt: PromptRecording, node_id: str) -> Iterator[dict[str, Any]]:
        """What was said of a node's LoRAs when it ran, if it leads now where it led then."""
        made_of = _made_of(prompt.graph, node_id)
        judged = None if made_of is None else self._judged.get(made_of)
        if judged is None or judged.leads_nowhere != _leads_nowhere(
            prompt, node_id, _kinds_of(prompt, node_id)
        ):
            return
        for one in judged.verdicts:
            says = f"{one['lora']}: kept from prompt {judged.prompt_id[:8]}: {one['words']}"
            told = {"lora": one["lora"], "effective": one["effective"], "says": says}
            yield {"node": node_id, **told, "since_prompt": judged.prompt_id}


def _kinds_of(prompt: PromptRecording, node_id: str) -> Sequence[Any]:
    """What the class of a node gives, by its own words."""
    known = getattr(sys.modules.get("nodes"), "NODE_CLASS_MAPPINGS", {})
    kinds: Sequence[Any] = getattr(known.get(prompt.info(node_id).get("class_type")), "RETURN_TYPES", ())
    return kinds


def _made_of(graph: Mapping[str, Any], node_id: str) -> str | None:
    """A digest of a node and of all that it is made from, whatever their ids: so ComfyUI tells whether it has an output.

    None: the graph does not say, or it is too much.
    """
    numbers: dict[str, int] = {node_id: 0}
    shape: list[Any] = []
    while len(shape) < len(numbers) <= _MOST_ANCESTORS:
        node = graph.get(list(numbers)[len(shape)])
        if not isinstance(node, Mapping):
            return None
        inputs: list[Any] = []
        for name, value in sorted((node.get("inputs") or {}).items()):
            source = numbers.setdefault(str(value[0]), len(numbers)) if _is_link(value) else None
            inputs.append([name, value if source is None else value[1], source])
        shape.append([node.get("class_type"), inputs])
    if len(numbers) > _MOST_ANCESTORS:
        return None
    text = json.dumps(shape, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def _is_link(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


def _names_in(inputs: Mapping[str, Any]) -> Iterator[str]:
    """The LoRA files that a node is given: as `lora_name`, or where one of its values, or what lies in one, names a file."""
    if isinstance(name := first_of(inputs.get("lora_name")), str):
        yield name
    else:
        yield from (text for text in _texts_in(list(inputs.values()), _DEEPEST) if path_of(text) is not None)


def _texts_in(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif depth and isinstance(value, Mapping):
        if value.get("on") is not False:
            yield from _texts_in(list(value.values()), depth - 1)
    elif depth and isinstance(value, list | tuple):
        for item in value:
            yield from _texts_in(item, depth - 1)


def _why_off(inputs: Mapping[str, Any]) -> str | None:
    """That a loader is given strengths, and each is 0."""
    strengths = [first_of(inputs[name]) for name in ("strength_model", "strength_clip") if name in inputs]
    if not strengths or any(strengths):
        return None
    return ZERO if len(strengths) > 1 else _ITS_ZERO


def _with_own_patches(models: dict[str, Any], one: _Application) -> dict[str, Any]:
    """The models with this LoRA alone, where the node put several on."""
    if one.patches is None:
        return models
    alone = dict(models)
    for part in models.keys() & {"unet", "clip"}:
        alone[part] = models[part].clone()
        patcher, before = _patcher_of(alone[part]), models.get(f"{part} before")
        known = {} if before is None else _patcher_of(before).patches
        earlier = {id(patch) for patches in known.values() for patch in patches}
        patcher.patches_uuid = uuid.uuid4()  # no weights are loaded that have these patches alone
        patcher.patches = {
            key: own
            for key, patches in patcher.patches.items()
            if (own := [patch for patch in patches if id(patch) in earlier or id(patch[1]) in one.patches])
        }
    return alone


def _patcher_of(model: Any) -> Any:
    return getattr(model, "patcher", model)


def _is_hooked(node: NodeWatch, kinds: Sequence[Any], inputs: Mapping[str, Any]) -> bool:
    """Whether a node makes hooks, has them set on a model, or samples or encodes with them."""
    return "HOOKS" in kinds or "hooks" in inputs or node.is_sampler or "CONDITIONING" in kinds


def path_of(name: Any) -> str | None:
    """Where a LoRA file lies that a node names; None: ComfyUI does not find it."""
    folders = sys.modules.get("folder_paths")
    if folders is None or not isinstance(name, str):
        return None
    found = folders.get_full_path("loras", name)
    return found if isinstance(found, str) else None


def _leads_nowhere(prompt: PromptRecording, node_id: str, kinds: Sequence[Any]) -> frozenset[str]:
    """What of the models that a node of the posted graph gives goes to no other node."""
    if node_id not in prompt.graph:
        return frozenset()
    taken = {
        (str(link[0]), link[1])
        for taker in prompt.graph
        for link in (prompt.info(taker).get("inputs") or {}).values()
        if _is_link(link)
    }
    return frozenset(
        _KINDS[kind]
        for slot, kind in enumerate(map(str, kinds))
        if kind in _KINDS and (node_id, slot) not in taken
    )


def judge(
    models: Mapping[str, Any], path: str | None, leads_nowhere: frozenset[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The verdict in short, and the analysis that it is taken from.

    Args:
        models: "unet" and "clip", as far as there are any, and the same as they were "unet before" and "clip before".
        path: The LoRA's file, if it is known.
        leads_nowhere: "denoiser" or "text encoder", where the loader gives it to no other node.
    """
    # Of a file that is not known, the weights with changes: unseen, none of them would count as changed.
    keys: Literal["lora"] | frozenset[str] = "lora" if path else _changed_weights(models)
    baseline = capture_lora_baseline(models.get("unet before"), models.get("clip before"), path, keys=keys)
    unet, clip = models.get("unet"), models.get("clip")
    analysis = analyze_lora_application_results(baseline, unet, clip, (unet, clip))
    verdict = {
        "effective": analysis["effective"],
        "reason": analysis["unavailable"].get("effective"),
        "modules_used": None,
        "modules": None,
        "seconds": analysis["analysis_seconds"],
        "why": next((finding["message"] for finding in _gravest(analysis)), None),
    }
    modules = (analysis["applied_verdict"] or {}).get("modules", ())
    left_out = [one["evidence"] for one in analysis["findings"] if one["id"] == "lora_part_left_out"]
    if modules or left_out:
        verdict |= use_of(modules, verdict, leads_nowhere, has_denoiser=unet is not None)
    if left_out:
        verdict["modules"] = left_out[0]["modules"]
    return verdict, in_short(analysis)


def _changed_weights(models: Mapping[str, Any]) -> frozenset[str]:
    """The names of the weights that patches lie on."""
    found = (_patcher_of(models[part]) for part in models.keys() & {"unet", "clip"})
    return frozenset(key for patcher in found for key in getattr(patcher, "patches", None) or ())


def use_of(
    modules: Sequence[Mapping[str, Any]],
    verdict: Mapping[str, Any],
    leads_nowhere: frozenset[str],
    *,
    has_denoiser: bool,
) -> dict[str, Any]:
    """What a verdict says of the modules of a file: how many act on weights that the prompt takes.

    Args:
        modules: As `AppliedModule.as_dict` gives them.
        verdict: What the weights say: `effective`, and `why`.
        leads_nowhere: "denoiser" or "text encoder", where the loader gives it to no other node.
        has_denoiser: Whether the loader gives one.
    """
    acting = Counter(
        "text encoder" if is_for_text(module["name"]) else "denoiser" for module in modules if module["acts"]
    )
    lost = [part for part in acting if part in leads_nowhere]
    used = sum(count for part, count in acting.items() if part not in lost)
    effective, why = verdict["effective"], verdict["why"]
    if effective and lost:
        effective = used > 0
        why = f"no node takes the {' and the '.join(lost)} that the loader gives"
    elif effective and has_denoiser and acting["text encoder"] and not acting["denoiser"]:
        why = why or "it changes the text encoder only"
    return {
        "effective": effective,
        "why": why,
        "modules_used": 0 if effective is False else used,
        "modules": len(modules),
    }


def _gravest(analysis: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Findings that are no mere facts, the best reason first.

    Of a LoRA that does nothing, one about all of the file comes before one about a part of it; of one that acts, how much of
    it arrives in weights that are stored coarsely.
    """

    def is_about_a_part(finding: Mapping[str, Any]) -> bool:
        about, of = finding["evidence"].get("modules"), finding["evidence"].get("of")
        return about is not None and of is not None and about < of

    grave = [finding for finding in analysis["findings"] if finding["severity"] != "info"]
    if analysis["effective"] is False:
        return sorted(grave, key=is_about_a_part)
    return sorted(grave, key=lambda finding: finding["id"] not in _ARRIVES)


def in_words(verdict: Mapping[str, Any]) -> str:
    """A verdict, such as "16 of 17 modules used; 1 of 17 modules has a name that …"."""
    if verdict["effective"] is None:
        return f"unknown ({verdict['reason'] or 'nothing was read'})"
    used, modules = verdict.get("modules_used"), verdict.get("modules")
    does = "it acts" if verdict["effective"] else "it does nothing"
    count = does if used is None or modules is None else f"{used} of {counted(modules, 'module')} used"
    return f"{count}; {verdict['why']}" if verdict["why"] else count


INSTRUMENT = Lora
