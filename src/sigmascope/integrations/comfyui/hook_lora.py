"""The instrument that judges LoRAs that travel in the conditioning, as hooks: ComfyUI merges them only while it samples.

Each weight that a hook is merged into is compared with what ComfyUI kept of it, on its own device, each time: a schedule
merges a hook anew for each of its strengths. One number a weight is queued there on the host's thread, and read at the
prompt's end. Where several hooks were merged into a weight together, one whose own change is zero is told by its factors.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from sigmascope.integrations.comfyui.conditionings import Sampled, makers_in
from sigmascope.integrations.comfyui.instruments import Instrument, weakly
from sigmascope.integrations.comfyui.kept_loras import Kept, keep_verdict
from sigmascope.integrations.comfyui.latents import LOST
from sigmascope.integrations.comfyui.lora import VERDICTS, ZERO, said
from sigmascope.integrations.comfyui.lora_names import path_of
from sigmascope.integrations.comfyui.models_in_use import (
    cancelled_in,
    doubt_of,
    hook_is_merged,
    makes_no_step,
    samplings_of,
)
from sigmascope.integrations.comfyui.needs import Need, output_data
from sigmascope.integrations.comfyui.posted_graph import following, signature_of
from sigmascope.integrations.comfyui.recording import NodeWatch, PromptRecording
from sigmascope.integrations.comfyui.sampling import first_of
from sigmascope.integrations.comfyui.wraps import Call, Wrap
from sigmascope.probes.applied_patch import Standing
from sigmascope.probes.comfyui_weight_adapter import PatcherEntry, applied
from sigmascope.probes.reading import attempt, attribute, number, sequence
from sigmascope.stages.lora_findings import begin_all_idle, file_findings
from sigmascope.stages.lora_on_model import match_file, names_of_all
from sigmascope.stages.model_snapshot import ModelPatches

_NOT_TAKEN: Final = "no node that encodes a text or samples takes it"
_ENDED: Final = "the prompt ended before a step was made with it"
_NEVER_IN_FORCE: Final = "it was in force for no text that was encoded and no step"
_OFF_BY_SCHEDULE: Final = "its schedule has strength 0 wherever it was in force"
_CANCELLED: Final = "hooks that were in force together cancel each other"
_UNCHANGED: Final = "ComfyUI merged it, and no weight became another one: they are stored too coarsely, or another pack merges in its own way"
_AGAINST_MODEL: Final = "it cancels a LoRA that is on the model itself"
_NO_WEIGHT: Final = "no conditioning that it is on has any weight: a mask of zeros, strength 0, or cfg 0"
_MAY_COUNT: Final = "it is not seen whether any conditioning that it is on counts: cfg, or a number of the guider, is 0, the last step has no conditioning, or the noise mask is zeros"
_FORGOTTEN: Final = "the sampler that takes the latent begins from noise alone (first sigma 1), so that nothing is left of the steps that were made with it"
_OF_OTHER_PARTS: Final = frozenset({"part_missing", "text_encoder_missing"})
"""Why modules match nothing of a model that is one part alone."""
_REACHES_TEXT: Final = "its hook reaches a text encoder alone, and no module is for that: put it on the conditioning too (apply_to_conds)"
_REACHES_DENOISER: Final = "its hook reaches the denoiser alone, and all modules are for a text encoder: put it on the CLIP too (Set CLIP Hooks)"
_ROUNDING: Final = 8 * torch.finfo(torch.float32).eps
"""What is left of changes that cancel, beside the weight's largest number: ComfyUI adds them in float32."""
_TOGETHER: Final = Standing("merged", "by hooks that are in force together")
_NOT_COUNTED: Final = "no step was made with a text that was encoded with it, or that text had no weight: zeros, strength 0, or cfg 0"
_CHANGED_AFTER: Final = (
    "the conditioning that was encoded with it was changed after it, or is used in a way that is not seen"
)
_ELSEWHERE: Final = "the weights from before cannot be compared, or lie on another device"


