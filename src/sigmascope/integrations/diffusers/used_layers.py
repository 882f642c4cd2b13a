"""How many layers of a text encoder an encoding uses: pipelines leave out the last ones, which `clip_skip` asks for too.

SDXL's pipelines take the state before the last layer of their first encoder. A LoRA that is on later layers alone moves
no picture then. Which states an encoding used is asked of what it did: a `FollowedEncoding` follows them through PyTorch's
functions to the embeddings that come of them, and reads no value. It is put on only where a LoRA is on late layers alone
(`begin_following`), and is off while an encoder runs.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from torch import Tensor, nn, overrides
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode

from sigmascope.monitor.hooks import ByIdentity, reference_to, without_this_frame
from sigmascope.probes.models import own_parameters, unwrap
from sigmascope.probes.peft import (
    adapted_modules,
    adapter_layers,
    adapter_states,
    adapters_of,
    number_for,
)

_MODES: Final[Any] = overrides
_ATTACHING: Final = "sigmascope.lora.apply"
"""Where `attach_lora` is: without it nothing is attached."""
_PROJECTIONS: Final = frozenset({"text_projection", "lm_head"})
_STATES: Final = "hidden_states"
_LAST: Final = "last_hidden_state"
_ALL: Final = sys.maxsize
_DEEPEST: Final = 4  # containers in containers
_TELLS_NO_VALUES: Final = frozenset(
    {"__get__", "__len__", "dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point"}
    | {"is_inference", "is_same_size", "is_shared", "ndimension", "numel", "size", "storage_offset", "stride", "type"}
)  # fmt: skip
"""Functions that give no tensor, and nothing that depends on a tensor's numbers."""


class UsedLayers(NamedTuple):
    """What was used of an encoder.

    Attributes:
        layers: The name of the list that its layers are in.
        among: How many there are.
        used: How many of them; one more with a norm after the last one, two more with all that is made of that.
    """

    layers: str
    among: int
    used: int

    def comes_after(self, layer: str) -> bool:
        """Whether a layer, by its name or that of its weight, comes after what was used."""
        return self.place_of(layer) >= self.used

    def place_of(self, layer: str) -> int:
        """Where a layer comes in the encoder: 0 too if before all of them, or if that is not known."""
        start = f"{self.layers}."
        if layer.startswith(start):
            return int(layer.removeprefix(start).partition(".")[0])
        late = _late_name(layer)
        return 0 if late is None else self.among + (late in _PROJECTIONS)

    def in_words(self, encoder: str) -> str:
        """Such as "the first 11 of the 12 layers of text_encoder"."""
        return f"the first {min(self.used, self.among)} of the {self.among} layers of {encoder}"


Used = Mapping[str, UsedLayers | None]
"""By encoder what was used of it; None: that is not known. Of others it is all."""


def both_used(before: Used, since: Used) -> dict[str, UsedLayers | None]:
    """What two encodings used."""
    found = {**before, **since}
    for name in before.keys() & since.keys():
        one, other = before[name], since[name]
        found[name] = None if one is None or other is None else max(one, other, key=lambda held: held.used)
    return found


def _late_name(layer: str) -> str | None:
    """The part of a name that tells that something comes after all layers: a norm or projection beside them."""
    names = layer.removesuffix(".weight").removesuffix(".bias").split(".")
    if any(name.isdecimal() for name in names):
        return None
    return next((name for name in names if name in _PROJECTIONS or name.endswith("norm")), None)


def is_late(layer: str) -> bool:
    """Whether a layer may be left out of what comes of an encoder: none before the second one may."""
    place = next((name for name in layer.split(".") if name.isdecimal()), None)
    return int(place) > 0 if place is not None else _late_name(layer) is not None


_EARLY: Final[ByIdentity[Callable[[], object]]] = ByIdentity()
"""By encoder the early layer on which all adapters that act were seen to be, or to be off as on all others."""


def has_late_lora(encoder: object) -> bool:
    """Whether a LoRA acts on late layers of an encoder alone. Where all act on an early one this is known at once."""
    model = unwrap(encoder)
    if model is None:
        return False
    if getattr(model, "peft_config", None):
        early = _EARLY.get(model)
        layer = None if early is None else early()
        if not isinstance(layer, nn.Module) or not _all_act_on(layer):
            return _has_late_adapter(model) or _is_late_attached(model)
    return _is_late_attached(model)


