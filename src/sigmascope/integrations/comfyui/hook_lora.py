"""The instrument that judges LoRAs that travel in the conditioning, as hooks: ComfyUI merges them only while it samples.

Each weight that a hook is merged into is compared with what ComfyUI kept of it, on its own device, each time: a schedule
merges a hook anew for each of its strengths. One number a weight is queued there on the host's thread, and read at the
prompt's end. Where several hooks were merged into a weight together, one whose own change is zero is told by its factors.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from sigmascope.integrations.comfyui.conditionings import makers_in, sampled_in
from sigmascope.integrations.comfyui.instruments import Instrument, weakly
from sigmascope.integrations.comfyui.kept_loras import Kept, keep_verdict
from sigmascope.integrations.comfyui.lora import SKIPPED, VERDICTS, ZERO, path_of, said
from sigmascope.integrations.comfyui.models_in_use import cancelled_in, hook_is_merged, is_skipped
from sigmascope.integrations.comfyui.needs import Need, output_data
from sigmascope.integrations.comfyui.posted_graph import following
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


class _Known(NamedTuple):
    """What was found out of a hook in a prompt.

    Attributes:
        verdict: On its LoRA.
        used: Names of the file's modules that act, by whether they act on a text encoder, of the models that got the hook.
    """

    verdict: dict[str, Any]
    used: Mapping[bool, frozenset[str]] = MappingProxyType({})

    def beside(self, earlier: "_Known") -> "_Known":
        """With what it did in an earlier prompt to models that did not get it anew, as what it did there was kept."""
        kept = {is_text: names for is_text, names in earlier.used.items() if is_text not in self.used}
        if not any(kept.values()) or self.verdict["effective"] is None:
            return earlier if not self.used else self
        used = {**kept, **self.used}
        count = len(frozenset().union(*used.values()))
        why = earlier.verdict["why"] if earlier.verdict["effective"] else None
        modules = earlier.verdict["modules"]
        return _Known(
            {**self.verdict, "effective": True, "modules_used": count, "modules": modules, "why": why}, used
        )


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
        is_skipped: Whether clip skip left its layer out of each text.
    """

    alone: dict[_Group, Tensor] = field(default_factory=dict)
    together: dict[_Group, Tensor] = field(default_factory=dict)
    strength: float = 0.0
    entries: tuple[Any, ...] = ()
    is_unread: bool = False
    is_skipped: bool = True

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
        encoders: The nodes of the posted graph in which it was merged into a text encoder.
    """

    def __init__(self) -> None:
        self.made: list[tuple[NodeWatch, _Made]] = []
        self.models: dict[object, dict[bool, Callable[[], Any]]] = {}
        self.looks: dict[tuple[object, bool], dict[str, _Look]] = {}
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
        self._known: Kept[tuple[_Made, _Known]] = Kept()
        self.wraps.append(Wrap(self.needs[0], self, before=self._registers))
        self.wraps.append(Wrap(self.needs[1], self, after=self._merged))
        self.wraps.append(Wrap(self.needs[2], self, after=self._outputs))

    def _registers(self, call: Call) -> None:
        """A model that is about to sample, or to encode, gets the hooks of its conditioning."""
        prompt = self.prompt_here()
        if prompt is not None:
            self._gets(call.get("self"), getattr(call.get("hooks"), "hooks", ()), self._seen_in(prompt))

    def _gets(self, patcher: Any, hooks: Iterable[Any], seen: _Seen) -> None:
        if (known := weakly(patcher)) is not None:
            for hook in hooks:
                seen.models.setdefault(hook.hook_ref, {})[bool(patcher.is_clip)] = known

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
        self._gets(patcher, hooks, seen)  # a CLIP that ComfyUI kept has them from an earlier prompt
        for hook in hooks:
            looks = seen.looks.setdefault((hook.hook_ref, bool(patcher.is_clip)), {})
            strength = number(attribute(hook, "strength"))
            entries = sequence(held[hook.hook_ref][key])
            looks.setdefault(key, _Look()).add(
                changed, 1.0 if strength is None else strength, entries, group, is_alone=is_alone
            )
            looks[key].is_skipped &= bool(patcher.is_clip) and is_skipped(patcher, key)
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
        anew: dict[str, list[tuple[_Made, _Known]]] = {}
        for node, one in seen.made:
            known = self._judge(one, seen, prompt)
            node.add(VERDICTS, said(one.name, known.verdict))
            posted = prompt.posted(node)
            kept = one if posted == node.id else one._replace(slot=None)
            anew.setdefault(posted, []).append((kept, known))
        for node_id, since, (one, earlier) in self._known.of_prompt(prompt, anew):
            known = self._judge(one, seen, prompt)
            # Where a node that follows was kept too, the hook was in force for it when it ran.
            if not prompt.cached.isdisjoint(following(prompt.graph, node_id, one.slot)):
                known = known.beside(earlier)
            keep_verdict(prompt, node_id, said(one.name, known.verdict, since))

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
            return _Known({**verdict, "effective": None, "reason": matching.reason})
        names = names_of_all(models.get(False), models.get(True))
        used: dict[bool, frozenset[str]] = {}
        whys: dict[str, None] = {}
        was_in_force, changes_weights, open_because = False, False, None
        for is_text, model in models.items():
            looks = seen.looks.get((one.hook, is_text), {})
            if any(look.is_unread for look in looks.values()):
                return _Known({**verdict, "effective": None, "reason": _ELSEWHERE})
            was_in_force = was_in_force or bool(looks)
            of_part = {hook: known for (hook, is_same), known in seen.looks.items() if is_same is is_text}
            left_out = frozenset[_Group]() if is_text else _without_weight(one.hook, prompt)
            changed, why = _judged(one.hook, of_part, left_out, model)
            changed, lost = _left_of(changed, looks, prompt)
            if changed and lost is None:
                how = (
                    _text_used(seen.encoders.get(one.hook, ()), prompt)
                    if is_text
                    else _weighed(one.hook, prompt)
                )
                if how is None:
                    changed, lost = set(), _CHANGED_AFTER if is_text else _MAY_COUNT
                    open_because = lost
                elif not how:
                    changed, lost = set(), _NOT_COUNTED if is_text else _why_no_weight(one.hook, prompt)
                elif all(looks[key].is_skipped for key in changed):
                    changed, lost = set(), SKIPPED
                    open_because = lost
            why = lost or why
            changes_weights = changes_weights or bool(changed)
            acting = {names[is_text](key) for key in changed}
            used[is_text] = frozenset(
                module.name for module in matching.value.matched if not acting.isdisjoint(module.layers)
            )
            whys |= {} if why is None else {why: None}
        count = len(frozenset().union(*used.values()))
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
        if failed and was_in_force and not any(node.seen_steps for node in prompt.nodes.values()):
            return _Known({**verdict, "effective": None, "reason": _ENDED}, used)
        if open_because is not None and not count:
            return _Known({**verdict, "effective": None, "reason": open_because}, used)
        verdict |= {"effective": changes_weights, "modules": len(matching.value.modules) or None}
        # ComfyUI may read what the match with the file does not.
        verdict["modules_used"] = None if changes_weights and not count else count
        verdict["why"] = next(iter([*grave, *whys] if changes_weights else [*whys, *grave]), None)
        return _Known(verdict, used)


def _left_of(
    changed: set[str], looks: Mapping[str, _Look], prompt: PromptRecording
) -> tuple[set[str], str | None]:
    """The weights on which what is on the model itself does not cancel a hook; and why none is left."""
    cancelled = cancelled_in(prompt)
    left = {key for key in changed if not all(id(entry) in cancelled for entry in looks[key].entries)}
    return left, _AGAINST_MODEL if changed and not left else None


def _weighed(hook: object, prompt: PromptRecording) -> bool | None:
    """Whether a conditioning with a hook had any weight in a step, also where none was seen; None: that is not known."""
    states = [one for sampled in sampled_in(prompt).values() for one in sampled.states.items()]
    weights = [has_weight for hooks, has_weight in states if any(ref is hook for ref, _ in hooks)]
    return True if True in weights or not weights else None if None in weights else False


def _why_no_weight(hook: object, prompt: PromptRecording) -> str:
    with_it = [
        sampled
        for sampled in sampled_in(prompt).values()
        if any(ref is hook for state in sampled.states for ref, _ in state)
    ]
    return _FORGOTTEN if with_it and all(sampled.is_forgotten for sampled in with_it) else _NO_WEIGHT


def _text_used(encoders: Iterable[str], prompt: PromptRecording) -> bool | None:
    """Whether a step was made with the text that one of these nodes encoded; None: that is not known."""
    makers, sampled = makers_in(prompt), sampled_in(prompt).values()
    signatures = [makers.get(node_id) for node_id in encoders]
    if not sampled or not signatures or None in signatures:
        return True  # nothing was seen of it
    answers = [one.holds(filter(None, signatures)) for one in sampled]
    return True if True in answers else None if None in answers else False


def _without_weight(hook: object, prompt: PromptRecording) -> frozenset[_Group]:
    """The groups of which no conditioning had any weight; without those of a hook, if that holds for each of these."""
    weights: dict[_Group, bool] = {}
    for sampled in sampled_in(prompt).values():
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