_UNLESS_LATER: Final = frozenset({_NOT_COUNTED, _NO_WEIGHT, _FORGOTTEN, _OFF_BY_SCHEDULE})
"""Why it did nothing as far as the prompt went."""
_MOST: Final = 1000
_Group = frozenset[object]
"""ComfyUI's marks of hooks that are in force together."""


class _Made(NamedTuple):
    """A LoRA of a node that makes hooks. `hook` is ComfyUI's mark of it, which all copies share; None: it made none.

    `slot` is None for a node that another was expanded into: which output of that one gives them is not known.
    """

    node_id: str
    slot: int | None
    name: str
    path: str | None
    hook: object | None


class _Part(NamedTuple):
    """What a hook did to one part of the model.

    Attributes:
        effective: Whether it changed weights of it; None: what it changed may do nothing, with the `reason`.
        names: The file's modules of which these weights are.
    """

    effective: bool | None
    names: frozenset[str] = frozenset()
    reason: str | None = None


class _Known(NamedTuple):
    """What was found out of a hook in a prompt.

    Attributes:
        verdict: On its LoRA.
        parts: By whether it is the text encoder, what it did to the parts of the model that got the hook, whether or not
            what these gave counted.
    """

    verdict: dict[str, Any]
    parts: Mapping[bool, _Part] = MappingProxyType({})

    def beside(self, earlier: "_Known", is_text: bool, counts: bool | None) -> "_Known":
        """With what it did to a part in an earlier prompt, of a node that was kept; `counts`: whether that counts in this one."""
        part, acts = earlier.parts[is_text], self.verdict["effective"]
        if part.effective is False or counts is False:
            if self.parts:
                return self
            lost = {**self.verdict, "why": _NOT_COUNTED if is_text else _NO_WEIGHT}
            verdict = earlier.verdict if earlier.verdict["effective"] is False else lost
            return _Known(verdict, {is_text: part._replace(effective=False)})
        if part.effective is None or counts is None:
            reason = part.reason or (_CHANGED_AFTER if is_text else LOST)
            verdict = {**self.verdict, "effective": None, "reason": reason, "modules_used": None, "why": None}
            return self if acts else _Known(verdict, self.parts)
        names = part.names | self.names() if acts else part.names
        why = earlier.verdict["why"] if earlier.verdict["effective"] else None
        verdict = {**self.verdict, "effective": True, "reason": None, "why": why}
        verdict |= {"modules_used": len(names) or None, "modules": earlier.verdict["modules"]}
        return _Known(verdict, {**self.parts, is_text: _Part(True, names)})

    def names(self) -> frozenset[str]:
        """The file's modules that changed any part."""
        return frozenset().union(*(part.names for part in self.parts.values()))


@dataclass(slots=True, eq=False)
class _Look:
    """One weight over all times that a hook was merged into it.

    Attributes:
        alone: Whether it was another one than before while no other hook was merged into it, on its device: by the hooks that
            were in force.
        together: Likewise, with others.
        strength: The largest size of what the schedule multiplies the hook's strength with.
        entries: The host's own changes of the hook.
        is_unread: Whether it could not be compared at some time.
        doubt: Why it may do nothing on that weight, of the last time, if it always may: see `doubt_of`; "": it may act.
    """

    alone: dict[_Group, Tensor] = field(default_factory=dict)
    together: dict[_Group, Tensor] = field(default_factory=dict)
    strength: float = 0.0
    entries: tuple[Any, ...] = ()
    is_unread: bool = False
    doubt: str | None = None

    def add(
        self,
        changed: Tensor | None,
        strength: float,
        entries: tuple[Any, ...],
        group: _Group,
        *,
        is_alone: bool,
    ) -> None:
        """Know of one time."""
        self.entries = entries
        self.strength = max(self.strength, abs(strength))
        if changed is None:
            self.is_unread = True
        elif is_alone:
            self.alone[group] = changed | self.alone.get(group, changed)
        elif strength:
            self.together[group] = changed | self.together.get(group, changed)


