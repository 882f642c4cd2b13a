"""The instrument that sees with which conditionings ComfyUI samples: their weight, their hooks, and where their texts came from.

A conditioning with a mask of zeros or of strength 0 is sampled like any other, and multiplied with 0. So is the positive one
where cfg is 0. Where a model's own function, or a guider's own formula, may multiply one with 0, its weight is not known; nor
where the last step has no conditioning at all. A noise mask of zeros leaves nothing to any. A text that a node encoded is followed by the identity of its tensor, which nodes that set an area, a mask,
hooks or a range of steps hand on. What other nodes make of it has another identity, and may hold the text or not.
"""

import weakref
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from sigmascope.integrations.comfyui.instruments import Instrument
from sigmascope.integrations.comfyui.needs import Need, output_data
from sigmascope.integrations.comfyui.posted_graph import links_of, signature_of
from sigmascope.integrations.comfyui.recording import PromptRecording
from sigmascope.integrations.comfyui.sampling import LATENTS, first_of
from sigmascope.integrations.comfyui.wraps import Call, Wrap
from sigmascope.probes.reading import attribute, mapping, number, sequence

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
_MASK_FUNCTION: Final = "denoise_mask_function"
_TAKES_UNMASKED: Final = "cfg_pp"
"""Part of the names of ComfyUI's samplers that take what the model gave beside what the noise mask leaves of it."""
_RANGES: Final = ("start_percent", "end_percent", "clip_start_percent", "timestep_start", "timestep_end")
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
        states: The hooks of each conditioning, and whether it had any weight; None: that is not known.
        texts: Of which nodes' texts the conditionings with a weight are made.
        counts: Whether anything that the model gave counted; None: that is not known.
        is_masked: Whether the noise mask left nothing of the latent to sample.
        forgets: Whether it began from noise alone, so that nothing of the latent that it was given is left.
        is_forgotten: Whether what it made goes to nodes alone that forget it.
        may_be_lost: Whether it goes to nodes alone that forget it, or in whose output nothing may be left of it.
    """

    states: Mapping[State, bool | None]
    texts: Origin
    counts: bool | None
    is_masked: bool = False
    forgets: bool = False
    is_forgotten: bool = False
    may_be_lost: bool = False

    def forgotten(self) -> "Sampled":
        """The same, of which nothing counts."""
        states = dict.fromkeys(self.states, False)
        return self._replace(states=states, texts=Origin(frozenset()), counts=False, is_forgotten=True)

    def doubted(self) -> "Sampled":
        """The same, of which nothing may count."""
        states = {state: has_weight and None for state, has_weight in self.states.items()}
        texts = Origin(frozenset(), self.texts.sure | self.texts.maybe)
        return self._replace(states=states, texts=texts, counts=self.counts and None, may_be_lost=True)

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
            state: _any((self.states.get(state, False), has_weight))
            for state, has_weight in other.states.items()
        }
        texts = Origin(self.texts.sure | other.texts.sure, self.texts.maybe | other.texts.maybe)
        counts = _any((self.counts, other.counts))
        is_masked, forgets = self.is_masked and other.is_masked, self.forgets and other.forgets
        return Sampled({**self.states, **states}, texts, counts, is_masked, forgets)


@dataclass(slots=True, eq=False)
class _Counted:
    """A conditioning in a node's steps: whether it has weight, and whether its tensors hold anything, or are zeros.

    `is_left_out`: whether cfg multiplies it with 0, unless a function sees it. `is_open`: whether that, or a number of the
    guider's own formula, may multiply it with 0. Such a formula multiplies not all with 0.
    """

    state: State
    origin: Origin
    holds: bool | Tensor
    weight: bool | Tensor
    has_area: bool
    is_left_out: bool
    is_open: bool


class _Masked(NamedTuple):
    """A noise mask: whether any of it is other than 0, and whether the sampler takes nothing but what it leaves."""

    leaves: Tensor
    is_all: bool


class _Step(NamedTuple):
    """How a step takes conditionings.

    Attributes:
        left_out: The identities of those that are multiplied with 0.
        is_sure: Whether they are surely.
        is_open: Whether any may be.
    """

    left_out: frozenset[int] = frozenset()
    is_sure: bool = True
    is_open: bool = False


_PLAIN: Final = _Step()


@dataclass(slots=True, eq=False)
class _Seen:
    """Of one prompt.

    Attributes:
        counted: By node, the conditionings that it sampled with.
        known: Those of which nothing new is to be found out: by ComfyUI's mark, their text, how the step takes them, their hooks.
        texts: By ComfyUI's mark and its text, of what texts a conditioning is made, and whether its tensors hold anything.
        masks: By node, the noise mask of each time that it sampled; None: none.
        forgets: By node, of each time that it sampled, whether it began from noise alone.
        empty_at_last: Nodes whose last step had no conditioning.
        signatures: Of nodes.
        makers: By node of the posted graph, the signature of one that made a conditioning.
        sampled: See `sampled_in`; None: it was not asked for yet.
    """

    counted: dict[str, list[_Counted]] = field(default_factory=dict)
    known: set[tuple[object, ...]] = field(default_factory=set)
    texts: dict[tuple[object, int], tuple[Origin, bool | Tensor]] = field(default_factory=dict)
    masks: dict[str, list[_Masked | None]] = field(default_factory=dict)
    forgets: dict[str, list[bool | Tensor]] = field(default_factory=dict)
    empty_at_last: set[str] = field(default_factory=set)
    signatures: dict[str, str] = field(default_factory=dict)
    makers: dict[str, str] = field(default_factory=dict)
    sampled: dict[str, Sampled] | None = None


def _any(answers: Iterable[bool | None]) -> bool | None:
    known = {*answers}
    return True if True in known else None if None in known else False


def _has_zero(guider: object) -> bool:
    """Whether a guider has a number of its own that is 0, which it may multiply a conditioning with."""
    return any(
        isinstance(value, int | float) and value == 0 for value in vars(guider).values() if value is not False
    )


def _own_formula_has_zero(options: Mapping[str, Any] | None) -> bool:
    """Whether a model's options have a formula in place of cfg's, which holds a number that is 0."""
    formula = (options or {}).get("sampler_cfg_function")
    cells = (attribute(cell, "cell_contents") for cell in sequence(attribute(formula, "__closure__")))
    return any(isinstance(value, int | float) and value == 0 and value is not False for value in cells)


def _has_ranges(guider: object) -> bool:
    """Whether some of a guider's conditionings are for a range of the steps."""
    sides = mapping(guider, "conds").values()
    return any(name in one for side in sides for one in side or () for name in _RANGES)


