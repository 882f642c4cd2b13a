"""How many processes run the slow tests: one more than else, as each now and then waits for servers, disks and clocks."""

from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True, optionalhook=True)  # xdist's
def pytest_xdist_auto_num_workers(config: pytest.Config) -> Generator[None, int, int]:
    """One for each core, as xdist says; of slow tests alone one more, or a core would be idle while one waits."""
    cores = yield
    return cores + 1 if config.option.markexpr == "slow" else cores
