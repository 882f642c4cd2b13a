"""What models had on them each time that a node put them on a device: patches, and which of those cancel each other there.

The patches of hooks are on a model while it samples with their conditionings. What they cancel counts as cancelled if they do
in each conditioning that has any weight.

A node whose output ComfyUI kept put its models on a device when it ran. What they had then is kept like that output.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from sigmascope.integrations.comfyui.conditionings import (
    Sampled,
    State,
    makers_in,
    sampled_in,
    samplings_in,
    state_of,
    without_forgotten,
)
from sigmascope.integrations.comfyui.encodings import TEXT_ENCODING
from sigmascope.integrations.comfyui.instruments import weakly
from sigmascope.integrations.comfyui.kept_loras import Kept
from sigmascope.integrations.comfyui.latents import lost_in
from sigmascope.integrations.comfyui.recording import NodeWatch, PromptRecording
from sigmascope.integrations.comfyui.sampling import SAMPLING
from sigmascope.probes.applied_patch import AppliedPatch, Standing
from sigmascope.probes.comfyui_patcher import bypasses_of, kept_weights, original_weight
from sigmascope.probes.comfyui_weight_adapter import PatcherEntry, applied
from sigmascope.probes.reading import attempt, attribute, lookup, mapping, number, sequence
from sigmascope.stages.lora_on_model import cancelled_changes
from sigmascope.stages.model_snapshot import ModelPatches

_MOST_NODES: Final = 1000
_MOST_STACKS: Final = 50
_MOST_STATES: Final = 16
_NAME: Final = "models_in_use"
_TOGETHER: Final = Standing("merged", "with all that was on the model together")
_NO_HOOKS: Final[State] = frozenset()
LOADED_OVER: Final = (
    "ComfyUI keeps one set of weights for both models of the node, so that no step was made with"
)
SKIPPED: Final = "clip skip takes the text from before the layers that it changes: only the pooled output holds them, which may not be used"
BESIDE_ZERO: Final = "another patch multiplies queries, keys, values or the output with 0 in each attention that it changes, which may leave nothing of it"
_LAYER: Final = re.compile(r"\.layers\.(\d+)\.")
_PROJECTIONS: Final = (("to_q", "to_k", "to_v", "to_out.0"), ("q_proj", "k_proj", "v_proj", "out_proj"))
"""Names of an attention's queries, keys, values and output, in denoisers and in text encoders."""
_FACTORS: Final = ((1, 2, 3), (0, 2, 3), (3,), (2,))
"""What a projection of an attention is multiplied with, later or before."""
_Held = tuple[int, Any]
"""A patch with the identity that it has in the host."""
_ByWeight = Mapping[str, Sequence[_Held]]
_Hooked = Mapping[object, Mapping[str, Sequence[Any]]]
"""The patches of hooks: by ComfyUI's mark of a hook, and by weight."""


Does = Literal["samples", "samples nothing", "was cut", "encodes", "other", "unknown"]


class Use(NamedTuple):
    """A model as a node put it on a device.

    Attributes:
        model: Its identity.
        patches: Those of its patches, and of its adapters beside the weights, as far as later ones leave them.
        cancelled: Of these the ones that cancel each other, each with the id of the verdict; or all, with `LOADED_OVER`.
        doubted: Of these, the ones that may do nothing where they are, each with the reason: see `doubt_of`.
        changes: The identities of what its patches change, which are the same where a node has made other patches of them.
    """

    model: int
    patches: frozenset[int]
    cancelled: Mapping[int, str]
    doubted: Mapping[int, str] = MappingProxyType({})
    changes: frozenset[int] = frozenset()

    def leaves(self, patches: frozenset[int]) -> bool:
        """Whether some of these patches act."""
        return any(patch not in self.cancelled for patch in self.patches & patches)


class Uses(NamedTuple):
    """What a node did with models.

    Attributes:
        at: How many prompts before that one were watched.
        models: Those that it put on a device.
        does: "samples", "samples nothing" (it was told to make no step), "was cut" (it was to sample, and the prompt failed
            before a step was done), "encodes" a text, or "other"; "unknown": it went through something by a bar of its own.
        sampled: With what conditionings it made its steps; None: it was not seen to make any.
        maker: The signature under which the conditionings that it made are known; None: it was not seen to make any.
    """

    at: int
    models: tuple[Use, ...]
    does: Does
    sampled: Sampled | None = None
    maker: str | None = None


