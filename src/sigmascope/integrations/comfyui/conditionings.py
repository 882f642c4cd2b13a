"""The instrument that sees with which conditionings ComfyUI samples: their weight, their hooks, and where their texts came from.

A conditioning with a mask of zeros or of strength 0 is sampled like any other, and multiplied with 0. So is the positive one
where cfg is 0. A text that a node encoded is followed by the identity of its tensor, which nodes that set an area, a mask,
hooks or a range of steps hand on. What other nodes make of it has another identity, and may hold the text or not.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from sigmascope.integrations.comfyui.instruments import Instrument
from sigmascope.integrations.comfyui.needs import Need, output_data
from sigmascope.integrations.comfyui.posted_graph import signature_of
from sigmascope.integrations.comfyui.recording import PromptRecording
from sigmascope.integrations.comfyui.sampling import first_of
from sigmascope.integrations.comfyui.wraps import Call, Wrap
from sigmascope.probes.reading import attribute, number, sequence

_NAME: Final = "conditionings"
_UNKNOWN: Final = ""
"""In place of a node: nobody knows where a tensor came from."""
_POOLED: Final = "pooled_output"
_CFG_FUNCTIONS: Final = (
    "sampler_cfg_function",
    "sampler_pre_cfg_function",
    "sampler_post_cfg_function",
    "sampler_calc_cond_batch_function",
)
"""Options of a model, by which more than ComfyUI's own formula takes both conditionings."""
State = frozenset[tuple[object, float]]
"""Hooks that are in force together: ComfyUI's mark of each, and the strength that its schedule has then."""


def _takes(class_type: str, given: Mapping[str, Any]) -> dict[str, bool] | None:
    """Whether what ComfyUI's own node makes of conditionings holds each of these inputs; None: that is not known.

    Of several conditionings in an input these nodes take the first, or each by itself; of a longer one they may take a part.
    """
    pairs = [[*_pairs([value])] for value in given.values()]
    shapes = {text.shape for held in pairs for text, _ in held}
    if any(len(held) > 1 for held in pairs):
        return None
    if class_type == "ConditioningConcat":
        return {"conditioning_to": True, "conditioning_from": True}
    if class_type == "ConditioningMultiply" and (factor := number(given.get("multiplier"))) is not None:
        return {"conditioning": factor != 0}
    share = number(given.get("conditioning_to_strength"))
    if class_type == "ConditioningAverage" and share is not None and len(shapes) == 1:
        return {"conditioning_to": share != 0, "conditioning_from": share != 1}
    return None


class Origin(NamedTuple):
    """Of which nodes' texts a conditioning is made, by the nodes' signatures: surely, or perhaps."""

    sure: frozenset[str]
    maybe: frozenset[str] = frozenset()


_NOBODY_KNOWS: Final = Origin(frozenset(), frozenset({_UNKNOWN}))


class Sampled(NamedTuple):
    """With what a node made its steps.

    Attributes:
        states: The hooks of each conditioning, and whether it had any weight.
        texts: Of which nodes' texts the conditionings with a weight are made.
    """

    states: Mapping[State, bool]
    texts: Origin

    def holds(self, signatures: Iterable[str]) -> bool | None:
        """Whether the text of one of these nodes was among them; None: that is not known."""
        wanted = set(signatures)
        if wanted & self.texts.sure:
            return True
        return None if (wanted | {_UNKNOWN}) & self.texts.maybe else False

    def beside(self, other: "Sampled | None") -> "Sampled":
        """Both in one."""
        if other is None:
            return self
        states = {
            state: self.states.get(state, False) or has_weight for state, has_weight in other.states.items()
        }
        texts = Origin(self.texts.sure | other.texts.sure, self.texts.maybe | other.texts.maybe)
        return Sampled({**self.states, **states}, texts)


@dataclass(slots=True, eq=False)
class _Counted:
    """A conditioning in a node's steps: whether it has weight, and whether its tensors hold anything, or are zeros."""

    state: State
    origin: Origin
    holds: bool | Tensor
    weight: bool | Tensor
    has_area: bool


@dataclass(slots=True, eq=False)
class _Seen:
    """Of one prompt.

    Attributes:
        counted: By node, the conditionings that it sampled with.
        known: Those of which nothing new is to be found out: by ComfyUI's mark, whether cfg leaves them out, and their hooks.
        texts: By ComfyUI's mark, of what texts a conditioning is made, and whether its tensors hold anything.
        signatures: Of nodes.
        makers: By node of the posted graph, the signature of one that made a conditioning.
        sampled: See `sampled_in`; None: it was not asked for yet.
    """

    counted: dict[str, list[_Counted]] = field(default_factory=dict)
    known: set[tuple[object, bool, State]] = field(default_factory=set)
    texts: dict[object, tuple[Origin, bool | Tensor]] = field(default_factory=dict)
    signatures: dict[str, str] = field(default_factory=dict)
    makers: dict[str, str] = field(default_factory=dict)
    sampled: dict[str, Sampled] | None = None


