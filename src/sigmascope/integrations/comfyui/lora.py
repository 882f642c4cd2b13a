"""The instrument that judges each LoRA of a prompt by the weights that were used with it.

The loader's models before and after are remembered weakly. They are compared at the prompt's end, when the host has
merged what it merges: by then the weights that the sampler used are there to be read. Patches of models that were put on a
device say whether any node used what the loader gives. Of a loader whose output ComfyUI kept, the verdict is kept too.
"""

import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any, Final, Literal, NamedTuple

import torch

from sigmascope.integrations.comfyui.files import FILES
from sigmascope.integrations.comfyui.instruments import Instrument, weakly
from sigmascope.integrations.comfyui.kept_loras import Kept, keep_verdict
from sigmascope.integrations.comfyui.latents import LOST
from sigmascope.integrations.comfyui.lora_names import (
    UNNAMED,
    Sample,
    in_order,
    missing_in,
    names_in,
    names_read,
    path_of,
    sample_of,
    tags_in,
)
from sigmascope.integrations.comfyui.models_in_use import (
    BESIDE_ZERO,
    SKIPPED,
    InUse,
    ModelsInUse,
    Use,
    Uses,
    changes_of,
    patches_of,
)
from sigmascope.integrations.comfyui.needs import Need, output_data
from sigmascope.integrations.comfyui.posted_graph import following, links_of
from sigmascope.integrations.comfyui.recording import NodeWatch, PromptRecording
from sigmascope.integrations.comfyui.sampling import first_of
from sigmascope.integrations.comfyui.wraps import Call, Wrap
from sigmascope.lora.verdict import VERDICTS as ROWS
from sigmascope.lora.verdict import verdict_finding
from sigmascope.probes.comfyui_patcher import bypasses_of
from sigmascope.probes.reading import attempt, attribute, mapping, sequence
from sigmascope.stages.lora_application import (
    analyze_lora_application_results,
    capture_lora_baseline,
    in_short,
)
from sigmascope.stages.lora_on_model import is_for_text, names_of_all
from sigmascope.units import counted

LORA: Final = "lora"
"""The fact of a node's stage: keys of the file and patches made of it, for each time."""
VERDICTS: Final = "lora_verdicts"
"""The fact of a node's stage: whether the LoRA did anything, and why not."""
_STRENGTHS: Final = (
    "strength_model",
    "strength_clip",
    "strength",
    "lora_model_strength",
    "lora_clip_strength",
    "lora_strength",
)
"""A loader's inputs, ComfyUI's own first."""
_NO_MODEL: Final = (
    "the node gives no model that has its LoRA: it is applied inside the node or later, if at all"
)
_ALL_USED: Final[Mapping[str, Mapping[str, str]]] = {}
_KINDS: Final = {"MODEL": "denoiser", "CLIP": "text encoder"}
"""What a LoRA changes, by the kind of output that has it."""
_ARRIVES: Final = ("lora_arrives_weak", "lora_arrives_noisy")
ZERO: Final = "both strengths are 0"
_ITS_ZERO: Final = "its strength is 0"
_NOT_TAKEN: Final = "no node takes"
_NOT_RUN: Final = "no node that ran uses"
_NO_STEP: Final = "no sampler made a step with"
_NO_WEIGHT: Final = "every conditioning has weight 0 in what was sampled with"
_OFF: Final = "it has strength 0 on"
_ENDED: Final = "the prompt ended before a node used"
_MAY_USE: Final = "a node that puts no model on a device itself may use"
_NOT_COUNTED: Final = "no step counted a text that was encoded with"
_CHANGED_AFTER: Final = "the conditioning was changed, or used in a way that is not seen, after it came from"
_MAY_COUNT: Final = "cfg, a number of the guider, the noise mask or a last step without conditioning may leave nothing of what was sampled with"
_MASKED: Final = "the noise mask of the latent is zeros in what was sampled with"
_FORGOTTEN: Final = "the sampler that takes the latent begins from noise alone (first sigma 1), so that nothing is left of what was sampled with"
_MADE_ANEW: Final = "a node made other patches of it, of which it is not known how they act, on"
_DOUBTS: Final = frozenset({SKIPPED, BESIDE_ZERO, LOST})
_OPEN: Final = frozenset({_ENDED, _MAY_USE, _MADE_ANEW, _CHANGED_AFTER, _MAY_COUNT}) | _DOUBTS
"""Why it is not known whether a LoRA acts."""
_UNLESS_LATER: Final = frozenset({_FORGOTTEN, _NO_STEP, _NO_WEIGHT, _MASKED, _NOT_COUNTED})
"""Why it did nothing as far as the prompt went."""
_REPLACED: Final = (
    "a loader after it replaces it: of adapters that bypass the weights ComfyUI keeps the last loader's"
)
_GIVEN_BACK: Final = "the node read the file and gave back the very model that it was given: whether it wrote into its weights was not seen"
_OTHER_CHANGES: Final = "the node changes weights, by none of the names that the file has"
_KEPT_BY_NODE: Final = "the node was told to take no LoRA, and gives a model that has one from before"
_NODE_FAILED: Final = "the node failed before it gave a model or hooks that have it"
_NOT_FOUND: Final = "ComfyUI finds no file of that name, so that the node left it out"
_MAY_BE_ELSEWHERE: Final = (
    "ComfyUI finds no file of that name: whether the node found it elsewhere was not seen"
)
_NOT_READ: Final = (
    "the node read no LoRA, and gave back the model that it was given, as where the strength is 0"
)
_WORDS_ALONE: Final = (
    "<lora:…> in a text loads nothing here: this node takes it as words, so put the LoRA on with a loader"
)
_GONE: Final = "the models were gone when the prompt ended"


