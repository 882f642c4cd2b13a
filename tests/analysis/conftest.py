"""Fixtures that the tests of this room share."""

from tests.analysis.faulty_runs import found, pipe

__all__ = ["found", "pipe"]  # fixtures
