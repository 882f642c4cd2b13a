"""A model is found by its name on the hub in huggingface_hub's own cache, and nowhere else."""

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sigmascope.checkpoints import open_checkpoint
from sigmascope.checkpoints.hub import hub_name, local_model
from sigmascope.errors import CheckpointError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and a working folder beside it without a network."""

    def refuse(*_: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "hub"


def cached(cache: Path, name: str, *files: str) -> Path:
    """Files of a model as huggingface_hub keeps them: links into `blobs`, below the commit that `main` means."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / "0a1b2c"
    for number, file in enumerate(files):
        blob = folder / "blobs" / str(number)
        blob.parent.mkdir(parents=True, exist_ok=True)
        save_file({"weight": torch.full((2,), float(number))}, blob)
        link = snapshot / file
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("0a1b2c")
    return snapshot


def test_a_name_is_the_snapshot_in_the_cache(cache: Path) -> None:
    snapshot = cached(cache, "some/tiny-model", "model.safetensors")
    assert local_model("some/tiny-model") == snapshot
    assert hub_name(snapshot) == "some/tiny-model"
    with open_checkpoint("some/tiny-model") as checkpoint:
        assert checkpoint.tensor("weight").tolist() == [0, 0]


def test_what_is_there_under_that_path_comes_first(cache: Path) -> None:
    cached(cache, "some/model", "model.safetensors")
    Path("some/model").mkdir(parents=True)
    assert local_model("some/model") == Path("some/model")


def test_what_is_not_in_the_cache_is_to_be_downloaded(cache: Path) -> None:
    with pytest.raises(CheckpointError, match=r"local cache has no such model") as refused:
        local_model("some/model")
    assert refused.value.hint == "Check the path, or download it: hf download some/model"


def test_a_name_whose_weights_are_not_in_the_cache_is_to_be_downloaded(cache: Path) -> None:
    """As after `AutoConfig.from_pretrained`, or a download that broke off."""
    snapshot = cached(cache, "some/model", "model.safetensors")
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").resolve().unlink()
    with pytest.raises(CheckpointError, match=r"without its weights\..*hf download some/model"):
        local_model("some/model")


def test_a_model_of_which_only_some_files_are_here_is_found(cache: Path) -> None:
    """As diffusers leaves it: huggingface_hub knows of a second variant, and refuses the folder from 1.22 on."""
    from huggingface_hub import snapshot_download

    snapshot = cached(cache, "some/model", "unet/model.safetensors")
    names = "unet/model.safetensors", "unet/model.fp16.safetensors"
    files = {name: {"size": 1, "blob_id": "0"} for name in names}
    (snapshot.parents[1] / "trees").mkdir()
    listing = snapshot.parents[1] / "trees" / "0a1b2c.json"
    listing.write_text(json.dumps({"format_version": 1, "files": files}))
    with pytest.raises(OSError, match=r"fp16\.safetensors"):
        snapshot_download("some/model", local_files_only=True)
    assert local_model("some/model") == snapshot


def test_a_model_whose_note_of_main_is_damaged_is_to_be_downloaded(cache: Path) -> None:
    cached(cache, "some/model", "model.safetensors")
    (cache / "models--some--model/refs/main").write_bytes(b"\xff\xfe\0")  # as a disk that was full leaves it
    with pytest.raises(CheckpointError, match="has no such model") as caught:
        local_model("some/model")
    assert "hf download some/model" in str(caught.value)


def test_a_download_that_broke_off_between_shards_is_to_be_continued(cache: Path) -> None:
    snapshot = cached(cache, "some/model", "model-00001-of-00002.safetensors")
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = {"weight_map": dict(zip(("weight", "bias"), shards, strict=True))}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"00002-of-00002.*hf download some/model"):
        open_checkpoint("some/model")


PIPELINE = json.dumps({"_class_name": "SomePipeline", "unet": ["diffusers", "U"], "vae": ["diffusers", "A"]})


def without_a_blob(snapshot: Path) -> None:
    (snapshot / "model.safetensors").resolve().unlink()


def without_a_component_s_blob(snapshot: Path) -> None:
    (snapshot / "model_index.json").write_text(PIPELINE)
    (snapshot / "unet/model.safetensors").resolve().unlink()


def without_a_component_s_shard(snapshot: Path) -> None:
    (snapshot / "model_index.json").write_text(PIPELINE)
    (snapshot / "unet/model.safetensors").unlink()
    index = snapshot / "unet/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": "model-00001-of-00002.safetensors"}}))


def without_the_components_weights(snapshot: Path) -> None:
    (snapshot / "model_index.json").write_text(PIPELINE)
    for component in ("unet", "vae"):
        (snapshot / component / "model.safetensors").unlink()


