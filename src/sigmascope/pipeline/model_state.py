"""What an attempt borrows and gives back: it restores a model, runs it from copies in RAM, and frees memory.

`as_before` puts back what an attempt changed, whatever ended it; `Structure` finds that out. `put_in_ram` lets a model
run on the CPU without moving it: copies of its weights take their places for a while. What an attempt changes for a
while, another thread must not find changed: `in_turn` lets threads in one after the other. `execution_device` and the
two functions below it read what the hooks of accelerate and diffusers say of a model; neither library is imported.
`let_go` and `free_memory` give back what a failed attempt held, and `free_ram` tells how much RAM is left.
"""

import gc
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock, RLock
from typing import Any, Final

import torch
from torch import Tensor, nn

from sigmascope.probes import system_memory
from sigmascope.probes.reading import attempt
from sigmascope.records.memory import MIB
from sigmascope.stages.latent_facts import inner_vae

_HOOKED: Final = ("_diffusers_hook", "_hf_hook", "processor")
"""Attributes of modules that hold objects with a state of their own."""
_PLAIN: Final = (str, int, float, bool, type(None), tuple)
"""Values that hold no attributes to be noted."""
_ABSENT: Final = object()
"""Stands for an attribute or an entry that is not there."""
_SET_BY_USERS: Final = ("processor",)
"""What a user may have set again meanwhile: that stays. Hooks are not among these: libraries renew theirs."""
_MOST_BYTES_PUT_BACK_BY_VALUE = 1 << 20
"""Buffers up to this size are put back by value."""
_CPU = torch.device("cpu")
HALVES = (torch.float16, torch.bfloat16)
"""Types in which a VAE may overflow, or round away too much, where float32 would not."""


@contextmanager
def as_before(*things: object, also_on_success: bool = False) -> Iterator[None]:
    """Restore modules and objects if the block fails: placement, dtype, attributes, buffers, caches.

    A VAE that fails half way may keep its intermediate results, as those of causal videos do in their
    caches of features; with the attributes as they were, these are let go. What cannot be put back is told in a
    note on the error.

    Args:
        *things: Modules, with all their parts; of any other object its own attributes alone.
        also_on_success: Put them back in any case.
    """
    structure = Structure(things, only_tensors=True)  # what else these lists hold is the caller's
    modules = [thing for thing in things if isinstance(thing, nn.Module)]
    placed = [_Placed.of(tensor) for tensor in tensors_of(modules)]

    def put_back() -> None:
        """Put back everything that can be. What does not fit where it was is reported once the rest is done."""
        undos = (*structure.changes_since(), *(tensor.put_back for tensor in placed))
        failures = [error for undo in undos if (error := _tried(undo)) is not None]
        if failures:
            raise failures[0]

    try:
        yield
    except BaseException as error:
        failure = _tried(put_back)
        if failure is not None:
            error.add_note(f"The VAE could not be put back as it was: {failure}")
        raise
    if also_on_success:
        put_back()


class Structure:
    """The structure of a pipeline at one moment.

    Args:
        things: Modules, with all their parts, and other objects.
        only_tensors: Of what dicts and lists hold, note parameters and buffers alone; and nothing of hooks.
    """

    def __init__(self, things: Iterable[object], *, only_tensors: bool = False) -> None:
        held = ("_parameters", "_buffers") if only_tensors else None
        self._noted = [_NotedObject.of(thing, held) for thing in _reached(things, hooks=not only_tensors)]

    def changes_since(self) -> list[Callable[[], None]]:
        """What is different now, each as a function that puts it back.

        What others change later stays as they leave it, unless it is the very same attribute or entry.
        """
        return [undo for noted in self._noted for undo in _differences(noted)]


@dataclass(frozen=True, slots=True)
class _NotedObject:
    """One object with its attributes, and copies of those that are dicts and lists."""

    thing: object
    attributes: Mapping[str, Any]
    contents: Mapping[str, Any]

    @classmethod
    def of(cls, thing: object, held: Sequence[str] | None) -> "_NotedObject":
        own = dict(vars(thing))
        noted = {name: value for name, value in own.items() if held is None or name in held}
        dicts = {name: dict(value) for name, value in noted.items() if isinstance(value, dict)}
        lists = {name: list(value) for name, value in noted.items() if isinstance(value, list)}
        return cls(thing, own, {**dicts, **lists})


