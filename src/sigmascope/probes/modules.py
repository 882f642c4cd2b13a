"""Facts about one model, whatever it is wrapped in."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from sigmascope.probes.places import place_of
from sigmascope.probes.reading import PROBE_ERRORS, describe
from sigmascope.probes.walking import modules_in, own_buffers, own_parameters
from sigmascope.records.facts import ModuleFacts

_INNER_NAMES = ("model", "cond_stage_model", "first_stage_model", "patcher")
"""Where ComfyUI's wrappers (ModelPatcher, CLIP, VAE) and others keep the module."""

_COMPILED, _REPLICATED = "_orig_mod", "module"
_REPLICATING = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")
_MOST_WRAPPERS = 8
_COUNTS = ("parameters", "trainable_parameters", "nbytes", "training")


def module_facts(module: object) -> ModuleFacts:
    """Class, parameters, bytes, dtypes and devices of a model. Never raises.

    Parameters that share their memory count once. `nbytes`, `dtypes` and `devices` include buffers; the
    latter two count elements.

    Args:
        module: An `nn.Module`; a wrapper that holds one (ComfyUI's patchers, a compiled or replicated
            module); a pipeline with `components` (diffusers), whose modules are taken together; or a
            mapping of names to modules. Of anything else only the class is told, with the reason.
    """
    class_name = type(module).__name__
    try:
        found = _modules_of(module)
        if not found:
            return _nothing_known(class_name, f"{class_name} holds no module that is known how to find")
        facts = _Count()
        for inner in found:
            facts.add(inner)
    except PROBE_ERRORS as error:
        return _nothing_known(class_name, describe(error))
    if len(found) > 1 or found[0] is module or isinstance(module, Mapping) or components_of(module):
        return facts.result(class_name, None)
    return facts.result(type(found[0]).__name__, class_name)


def _nothing_known(class_name: str, reason: str) -> ModuleFacts:
    return ModuleFacts(class_name, unavailable=dict.fromkeys(_COUNTS, reason))


def _modules_of(thing: object) -> list[nn.Module]:
    """The modules that a thing is made of: one, for anything but a pipeline or a mapping."""
    parts = thing if isinstance(thing, Mapping) else components_of(thing)
    if parts:
        return [part for part in parts.values() if isinstance(part, nn.Module)]
    inner = unwrap(thing)
    return [] if inner is None else [inner]


def components_of(thing: object) -> Mapping[str, object]:
    """The components of a pipeline; empty for anything else."""
    components = None if isinstance(thing, nn.Module) else getattr(thing, "components", None)
    return components if isinstance(components, Mapping) else {}


def unwrap(thing: object, depth: int = 0) -> nn.Module | None:
    """Follow wrappers to the module that holds the weights."""
    if isinstance(thing, nn.Module):
        inner = _module_in_module(thing)
        return thing if inner is None else unwrap(inner, depth)
    if depth == _MOST_WRAPPERS:
        return None
    for name in _INNER_NAMES:
        held = getattr(thing, name, None)
        found = None if held is None or _is_method(held) else unwrap(held, depth + 1)
        if found is not None:
            return found
    return None


def _module_in_module(module: nn.Module) -> nn.Module | None:
    """What torch.compile or data parallelism put a wrapper around."""
    inner = getattr(module, _COMPILED, None)
    if inner is None and type(module).__name__ in _REPLICATING:
        inner = getattr(module, _REPLICATED, None)
    return inner if isinstance(inner, nn.Module) else None


def _is_method(thing: object) -> bool:
    return callable(thing) and not isinstance(thing, nn.Module)


@dataclass(slots=True)
class _Count:
    """What was counted so far over modules that may share tensors."""

    parameters: int = 0
    trainable: int = 0
    nbytes: int = 0
    dtypes: Counter[str] = field(default_factory=Counter)
    devices: Counter[str] = field(default_factory=Counter)
    training: bool = False
    seen: set[object] = field(default_factory=set)

    def add(self, module: nn.Module) -> None:
        self.training = self.training or module.training
        parts = list(modules_in(module))
        for parameter in self._new(tensor for part in parts for _, tensor in own_parameters(part)):
            self.parameters += parameter.numel()
            self.trainable += parameter.numel() if parameter.requires_grad else 0
            self._add_tensor(parameter)
        for buffer in self._new(tensor for part in parts for _, tensor in own_buffers(part)):
            self._add_tensor(buffer)

    def _add_tensor(self, tensor: Tensor) -> None:
        self.nbytes += tensor.numel() * tensor.element_size()
        self.dtypes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
        self.devices[str(tensor.device)] += tensor.numel()

    def _new(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        for tensor in tensors:
            identity = place_of(tensor)
            if identity not in self.seen:
                self.seen.add(identity)
                yield tensor

    def result(self, class_name: str, wrapper_class_name: str | None) -> ModuleFacts:
        return ModuleFacts(
            class_name,
            self.parameters,
            self.trainable,
            self.nbytes,
            dict(self.dtypes),
            dict(self.devices),
            self.training,
            wrapper_class_name=wrapper_class_name,
        )
