"""A rule: one kind of finding, with its id, severities, topic, and the function that looks for it.

A file of rules imports `rule`, and `diagnostics` imports that file. The docs show the first line of the function's
docstring.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeVar

from sigmascope.records.run import Finding, JsonScalar, Severity

LooksAt = Literal["generation", "run", "ranks"]
"""What a rule gets: the `Case` of each generation, the `Run`, or the runs of merged ranks by name."""
RULES: Final[dict[str, "Rule"]] = {}
"""All rules by id, in the order in which they were declared."""


class Seen(NamedTuple):
    """What a rule saw: a finding without its id. Without a severity, it has the rule's usual one."""

    message: str
    evidence: Mapping[str, JsonScalar]
    advice: str | None = None
    severity: Severity | None = None
    stage: str | None = None


Look = TypeVar("Look", bound=Callable[..., Iterator[Seen]])


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of finding.

    Attributes:
        id: Of its findings.
        severities: Those that its findings may have, the usual one first.
        about: The row of the docs' table that it stands in.
        looks_at: What `look` is given.
        look: Yields what it sees.
    """

    id: str
    severities: tuple[Severity, ...]
    about: str
    looks_at: LooksAt
    look: Callable[..., Iterator[Seen]]

    @property
    def says(self) -> str:
        """What its findings say, in a sentence."""
        return (self.look.__doc__ or "").partition("\n")[0]

    def findings(self, subject: Any) -> Iterator[Finding]:
        """What it finds in a case, a run or the ranks, as `looks_at` says.

        Raises:
            ValueError: A finding has a severity that the rule does not declare.
        """
        for seen in self.look(subject):
            severity = self.severities[0] if seen.severity is None else seen.severity
            if severity not in self.severities:
                raise ValueError(
                    f"{self.id} declares the severities {self.severities}, and gave a finding {severity!r}"
                )
            yield Finding(self.id, severity, seen.message, seen.evidence, seen.advice, seen.stage)


def rule(
    id: str, *severities: Severity, about: str, looks_at: LooksAt = "generation"
) -> Callable[[Look], Look]:
    """Make a function the rule for one kind of finding.

    Args:
        id: Of the findings, such as "time.vae_share". No two rules have the same.
        severities: Those that they may have, the usual one first.
        about: The row of the docs' table, such as "memory".
        looks_at: What the function is given.

    Raises:
        ValueError: A rule with this id is there, or no severity is given.
    """
    if id in RULES or not severities:
        raise ValueError(f"the rule {id!r} " + ("is declared twice" if severities else "has no severity"))

    def declared(look: Look) -> Look:
        RULES[id] = Rule(id, severities, about, looks_at, look)
        return look

    return declared