def _reached(things: Iterable[object], *, hooks: bool) -> Iterator[object]:
    """Things, the parts of modules, and the processors and hooks on these."""
    seen: set[int] = set()
    waiting = list(things)
    while waiting:
        thing = waiting.pop()
        has_attributes = isinstance(getattr(thing, "__dict__", None), dict) and not isinstance(thing, type)
        if id(thing) in seen or isinstance(thing, _PLAIN) or not has_attributes:
            continue
        seen.add(id(thing))
        yield thing
        if isinstance(thing, nn.Module):
            waiting += thing._modules.values()
        if not hooks:
            continue
        waiting += [held for name, held in vars(thing).items() if name in _HOOKED]
        if type(thing).__name__ == "HookRegistry":
            own = vars(thing)
            waiting += [*own.get("hooks", {}).values(), *own.get("_fn_refs", ())]


def _differences(noted: _NotedObject) -> Iterator[Callable[[], None]]:
    now = vars(noted.thing)
    for name in {**noted.attributes, **now}:
        before, after = noted.attributes.get(name, _ABSENT), now.get(name, _ABSENT)
        if before is not after:
            yield partial(_put_attribute_back, noted.thing, name, before, after)
        if name in noted.contents:
            contents = noted.contents[name]
            if isinstance(before, dict):
                changed = {
                    key: contents.get(key, _ABSENT)
                    for key in {**contents, **before}
                    if contents.get(key, _ABSENT) is not before.get(key, _ABSENT)
                }
                if changed:
                    yield partial(_put_entries, before, contents, changed)
            elif list(map(id, before)) != list(map(id, contents)):
                yield partial(before.__setitem__, slice(None), contents)


def _put_attribute_back(thing: object, name: str, before: object, after: object) -> None:
    own = vars(thing)
    if name in _SET_BY_USERS and own.get(name, _ABSENT) is not after:
        return
    if before is _ABSENT:
        own.pop(name, None)
    else:
        own[name] = before


def _put_entries(held: dict[Any, Any], contents: Mapping[Any, Any], changed: Mapping[Any, Any]) -> None:
    """Put entries back that changed, in their old order, those that came since last."""
    now = {key: value for key, value in {**held, **changed}.items() if value is not _ABSENT}
    held.clear()
    held.update({key: now.pop(key) for key in contents if key in now} | now)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A parameter or buffer with where and what it was."""

    tensor: Tensor
    device: torch.device
    dtype: torch.dtype
    copy: Tensor | None
    version: int | None

    @classmethod
    def of(cls, tensor: Tensor) -> "_Placed":
        version = None if tensor.is_inference() else tensor._version
        return cls(tensor, tensor.device, tensor.dtype, _small_copy(tensor), version)

    def put_back(self) -> None:
        with torch.no_grad():
            if (self.tensor.device, self.tensor.dtype) != (self.device, self.dtype):
                self.tensor.data = self.tensor.data.to(self.device, self.dtype)
            if self.copy is not None and self.tensor._version != self.version:
                self.tensor.copy_(self.copy)


def _small_copy(tensor: Tensor) -> Tensor | None:
    """Of buffers alone, which a forward pass may count up in place."""
    if isinstance(tensor, nn.Parameter) or tensor.is_inference() or tensor.is_meta:
        return None
    return tensor.detach().clone() if tensor.nbytes <= _MOST_BYTES_PUT_BACK_BY_VALUE else None


def _tried(put_back: Callable[[], None]) -> Exception | None:
    try:
        put_back()
    except Exception as error:  # noqa: BLE001 - the rest shall be put back all the same
        return error
    return None


@contextmanager
def for_inference(vae: object, **switches: object) -> Iterator[None]:
    """Without gradients, in evaluation mode, and with some attributes set; all is as before on leaving."""
    parts = [part for module in modules_in(vae) for part in module.modules()]
    was_training = [part for part in parts if part.training]
    own = _attributes_of(vae)
    before = {name: own[name] for name in switches if name in own}
    try:
        for part in was_training:
            part.training = False
        for name, value in switches.items():
            object.__setattr__(vae, name, value)
        with torch.no_grad():
            yield
    finally:
        for part in was_training:
            part.training = True
        for name in switches:
            _put_attribute(own, name, before)


def _attributes_of(thing: object) -> dict[str, Any]:
    attributes: dict[str, Any] = getattr(thing, "__dict__", {})
    return attributes


def _put_attribute(own: dict[str, Any], name: str, before: Mapping[str, Any]) -> None:
    if name in before:
        own[name] = before[name]
    else:
        own.pop(name, None)


def put_in_ram(modules: Iterable[nn.Module], *, in_float32: bool = False) -> None:
    """Put copies in RAM where the weights, buffers and other tensors of modules are.

    Meant for use inside `as_before(…, also_on_success=True)`, which puts the originals back: they
    have not moved, so that needs no memory on their device.
    """
    parts = [part for module in modules for part in module.modules()]
    copies = {
        id(tensor): _copy_in_ram(tensor, in_float32=in_float32)
        for part in parts
        for tensor in tensors_on(part)
    }
    for part in parts:
        for held in (part._parameters, part._buffers, vars(part)):
            _swap(held, copies)
        if "_hf_hook" in vars(part):
            vars(part)["_hf_hook"] = _NoHook()


def _copy_in_ram(tensor: Tensor, *, in_float32: bool) -> Tensor:
    dtype = torch.float32 if in_float32 and tensor.dtype in HALVES else tensor.dtype
    if tensor.device == _CPU and tensor.dtype == dtype:
        return tensor
    copy = tensor.detach().to(_CPU, dtype)
    return nn.Parameter(copy, requires_grad=False) if isinstance(tensor, nn.Parameter) else copy


def _swap(held: dict[str, Any], copies: Mapping[int, Tensor]) -> None:
    for name, value in list(held.items()):
        if isinstance(value, Tensor):
            held[name] = copies[id(value)]
        elif type(value) in (list, tuple) and any(isinstance(item, Tensor) for item in value):
            held[name] = type(value)(copies.get(id(item), item) for item in value)


class _NoHook:
    """Stands in for a hook of accelerate's, which would move the weights to its own device."""

    no_grad = False

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output


