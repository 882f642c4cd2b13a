"""YAML files as their writers meant them."""

from pathlib import Path

import pytest

from sigmascope.errors import ConfigError
from sigmascope.lbm.config import read_yaml


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "name", "line"),
    [
        ("rank: 8\nseed: 1\nrank: 16\n", "rank", 3),
        ("vae:\n  layers_per_block: 1\n  layers_per_block: 2\n", "layers_per_block", 3),
        ('rank: 8\n"rank": 16\n', "rank", 2),
        ("a: [{b: 1, b: 2}]\n", "b", 1),
    ],
)
def test_a_key_given_twice_is_named_with_its_line(tmp_path: Path, text: str, name: str, line: int) -> None:
    with pytest.raises(ConfigError, match=rf"run\.yaml: .*{name} is given twice[^$]*line {line},"):
        read_yaml(written(tmp_path, text))


def test_the_same_key_in_two_mappings_and_what_a_merge_changes_are_not_twice(tmp_path: Path) -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b\n  <<: *a\n  x: 2\nc:\n  d:\n    <<: *b\n    x: 3\n"
    assert read_yaml(written(tmp_path, text)) == {
        "a": {"x": 1, "y": 1},
        "b": {"x": 2, "y": 1},
        "c": {"d": {"x": 3, "y": 1}},
    }


def test_another_encoding_is_said_to_be_one(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes("seed: 1  # café".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"run\.yaml: cannot be read .*Save it as UTF-8"):
        read_yaml(path)


def test_brackets_without_end_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        read_yaml(written(tmp_path, "[" * 1000))


def test_no_object_of_python_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_yaml(written(tmp_path, "!!python/object/apply:os.getcwd []"))


@pytest.mark.parametrize(
    "value", ["2001-13-45", '!!int ""', "!!float ''", "!!timestamp soon", "!!bool maybe"]
)
def test_a_value_that_is_not_what_it_looks_like_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml: holds a value that YAML reads as something else"):
        read_yaml(written(tmp_path, f"rank: {value}\n"))


@pytest.mark.parametrize("value", ["1" * 5000, "0x" + "f" * 5000, "0b" + "1" * 5000, "1." + "0" * 5000])
def test_a_number_of_thousands_of_digits_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml: is not valid YAML \(a number has 5,00\d digits"):
        read_yaml(written(tmp_path, f"rank: {value}\n"))


@pytest.mark.parametrize("value", ["0x" + "f" * 998, "9" * 1000, "0o" + "7" * 998, "59" + ":59" * 332])
def test_the_largest_number_that_is_read_can_be_said(tmp_path: Path, value: str) -> None:
    assert str(read_yaml(written(tmp_path, f"rank: {value}\n"))["rank"])