class _Application(NamedTuple):
    """A LoRA of a node, and why the node left it off, if it was told to.

    `patches` has the identities of those made of its file; None: it is the node's only one. `is_kept`: the node read none.
    """

    node: NodeWatch
    models: Mapping[str, Callable[[], Any]]
    path: str | None
    name: str
    kinds: tuple[str, ...]
    patches: frozenset[int] | None
    why_off: str | None
    is_kept: bool


class _Weighed(NamedTuple):
    """What the weights say of a LoRA, whatever becomes of the model that has it.

    Attributes:
        verdict: `effective`, and the `reason` if that is not known, or `why`.
        modules: `name`, `acts`, `keys` and `states` of each of the file's modules that is on the model.
        of: How many modules the file has, if that is more.
        has_denoiser: Whether the loader gives one.
    """

    verdict: dict[str, Any]
    modules: Sequence[Mapping[str, Any]] = ()
    of: int | None = None
    has_denoiser: bool = False

    @property
    def is_only_registered(self) -> bool:
        """Whether ComfyUI has merged none of it, nor lies it beside the weights."""
        return all(set(module["states"]) == {"registered"} for module in self.modules if module["acts"])


class _Patches(NamedTuple):
    """The patches of a LoRA on a part of the model, by their identities.

    Attributes:
        model: The part's own identity.
        every: All of them, and adapters beside the weights.
        by_weight: Those of each weight.
        off: Weights on which they have strength 0.
        changes: The identities of what they change.
    """

    model: int
    every: frozenset[int]
    by_weight: Mapping[str, frozenset[int]]
    off: frozenset[str]
    changes: frozenset[int]


class _Known(NamedTuple):
    """The verdict on a LoRA of a node that ran.

    Attributes:
        name: The file's.
        kinds: Of the node's outputs.
        weighed: What the weights said.
        patches: By part of the model.
        at: How many prompts before the one that it ran in were watched.
        is_inner: Whether a node of the posted graph was expanded into that one. Which of its outputs that leads to is not known.
    """

    name: str
    kinds: tuple[str, ...]
    weighed: _Weighed
    patches: Mapping[str, _Patches]
    at: int
    is_inner: bool = False


class _Seen:
    """Of one prompt.

    Attributes:
        applied: The LoRAs of its nodes.
        patches: By node, the identities of the patches made of each LoRA, with a sample of its tensors.
        replaced: The identities of adapters beside the weights that a later loader put its own in place of.
        told: The LoRAs that nodes were only told of: those that are not found, and those that a text names.
    """

    def __init__(self) -> None:
        self.applied: list[_Application] = []
        self.patches: dict[str, list[tuple[Sample | None, frozenset[int]]]] = {}
        self.replaced: set[int] = set()
        self.told: list[tuple[NodeWatch, str, dict[str, Any]]] = []