def why_not_in_ram(modules: Sequence[nn.Module]) -> str | None:
    """Why copies of the weights cannot be had, or None."""
    if any(tensor.is_meta for tensor in tensors_of(modules)):
        return "its weights are offloaded piece by piece and cannot be read from here"
    if offloads_groups(modules):
        return "diffusers' hooks move its weights, and cannot be set aside"
    return None


def why_not_in_float32(modules: Sequence[nn.Module]) -> str | None:
    """Why copies of the weights in float32 cannot be had, or None."""
    if has_diffusers_hooks(modules):
        return "diffusers' hooks move or cast its weights, and cannot be set aside"
    return why_not_in_ram(modules)


def nbytes_to_copy(modules: Iterable[nn.Module]) -> int:
    """Bytes of weights that are not in RAM yet."""
    return sum(tensor.nbytes for tensor in tensors_of(modules) if tensor.device != _CPU)


def nbytes_widened(modules: Iterable[nn.Module]) -> int:
    """Bytes of the float32 copies of those weights that are of half precision."""
    return sum(4 * tensor.numel() for tensor in tensors_of(modules) if tensor.dtype in HALVES)


@contextmanager
def in_turn(vae: object) -> Iterator[None]:
    """Wait until no other thread encodes or decodes with a VAE; the same thread may come in again.

    Args:
        vae: As the caller has it. It and the modules in it are known by identity.
    """
    inner = inner_vae(vae)
    with ExitStack() as stack:
        keys = {id(thing) for thing in (inner, *modules_in(inner))}
        for key in sorted(keys):  # in one order, so that no two threads wait for each other
            stack.enter_context(_turn(key))
        yield


@contextmanager
def _turn(key: int) -> Iterator[None]:
    with _queues_lock:
        queue = _queues.setdefault(key, _Queue())
        queue.users += 1
    try:
        with queue.lock:
            yield
    finally:
        with _queues_lock:
            queue.users -= 1
            if not queue.users:
                del _queues[key]


@dataclass(slots=True)
class _Queue:
    """Whose turn it is, and how many are in it or wait for it."""

    lock: Any = field(default_factory=RLock)
    users: int = 0


_queues: dict[int, _Queue] = {}
_queues_lock = Lock()


def execution_device(modules: Iterable[nn.Module]) -> torch.device | None:
    """Where accelerate's hooks will move a model or its parts to compute; None without such hooks."""
    for part in _parts(modules):
        hook = vars(part).get("_hf_hook")
        # Several hooks on one module are inside a hook that has them all.
        for inner_hook in (hook, *getattr(hook, "hooks", ())):
            place = getattr(inner_hook, "execution_device", None)
            if place is not None:
                return torch.device(place)
    return None


