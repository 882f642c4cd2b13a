"""Apply a choice to a pipeline, and undo it exactly.

Before a choice is applied, `Structure` notes how the pipeline is put together, so that just what the choice changed
can be put back. What it notes are references: attributes of the pipeline, of every module, attention processor and
hook, and what their dicts and lists hold. Values of tensors are left to `Weights`. Moving weights or changing their
memory format loses nothing. Narrowing them does; then the originals are kept in RAM.

Choices on the same models must be undone in reverse order: otherwise undoing the later one would bring back what the
earlier one had made. So the process keeps a list of all choices in force, whoever applied them, and
`require_last_applied` refuses to undo one before the later ones.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from sigmascope import units
from sigmascope.errors import OptimizationError
from sigmascope.pipeline.memory_optimizations import (
    GROUP_HOOKS,
    LAYERWISE_CASTING_KIND,
    PLACEMENT_KIND,
    PRECISION_KIND,
    QUANTISATION_KIND,
    SLICING_KIND,
    TILING_KIND,
)
from sigmascope.pipeline.model_state import Structure
from sigmascope.pipeline.optimization_plan import (
    PIPELINE,
    Change,
    Choice,
    Kind,
    OptimizationConfig,
    Plan,
    Undo,
    models_of,
)
from sigmascope.pipeline.speed_optimizations import (
    ATTENTION_KIND,
    CACHE_KIND,
    CHANNELS_LAST_KIND,
    COMPILE_KIND,
    FAST_MATMUL_KIND,
    FUSED_QKV_KIND,
)
from sigmascope.probes import memory_snapshot
from sigmascope.records.memory import MIB

KINDS: Final[tuple[Kind, ...]] = (
    PRECISION_KIND,
    QUANTISATION_KIND,
    LAYERWISE_CASTING_KIND,
    FUSED_QKV_KIND,
    CHANNELS_LAST_KIND,
    ATTENTION_KIND,
    PLACEMENT_KIND,
    SLICING_KIND,
    TILING_KIND,
    FAST_MATMUL_KIND,
    CACHE_KIND,
    COMPILE_KIND,
)
"""Formats before placement, which must know how large weights will be; compiling last, over the hooks of the others."""
_KIND_BY_NAME = {kind.name: kind for kind in KINDS}
_HOOK_REGISTRY = "_diffusers_hook"
"""Where diffusers keeps the hooks of a module."""
Models = Iterable[tuple[str, nn.Module]]
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""Integers by the bytes of an element, to compare weights bit by bit."""


class AppliedChoice:
    """One choice while it is in force.

    Raises:
        OptimizationError: It failed, or there is too little RAM for the originals. The pipeline is as it was.
    """

    def __init__(self, pipeline: Any, choice: Choice, *, keep_originals: bool = True) -> None:
        self.choice = choice
        self._kind = kind_of(choice)
        self._pipeline = pipeline
        keep = self._kind.narrows and keep_originals
        if keep:
            _require_ram(choice)
        self._is_exact = keep or not self._kind.narrows
        self._models = models_of(pipeline)
        _require_parts(pipeline, choice, self._models)
        changed = self._touched() if self._kind.changes else ()
        self._weights = Weights(changed, self._kind.changes, keep=keep)
        structure = Structure([pipeline, *self._models.values()])
        self._undos: list[Undo] = []
        try:
            besides = self._kind.apply(pipeline, choice)
        except BaseException as failure:
            self._undos = structure.changes_since()
            self._put_back()
            if not isinstance(failure, Exception):
                raise
            raise OptimizationError(
                f"{choice.name} failed: {type(failure).__name__}: {failure}",
                hint=f"Leave it out: plan.without(['{choice.kind}']). The pipeline is as it was.",
            ) from failure
        self._undos = structure.changes_since()
        if besides is not None:
            self._undos.insert(0, besides)
        self._weights.settle(self._touched())
        self._hooks = set(_hooks(self._models))
        self.concerned = [model for _, model in self._touched()]
        _IN_FORCE.append(weakref.ref(self, _IN_FORCE.remove))

    def is_of(self, choice: Choice) -> bool:
        """Whether this is that choice, on the models that the pipeline has now."""
        own, now = self.choice, [model for _, model in self._touched()]
        is_alike = (own.kind, own.component, own.options) == (choice.kind, choice.component, choice.options)
        return is_alike and list(map(id, now)) == list(map(id, self.concerned))

    def undo(self) -> list[str]:
        """Put back what the choice changed.

        Returns:
            Names of weights that somebody else changed meanwhile; their new values stay, in the old dtype.

        Raises:
            OptimizationError: Originals were not kept, or later choices or others' hooks come first.
        """
        if not self._is_exact:
            raise OptimizationError(
                f"{self.choice.name} cannot be undone: its original weights were not kept.",
                hint="Load the pipeline again, or apply with keep_originals=True.",
            )
        require_last_applied([self])
        self._refuse_hooks_of_others()
        changed = self._put_back()
        _IN_FORCE[:] = [known for known in _IN_FORCE if known() is not self]
        return changed

    def _put_back(self) -> list[str]:
        for undo in self._undos:
            undo()
        self._undos = []
        _forget_registries(self._models)
        return self._weights.put_back()

    def _touched(self) -> list[tuple[str, nn.Module]]:
        """Of all models for a choice that concerns the pipeline, else of its own."""
        models = models_of(self._pipeline)
        return [(name, model) for name, model in models.items() if self.choice.component in (name, PIPELINE)]

    def _refuse_hooks_of_others(self) -> None:
        moves_layers = self.choice.options.get("how") == "group"  # it puts hooks on at the first call, too
        since = {name for part, name in _hooks(self._models) if (part, name) not in self._hooks}
        others = sorted(since.difference(GROUP_HOOKS if moves_layers else ()))
        if others:
            raise OptimizationError(
                f"{self.choice.name} cannot be undone: hooks were added since ({', '.join(others)}).",
                hint="Remove them first, for example with disable_cache() or remove_hook.",
            )


