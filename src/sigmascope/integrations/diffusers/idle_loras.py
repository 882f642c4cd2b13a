"""Why the LoRAs of a call do nothing in it, where none of them acts (`begin_idle_lora_findings`).

A LoRA that was on the pipeline before the watch began has no stage that could say so, nor has one that the call itself
leaves out: it scales the LoRA to 0 (`scales_of_call`), or what the LoRA is on does not run, or may not be used
(`late_layers.py`). A LoRA on a text encoder also acts through embeddings that were made with it before. `EMBEDDINGS` knows with which LoRAs the watched encodings of this process were
made; of other embeddings the answer is that nobody knows.
"""

import dis
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from itertools import count
from types import CodeType, MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from sigmascope.analysis.lora_facts import ZEROS
from sigmascope.integrations.diffusers.arguments import given_embeddings, lora_scales
from sigmascope.integrations.diffusers.control_nets import (
    CONTROL,
    begin_mute_nets,
    net_of,
    on_last_layers,
)
from sigmascope.integrations.diffusers.late_layers import is_on_late_layers
from sigmascope.integrations.diffusers.recipe import (
    Content,
    attached_loras,
    loras_of,
    models_in,
)
from sigmascope.integrations.diffusers.watch_session import LoraChange
from sigmascope.monitor.hooks import ByIdentity
from sigmascope.probes.adapted_modules import adapter_layers
from sigmascope.probes.copies import Pending
from sigmascope.probes.forward_passes import detour_of, weight_readers
from sigmascope.probes.model_fingerprints import state_of, told
from sigmascope.probes.peft import (
    NO_VALUES,
    adapters_of,
    read_adapters,
    rewrites_model,
    takes_from_weights,
)
from sigmascope.probes.reading import attempt, attribute
from sigmascope.records.run import JsonScalar

if TYPE_CHECKING:
    from sigmascope.probes.applied_patch import AppliedPatch
    from sigmascope.stages.lora_findings import IdleChange

Loras = Mapping[str, Mapping[str, Any]]
"""As `loras_of` gives them."""


class SeenInCall(NamedTuple):
    """What was seen of a call that decides which of its LoRAs act.

    Attributes:
        arguments: By name.
        ran: The components that were seen at work, of VAEs as `half_of_vae` names them, and `tower_of` encoders; None: not
            known.
        encoders: The names of its text encoders.
        denoisers: The names of its denoisers.
        vaes: The names of its VAEs.
        steps: How many steps it made.
        changes: What changed its LoRAs meanwhile.
        control_scales: By ControlNet the size of the largest scale that it was called with.
    """

    arguments: Mapping[str, Any]
    ran: Collection[str] | None = None
    encoders: Collection[str] = ()
    denoisers: Collection[str] = ()
    vaes: Collection[str] = ()
    steps: int = 0
    changes: Sequence[LoraChange] = ()
    control_scales: Mapping[str, float] = MappingProxyType({})

    def is_left_out(self, component: str) -> bool:
        """Whether a component did not run, though others did its work or what it makes was given."""
        if self.ran is None or component in self.ran:
            return False
        if component in self.denoisers:
            return any(name in self.ran for name in self.denoisers)
        return component in self.encoders and any(given_embeddings(self.arguments))

    def is_half_left_out(self, vae: str, half: str) -> bool:
        """Whether a VAE did not encode, though it decoded and was given nothing encoded; or did not decode, as asked."""
        if self.ran is None or half_of_vae(vae, half) in self.ran:
            return False
        if half == "decoder":
            return self.arguments.get("output_type") == "latent"
        is_given = any(
            isinstance(value, Tensor | list | tuple)
            for name, value in self.arguments.items()
            if "latents" in name or "image" in name
        )
        return half_of_vae(vae, "decoder") in self.ran and not is_given


def half_of_vae(vae: str, half: str) -> str:
    """What the encoder or decoder of a VAE is called among what ran: "vae.encoder"."""
    return f"{vae}.{half}"


def tower_of(encoder: str) -> str:
    """What the vision tower of a text encoder is called among what ran."""
    return f"{encoder}.vision"


class Encoding(NamedTuple):
    """How embeddings were made: the contents of the LoRAs that acted on each encoder that ran.

    `version` is the tensor's then: PyTorch counts what is written to it.
    """

    version: int
    contents: Mapping[str, Sequence[Content]]


