from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.slow_files import pytest_ignore_collect, pytest_itemcollected

MARKED = "import pytest\n\n@pytest.mark.slow\ndef test_it() -> None:\n    pass\n"
PLAIN = "def test_it() -> None:\n    pass\n"


def asked_for(expression: str) -> Any:
    return SimpleNamespace(option=SimpleNamespace(markexpr=expression))


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_files_without_a_slow_test_are_left_out_where_slow_ones_alone_are_asked_for(tmp_path: Path) -> None:
    plain, marked = written(tmp_path, "test_a.py", PLAIN), written(tmp_path, "test_b.py", MARKED)
    assert pytest_ignore_collect(plain, asked_for("slow")) is True
    assert pytest_ignore_collect(marked, asked_for("slow")) is None
    for other in ("", "not slow", "gpu"):
        assert pytest_ignore_collect(plain, asked_for(other)) is None
    beside = [tmp_path, written(tmp_path, "conftest.py", PLAIN), written(tmp_path, "test_data.txt", PLAIN)]
    assert [pytest_ignore_collect(path, asked_for("slow")) for path in beside] == [None] * 3


@pytest.mark.parametrize(
    ("text", "marker", "is_refused"), [(PLAIN, True, True), (PLAIN, None, False), (MARKED, True, False)]
)
def test_a_slow_test_that_would_be_left_out_is_refused(
    text: str, marker: Any, is_refused: bool, tmp_path: Path
) -> None:
    path = written(tmp_path, "test_it.py", text)
    item: Any = SimpleNamespace(
        path=path, nodeid="test_it.py::test_it", get_closest_marker=lambda _name: marker
    )
    if is_refused:
        with pytest.raises(pytest.UsageError, match="its file does not say the word"):
            pytest_itemcollected(item)
    else:
        pytest_itemcollected(item)
