"""A model's weights under the names they have without adapters, whatever wraps them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from torch import Tensor, nn

from sigmascope.probes.walking import children_of, own_buffers, own_parameters
from sigmascope.stages.lora.parts import module_of, parts_of

_WRAPPED: Final = ("base_layer", "original_module")
_TRANSPARENT: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_BY_PEFT: Final = "base_model.model."
_REPLICATED: Final = "module."
_REPLICATING: Final = ("DataParallel", "DistributedDataParallel")


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """The host's own tensors: let go of it when they have been looked at.

    Attributes:
        base: By name in the model's state dict, as it would be without any adapter.
        adapters: Of adapters inside the model, by name in its state dict as it is.
        wrapped: Names in `base` that the state dict has under another name, since an adapter wraps the layer.
    """

    base: Mapping[str, Tensor]
    adapters: Mapping[str, Tensor]
    wrapped: frozenset[str] = field(default_factory=frozenset)

    @property
    def keys(self) -> tuple[str, ...]:
        """All names, the model's own first."""
        return (*self.base, *self.adapters)


def weights_in(model: object, model_type: str) -> Weights:
    """All weights of what a host calls its UNet or CLIP. No hook or method of the modules is called.

    Parameters and those buffers that a state dict has, under dotted names; each name once, also where several
    are one tensor.

    Args:
        model: See `parts_of`.
        model_type: See `parts_of`.
    """
    base: dict[str, Tensor] = {}
    adapters: dict[str, Tensor] = {}
    wrapped: set[str] = set()
    for prefix, part in parts_of(model, model_type).items():
        module = module_of(part)
        for found in () if module is None else _tensors(module, _Place("", "")):
            name, place = prefix + _plain(found.place.name, module), found.place
            if place.in_adapter:
                adapters[prefix + place.path] = found.tensor
            else:
                base[name] = found.tensor
                wrapped |= {name} if place.wrapped else set()
    return Weights(base, adapters, frozenset(wrapped))


def weights_nbytes(model: object, model_type: str) -> int | None:
    """Bytes of all weights and adapters, each tensor once; None without any."""
    found = weights_in(model, model_type)
    distinct = {id(tensor): tensor for tensor in (*found.base.values(), *found.adapters.values())}
    return sum(tensor.nbytes for tensor in distinct.values()) if distinct else None


class _Place(NamedTuple):
    """Where a walk is: the name without wrappers, the path with them, and inside of what."""

    name: str
    path: str
    in_adapter: bool = False
    wrapped: bool = False

    def to(self, child: str, *, wraps: bool) -> "_Place":
        inner = wraps and child in _WRAPPED
        name = self.name if inner or child in _TRANSPARENT else f"{self.name}{child}."
        return _Place(
            name, f"{self.path}{child}.", self.in_adapter or (wraps and not inner), self.wrapped or inner
        )


class _Found(NamedTuple):
    place: _Place
    tensor: Tensor


def _tensors(module: nn.Module, place: _Place) -> Iterator[_Found]:
    children = children_of(module)
    wraps = hasattr(type(module), "adapter_layer_names") and any(name in children for name in _WRAPPED)
    for own, tensor in _own_tensors(module):
        yield _Found(
            place._replace(
                name=place.name + own, path=place.path + own, in_adapter=place.in_adapter or wraps
            ),
            tensor,
        )
    for name, child in children.items():
        yield from _tensors(child, place.to(name, wraps=wraps))


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from own_parameters(module)
    yield from own_buffers(module, transient=False)


def _plain(name: str, module: nn.Module | None) -> str:
    """Without what PEFT's and data parallelism's classes put around a whole model."""
    classes = {base.__name__ for base in type(module).__mro__}
    if classes.intersection(_REPLICATING):
        name = name.removeprefix(_REPLICATED)
    return name.removeprefix(_BY_PEFT) if "PeftModel" in classes else name
