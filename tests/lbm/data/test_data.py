import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.lbm.shard_files import encoded, noise, pair, plain, write_tar

from sigmascope.errors import ConfigError, DataError, FileError
from sigmascope.lbm import samples as lbm_samples
from sigmascope.lbm.config import LbmConfig
from sigmascope.lbm.data import DataOptions, DataPosition, TrainingData
from sigmascope.lbm.samples import Batch, decode_picture

SAMPLES = 23
BROKEN = (4, 11)
WIDE = range(0, SAMPLES, 3)
"""These are 2:1, and so fall into another bucket than the rest."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards of grey pairs, each level saying which; two pairs are damaged."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(4):
        members: list[tuple[str, bytes]] = []
        for number in range(shard, SAMPLES, 4):
            size = (16, 8) if number in WIDE else (8, 8)
            source, target = plain(number, *size), plain(255 - number, *size)
            members += [
                (f"{number:03d}.source.png", source),
                (f"{number:03d}.target.png", target[:50] if number in BROKEN else target),
            ]
        write_tar(folder / f"{shard}.tar", members)
    return folder


def data(shards: Path, batch_size: int = 4, **options: Any) -> TrainingData:
    options = {"shuffle_buffer": 6, "size": None, "workers": 0, **options}
    return TrainingData(tiny(), DataOptions((f"{shards}/{{0..3}}.tar",), batch_size, **options))


def tiny() -> LbmConfig:
    return LbmConfig.model_validate(
        {
            "resolution": 32,
            "denoiser": {
                "block_out_channels": [32],
                "layers_per_block": 1,
                "down_block_types": ["DownBlock2D"],
                "up_block_types": ["UpBlock2D"],
                "transformer_layers_per_block": 1,
                "attention_head_dim": 2,
            },
            "vae": {"block_out_channels": [32, 32]},
        }
    )


def levels(batch: Batch) -> list[int]:
    """Which samples the pixels say these are."""
    return [round(float(value + 1) * 127.5) for value in batch.source[:, 0, 0, 0]]


def same(first: tuple[Batch, DataPosition], second: tuple[Batch, DataPosition]) -> bool:
    (one, at), (other, there) = first, second
    return (
        at == there
        and one.numbers == other.numbers
        and one.keys == other.keys
        and torch.equal(one.source, other.source)
        and torch.equal(one.target, other.target)
    )


def test_every_good_sample_comes_once_with_its_own_target(shards: Path) -> None:
    stream = data(shards)
    seen: list[int] = []
    for batch, _ in stream.batches(0):
        found = levels(batch)
        assert list(batch.keys) == [f"{level:03d}" for level in found]
        assert torch.allclose(batch.target[:, 0, 0, 0], 1 - torch.tensor(found) / 127.5, atol=1e-6)
        assert batch.source.dtype == torch.float32
        seen += found
    assert sorted(seen) == [number for number in range(SAMPLES) if number not in BROKEN]


def test_a_batch_has_one_size_and_only_the_last_of_each_size_is_smaller(shards: Path) -> None:
    """But where a picture is damaged, whose place stays empty."""
    sizes: dict[tuple[int, int], list[int]] = {}
    for batch, _ in data(shards).batches(0):
        expected = (24, 40) if levels(batch)[0] in WIDE else (32, 32)
        height, width = batch.source.shape[-2:]
        assert {level in WIDE for level in levels(batch)} == {levels(batch)[0] in WIDE}
        assert (height < width) is (expected != (32, 32))
        sizes.setdefault((height, width), []).append(len(batch))
    wide, square = sorted(sizes.values(), key=sum)
    assert wide == [4, 4]  # 0, 3, … 21
    assert len(square) == 4
    assert sum(square) == SAMPLES - len(WIDE) - len(BROKEN)
    assert sum(4 - length for length in square[:-1]) <= len(BROKEN)


def test_the_order_follows_from_seed_and_epoch(shards: Path) -> None:
    def order(epoch: int = 0, **options: Any) -> list[str]:
        return [key for batch, _ in data(shards, **options).batches(epoch) for key in batch.keys]

    first, later, other = order(), order(epoch=1), order(seed=1)
    assert first == order(workers=3)
    assert first != later
    assert first != other
    assert sorted(first) == sorted(later) == sorted(other)


def test_without_shuffling_samples_come_as_they_lie(shards: Path) -> None:
    stream = data(shards, batch_size=1, shuffle=False)
    keys = [key for batch, _ in stream.batches(5) for key in batch.keys]
    lying = [f"{number:03d}" for shard in range(4) for number in range(shard, SAMPLES, 4)]
    assert keys == [key for key in lying if int(key) not in BROKEN]


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(
    batch_size=st.integers(1, 5),
    buffer=st.integers(0, 30),
    processes=st.integers(1, 3),
    cut=st.integers(0, 40),
    seed=st.integers(0, 9),
)
def test_any_position_continues_with_exactly_the_batches_that_follow(
    shards: Path, batch_size: int, buffer: int, processes: int, cut: int, seed: int
) -> None:
    stream = data(
        shards,
        batch_size,
        shuffle_buffer=buffer,
        processes=processes,
        process=seed % processes,
        seed=seed,
        crop="random",
        size=(32, 32),
    )
    whole = list(stream.batches(seed))
    at = min(cut, len(whole) - 1)
    position = DataPosition.from_dict(json.loads(json.dumps(whole[at][1].to_dict())))
    rest = list(stream.batches(seed, position))
    assert len(rest) == len(whole) - at - 1
    assert all(same(one, other) for one, other in zip(rest, whole[at + 1 :], strict=True))


@pytest.mark.parametrize("buckets", [True, False])
def test_positions_hold_with_samples_waiting_in_several_buckets(shards: Path, buckets: bool) -> None:
    stream = data(shards, batch_size=5, size=None if buckets else (32, 32), workers=2)
    whole = list(stream.batches(2))
    assert any(position.pending for _, position in whole) is buckets
    for at, (_, position) in enumerate(whole):
        rest = list(stream.batches(2, position))
        assert len(rest) == len(whole) - at - 1
        assert all(same(one, other) for one, other in zip(rest, whole[at + 1 :], strict=True))


def test_what_lies_before_the_position_is_not_decoded(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = data(shards, size=(32, 32))
    whole = list(stream.batches(0))
    decoded: list[bytes] = []

    def counting(raw: bytes) -> Image.Image:
        decoded.append(raw)
        return decode_picture(raw)

    monkeypatch.setattr(lbm_samples, "decode_picture", counting)
    rest = list(stream.batches(0, whole[2][1]))
    good = sum(len(batch) for batch, _ in rest)
    assert 2 * good <= len(decoded) <= 2 * (good + len(BROKEN))


@pytest.mark.parametrize("processes", [2, 3])
def test_the_processes_together_have_what_one_has(shards: Path, processes: int) -> None:
    alone = {
        number: key
        for batch, _ in data(shards).batches(1)
        for number, key in zip(batch.numbers, batch.keys, strict=True)
    }
    shares = [
        {
            number: key
            for batch, _ in data(shards, process=process, processes=processes).batches(1)
            for number, key in zip(batch.numbers, batch.keys, strict=True)
        }
        for process in range(processes)
    ]
    together: dict[int, str] = {}
    for share in shares:
        together |= share
    assert together == alone
    assert sum(map(len, shares)) == len(alone)


def test_two_processes_first_batches_are_one_process_s_doubled_batch(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [item for i in range(12) for item in pair(f"{i:03d}", i)])

    def first(batch_size: int, **share: int) -> Batch:
        options = DataOptions((str(tmp_path),), batch_size, shuffle_buffer=5, **share)  # type: ignore[arg-type]
        return next(TrainingData(tiny(), options).batches(0))[0]

    halves = [first(2, process=process, processes=2) for process in range(2)]
    assert sorted(halves[0].numbers + halves[1].numbers) == list(first(4).numbers)


def test_broken_samples_are_counted_once_with_shard_key_and_reason(
    shards: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream = data(shards)
    for epoch in range(2):
        list(stream.batches(epoch))
    assert stream.skipped.count == len(BROKEN)
    places = {(Path(sample.shard).name, sample.key) for sample in stream.skipped.first}
    assert places == {(f"{number % 4}.tar", f"{number:03d}") for number in BROKEN}
    assert all("target.png cannot be decoded" in sample.reason for sample in stream.skipped.first)
    assert len([record for record in caplog.records if "Skipped" in record.message]) == len(BROKEN)


def test_a_broken_shard_costs_only_its_rest(tmp_path: Path) -> None:
    for shard in range(2):
        members = [
            (f"{number}.{name}.png", encoded(noise(number, 32, 32)))
            for number in range(6)
            for name in ("source", "target")
        ]
        write_tar(tmp_path / f"{shard}.tar", members)
    whole = (tmp_path / "1.tar").read_bytes()
    (tmp_path / "1.tar").write_bytes(whole[: len(whole) // 2])
    stream = TrainingData(tiny(), DataOptions((str(tmp_path),), 1))
    assert 8 <= len(list(stream.batches(0))) <= 10
    (skipped,) = stream.skipped.first
    assert skipped.key is None
    assert "breaks off" in skipped.reason


def one_shard(folder: Path, members: list[tuple[str, bytes]], **options: Any) -> TrainingData:
    write_tar(folder / "0.tar", members)
    return TrainingData(tiny(), DataOptions((f"{folder}/0.tar",), **{"batch_size": 2, **options}))


def test_an_epoch_without_one_good_sample_is_an_error(tmp_path: Path) -> None:
    stream = one_shard(tmp_path, [("a.jpg", plain(1)), ("a.txt", b"words")])
    with pytest.raises(DataError, match=r"none of 1 samples.*0\.tar, sample a.*'source'.*jpg, txt"):
        list(stream.batches(0))


def test_an_empty_shard_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="hold no samples"):
        list(one_shard(tmp_path, []).batches(0))


def test_where_there_is_no_sample_for_a_process_it_has_a_blank_one(tmp_path: Path) -> None:
    keys = {"mask_key": "mask", "conditioning_masks_keys": ("soft",), "conditioning_images_keys": ("depth",)}
    members = pair("a", 1, **{f"{name}.png": plain(3) for name in ("mask", "soft", "depth")})
    write_tar(tmp_path / "0.tar", members)
    config = tiny().model_copy(update=keys)
    main, other = (
        list(TrainingData(config, DataOptions((str(tmp_path),), 2, process=i, processes=2)).batches(0))
        for i in range(2)
    )
    ((batch, position),), ((blank, there),) = main, other
    assert (len(batch), len(blank), blank.blank, blank.keys) == (1, 0, True, ())
    assert position == there
    shapes = [{name: item.shape for name, item in flat(each).items()} for each in (batch, blank)]
    assert shapes[0] == shapes[1]


def flat(batch: Batch) -> dict[str, torch.Tensor]:
    assert batch.mask is not None
    return {
        "source": batch.source,
        "target": batch.target,
        "mask": batch.mask,
        **batch.conditioning_images,
        **batch.conditioning_masks,
    }


def test_a_damaged_picture_leaves_its_place_empty(tmp_path: Path) -> None:
    """So that nobody must ask who has found what; a damaged header is seen by all, and the next takes its place."""
    broken = plain(1, 16, 16)
    members = [
        item
        for i, target in enumerate([plain(1), broken[:50], broken[:20], plain(4), plain(5)])
        for item in pair(f"{i}", i, **{"target.png": target})
    ]
    stream = one_shard(tmp_path, members, shuffle=False)
    assert [batch.keys for batch, _ in stream.batches(0)] == [("0",), ("3", "4")]
    alone = one_shard(tmp_path, members, shuffle=False, batch_size=1)
    assert [batch.keys for batch, _ in alone.batches(0)] == [("0",), (), ("3",), ("4",)]
    assert {(sample.key, sample.reason.partition(" (")[0]) for sample in alone.skipped.first} == {
        ("1", "target.png cannot be decoded"),
        ("2", "target.png cannot be decoded"),
    }


def test_mostly_broken_data_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad = [item for i in range(3) for item in [(f"b{i}.source.png", b"x"), (f"b{i}.target.png", b"x")]]
    with caplog.at_level(logging.WARNING):
        assert len(list(one_shard(tmp_path, [*pair("a", 1), *bad]).batches(0))) == 1
    assert any("Most of the data cannot be used: 3 of 4" in record.message for record in caplog.records)


def test_a_shard_removed_while_training_is_an_error(tmp_path: Path) -> None:
    stream = one_shard(tmp_path, pair("a", 1))
    list(stream.batches(0))
    (tmp_path / "0.tar").unlink()
    with pytest.raises(FileError, match=r"0\.tar"):
        list(stream.batches(1))


def test_positions_of_other_data_are_refused(tmp_path: Path) -> None:
    stream = one_shard(tmp_path, pair("a", 1))
    with pytest.raises(ConfigError, match="epoch 1, not 0"):
        stream.batches(0, DataPosition(1, 0))
    with pytest.raises(DataError, match="ends after 1 samples"):
        list(stream.batches(0, DataPosition(0, 2)))


@pytest.mark.parametrize(
    "position",
    [
        {},
        {"epoch": 0, "samples": 1},
        {"epoch": 0, "samples": 1, "pending": [1]},
        {"epoch": -1, "samples": 1, "pending": []},
        {"epoch": 0.5, "samples": 1, "pending": []},
        {"epoch": True, "samples": 1, "pending": []},
    ],
)
def test_what_is_no_position_is_refused(position: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="data position"):
        DataPosition.from_dict(position)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch_size: expected 1"),
        ({"process": 1}, "process: expected 0 to 0"),
        ({"shuffle_buffer": -1}, "shuffle_buffer"),
        ({"size": (31, 32)}, "image_size: expected multiples of 2, got 31x32"),
        ({"workers": -1}, "workers"),
    ],
)
def test_options_that_make_no_sense_are_refused(shards: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        data(shards, **{"batch_size": 4, **options})


def decoding_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("sigmascope-data")]


def test_stopping_early_leaves_no_thread_behind(shards: Path) -> None:
    stream: Iterator[tuple[Batch, DataPosition]] = data(shards, workers=3, batch_size=2).batches(0)
    next(stream)
    assert decoding_threads()
    stream.close()  # type: ignore[attr-defined]
    assert not decoding_threads()


def test_members_that_lie_apart_are_told_of_with_the_rule(tmp_path: Path) -> None:
    members = [(f"{key}.{name}.png", plain(3)) for name in ("source", "target") for key in "ab"]
    with pytest.raises(DataError, match=r"no member for the key 'target'.*members follow one another"):
        list(one_shard(tmp_path, members).batches(0))


def test_an_empty_mask_key_is_no_mask(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", pair("a", 3))
    stream = TrainingData(tiny().model_copy(update={"mask_key": ""}), DataOptions((str(tmp_path),), 1))
    assert next(stream.batches(0))[0].mask is None


def test_samples_without_the_mask_are_all_valid_as_in_lbm_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tar(tmp_path / "0.tar", [*pair("a", 3), *pair("b", 4, mask=plain(0)), *pair("c", 5)])
    stream = TrainingData(
        tiny().model_copy(update={"mask_key": "mask"}), DataOptions((str(tmp_path),), 3, shuffle=False)
    )
    with caplog.at_level(logging.WARNING):
        batch, _ = next(stream.batches(0))
    assert batch.mask is not None
    assert batch.mask.mean(dim=(1, 2, 3)).tolist() == [1.0, 0.0, 1.0]
    assert batch.mask.shape == (3, 1, *batch.source.shape[2:])
    assert [line.message.split(",")[0] for line in caplog.records] == [
        "Sample a has no member for mask_key: mask"
    ]
    assert stream.skipped.count == 0


def test_masks_are_one_where_valid_and_conditioning_masks_are_shares(tmp_path: Path) -> None:
    levels = np.linspace(0, 255, 32, dtype=np.uint8)
    grey = encoded(Image.fromarray(np.repeat(levels[None], 32, axis=0)))
    names = ("source", "target", "mask", "soft", "depth")
    write_tar(tmp_path / "0.tar", [(f"a.{name}.png", grey) for name in names])
    keys = {"mask_key": "mask", "conditioning_masks_keys": ("soft",), "conditioning_images_keys": ("depth",)}
    stream = TrainingData(tiny().model_copy(update=keys), DataOptions((str(tmp_path),), 1))
    batch, _ = next(stream.batches(0))
    assert batch.mask is not None
    assert batch.mask[0, 0, 0].tolist() == [0.0] * 16 + [1.0] * 16
    shares = torch.from_numpy(levels).float() / 255
    assert torch.allclose(batch.conditioning_masks["soft"][0, 0, 5], shares)
    assert torch.allclose(batch.conditioning_images["depth"][0, 2, 5], shares * 2 - 1, atol=1e-6)