class Lora(Instrument):
    """Wraps `comfy.lora.load_lora`, `execution.get_output_data` and `comfy.model_management.load_models_gpu`."""

    name = "lora"
    gives = "LoRA keys and verdicts"
    needs = (
        Need("comfy.lora", "load_lora", ("lora", "to_load"), False),
        output_data("obj", "input_data_all"),
        Need("comfy.model_management", "load_models_gpu", ("models",), False),
    )

    def put_on(self) -> None:
        """See `Instrument`."""
        self._known: Kept[_Known] = Kept()
        self._in_use = ModelsInUse()
        self.wraps.append(Wrap(self.needs[0], self, after=self._loaded))
        self.wraps.append(Wrap(self.needs[1], self, after=self._outputs))
        self.wraps.append(Wrap(self.needs[2], self, before=self._goes_to_a_device))

    def _loaded(self, call: Call, _known: None, result: Any, error: BaseException | None) -> None:
        prompt, node = self.prompt_here(), self.node_here()
        if prompt is not None and node is not None and error is None:
            node.add(LORA, {"keys": len(call.get("lora") or ()), "patches": len(result)})
            patches = prompt.until_the_end(self.name, _Seen).patches
            sample = attempt(partial(sample_of, call.get("lora"))).value
            patches.setdefault(node.id, []).append((sample, frozenset(map(id, result.values()))))

    def _goes_to_a_device(self, call: Call) -> None:
        prompt, node = self.prompt_here(), self.node_here()
        if prompt is not None:
            for patcher in call.get("models") or ():
                self._in_use.add(prompt, node, patcher)

    def _outputs(self, call: Call, _known: None, result: Any, error: BaseException | None) -> None:
        inputs = call.get("input_data_all")
        prompt = self.session.prompt_of(call.get("prompt_id"))
        node = None if prompt is None else prompt.nodes.get(str(call.get("unique_id")))
        if prompt is None or node is None or not isinstance(inputs, Mapping):
            return
        first = _first_of(inputs)
        if error is not None:
            is_loader = "lora_name" in inputs or not node.facts.keys().isdisjoint({LORA, FILES})
            for name in dict.fromkeys(names_in(first) if is_loader else ()):
                node.add(VERDICTS, said(name, _not_acting(_NODE_FAILED, None)))
            for name in missing_in(first):
                node.add(VERDICTS, said(name, _not_acting(_MAY_BE_ELSEWHERE, None)))
            return
        obj, seen = call.get("obj"), prompt.until_the_end(self.name, _Seen)
        kinds = tuple(map(str, getattr(obj, "RETURN_TYPES", ())))
        reads = LORA in node.facts
        made = dict(zip(kinds, map(first_of, result[0] or ()), strict=False))
        patches = seen.patches.get(node.id, [])
        seen.told += [(node, *one) for one in _told_of(node, obj, first, made, len(patches))]
        keeps_one = not reads and bool(attempt(partial(_keeps_a_lora, kinds, inputs, result[0] or ())).value)
        is_off = not reads and "lora" in inputs and "MODEL" in kinds and _why_off(first) is not None
        if not (reads or keeps_one or is_off or "lora_name" in inputs):
            return
        calls = _calls(inputs, result[0] or (), is_one=bool(getattr(obj, "INPUT_IS_LIST", False)))
        for given, gave in calls:
            models = _models_of(given, dict(zip(kinds, gave, strict=False)))
            names = list(dict.fromkeys(names_in(given)))
            if not names and len(calls) == 1 and len(read := names_read(node)) == len(patches):
                names = read
            if _is_hooked(node, kinds, given, models, names):
                continue
            kept = {what: known for what, model in models.items() if (known := weakly(model)) is not None}
            if not names and not (reads or keeps_one or is_off):
                continue  # it was told to take none
            apart = len(names) > 1 and len(names) == len(patches) and len(calls) == 1
            by_name = in_order(names, patches) if apart else None
            for at, name in enumerate(names or [UNNAMED]):
                own = None if by_name is None else by_name[at]
                one = _Application(node, kept, path_of(name), name, kinds, own, _why_off(given), keeps_one)
                seen.applied.append(one)

    @torch.no_grad()  # ComfyUI's inference mode is over by then
    def at_the_end(self, prompt: PromptRecording) -> None:
        """Judge the LoRAs of the prompt's loader nodes, and name those of loaders that ComfyUI kept."""
        seen = prompt.until_the_end(self.name, _Seen)
        anew: dict[str, list[_Known]] = {}
        in_use = self._in_use.of_prompt(prompt)
        judged = [(one.node, self._judge(one, seen, in_use.at)) for one in seen.applied]
        judged += [(node, _Known(name, (), _Weighed(why), {}, in_use.at)) for node, name, why in seen.told]
        ran = [(node, prompt.posted(node), known) for node, known in judged]
        ran = [(node, at, known._replace(is_inner=at != node.id)) for node, at, known in ran]
        for _, at, known in ran:
            anew.setdefault(at, []).append(known)
        kept = self._known.of_prompt(prompt, anew)
        loaded = {known.name for _, _, known in [*ran, *kept] if known.kinds}
        for node, at, known in ran:
            if (
                known.kinds or known.name not in loaded
            ):  # else it is one that a text names, and another node loads
                node.add(VERDICTS, _verdict_of(known, at, prompt, seen, in_use))
        for node_id, since, known in kept:
            if known.kinds or known.name not in loaded:
                keep_verdict(prompt, node_id, _verdict_of(known, node_id, prompt, seen, in_use, since))

    def _judge(self, one: _Application, seen: _Seen, at: int) -> _Known:
        """Compare the loader's models, and put the analysis on its node."""
        models = {what: reference() for what, reference in one.models.items()}
        if any(model is None for model in models.values()):
            return _Known(one.name, one.kinds, _Weighed({"effective": None, "reason": _GONE}), {}, at)
        if not models.keys() & {"unet", "clip"}:
            return _Known(one.name, one.kinds, _Weighed({"effective": None, "reason": _NO_MODEL}), {}, at)
        is_given_back = _is_given_back(models)
        for part in models.keys() & {"unet", "clip"}:
            before = models.get(f"{part} before")
            if before is None:
                models[f"{part} before"] = attempt(partial(without_loras, models[part])).value
            elif replaced := bypasses_of(before) - bypasses_of(models[part]):
                seen.replaced |= replaced
                models[f"{part} before"] = _without_replaced(before, models[part])
        models = _with_own_patches(models, one)
        weighed, analysis = _weigh(models, one.path)
        if one.why_off is not None and weighed.verdict["effective"] is False:
            weighed.verdict["why"] = one.why_off
        elif one.node.facts.keys() & {LORA, FILES} and is_given_back:
            weighed.verdict.update(effective=None, reason=_GIVEN_BACK, why=None)
            findings = [finding for finding in analysis["findings"] if finding["id"] != "lora_left_off"]
            unavailable = {**analysis["unavailable"], "effective": _GIVEN_BACK}
            analysis |= {"effective": None, "findings": findings, "unavailable": unavailable}
        elif one.is_kept and weighed.verdict["effective"]:
            weighed.verdict["why"] = _KEPT_BY_NODE
        own = one.node.facts.setdefault(one.node.name, {})
        analysis["findings"] = [*own.get("findings", ()), *analysis["findings"]]
        own.update(analysis)
        return _Known(one.name, one.kinds, weighed, _patches_in(models), at)


