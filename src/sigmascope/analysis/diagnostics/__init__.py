"""Findings from rules on a record: what was seen, why it matters, what to do."""

from sigmascope.analysis.diagnostics.diagnose import RULES, diagnose

__all__ = ["RULES", "diagnose"]
