"""The order in which files are begun by processes that each take a whole one at a time."""

from collections import Counter
from typing import Final

import pytest

LONGEST: Final = (
    "tests/pocket_pipelines/test_fewer_bytes.py",
    "tests/chaos/test_chaos.py",
    "tests/integrations/diffusers/recipe/test_idle_loras.py",
    "tests/stages/lora_application/test_random_programs.py",
    "tests/lora/wild/test_wild.py",
    "tests/lbm/training/distributed/test_sharded.py",
    "tests/integrations/process_recording/test_recording.py",
    "tests/pretended_device/test_commands.py",
    "tests/history/test_many_writers.py",
    "tests/ui/pages/test_browser.py",
    "tests/history/test_postgres.py",
    "tests/pipeline/apply_undo/test_undo.py",
    "tests/lora/test_hosts_loaders.py",
    "tests/gpu/test_on_the_cpu.py",
    "tests/integrations/diffusers/watch_session/test_broken_close.py",
    "tests/integrations/diffusers/test_what_changed.py",
    "tests/integrations/diffusers/watch/test_why_it_does_nothing.py",
    "tests/cli/lora/test_statistics.py",
    "tests/integrations/diffusers/watch/test_faults.py",
    "tests/lbm/pocket/test_demo.py",
    "tests/lbm/pocket/test_pocket_model.py",
    "tests/lbm/training/train/test_pocket_training.py",
    "tests/test_wheel.py",
    "tests/integrations/diffusers/components/test_strength_by_part.py",
    "tests/integrations/diffusers/recipe/test_merged_before.py",
    "tests/lbm/training/train/test_whole_processes.py",
    "tests/examples/test_github_workflow.py",
    "tests/integrations/diffusers/components/test_hot_swap.py",
    "tests/integrations/test_kept_runs.py",
    "tests/examples/test_fleet.py",
    "tests/pretended_device/test_families.py",
    "tests/integrations/diffusers/watch_session/test_long_life.py",
    "tests/cli/test_ui.py",
    "tests/integrations/autostart/test_real_pipeline.py",
    "tests/pretended_device/test_watched_loras.py",
    "tests/integrations/diffusers/components/test_new_adapters.py",
    "tests/lora/extract/test_extract_resume.py",
    "tests/cli/lbm/create_base/test_lbm_create_base_interrupted.py",
    "tests/cli/lora/test_plan.py",
    "tests/pipeline/lora_grid/test_lora_grid.py",
    "tests/pipeline/speed_optimizations/test_kernels.py",  # where nothing was compiled before
)
"""Of slow tests that take 15 seconds of CPU time and more together. Begun last, one of them would leave the other processes idle."""


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
