from types import SimpleNamespace
from typing import Any

import pytest
from tests.workers import pytest_xdist_auto_num_workers


@pytest.mark.parametrize(("asked", "processes"), [("slow", 3), ("not slow", 2), ("", 2)])
def test_slow_tests_alone_get_one_process_more_than_there_are_cores(asked: str, processes: int) -> None:
    config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=asked))
    hook: Any = pytest_xdist_auto_num_workers(config)
    next(hook)
    with pytest.raises(StopIteration) as ended:
        hook.send(2)
    assert ended.value.value == processes
