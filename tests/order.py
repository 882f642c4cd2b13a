"""The order in which files are begun by processes that each take a whole one at a time."""

from collections import Counter
from typing import Final

import pytest

LONGEST: Final = (
    "tests/pocket_pipelines/test_fewer_bytes.py",
    "tests/chaos/test_chaos.py",
    "tests/lora/extract/test_extract_resume.py",
    "tests/lora/wild/test_wild.py",
    "tests/gpu/test_on_the_cpu.py",
    "tests/analysis/diagnostics/test_faults_of_steps.py",
    "tests/stages/lora_application/test_random_programs.py",
    "tests/lbm/training/train/test_resume.py",
    "tests/lbm/training/distributed/test_sharded.py",
    "tests/history/test_many_writers.py",
    "tests/integrations/diffusers/watch_session/test_broken_close.py",
    "tests/integrations/diffusers/watch_session/test_long_life.py",
    "tests/examples/test_github_workflow.py",
)
"""Of few tests that take long. Begun last, one of them would leave the other processes idle."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Among several processes, begin with the longest files, and go on with those of many tests."""
    if not hasattr(config, "workerinput"):  # xdist's
        return
    tests = Counter(_file(item) for item in items)
    places = {file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: (places.get(_file(item), len(places)), -tests[_file(item)]))


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
