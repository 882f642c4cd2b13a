import pytest

from sigmascope.records.serialization import loads


def test_what_is_nested_too_deeply_to_be_written_again_is_refused() -> None:
    assert loads("[" * 100 + "]" * 100)
    with pytest.raises(ValueError, match="nested too deeply"):
        loads("[" * 300 + "]" * 300)
