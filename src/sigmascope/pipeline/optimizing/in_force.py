"""Which choices are in force, in the order in which they were applied, whoever applied them.

Choices on the same models lie one over the other: taken off from below, the upper one would put back later what the
lower one had made.
"""

import weakref
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import nn

from sigmascope.errors import OptimizationError
from sigmascope.pipeline.optimizing.plan import Choice


@runtime_checkable
class InForce(Protocol):
    """A choice that was applied."""

    @property
    def choice(self) -> Choice:
        """What was applied."""
        ...

    @property
    def concerned(self) -> Sequence[nn.Module]:
        """The models that it was applied to."""
        ...


_ORDER: list[weakref.ref[InForce]] = []
"""Weak: of an optimizer that is gone nothing can be undone, and its models shall go too."""


def note_applied(one: InForce) -> None:
    """Note that a choice is in force from now on."""
    _ORDER[:] = [known for known in _ORDER if known() is not None]
    _ORDER.append(weakref.ref(one))


def note_undone(one: InForce) -> None:
    """Note that a choice was undone."""
    _ORDER[:] = [known for known in _ORDER if known() not in (None, one)]


def require_last_applied(ones: Sequence[InForce]) -> None:
    """Refuse to undo choices that others were applied over.

    Args:
        ones: To be undone together.

    Raises:
        OptimizationError: Names the first of these others.
    """
    for one in ones:
        over = next((other for other in _after(one) if other not in ones and _share_models(one, other)), None)
        if over is not None:
            raise OptimizationError(
                f"{one.choice.name} cannot be undone: {over.choice.name} was applied after it, on the same model.",
                hint="Undo that first, with the PipelineOptimizer that applied it.",
            )


def _after(one: InForce) -> list[InForce]:
    known = [other for reference in _ORDER if (other := reference()) is not None]
    return known[known.index(one) + 1 :] if one in known else []


def _share_models(one: InForce, other: InForce) -> bool:
    return bool({id(model) for model in one.concerned} & {id(model) for model in other.concerned})
