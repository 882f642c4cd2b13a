"""The order in which files are begun by processes that each take a whole one at a time."""

from collections import Counter
from typing import Final

import pytest

LONGEST: Final = (
    "tests/pocket_pipelines/test_fewer_bytes.py",
    "tests/chaos/test_chaos.py",
    "tests/integrations/diffusers/recipe/test_idle_loras.py",
    "tests/integrations/process_recording/test_recording.py",
    "tests/stages/lora_application/test_random_programs.py",
    "tests/lbm/training/distributed/test_sharded.py",
    "tests/lora/wild/test_wild.py",
    "tests/pretended_device/test_commands.py",
    "tests/integrations/process_recording/test_parts.py",
    "tests/ui/pages/test_browser.py",
    "tests/gpu/test_on_the_cpu.py",
    "tests/history/test_postgres.py",
    "tests/pipeline/apply_undo/test_undo.py",
    "tests/history/test_many_writers.py",
    "tests/integrations/diffusers/watch/test_why_it_does_nothing.py",
    "tests/lora/test_hosts_loaders.py",
    "tests/integrations/diffusers/watch_session/test_broken_close.py",
    "tests/pretended_device/test_families.py",
    "tests/lbm/pocket/test_demo.py",
    "tests/cli/lora/test_statistics.py",
    "tests/pipeline/speed_optimizations/test_kernels.py",
    "tests/integrations/diffusers/components/test_strength_by_part.py",
    "tests/lbm/pocket/test_pocket_model.py",
    "tests/integrations/diffusers/watch/test_faults.py",
    "tests/integrations/diffusers/recipe/test_merged_before.py",
    "tests/test_wheel.py",
    "tests/integrations/diffusers/test_what_changed.py",
    "tests/pretended_device/test_watched_loras.py",
    "tests/lbm/training/train/test_pocket_training.py",
    "tests/lbm/training/train/test_whole_processes.py",
    "tests/integrations/test_kept_runs.py",
    "tests/examples/test_github_workflow.py",
    "tests/integrations/diffusers/components/test_hot_swap.py",
    "tests/integrations/autostart/test_real_pipeline.py",
    "tests/cli/test_ui.py",
    "tests/cli/lora/test_plan.py",
    "tests/examples/test_fleet.py",
)
"""Of tests that take 15 seconds and more together. Begun last, one of them would leave the other processes idle."""


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
