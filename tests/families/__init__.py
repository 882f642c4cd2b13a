"""The seven families of models as real pipelines, small, offline, and shared by the tests."""

from tests.families.family import FAMILIES, Family
from tests.families.pipelines import generate, make_pipeline

__all__ = ["FAMILIES", "Family", "generate", "make_pipeline"]