class Embeddings:
    """With which LoRAs embeddings were made, as far as any watch of this process has seen it."""

    def __init__(self) -> None:
        self._by_tensor: ByIdentity[Encoding] = ByIdentity()

    def note(
        self, pipeline: object, arguments: Mapping[str, Any], ran: Collection[str], made: object
    ) -> None:
        """Remember an encoding.

        Args:
            pipeline: Whose encoders ran.
            arguments: Of `encode_prompt`. Of what it makes of given embeddings, or at a scale of 0, nothing is known.
            ran: The components that ran.
            made: The tensors that it returned, or lists of them.
        """
        if any(given_embeddings(arguments)) or arguments.get("lora_scale") == 0:
            return
        loras = loras_of(pipeline, only=ran)
        contents: dict[str, list[Content]] = {}
        for name in ran:
            active = _active_on(name, loras)
            silent = _on_silent_towers(pipeline, active, [name], ran)
            active = {lora: active[lora] for lora in active if lora not in silent}
            if not _on_late_layers(pipeline, active, [name]):
                contents[name] = [lora["content"] for lora in active.values()]
        for tensor in _tensors_in(made):
            version = _version(tensor)
            if version is not None:
                self._by_tensor.put(tensor, Encoding(version, contents))

    def made_with(
        self, loras: Loras, positive: Sequence[Tensor], negative: Sequence[Tensor]
    ) -> Pending[bool | None]:
        """Whether embeddings that a call was given were made with any of these LoRAs; None: nobody knows.

        Args:
            loras: Active ones, on components that did not run in the call.
            positive: The prompt's embeddings.
            negative: Those of the negative prompt, of which nobody knows whether they are used.
        """
        found = [(lora, self._contents_at(name, positive, negative)) for name, lora in loras.items()]
        contents = [lora["content"] for lora, _ in found]
        contents += [one for _, sides in found for side in sides for kept in side for one in kept or ()]

        def tell() -> bool | None:
            answers = [_is_in(lora["content"], *sides) for lora, sides in found]
            return True if True in answers else None if None in answers else False

        return Pending(tell, contents)

    def are_made_with_any(self, positive: Sequence[Tensor]) -> bool:
        """Whether a LoRA was active on an encoder when a prompt's embeddings were made."""
        known = ((tensor, self._by_tensor.get(tensor)) for tensor in positive)
        return any(
            made is not None and made.version == _version(tensor) and any(made.contents.values())
            for tensor, made in known
        )

    def _contents_at(self, lora: str, *sides: Sequence[Tensor]) -> list[list[Sequence[Content] | None]]:
        component = component_of(lora)
        return [[self._contents(tensor, component) for tensor in side] for side in sides]

    def _contents(self, tensor: Tensor, component: str) -> Sequence[Content] | None:
        """The LoRAs that acted on an encoder when a tensor was made; None: not known."""
        known = self._by_tensor.get(tensor)
        if known is None or known.version != _version(tensor):
            return None
        return known.contents.get(component)


EMBEDDINGS: Final = Embeddings()


def _is_in(
    content: Content,
    positive: Sequence[Sequence[Content] | None],
    negative: Sequence[Sequence[Content] | None],
) -> bool | None:
    """Whether the embeddings were made with a LoRA; None: not known, or of some of them only."""
    first, second = ({_was_among(content, kept) for kept in side} for side in (positive, negative))
    if first == {True}:
        return True
    return False if first | second == {False} else None


def _was_among(content: Content, kept: Sequence[Content] | None) -> bool | None:
    if kept is None:
        return None
    own, others = told(content).value, [told(other).value for other in kept]
    if own is None:
        return False if not others else None
    return True if own in others else None if None in others else False


def _version(tensor: Tensor) -> int | None:
    """None of an inference tensor, which counts nothing."""
    return attempt(lambda: tensor._version).value


def _tensors_in(made: object) -> Iterator[Tensor]:
    if isinstance(made, Tensor):
        yield made
    elif isinstance(made, Mapping):
        yield from _tensors_in([*made.values()])
    elif isinstance(made, list | tuple):
        for part in made:
            yield from _tensors_in(part)


def component_of(lora: str) -> str:
    """The component that a LoRA is on: "unet" of "unet.style"."""
    return lora.partition(".")[0]


def _active_on(component: str, loras: Loras) -> Loras:
    return {name: lora for name, lora in loras.items() if lora["active"] and component_of(name) == component}