def kind_of(choice: Choice) -> Kind:
    """The kind of a choice.

    Raises:
        OptimizationError: There is no such kind.
    """
    kind = _KIND_BY_NAME.get(choice.kind)
    if kind is None:
        raise OptimizationError(
            f"There is no kind of choice called {choice.kind!r}.",
            hint=f"Choose one of {', '.join(_KIND_BY_NAME)}.",
        )
    return kind


def _require_ram(choice: Choice) -> None:
    available = memory_snapshot().ram_available_bytes
    needed = int(choice.ram_mb * MIB)
    if available is not None and needed > available:
        raise OptimizationError(
            f"{choice.name} loses values. Keeping the originals for undo takes {units.mib(needed)} MB of RAM, and only "
            f"{units.mib(available)} MB are free.",
            hint="Free RAM, or pass OptimizationConfig(keep_originals=False): then it cannot be undone.",
        )


def _require_parts(pipeline: Any, choice: Choice, models: dict[str, nn.Module]) -> None:
    """Refuse a choice that was planned for a pipeline of other parts."""
    meant = str(choice.options.get("components", choice.component)).split(",")
    absent = [name for name in meant if name not in (*models, PIPELINE)]
    if absent:
        raise OptimizationError(
            f"{choice.name} is planned for {', '.join(absent)}, which {type(pipeline).__name__} does not have.",
            hint="Plan for this pipeline: optimizer.plan(pipeline).",
        )


def _hooks(models: dict[str, nn.Module]) -> Iterator[tuple[int, str]]:
    """Diffusers' hooks, by module and name."""
    for model in models.values():
        for part in model.modules():
            for name in getattr(getattr(part, _HOOK_REGISTRY, None), "hooks", ()):
                yield id(part), name


def _forget_registries(models: dict[str, nn.Module]) -> None:
    """Let models look again for the hooks below them: diffusers keeps a list, which may hold some that are gone."""
    for model in models.values():
        parts = list(model.modules())
        present = {id(own) for part in parts if (own := getattr(part, _HOOK_REGISTRY, None)) is not None}
        for part in parts:
            registry: Any = getattr(part, _HOOK_REGISTRY, None)
            listed = getattr(registry, "_child_registries_cache", None) or ()
            if any(id(child) not in present for child in listed):
                registry._child_registries_cache = None


def undo_all(done: list[AppliedChoice]) -> list[str]:
    """Undo choices, the last applied first; each is off the list once it is undone.

    Returns:
        Names of weights that somebody else changed meanwhile.
    """
    changed: list[str] = []
    while done:
        changed += done[-1].undo()
        done.pop()
    return changed


@dataclass(frozen=True, slots=True, eq=False)
class AppliedPlan:
    """One plan in force. `config` is what it was made with; None: it was given."""

    pipeline: Any
    plan: Plan
    done: list[AppliedChoice]
    config: OptimizationConfig | None = None