def without_an_index(snapshot: Path) -> None:
    (snapshot / "model.safetensors").unlink()
    (snapshot / "other.safetensors").unlink()


@pytest.mark.parametrize(
    "break_off",
    [
        without_a_blob,
        without_a_component_s_blob,
        without_a_component_s_shard,
        without_the_components_weights,
        without_an_index,
    ],
)
def test_every_download_that_broke_off_says_the_command_that_goes_on(
    break_off: Callable[[Path], None], cache: Path
) -> None:
    components = "unet/model.safetensors", "vae/model.safetensors"
    break_off(cached(cache, "some/model", "model.safetensors", "other.safetensors", *components))
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint("some/model")
    assert str(refused.value.hint).endswith("ownload the rest: hf download some/model")
    assert "Did you mean model.safetensors" not in str(refused.value)


def test_a_revision_stands_behind_an_at_sign(cache: Path) -> None:
    """As `huggingface_hub` keeps them: a file for each branch or tag, with the commit that it means."""
    snapshot = cached(cache, "some/model", "model.safetensors")
    (snapshot.parents[1] / "refs/v1").write_text("9" * 40)
    old = snapshot.with_name("9" * 40)
    old.mkdir()
    save_file({"weight": torch.tensor([7.0])}, old / "model.safetensors")
    assert local_model("some/model@main") == snapshot
    assert local_model("some/model@v1") == local_model(f"some/model@{'9' * 40}") == old
    with open_checkpoint("some/model@v1") as checkpoint:
        assert checkpoint.tensor("weight").tolist() == [7]
    assert hub_name(old) == f"some/model@{'9' * 40}"
    with pytest.raises(CheckpointError, match=r"no such model in the revision refs/pr/3\.") as refused:
        local_model("some/model@refs/pr/3")
    assert refused.value.hint == "Check the path, or download it: hf download some/model --revision refs/pr/3"


def test_beside_a_folder_of_the_owner_s_name_both_are_told(cache: Path) -> None:
    Path("some").mkdir()
    save_file({"weight": torch.zeros(1)}, "some/base.safetensors")
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint("some/model")
    assert refused.value.message == (
        "some/model: does not exist, and the hub's local cache has no such model."
    )
    assert refused.value.hint == (
        "Checkpoints there: base.safetensors. Or download it: hf download some/model"
    )


@pytest.mark.parametrize(
    "path",
    [
        "model.safetensors",
        "some/model.ckpt",
        "./some/model",
        "../some/model",
        "~/model",
        "a/b/c",
        "/a/b",
        "some/",
        "",
    ],
)
def test_a_path_is_no_name(path: str, cache: Path) -> None:
    assert local_model(path) == Path(path)


def test_a_slip_in_a_path_keeps_its_own_error(cache: Path) -> None:
    Path("models").mkdir()
    save_file({"weight": torch.zeros(1)}, "models/base.safetensors")
    with pytest.raises(CheckpointError, match=r"Checkpoints there: base\.safetensors"):
        open_checkpoint("models/base")


def test_without_huggingface_hub_it_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        CheckpointError, match=r"huggingface_hub, which is not installed.*pip install huggingface_hub"
    ):
        local_model("some/model")


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("modles/sdxl/base.safetensors", "Did you mean models/sdxl/base.safetensors?"),
        ("models/sdlx/base.safetensors", "Did you mean models/sdxl/base.safetensors?"),
        ("models/sdlx/bsae.safetensors", "Did you mean models/sdxl/base.safetensors?"),
        (
            "models/sdlx/other.ckpt",
            "Did you mean the folder models/sdxl? Checkpoints there: base.safetensors.",
        ),
        ("modles/sdxl", "Did you mean models/sdxl? Or download it: hf download modles/sdxl"),
        (
            "some/model/unet",
            "Check the path. If it is on the hub, give the name of the whole model: some/model",
        ),
        ("models/unet/x/base.safetensors", "Check the path."),
        (
            "~/kept.safetensors",
            "Give {home}/kept.safetensors: the shell puts nothing in place of a ~ in quotes.",
        ),
    ],
)
def test_a_slip_in_a_folder_s_name_is_told(
    given: str, hint: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Path("home").absolute()
    monkeypatch.setenv("HOME", str(home))
    for folder in (Path("models/sdxl"), home):
        folder.mkdir(parents=True)
    save_file({"weight": torch.zeros(1)}, "models/sdxl/base.safetensors")
    save_file({"weight": torch.zeros(1)}, home / "kept.safetensors")
    with pytest.raises(CheckpointError, match="does not exist") as refused:
        open_checkpoint(given)
    assert refused.value.hint == hint.format(home=home)