def begin_idle_lora_findings(
    pipeline: object,
    loras: Loras,
    seen: SeenInCall,
    scales: Mapping[str, tuple[str, float]],
    are_others_in_weights: bool = False,
) -> Pending[list[dict[str, Any]]]:
    """Why the LoRAs of a call do nothing, where none of them acts, or why that is not known.

    Of LoRAs that run, the values are looked at once: zeros, or the same with strengths that sum to 0. An accelerator is
    not waited for. Where LoRAs were changed between two steps, the steps differ, and no verdict is on the whole call.

    Args:
        pipeline: What was called.
        loras: As `loras_of` gives them now.
        seen: Of the call, which is over.
        scales: What it multiplies them by, as `scales_of_call` gives it.
        are_others_in_weights: Whether it is known already that others may be in the weights: then each is named.
    """
    changes = [change for change in seen.changes if change.after_step]
    if changes:
        return Pending(lambda: [_changed_in_call(changes, seen.steps)])
    if not loras:
        made_with_one = EMBEDDINGS.are_made_with_any(given_embeddings(seen.arguments)[0])
        return Pending(lambda: [_in_embeddings()] if made_with_one else [])
    active = {name: lora for name, lora in loras.items() if lora["active"]}
    left_out = {name: lora for name, lora in active.items() if seen.is_left_out(component_of(name))}
    parts = _halves_left_out(pipeline, active, seen)
    parts |= _on_silent_towers(pipeline, active, seen.encoders, seen.ran or ())
    late = _on_late_layers(pipeline, active, seen.encoders) - left_out.keys()
    parts |= {name: (_ON_LATE, component_of(name)) for name in late}
    left_out |= {name: active[name] for name in parts}
    running = {name: lora for name, lora in active.items() if name not in left_out}
    detour = _detour_in(pipeline, running)
    if detour is not None:
        return Pending(lambda: [_not_seen(detour)])
    scaled = {name: argument for name, (argument, scale) in scales.items() if scale == 0}
    beside = [*_off_in_base(pipeline, loras), *_beside_merged(pipeline, loras)]
    controls = {name for name in map(component_of, running) if name.startswith(CONTROL)}
    mute = begin_mute_nets(models_in(pipeline), controls)
    of_base = _of_base(pipeline, running, scales)
    may_be_mute = not mute.has_arrived() or bool(mute.result())
    apart = _told_apart(pipeline, running)
    if running and not of_base and not scaled and not may_be_mute and not _is_to_be_looked_at(apart):
        return Pending(lambda: beside)
    # Only where a LoRA does nothing, or is new, is the code loaded that says why.
    from sigmascope.stages.lora_findings import IN_BASE, MERGED_AT_ZERO, IdleChange, idle_findings

    patches = read_adapters(pipeline).value or ()
    silent = {component_of(name) for name in left_out if name not in parts}
    running = {name: lora for name, lora in running.items() if name not in of_base}
    waiting = parts.keys() | of_base.keys()
    at_work = [p for p in patches if component_of(p.key) not in silent and _lora_of(p) not in waiting]
    empty = [p.key for p in at_work if p.state == "failed" and p.state_reason == NO_VALUES]
    if empty:
        return Pending(lambda: [_without_values(empty)])
    attached = [
        (lora_name, f"{name}.attached layer {layer}", lora["active"] > 0)
        for name, part in models_in(pipeline).items()
        for lora_name, lora in attached_loras(name, part).items()
        for layer in range(lora["layers"])
    ]
    switched_off = [
        IdleChange(patch.key, f"lora_{patch.cause}", source=patch.source)
        if patch.in_base is None
        else IdleChange(patch.key, IN_BASE, patch.in_base)
        for patch in patches
        if patch.cause is not None
    ]
    switched_off += [IdleChange(key, "lora_strength_zero") for _, key, is_on in attached if not is_on]
    on = {key: lora for lora, key, is_on in attached if is_on}
    is_attached = any(component_of(key) not in silent and lora not in parts for key, lora in on.items())
    runs = _begin_idle_at_work(at_work, scaled, mute, is_attached=is_attached) if running else None
    waits = _begin_idle_left_out(left_out, parts, patches, on, seen) if left_out else None
    spoilt = None if running or of_base else _begin_spoilt_at_zero(at_work)
    merged = {name.partition(".")[2] for name, lora in loras.items() if lora.get("merged")}
    are_others_in_weights = are_others_in_weights or bool(listed_as_fused(pipeline) - merged)

    def tell() -> list[dict[str, Any]]:
        of_running = [] if runs is None else runs.result()
        of_left_out = [] if waits is None else waits.result()
        if running and not of_running:
            _remember_acting(apart)
            return beside
        if (left_out and not of_left_out) or (spoilt is not None and spoilt.result()):
            return beside
        if of_base:
            return [_may_be_untrained(of_base)]
        idle = [*of_running, *of_left_out, *([] if running else switched_off)]
        is_open = (_UNKNOWN, _ON_LATE, IN_BASE, MERGED_AT_ZERO, _MAGNITUDES)
        unknown = [change for change in idle if change.cause in is_open]
        found = idle_findings(unknown or idle, by_name=are_others_in_weights)
        return [asdict(finding) for finding in found]

    return Pending(tell, [begun for begun in (runs, waits, spoilt) if begun is not None])