class InUse(NamedTuple):
    """The models of a prompt.

    Attributes:
        at: How many prompts before it were watched.
        by_node: What each node used, now or when ComfyUI kept its output; of other nodes it is not known.
    """

    at: int
    by_node: Mapping[str, Uses]

    def is_known(self, node_id: str, since: int) -> bool:
        """Whether it is known what a node used, of what others gave since a prompt."""
        return node_id in self.by_node and self.by_node[node_id].at >= since


def hook_is_merged(
    prompt: PromptRecording, patcher: Any, hook: object, key: str, entries: Sequence[Any]
) -> None:
    """Know that the patches of a hook were merged into a weight of a denoiser."""
    hooked = prompt.until_the_end(_NAME, _Loads).hooked
    hooked.setdefault(id(patcher.model), {}).setdefault(hook, {})[key] = entries


def cancelled_in(prompt: PromptRecording) -> frozenset[int]:
    """The identities of patches that others cancel wherever they were, once the prompt's models are known."""
    return prompt.until_the_end(_NAME, _Loads).cancelled


def samplings_of(prompt: PromptRecording) -> Mapping[str, Sampled]:
    """With what each node made its steps, now or when ComfyUI kept what it gave, once the prompt's models are known."""
    in_use = prompt.until_the_end(_NAME, _Loads).in_use
    if in_use is None:
        return sampled_in(prompt)
    return {node_id: one.sampled for node_id, one in in_use.by_node.items() if one.sampled is not None}


def makes_no_step(prompt: PromptRecording) -> bool:
    """Whether all samplers of a prompt were told to make no step, now or when ComfyUI kept what they gave."""
    in_use = prompt.until_the_end(_NAME, _Loads).in_use
    does = set() if in_use is None else {one.does for one in in_use.by_node.values()}
    return "samples nothing" in does and does.isdisjoint({"samples", "was cut", "unknown"})


class _Stack(NamedTuple):
    """A model and its patches, some of them `doubted`; `mark` is ComfyUI's for these, since identities are given anew."""

    model: int
    patches: frozenset[int]
    mark: Hashable
    doubted: frozenset[tuple[int, str]]
    changes: frozenset[int]


class _Cancelled(NamedTuple):
    """The weight of a patch that others cancel, and the id of the verdict."""

    key: str
    why: str


class _Loads:
    """Of one prompt.

    Attributes:
        by_node: The models that a node put on a device; a text encoder with the hooks that are in force while it encodes.
        order: By node and model, what was loaded, one after the other, each with the samplings until then: see `samplings_in`.
        hooked: The patches of hooks that were merged into a denoiser, by its identity.
        cancelled: The identities of those that others cancel wherever they are in force.
        in_use: What was found of them at the end.
    """

    def __init__(self) -> None:
        self.by_node: dict[str, dict[tuple[_Stack, State], Callable[[], Any] | None]] = {}
        self.order: dict[tuple[str, int], list[tuple[_Stack, int]]] = {}
        self.hooked: dict[int, dict[object, dict[str, Sequence[Any]]]] = {}
        self.cancelled: frozenset[int] = frozenset()
        self.in_use: InUse | None = None


