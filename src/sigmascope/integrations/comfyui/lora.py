"""The instrument that judges each LoRA of a prompt by the weights that were used with it.

The loader's models before and after are remembered weakly. They are compared at the prompt's end, when the host has
merged what it merges: by then the weights that the sampler used are there to be read. Patches of models that were put on a
device say whether any node used what the loader gives. Of a loader whose output ComfyUI kept, the verdict is kept too.
"""

import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from sigmascope.integrations.comfyui.instruments import Instrument, weakly
from sigmascope.integrations.comfyui.kept_loras import Kept, keep_verdict
from sigmascope.integrations.comfyui.needs import Need, output_data
from sigmascope.integrations.comfyui.posted_graph import following, links_of
from sigmascope.integrations.comfyui.recording import NodeWatch, PromptRecording
from sigmascope.integrations.comfyui.wraps import Call, Wrap
from sigmascope.probes.comfyui_patcher import bypasses_of
from sigmascope.probes.reading import attempt
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
_UNNAMED: Final = "(unnamed)"
_NONE: Final = "None"
"""What loaders of other packs offer beside the files' names."""
_OTHER_FILES: Final = ("ckpt_name", "clip_name", "control_net_name", "unet_name", "vae_name")
"""Ends of inputs that name files of other kinds, of which one may be called as a LoRA is."""
_STRENGTHS: Final = (
    "strength_model",
    "strength_clip",
    "strength",
    "lora_model_strength",
    "lora_clip_strength",
    "lora_strength",
)
"""A loader's inputs, ComfyUI's own first."""
_DEEPEST: Final = 8
"""Levels of lists and dicts in which a node is given the names of LoRAs."""
_NO_MODEL: Final = "the node gives no model: its LoRA is applied later, if at all"
_ALL_USED: Final[Mapping[str, str]] = {}
_KINDS: Final = {"MODEL": "denoiser", "CLIP": "text encoder"}
"""What a LoRA changes, by the kind of output that has it."""
_ARRIVES: Final = ("lora_arrives_weak", "lora_arrives_noisy")
ZERO: Final = "both strengths are 0"
_ITS_ZERO: Final = "its strength is 0"
_NOT_RUN: Final = "no node that ran uses"
_ENDED: Final = "the prompt ended before a node used"
_REPLACED: Final = (
    "a loader after it replaces it: of adapters that bypass the weights ComfyUI keeps the last loader's"
)
_GONE: Final = "the models were gone when the prompt ended"


class _Application(NamedTuple):
    """A LoRA of a node, and why the node left it off, if it was told to.

    `patches` has the identities of those made of its file; None: it is the node's only one.
    """

    node: NodeWatch
    models: Mapping[str, Callable[[], Any]]
    path: str | None
    name: str
    kinds: tuple[str, ...]
    patches: frozenset[int] | None
    why_off: str | None


class _Weighed(NamedTuple):
    """What the weights say of a LoRA, whatever becomes of the model that has it.

    Attributes:
        verdict: `effective`, and the `reason` if that is not known, or `why`.
        modules: `name` and `acts` of each of the file's modules that is on the model.
        of: How many modules the file has, if that is more.
        has_denoiser: Whether the loader gives one.
    """

    verdict: dict[str, Any]
    modules: Sequence[Mapping[str, Any]] = ()
    of: int | None = None
    has_denoiser: bool = False


class _Known(NamedTuple):
    """The verdict on a LoRA of a node that ran.

    Attributes:
        name: The file's.
        kinds: Of the node's outputs.
        weighed: What the weights said.
        patches: By part of the model, its identity, and those of the LoRA's patches and of its adapters beside the weights.
    """

    name: str
    kinds: tuple[str, ...]
    weighed: _Weighed
    patches: Mapping[str, tuple[int, frozenset[int]]]