def _is_given_back(models: Mapping[str, Any]) -> bool:
    """Whether a loader gave back the very models that it was given."""
    return all(models[part] is models.get(f"{part} before") for part in models.keys() & {"unet", "clip"})


def _patches_in(models: Mapping[str, Any]) -> dict[str, _Patches]:
    """The patches that models have beside those from before, by part."""
    names = attempt(lambda: names_of_all(models.get("unet"), models.get("clip"))).value
    found = {}
    for part, word, at in (("unet", "denoiser", 0), ("clip", "text encoder", 1)):
        if part in models:
            patcher, before = _patcher_of(models[part]), _patcher_of(models.get(f"{part} before"))
            every = frozenset(set(patches_of(patcher)) - set(patches_of(before)))
            known = getattr(before, "patches", None) or {}
            own = {
                key if names is None else names[at](key): _new_in(patches, known.get(key, ()))
                for key, patches in (getattr(patcher, "patches", None) or {}).items()
            }
            by_weight = {key: every & new for key, new in own.items()}
            off = frozenset(key for key, new in own.items() if new and not by_weight[key])
            changes = frozenset(set(changes_of(patcher)) - set(changes_of(before)))
            found[word] = _Patches(id(getattr(patcher, "model", None)), every, by_weight, off, changes)
    return found


def _new_in(now: Sequence[object], before: Sequence[object]) -> frozenset[int]:
    return frozenset(map(id, now)) - frozenset(map(id, before))


def _verdict_of(
    known: _Known,
    node_id: str,
    prompt: PromptRecording,
    seen: _Seen,
    in_use: InUse,
    since: str | None = None,
) -> dict[str, Any]:
    """The verdict on a LoRA of a node, with what became of the models that the node gave."""
    nowhere, unused = _leads_nowhere(known, node_id, prompt, in_use), _unused(known, node_id, prompt, in_use)
    verdict = _with_use(known.weighed, nowhere, unused)
    if verdict["effective"] and not known.weighed.modules:
        verdict |= _use_of_no_file(known, nowhere, unused)
    if not verdict["effective"] and any(patches.every & seen.replaced for patches in known.patches.values()):
        verdict["why"] = _REPLACED
    return said(known.name, verdict, since)