class Conditionings(Instrument):
    """Wraps functions of `comfy.samplers` and methods of its `CFGGuider`, and `execution.get_output_data`."""

    name = _NAME
    gives = "which conditionings sampling counts"
    needs = (
        Need("comfy.samplers", "get_area_and_mult", ("conds",), False),
        Need("comfy.samplers", "sampling_function", ("cond", "cond_scale", "model_options"), False),
        Need("comfy.samplers", "CFGGuider.outer_predict_noise", ("self",), False),
        Need("comfy.samplers", "CFGGuider.inner_sample", ("self", "sampler", "denoise_mask"), False),
        output_data("obj", "input_data_all"),
    )

    def put_on(self) -> None:
        """See `Instrument`."""
        self._origins: dict[int, tuple[weakref.ref[Tensor], Origin]] = {}
        self._known: set[object] = set()
        self._step = _PLAIN
        self._is_empty: bool | None = None
        add, weighs, _, _, samples, gives = self.wraps.append, *self.needs
        add(Wrap(weighs, self, wants=self._may_be_new, after=self._weighed))
        add(Wrap(samples, self, before=self._samples, after=self._ended_sampling))
        add(Wrap(gives, self, after=self._outputs))
        self._of_steps: list[Wrap] = []

    def _hear_steps(self) -> None:
        """Until this sampling ends. Where nothing can be multiplied with 0, steps are not heard, which costs each of them."""
        steps, guides = self.needs[1:3]
        self._of_steps = [
            Wrap(steps, self, wants=self._is_odd, before=self._begins_step, after=self._ended_step),
            Wrap(guides, self, before=self._begins_guiding, after=self._ended_guiding),
        ]
        self.wraps += self._of_steps

    def _is_odd(self, call: Call) -> bool:
        options = call.get("model_options")
        return self._step is not _PLAIN or call.get("cond_scale") == 0 or _own_formula_has_zero(options)

    def _begins_step(self, call: Call) -> _Step:
        """With cfg 0 the positive one is multiplied with 0, unless a function sees it. Its copy for the other side is not."""
        before, is_zero = self._step, call.get("cond_scale") == 0
        is_seen = any(map((call.get("model_options") or {}).get, _CFG_FUNCTIONS))
        left_out = frozenset(map(id, call.get("cond") or ())) if is_zero else frozenset()
        is_open = _own_formula_has_zero(call.get("model_options"))
        self._step = _Step(left_out, not is_seen, is_open) if is_zero or is_open else _PLAIN
        return before

    def _ended_step(self, _call: Call, before: _Step, _result: object, _error: BaseException | None) -> None:
        self._step = before

    def _own_formula(self) -> object:
        return self.needs[2].owner().predict_noise

    def _begins_guiding(self, call: Call) -> None:
        guider = call.get("self")
        is_open = type(guider).predict_noise is not self._own_formula() and _has_zero(guider)
        self._step = _Step(is_open=True) if is_open else _PLAIN
        self._is_empty = True if _has_ranges(guider) else None

    def _ended_guiding(
        self, _call: Call, _known: None, _result: object, _error: BaseException | None
    ) -> None:
        is_empty, self._is_empty, self._step = self._is_empty, None, _PLAIN
        prompt, node = self.prompt_here(), self.node_here()
        if is_empty is None or prompt is None or node is None:
            return
        nodes = prompt.until_the_end(_NAME, self._begin_prompt).empty_at_last
        (nodes.add if is_empty else nodes.discard)(node.id)

    def _samples(self, call: Call) -> None:
        """A node begins to sample a latent, with a noise mask or not."""
        guider, of_model = call.get("self"), mapping(call.get("self"), "model_options")
        if not self._of_steps and (
            _has_zero(guider) or _own_formula_has_zero(of_model) or _has_ranges(guider)
        ):
            self._hear_steps()
        prompt, node, mask = self.prompt_here(), self.node_here(), call.get("denoise_mask")
        if prompt is None or node is None:
            return
        sampler = call.get("sampler")
        function = getattr(attribute(sampler, "sampler_function"), "__name__", _TAKES_UNMASKED)
        is_all = type(sampler).__name__ == "KSAMPLER" and _TAKES_UNMASKED not in function
        masked = (
            _Masked(mask.any(), is_all and _MASK_FUNCTION not in of_model)
            if isinstance(mask, Tensor)
            else None
        )
        seen = prompt.until_the_end(_NAME, self._begin_prompt)
        seen.masks.setdefault(node.id, []).append(masked)
        seen.forgets.setdefault(node.id, []).append(_forgets(guider, sampler, call.get("sigmas"), mask))
        _samplings(prompt)[node.id] += 1

    def _ended_sampling(
        self, _call: Call, _known: None, _result: object, _error: BaseException | None
    ) -> None:
        prompt, node = self.prompt_here(), self.node_here()
        if prompt is not None and node is not None:
            _samplings(prompt)[node.id] += 1
        for wrap in self._of_steps:
            if wrap in self.wraps:  # else the session has ended meanwhile
                self.wraps.remove(wrap)
            wrap.take_off()
        self._of_steps = []

    def _may_be_new(self, call: Call) -> bool:
        is_plain = self._step is _PLAIN and self._is_empty is None
        return not is_plain or call.get("conds").get("uuid") not in self._known

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
        state, step = state_of(getattr(result, "hooks", None)), self._step
        is_left_out = id(given) in step.left_out
        is_open = step.is_open or (is_left_out and not step.is_sure)
        is_plain = "mask" not in given and isinstance(given.get("strength", 1.0), int | float)
        is_off = (is_left_out and step.is_sure) or (is_plain and given.get("strength", 1.0) == 0)
        if self._is_empty and not is_off:
            self._is_empty = False
        text = self._text_in(given)
        mark = given.get("uuid"), id(text), is_left_out, is_open, state
        if mark in seen.known:
            return
        # A default one gets its weight later, and is left out if it has none.
        weight: bool | Tensor = not is_left_out or not step.is_sure
        if weight and "default" not in given:
            weight = not is_off if is_plain else result.mult.any()
        known = seen.texts.get(mark[:2]) or self._text_of(given, text)
        counted_here.append(_Counted(state, *known, weight, "area" in given, is_left_out, is_open))
        if mark[0] is None:  # it is told from no other
            return
        seen.known.add(mark)
        seen.texts[mark[:2]] = known
        if not state and not is_left_out and not is_open and "area" not in given:
            self._known.add(mark[0])

    def _text_in(self, given: Mapping[str, Any]) -> object:
        """The text that the model takes: in a copy for the other side that is not the one that it was copied with."""
        taken = attribute((given.get("model_conds") or {}).get("c_crossattn"), "cond")
        is_known = isinstance(taken, Tensor) and self._origin_of(taken) is not None
        return taken if is_known else given.get("cross_attn")

    def _text_of(self, given: Mapping[str, Any], text: object) -> tuple[Origin, bool | Tensor]:
        """Of what texts a conditioning is made, and whether its tensors hold anything but zeros."""
        is_copy = text is not given.get("cross_attn")
        others = [
            one
            for name, one in given.items()
            if name != "cross_attn" and isinstance(one, Tensor) and not is_copy
        ]
        origins = [known for one in others if (known := self._origin_of(one)) is not None]
        pooled = None if is_copy else given.get(_POOLED)
        if isinstance(pooled, Tensor) and self._origin_of(pooled) is None:
            origins.append(_NOBODY_KNOWS)
        own = _NOBODY_KNOWS if not isinstance(text, Tensor) else self._origin_of(text) or _NOBODY_KNOWS
        maybe = own.maybe.union(*(one.sure | one.maybe for one in origins)) - own.sure
        if not isinstance(text, Tensor):
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
        own = signature_of(prompt.graph, posted, seen.signatures)
        if node.id != posted and any(pair for value in inputs.values() for pair in _pairs(value)):
            own = f"{own} {node.id}"  # what it was expanded into has made that of an encoding of its own
        else:
            seen.makers[posted] = own
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