class ModelsInUse:
    """The models of the last prompts."""

    def __init__(self) -> None:
        self._prompts = 0
        self._kept: Kept[Uses] = Kept(_MOST_NODES)
        self._cancelled: OrderedDict[_Stack, Mapping[int, str]] = OrderedDict()

    def add(self, prompt: PromptRecording, node: NodeWatch | None, patcher: Any) -> None:
        """A node puts a model on a device."""
        stack = attempt(partial(_stack_of, patcher)).value
        if stack is not None:
            loads = prompt.until_the_end(_NAME, _Loads)
            hooks = attempt(partial(_forced_on, patcher)).value or _NO_HOOKS
            loads.by_node.setdefault(prompt.posted(node), {})[stack, hooks] = weakly(patcher)
            if node is not None:
                loaded = stack, samplings_in(prompt, node.id)
                loads.order.setdefault((node.id, stack.model), []).append(loaded)

    def of_prompt(self, prompt: PromptRecording) -> InUse:
        """The models of a prompt that is over."""
        at, self._prompts = self._prompts, self._prompts + 1
        loads = prompt.until_the_end(_NAME, _Loads)
        sampled, makers = sampled_in(prompt), makers_in(prompt)
        over, failed = _loaded_over(prompt, loads), not prompt.facts.get("success", True)
        ran: dict[str, list[NodeWatch]] = {"": []}
        for node in prompt.nodes.values():
            ran.setdefault(prompt.posted(node), []).append(node)
        now = {
            node_id: Uses(
                at,
                tuple(
                    Use(known[0].model, known[0].patches, dict.fromkeys(known[0].patches, LOADED_OVER))
                    if (node_id, known[0]) in over
                    else self._use(*known, alive, sampled.get(node_id), loads)
                    for known, alive in loads.by_node.get(node_id, {}).items()
                ),
                does := _done_by(
                    nodes,
                    failed=failed,
                    encodes=node_id in makers and _has_text_encoder(loads.by_node.get(node_id, {}).values()),
                ),
                None if does == "was cut" else sampled.get(node_id),
                makers.get(node_id),
            )
            for node_id, nodes in ran.items()
        }
        uses = [use for one in now.values() for use in one.models]
        loads.cancelled = frozenset(
            patch
            for patch in {patch for use in uses for patch in use.cancelled}
            if all(patch in use.cancelled for use in uses if patch in use.patches)
        )
        kept = self._kept.of_prompt(prompt, {node_id: [uses] for node_id, uses in now.items()})
        by_node = {**{node_id: uses for node_id, _, uses in kept}, **now}
        loads.in_use = InUse(at, _without_forgotten(by_node, prompt))
        return loads.in_use

    def _use(
        self,
        stack: _Stack,
        forced: State,
        alive: Callable[[], Any] | None,
        sampled: Sampled | None,
        loads: _Loads,
    ) -> Use:
        patcher = None if alive is None else alive()
        hooked: _Hooked = loads.hooked.get(stack.model, {})
        states = (
            []
            if sampled is None
            else [hooks for hooks, has_weight in sampled.states.items() if has_weight is not False]
        )
        if getattr(patcher, "is_clip", False):
            hooked, states = mapping(patcher, "hook_patches"), [forced]
        if not any(ref in hooked for state in states for ref, _ in state):
            cancelled = self._cancelled_on(stack, patcher)
            return Use(stack.model, stack.patches, cancelled, dict(stack.doubted), stack.changes)
        here = [_hooked_in(state, hooked) for state in states]
        patches = stack.patches.union(*(_identities(one) for one in here))
        if len(here) > _MOST_STATES or patcher is None:
            return Use(stack.model, patches, {})
        found = [
            (stack.patches | _identities(one), attempt(partial(_cancelled_in, patcher, one)).value or {})
            for one in here
        ]
        return Use(stack.model, patches, _in_all(found))

    def _cancelled_on(self, stack: _Stack, patcher: Any) -> Mapping[int, str]:
        if stack not in self._cancelled:
            found = attempt(partial(_cancelled_in, patcher)).value or {}
            self._cancelled[stack] = {patch: one.why for patch, one in found.items()}
            if len(self._cancelled) > _MOST_STACKS:
                self._cancelled.popitem(last=False)
        return self._cancelled[stack]


def _without_forgotten(by_node: Mapping[str, Uses], prompt: PromptRecording) -> dict[str, Uses]:
    """See `without_forgotten`, which this asks of what was kept too."""
    sampled = {node_id: uses.sampled for node_id, uses in by_node.items() if uses.sampled is not None}
    left = without_forgotten(sampled, prompt.graph, lost_in(prompt))
    return {node_id: uses._replace(sampled=left.get(node_id)) for node_id, uses in by_node.items()}


def _has_text_encoder(loaded: Iterable[Callable[[], Any] | None]) -> bool:
    return any(attribute(alive(), "is_clip") for alive in loaded if alive is not None)


def _stack_of(patcher: Any) -> _Stack:
    mark = getattr(patcher, "patches_uuid", None)
    held = mapping(patcher, "patches")
    doubts = {key: doubt for key in held if (doubt := doubt_of(patcher, key)) is not None}
    doubted = {(one, doubt) for key, doubt in doubts.items() for one in _identities_in([held[key]])}
    if any(map(_is_multiplied_away, held.values())):  # it is not known here which weights adapters lie beside
        doubted |= {(one, BESIDE_ZERO) for one in bypasses_of(patcher)}
    changes = frozenset(changes_of(patcher))
    return _Stack(id(patcher.model), frozenset(patches_of(patcher)), mark, frozenset(doubted), changes)


def doubt_of(patcher: Any, key: str) -> str | None:
    """Why a change of a weight may do nothing where it is; None: nothing is known that stands against it."""
    if getattr(patcher, "is_clip", False) and _is_skipped(patcher, key):
        return SKIPPED
    return BESIDE_ZERO if _is_beside_zero(patcher, key) else None