class _Seen:
    """Of one prompt.

    Attributes:
        applied: The LoRAs of its nodes.
        patches: By node, the identities of the patches made of each file that it read.
        in_use: By the identity of a model that was put on a device, those of all patches that it had there.
        replaced: The identities of adapters beside the weights that a later loader put its own in place of.
    """

    def __init__(self) -> None:
        self.applied: list[_Application] = []
        self.patches: dict[str, list[frozenset[int]]] = {}
        self.in_use: dict[int, set[int]] = {}
        self.replaced: set[int] = set()


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
        self.wraps.append(Wrap(self.needs[0], self, after=self._loaded))
        self.wraps.append(Wrap(self.needs[1], self, after=self._outputs))
        self.wraps.append(Wrap(self.needs[2], self, before=self._goes_to_a_device))

    def _loaded(self, call: Call, _known: None, result: Any, error: BaseException | None) -> None:
        prompt, node = self.prompt_here(), self.node_here()
        if prompt is not None and node is not None and error is None:
            node.add(LORA, {"keys": len(call.get("lora") or ()), "patches": len(result)})
            patches = prompt.until_the_end(self.name, _Seen).patches
            patches.setdefault(node.id, []).append(frozenset(map(id, result.values())))

    def _goes_to_a_device(self, call: Call) -> None:
        if (prompt := self.prompt_here()) is not None:
            in_use = prompt.until_the_end(self.name, _Seen).in_use
            for patcher in call.get("models") or ():
                known = attempt(partial(_model_and_patches, patcher)).value
                if known is not None:
                    in_use.setdefault(known[0], set()).update(known[1])

    def _outputs(self, call: Call, _known: None, result: Any, error: BaseException | None) -> None:
        inputs = call.get("input_data_all")
        prompt = self.session.prompt_of(call.get("prompt_id"))
        node = None if prompt is None else prompt.nodes.get(str(call.get("unique_id")))
        if prompt is None or node is None or error is not None or not isinstance(inputs, Mapping):
            return
        obj, seen = call.get("obj"), prompt.until_the_end(self.name, _Seen)
        kinds = tuple(map(str, getattr(obj, "RETURN_TYPES", ())))
        if LORA not in node.facts and "lora_name" not in inputs:
            return
        patches = seen.patches.get(node.id, [])
        calls = _calls(inputs, result[0] or (), is_one=bool(getattr(obj, "INPUT_IS_LIST", False)))
        for given, gave in calls:
            models = _models_of(given, dict(zip(kinds, gave, strict=False)))
            if _is_hooked(node, kinds, given, models):
                continue
            kept = {what: known for what, model in models.items() if (known := weakly(model)) is not None}
            names = list(dict.fromkeys(_names_in(given)))
            if not names and LORA not in node.facts:
                continue  # it was told to take none
            apart = len(names) > 1 and len(names) == len(patches) and len(calls) == 1
            for at, name in enumerate(names or [_UNNAMED]):
                own = patches[at] if apart else None
                seen.applied.append(
                    _Application(node, kept, path_of(name), name, kinds, own, _why_off(given))
                )

    def at_the_end(self, prompt: PromptRecording) -> None:
        """Judge the LoRAs of the prompt's loader nodes, and name those of loaders that ComfyUI kept."""
        seen = prompt.until_the_end(self.name, _Seen)
        anew: dict[str, list[_Known]] = {}
        judged = [(one.node, self._judge(one, seen)) for one in seen.applied]
        for node, known in judged:
            node.add(VERDICTS, _verdict_of(known, node.id, prompt, seen))
            anew.setdefault(node.id, []).append(known)
        for node_id, since, known in self._known.of_prompt(prompt, anew):
            keep_verdict(prompt, node_id, _verdict_of(known, node_id, prompt, seen, since))

    def _judge(self, one: _Application, seen: _Seen) -> _Known:
        """Compare the loader's models, and put the analysis on its node."""
        models = {what: reference() for what, reference in one.models.items()}
        if any(model is None for model in models.values()):
            return _Known(one.name, one.kinds, _Weighed({"effective": None, "reason": _GONE}), {})
        if not models.keys() & {"unet", "clip"}:
            return _Known(one.name, one.kinds, _Weighed({"effective": None, "reason": _NO_MODEL}), {})
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
        own = one.node.facts.setdefault(one.node.name, {})
        analysis["findings"] = [*own.get("findings", ()), *analysis["findings"]]
        own.update(analysis)
        patches: dict[str, tuple[int, frozenset[int]]] = {}
        for part, word in (("unet", "denoiser"), ("clip", "text encoder")):
            if part in models:
                patcher, before = _patcher_of(models[part]), _patcher_of(models.get(f"{part} before"))
                model = id(getattr(patcher, "model", None))
                patches[word] = model, frozenset(set(_patches_of(patcher)) - set(_patches_of(before)))
        return _Known(one.name, one.kinds, weighed, patches)


def _verdict_of(
    known: _Known, node_id: str, prompt: PromptRecording, seen: _Seen, since: str | None = None
) -> dict[str, Any]:
    """The verdict on a LoRA of a node, with what became of the models that the node gave."""
    nowhere, unused = _leads_nowhere(prompt, node_id, known.kinds), _unused(known, node_id, prompt, seen)
    verdict = _with_use(known.weighed, nowhere, unused)
    if not verdict["effective"] and any(ids & seen.replaced for _, ids in known.patches.values()):
        verdict["why"] = _REPLACED
    return said(known.name, verdict, since)


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


def _model_and_patches(patcher: Any) -> tuple[int, frozenset[int]]:
    return id(patcher.model), frozenset(_patches_of(patcher))


def _patches_of(patcher: Any) -> Iterator[int]:
    """The identities of a model's patches, as far as later ones leave them, and of its adapters beside the weights.

    A patch is (strength, change, strength of what was there before, …); that of a model which was merged into this one holds
    the other's patches. A merge that takes nothing of one of the two leaves out its patches.
    """
    yield from bypasses_of(patcher)
    todo = list((getattr(patcher, "patches", None) or {}).values())
    while todo:
        for patch in reversed(todo.pop()):
            strength, change, before = (
                (*patch, None, None, None)[:3] if isinstance(patch, tuple) else (None,) * 3
            )
            if not _is_zero(strength):
                yield id(patch)
                if isinstance(change, list):
                    todo.append(change)
            if _is_zero(before):
                break