def _all_act_on(layer: nn.Module) -> bool:
    """Whether the adapters that act are all on this layer; also if they are switched off."""
    states = adapter_states(layer)
    if states.disabled and not states.merged:
        return True
    return bool(states.active) and {*_acting_on(layer)} >= {*states.active, *states.merged}


def _acting_on(layer: nn.Module) -> Iterator[str]:
    states = adapter_states(layer)
    for adapter in adapters_of(layer):
        is_on = adapter in states.active and not states.disabled and not states.merged
        if adapter in states.merged or (is_on and number_for(layer, "scaling", adapter) != 0.0):
            yield adapter


def _has_late_adapter(model: nn.Module) -> bool:
    early, late, first = set[str](), set[str](), None
    for name, layer in adapter_layers(model):
        if is_late(name):
            late.update(_acting_on(layer))
            continue
        early.update(_acting_on(layer))
        first = layer if first is None else first
        if early and _all_act_on(layer):
            _EARLY.put(model, reference_to(layer))
            return False
    if first is not None and not late and _all_act_on(first):
        _EARLY.put(model, reference_to(first))
    return not late <= early


def _is_late_attached(model: nn.Module) -> bool:
    attaching = sys.modules.get(_ATTACHING)
    attached = [] if attaching is None else attaching.attached_to(model)
    return any(all(map(is_late, lora.layers)) for lora in attached if lora.scale)


def begin_following(encoders: Mapping[str, object]) -> "FollowedEncoding | None":
    """Follow what comes of encoders with a LoRA on late layers alone, from now on; None: none has such a LoRA."""
    followed = {name for name, encoder in encoders.items() if has_late_lora(encoder)}
    if not followed:
        return None
    following = FollowedEncoding(followed)
    _MODES._push_mode(following)
    return following


def is_seen_in_part(result: object) -> bool:
    """Whether an encoder gave the states between its layers too, of which a host may take an early one."""
    return _states_in(result) is not None