def _is_skipped(patcher: Any, key: str) -> bool:
    """Whether a weight lies in a layer after the one that a text encoder is told to take the text from: clip skip.

    The pooled output, which some models use, is taken from the last layer all the same.
    """
    name, _, rest = key.partition(".")
    encoder, layer = attribute(patcher.model, name), _LAYER.search(rest)
    taken, count = number(attribute(encoder, "layer_idx")), number(attribute(encoder, "num_layers"))
    if layer is None or taken is None or count is None or attribute(encoder, "layer") != "hidden":
        return False
    return int(layer[1]) > (taken + count if taken < 0 else taken)


def _is_beside_zero(patcher: Any, key: str) -> bool:
    """Whether a weight of an attention has another beside it that is multiplied with 0, or may have by a function on the attention."""
    found = [
        (key.removesuffix(f"{name}.weight"), names, at)
        for names in _PROJECTIONS
        for at, name in enumerate(names)
        if key.endswith(f".{name}.weight")
    ]
    if not found:
        return False
    ((attention, names, at),) = found
    held = getattr(patcher, "patches", None) or {}
    others = (f"{attention}{names[other]}.weight" for other in _FACTORS[at])
    options = lookup(lookup(attribute(patcher, "model_options"), "transformer_options"), "patches")
    kind = attention.rstrip(".").rpartition(".")[2]
    functions = (lookup(options, f"{kind}_{what}") for what in ("patch", "output_patch"))
    return any(_is_multiplied_away(held.get(other, ())) for other in others) or any(
        _holds_zero(function) for group in functions for function in sequence(group)
    )


def _is_multiplied_away(patches: Sequence[Any]) -> bool:
    """Whether patches multiply a weight with 0, and add nothing to it."""
    for strength, _, before, *_ in reversed(patches):
        if not _is_zero(strength):
            return False
        if _is_zero(before):
            return True
    return False


def _holds_zero(function: object) -> bool:
    """Whether a function was made with the number 0.0, such as to multiply with it."""
    cells = (attribute(cell, "cell_contents") for cell in sequence(attribute(function, "__closure__")))
    return any(isinstance(value, float) and value == 0 for value in cells)


def _loaded_over(prompt: PromptRecording, loads: _Loads) -> set[tuple[str, _Stack]]:
    """By node, models in whose place others of the same weights were loaded, whenever it loaded them, before it sampled.

    Clones share the weights. A node that samples with two of them samples with the one that it loaded last.
    """
    found: set[tuple[str, _Stack]] = set()
    for (node_id, _), loaded in loads.order.items():
        until = [*(at for _, at in loaded[1:]), samplings_in(prompt, node_id)]
        sampled = {
            stack for (stack, at), then in zip(loaded, until, strict=True) if then > at or at % 2
        }  # an odd number: one goes on
        if sampled:
            posted = prompt.posted(prompt.nodes.get(node_id))
            found |= {(posted, stack) for stack, _ in loaded if stack not in sampled}
    return found


def _done_by(nodes: Sequence[NodeWatch], *, failed: bool, encodes: bool) -> Does:
    """What a node of the posted graph did, with the nodes that it expanded into.

    Args:
        nodes: Both.
        failed: Whether the prompt did.
        encodes: Whether they gave conditionings, and put a text encoder on a device.
    """
    samplers = [node for node in nodes if node.is_sampler]
    if samplers:
        if failed and not any(node.seen_steps for node in samplers):
            return "was cut"
        return "samples nothing" if all(map(_makes_no_step, samplers)) else "samples"
    if any("progress" in node.facts for node in nodes):
        return "unknown"
    return "encodes" if encodes or any(TEXT_ENCODING in node.facts for node in nodes) else "other"


def _makes_no_step(sampler: NodeWatch) -> bool:
    """Whether a sampler was told to make no step, and made none."""
    told = sampler.facts.get(SAMPLING, {})
    steps, first, end = (told.get(name) for name in ("steps", "from_step", "to_step"))
    is_told = told.get("denoise") == 0 or steps == 0
    if isinstance(steps, int) and isinstance(first, int):
        is_told = is_told or first >= min(steps, end if isinstance(end, int) else steps)
    return is_told and sampler.seen_steps == 0


def _forced_on(patcher: Any) -> State:
    """The hooks that are in force whenever a text encoder encodes; none where a schedule has them in force for a time."""
    hooks = attribute(patcher, "forced_hooks")
    schedules = (attribute(hook, "hook_keyframe") for hook in sequence(attribute(hooks, "hooks")))
    return _NO_HOOKS if any(attribute(one, "keyframes") for one in schedules) else state_of(hooks)


