"""What models had on them each time that a node put them on a device: patches, and which of those cancel each other there.

A node whose output ComfyUI kept put its models on a device when it ran. What they had then is kept like that output.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from sigmascope.integrations.comfyui.encodings import TEXT_ENCODING
from sigmascope.integrations.comfyui.instruments import weakly
from sigmascope.integrations.comfyui.kept_loras import Kept
from sigmascope.integrations.comfyui.recording import NODE, NodeWatch, PromptRecording
from sigmascope.integrations.comfyui.sampling import SAMPLING
from sigmascope.probes.comfyui_patcher import bypasses_of, identities_of
from sigmascope.probes.reading import attempt
from sigmascope.stages.lora_on_model import cancelled_changes
from sigmascope.stages.model_snapshot import read_model_patches

_MOST_NODES: Final = 1000
_MOST_STACKS: Final = 50
_NAME: Final = "models_in_use"


class Use(NamedTuple):
    """A model as a node put it on a device.

    Attributes:
        model: Its identity.
        patches: Those of its patches, and of its adapters beside the weights, as far as later ones leave them.
        cancelled: Of these the ones that cancel each other, each with the id of the verdict.
    """

    model: int
    patches: frozenset[int]
    cancelled: Mapping[int, str]

    def leaves(self, patches: frozenset[int]) -> bool:
        """Whether some of these patches act."""
        return any(patch not in self.cancelled for patch in self.patches & patches)


class Uses(NamedTuple):
    """What a node did with models.

    Attributes:
        at: How many prompts before that one were watched.
        models: Those that it put on a device.
        does: "samples", "samples nothing" (it was told to make no step), "encodes" a text, or "other"; "unknown": it went
            through something by a bar of its own.
    """

    at: int
    models: tuple[Use, ...]
    does: Literal["samples", "samples nothing", "encodes", "other", "unknown"]


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


class _Stack(NamedTuple):
    """A model and its patches; `mark` is ComfyUI's for these, since identities are given anew."""

    model: int
    patches: frozenset[int]
    mark: Hashable


class _Loads:
    """Of one prompt: by node, the models that it put on a device."""

    def __init__(self) -> None:
        self.by_node: dict[str, dict[_Stack, Callable[[], Any] | None]] = {}


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
            loads = prompt.until_the_end(_NAME, _Loads).by_node
            loads.setdefault(_posted(prompt, node), {})[stack] = weakly(patcher)

    def of_prompt(self, prompt: PromptRecording) -> InUse:
        """The models of a prompt that is over."""
        at, self._prompts = self._prompts, self._prompts + 1
        loads = prompt.until_the_end(_NAME, _Loads).by_node
        ran: dict[str, list[NodeWatch]] = {"": []}
        for node in prompt.nodes.values():
            ran.setdefault(_posted(prompt, node), []).append(node)
        now = {
            node_id: Uses(
                at, tuple(self._use(*known) for known in loads.get(node_id, {}).items()), _done_by(nodes)
            )
            for node_id, nodes in ran.items()
        }
        kept = self._kept.of_prompt(prompt, {node_id: [uses] for node_id, uses in now.items()})
        return InUse(at, {**{node_id: uses for node_id, _, uses in kept}, **now})

    def _use(self, stack: _Stack, alive: Callable[[], Any] | None) -> Use:
        if stack not in self._cancelled:
            patcher = None if alive is None else alive()
            self._cancelled[stack] = attempt(partial(_cancelled_in, patcher)).value or {}
            if len(self._cancelled) > _MOST_STACKS:
                self._cancelled.popitem(last=False)
        return Use(stack.model, stack.patches, self._cancelled[stack])


def _stack_of(patcher: Any) -> _Stack:
    mark = getattr(patcher, "patches_uuid", None)
    return _Stack(id(patcher.model), frozenset(patches_of(patcher)), mark)


def _done_by(
    nodes: Sequence[NodeWatch],
) -> Literal["samples", "samples nothing", "encodes", "other", "unknown"]:
    """What a node of the posted graph did, with the nodes that it expanded into."""
    samplers = [node for node in nodes if node.is_sampler]
    if samplers:
        return "samples nothing" if all(map(_makes_no_step, samplers)) else "samples"
    if any("progress" in node.facts for node in nodes):
        return "unknown"
    return "encodes" if any(TEXT_ENCODING in node.facts for node in nodes) else "other"


def _makes_no_step(sampler: NodeWatch) -> bool:
    """Whether a sampler was told to make no step, and made none."""
    told = sampler.facts.get(SAMPLING, {})
    steps, first, end = (told.get(name) for name in ("steps", "from_step", "to_step"))
    is_told = told.get("denoise") == 0 or steps == 0
    if isinstance(steps, int) and isinstance(first, int):
        is_told = is_told or first >= min(steps, end if isinstance(end, int) else steps)
    return is_told and sampler.seen_steps == 0


def _posted(prompt: PromptRecording, node: NodeWatch | None) -> str:
    """The node of the posted graph that a node is, or that it came from; "" if there is none."""
    while node is not None and node.id not in prompt.graph:
        node = prompt.nodes.get(node.facts[NODE]["parent"])
    return "" if node is None else node.id


def _cancelled_in(patcher: Any) -> dict[int, str]:
    if patcher is None or not any(len(patches) > 1 for patches in patcher.patches.values()):
        return {}
    identities = identities_of(patcher)
    return {
        identities[change.key, change.index]: why
        for change, why in cancelled_changes(read_model_patches(patcher))
        if (change.key, change.index) in identities
    }


def patches_of(patcher: Any) -> Iterator[int]:
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
