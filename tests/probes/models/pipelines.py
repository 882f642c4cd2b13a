"""Pipelines of every family, made once for tests that only read them."""

from functools import cache
from typing import Any

from tests.families import make_pipeline


@cache
def read_only(family: str) -> Any:
    return make_pipeline(family)