def without_forgotten(
    by_node: Mapping[str, Sampled], graph: Mapping[str, Any], lost: Mapping[str, Iterable[str]]
) -> dict[str, Sampled]:
    """The same, where nothing counts of what a node sampled that goes to samplers alone which begin from noise.

    Where it goes to nodes that may leave nothing of it, it may not count either.

    Args:
        by_node: With what each node made its steps.
        graph: As it was posted.
        lost: As `lost_in` gives it.
    """
    takers: dict[str, list[tuple[str, str]]] = {}
    for taker, node in graph.items():
        for name, (source, _) in links_of(node):
            takers.setdefault(source, []).append((taker, name))
    forgetting = {(node_id, name) for node_id, one in by_node.items() if one.forgets for name in LATENTS}
    losing = {(node_id, name) for node_id, names in lost.items() for name in names}

    def is_lost(node_id: str, by: Container[tuple[str, str]], known: dict[str, bool]) -> bool:
        if node_id not in known:
            known[node_id] = False  # of a circle, and where nobody takes it
            taken = takers.get(node_id, ())
            known[node_id] = bool(taken) and all(one in by or is_lost(one[0], by, known) for one in taken)
        return known[node_id]

    surely: dict[str, bool] = {}
    maybe: dict[str, bool] = {}
    found = dict(by_node)
    for node_id, sampled in by_node.items() if forgetting or losing else ():
        if is_lost(node_id, forgetting, surely):
            found[node_id] = sampled.forgotten()
        elif is_lost(node_id, forgetting | losing, maybe):
            found[node_id] = sampled.doubted()
    return found