def with_fused_and_gone(
    found: list[dict[str, Any]],
    pipeline: object,
    loras: Loras,
    merged_before: Collection[str],
    *,
    at_zero: Collection[str] = (),
    is_heard: bool,
    is_fusing_heard: bool,
    fused_here: Collection[str],
) -> list[dict[str, Any]]:
    """Why the LoRAs of a call do nothing, with those that were fused and which no layer has merged: the weights do not tell of them.

    Args:
        found: As `begin_idle_lora_findings` found it. Of the same LoRA both cannot be said.
        pipeline: What was called.
        loras: As `loras_of` gives them now.
        merged_before: The components of which nobody knows what is left that was merged into them before the watch.
        at_zero: The LoRAs that were merged with strength 0 then. Taken out at another one, they may cancel what they add now.
        is_heard: Whether LoRAs were changed in the watch: that tells what became of the last one.
        is_fusing_heard: Whether some were fused in it: that tells with which strength. Of those that were fused before, and are
            no longer merged, nobody knows whether all was taken out.
        fused_here: The names of those that this pipeline fused in it.
    """
    active = {name for name, lora in loras.items() if lora["active"]}
    known = {name.partition(".")[2] for name, lora in loras.items() if is_fusing_heard or lora.get("merged")}
    gone = sorted(listed_as_fused(pipeline) - known - {*fused_here})
    is_told = bool(active) or (is_heard and not loras)
    if gone and not is_told:
        said = f"the pipeline lists {' and '.join(gone)} as fused, but no layer has it merged"
        return [*found, _fused_before(said, len(gone))]
    with_layers = {component_of(name) for name in loras} & {*merged_before}
    if not found and active and active <= {*at_zero}:
        return [may_stay_in(sorted(with_layers))]
    if with_layers and not {one["id"] for one in found} <= _WHATEVER_WAS_MERGED:
        return [may_stay_in(sorted(with_layers))]
    elsewhere = [] if is_told or is_heard else _fused_elsewhere(pipeline, loras)
    if elsewhere:
        called = f"other code than this pipeline called fuse_lora on {' and '.join(elsewhere)}"
        return [*found, _fused_before(f"{called}, but no layer has it merged", None)]
    return found


def may_stay_in(components: Sequence[str]) -> dict[str, Any]:
    """That nobody knows what is in the weights of these components which was merged into them before the watch."""
    return _fused_before(f"a LoRA was merged into {' and '.join(components)} before the watch began", None)


def _fused_before(said: str, count: int | None) -> dict[str, Any]:
    from sigmascope.lora.verdict import verdict_finding

    return asdict(verdict_finding(FUSED_BEFORE, {"loras": count}, fused=said))


def listed_as_fused(pipeline: object) -> set[str]:
    """The names of the adapters that a pipeline lists as fused: it forgets them when they are unfused, not when they are unloaded."""
    listed = attribute(pipeline, "fused_loras")
    return {*map(str, listed)} if isinstance(listed, set | frozenset | list | tuple) else set()


def _fused_elsewhere(pipeline: object, loras: Loras) -> list[str]:
    """The models without a LoRA's layers that diffusers fused one into, where the pipeline did not: its own list tells of that.

    So are those of a pipeline that was made of another (`from_pipe`): the list stays behind, with the other one.
    """
    if "_merged_adapters" in (attribute(pipeline, "__dict__") or ()):
        return []
    with_layers = {component_of(name) for name in loras}
    return [
        name
        for name, model in models_in(pipeline).items()
        if name not in with_layers and "_safe_fusing" in vars(model)
    ]


def _of_base(pipeline: object, running: Loras, scales: Mapping[str, tuple[str, float]]) -> Loras:
    """The LoRAs that hold a part of the model's own weights, at the strength at which they give it back."""
    models = models_in(pipeline) if running else {}
    return {
        name: lora
        for name, lora in running.items()
        if {*(lora["strength"] or ())} == {1.0}
        and scales.get(component_of(name), ("", 1.0))[1] == 1.0
        and component_of(name) in models
        and takes_from_weights(models[component_of(name)], name.partition(".")[2])
    }


def _may_be_untrained(loras: Loras) -> dict[str, Any]:
    from sigmascope.lora.verdict import verdict_finding

    names = dict.fromkeys(name.partition(".")[2] for name in loras)
    return asdict(verdict_finding(_OF_BASE, {"loras": len(loras)}, adapters=" and ".join(names)))