@dataclass(slots=True)
class _Weight:
    """One parameter or buffer as it was.

    Attributes:
        owner: The module whose own it is.
        key: Its name there.
        original: Its values, for a choice that narrows them.
        narrowed: The dtype that the choice gave it.
    """

    name: str
    owner: nn.Module
    key: str
    tensor: Tensor
    device: torch.device
    dtype: torch.dtype
    stride: tuple[int, ...]
    original: Tensor | None = None
    narrowed: torch.dtype | None = None

    def now(self) -> Tensor:
        """The tensor in its place: `Module.to` puts new buffers there, and new values into parameters."""
        held = self.owner._buffers.get(self.key)
        return self.tensor if held is None else held


class Weights:
    """The weights of models before a choice."""

    def __init__(self, modules: Models, changes: frozenset[Change], *, keep: bool) -> None:
        self._changes = changes
        self._weights = [
            _Weight(name, owner, key, tensor, tensor.device, tensor.dtype, tensor.stride())
            for name, owner, key, tensor in _named_tensors(modules)
        ]
        for weight in self._weights if keep else ():
            if weight.tensor.is_floating_point():
                weight.original = weight.tensor.data.cpu()  # no copy of what is in RAM already

    def settle(self, modules: Models) -> None:
        """Let go of the originals of weights that the choice did not change.

        Parameters that it replaced stay alive until it is undone; in RAM they do not cost the device anything.
        """
        present = {id(tensor) for _, _, _, tensor in _named_tensors(modules)}
        for weight in self._weights:
            now = weight.now()
            weight.narrowed = now.dtype
            if weight.original is None:
                continue
            if id(now) not in present:
                weight.tensor.data = weight.original
                weight.narrowed = weight.dtype
            elif now.dtype == weight.dtype:
                weight.original = None

    def put_back(self) -> list[str]:
        """Put all weights back.

        Returns:
            Names of those that somebody else changed in the meantime: their new values stay, in the old dtype.
        """
        with torch.no_grad():
            return [weight.name for weight in self._weights if not self._put_back(weight)]

    def _put_back(self, weight: _Weight) -> bool:
        held = weight.now()
        now = held.data
        untouched = _is_untouched(weight, now)
        source = now if weight.original is None or not untouched else weight.original
        data = source.to(
            weight.device if "device" in self._changes else now.device,
            weight.dtype if "dtype" in self._changes else now.dtype,
        )
        if "layout" in self._changes and data.stride() != weight.stride:
            laid = torch.empty_strided(data.shape, weight.stride, dtype=data.dtype, device=data.device)
            data = laid.copy_(data)
        if data is not weight.tensor.data:
            weight.tensor.data = data
        if held is not weight.tensor:
            weight.owner._buffers[weight.key] = weight.tensor
        return untouched


def _named_tensors(modules: Models) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Parameters and buffers with their names and owners, each once."""
    seen: set[int] = set()
    for prefix, module in modules:
        for path, part in module.named_modules(prefix=prefix):
            for key, tensor in (*part._parameters.items(), *part._buffers.items()):
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"{path}.{key}", part, key, tensor


def _is_untouched(weight: _Weight, now: Tensor) -> bool:
    """Whether these are the original's values after narrowing; a call that broke off may have left them widened."""
    original = weight.original
    if original is None or (now.dtype == original.dtype and now.data_ptr() == original.data_ptr()):
        return True
    expected = original.to(weight.narrowed or now.dtype).to(now.dtype)
    return torch.equal(_bits(now.cpu()), _bits(expected))


def _bits(tensor: Tensor) -> Tensor:
    """The same bytes as integers, so that NaN equals itself and float8 can be compared."""
    return tensor.contiguous().view(_BITS[tensor.element_size()])


_IN_FORCE: list[weakref.ref[AppliedChoice]] = []
"""Weak references: once an optimizer is gone, its choices cannot be undone, and its models may be freed."""


def require_last_applied(choices: Sequence[AppliedChoice]) -> None:
    """Refuse to undo choices that others were applied over.

    Raises:
        OptimizationError: Names the first of these others.
    """
    in_force = [applied for reference in _IN_FORCE if (applied := reference()) is not None]
    for applied in choices:
        models = set(map(id, applied.concerned))
        later = in_force[in_force.index(applied) + 1 :] if applied in in_force else []
        for other in later:
            if other not in choices and models.intersection(map(id, other.concerned)):
                raise OptimizationError(
                    f"{applied.choice.name} cannot be undone: {other.choice.name} was applied after it, on the same "
                    "model.",
                    hint="Undo that first, with the PipelineOptimizer that applied it.",
                )
