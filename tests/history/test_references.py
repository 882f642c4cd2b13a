from dataclasses import replace

import pytest
from tests.history.kept_runs import kept_run

from sigmascope.errors import ConfigError, StoreError
from sigmascope.history.references import checked_tag, is_reference, runs_of
from sigmascope.history.store import Store


@pytest.fixture
def three(store: Store) -> Store:
    for day, name in enumerate(("abcd1111", "abcd2222", "ffff3333"), 1):
        run = kept_run(id=name, started_at=f"2026-03-0{day}T00:00:00+00:00")
        store.add(run, "watch", tags=["before"] if day < 3 else [])
    return store


@pytest.mark.parametrize(
    ("reference", "ids"),
    [
        ("latest", ["ffff3333"]),
        ("latest~0", ["ffff3333"]),
        ("latest~2", ["abcd1111"]),
        ("@before", ["abcd1111", "abcd2222"]),
        ("ffff", ["ffff3333"]),
        ("abcd1", ["abcd1111"]),
        ("abcd2222", ["abcd2222"]),
    ],
)
def test_what_a_word_means(three: Store, reference: str, ids: list[str]) -> None:
    assert [run.row.id for run in runs_of(reference, three)] == ids


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("latest~3", "Only 3 runs are kept"),
        ("@after", "No run has the tag after"),
        ("abcd", "Several runs.*abcd1111, abcd2222"),
        ("0000", "No run that is kept has the id 0000"),
        ("abc", "is no run"),
        ("%%%%", "No run"),
        ("latest~x", "is no run"),
    ],
)
def test_what_means_nothing_says_so(three: Store, reference: str, words: str) -> None:
    with pytest.raises(StoreError, match=words):
        runs_of(reference, three)


def test_an_id_that_another_begins_with_is_found(store: Store) -> None:
    for name in ("abcd", "abcde"):
        store.add(kept_run(id=name), "watch")
    assert [run.row.id for run in runs_of("abcd", store)] == ["abcd"]


@pytest.mark.parametrize("word", ["825e", "825ebe8b", "825ebe8b-7f0e-4c11-9d5f-1f0c6f3f2d11"])
def test_a_prompt_of_comfyui_is_found_by_comfyui_s_id(store: Store, word: str) -> None:
    store.add(replace(kept_run(id="00f1b5b0"), name="ComfyUI 825ebe8b"), "comfyui")
    store.add(replace(kept_run(id="11f1b5b0"), name="ComfyUI 925ebe8b"), "comfyui")
    assert [run.row.id for run in runs_of(word, store)] == ["00f1b5b0"]


def test_of_an_empty_store_nothing_is_the_latest(store: Store) -> None:
    with pytest.raises(StoreError, match="No run is kept yet"):
        runs_of("latest", store)


@pytest.mark.parametrize("text", ["latest", "latest~12", "@before", "3f2a", "0123456789abcdef" * 2])
def test_words_that_can_mean_a_run(text: str) -> None:
    assert is_reference(text)


@pytest.mark.parametrize(
    "text", ["run.json", "a/b", "x", "@", "@a b", "runs.jsonl", "/tmp/abcd", "a b c d", "\udcffabcd", ""]
)
def test_words_that_cannot(text: str) -> None:
    assert not is_reference(text)


@pytest.mark.parametrize("tag", ["", "@", "a b", "a,b", "a/b", "a~1", "x" * 101, "a\x1b[31m"])
def test_no_tags(tag: str) -> None:
    with pytest.raises(ConfigError, match="is no tag"):
        checked_tag(tag)


def test_a_tag_may_be_written_with_its_sign() -> None:
    assert checked_tag("@v1.2-größer") == "v1.2-größer"