class _Seen:
    """Of one prompt, by ComfyUI's mark of each hook.

    Attributes:
        made: The LoRAs of its nodes.
        models: Those that got the hook: of the text encoder or not.
        looks: What became of each weight that it was merged into, by whether that is a text encoder's.
        users: The nodes of the posted graph in which these got it, likewise.
        encoders: Those in which it was merged into a text encoder.
    """

    def __init__(self) -> None:
        self.made: list[tuple[NodeWatch, _Made]] = []
        self.models: dict[object, dict[bool, Callable[[], Any]]] = {}
        self.looks: dict[tuple[object, bool], dict[str, _Look]] = {}
        self.users: dict[tuple[object, bool], set[str]] = {}
        self.encoders: dict[object, set[str]] = {}


class HookLora(Instrument):
    """Wraps two methods of `comfy.model_patcher.ModelPatcher`, and `execution.get_output_data`."""

    name = "hook_lora"
    gives = "verdicts of LoRAs that travel in the conditioning"
    needs = (
        Need("comfy.model_patcher", "ModelPatcher.register_all_hook_patches", ("hooks",), False),
        Need(
            "comfy.model_patcher",
            "ModelPatcher.patch_hook_weight_to_device",
            ("hooks", "combined_patches", "key"),
            False,
        ),
        output_data("input_data_all"),
    )

    def put_on(self) -> None:
        """See `Instrument`."""
        self._known: Kept[_Made] = Kept()
        self._did: OrderedDict[tuple[str, str, str, bool], _Known] = OrderedDict()
        self.wraps.append(Wrap(self.needs[0], self, before=self._registers))
        self.wraps.append(Wrap(self.needs[1], self, after=self._merged))
        self.wraps.append(Wrap(self.needs[2], self, after=self._outputs))

    def _registers(self, call: Call) -> None:
        """A model that is about to sample, or to encode, gets the hooks of its conditioning."""
        prompt = self.prompt_here()
        if prompt is not None:
            self._gets(call.get("self"), getattr(call.get("hooks"), "hooks", ()), prompt)

    def _gets(self, patcher: Any, hooks: Iterable[Any], prompt: PromptRecording) -> None:
        seen, user = self._seen_in(prompt), prompt.posted(self.node_here())
        if (known := weakly(patcher)) is not None:
            for hook in hooks:
                seen.models.setdefault(hook.hook_ref, {})[bool(patcher.is_clip)] = known
                seen.users.setdefault((hook.hook_ref, bool(patcher.is_clip)), set()).add(user)

    def _merged(self, call: Call, _known: None, _result: object, error: BaseException | None) -> None:
        """A weight was changed by the hooks that are in force now."""
        key, patcher, prompt = call.get("key"), call.get("self"), self.prompt_here()
        if prompt is None or error is not None or key not in call.get("combined_patches"):
            return
        held = patcher.hook_patches
        hooks = [hook for hook in call.get("hooks").hooks if key in held.get(hook.hook_ref, ())]
        is_alone, seen = len(hooks) == 1, self._seen_in(prompt)
        group = frozenset(hook.hook_ref for hook in call.get("hooks").hooks)
        changed = attempt(lambda: _is_changed(patcher, key, is_alone=is_alone)).value
        self._gets(patcher, hooks, prompt)  # a CLIP that ComfyUI kept has them from an earlier prompt
        for hook in hooks:
            looks = seen.looks.setdefault((hook.hook_ref, bool(patcher.is_clip)), {})
            strength = number(attribute(hook, "strength"))
            entries = sequence(held[hook.hook_ref][key])
            looks.setdefault(key, _Look()).add(
                changed, 1.0 if strength is None else strength, entries, group, is_alone=is_alone
            )
            if looks[key].doubt != "":
                looks[key].doubt = doubt_of(patcher, key) or ""
            if patcher.is_clip:
                seen.encoders.setdefault(hook.hook_ref, set()).add(prompt.posted(self.node_here()))
            else:
                hook_is_merged(prompt, patcher, hook.hook_ref, key, entries)

    def _outputs(self, call: Call, _known: None, result: Any, error: BaseException | None) -> None:
        inputs = call.get("input_data_all")
        if not isinstance(inputs, Mapping) or "lora_name" not in inputs:
            return
        prompt = self.session.prompt_of(call.get("prompt_id"))
        node = None if prompt is None else prompt.nodes.get(str(call.get("unique_id")))
        kinds = [str(kind) for kind in getattr(call.get("obj"), "RETURN_TYPES", ())]
        name = first_of(inputs.get("lora_name"))
        if (
            prompt is None
            or node is None
            or error is not None
            or "HOOKS" not in kinds
            or not isinstance(name, str)
        ):
            return
        strengths = [first_of(inputs.get(f"strength_{part}")) for part in ("model", "clip")]
        known = [strength for strength in strengths if isinstance(strength, int | float)]
        slot = kinds.index("HOOKS")
        made = attempt(lambda: first_of(result[0][slot]).hooks[-1].hook_ref)
        is_off = bool(known) and not any(known)
        if made.value is not None or is_off:  # else the node gave none, as one that is kept from running
            hook = None if is_off else made.value
            self._seen_in(prompt).made.append((node, _Made(node.id, slot, name, path_of(name), hook)))

    @torch.no_grad()  # ComfyUI's inference mode is over by then
    def at_the_end(self, prompt: PromptRecording) -> None:
        """Judge the LoRAs of the prompt's nodes that make hooks, and name those of nodes that ComfyUI kept."""
        seen = self._seen_in(prompt)
        anew: dict[str, list[_Made]] = {}
        signatures: dict[str, str] = {}
        for node, one in seen.made:
            posted = prompt.posted(node)
            made = one if posted == node.id else one._replace(slot=None)
            node.add(VERDICTS, said(one.name, self._verdict_of(made, posted, seen, prompt, signatures)))
            anew.setdefault(posted, []).append(made)
        for node_id, since, one in self._known.of_prompt(prompt, anew):
            verdict = self._verdict_of(one, node_id, seen, prompt, signatures)
            keep_verdict(prompt, node_id, said(one.name, verdict, since))

    def _verdict_of(
        self, one: _Made, node_id: str, seen: _Seen, prompt: PromptRecording, signatures: dict[str, str]
    ) -> dict[str, Any]:
        """The verdict on a hook, with what it did when nodes ran of which ComfyUI kept the output."""
        known = self._judge(one, seen, prompt)
        if node_id not in prompt.graph:
            return known.verdict
        own = signature_of(prompt.graph, node_id, signatures)
        for is_text in known.parts:
            for user in seen.users.get((one.hook, is_text), set()) & prompt.graph.keys():
                key = own, one.name, signature_of(prompt.graph, user, signatures), is_text
                self._did.pop(key, None)
                self._did[key] = known
        while len(self._did) > _MOST:
            self._did.popitem(last=False)
        for follower in sorted(following(prompt.graph, node_id, one.slot) & prompt.cached):
            user = signature_of(prompt.graph, follower, signatures)
            for is_text in (False, True):
                if (earlier := self._did.get((own, one.name, user, is_text))) is not None:
                    counts = _text_counts([user], prompt) if is_text else _weighed(one.hook, prompt, follower)
                    known = known.beside(earlier, is_text, counts)
        return known.verdict

    def _seen_in(self, prompt: PromptRecording) -> _Seen:
        return prompt.until_the_end(self.name, _Seen)

    def _judge(self, one: _Made, seen: _Seen, prompt: PromptRecording) -> _Known:
        verdict: dict[str, Any] = {
            "effective": False, "reason": None, "modules_used": None, "modules": None, "why": None,
        }  # fmt: skip
        known = seen.models.get(one.hook, {})
        failed = not prompt.facts.get("success", True)
        if one.hook is not None and not known and failed:
            return _Known({**verdict, "effective": None, "reason": _ENDED})
        if one.hook is None or not known:
            return _Known({**verdict, "modules_used": 0, "why": ZERO if one.hook is None else _NOT_TAKEN})
        models = {is_text: patcher() for is_text, patcher in known.items()}
        matching = match_file(one.path, models.get(False), models.get(True))
        if matching.value is None:
            return _open(verdict, matching.reason, models)
        names = names_of_all(models.get(False), models.get(True))
        parts: dict[bool, _Part] = {}
        used = frozenset[str]()
        whys: dict[str, None] = {}
        was_in_force, changes_weights, reason = False, False, None
        for is_text, model in models.items():
            looks = seen.looks.get((one.hook, is_text), {})
            if any(look.is_unread for look in looks.values()):
                return _open(verdict, _ELSEWHERE, models)
            was_in_force = was_in_force or bool(looks)
            of_part = {hook: known for (hook, is_same), known in seen.looks.items() if is_same is is_text}
            left_out = frozenset[_Group]() if is_text else _without_weight(one.hook, prompt)
            changed, why = _judged(one.hook, of_part, left_out, model)
            changed, lost = _left_of(changed, looks, prompt)
            open_because: str | None = None
            doubts = [looks[key].doubt for key in changed]
            doubt = doubts[0] if doubts and all(doubts) else None
            names_here = _modules_of(changed, names[is_text], matching.value.matched)
            parts[is_text] = _Part(None if doubt else bool(changed), names_here, doubt)
            if changed and lost is None:
                users = None if is_text else seen.users.get((one.hook, False), set())
                encoders = seen.encoders.get(one.hook, ())
                how = _text_used(encoders, prompt) if is_text else _weighed(one.hook, prompt)
                if failed and not _made_steps(prompt, users):
                    open_because = lost = _ENDED
                elif how is None:
                    is_lost = not is_text and all(sampled.may_be_lost for sampled in _with(one.hook, prompt))
                    open_because = LOST if is_lost else _CHANGED_AFTER if is_text else _MAY_COUNT
                    lost = open_because
                elif not how:
                    lost = _NOT_COUNTED if is_text else _why_no_weight(one.hook, prompt)
                elif doubt:
                    open_because = lost = doubt
                changed = set() if lost else changed
            why = lost or why
            changes_weights = changes_weights or bool(changed)
            reason = reason or open_because
            used |= names_here if changed else frozenset()
            whys |= {} if why is None else {why: None}
        count = len(used)
        of_host = [*file_findings(matching.value, None, "comfyui")]
        grave = [
            finding.message
            for finding in matching.value.findings
            if finding.severity in ("critical", "error")
            or (finding.severity == "warning" and finding in of_host)
        ]
        if matching.value.matched and not was_in_force:
            whys = {_NEVER_IN_FORCE: None}
        elif (
            matching.value.reasons
            and matching.value.reasons.keys() <= _OF_OTHER_PARTS
            and not matching.value.matched
        ):
            whys = {_REACHES_TEXT if True in models else _REACHES_DENOISER: None}
        is_early = bool(_UNLESS_LATER & whys.keys()) or (not was_in_force and _made_steps(prompt, None))
        if failed and not changes_weights and is_early:
            reason = reason or _ENDED
        if reason is not None and not count:
            return _Known({**verdict, "effective": None, "reason": reason}, parts)
        verdict |= {"effective": changes_weights, "modules": len(matching.value.modules) or None}
        # ComfyUI may read what the match with the file does not.
        verdict["modules_used"] = None if changes_weights and not count else count
        verdict["why"] = next(iter([*grave, *whys] if changes_weights else [*whys, *grave]), None)
        return _Known(verdict, parts)


