"""What judges damaged files finds planted faults, and nothing wrong with sound files."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.chaos import files, mutations
from tests.chaos.made_files import Specimen, make_specimens
from tests.chaos.openers import OPENERS, Refused, Trial
from tests.chaos.tries import Case
from torch import Tensor

from sigmascope.checkpoints import safetensors, torch_files
from sigmascope.errors import SigmascopeError


@pytest.fixture(scope="module")
def specimens(tmp_path_factory: pytest.TempPathFactory) -> list[Specimen]:
    return make_specimens(tmp_path_factory.mktemp("specimens"))


@pytest.mark.slow
def test_each_opener_finds_a_sound_file_right(
    specimens: list[Specimen], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are not for every file of their family, as an LBM model is not in a GGUF file; none is for none."""
    right = set()
    few = {each.file if each.family in ("lora", "picture") else each.folder: each for each in specimens}
    for specimen in few.values():
        monkeypatch.chdir(specimen.folder)
        for opener in OPENERS[specimen.family]:
            before = set(Path().iterdir())
            try:
                opener(Trial(Path(specimen.file), random.Random(0)))
            except (SigmascopeError, Refused):
                continue
            finally:
                for path in set(Path().iterdir()) - before:
                    path.unlink() if path.is_file() else None
            right.add(opener)
    wrong = {opener for openers in OPENERS.values() for opener in openers} - right
    assert {opener.__name__ for opener in wrong} <= {"_load_lbm", "_command_config"}


def test_a_tensor_that_is_read_wrongly_is_noticed(
    specimens: list[Specimen], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = safetensors.SafetensorsCheckpoint._read_into

    def wrong(self: Any, info: Any, buffer: Tensor) -> Tensor:
        tensor = original(self, info, buffer)
        tensor.view(-1)[:1] = 0
        return tensor

    monkeypatch.setattr(safetensors.SafetensorsCheckpoint, "_read_into", wrong)
    weights = next(each for each in specimens if each.family == "weights")
    monkeypatch.chdir(weights.folder)
    with pytest.raises(AssertionError, match="read wrongly"):
        OPENERS["weights"][0](Trial(Path(weights.file), random.Random(0)))


def test_a_payload_that_runs_is_noticed(
    specimens: list[Specimen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsafe(path: Path) -> object:
        return torch.load(path, map_location="cpu", weights_only=False)

    def with_payload(_name: str, data: bytes, rng: random.Random, *, other: bytes, marker: str) -> Any:
        return mutations._put_payload(data, rng, marker), "payload"

    monkeypatch.setattr(torch_files, "_load", unsafe)
    monkeypatch.setattr(files, "mutated", with_payload)
    monkeypatch.setitem(OPENERS, "weights", OPENERS["weights"][:1])
    pickles = {"weights": [each for each in specimens if (each.family, each.file) == ("weights", "in.pt")]}
    noticed = 0
    for number in range(12):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        try:
            files.attempt(Case(number, 1, 1.0, folder, random.Random(number), pickles))
        except AssertionError as failure:
            noticed += str(failure) == "the payload was run"
        except Exception:  # noqa: BLE001  # what else an unsafe loader lets out
            continue
    assert noticed >= 6
