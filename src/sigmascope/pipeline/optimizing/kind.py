"""What a kind of choice is: when it is taken, how it is applied, and what it does to weights."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from sigmascope.pipeline.optimizing.circumstances import Circumstances
from sigmascope.pipeline.optimizing.plan import Choice, NotTaken

Change = Literal["dtype", "device", "layout"]
"""What a choice does to weights, and so what has to be put back."""
Undo = Callable[[], None]
Considered = Iterator[Choice | NotTaken]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of choice.

    Attributes:
        name: As `Choice.kind` has it.
        consider: Choices for a pipeline, and reasons where there are none.
        apply: Do one of them to a pipeline by the calls of diffusers and torch. It may give what has to be undone
            besides the pipeline's own structure and weights, such as a flag of the process; done first.
        changes: What it does to weights.
        narrows: Whether values are lost by it.
    """

    name: str
    consider: Callable[[Circumstances], Considered]
    apply: Callable[[Any, Choice], Undo | None]
    changes: frozenset[Change] = frozenset()
    narrows: bool = False