def _open(verdict: Mapping[str, Any], reason: str | None, parts: Iterable[bool]) -> _Known:
    open_part = _Part(None, reason=reason)
    return _Known({**verdict, "effective": None, "reason": reason}, dict.fromkeys(parts, open_part))


def _modules_of(changed: set[str], layer_of: Callable[[str], str], modules: Iterable[Any]) -> frozenset[str]:
    """The names of the file's modules that some of these weights are of."""
    acting = {layer_of(key) for key in changed}
    return frozenset(module.name for module in modules if not acting.isdisjoint(module.layers))


def _made_steps(prompt: PromptRecording, of: Container[str] | None) -> bool:
    """Whether some of these nodes of the posted graph made a step; None: whether any did."""
    steps = [node for node in prompt.nodes.values() if node.seen_steps]
    return any(of is None or prompt.posted(node) in of for node in steps)


def _left_of(
    changed: set[str], looks: Mapping[str, _Look], prompt: PromptRecording
) -> tuple[set[str], str | None]:
    """The weights on which what is on the model itself does not cancel a hook; and why none is left."""
    cancelled = cancelled_in(prompt)
    left = {key for key in changed if not all(id(entry) in cancelled for entry in looks[key].entries)}
    return left, _AGAINST_MODEL if changed and not left else None


