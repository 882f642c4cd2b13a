"""A conclusion drawn from a record: what was seen, why it matters, what to do."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sigmascope.records.facts import JsonScalar

Severity = Literal["info", "warning", "error", "critical"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding; `evidence` holds the numbers it rests on."""

    id: str
    severity: Severity
    message: str
    evidence: Mapping[str, JsonScalar] = field(default_factory=dict)
    advice: str | None = None
    stage: str | None = None