def _sampled(prompt: PromptRecording, seen: _Seen) -> dict[str, Sampled]:
    found: dict[str, Sampled] = {}
    for node_id, counted in seen.counted.items():
        states: dict[State, bool | None] = {}
        sure, maybe = set[str](), set[str]()
        if any(
            one.has_area for one in counted
        ):  # ComfyUI makes copies of these for the other side, with its texts
            maybe.add(_UNKNOWN)
        leaves = _any(map(_leaves, seen.masks.get(node_id, [None])))
        is_open = leaves is None or node_id in seen.empty_at_last
        counts: bool | None = False
        for one in counted:
            has_weight: bool | None = leaves is not False and bool(one.weight)
            if has_weight and (is_open or one.is_open):
                has_weight = None
            is_among = has_weight is None and not is_open and not one.is_left_out
            counts = _any((counts, is_among or has_weight))
            states[one.state] = _any((states.get(one.state, False), has_weight))
            if has_weight is not False and bool(one.holds):
                (maybe if has_weight is None else sure).update(one.origin.sure)
                maybe |= one.origin.maybe
        posted = prompt.posted(prompt.nodes.get(node_id))
        forgets = node_id == posted and all(map(bool, seen.forgets.get(node_id, [False])))
        texts = Origin(frozenset(sure), frozenset(maybe - sure))
        now = Sampled(states, texts, counts, leaves is False, forgets)
        found[posted] = now.beside(found.get(posted))
    return found


def _forgets(guider: object, sampler: object, sigmas: object, mask: object) -> bool | Tensor:
    """Whether a sampling begins from noise alone: a flow model takes (1 - sigma) of the latent, and the first sigma is 1."""
    model = attribute(guider, "inner_model")
    kinds = {kind.__name__ for kind in type(attribute(model, "model_sampling")).__mro__}
    takes_latent = (
        mask is not None or bool(attribute(model, "concat_keys")) or type(sampler).__name__ != "KSAMPLER"
    )
    if takes_latent or "CONST" not in kinds or not isinstance(sigmas, Tensor) or not len(sigmas):
        return False
    return sigmas[0] == 1


def _leaves(masked: _Masked | None) -> bool | None:
    """Whether a noise mask leaves anything of a latent to sample; None: that is not known."""
    if masked is None or bool(masked.leaves):
        return True
    return False if masked.is_all else None


def samplings_in(prompt: PromptRecording, node_id: str) -> int:
    """How often a sampling of a node began or ended so far: odd while one goes on."""
    return _samplings(prompt)[node_id]


def _samplings(prompt: PromptRecording) -> Counter[str]:
    return prompt.until_the_end("samplings", Counter[str])


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
