"""Which weights a model has, and which an adapter: one short text each, made once and kept for as long as they stay.

A model's fingerprint is the hash of some elements of each of its weights (`probes.fingerprints.samples`), with their names,
shapes and types: a fine-tuning changes nearly all elements of the layers that it trains, a few of which are among them.
It can miss a change to single elements. A model's fingerprint leaves out adapters, which have their own.

Both are kept as long as nobody replaces a weight, writes to it, or merges an adapter: PyTorch counts what is written to
a tensor. It does not count writes to `weight.data`: a few elements of some weights are looked at each time, others than
the time before, and all are read again once one of these is another. Reading weights on an
accelerator waits for it; what begins with `begin_` does not, and gives what has been read once its bytes are there.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter, call, is_, itemgetter
from typing import Final, NamedTuple

import torch
import xxhash
from torch import Tensor, nn

from sigmascope.probes.accelerators import CAPTURED, is_capturing
from sigmascope.probes.adapted_modules import base_weights
from sigmascope.probes.copies import Pending, T
from sigmascope.probes.fingerprints import Fingerprint, begin_fingerprints, begin_samples, fingerprints
from sigmascope.probes.glimpses import Glimpses
from sigmascope.probes.models import (
    GROUP_OFFLOADING,
    named_modules_in,
    own_buffers,
    own_parameters,
    unwrap,
)
from sigmascope.probes.module_tree import tree_of
from sigmascope.probes.peft import adapters_of, by_adapter, number_for, standings_in
from sigmascope.probes.reading import PROBE_ERRORS, Reading, attempt, attribute
from sigmascope.probes.tensors import why_unreadable

_ELEMENTS_OF_EACH_WEIGHT: Final = 64
"""Elements of each weight: of weights that lie in a file still unread, as many pages are read."""
ON_DISK: Final = "its weights lie on a disk between its calls"
NO_WEIGHTS: Final = "it has no weights"


class _Held(NamedTuple):
    """What was read, with the state of the model's weights then, and some elements of what was read."""

    state: int
    reading: Pending[Reading[str]]
    glimpses: Glimpses


_Kept = dict[str, _Held]
_KEPT: "weakref.WeakKeyDictionary[nn.Module, _Kept]" = weakref.WeakKeyDictionary()
"""What was read of each model, with the state of its weights then: under "" of itself, else of an adapter."""


def model_fingerprint(model: object) -> Reading[str]:
    """Sixteen hexadecimal digits for the weights of a model without its adapters, or why there are none. Never raises.

    Equal for equal weights of one dtype, whatever device they are on. Takes 10 ms for a thousand weights; from then
    on less than one, until they change.

    Args:
        model: A module, or what wraps one.
    """
    return told(begin_model_fingerprint(model))


def begin_model_fingerprint(model: object, state: Reading[int] | None = None) -> Pending[Reading[str]]:
    """The same without waiting for an accelerator, whose weights may change from now on.

    Args:
        model: As above.
        state: What `state_of` gave of it just now, if that was asked for.
    """
    module = attempt(lambda: unwrap(model)).value
    if module is None:
        return known(Reading(None, NO_WEIGHTS))
    return _kept(module, "", state or state_of(module), lambda: _of_model(module))


def adapter_fingerprint(model: nn.Module, adapter: str) -> Reading[str]:
    """The same for all tensors of an adapter that PEFT put on a model, with their ranks and alphas."""
    return told(begin_adapter_fingerprint(model, adapter))


def begin_adapter_fingerprint(
    model: nn.Module, adapter: str, state: Reading[int] | None = None
) -> Pending[Reading[str]]:
    """The same without waiting for an accelerator, whose tensors may change from now on."""
    return _kept(model, adapter, state or state_of(model), lambda: _of_adapter(model, adapter))


def state_of(module: nn.Module) -> Reading[int]:
    """Another number once a weight is replaced or written to, or an adapter is merged; the same where one is moved."""
    return attempt(lambda: _state_of(module))


def forget_fingerprints(model: nn.Module | None = None) -> None:
    """Read the weights anew next time, of a model or of all: what was written through `.data` moves no counter."""
    if model is None:
        _KEPT.clear()
    else:
        _KEPT.pop(model, None)


def told(begun: Pending[Reading[str]]) -> Reading[str]:
    """What was begun; waits for what is still on its way. Never raises."""
    found = attempt(begun.result)
    return found.value or Reading(None, found.reason)


def known(reading: Reading[str]) -> Pending[Reading[str]]:
    """What is known already, as what is still being read."""
    return Pending(lambda: reading)


def combined_fingerprint(tensors: Mapping[str, Tensor], more: object = ()) -> str:
    """Sixteen hexadecimal digits for the whole content of tensors under their names.

    Args:
        tensors: By name, in any order.
        more: What else is to tell one from another.

    Raises:
        ValueError: One cannot be read; the message says which and why.
    """
    return _combined(fingerprints(tensors), more)


def begin_combined_fingerprint(tensors: Mapping[str, Tensor], more: object = ()) -> Pending[Reading[str]]:
    """The same without waiting for an accelerator, or why it cannot be read. Never raises."""
    begun = attempt(lambda: _begin(begin_fingerprints, tensors))
    if begun.value is None:
        return known(Reading(None, begun.reason))
    return begun.value.then(lambda readings: attempt(lambda: _combined(readings, more)))


def _begin(read: Callable[[Mapping[str, Tensor]], Pending[T]], tensors: Mapping[str, Tensor]) -> Pending[T]:
    """Begin to read tensors, unless that would become part of a graph."""
    if any(is_capturing(kind) for kind in {tensor.device.type for tensor in tensors.values()} - {"cpu"}):
        raise LookupError(CAPTURED)
    return read(tensors)


