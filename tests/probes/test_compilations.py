"""What torch.compile did, read from the metrics that PyTorch keeps, here planted ones."""

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from sigmascope.probes.compilations import compilations_since
from sigmascope.probes.reading import Reading

SECOND = 10**9


def compilation(seconds_ago: float, **told: Any) -> SimpleNamespace:
    began_us = time.time_ns() // 1000 - round(1e6 * seconds_ago)
    return SimpleNamespace(start_time_us=began_us, **{"duration_us": 2_000_000, "fail_type": None, **told})


def plant(monkeypatch: pytest.MonkeyPatch, *compilations: SimpleNamespace) -> None:
    planted = SimpleNamespace(get_compilation_metrics=lambda: list(compilations))
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", planted)


def test_what_was_compiled_meanwhile_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(
        monkeypatch,
        compilation(90.0),
        compilation(5.0, inductor_fx_local_cache_hit_count=3),
        compilation(4.0, inductor_fx_local_cache_miss_count=1),
    )
    found = compilations_since(10 * SECOND).value
    assert found is not None
    assert (found.count, found.seconds, found.from_cache, found.not_in_cache) == (2, 4.0, 3, 1)
    assert (found.why, found.gave_up) == ((), False)


@pytest.mark.parametrize(
    ("guard", "words"),
    [
        (
            "0/0: tensor 'sample' size mismatch at index 2. expected 4, actual 8",
            "the size at index 2 of sample is 8, not 4",
        ),
        (
            "0/1: tensor 'guidance' stride mismatch at index 0. expected 1, actual 0",
            "the stride at index 0 of guidance is 0, not 1",
        ),
        (
            "1/0: tensor 'sample' dtype mismatch. expected Float, actual BFloat16",
            "the dtype of sample is BFloat16, not Float",
        ),
        ("0/0: sample.size()[2] <= 64  # in forward", "a bound on sizes"),
        ("0/0: GLOBAL_STATE changed: grad_mode ", "gradients are on or off"),
        ("0/0: prompt == 'my secret fox'  # in forward", "another value"),
        ("0/0: 'my secret fox' is no longer there", "another guard failed"),
    ],
)
def test_why_a_function_was_compiled_again_is_told_without_words_of_the_prompt(
    monkeypatch: pytest.MonkeyPatch, guard: str, words: str
) -> None:
    plant(monkeypatch, compilation(1.0, recompile_reason=guard))
    found = compilations_since(10 * SECOND).value
    assert found is not None
    assert found.why == (words,)


def test_a_limit_that_is_reached_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "Dynamo recompile limit exceeded\n  Explanation: …"
    plant(monkeypatch, compilation(1.0, fail_type="Unsupported", fail_reason=told))
    found = compilations_since(10 * SECOND).value
    assert found is not None
    assert (found.count, found.gave_up) == (0, True)


def test_where_nothing_was_ever_compiled_there_is_nothing_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert compilations_since(SECOND) == Reading(None)
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils")
    assert compilations_since(SECOND) == Reading(None)


def test_metrics_that_cannot_be_read_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace())
    reading = compilations_since(SECOND)
    assert reading.value is None
    assert reading.reason