class FollowedEncoding(TorchFunctionMode):
    """How many layers of encoders the tensors of an encoding come of.

    PyTorch tells it of each function with its arguments and result, which are the host's own and pass unchanged. What is
    known is kept by memory, so that views and what is written into them count. What leaves PyTorch, as for NumPy, is
    taken for used.

    Args:
        encoders: The names of those that are followed.

    Attributes:
        encoders: The same.
        is_off: Whether nothing is followed now: an encoder runs, or it is over.
    """

    def __init__(self, encoders: Iterable[str]) -> None:
        super().__init__()
        self.encoders = frozenset(encoders)
        self._levels: dict[int, dict[str, int]] = {}
        self._own: dict[int, dict[str, int]] = {}
        self._read: dict[str, int] = {}
        self._layers: dict[str, tuple[str, int] | None] = {}
        self.is_off = False
        self._is_lost = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        try:
            result = func(*args, **(kwargs or {}))
        except BaseException as error:
            without_this_frame(error)
            raise
        if not self.is_off and not self._is_lost:
            try:
                with DisableTorchFunction():  # those of other watches are not told of what this one asks
                    self._follow(func, (args, kwargs), result)
            except Exception:  # noqa: BLE001 - a tensor that tells nothing of its memory; the host goes on
                self._is_lost = True
        return result

    def pause(self) -> bool:
        """Follow nothing while an encoder runs, and stand in nobody's way if that can be; gives whether it can."""
        self.is_off = True
        stack = _MODES._get_current_function_mode_stack()
        is_last = bool(stack) and stack[-1] is self
        if is_last:
            _MODES._pop_mode()
        return is_last

    def go_on(self, *, was_taken_off: bool) -> None:
        """Follow again what comes after an encoder ran."""
        if was_taken_off:
            _MODES._push_mode(self)
        self.is_off = False

    def end(self) -> None:
        """Follow no more; what the host put on since stays."""
        self.is_off = True
        if self not in _MODES._get_current_function_mode_stack():
            return
        above = []
        while (mode := _MODES._pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _MODES._push_mode(mode)

    def take(self, name: str, encoder: object, result: object) -> None:
        """Take what an encoder gave, before `go_on`."""
        with DisableTorchFunction():
            self._take(name, encoder, result)

    def _take(self, name: str, encoder: object, result: object) -> None:
        if name not in self.encoders:
            for tensor in _tensors_in(result):
                self._levels.pop(_memory_of(tensor), None)  # of what was there before
            return
        states = _states_in(result)
        model = unwrap(encoder)
        if states is None or model is None:
            self._levels |= {_memory_of(tensor): {name: _ALL} for tensor in _tensors_in(result)}
            return
        count = len(states) - 1
        layers = _layers_of(model, count)
        self._layers[name] = None
        if layers is None:
            return
        last = result.get(_LAST) if isinstance(result, Mapping) else None
        ids = {id(state) for state in states}
        levels = [(state, place + (place == count)) for place, state in enumerate(states)]
        levels += [
            (tensor, count + (1 if tensor is last else 2))
            for tensor in _tensors_in(result)
            if id(tensor) not in ids
        ]
        made: dict[int, int] = {}
        for tensor, level in levels:
            memory = _memory_of(tensor)
            made[memory] = max(level, made.get(memory, 0))
        self._levels |= {memory: {name: level} for memory, level in made.items()}
        known = UsedLayers(layers, count, 0)
        for layer_name, layer in adapter_layers(model):  # an encoding may run a norm by itself
            level = known.place_of(layer_name) + 1
            for held in layer.modules():
                for _, parameter in own_parameters(held):
                    self._add(self._own.setdefault(_memory_of(parameter), {}), {name: level})
        self._layers[name] = layers, count

    def used(self, result: object) -> dict[str, UsedLayers | None]:
        """What an encoding used of the followed encoders that gave the states between their layers.

        Args:
            result: What the encoding gave.
        """
        levels = dict(self._read)
        if not self._is_lost:
            for tensor in _tensors_in(result):
                self._add(levels, self._levels.get(_memory_of(tensor), {}))
        found: dict[str, UsedLayers | None] = {}
        for name, layers in self._layers.items():
            is_known = layers is not None and name in levels and not self._is_lost
            found[name] = UsedLayers(*layers, levels[name]) if layers is not None and is_known else None
        return found

    def _follow(self, func: Any, given: object, result: object) -> None:
        taken = [*_tensors_in(given)]
        known = {_memory_of(tensor) for tensor in taken}
        levels: dict[str, int] = {}
        for memory in known:
            self._add(levels, self._levels.get(memory, {}))
        for memory in known if levels else ():  # parameters alone are no encoding
            self._add(levels, self._own.get(memory, {}))
        made = [*_tensors_in(result)]
        name = getattr(func, "__name__", "")
        if levels and name == "__setitem__":
            self._add(self._levels.setdefault(_memory_of(taken[0]), {}), levels)
        elif levels and not made and name not in _TELLS_NO_VALUES:
            self._add(self._read, levels)
        for tensor in made:
            memory = _memory_of(tensor)
            if memory in known:
                self._add(self._levels.setdefault(memory, {}), levels)
            elif levels:
                self._levels[memory] = dict(levels)
            else:
                self._levels.pop(memory, None)  # of what was there before

    @staticmethod
    def _add(levels: dict[str, int], others: Mapping[str, int]) -> None:
        for name, level in others.items():
            levels[name] = max(level, levels.get(name, 0))


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors_in(held: object, depth: int = _DEEPEST) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        yield held
    elif depth and isinstance(held, Mapping):
        for part in held.values():
            yield from _tensors_in(part, depth - 1)
    elif depth and isinstance(held, list | tuple):
        for part in held:
            yield from _tensors_in(part, depth - 1)


def _states_in(result: object) -> tuple[Tensor, ...] | None:
    """The states before, between and after an encoder's layers; None: it gave none."""
    held: tuple[object, ...] = result if isinstance(result, tuple) else ()
    if isinstance(result, Mapping):
        held = (result.get(_STATES),)
    return next((states for states in map(_as_states, held) if states), None)


def _as_states(held: object) -> tuple[Tensor, ...]:
    states = tuple(one for one in held if isinstance(one, Tensor)) if isinstance(held, tuple) else ()
    return states if isinstance(held, tuple) and len(states) == len(held) > 1 else ()


def _layers_of(model: nn.Module, count: int) -> str | None:
    """The name of the list of an encoder's layers; None: none has so many, or several have."""
    lists = [
        name
        for name, module in adapted_modules(model)
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return outer[0] if len(outer) == 1 else None