def _combined(readings: Mapping[str, Reading[Fingerprint]], more: object) -> str:
    for name, reading in readings.items():
        if reading.value is None:
            raise ValueError(f"{name}: {reading.reason}")
    return _joined({name: reading.value for name, reading in readings.items()}, more)


def _joined(prints: Mapping[str, Fingerprint | None], more: object) -> str:
    lines = [f"{name!r} {print_}\n" for name, print_ in sorted(prints.items(), key=itemgetter(0))]
    return xxhash.xxh3_64_hexdigest("".join([*lines, repr(more)]).encode())


def _kept(
    module: nn.Module, which: str, state: Reading[int], begin: Callable[[], "_Begun"]
) -> Pending[Reading[str]]:
    if state.value is None:
        return known(Reading(None, state.reason))
    kept = _KEPT.setdefault(module, {})
    if which in kept and kept[which].state == state.value and not kept[which].glimpses.has_changed():
        return kept[which].reading
    begun = attempt(begin)
    if begun.value is None:
        return known(Reading(None, begun.reason))

    def keep(reading: Reading[str]) -> Reading[str]:
        if reading.value is None and kept.get(which) == mine:  # another time they may be there
            del kept[which]
        return reading

    reading, tensors = begun.value
    mine = kept[which] = _Held(state.value, reading.then(keep), Glimpses(tensors))
    return mine.reading


_Begun = tuple[Pending[Reading[str]], Iterable[Tensor]]
"""What is being read, and the tensors that it is read of."""


class _State(NamedTuple):
    """What tells a model's weights from those of another time, without keeping one alive; and how many others it had."""

    references: Sequence[Callable[[], Tensor | None]]
    counted: Sequence[tuple[int, torch.dtype]]
    merged: Sequence[tuple[str, ...]]
    number: int


def _state_of(module: nn.Module) -> int:
    """A new tensor may get the `id` of one that is gone: so it is asked whether each is the object that it was."""
    tree = tree_of(module)
    tensors = tree.tensors
    try:
        counted = [*map(_COUNTED, tensors)]
    except PROBE_ERRORS:  # inference tensors count nothing
        counted = [(_version(tensor), tensor.dtype) for tensor in tensors]
    held = standings_in(tree).merged
    merged = [(*map(str, names or ()),) for names in held] if any(held) else []
    before = _STATES.get(module)
    if (
        before is None
        or (before.counted, before.merged) != (counted, merged)
        or not all(map(is_, map(call, before.references), tensors))
    ):
        number = 0 if before is None else before.number + 1
        before = _STATES[module] = _State([*map(weakref.ref, tensors)], counted, merged, number)
    return before.number


_COUNTED: Final = attrgetter("_version", "dtype")
_STATES: "weakref.WeakKeyDictionary[nn.Module, _State]" = weakref.WeakKeyDictionary()


def _version(tensor: Tensor) -> int:
    try:
        return tensor._version
    except PROBE_ERRORS:  # inference tensors count nothing
        return -1


def _of_model(module: nn.Module) -> _Begun:
    if lies_on_disk(module):
        raise LookupError(ON_DISK)
    weights = dict(base_weights(module))
    if not weights:
        raise LookupError(NO_WEIGHTS)
    lacking = [why for tensor in weights.values() if (why := why_unreadable(tensor)) is not None]
    if lacking:
        raise LookupError(f"of {len(lacking)} of {len(weights)} weights: {lacking[0]}")
    shapes = sorted((name, tuple(tensor.shape)) for name, tensor in weights.items())
    taking = partial(begin_samples, size=_ELEMENTS_OF_EACH_WEIGHT, floating_only=False)
    begun = _begin(taking, weights).then(
        lambda sampled: attempt(lambda: _joined(sampled.fingerprints(), shapes))
    )
    return begun, weights.values()


def lies_on_disk(module: nn.Module) -> bool:
    """Whether group offloading keeps a model's weights only in files while the model is not called."""
    for _, registry in tree_of(module).having("_diffusers_hook"):
        hooks = attribute(registry, "hooks")
        hook = hooks.get(GROUP_OFFLOADING) if isinstance(hooks, Mapping) else None
        if attribute(attribute(hook, "config"), "offload_to_disk_path") is not None:
            return True
    return False


def _of_adapter(model: nn.Module, adapter: str) -> _Begun:
    tensors: dict[str, Tensor] = {}
    numbers = []
    tree = tree_of(model)
    for place, _ in tree.having("adapter_layer_names"):
        path, layer = tree.names[place], tree.modules[place]
        if adapter in adapters_of(layer):
            tensors |= {f"{path}.{name}": tensor for name, tensor in _tensors_of(layer, adapter)}
            numbers.append([number_for(layer, name, adapter) for name in ("r", "lora_alpha")])
    if not tensors:
        raise LookupError("none of its tensors is where PEFT keeps them")
    return begin_combined_fingerprint(tensors, numbers), tensors.values()


def _tensors_of(layer: nn.Module, adapter: str) -> Iterator[tuple[str, Tensor]]:
    for name in map(str, attribute(layer, "adapter_layer_names") or ()):
        held = by_adapter(layer, name).get(adapter)
        if isinstance(held, Tensor):
            yield name, held
        elif isinstance(held, nn.Module):
            for path, part in named_modules_in(held):
                for own, tensor in (*own_parameters(part), *own_buffers(part)):
                    yield f"{name}.{path}.{own}", tensor
