"""A choice done to a pipeline, and the exact way back."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from sigmascope import units
from sigmascope.errors import OptimizationError
from sigmascope.pipeline.optimizing.in_force import note_applied, note_undone, require_last_applied
from sigmascope.pipeline.optimizing.kind import Kind, Undo
from sigmascope.pipeline.optimizing.kinds import KINDS
from sigmascope.pipeline.optimizing.placement import GROUP_HOOKS
from sigmascope.pipeline.optimizing.plan import PIPELINE, Choice
from sigmascope.pipeline.optimizing.structure import Structure
from sigmascope.pipeline.optimizing.subject import models_of
from sigmascope.pipeline.optimizing.weights import Weights
from sigmascope.probes import memory_snapshot
from sigmascope.records.arithmetic import MIB

_BY_NAME = {kind.name: kind for kind in KINDS}
_REGISTRY = "_diffusers_hook"
_WHAT = ("kind", "component", "options")


class AppliedChoice:
    """One choice while it is in force.

    Args:
        pipeline: What it is done to.
        choice: What to do.
        keep_originals: Whether to keep weights whose values are lost, in RAM.

    Raises:
        OptimizationError: It failed, or RAM for the originals is not there. The pipeline is as it was.
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
        self._weights = (
            Weights(self._touched(), self._kind.changes, keep=keep) if self._kind.changes else None
        )
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
        if self._weights is not None:
            self._weights.settle(self._touched())
        self._hooks = dict(_hook_names(self._models))
        self.concerned = [model for _, model in self._touched()]
        note_applied(self)

    def is_of(self, choice: Choice) -> bool:
        """Whether this is that choice, on the models that the pipeline has now."""
        is_alike = all(getattr(self.choice, name) == getattr(choice, name) for name in _WHAT)
        return is_alike and [id(model) for _, model in self._touched()] == [id(one) for one in self.concerned]

    def undo(self) -> list[str]:
        """Put back what the choice changed.

        Returns:
            Names of weights that somebody else changed meanwhile; their new values stay, in the old dtype.

        Raises:
            OptimizationError: Originals were not kept, or later choices or hooks of others lie over its own.
        """
        if not self._is_exact:
            raise OptimizationError(
                f"{self.choice.name} cannot be undone: its original weights were not kept.",
                hint="Load the pipeline anew, or apply with keep_originals=True.",
            )
        require_last_applied([self])
        self._refuse_hooks_of_others()
        changed = self._put_back()
        note_undone(self)
        return changed

    def _put_back(self) -> list[str]:
        for undo in self._undos:
            undo()
        self._undos = []
        _forget_registries(self._models)
        return [] if self._weights is None else self._weights.put_back()

    def _touched(self) -> list[tuple[str, nn.Module]]:
        """Of all models for a choice that concerns the pipeline, else of its own."""
        models = models_of(self._pipeline)
        return [(name, model) for name, model in models.items() if self.choice.component in (name, PIPELINE)]

    def _refuse_hooks_of_others(self) -> None:
        moves_layers = self.choice.options.get("how") == "group"  # it puts hooks on at the first call, too
        others = sorted(
            name
            for key, name in _hook_names(self._models)
            if key not in self._hooks and not (moves_layers and name in GROUP_HOOKS)
        )
        if others:
            raise OptimizationError(
                f"{self.choice.name} cannot be undone: hooks were put on since ({', '.join(dict.fromkeys(others))}).",
                hint="Take these off first, as by disable_cache() or remove_hook.",
            )


def kind_of(choice: Choice) -> Kind:
    """The kind of a choice.

    Raises:
        OptimizationError: There is no such kind.
    """
    kind = _BY_NAME.get(choice.kind)
    if kind is None:
        raise OptimizationError(
            f"There is no kind of choice called {choice.kind!r}.", hint=f"Known are {', '.join(_BY_NAME)}."
        )
    return kind


def _require_parts(pipeline: Any, choice: Choice, models: dict[str, nn.Module]) -> None:
    """Refuse a choice that was planned for a pipeline of other parts."""
    meant = str(choice.options.get("components", choice.component)).split(",")
    absent = [name for name in meant if name not in (*models, PIPELINE)]
    if absent:
        raise OptimizationError(
            f"{choice.name} is planned for {', '.join(absent)}, which {type(pipeline).__name__} does not have.",
            hint="Plan for this pipeline: optimizer.plan(pipeline).",
        )


def _require_ram(choice: Choice) -> None:
    available = memory_snapshot().ram_available_bytes
    needed = int(choice.ram_mb * MIB)
    if available is not None and needed > available:
        raise OptimizationError(
            f"{choice.name} loses values, and keeping the originals for undo takes {units.mib(needed)} MB of RAM, "
            f"of which {units.mib(available)} MB are free.",
            hint="Pass OptimizationConfig(keep_originals=False): then it cannot be undone.",
        )


def _hook_names(models: dict[str, nn.Module]) -> Iterator[tuple[tuple[int, str], str]]:
    """Names of diffusers' hooks, by module and name."""
    for model in models.values():
        for part in model.modules():
            for name in getattr(getattr(part, _REGISTRY, None), "hooks", ()):
                yield (id(part), name), name


def _forget_registries(models: dict[str, nn.Module]) -> None:
    """Let models look anew for the hooks below them: diffusers keeps a list, which may hold some that are gone."""
    for model in models.values():
        parts = list(model.modules())
        present = {id(found) for part in parts if (found := getattr(part, _REGISTRY, None)) is not None}
        for part in parts:
            registry: Any = getattr(part, _REGISTRY, None)
            listed = getattr(registry, "_child_registries_cache", None) or ()
            if any(id(one) not in present for one in listed):
                registry._child_registries_cache = None


def undo_all(done: list[AppliedChoice]) -> list[str]:
    """Undo choices, the last applied first; each is off the list once it is undone.

    Args:
        done: In the order in which they were applied.

    Returns:
        Names of weights that somebody else changed meanwhile.
    """
    changed: list[str] = []
    while done:
        changed += done[-1].undo()
        done.pop()
    return changed