def _off_in_base(pipeline: object, loras: Loras) -> list[dict[str, Any]]:
    """That LoRAs of a call which are off changed the model itself: what it runs with beside the others is not its own."""
    models = models_in(pipeline)
    off = {
        name
        for name, lora in loras.items()
        if not lora["active"] and rewrites_model(models[component_of(name)], name.partition(".")[2])
    }
    if not off:
        return []
    from sigmascope.stages.lora_findings import off_in_base

    patches = read_adapters(pipeline).value or ()
    return [asdict(finding) for finding in off_in_base(p for p in patches if _lora_of(p) in off)]


def _beside_merged(pipeline: object, loras: Loras) -> list[dict[str, Any]]:
    """That LoRAs of a call are set to act and do not, since others are merged on the same model."""
    merged = {component_of(name) for name, lora in loras.items() if lora.get("merged")}
    if not any(component_of(name) in merged and not lora["active"] for name, lora in loras.items()):
        return []
    from sigmascope.stages.lora_findings import beside_merged

    return [asdict(finding) for finding in beside_merged(read_adapters(pipeline).value or ())]


_HALVES: Final = {"encoder": ("encoder.", "quant_conv."), "decoder": ("decoder.", "post_quant_conv.")}
"""What the names of layers begin with that a VAE encodes with, and decodes with."""


def _halves_left_out(pipeline: object, active: Loras, seen: SeenInCall) -> dict[str, tuple[str, str]]:
    """The LoRAs that are on one half of a VAE alone, where this half did not run, with the finding and the half's name."""
    found: dict[str, tuple[str, str]] = {}
    for vae in {component_of(name) for name in active} & {*seen.vaes}:
        patches = read_adapters(models_in(pipeline)[vae]).value or ()
        for half, starts in _HALVES.items():
            outside = {patch.source for patch in patches if not patch.key.startswith(starts)}
            names = {f"{vae}.{patch.source}" for patch in patches if patch.source not in outside}
            if names and seen.is_half_left_out(vae, half):
                found |= dict.fromkeys(names & active.keys(), ("lora_not_run", half_of_vae(vae, half)))
    return found


_TOWERS: Final = re.compile(r"(?:.*\.)?(?:visual|vision_tower|vision_model|multi_modal_projector)(?=\.)")
"""What a text encoder that also sees runs of a picture alone, by the beginning of a layer's name."""


def _on_silent_towers(
    pipeline: object, active: Loras, encoders: Collection[str], ran: Collection[str]
) -> dict[str, tuple[str, str]]:
    """The LoRAs that are on an encoder's vision tower alone, where the encoder ran without a picture, with the finding and
    the tower's name.
    """
    found: dict[str, tuple[str, str]] = {}
    models = models_in(pipeline)
    for encoder in {component_of(name) for name in active} & {*encoders} & {*ran} & models.keys():
        layers = [(_TOWERS.match(path), layer) for path, layer in adapter_layers(models[encoder])]
        inside = {name: tower[0] for tower, layer in layers if tower for name in adapters_of(layer)}
        if not inside or tower_of(encoder) in ran:
            continue
        outside = {name for tower, layer in layers if tower is None for name in adapters_of(layer)}
        for name in inside.keys() - outside:
            if (lora := f"{encoder}.{name}") in active:
                found[lora] = "lora_not_run", f"{encoder}.{inside[name]}"
    return found


def _on_late_layers(pipeline: object, active: Loras, encoders: Collection[str]) -> set[str]:
    """The LoRAs that act on late layers of a text encoder alone: nobody sees whether these are used."""
    models = models_in(pipeline)
    return {
        name
        for name in active
        if (component := component_of(name)) in encoders
        and component in models
        and is_on_late_layers(component, models[component], name)
    }


def _lora_of(patch: "AppliedPatch") -> str:
    """The name of a patch's LoRA, as `loras_of` gives it."""
    return f"{component_of(patch.key)}.{patch.source}"


def scales_of_call(pipeline: object, seen: SeenInCall) -> dict[str, tuple[str, float]]:
    """By component, what a call multiplies the LoRAs on it by, or what comes of it: the argument and its value.

    Of several ControlNets in one component each that is scaled to 0 has its own name. Not every model and encoding heeds the scale that it is given: it is asked of their code. ControlNets do not.
    """
    parts = models_in(pipeline)
    found: dict[str, tuple[str, float]] = {}
    given = lora_scales(seen.arguments)
    encoded = {name for way in _encodings_of(pipeline) for name in _scaled_by(way)} if given else set()
    for argument, scale in given.items():
        for name, part in parts.items():
            denoises = name in seen.denoisers and _ITSELF in _scaled_by(type(part).forward)
            if denoises or (name in seen.encoders and name in encoded):
                found[name] = argument, scale
    weight = seen.arguments.get(_OF_CONTROL)
    weights = weight if isinstance(weight, list | tuple) else [weight]
    if type(pipeline).__module__.startswith("diffusers.") and all(one == 0 for one in weights):
        controls = [name for name in parts if name.startswith(CONTROL)]
        found |= dict.fromkeys(controls, (_OF_CONTROL, 0.0))
    off = [
        name for name, scale in seen.control_scales.items() if scale == 0 and component_of(name) not in found
    ]
    return found | dict.fromkeys(off, (_OF_STEPS, 0.0))