def _weighed(hook: object, prompt: PromptRecording, node_id: str | None = None) -> bool | None:
    """Whether a conditioning with a hook had any weight in a step, also where none was seen; None: that is not known.

    Of one node, or of all.
    """
    samplings = samplings_of(prompt)
    of = samplings.values() if node_id is None else [samplings[node_id]] if node_id in samplings else ()
    states = [one for sampled in of for one in sampled.states.items()]
    weights = [has_weight for hooks, has_weight in states if any(ref is hook for ref, _ in hooks)]
    return True if True in weights or not weights else None if None in weights else False


def _why_no_weight(hook: object, prompt: PromptRecording) -> str:
    with_it = _with(hook, prompt)
    return _FORGOTTEN if with_it and all(sampled.is_forgotten for sampled in with_it) else _NO_WEIGHT


def _with(hook: object, prompt: PromptRecording) -> list[Sampled]:
    """The samplings with a conditioning that has a hook."""
    return [
        sampled
        for sampled in samplings_of(prompt).values()
        if any(ref is hook for state in sampled.states for ref, _ in state)
    ]


def _text_used(encoders: Iterable[str], prompt: PromptRecording) -> bool | None:
    """Whether a step was made with the text that one of these nodes encoded; None: that is not known."""
    makers = makers_in(prompt)
    signatures = [makers.get(node_id) for node_id in encoders]
    if not signatures or None in signatures:  # nothing was seen of it
        return not makes_no_step(prompt)
    return _text_counts([*filter(None, signatures)], prompt)


