"""What comparing two dumps, or the dumps of two runs, gives."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sigmascope.analysis.tensor_results import TensorComparison
from sigmascope.analysis.verdicts import ORDER, Verdict


@dataclass(frozen=True, slots=True)
class NamedComparison:
    """Two tensors of two dumps, with their names there."""

    name_a: str
    name_b: str
    comparison: TensorComparison


@dataclass(frozen=True, slots=True)
class DumpComparison:
    """Two dumps.

    Attributes:
        pairs: The tensors that were compared, in A's order.
        only_a: Names of A that have no counterpart.
        only_b: Names of B that have none.
        context: What the headers say differently of encoder and prompts, as (A, B); a prompt by its hash.
    """

    pairs: tuple[NamedComparison, ...]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    context: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """The worst of all tensors; `different` if one has no counterpart or none has."""
        if self.only_a or self.only_b or not self.pairs:
            return "different"
        return worst_verdict(pair.comparison.verdict for pair in self.pairs)

    @property
    def agrees(self) -> bool:
        """Whether all tensors have counterparts and agree within their tolerances."""
        return self.verdict != "different"

    @property
    def same_layout(self) -> bool:
        """Whether all were compared as they are."""
        return all(pair.comparison.same_layout for pair in self.pairs)

    def as_dict(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        return {
            "verdict": self.verdict,
            "agrees": self.agrees,
            "same_layout": self.same_layout,
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "context": {name: list(values) for name, values in self.context.items()},
            "tensors": [
                {"name_a": pair.name_a, "name_b": pair.name_b, **pair.comparison.as_dict()}
                for pair in self.pairs
            ],
        }


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The dumps of two runs.

    Attributes:
        dumps: By name, those that both have, in A's order.
        only_a: Names of dumps that A alone has.
        only_b: Names of dumps that B alone has.
    """

    dumps: Mapping[str, DumpComparison]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The worst of all dumps; `different` if one has no counterpart or none has."""
        if self.only_a or self.only_b or not self.dumps:
            return "different"
        return worst_verdict(dump.verdict for dump in self.dumps.values())

    @property
    def agrees(self) -> bool:
        """Whether all dumps have counterparts and agree."""
        return self.verdict != "different"

    @property
    def same_layout(self) -> bool:
        """Whether all tensors were compared as they are."""
        return all(dump.same_layout for dump in self.dumps.values())

    @property
    def first_difference(self) -> str | None:
        """The first dump that does not agree, in the order in which A was saved; None if all do."""
        return next((name for name, dump in self.dumps.items() if not dump.agrees), None)

    def as_dict(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        return {
            "verdict": self.verdict,
            "agrees": self.agrees,
            "same_layout": self.same_layout,
            "first_difference": self.first_difference,
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "dumps": {name: dump.as_dict() for name, dump in self.dumps.items()},
        }


def worst_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of some; `identical` for none."""
    return max(verdicts, key=ORDER.index, default="identical")