def _use_of_no_file(
    known: _Known, nowhere: frozenset[str], unused: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """What a verdict says of a LoRA of which no module is known, if no part of the model that has it was used."""
    hows = {
        part: _NOT_TAKEN if part in nowhere else unused.get(part, {}).get("")
        for part, patches in known.patches.items()
        if patches.every
    }
    idle = {part: [how] for part, how in hows.items() if how is not None}
    if not idle or len(idle) < len(hows):
        return {}
    why = _idle_in_words(idle, dict.fromkeys(idle, 1))
    return (
        {"effective": None, "reason": why} if _OPEN & {*hows.values()} else {"effective": False, "why": why}
    )


def said(name: str, verdict: Mapping[str, Any], since: str | None = None) -> dict[str, Any]:
    """The verdict on a file, with the words for it.

    Args:
        name: The file's.
        verdict: See `in_words`.
        since: The prompt in which the node ran, if ComfyUI kept what it gave there; None: it ran in this one.
    """
    kept = {} if since is None else {"since_prompt": since}
    as_of = "" if since is None else f"kept from prompt {since[:8]}: "
    return {"lora": name, **verdict, **kept, "says": f"{name}: {as_of}{in_words(verdict)}"}


def _unused(known: _Known, node_id: str, prompt: PromptRecording, in_use: InUse) -> dict[str, dict[str, str]]:
    """Of each part of the model that a node gives, the weights on which the LoRA did nothing, and why.

    No node used the part with the LoRA's patches on them, or others cancel these; or the prompt ended before. Where it is not
    known what a node that follows used, that may have been all. "" stands for all of the part.
    """
    found = {}
    for slot, kind in enumerate(known.kinds if node_id in prompt.graph else ()):
        part = _KINDS.get(kind, "")
        patches = known.patches.get(part)
        followers = following(prompt.graph, node_id, None if known.is_inner else slot)
        if patches is None or any(not in_use.is_known(one, known.at) for one in followers & prompt.cached):
            found[part] = {} if patches is None else dict.fromkeys(patches.off, _OFF)
            continue
        unreached = followers - in_use.by_node.keys() - prompt.cached
        is_cut = not prompt.facts.get("success", True) and bool(unreached)
        does = [in_use.by_node[one] for one in (followers | {""}) & in_use.by_node.keys()]
        own = in_use.by_node.get(node_id)
        if own is not None and own.does != "other":  # it samples or encodes with its LoRA itself
            does.append(own)
        samplers = [one for one in does if one.does.startswith("samples")]
        users = samplers if part == "denoiser" else [one for one in does if one.does == "encodes"]
        counting = [
            one
            for one in does
            if one.does not in ("samples nothing", "was cut")
            and (one.sampled is None or one.sampled.counts is not False)
        ]
        using = [one for one in counting if any(use.model == patches.model for use in one.models)]
        uses = [use for one in using for use in one.models if use.model == patches.model]
        if samplers and all(one.does == "samples nothing" for one in samplers):
            found[part] = {"": _NO_STEP}
        elif samplers and not any(one in counting for one in samplers):
            made = [one.sampled for one in samplers if one.sampled is not None]
            is_masked, is_lost = all(one.is_masked for one in made), all(one.is_forgotten for one in made)
            found[part] = {"": _MASKED if is_masked else _FORGOTTEN if is_lost else _NO_WEIGHT}
        elif uses and part == "text encoder" and (how := _text_lost(does, patches, in_use)) is not None:
            found[part] = {"": how}
        elif (
            uses and part == "text encoder" and is_cut and not any(map(_has_sampled, in_use.by_node.values()))
        ):
            found[part] = {"": _ENDED}
        elif uses:
            idle = _idle_in(uses, patches)
            with_it = [one.sampled for one in using if _leaves(one, patches) or not patches.every]
            if "" not in idle and all(one is not None and one.counts is None for one in with_it):
                idle = {
                    "": LOST if all(one is not None and one.may_be_lost for one in with_it) else _MAY_COUNT
                }
            doubts = [use.doubted.get(one) for use in uses for one in patches.every & use.patches]
            if "" not in idle and doubts and None not in doubts:
                idle = {"": str(doubts[0])}
            found[part] = {**idle, **dict.fromkeys(patches.off, _OFF)}
        elif not prompt.facts.get("success", True):
            found[part] = {"": _ENDED}
        elif users and all(one.models for one in users) and all(one.does != "unknown" for one in does):
            found[part] = {"": _NOT_RUN}
        elif (users and known.at < in_use.at) or (
            (users or _is_done_elsewhere(part, in_use)) and known.weighed.is_only_registered
        ):
            found[part] = {"": _MAY_USE}
        if found.get(part, {}).get("") == _NOT_RUN and any(_is_forgotten(one, patches) for one in does):
            found[part] = {"": _FORGOTTEN}
        if found.get(part, {}).get("") == _NOT_RUN and any(_is_made_anew(one, patches) for one in counting):
            found[part] = {"": _MADE_ANEW}
        if is_cut and found.get(part, {}).get("") in _UNLESS_LATER:
            found[part] = {"": _ENDED}
    return found


def _is_done_elsewhere(part: str, in_use: InUse) -> bool:
    """Whether some node of the prompt samples, or encodes a text, whatever model it has."""
    wanted = "samples" if part == "denoiser" else "encodes"
    return any(one.does == wanted for one in in_use.by_node.values())


def _is_forgotten(uses: Uses, patches: _Patches) -> bool:
    """Whether a node sampled with a LoRA, and nothing that follows took of what it made."""
    return uses.sampled is not None and uses.sampled.is_forgotten and _leaves(uses, patches)


def _leaves(uses: Uses, patches: _Patches) -> bool:
    """Whether a node used a model on which some of these patches act."""
    return any(use.leaves(patches.every) for use in uses.models if use.model == patches.model)


def _is_made_anew(uses: Uses, patches: _Patches) -> bool:
    """Whether a node used a model with patches that hold the same changes, and are none of the loader's."""
    return any(
        use.model == patches.model and use.changes & patches.changes and not use.patches & patches.every
        for use in uses.models
    )


def _has_sampled(uses: Uses) -> bool:
    return uses.sampled is not None


def _text_lost(does: Sequence[Uses], patches: _Patches, in_use: InUse) -> str | None:
    """Why no step was made with what was encoded with a LoRA, or why that is not known; None: one was, or nothing is known."""
    encoders = [one for one in does if _leaves(one, patches)]
    makers = [one.maker for one in encoders]
    sampled = [one.sampled for one in in_use.by_node.values() if one.sampled is not None]
    if not sampled or not makers or None in makers:
        return None
    answers = [one.holds(filter(None, makers)) for one in sampled]
    if True in answers:
        return None
    if None in answers and all(one.may_be_lost for one in sampled if one.holds(filter(None, makers)) is None):
        return LOST
    return _CHANGED_AFTER if None in answers or any(one.does == "unknown" for one in does) else _NOT_COUNTED


def _idle_in(uses: Sequence[Use], patches: _Patches) -> dict[str, str]:
    """The weights on which none of a LoRA's patches acts in any of these models, and why; "": none acts."""
    by_weight = {"": patches.every, **patches.by_weight}
    return {
        weight: next((use.cancelled[one] for use in uses for one in own & use.cancelled.keys()), _NOT_RUN)
        for weight, own in by_weight.items()
        if own and not any(use.leaves(own) for use in uses)
    }


def _calls(
    inputs: Mapping[str, Any], results: Sequence[Any], *, is_one: bool
) -> list[tuple[Mapping[str, Any], tuple[Any, ...]]]:
    """Each call of a node's function: what it was given, and what it gave.

    ComfyUI calls it for each entry of its longest input, with the last entry of shorter ones.

    Args:
        inputs: Lists by name.
        results: A list for each output.
        is_one: Whether the function takes all lists at once.
    """
    lists = {name: values for name, values in inputs.items() if isinstance(values, list) and values}
    count = 1 if is_one else max(map(len, lists.values()), default=1)
    if any(not isinstance(values, list) or len(values) != count for values in results):
        count = 1
    return [
        (
            {name: values[min(at, len(values) - 1)] for name, values in lists.items()},
            tuple(values[at] if isinstance(values, list) and values else None for values in results),
        )
        for at in range(count)
    ]


def _first_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: first_of(values) for name, values in inputs.items()}