def _leaves_positive_out(call: Call) -> bool:
    """With cfg 0 the positive conditioning is multiplied with 0, unless a function sees it."""
    if call.get("cond_scale") != 0:
        return False
    return not any(map((call.get("model_options") or {}).get, _CFG_FUNCTIONS))


class Conditionings(Instrument):
    """Wraps `get_area_and_mult` and `sampling_function` of `comfy.samplers`, and `execution.get_output_data`."""

    name = _NAME
    gives = "which conditionings sampling counts"
    needs = (
        Need("comfy.samplers", "get_area_and_mult", ("conds",), False),
        Need("comfy.samplers", "sampling_function", ("cond", "cond_scale", "model_options"), False),
        output_data("obj", "input_data_all"),
    )

    def put_on(self) -> None:
        """See `Instrument`."""
        self._origins: dict[int, tuple[weakref.ref[Tensor], Origin]] = {}
        self._known: set[object] = set()
        self._left_out: frozenset[int] = frozenset()
        self.wraps.append(Wrap(self.needs[0], self, wants=self._may_be_new, after=self._weighed))
        self.wraps.append(
            Wrap(
                self.needs[1],
                self,
                wants=_leaves_positive_out,
                before=self._begins_step,
                after=self._ended_step,
            )
        )
        self.wraps.append(Wrap(self.needs[2], self, after=self._outputs))

    def _begins_step(self, call: Call) -> None:
        """Of the positive conditioning, which is multiplied with 0, a copy for the other side has the same mark."""
        self._left_out = frozenset(map(id, call.get("cond") or ()))

    def _ended_step(self, _call: Call, _known: None, _result: object, _error: BaseException | None) -> None:
        self._left_out = frozenset()

    def _may_be_new(self, call: Call) -> bool:
        return bool(self._left_out) or call.get("conds").get("uuid") not in self._known

    def _begin_prompt(self) -> _Seen:
        self._known.clear()
        return _Seen()

    def _weighed(self, call: Call, _known: None, result: Any, error: BaseException | None) -> None:
        prompt = self.prompt_here()
        if prompt is None or error is not None or (node := self.node_here()) is None:
            return
        given, seen = call.get("conds"), prompt.until_the_end(_NAME, self._begin_prompt)
        counted_here = seen.counted.setdefault(node.id, [])
        if result is None:  # it is not for this step
            return
        state, is_left_out = state_of(getattr(result, "hooks", None)), id(given) in self._left_out
        mark = given.get("uuid"), is_left_out, state
        if mark in seen.known:
            return
        is_plain = "mask" not in given and isinstance(given.get("strength", 1.0), int | float)
        weight: bool | Tensor = not is_left_out
        # A default one gets its weight later, and is left out if it has none.
        if weight and "default" not in given:
            weight = given.get("strength", 1.0) != 0 if is_plain else result.mult.any()
        text = seen.texts.get(mark[0]) or self._text_of(given)
        counted_here.append(_Counted(state, *text, weight, "area" in given))
        if mark[0] is None:  # it is told from no other
            return
        seen.known.add(mark)
        seen.texts[mark[0]] = text
        if not state and not is_left_out:
            self._known.add(mark[0])

    def _text_of(self, given: Mapping[str, Any]) -> tuple[Origin, bool | Tensor]:
        """Of what texts a conditioning is made, and whether its tensors hold anything but zeros."""
        text = given.get("cross_attn")
        others = [one for name, one in given.items() if name != "cross_attn" and isinstance(one, Tensor)]
        origins = [known for one in others if (known := self._origin_of(one)) is not None]
        pooled = given.get(_POOLED)
        if isinstance(pooled, Tensor) and self._origin_of(pooled) is None:
            origins.append(_NOBODY_KNOWS)
        own = _NOBODY_KNOWS if not isinstance(text, Tensor) else self._origin_of(text) or _NOBODY_KNOWS
        maybe = own.maybe.union(*(one.sure | one.maybe for one in origins)) - own.sure
        if not maybe or not isinstance(text, Tensor):
            return Origin(own.sure, maybe), True
        tensors = [text, *(one for one in others if one is pooled or self._origin_of(one) is not None)]
        is_apart = len({one.device for one in tensors}) > 1  # they cannot be asked together without a wait
        return Origin(own.sure, maybe), is_apart or torch.stack([one.any() for one in tensors]).any()

    def _origin_of(self, tensor: Tensor) -> Origin | None:
        kept, origin = self._origins.get(id(tensor), (None, None))
        return origin if kept is not None and kept() is tensor else None

    def _outputs(self, call: Call, _known: None, result: Any, error: BaseException | None) -> None:
        """What a node made of conditionings, or of a text."""
        kinds = [str(kind) for kind in getattr(call.get("obj"), "RETURN_TYPES", ())]
        prompt, inputs = self.session.prompt_of(call.get("prompt_id")), call.get("input_data_all")
        if (
            "CONDITIONING" not in kinds
            or prompt is None
            or error is not None
            or not isinstance(inputs, Mapping)
        ):
            return
        node = prompt.nodes.get(str(call.get("unique_id")))
        posted = prompt.posted(node)
        made = [pair for kind, values in zip(kinds, result[0] or (), strict=False) if kind == "CONDITIONING"
                for pair in _pairs(values)]  # fmt: skip
        if node is None or not posted or all(self._origin_of(text) is not None for text, _ in made):
            return
        seen = prompt.until_the_end(_NAME, self._begin_prompt)
        own = seen.makers[posted] = signature_of(prompt.graph, posted, seen.signatures)
        origin = self._made_of(node.class_type, inputs, own)
        for text, more in made:
            with_text = more.values() if "clip" in inputs else (more.get(_POOLED),)
            for tensor in (text, *with_text):
                if isinstance(tensor, Tensor) and self._origin_of(tensor) is None:
                    self._remember(tensor, origin)

    def _made_of(self, class_type: str, inputs: Mapping[str, Any], own: str) -> Origin:
        takes = _takes(class_type, {name: first_of(value) for name, value in inputs.items()})
        sure, maybe = {own}, set[str]()
        for name, value in inputs.items():
            for text, more in _pairs(value):
                for tensor in (text, more.get(_POOLED)):
                    before = self._origin_of(tensor) or _NOBODY_KNOWS if isinstance(tensor, Tensor) else None
                    if before is None or (takes is not None and not takes.get(name, True)):
                        continue
                    (maybe if takes is None or tensor is not text else sure).update(before.sure)
                    maybe.update(before.maybe)
        return Origin(frozenset(sure), frozenset(maybe - sure))

    def _remember(self, tensor: Tensor, origin: Origin) -> None:
        at, origins = id(tensor), self._origins

        def forget(kept: weakref.ref[Tensor]) -> None:
            if origins.get(at, (None,))[0] is kept:
                del origins[at]

        origins[at] = weakref.ref(tensor, forget), origin


