"""The side-car of a LoRA names both models such that they are found again, and grants nothing more."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from sigmascope.errors import ConfigError
from sigmascope.lora.sidecar import models_of, sidecar_path, sidecar_text


def place(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def written(lora: Path, base: Path, tuned: Path) -> dict[str, str]:
    """Write the side-car of a LoRA as an extraction does; give what it says."""
    place(lora)
    sidecar = sidecar_path(lora)
    sidecar.write_text(sidecar_text(sidecar, base, tuned, {"extraction_method": "svd"}), encoding="utf-8")
    return dict(yaml.safe_load(sidecar.read_text(encoding="utf-8")))


def says(tmp_path: Path, text: str) -> Path:
    lora = place(tmp_path / "lora.safetensors")
    sidecar_path(lora).write_text(text, encoding="utf-8")
    return lora


def test_models_are_named_from_the_side_car_and_move_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    base, tuned = place(work / "models/base.safetensors"), place(work / "out/tuned.ckpt")
    monkeypatch.chdir(work)
    facts = written(Path("out/lora.safetensors"), Path("models/base.safetensors"), Path("out/tuned.ckpt"))
    assert (facts["base_model"], facts["tuned_model"]) == ("../models/base.safetensors", "tuned.ckpt")
    monkeypatch.chdir(tmp_path)
    assert models_of(work / "out/lora.safetensors") == (base.resolve(), tuned.resolve())
    moved = work.rename(tmp_path / "elsewhere")
    assert models_of(moved / "out/lora.safetensors")[0] == moved.resolve() / "models/base.safetensors"


def test_models_are_found_through_linked_folders(tmp_path: Path) -> None:
    base = place(tmp_path / "models/base.safetensors")
    (tmp_path / "deep/er/out").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "deep/er/out")
    lora = tmp_path / "out/lora.safetensors"
    written(lora, base, base)
    assert models_of(lora)[0].samefile(base)
    assert models_of(lora.resolve())[0].samefile(base)


def test_no_user_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "people" / "anna"
    base = place(home / "models/base.safetensors")
    monkeypatch.setenv("HOME", str(home))
    lora = tmp_path / "public/lora.safetensors"
    facts = written(lora, base, tmp_path / "home/bert/tuned.safetensors")
    assert facts["base_model"] == "~/models/base.safetensors"
    assert "anna" not in sidecar_path(lora).read_text()
    assert models_of(lora, tuned=base)[0] == base
    beside = home / "loras/lora.safetensors"
    assert written(beside, base, base)["base_model"] == "../models/base.safetensors"
    other = sidecar_text(Path("/srv/lora_config.yaml"), Path("/home/bert/work/base.safetensors"), base, {})
    assert "bert" not in other


def test_a_model_of_the_hub_s_cache_is_named_as_there(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub/models--some--tiny-model/snapshots/0123abcd"
    snapshot.mkdir(parents=True)
    lora, refs = tmp_path / "lora.safetensors", snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123abcd")
    assert written(lora, snapshot, snapshot)["base_model"] == "some/tiny-model"
    (refs / "main").write_text("4567cdef")
    assert written(lora, snapshot, snapshot)["base_model"] == "some/tiny-model@0123abcd"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("base_model: base.safetensors", "tuned_model is missing"),
        ("base_model: base.safetensors\ntuned_model: null", "tuned_model is missing"),
        ("base_model: base.safetensors\ntuned_model: [a, b]", "tuned_model is missing"),
        ("base_model: base.safetensors\ntuned_model: gone.ckpt", "tuned_model is gone.ckpt, and there is no"),
        ("tuned_model: https://example.com/x.ckpt", "may not reach over the network"),
        ("tuned_model: //server/share/x.ckpt", "may not reach over the network"),
        ("- a\n- b", "not the side-car of a LoRA"),
        ("{", "not the side-car of a LoRA"),
        ("[" * 60_000, "not the side-car of a LoRA"),
        ("tuned_model: " + "x" * 70_000, "too large"),
        ("tuned_model: " + "x" * 5_000, "tuned_model is x"),
        ("tuned_model: 24" + "9" * 8_120, "tuned_model is 249"),
        ("tuned_model: gone\nrank: 24" + "9" * 8_120, "tuned_model is gone"),
        ("tuned_model: !!python/object/apply:os.system [touch hacked]", "tuned_model is missing"),
        ("tuned_model: nobody/nothing", "tuned_model is nobody/nothing"),
    ],
)
def test_what_a_side_car_cannot_say_is_refused_with_the_flag(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    base = place(tmp_path / "base.safetensors")
    with pytest.raises(ConfigError) as refused:
        models_of(says(tmp_path, text), base=base)
    assert said in refused.value.message
    assert "lora_config.yaml" in refused.value.message
    assert refused.value.hint is not None
    assert "--tuned_model_path" in refused.value.hint
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "base.safetensors", "lora.safetensors", "lora_config.yaml",
    ]  # fmt: skip


def test_what_a_side_car_names_is_a_text_whatever_it_looks_like(tmp_path: Path) -> None:
    for name in ("2024-01-01", "0x10", "no", "1:30"):
        model = place(tmp_path / name)
        assert models_of(says(tmp_path, f"tuned_model: {name}"), base=model)[1] == model.resolve()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (os.mkfifo, r"is a named pipe \(FIFO\)"),
        (os.mkdir, "is a folder"),
        (lambda path: path.symlink_to("nowhere"), "is a link to something that is not there"),
        (lambda path: path.symlink_to("/dev/null"), "is a device"),
        (lambda path: None, "is not there"),
    ],
    ids=["fifo", "folder", "broken link", "device", "nothing"],
)
def test_a_side_car_that_is_no_file_is_called_what_it_is_and_not_waited_for(
    make: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    lora = place(tmp_path / "lora.safetensors")
    make(sidecar_path(lora))
    with pytest.raises(ConfigError, match=f"lora_config.yaml {said}: .*Give --base_model_path and"):
        models_of(lora)


def test_of_a_link_the_side_car_of_the_file_that_it_leads_to_counts_unless_it_has_its_own(
    tmp_path: Path,
) -> None:
    base, other = place(tmp_path / "models/base.safetensors"), place(tmp_path / "other.safetensors")
    written(tmp_path / "loras/lora.safetensors", base, base)
    link = tmp_path / "links/anna.safetensors"
    link.parent.mkdir()
    link.symlink_to("../loras/lora.safetensors")
    assert models_of(link) == (base.resolve(), base.resolve())
    written(link, other, other)
    assert models_of(link) == (other.resolve(), other.resolve())


def test_given_models_need_no_side_car(tmp_path: Path) -> None:
    given = tmp_path / "base", tmp_path / "tuned"
    assert models_of(tmp_path / "none.safetensors", *given) == given
