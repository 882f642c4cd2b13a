from pathlib import Path

import pytest
import torch
from tests.families import make_pipeline

from sigmascope.errors import CheckpointError
from sigmascope.pipeline.bench import Offload, load_pipeline

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipeline") / "sd15"
    make_pipeline("sd15").save_pretrained(path)
    return path


def test_a_folder_is_loaded_in_the_dtype_that_was_asked_for(folder: Path) -> None:
    pipeline = load_pipeline(str(folder), dtype=torch.bfloat16, device=CPU)
    assert {parameter.dtype for parameter in pipeline.unet.parameters()} == {torch.bfloat16}


def test_loading_prints_nothing_where_there_is_no_terminal(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    load_pipeline(str(folder), dtype=torch.float32, device=CPU)
    assert "it/s" not in capfd.readouterr().err


def test_the_libraries_bars_are_as_they_were(folder: Path) -> None:
    import diffusers

    assert diffusers.utils.logging.is_progress_bar_enabled()
    load_pipeline(str(folder), dtype=torch.float32, device=CPU)
    assert diffusers.utils.logging.is_progress_bar_enabled()


def test_a_name_on_the_hub_is_loaded_from_the_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--owner--name" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(folder)
    refs = tmp_path / "models--owner--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("diffusers.pipelines.pipeline_utils.HF_HUB_OFFLINE", True, raising=False)
    for name in ("owner/name", "owner/name@main", f"owner/name@{'0' * 40}"):
        pipeline = load_pipeline(name, dtype=torch.float32, device=CPU)
        assert type(pipeline).__name__ == "StableDiffusionPipeline"


@pytest.mark.parametrize("source", ["nowhere", "a/b/c", "/no/such/folder", "./nowhere", "../nowhere"])
def test_what_is_neither_folder_nor_name_is_refused(source: str) -> None:
    with pytest.raises(CheckpointError, match="neither a folder nor a name on the hub"):
        load_pipeline(source, dtype=torch.float32, device=CPU)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no model_index\.json"):
        load_pipeline(str(tmp_path), dtype=torch.float32, device=CPU)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="not a pipeline folder"):
        load_pipeline(str(tmp_path / "model.safetensors"), dtype=torch.float32, device=CPU)


def test_a_damaged_pipeline_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be loaded as a pipeline") as caught:
        load_pipeline(str(tmp_path), dtype=torch.float32, device=CPU)
    assert str(tmp_path) in caught.value.message


class Loaded:
    """What diffusers would give, as far as placing it goes."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, object]] = []

    def set_progress_bar_config(self, *, disable: bool) -> None:
        assert disable

    def enable_model_cpu_offload(self, *, device: torch.device) -> None:
        self.asked.append(("model", device))

    def enable_sequential_cpu_offload(self, *, device: torch.device) -> None:
        self.asked.append(("sequential", device))

    def to(self, device: torch.device) -> None:
        self.asked.append(("none", device))


@pytest.mark.parametrize("offload", ["none", "model", "sequential"])
def test_a_pipeline_is_placed_once_and_as_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, offload: Offload
) -> None:
    monkeypatch.setattr("diffusers.DiffusionPipeline.from_pretrained", lambda source, **options: Loaded())
    device = torch.device("cuda:1")
    loaded = load_pipeline(str(folder), dtype=torch.bfloat16, device=device, offload=offload)
    assert loaded.asked == [(offload, device)]


def test_a_folder_saved_without_a_model_is_loaded_without_it(tmp_path: Path) -> None:
    make_pipeline("sd3").save_pretrained(tmp_path / "whole")
    small = load_pipeline(str(tmp_path / "whole"), dtype=torch.float32, device=CPU)
    small.register_modules(text_encoder_3=None, tokenizer_3=None)
    small.save_pretrained(tmp_path / "small")
    pipeline = load_pipeline(str(tmp_path / "small"), dtype=torch.float32, device=CPU)
    assert pipeline.text_encoder_3 is None
    assert pipeline.text_encoder_2 is not None