def state_of(hooks: object) -> State:
    """The hooks of a group, each with its strength of this moment."""
    held = sequence(attribute(hooks, "hooks"))
    found = ((attribute(hook, "hook_ref"), number(attribute(hook, "strength"))) for hook in held)
    return frozenset((ref, 1.0 if strength is None else strength) for ref, strength in found)


def sampled_in(prompt: PromptRecording) -> dict[str, Sampled]:
    """With what each node of the posted graph made its steps, with those that it expanded into. At the prompt's end: it waits."""
    seen = prompt.until_the_end(_NAME, _Seen)
    if seen.sampled is None:
        seen.sampled = _sampled(prompt, seen)
    return seen.sampled


def _sampled(prompt: PromptRecording, seen: _Seen) -> dict[str, Sampled]:
    found: dict[str, Sampled] = {}
    for node_id, counted in seen.counted.items():
        states: dict[State, bool] = {}
        sure, maybe = set[str](), set[str]()
        if any(
            one.has_area for one in counted
        ):  # ComfyUI makes copies of these for the other side, with its texts
            maybe.add(_UNKNOWN)
        for one in counted:
            has_weight = bool(one.weight)
            states[one.state] = states.get(one.state, False) or has_weight
            if has_weight and bool(one.holds):
                sure |= one.origin.sure
                maybe |= one.origin.maybe
        posted = prompt.posted(prompt.nodes.get(node_id))
        now = Sampled(states, Origin(frozenset(sure), frozenset(maybe)))
        found[posted] = now.beside(found.get(posted))
    return found


def makers_in(prompt: PromptRecording) -> Mapping[str, str]:
    """The nodes of the posted graph that made a conditioning, each with its signature."""
    return prompt.until_the_end(_NAME, _Seen).makers


def _pairs(values: object) -> Iterator[tuple[Tensor, Mapping[str, Any]]]:
    """The conditionings in what a node is given or gives: pairs of a tensor and what is set for it."""
    for value in sequence(values):
        for pair in sequence(value):
            parts = sequence(pair)
            if len(parts) == 2 and isinstance(parts[0], Tensor) and isinstance(parts[1], Mapping):
                yield parts[0], parts[1]


INSTRUMENT = Conditionings
