from pathlib import Path

import pytest

from sigmascope.errors import ConfigError, FileError
from sigmascope.lbm.make_shards import find_pairs

KEYS = ("source", "target")


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    return folder


def found(folder: Path, keys: tuple[str, ...] = KEYS, optional: tuple[str, ...] = ()) -> dict[str, list[str]]:
    return {
        pair.name: [f"{key}={file.relative_to(folder)}" for key, file in pair.files.items()]
        for pair in find_pairs(folder, keys, optional)[0]
    }


@pytest.mark.parametrize("joint", ["_", "-", "."])
def test_names_that_end_in_the_key(tmp_path: Path, joint: str) -> None:
    make(tmp_path, f"a{joint}source.png", f"a{joint}target.jpg")
    assert found(tmp_path) == {"a": [f"source=a{joint}source.png", f"target=a{joint}target.jpg"]}


def test_subfolders_named_by_the_keys(tmp_path: Path) -> None:
    make(tmp_path, "source/a.png", "target/a.webp", "source/x/b.png", "target/x/b.png", "mask/a.png")
    pairs = found(tmp_path, KEYS, ("mask",))
    assert set(pairs) == {"a", "x/b"}
    assert "mask=mask/a.png" in pairs["a"]


def test_a_folder_for_each_pair(tmp_path: Path) -> None:
    make(tmp_path, "one/source.png", "one/target.png", "two/source.jpg", "two/target.jpg")
    assert set(found(tmp_path)) == {"one", "two"}


def test_a_lone_pair_is_called_after_its_folder(tmp_path: Path) -> None:
    make(tmp_path / "vase", "source.png", "target.png")
    assert set(found(tmp_path / "vase")) == {"vase"}


def test_longer_keys_win_and_case_does_not_count(tmp_path: Path) -> None:
    make(tmp_path, "a_Source.PNG", "a_target.png", "a_soft_target.png")
    assert found(tmp_path, ("source", "target", "soft_target"))["a"][2] == "target=a_target.png"


def test_names_in_shards_are_unique_and_have_no_dots(tmp_path: Path) -> None:
    make(tmp_path, *(f"{stem}_{key}.png" for stem in ("a.b", "a_b", "__x__") for key in KEYS))
    names = set(found(tmp_path))
    assert len(names) == 3
    assert not any("." in name or name.startswith("__") for name in names)


def test_every_file_that_belongs_to_no_pair_is_named(tmp_path: Path) -> None:
    make(
        tmp_path,
        *("a_source.png", "a_target.png", "a_target.jpg"),
        *("b_source.png", "notes.txt", "cover.png", ".hidden_source.png"),
    )
    left = {item.name: item.reason for item in find_pairs(tmp_path, KEYS)[1]}
    assert set(left) == {"a_target.png", "b_source.png", "notes.txt", "cover.png"}
    assert left["a_target.png"] == "a_target.jpg is its target already"
    assert left["b_source.png"] == "has no target beside it"
    assert "_source, _target" in left["cover.png"]


def test_subfolders_name_what_has_no_partner(tmp_path: Path) -> None:
    make(tmp_path, "source/a.png", "target/a.png", "target/c.png", "other/a.png")
    left = {item.name: item.reason for item in find_pairs(tmp_path, KEYS)[1]}
    assert left == {
        "other/a.png": "is in none of the folders source, target",
        "target/c.png": "has no source beside it",
    }


def test_a_folder_without_pairs_says_what_it_holds_and_how_to_name_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="empty") as error:
        find_pairs(tmp_path, KEYS)
    assert "a_source.png" in (error.value.hint or "")
    make(tmp_path, "a.png")
    with pytest.raises(ConfigError, match=r"1 file, first a\.png"):
        find_pairs(tmp_path, KEYS)


def test_a_file_or_nothing_is_no_folder(tmp_path: Path) -> None:
    make(tmp_path, "a.png")
    for name in ("a.png", "missing"):
        with pytest.raises(FileError, match="is not a folder"):
            find_pairs(tmp_path / name, KEYS)


@pytest.mark.parametrize("keys", [("source", "Source"), ("source", ""), ("source", "a.b"), ("a/b", "c")])
def test_keys_that_make_no_names_are_refused(tmp_path: Path, keys: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--keys"):
        find_pairs(tmp_path, keys)
