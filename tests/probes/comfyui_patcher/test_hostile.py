"""Whatever the host's objects raise, wherever they do, the caller gets an answer."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.comfy_shapes.adapters import lora_adapter, lora_tuple
from tests.comfy_shapes.beside import Hook, HookGroup
from tests.comfy_shapes.modules import BaseModel, Q
from tests.comfy_shapes.patchers import ModelPatcher

from sigmascope.probes.comfyui_patcher import is_comfyui, original_weight, read_patches, weights_of


class Raising:
    """Raises whatever is asked of it, its class and its items among it."""

    def __getattribute__(self, name: str) -> Any:
        raise BufferError(name)

    def __len__(self) -> int:
        raise BufferError("length")

    def __iter__(self) -> Any:
        raise BufferError("items")

    def __float__(self) -> float:
        raise BufferError("number")


class RaisingItems(dict[Any, Any]):
    def items(self) -> Any:
        raise BufferError("items")

    def keys(self) -> Any:
        raise BufferError("keys")

    def __iter__(self) -> Any:
        raise BufferError("iteration")


def ask(thing: object) -> None:
    is_comfyui(thing)
    weights_of(thing)
    original_weight(thing, Q)
    read_patches(thing)


def in_entry(place: int) -> Callable[[ModelPatcher], None]:
    def put(patcher: ModelPatcher) -> None:
        entry = [1.0, lora_adapter(), 1.0, None, None]
        entry[place] = Raising()
        patcher.patches[Q] = [tuple(entry)]

    return put


def in_tuple(place: int) -> Callable[[ModelPatcher], None]:
    def put(patcher: ModelPatcher) -> None:
        parts = list(lora_tuple()[1])
        parts[place] = Raising()
        patcher.patches[Q] = [(1.0, ("lora", tuple(parts)), 1.0, None, None)]

    return put


def in_hook(patcher: ModelPatcher) -> None:
    hook = Hook()
    hook.strength = Raising()  # type: ignore[assignment]
    patcher.current_hooks = HookGroup(hook)
    patcher.hook_patches[hook.hook_ref] = {Q: [(1.0, lora_adapter(), 1.0, None, None)]}


PLACES: dict[str, Callable[[ModelPatcher], None]] = {
    **{f"entry {place}": in_entry(place) for place in range(5)},
    **{f"tuple {place}": in_tuple(place) for place in range(5)},
    "entries": lambda patcher: vars(patcher)["patches"].update({Q: Raising()}),
    "key": lambda patcher: vars(patcher)["patches"].update({3: [(1.0, lora_adapter(), 1.0, None, None)]}),
    "patches": lambda patcher: setattr(patcher, "patches", RaisingItems(patcher.patches)),
    "kept": lambda patcher: patcher.backup.update({Q: Raising()}),
    "model": lambda patcher: setattr(patcher, "model", Raising()),
    "layer": lambda patcher: patcher.model.get_submodule(Q.removesuffix(".weight")).weight_function.append(Raising()),
    "parent": lambda patcher: setattr(patcher, "parent", Raising()),
    "hook": in_hook,
    "hooks": lambda patcher: setattr(patcher, "hook_patches", {Raising(): Raising()}),
    "injection": lambda patcher: patcher.injections.update({"bypass": [Raising()]}),
    "object": lambda patcher: patcher.object_patches.update({Q: Raising()}),
    "wrapper": lambda patcher: patcher.weight_wrapper_patches.update({Q: [Raising()]}),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_nothing_that_raises_reaches_the_caller(place: str) -> None:
    patcher = ModelPatcher(BaseModel())
    patcher.add_patches({Q: lora_adapter()})
    patcher.load()
    PLACES[place](patcher)
    ask(patcher)


def test_a_thing_that_raises_throughout_is_no_patcher() -> None:
    assert not is_comfyui(Raising())
    ask(Raising())


@cache
def shared_patcher() -> ModelPatcher:
    return ModelPatcher(BaseModel())


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=4) | st.binary(max_size=2),
        lambda inner: st.lists(inner, max_size=5) | st.lists(inner, max_size=9).map(tuple),
        max_leaves=12,
    )
)
def test_no_entry_whatever_it_holds_reaches_the_caller(entry: object) -> None:
    patcher = shared_patcher()
    patcher.patches[Q] = [entry, (1.0, entry, 1.0, None, None), (1.0, ("lora", entry), 1.0)]
    found = read_patches(patcher)
    assert found.value is not None, found.reason
    assert len({patch.index for patch in found.value}) == 3
