from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.lbm.shard_files import encoded, noise

from sigmascope.errors import DataError
from sigmascope.lbm.config import LbmConfig
from sigmascope.lbm.samples import Sample, SampleDecoder
from sigmascope.lbm.shards import RawSample


def config(**changes: Any) -> LbmConfig:
    return LbmConfig(**{"resolution": 64, **changes})


def raw(**members: bytes) -> RawSample:
    named = {name.replace("__", "."): data for name, data in members.items()}
    return RawSample("a.tar", "k", named, tuple(named))


def decode(sample: RawSample, number: int = 0, epoch: int = 0, **changes: Any) -> Sample:
    options = {name: changes.pop(name) for name in ("size", "crop", "seed") if name in changes}
    return SampleDecoder(config(**changes), **options).decode(sample, epoch, number)


def test_jpg_and_normal_png_and_mask_png_are_keys_too() -> None:
    image, normals = noise(0, 64, 64), noise(1, 64, 64)
    white = Image.new("L", (64, 64), 255)
    sample = decode(
        raw(jpg=encoded(image, "JPEG"), normal__png=encoded(normals), mask__png=encoded(white)),
        source_key="jpg",
        target_key="normal.png",
        mask_key="mask.png",
    )
    assert np.array_equal(sample.pictures["normal.png"], np.asarray(normals))
    assert sample.pictures["jpg"].shape == (64, 64, 3)
    assert sample.masks["mask.png"].tolist() == np.full((64, 64), 255).tolist()


def test_lbm_s_keys_mean_the_members_that_its_trainings_rename() -> None:
    source, target = noise(0, 64, 64), noise(1, 64, 64)
    keys: dict[str, Any] = {
        "source_key": "source_image",
        "target_key": "source_image_paste",
        "mask_key": "mask_image",
    }
    members = {"source__png": encoded(source), "target__png": encoded(target)}
    sample = decode(raw(**members, mask__png=encoded(Image.new("L", (64, 64), 0))), **keys)
    assert np.array_equal(sample.pictures["source_image"], np.asarray(source))
    assert np.array_equal(sample.pictures["source_image_paste"], np.asarray(target))
    assert sample.masks["mask_image"].max() == 0
    own = decode(raw(**members, source_image__png=encoded(target)), **keys)
    assert np.array_equal(own.pictures["source_image"], np.asarray(target))  # a member of the key's own name


def test_a_bare_jpg_is_the_source_unless_another_key_means_it() -> None:
    source, target = noise(0, 64, 64), noise(1, 64, 64)
    members = {"jpg": encoded(source), "normal__png": encoded(target)}
    sample = decode(raw(**members), source_key="image", target_key="normal")
    assert np.array_equal(sample.pictures["image"], np.asarray(source))
    with pytest.raises(DataError, match="no member for the key 'image'"):
        decode(raw(**members), source_key="image", target_key="jpg")


def test_a_member_that_another_key_means_stands_in_for_none() -> None:
    data = encoded(noise(0, 64, 64))
    with pytest.raises(DataError, match="no member for the key 'photo'"):
        decode(raw(source__png=data, target__png=data), source_key="photo", target_key="source")


@pytest.mark.parametrize("kind", ["jpg", "jpeg", "png", "webp"])
def test_a_bare_key_takes_any_picture_s_suffix(kind: str) -> None:
    data = encoded(noise(0, 64, 64), {"jpg": "JPEG"}.get(kind, kind.upper()))
    sample = decode(raw(**{f"source__{kind}": data, f"target__{kind}": data}))
    assert set(sample.pictures) == {"source", "target"}


@pytest.mark.parametrize(
    ("shape", "size"), [((64, 64), (128, 128)), ((100, 60), (160, 96)), ((30, 120), (64, 256))]
)
def test_each_sample_goes_to_its_nearest_bucket(shape: tuple[int, int], size: tuple[int, int]) -> None:
    data = encoded(noise(0, *shape))
    sample = decode(raw(source__png=data, target__png=data), resolution=128)
    assert sample.size == size
    assert sample.pictures["source"].shape == (size[1], size[0], 3)


def test_all_pictures_of_a_sample_are_cut_alike() -> None:
    image = noise(0, 64, 48)
    grey = image.convert("L").point([0] * 128 + [255] * 128)
    data = encoded(image)
    sample = decode(
        raw(source__png=data, target__png=data, depth__png=data, mask__png=encoded(grey)),
        number=7,
        crop="random",
        size=(32, 48),
        mask_key="mask",
        conditioning_images_keys=("depth",),
        unet_input_channels=8,
    )
    assert np.array_equal(sample.pictures["source"], sample.pictures["target"])
    assert np.array_equal(sample.pictures["source"], sample.pictures["depth"])
    cut = Image.fromarray(sample.pictures["source"]).convert("L").point([0] * 128 + [255] * 128)
    assert np.array_equal(sample.masks["mask"], np.asarray(cut))


def test_random_parts_follow_from_seed_epoch_and_number() -> None:
    data = encoded(noise(0, 400, 64))
    sample = raw(source__png=data, target__png=data)
    first, again = (decode(sample, 3, 1, crop="random", size=(64, 64)) for _ in range(2))
    assert np.array_equal(first.pictures["source"], again.pictures["source"])
    for number, epoch, seed in ((4, 1, 0), (3, 2, 0), (3, 1, 1)):
        moved = decode(sample, number, epoch, crop="random", size=(64, 64), seed=seed)
        assert not np.array_equal(first.pictures["source"], moved.pictures["source"])


def test_masks_keep_hard_edges() -> None:
    hard = Image.fromarray(np.kron([[0, 255], [255, 0]], np.ones((50, 50))).astype(np.uint8))
    data = encoded(noise(0, 100, 100))
    sample = decode(raw(source__png=data, target__png=data, mask__png=encoded(hard)), mask_key="mask")
    assert sample.masks["mask"].shape == (64, 64)
    assert set(np.unique(sample.masks["mask"])) == {0, 255}


def test_a_smaller_target_of_the_same_shape_is_brought_to_the_size() -> None:
    sample = decode(raw(source__png=encoded(noise(0, 64, 64)), target__png=encoded(noise(1, 32, 32))))
    assert sample.pictures["target"].shape == (64, 64, 3)


PNG = encoded(noise(0, 64, 64))


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"source__png": PNG}, r"has no member for the key 'target' \(it has source\.png\)"),
        (
            {"source__png": PNG, "source__jpg": PNG, "target__png": PNG},
            r"has source\.jpg and source\.png for the key",
        ),
        ({"source__png": PNG, "target__png": PNG[:60]}, r"target\.png cannot be decoded"),
        ({"source__png": PNG, "target__png": b""}, r"target\.png is empty"),
        (
            {"source__png": PNG, "target__png": encoded(noise(0, 64, 40))},
            r"target has another shape \(64×40\) than source \(64×64\)",
        ),
    ],
)
def test_a_sample_that_cannot_be_used_says_why(members: dict[str, bytes], words: str) -> None:
    with pytest.raises(DataError, match=words):
        decode(raw(**members))