def _not_acting(why: str, effective: bool | None = False) -> dict[str, Any]:
    is_known = effective is not None
    return {"effective": effective, "reason": None if is_known else why, "why": why if is_known else None}


def _told_of(
    node: NodeWatch, obj: object, given: Mapping[str, Any], gave: Mapping[str, Any], loaded: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The LoRAs that a node was told of and did not load, with the verdict on each.

    Args:
        node: It ran.
        obj: Of its class.
        given: The first of each input.
        gave: The first of each output, by kind.
        loaded: How many LoRAs ComfyUI loaded for it.
    """
    read = {file["file"] for file in node.facts.get(FILES, ())}
    missing = missing_in(given) if gave.keys() & {"MODEL", "CLIP"} else []
    missing = [name for name in missing if PurePath(name).name not in read]
    is_all = loaded == 0 or loaded == len({*names_in(given)} | {*names_read(node)})
    is_given_back = bool(gave.keys() & {"MODEL", "CLIP"}) and _is_given_back(_models_of(given, gave))
    is_left_out = is_all and (loaded > 0 or is_given_back)
    for name in missing:
        yield name, _not_acting(_NOT_FOUND) if is_left_out else _not_acting(_MAY_BE_ELSEWHERE, None)
    if (
        is_given_back
        and not read
        and LORA not in node.facts
        and given.keys().isdisjoint({"lora", "lora_name"})
    ):
        for name in names_in({key: value for key, value in given.items() if "lora" in key.lower()}):
            yield name, _not_acting(_NOT_READ)
    is_own = getattr(obj, "RELATIVE_PYTHON_MODULE", "nodes").partition(".")[0] in ("nodes", "comfy_extras")
    if is_own and "CONDITIONING" in gave and LORA not in node.facts:
        yield from ((name, _not_acting(_WORDS_ALONE)) for name in tags_in([*given.values()]))


def _keeps_a_lora(kinds: Sequence[str], inputs: Mapping[str, Any], gave: Sequence[Any]) -> bool:
    """Whether a node that makes a model itself gives one with a LoRA on it: ComfyUI has these as objects, and merges as lists."""
    made = dict(zip(kinds, gave, strict=False))
    given = [one for values in inputs.values() for one in sequence(values)]
    is_given = any(attribute(_patcher_of(one), "patches") is not None for one in given)
    models = () if is_given else sequence(made.get("MODEL"))
    held = [patches for model in models for patches in mapping(model, "patches").values()]
    return any(isinstance(attribute(patch[1], "weights"), Sequence) for patches in held for patch in patches)


def _models_of(given: Mapping[str, Any], gave: Mapping[str, Any]) -> dict[str, Any]:
    """The models that a call of a node was given and gave; of a node that makes a model itself, the latter."""
    models = {"unet": gave.get("MODEL"), "clip": gave.get("CLIP")}
    return {"unet before": given.get("model"), "clip before": given.get("clip"), **models}


def without_loras(model: Any) -> Any:
    """The model as it is without any LoRA: a clone as each loader makes one, which nothing is put on or loaded of."""
    clone = model.clone()
    patcher = _patcher_of(clone)
    patcher.patches = {}
    if getattr(patcher, "injections", None):
        patcher.injections = {}
    return clone


def _without_replaced(before: Any, after: Any) -> Any:
    """A model as a loader was given it, without the adapters beside the weights that are gone from what it gave."""
    clone = before.clone()
    left = _patcher_of(after).injections
    own = _patcher_of(before).injections
    _patcher_of(clone).injections = {name: one for name, one in own.items() if left.get(name) is one}
    return clone


def _why_off(inputs: Mapping[str, Any]) -> str | None:
    """That a loader is given strengths, and each is 0."""
    strengths = [value for name, value in inputs.items() if name in _STRENGTHS]
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


def _is_hooked(
    node: NodeWatch,
    kinds: Sequence[str],
    inputs: Mapping[str, Any],
    models: Mapping[str, Any],
    names: Sequence[str],
) -> bool:
    """Whether the LoRA of a node is a hook's, which `hook_lora` judges.

    It makes hooks, or has them set on a model; or it reads the LoRA since it samples or encodes with them. Such a node may put
    a LoRA on a model all the same, as loaders do that encode the prompt too: then it gives another model than it was given, or
    the LoRA's file has a name there.
    """
    if "HOOKS" in kinds or "hooks" in inputs:
        return True
    is_other = any(
        models[part] is not None and models[part] is not models[f"{part} before"] for part in ("unet", "clip")
    )
    return (node.is_sampler or "CONDITIONING" in kinds) and not is_other and not names


def _leads_nowhere(known: _Known, node_id: str, prompt: PromptRecording, in_use: InUse) -> frozenset[str]:
    """What of the models that a node of the posted graph gives goes to no other node, nor was used in it itself."""
    if known.is_inner or node_id not in prompt.graph:
        return frozenset()
    own = in_use.by_node.get(node_id)
    does = "other" if own is None else own.does
    used = {"encodes": {"text encoder"}, "other": set[str]()}.get(does, {*_KINDS.values()})
    taken = {link for node in prompt.graph.values() for _, link in links_of(node)}
    return frozenset(
        _KINDS[kind]
        for slot, kind in enumerate(known.kinds)
        if kind in _KINDS and (node_id, slot) not in taken and _KINDS[kind] not in used
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
    weighed, analysis = _weigh(models, path)
    return _with_use(weighed, leads_nowhere), analysis


def _weigh(models: Mapping[str, Any], path: str | None) -> tuple[_Weighed, dict[str, Any]]:
    """What the weights say, and the analysis that it is taken from; see `judge`."""
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
    modules = [
        {name: module[name] for name in ("name", "acts", "keys", "states")}
        for module in (analysis["applied_verdict"] or {}).get("modules", ())
    ]
    left_out = [one["evidence"] for one in analysis["findings"] if one["id"] == "lora_part_left_out"]
    of = left_out[0]["modules"] if left_out else None
    return _Weighed(verdict, modules, of, unet is not None), in_short(analysis)


def _with_use(
    weighed: _Weighed, leads_nowhere: frozenset[str], unused: Mapping[str, Mapping[str, str]] = _ALL_USED
) -> dict[str, Any]:
    verdict = dict(weighed.verdict)
    if weighed.modules or weighed.of is not None:
        verdict |= use_of(
            weighed.modules, verdict, leads_nowhere, has_denoiser=weighed.has_denoiser, unused=unused
        )
    if weighed.of is not None:
        verdict["modules"] = weighed.of
    return verdict


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
    unused: Mapping[str, Mapping[str, str]] = _ALL_USED,
) -> dict[str, Any]:
    """What a verdict says of the modules of a file: how many act on weights that the prompt takes.

    Args:
        modules: As `AppliedModule.as_dict` gives them.
        verdict: What the weights say: `effective`, and `why`.
        leads_nowhere: "denoiser" or "text encoder", where the loader gives it to no other node.
        has_denoiser: Whether the loader gives one.
        unused: Of the same, the weights on which it did nothing, and how that is said: see `_unused`.
    """
    acting = [module for module in modules if module["acts"]]
    idle: dict[str, list[str]] = {}
    for module in acting:
        part = _part_of(module)
        how = _NOT_TAKEN if part in leads_nowhere else _why_idle(module, unused.get(part, {}))
        if how is not None:
            idle.setdefault(part, []).append(how)
    used = len(acting) - sum(map(len, idle.values()))
    effective, why, reason = verdict["effective"], verdict["why"], None
    if effective and not acting:
        effective, reason = None, _OTHER_CHANGES
    elif effective and idle:
        effective = True if used else None if any(_OPEN & set(hows) for hows in idle.values()) else False
        why = _idle_in_words(idle, Counter(map(_part_of, acting)))
        reason = None if effective is not None else why
    elif effective and has_denoiser and {_part_of(module) for module in acting} == {"text encoder"}:
        why = why or "it changes the text encoder only"
    return {
        **({} if reason is None else {"reason": reason}),
        "effective": effective,
        "why": why,
        "modules_used": None if effective is None else used if effective else 0,
        "modules": len(modules),
    }


def _part_of(module: Mapping[str, Any]) -> str:
    return "text encoder" if is_for_text(module["name"]) else "denoiser"


def _why_idle(module: Mapping[str, Any], unused: Mapping[str, str]) -> str | None:
    """Why a module did nothing on any of its weights; None: it may have."""
    if "" in unused:
        return unused[""]
    keys = module.get("keys") or ()
    return unused[keys[0]] if keys and all(key in unused for key in keys) else None


def _idle_in_words(idle: Mapping[str, Sequence[str]], acting: Mapping[str, int]) -> str:
    """Why modules that act on a model did nothing in a prompt, such as "no node takes the denoiser that the loader gives".

    Args:
        idle: By part of the model, why each of these modules did nothing: see `_unused`.
        acting: By part of the model, how many modules act.
    """
    part, hows = min(idle.items(), key=lambda one: one[1][0] not in ROWS)
    how, count = hows[0], len(hows)
    if how in ROWS:
        weights = counted(count, "weight")
        return verdict_finding(how, holders=part.capitalize(), weights=weights).message
    if how == _NOT_RUN and count < acting[part]:
        return f"{counted(count, 'module is', 'modules are')} on no model that a node used"
    if how in _DOUBTS:
        return how
    same = [part for part, hows in idle.items() if hows[0] == how]
    return f"{how} the {' and the '.join(same)} that the loader gives"


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