def _is_zero(strength: object) -> bool:
    return isinstance(strength, int | float) and strength == 0


def _unused(known: _Known, node_id: str, prompt: PromptRecording, seen: _Seen) -> dict[str, str]:
    """What of the models that a node gives was not used, and how that is said.

    The prompt used the same ones, but never with the LoRA's patches; or it ended before it used them. Where ComfyUI kept the
    output of a node that follows, it may have been used for that.
    """
    found = {}
    for slot, kind in enumerate(known.kinds):
        model, patches = known.patches.get(_KINDS.get(kind, ""), (0, frozenset()))
        in_use = seen.in_use.get(model)
        how = _ENDED if in_use is None and not prompt.facts.get("success", True) else _NOT_RUN
        is_idle = patches and (how is _ENDED if in_use is None else in_use.isdisjoint(patches))
        if is_idle and prompt.cached.isdisjoint(following(prompt.graph, node_id, slot)):
            found[_KINDS[kind]] = how
    return found if node_id in prompt.graph else {}


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


def _names_in(inputs: Mapping[str, Any]) -> Iterator[str]:
    """The LoRA files that a node is given: as `lora_name`, or where one of its values, or what lies in one, names a file."""
    name = inputs.get("lora_name")
    others = [value for key, value in inputs.items() if not key.endswith(("lora_name", *_OTHER_FILES))]
    if isinstance(name, str) and name != _NONE:
        yield name
    yield from (text for text in _texts_in(others, _DEEPEST) if path_of(text) is not None)


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
    node: NodeWatch, kinds: Sequence[str], inputs: Mapping[str, Any], models: Mapping[str, Any]
) -> bool:
    """Whether the LoRA of a node is a hook's, which `hook_lora` judges.

    It makes hooks, or has them set on a model; or it reads the LoRA since it samples or encodes with them. Such a node may put
    a LoRA on a model all the same, as loaders do that encode the prompt too: then it gives another model than it was given.
    """
    if "HOOKS" in kinds or "hooks" in inputs:
        return True
    is_other = any(
        models[part] is not None and models[part] is not models[f"{part} before"] for part in ("unet", "clip")
    )
    return (node.is_sampler or "CONDITIONING" in kinds) and not is_other


def path_of(name: Any) -> str | None:
    """Where a LoRA file lies that a node names; None: ComfyUI does not find it."""
    folders = sys.modules.get("folder_paths")
    if folders is None or not isinstance(name, str):
        return None
    found = folders.get_full_path("loras", name)
    return found if isinstance(found, str) else None


def _leads_nowhere(prompt: PromptRecording, node_id: str, kinds: Sequence[str]) -> frozenset[str]:
    """What of the models that a node of the posted graph gives goes to no other node."""
    if node_id not in prompt.graph:
        return frozenset()
    taken = {link for node in prompt.graph.values() for _, link in links_of(node)}
    return frozenset(
        _KINDS[kind] for slot, kind in enumerate(kinds) if kind in _KINDS and (node_id, slot) not in taken
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
        {"name": module["name"], "acts": module["acts"]}
        for module in (analysis["applied_verdict"] or {}).get("modules", ())
    ]
    left_out = [one["evidence"] for one in analysis["findings"] if one["id"] == "lora_part_left_out"]
    of = left_out[0]["modules"] if left_out else None
    return _Weighed(verdict, modules, of, unet is not None), in_short(analysis)


def _with_use(
    weighed: _Weighed, leads_nowhere: frozenset[str], unused: Mapping[str, str] = _ALL_USED
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
    unused: Mapping[str, str] = _ALL_USED,
) -> dict[str, Any]:
    """What a verdict says of the modules of a file: how many act on weights that the prompt takes.

    Args:
        modules: As `AppliedModule.as_dict` gives them.
        verdict: What the weights say: `effective`, and `why`.
        leads_nowhere: "denoiser" or "text encoder", where the loader gives it to no other node.
        has_denoiser: Whether the loader gives one.
        unused: Of the same, how it is said that no node used it as the loader gives it.
    """
    acting = Counter(
        "text encoder" if is_for_text(module["name"]) else "denoiser" for module in modules if module["acts"]
    )
    lost = [part for part in acting if part in leads_nowhere or part in unused]
    used = sum(count for part, count in acting.items() if part not in lost)
    effective, why = verdict["effective"], verdict["why"]
    if effective and lost:
        hows = [unused[part] for part in lost if part not in leads_nowhere]
        why = f"{hows[0] if hows else 'no node takes'} the {' and the '.join(lost)} that the loader gives"
        effective = True if used else None if _ENDED in hows else False
    elif effective and has_denoiser and acting["text encoder"] and not acting["denoiser"]:
        why = why or "it changes the text encoder only"
    return {
        **({"reason": why} if effective is None and verdict["effective"] else {}),
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