def _text_counts(signatures: Sequence[str], prompt: PromptRecording) -> bool | None:
    """The same, by the signatures of the nodes, also of those that ComfyUI kept."""
    answers = [one.holds(signatures) for one in samplings_of(prompt).values()]
    if not answers:
        return not makes_no_step(prompt)
    return True if True in answers else None if None in answers else False


def _without_weight(hook: object, prompt: PromptRecording) -> frozenset[_Group]:
    """The groups of which no conditioning had any weight; without those of a hook, if that holds for each of these."""
    weights: dict[_Group, bool] = {}
    for sampled in samplings_of(prompt).values():
        for state, has_weight in sampled.states.items():
            group = frozenset(ref for ref, _ in state)
            weights[group] = weights.get(group, False) or has_weight is not False
    idle = {group for group, has_weight in weights.items() if not has_weight}
    own = {group for group in weights if hook in group}
    return frozenset(idle - own if own <= idle else idle)


def _judged(
    hook: object, of_part: Mapping[object, Mapping[str, _Look]], left_out: frozenset[_Group], model: Any
) -> tuple[set[str], str | None]:
    """The weights of a part of the model that a hook changed; and why it changed none, if its strengths tell.

    Args:
        hook: ComfyUI's mark of it.
        of_part: The weights of that part that each hook was merged into.
        left_out: Hooks together, of which nothing counts.
        model: The part.
    """
    looks, part = of_part.get(hook, {}), "text encoder" if getattr(model, "is_clip", False) else "denoiser"
    alone, together = _read(looks, "alone", left_out), _read(looks, "together", left_out)
    acting = {key for key, is_changed in alone.items() if is_changed}
    own = {key for key in together.keys() - acting if not _is_zero(key, looks[key], model)}
    acting |= {key for key in own if together[key]}
    # What takes another hook out of one conditioning does something, where that acts in another.
    partners = {key: frozenset().union(*looks[key].together) - {hook} for key in own - acting}
    for other in frozenset().union(*partners.values()):
        held = of_part.get(other, {})
        keys = {key for key, others in partners.items() if key in held and other in others}
        there = {key: held[key] for key in keys - acting if not _is_zero(key, held[key], model)}
        changed = [*_read(there, "alone", left_out).items(), *_read(there, "together", left_out).items()]
        acting |= {key for key, is_changed in changed if is_changed}
    if acting or not looks:
        return acting, None
    if not any(look.strength for look in looks.values()):
        return acting, _OFF_BY_SCHEDULE
    if all(_strength_of(entry) == 0 for look in looks.values() for entry in look.entries):
        return acting, f"its strength for the {part} is 0"
    if all(_is_zero(key, look, model) for key, look in looks.items()):
        return acting, None
    return acting, _CANCELLED if own else _UNCHANGED