def _encodings_of(pipeline: object) -> Iterator[object]:
    """What encodes prompts: a pipeline's method, or those of its blocks."""
    yield attribute(type(pipeline), "encode_prompt")
    waiting = [attribute(pipeline, "blocks")]
    while waiting:
        blocks = waiting.pop()
        yield attribute(type(blocks), "encode_prompt")
        inner = attribute(blocks, "sub_blocks")
        waiting += inner.values() if isinstance(inner, Mapping) else ()


def _scaled_by(function: object) -> Iterator[str]:
    """What a function, or one that it was made around, has diffusers scale the LoRAs of: "text_encoder" of `self.text_encoder`."""
    while function is not None:
        code = attribute(function, "__code__")
        yield from _scaled_in(code) if isinstance(code, CodeType) else ()
        function = attribute(function, "__wrapped__")


@lru_cache(maxsize=64)
def _scaled_in(code: CodeType) -> tuple[str, ...]:
    steps = [*dis.get_instructions(code)]
    calls = [
        place for place, step in enumerate(steps) if (step.opname, step.argval) == ("LOAD_GLOBAL", _SCALES)
    ]
    owners = (steps[place + 1 : place + 3] for place in calls)
    return tuple(
        next((str(step.argval) for step in own if step.opname == "LOAD_ATTR"), _ITSELF) for own in owners
    )


_ITSELF: Final = ""
"""What a model's own forward pass scales."""
_SCALES: Final = "scale_lora_layers"
_OF_CONTROL: Final = "controlnet_conditioning_scale"
_OF_STEPS: Final = "conditioning_scale of each step (control_guidance_start and control_guidance_end)"
_OUTPUTS: Final = frozenset({_OF_CONTROL, _OF_STEPS})
"""What the whole output of a ControlNet is multiplied by, and not its LoRAs alone."""
_AT_WORK: Final = frozenset({"lazy", "merged"})


def _detour_in(pipeline: object, running: Loras) -> str | None:
    """What a component of these LoRAs runs in place of its layers; None: all run them."""
    parts = models_in(pipeline) if running else {}
    for name in dict.fromkeys(map(component_of, running)):
        why = detour_of(parts[name]) if name in parts else None
        if why is not None:
            return f"the forward pass of {name} is {why}"
    left_out = [
        _left_out_by_processors(parts.get(component_of(name)), name, lora) for name, lora in running.items()
    ]
    return left_out[0] if left_out and None not in left_out else None


def _left_out_by_processors(model: nn.Module | None, name: str, lora: Mapping[str, Any]) -> str | None:
    """Why attention processors may leave a whole LoRA out, which is beside the weights that they read; None if not so."""
    readers = {} if model is None or lora.get("merged") else weight_readers(model)
    if model is None or not readers:
        return None
    adapter = name.partition(".")[2]
    on = [path for path, layer in adapter_layers(model) if adapter in adapters_of(layer)]
    is_whole = bool(on) and all(path.startswith((*(f"{one}." for one in readers),)) for path in on)
    return next(iter(readers.values())) if is_whole else None


def _in_embeddings() -> dict[str, Any]:
    from sigmascope.lora.verdict import verdict_finding

    return asdict(verdict_finding("lora_in_embeddings", {}))


def _not_seen(why: str) -> dict[str, Any]:
    from sigmascope.lora.verdict import verdict_finding

    return asdict(verdict_finding("lora_not_seen", {}, why=why))


def _without_values(keys: Sequence[str]) -> dict[str, Any]:
    from sigmascope.stages.lora_findings import without_values

    return asdict(without_values("Call", keys))


