import json
import math
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import PurePosixPath

import numpy as np
import pytest
import torch

from sigmascope.monitor.guard import Guard, as_json
from sigmascope.probes import reading
from sigmascope.probes.reading import Reading


class Colour(Enum):
    RED = "red"


@dataclass
class Options:
    rank: int
    path: PurePosixPath


class Name(str):
    __slots__ = ()


CASES: list[tuple[object, object]] = [
    (None, None),
    (True, True),
    (3, 3),
    (2.5, 2.5),
    (math.inf, math.inf),
    (Name("x"), "x"),
    (np.float32(0.5), 0.5),
    (np.int64(4), 4),
    (np.bool_(True), True),
    (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
    (np.zeros((1000, 2)), "<array (1000, 2) float64>"),
    (Colour.RED, "red"),
    (PurePosixPath("a/b"), "a/b"),
    (datetime(2026, 11, 20, tzinfo=UTC), "2026-11-20T00:00:00+00:00"),
    ((1, [2, (3,)]), [1, [2, [3]]]),
    ({"b", "a"}, ["a", "b"]),
    (OrderedDict({1: "one", "two": (2,)}), {"1": "one", "two": [2]}),
    (Options(8, PurePosixPath("x")), {"rank": 8, "path": "x"}),
    (torch.zeros(2, 3), {"shape": [2, 3], "dtype": "torch.float32", "device": "cpu"}),
    (torch.float16, "torch.float16"),
    (torch.device("meta"), "meta"),
    (torch.nn.Linear(1, 1), "<Linear>"),
    (b"12345", "<5 bytes>"),
    ("long " * 1000, "long " * 1000),
    (type("Odd", (), {"__str__": lambda self: "o" * 1000})(), "o" * 499 + "…"),
]


@pytest.mark.parametrize(("value", "expected"), CASES, ids=lambda case: type(case).__name__)
def test_values_become_plain_json(value: object, expected: object) -> None:
    result = as_json(value)
    assert result == expected
    json.dumps(result)


def test_plain_types_replace_their_subclasses() -> None:
    assert type(as_json(Name("x"))) is str
    assert type(as_json(np.float64(0.5))) is float
    assert type(as_json(True)) is bool


def test_nan_stays() -> None:
    assert math.isnan(as_json(math.nan))


def test_what_contains_itself_ends() -> None:
    loop: list[object] = [1]
    loop.append(loop)
    assert json.dumps(as_json(loop)).count("<list>") == 1


def test_an_exception_that_cannot_be_described_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_error: BaseException) -> str:
        raise MemoryError

    def probe() -> None:
        raise KeyError("a")

    monkeypatch.setattr(reading, "message_of", fail)
    assert Guard().reading("probe", probe) == Reading(None, "KeyError")


def test_read_gives_what_the_probe_gives_and_none_where_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard()
    assert guard.read("probe", lambda: 0) == 0
    for _ in range(2):
        assert guard.read("probe", lambda: dict[str, int]()["a"]) is None
    assert [record.getMessage() for record in caplog.records] == [
        "probe could not read something: KeyError: 'a'"
    ]
    assert guard.works("probe")


def test_what_cannot_be_described_is_named_by_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(_error: BaseException) -> str:
        raise MemoryError

    monkeypatch.setattr("sigmascope.monitor.guard.error_text", empty)
    guard = Guard()
    guard.switch_off("probe", ValueError("the reason"))
    assert guard.reasons == {"probe": "ValueError"}