def _strength_of(entry: object) -> float | None:
    return number(next(iter(sequence(entry)), None))


def _is_zero(key: str, look: _Look, model: Any) -> bool:
    """Whether a hook's own changes of a weight are nothing, by their strengths and factors."""
    weight = attempt(lambda: model.model.get_parameter(key)).value
    patches = [
        patch
        for index, entry in enumerate(look.entries)
        for patch in applied(PatcherEntry(key, entry, _TOGETHER), index, weight)
    ]
    return bool(begin_all_idle(ModelPatches(tuple(patches))).result())


def _is_changed(patcher: Any, key: str, *, is_alone: bool) -> Tensor | None:
    """Whether a weight is another one than ComfyUI kept of it, on its device; None: they lie on different ones.

    Of hooks that cancel each other rounding is left, which is no change.
    """
    kept, now = patcher.hook_backup[key][0], patcher.model.get_parameter(key).detach()
    if kept.device != now.device:
        return None
    if is_alone:
        is_same: Tensor = (kept == now).all()
    else:
        kept, now = kept.to(torch.float32), now.to(torch.float32)
        is_same = ((kept - now).abs() <= _ROUNDING * kept.abs().max()).all()
    return ~is_same


def _read(
    looks: Mapping[str, _Look], kind: Literal["alone", "together"], left_out: frozenset[_Group]
) -> dict[str, bool]:
    """Whether each weight was changed, of the groups that count; read from each device at once."""
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for key, look in looks.items():
        groups: Mapping[_Group, Tensor] = look.alone if kind == "alone" else look.together
        for group, answer in groups.items():
            if group not in left_out:
                by_device.setdefault(answer.device, []).append((key, answer))
    found: dict[str, bool] = {}
    for answers in by_device.values():
        read = torch.stack([answer for _, answer in answers]).tolist()
        for (key, _), is_changed in zip(answers, read, strict=True):
            found[key] = found.get(key, False) or is_changed
    return found


INSTRUMENT = HookLora