def _parts(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for module in modules:
        yield from module.modules()


def has_diffusers_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether diffusers casts or moves weights layer by layer, so that what they are is not what they compute in."""
    return any(_hook_registry(part) is not None for part in _parts(modules))


def _hook_registry(part: nn.Module) -> Any:
    return vars(part).get("_diffusers_hook")


def offloads_groups(modules: Iterable[nn.Module]) -> bool:
    """Whether diffusers moves groups of layers to a device and back."""
    hooks = (getattr(_hook_registry(part), "hooks", {}) for part in _parts(modules))
    return any("offloading" in name for names in hooks for name in names)


def modules_in(vae: object) -> list[nn.Module]:
    """The outermost modules that a VAE is or holds, such as ComfyUI's `first_stage_model`."""
    if isinstance(vae, nn.Module):
        return [vae]
    return [value for value in _attributes_of(vae).values() if isinstance(value, nn.Module)]


def tensors_of(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Parameters and buffers of modules and all their parts, each once."""
    seen: set[int] = set()
    for part in _parts(modules):
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def tensors_on(part: nn.Module) -> list[Tensor]:
    """Its own parameters, buffers, and attributes that are tensors or lists of them."""
    tensors: list[Tensor] = []
    for value in (*part._parameters.values(), *part._buffers.values(), *vars(part).values()):
        items = value if isinstance(value, list | tuple) else (value,)
        tensors += [item for item in items if isinstance(item, Tensor)]
    return tensors


_CGROUP = Path("/sys/fs/cgroup")


def let_go(error: BaseException, outer: BaseException | None = None) -> None:
    """Drop what an error holds: the local variables of all frames that it went through, and these frames.

    Args:
        error: Caught, and done with.
        outer: The exception that was being handled when the attempt began. It and its causes belong to others, and
            stay.
    """
    for link in list(_chain(error, outer)):
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None


def _chain(error: BaseException, outer: BaseException | None) -> Iterator[BaseException]:
    """The error and all that it was raised from or while handling, up to `outer`."""
    seen: set[int] = set() if outer is None else {id(link) for link in _chain(outer, None)}
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            yield link
            waiting += [link.__cause__, link.__context__]


def free_memory(*devices: torch.device) -> None:
    """Collect garbage, then give the devices' cached blocks back to them. Never raises."""
    gc.collect()
    for kind in {device.type for device in devices} - {"cpu", "meta"}:
        empty_cache = getattr(getattr(torch, kind, None), "empty_cache", None)
        if empty_cache is not None:
            attempt(empty_cache)


def wait_for(device: torch.device) -> None:
    """Wait until a device has done all that was queued; does nothing for the CPU.

    Code that only queues work ends before the device does, and learns of errors later.
    """
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


@dataclass(frozen=True, slots=True)
class Ram:
    """Bytes that are free, and whose they are; None if that cannot be read."""

    free_bytes: int | None
    whose: str = "this machine"


def free_ram(cgroup: Path = _CGROUP) -> Ram:
    """The smaller of what the machine and this process's control group have left.

    Args:
        cgroup: Where the group's files are (Linux, version 2).
    """
    machine = system_memory().ram_available_bytes
    group = attempt(lambda: _left_in(cgroup)).value
    if group is not None and (machine is None or group < machine):
        return Ram(group, "this container")
    return Ram(machine)


def _left_in(cgroup: Path) -> int | None:
    limit = (cgroup / "memory.max").read_text().strip()
    if limit == "max":
        return None
    used = int((cgroup / "memory.current").read_text())
    return max(int(limit) - used + _reclaimable(cgroup), 0)


def _reclaimable(cgroup: Path) -> int:
    """Cached files, which the kernel drops when memory is wanted."""
    lines = (cgroup / "memory.stat").read_text().splitlines()
    numbers = dict(line.split(maxsplit=1) for line in lines)
    return int(numbers.get("inactive_file", 0)) + int(numbers.get("active_file", 0))


def why_not_enough(needed_bytes: int, ram: Ram) -> str | None:
    """The reason with numbers, if RAM cannot hold that much."""
    if ram.free_bytes is None or needed_bytes <= ram.free_bytes:
        return None
    needed, free = needed_bytes / MIB, ram.free_bytes / MIB
    return f"it takes about {needed:,.0f} MB of RAM, and {ram.whose} has {free:,.0f} MB free"