def _hooked_in(state: State, hooked: _Hooked) -> _ByWeight:
    """The patches of the hooks of a state by weight, each with its identity, at the strength that the state has for it."""
    found: dict[str, list[_Held]] = {}
    for ref, strength in state:
        for key, entries in hooked.get(ref, {}).items():
            found.setdefault(key, []).extend((id(one), (one[0] * strength, *one[1:])) for one in entries)
    return found


def _in_all(states: Sequence[tuple[frozenset[int], Mapping[int, _Cancelled]]]) -> dict[int, str]:
    """The patches that are cancelled in each state that has them, together with what cancels them there.

    A hook that takes a LoRA out of one conditioning of several does something.

    Args:
        states: The patches of each, and those that are cancelled.
    """
    found = {
        patch: one.why
        for _, cancelled in states
        for patch, one in cancelled.items()
        if all(patch in others for held, others in states if patch in held)
    }
    left = -1
    while left != len(found):
        left = len(found)
        for _, cancelled in states:
            acting = {one.key for patch, one in cancelled.items() if patch not in found}
            found = {
                patch: why
                for patch, why in found.items()
                if patch not in cancelled or cancelled[patch].key not in acting
            }
    return found


def _identities(held: _ByWeight) -> frozenset[int]:
    return frozenset(identity for patches in held.values() for identity, _ in patches)


def _cancelled_in(patcher: Any, hooked: _ByWeight = MappingProxyType({})) -> dict[int, _Cancelled]:
    if patcher is None:
        return {}
    patches: list[AppliedPatch] = []
    identities: dict[tuple[str, int], int] = {}
    kept = kept_weights(patcher)
    for key in patcher.patches.keys() | hooked.keys():
        own = [(id(one), one) for one in sequence(patcher.patches.get(key))]
        leaves = attempt(partial(_leaves, [*own, *hooked.get(key, ())])).value or []
        weight = original_weight(patcher, key, kept) if len(leaves) > 1 else None
        for index, (identity, entry) in enumerate(leaves if len(leaves) > 1 else ()):
            patches += applied(PatcherEntry(key, entry, _TOGETHER), index, weight)
            identities[key, index] = identity
    return {
        identities[change.key, change.index]: _Cancelled(change.key, why)
        for change, why in cancelled_changes(ModelPatches(tuple(patches)))
    }


def _leaves(held: Sequence[_Held], times: float = 1.0) -> list[_Held]:
    """The patches of a weight, those of models that are merged into it too, each with what all others leave of its strength.

    Raises:
        ValueError: A merge changes a part of the weight.
    """
    found: list[_Held] = []
    for identity, (strength, change, before, *place) in reversed(held):
        is_merge = isinstance(change, list)
        if any(one is not None for one in place) and (is_merge or before != 1):
            raise ValueError("a merge changes a part of the weight")
        if is_merge:
            found += _leaves([(id(one), one) for one in change[1:]], times * strength)
        else:
            found.append((identity, (strength * times, change, 1.0, *place)))
        times *= before
    return found


def patches_of(patcher: Any) -> Iterator[int]:
    """The identities of a model's patches, as far as later ones leave them, and of its adapters beside the weights.

    A patch is (strength, change, strength of what was there before, …); that of a model which was merged into this one holds
    the other's patches. A merge that takes nothing of one of the two leaves out its patches.
    """
    yield from bypasses_of(patcher)
    yield from _identities_in((getattr(patcher, "patches", None) or {}).values())


def changes_of(patcher: Any) -> Iterator[int]:
    """The identities of what these patches change: a node that makes patches anew, of another strength, leaves them."""
    return (
        id(patch[1])
        for patch in _left_in((getattr(patcher, "patches", None) or {}).values())
        if len(patch) > 1
    )


def _identities_in(held: Iterable[Sequence[Any]]) -> Iterator[int]:
    return map(id, _left_in(held))


def _left_in(held: Iterable[Sequence[Any]]) -> Iterator[Any]:
    todo = list(held)
    while todo:
        for patch in reversed(todo.pop()):
            strength, change, before = (
                (*patch, None, None, None)[:3] if isinstance(patch, tuple) else (None,) * 3
            )
            if not _is_zero(strength):
                yield patch
                if isinstance(change, list):
                    todo.append(change)
            if _is_zero(before):
                break


def _is_zero(strength: object) -> bool:
    return isinstance(strength, int | float) and strength == 0
