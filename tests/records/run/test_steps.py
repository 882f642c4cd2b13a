import pytest

from sigmascope.records import Steps


def test_steps_count_their_seconds() -> None:
    assert len(Steps(started=(0.0, 1.0), seconds=(1.0, 0.5), rss_bytes=(None, 3))) == 2


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        ({"started": (0.0,)}, "started"),
        ({"started": ()}, "started"),
        ({"gpu_seconds": (1.0, None, 1.0)}, "gpu_seconds"),
        ({"rss_bytes": (1,)}, "rss_bytes"),
        ({"allocated_bytes": (1,)}, "allocated_bytes"),
        ({"started": (), "seconds": (), "rss_bytes": (1,)}, "rss_bytes"),
    ],
)
def test_a_column_of_another_length_is_named(steps: dict[str, tuple[float, ...]], name: str) -> None:
    with pytest.raises(ValueError, match=rf"the column {name} has \d entries, seconds has \d"):
        Steps(**{"started": (0.0, 1.0), "seconds": (1.0, 1.0), **steps})  # type: ignore[arg-type]


def test_a_column_that_could_not_be_measured_is_empty() -> None:
    steps = Steps(started=(0.0,), seconds=(1.0,), unavailable={"rss_bytes": "no /proc"})
    assert steps.rss_bytes == ()
