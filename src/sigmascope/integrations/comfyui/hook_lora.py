"""The instrument that judges LoRAs that travel in the conditioning, as hooks: ComfyUI merges them only while it samples.

Each weight that a hook is merged into is compared with what ComfyUI kept of it, on its own device. One number a weight
is queued there on the host's thread, and read at the prompt's end.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from sigmascope.integrations.comfyui.instruments import Instrument, weakly
from sigmascope.integrations.comfyui.kept_loras import Kept, keep_verdict
from sigmascope.integrations.comfyui.lora import VERDICTS, ZERO, path_of, said
from sigmascope.integrations.comfyui.needs import Need, output_data
from sigmascope.integrations.comfyui.posted_graph import following
from sigmascope.integrations.comfyui.recording import NodeWatch, PromptRecording
from sigmascope.integrations.comfyui.sampling import first_of
from sigmascope.integrations.comfyui.wraps import Call, Wrap
from sigmascope.probes.reading import attempt
from sigmascope.stages.lora_on_model import match_file, names_of_all

_NOT_TAKEN: Final = "no node that encodes a text or samples takes it"
_NEVER_IN_FORCE: Final = "it was in force for no text that was encoded and no step"
_ELSEWHERE: Final = "the weights from before cannot be compared, or lie on another device"


class _Made(NamedTuple):
    """A LoRA of a node that makes hooks. `hook` is ComfyUI's mark of it, which all copies share; None: it made none."""

    node_id: str
    slot: int
    name: str
    path: str | None
    hook: object | None


class _Model(NamedTuple):
    patcher: Callable[[], Any]
    is_text: bool


class _Seen:
    """Of one prompt, by ComfyUI's mark of each hook.

    Attributes:
        made: The LoRAs of its nodes.
        models: Those that got the hook: of the text encoder or not.
        changed: Whether each weight was another one than before, on its device; None: that cannot be asked.
    """

    def __init__(self) -> None:
        self.made: list[tuple[NodeWatch, _Made]] = []
        self.models: dict[object, dict[bool, _Model]] = {}
        self.changed: dict[tuple[object, bool], dict[str, Tensor | None]] = {}


class HookLora(Instrument):
    """Wraps two methods of `comfy.model_patcher.ModelPatcher`, and `execution.get_output_data`."""

    name = "hook_lora"
    gives = "verdicts of LoRAs that travel in the conditioning"
    needs = (
        Need("comfy.model_patcher", "ModelPatcher.register_all_hook_patches", ("hooks",), False),
        Need(
            "comfy.model_patcher",
            "ModelPatcher.patch_hook_weight_to_device",
            ("combined_patches", "key"),
            False,
        ),
        output_data("input_data_all"),
    )

    def put_on(self) -> None:
        """See `Instrument`."""
        self._known: Kept[tuple[_Made, dict[str, Any]]] = Kept()
        self.wraps.append(Wrap(self.needs[0], self, before=self._registers))
        self.wraps.append(Wrap(self.needs[1], self, after=self._merged))
        self.wraps.append(Wrap(self.needs[2], self, after=self._outputs))

    def _registers(self, call: Call) -> None:
        """A model that is about to sample, or to encode, gets the hooks of its conditioning."""
        patcher, prompt = call.get("self"), self.prompt_here()
        if prompt is not None:
            is_text, models = bool(patcher.is_clip), self._seen_in(prompt).models
            known = weakly(patcher)
            if known is None:
                return
            for hook in getattr(call.get("hooks"), "hooks", ()):
                models.setdefault(hook.hook_ref, {})[is_text] = _Model(known, is_text)

    def _merged(self, call: Call, _known: None, _result: object, error: BaseException | None) -> None:
        """A weight was changed by hooks. What each of several hooks gave to one weight is not told apart."""
        key, patcher, prompt = call.get("key"), call.get("self"), self.prompt_here()
        if prompt is None or error is not None or key not in call.get("combined_patches"):
            return
        all_changed = self._seen_in(prompt).changed
        changed = attempt(lambda: _is_changed(patcher, key)).value
        for hook, keys in patcher.hook_patches.items():
            if key in keys:
                all_changed.setdefault((hook, bool(patcher.is_clip)), {})[key] = changed

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

    def at_the_end(self, prompt: PromptRecording) -> None:
        """Judge the LoRAs of the prompt's nodes that make hooks, and name those of nodes that ComfyUI kept."""
        seen = self._seen_in(prompt)
        anew: dict[str, list[tuple[_Made, dict[str, Any]]]] = {}
        for node, one in seen.made:
            verdict = self._judge(one, seen)
            node.add(VERDICTS, said(one.name, verdict))
            anew.setdefault(node.id, []).append((one, verdict))
        for node_id, since, (one, verdict) in self._known.of_prompt(prompt, anew):
            # Where a node that follows was kept too, the hook was in force for it when it ran.
            is_kept = any(
                follower in prompt.cached for follower in following(prompt.graph, node_id, one.slot)
            )
            keep_verdict(
                prompt, node_id, said(one.name, verdict if is_kept else self._judge(one, seen), since)
            )

    def _seen_in(self, prompt: PromptRecording) -> _Seen:
        return prompt.until_the_end(self.name, _Seen)

    def _judge(self, one: _Made, seen: _Seen) -> dict[str, Any]:
        verdict: dict[str, Any] = {
            "effective": False, "reason": None, "modules_used": None, "modules": None, "why": None,
        }  # fmt: skip
        known = seen.models.get(one.hook, {})
        if one.hook is None or not known:
            return {**verdict, "modules_used": 0, "why": ZERO if one.hook is None else _NOT_TAKEN}
        models = {is_text: model.patcher() for is_text, model in known.items()}
        matching = match_file(one.path, models.get(False), models.get(True))
        if matching.value is None:
            return {**verdict, "effective": None, "reason": matching.reason}
        names = names_of_all(models.get(False), models.get(True))
        changed: set[str] = set()
        was_in_force = False
        for is_text in models:
            looks = seen.changed.get((one.hook, is_text), {})
            if any(look is None for look in looks.values()):
                return {**verdict, "effective": None, "reason": _ELSEWHERE}
            was_in_force = was_in_force or bool(looks)
            arrived = _read([look for look in looks.values() if look is not None])
            changed |= {names[is_text](key) for key, acts in zip(looks, arrived, strict=True) if acts}
        used = [module for module in matching.value.matched if not changed.isdisjoint(module.layers)]
        grave = [finding.message for finding in matching.value.findings if finding.severity != "info"]
        return {
            **verdict,
            "effective": bool(used),
            "modules_used": len(used),
            "modules": len(matching.value.modules),
            "why": _NEVER_IN_FORCE
            if matching.value.matched and not was_in_force
            else next(iter(grave), None),
        }


def _is_changed(patcher: Any, key: str) -> Tensor | None:
    """Whether a weight is another one than ComfyUI kept of it, on its device; None: they lie on different ones."""
    kept, now = patcher.hook_backup[key][0], patcher.model.get_parameter(key)
    return (kept != now.detach()).any() if kept.device == now.device else None


def _read(looks: list[Tensor]) -> list[bool]:
    """The answers, read from each device at once."""
    return [bool(answer) for answer in torch.stack(looks).tolist()] if looks else []


INSTRUMENT = HookLora
