"""What was merged into models before a watch first saw them: nobody has the weights before.

A model's weights do not tell what is in them that is not theirs. The books do while adapters are merged: PEFT lists them.
Once one is taken out, the strength decides that is set then, which need not be that of the merging, and a part of it may stay.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Final
from weakref import WeakKeyDictionary

from torch import nn

from sigmascope.analysis.lora_facts import acts_at
from sigmascope.integrations.diffusers.recipe import models_in, strengths_of
from sigmascope.monitor.hooks import ByIdentity
from sigmascope.probes.module_tree import tree_of
from sigmascope.probes.peft import adapters_of, read_adapters, standings_in
from sigmascope.probes.reading import attribute

_FUSED_INTO_MODEL: Final = "_safe_fusing"
_FUSED_BY_PIPELINE: Final = "_merged_adapters"
"""What diffusers' `fuse_lora` leaves on a model, and on a pipeline, for good."""


@dataclass(slots=True)
class _Seen:
    """What was merged into a model when it was first seen, and whether nobody knows what of it is in the weights.

    `strengths` are the least and largest that the adapters had then; `at_zero` are their names if all had strength 0.
    """

    merged: "WeakKeyDictionary[nn.Module, frozenset[str]]"
    is_open: bool
    strengths: Mapping[str, tuple[float, float]]
    at_zero: frozenset[str] = frozenset()

    def has_been_taken_out(self, model: nn.Module) -> bool:
        """Whether some of it is no longer merged though its layers are there."""
        gone = (
            (layer, names)
            for layer, merged in (_merged_in(model) if self.merged else ())
            if (names := self.merged.get(layer, frozenset()) - merged)
        )
        return any(not names.isdisjoint(adapters_of(layer)) for layer, names in gone)


class MergedBefore:
    """The models that a watch has seen, with what had been merged into them."""

    def __init__(self) -> None:
        self._seen: ByIdentity[_Seen] = ByIdentity()

    def see(self, target: object) -> None:
        """Look at the models of a pipeline, or one alone, that were not seen yet."""
        models = models_in(target)
        for name, model in models.items():
            if self._seen.get(model) is not None:
                continue
            merged = WeakKeyDictionary((layer, names) for layer, names in _merged_in(model) if names)
            was_fused = _FUSED_INTO_MODEL in vars(model) or _fused_by_pipeline(target, name, model)
            is_open = not _act_as_merged(model) if merged else was_fused
            adapters = frozenset(chain.from_iterable(merged.values()))
            strengths = strengths_of(model, adapters) if adapters else {}
            at_zero = adapters if is_open else frozenset[str]()
            self._seen.put(model, _Seen(merged, is_open, strengths, at_zero))

    def open_in(self, target: object) -> list[str]:
        """The models of a pipeline, or the one alone, of which nobody knows what of it is still in their weights."""
        self.see(target)
        found = []
        for name, model in models_in(target).items():
            seen = self._seen.get(model)
            if seen is None:
                continue
            seen.is_open = seen.is_open or seen.has_been_taken_out(model)
            if seen.is_open:
                found.append(name)
        return found

    def at_zero_in(self, target: object) -> set[str]:
        """The LoRAs, such as "unet.style", that were merged with strength 0: what they add now may be missing in the weights."""
        return {f"{name}.{adapter}" for name, one in self._seen_in(target) for adapter in one.at_zero}

    def strengths_in(self, target: object) -> dict[str, tuple[float, float]]:
        """The least and largest strengths that LoRAs, such as "unet.style", had when they were first seen, of those that were merged."""
        return {
            f"{name}.{adapter}": strengths
            for name, one in self._seen_in(target)
            for adapter, strengths in one.strengths.items()
        }

    def _seen_in(self, target: object) -> Iterator[tuple[str, _Seen]]:
        for name, model in models_in(target).items():
            if (seen := self._seen.get(model)) is not None:
                yield name, seen


def _merged_in(model: nn.Module) -> Iterator[tuple[nn.Module, frozenset[str]]]:
    """The layers of adapters, each with those that PEFT lists as merged into it."""
    tree = tree_of(model)
    standings = standings_in(tree)
    for place, adapters in zip(standings.places, standings.merged, strict=True):
        yield tree.modules[place], frozenset(map(str, adapters or ()))


def _act_as_merged(model: nn.Module) -> bool:
    """Whether some of what is merged has a strength, or is of a kind, with which it is something."""
    patches = read_adapters(model).value
    return patches is None or any(
        acts_at(patch.strength, patch.adapter_type) for patch in patches if patch.state == "merged"
    )


def _fused_by_pipeline(pipeline: object, name: str, model: nn.Module) -> bool:
    """Whether a pipeline that has fused may have done so in a model that keeps no mark: a text encoder, while nothing is merged."""
    if hasattr(type(model), "fuse_lora") or _FUSED_BY_PIPELINE not in (attribute(pipeline, "__dict__") or ()):
        return False
    is_loadable = name in (attribute(pipeline, "_lora_loadable_modules") or ())
    return is_loadable and not any(
        names for other in models_in(pipeline).values() for _, names in _merged_in(other)
    )