def _begin_idle_at_work(
    patches: "Sequence[AppliedPatch]",
    scaled: Mapping[str, str],
    mute: Pending[frozenset[str]],
    *,
    is_attached: bool,
) -> "Pending[list[IdleChange]]":
    """Why changes of components that ran do nothing; nothing if one may act.

    Args:
        patches: Those of PEFT on these components.
        scaled: By component or ControlNet, the argument that scales its LoRAs, or what comes of it, to 0.
        mute: The ControlNets that give zeros, with any LoRA that is not on their last layers.
        is_attached: Whether one of `attach_lora` is active there: it is neither looked at nor scaled by an argument.
    """
    from sigmascope.stages.lora_findings import begin_all_idle, begin_spoilt
    from sigmascope.stages.model_snapshot import ModelPatches

    if is_attached:
        return Pending(list)
    acting = [patch for patch in patches if patch.state in _AT_WORK]
    to_zero = {id(patch): _scaled_to_zero(patch, scaled) for patch in acting if _is_scaled(patch, scaled)}
    left = [patch for patch in acting if id(patch) not in to_zero]
    by_net: dict[str, list[AppliedPatch]] = {}
    for patch in left if not mute.has_arrived() or mute.result() else ():
        if patch.key.startswith(CONTROL):
            by_net.setdefault(_net_in(patch.key), []).append(patch)
    of_nets = {net: begin_all_idle(ModelPatches(tuple(own))) for net, own in by_net.items()}
    on_last = {net: on_last_layers(own, net) for net, own in by_net.items()}
    of_last = {net: begin_all_idle(ModelPatches(tuple(own))) for net, own in on_last.items() if own}
    on_nets = {id(patch) for own in by_net.values() for patch in own}
    others = [patch for patch in patches if id(patch) not in to_zero.keys() | on_nets]
    has_others = any(patch.state in _AT_WORK for patch in others)
    if not to_zero and not by_net:
        return begin_all_idle(ModelPatches(tuple(patches)))
    of_others = begin_all_idle(ModelPatches(tuple(others))) if has_others else Pending(list)
    is_spoilt = begin_spoilt(acting)

    def tell() -> "list[IdleChange]":
        parts = [of_nets[net].result() for net in by_net]
        for place, (net, own) in enumerate(by_net.items()):
            idle = of_last[net].result() if net in of_last else []
            if net in mute.result() and (idle or not on_last[net]):
                known = {id(patch) for patch in on_last[net]}
                parts[place] = [*idle, *(_of_mute(patch, net) for patch in own if id(patch) not in known)]
        parts += [of_others.result()] if has_others else []
        if is_spoilt.result() or not all(parts):
            return []
        return [*to_zero.values(), *(change for part in parts for change in part)]

    return Pending(tell, [is_spoilt, mute, of_others, *of_nets.values(), *of_last.values()])


def _net_in(key: str) -> str:
    """The ControlNet of a weight: "controlnet", or "controlnet.nets.0" of several in one component."""
    names = key.split(".")
    return ".".join(names[: 3 if names[1] == "nets" else 1])


def _of_mute(patch: "AppliedPatch", net: str) -> "IdleChange":
    from sigmascope.stages.lora_findings import IdleChange

    return IdleChange(patch.key, "lora_control_is_zero", net, source=patch.source)


def _scaled_to_zero(patch: "AppliedPatch", scaled: Mapping[str, str]) -> "IdleChange":
    from sigmascope.stages.lora_findings import IN_BASE, IdleChange

    argument = scaled[_scaled_part(patch, scaled)]
    if patch.in_base is not None and argument not in _OUTPUTS:
        return IdleChange(patch.key, IN_BASE, patch.in_base)
    return IdleChange(patch.key, "lora_scaled_to_zero", argument, patch.source)


def _scaled_part(patch: "AppliedPatch", scaled: Mapping[str, str]) -> str:
    """What of the scaled components and ControlNets a change is on; "" if on none."""
    component = component_of(patch.key)
    return component if component in scaled else net_of(patch.key, scaled) or ""


def _is_scaled(patch: "AppliedPatch", scaled: Mapping[str, str]) -> bool:
    argument = scaled.get(_scaled_part(patch, scaled))
    return argument in _OUTPUTS or (
        argument is not None and patch.state == "lazy" and patch.adapter_type in _SCALED
    )


def _begin_spoilt_at_zero(patches: "Sequence[AppliedPatch]") -> Pending[bool] | None:
    """Whether a change of strength 0 holds NaN or Inf, which 0 does not take away; None if none has that strength."""
    from sigmascope.stages.lora_findings import begin_spoilt

    at_zero = [patch for patch in patches if patch.cause == "strength_zero"]
    return begin_spoilt(at_zero) if at_zero else None


