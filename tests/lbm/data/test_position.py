"""An epoch that goes on with another number of processes."""

from hypothesis import given
from hypothesis import strategies as st

from sigmascope.lbm.data import DataPosition, redistribute


def numbers(position: DataPosition, process: int, processes: int, samples: int) -> list[int]:
    """What a process still has to use: by the rule of the stream, written out."""
    rest = [number for number in range(position.samples, samples) if number % processes == process]
    return [*position.pending, *rest]


@given(data=st.data(), before=st.integers(1, 4), after=st.integers(1, 4), samples=st.integers(0, 40))
def test_no_sample_is_used_twice_or_lost(data: st.DataObject, before: int, after: int, samples: int) -> None:
    positions, used = [], []
    for process in range(before):
        reached = data.draw(st.integers(0, samples))
        seen = range(process, reached, before)
        pending = sorted(data.draw(st.sets(st.sampled_from(seen)))) if seen else []
        positions.append(DataPosition(3, reached, tuple(pending)))
        used += [number for number in seen if number not in pending]
    dealt = [redistribute(positions, process, after) for process in range(after)]
    left = [number for i in range(after) for number in numbers(dealt[i], i, after, samples)]
    assert sorted([*used, *left]) == list(range(samples))
    assert {position.epoch for position in dealt} == {3}
    for process, position in enumerate(dealt):
        assert all(number % after == process for number in position.pending)