def _begin_idle_left_out(
    left_out: Loras,
    parts: Mapping[str, tuple[str, str]],
    patches: "Sequence[AppliedPatch]",
    attached: Mapping[str, str],
    seen: SeenInCall,
) -> "Pending[list[IdleChange]]":
    """Why changes of what did not run, or was not used, do nothing, or that it is not known; nothing if they act.

    Args:
        left_out: The active LoRAs on it.
        parts: Those of them that are on part of a component that ran, with the id of the finding and its words.
        patches: Of the whole pipeline.
        attached: The layers of the whole pipeline that `attach_lora` changes now, with the LoRA of each.
        seen: Of the call.
    """
    from sigmascope.stages.lora_findings import IdleChange, begin_all_idle
    from sigmascope.stages.model_snapshot import ModelPatches

    whole = {name: lora for name, lora in left_out.items() if name not in parts}
    silent = {component_of(name) for name in whole}
    encoders = {name: lora for name, lora in whole.items() if component_of(name) in seen.encoders}
    of_encoders = {component_of(name) for name in encoders}
    own = tuple(p for p in patches if component_of(p.key) in silent or _lora_of(p) in parts)
    changes = {p.key: _lora_of(p) for p in own if p.state in _AT_WORK}
    changes |= {key: lora for key, lora in attached.items() if component_of(key) in silent or lora in parts}
    zeros = begin_all_idle(ModelPatches(own)) if own else Pending(list)
    positive, negative = given_embeddings(seen.arguments)
    made_with = EMBEDDINGS.made_with(encoders, positive, negative)

    def tell() -> list[IdleChange]:
        in_embeddings = made_with.result()
        if zeros.result() or in_embeddings:
            return zeros.result()
        cause = _UNKNOWN if in_embeddings is None else "lora_not_in_embeddings"

        def because(component: str, lora: str) -> tuple[str, str]:
            if lora in parts:
                return parts[lora]
            if component not in of_encoders:
                return "lora_not_run", component
            return cause, component

        return [IdleChange(key, *because(component_of(key), lora)) for key, lora in changes.items()]

    return Pending(tell, [zeros, made_with])


def _changed_in_call(changes: Sequence[LoraChange], steps: int) -> dict[str, Any]:
    from sigmascope.lora.verdict import verdict_finding

    words = [
        f"{change.method} after step {change.after_step} of {steps}"
        + (", which acts from the next call on" if change.after_step >= steps else "")
        for change in changes
    ]
    first = changes[0]
    evidence: dict[str, JsonScalar] = {
        "changes": len(changes),
        "method": first.method,
        "after_step": first.after_step,
    }
    return asdict(verdict_finding("lora_changed_in_call", evidence, first="; ".join(words)))


_ACTING: Final[dict[tuple[object, ...], None]] = {}
"""States of a pipeline's LoRAs that were seen to act: they are not looked at again."""
_MOST_STATES: Final = 100


def _told_apart(pipeline: object, loras: Loras) -> Pending[tuple[object, ...] | None]:
    """What tells a state of LoRAs from others: what each contains, or else the state of its model; None: nothing does."""
    models = models_in(pipeline)

    def tell() -> tuple[object, ...] | None:
        each = [
            told(lora["content"]).value or _state_of(models[component_of(name)])
            for name, lora in loras.items()
        ]
        held = [(name, lora["strength"], lora["active"]) for name, lora in loras.items()]
        return None if None in each else (*zip(held, each, strict=True),)

    return Pending(tell, [lora["content"] for lora in loras.values()])


_SERIAL: Final = count()
_SERIALS: "WeakKeyDictionary[nn.Module, int]" = WeakKeyDictionary()


def _state_of(model: nn.Module) -> tuple[int, int] | None:
    state = state_of(model).value
    return None if state is None else (_SERIALS.setdefault(model, next(_SERIAL)), state)


def _is_to_be_looked_at(apart: Pending[tuple[object, ...] | None]) -> bool:
    """Whether they were not seen to act."""
    return not apart.has_arrived() or apart.result() is None or apart.result() not in _ACTING


def _remember_acting(apart: Pending[tuple[object, ...] | None]) -> None:
    state = apart.result()
    if state is not None:
        _ACTING[state] = None
    while len(_ACTING) > _MOST_STATES:
        del _ACTING[next(iter(_ACTING))]


FUSED_BEFORE: Final = "lora_fused_before"
_WHATEVER_WAS_MERGED: Final = ZEROS | {"lora_merged_at_zero"}
"""The findings that stand whatever was merged before, and the one that says it itself."""
_ON_LATE: Final = "lora_on_late_layers"
"""The finding that a LoRA is on layers of a text encoder alone that pipelines may leave out."""
_MAGNITUDES: Final = "lora_magnitudes_unknown"
_OF_BASE: Final = "lora_of_base"
_UNKNOWN: Final = "lora_encoder_not_run"
"""The finding that a LoRA on a text encoder may act through embeddings that were made elsewhere."""
_SCALED: Final = frozenset({"lora", "loha", "lokr", "diff"})
"""Kinds that do nothing at scale 0."""
