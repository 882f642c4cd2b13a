import bz2
import gzip
import io
import lzma
import os
import pickle
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sigmascope.checkpoints import open_checkpoint, save_torch
from sigmascope.errors import CheckpointError, UnsafeCheckpointError

SameBytes = Callable[[Tensor, Tensor], bool]


class CreatesAFile:
    """What an attacker puts into a checkpoint: unpickling it calls a function."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def layouts(weights: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    prefixed = {f"model.{name}": tensor for name, tensor in weights.items()}
    return {
        "bare": weights,
        "model_state_dict": {"model_state_dict": weights, "epoch": 3, "optimizer": {"state": {}}},
        "lightning": {"state_dict": prefixed, "epoch": 3, "pytorch-lightning_version": "2.4"},
    }


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("layout", ["bare", "model_state_dict", "lightning"])
def test_every_layout_and_age_gives_the_same_bare_keys(
    tmp_path: Path, weights: dict[str, Tensor], layout: str, zipped: bool, same_bytes: SameBytes
) -> None:
    path = tmp_path / "x.ckpt"
    torch.save(layouts(weights)[layout], path, _use_new_zipfile_serialization=zipped)
    with open_checkpoint(path) as checkpoint:
        assert (checkpoint.format, checkpoint.metadata) == ("pickle", {})
        assert checkpoint.keys() == list(weights)
        for name, tensor in weights.items():
            info = checkpoint.info(name)
            assert (info.shape, info.dtype, info.nbytes) == (tensor.shape, tensor.dtype, tensor.nbytes)
            assert same_bytes(checkpoint.tensor(name), tensor)


def test_a_real_training_checkpoint_with_its_optimizer_is_read(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    save_torch(
        tmp_path / "x.pt", {"model_state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
    )
    with open_checkpoint(tmp_path / "x.pt") as checkpoint:
        assert checkpoint.keys() == list(model.state_dict())
        assert list(checkpoint.skipped) == ["optimizer"]


def test_each_read_gives_memory_of_its_own(tmp_path: Path) -> None:
    save_torch(tmp_path / "x.ckpt", {"a": torch.zeros(2)})
    with open_checkpoint(tmp_path / "x.ckpt") as checkpoint:
        checkpoint.tensor("a").fill_(9)
        assert checkpoint.tensor("a").tolist() == [0.0, 0.0]


def test_reading_after_closing_is_an_error(tmp_path: Path) -> None:
    save_torch(tmp_path / "x.ckpt", {"a": torch.zeros(2)})
    with open_checkpoint(tmp_path / "x.ckpt") as checkpoint:
        pass
    with pytest.raises(CheckpointError, match="closed already"):
        checkpoint.tensor("a")


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_checkpoint_is_named_and_not_run(tmp_path: Path, zipped: bool) -> None:
    canary = tmp_path / "canary"
    path = tmp_path / "evil.ckpt"
    content = {"state_dict": {"a": torch.zeros(2)}, "callbacks": CreatesAFile(canary)}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(
        UnsafeCheckpointError, match=r"evil\.ckpt: asks to run code.*mkdir.*Nothing was run"
    ) as error:
        open_checkpoint(path)
    assert "safetensors" in (error.value.hint or "")
    assert not canary.exists()
    torch.load(path, weights_only=False)  # the payload is a real one
    assert canary.exists()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_code_in_a_bare_pickle_is_named_and_not_run(tmp_path: Path, protocol: int) -> None:
    canary = tmp_path / "canary"
    (tmp_path / "evil.pt").write_bytes(pickle.dumps({"a": CreatesAFile(canary)}, protocol))
    with pytest.raises(UnsafeCheckpointError, match="mkdir"):
        open_checkpoint(tmp_path / "evil.pt")
    assert not canary.exists()


def test_every_foreign_class_is_named(tmp_path: Path) -> None:
    content = {"a": torch.zeros(1), "share": Fraction(1, 2), "path": Path("x"), "model": torch.nn.ReLU()}
    torch.save(content, tmp_path / "x.ckpt")
    with pytest.raises(UnsafeCheckpointError, match=r"fractions\.Fraction.*pathlib.*torch\.nn.*\.ReLU"):
        open_checkpoint(tmp_path / "x.ckpt")


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("kept", [0.001, 0.01, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_checkpoint_is_told_so(tmp_path: Path, zipped: bool, kept: float) -> None:
    path = tmp_path / "x.ckpt"
    torch.save({"a": torch.randn(1000), "b": torch.randn(1000)}, path, _use_new_zipfile_serialization=zipped)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(CheckpointError, match=r"x\.ckpt: ") as caught:
        open_checkpoint(path)
    assert not isinstance(caught.value, UnsafeCheckpointError)
    assert "again" in (caught.value.hint or "")


def test_a_file_of_before_pytorch_1_6_may_be_cut_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    torch.save({"a": torch.ones(1)}, path, _use_new_zipfile_serialization=False)
    refused = []
    with path.open("r+b") as stream:
        for length in reversed(range(path.stat().st_size)):
            stream.truncate(length)
            with pytest.raises(CheckpointError, match=r"x\.ckpt: ") as caught:
                open_checkpoint(path)
            refused.append(bool(caught.value.hint))
    assert len(refused) > 300
    assert all(refused)


@pytest.mark.skipif(os.name == "nt", reason="names are bytes on POSIX only")
def test_a_name_that_pytorch_cannot_open_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.ckpt")
    save_torch(path, {"a": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"not valid Unicode\. Rename"):
        open_checkpoint(path)


def test_a_claim_of_more_memory_than_there_is_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhaust(*_: object, **__: object) -> None:
        raise MemoryError

    save_torch(tmp_path / "x.ckpt", {"a": torch.zeros(2)})
    monkeypatch.setattr(torch, "load", exhaust)
    with pytest.raises(CheckpointError, match="asks for more memory than there is"):
        open_checkpoint(tmp_path / "x.ckpt")


def test_a_compressed_archive_is_refused_since_it_cannot_be_mapped(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(1000)}, buffer)
    with (
        zipfile.ZipFile(buffer) as source,
        zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name in source.namelist():
            archive.writestr(name, source.read(name))
    with pytest.raises(CheckpointError, match="compressed archive"):
        open_checkpoint(tmp_path / "x.pt")


def test_programs_are_refused_with_the_way_to_their_weights(tmp_path: Path) -> None:
    layer, sample = torch.nn.Linear(2, 2), torch.ones(1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(layer), tmp_path / "script.pt")
        torch.export.save(torch.export.export(layer, (sample,)), tmp_path / "export.pt2")
    (tmp_path / "export.pt2").rename(tmp_path / "export.pt")
    for name, message, hint in (
        (
            "script",
            r"is a TorchScript program \(torch\.jit\.save\)",
            'torch.jit.load("program.pt").state_dict()',
        ),
        ("export", r"is an exported program \(torch\.export\.save\)", "torch.export.load"),
    ):
        with pytest.raises(CheckpointError, match=message) as caught:
            open_checkpoint(tmp_path / f"{name}.pt")
        assert hint in (caught.value.hint or "")


def test_a_zip_of_other_files_says_what_it_contains(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.ckpt", "w") as archive:
        archive.writestr("a/model.safetensors", b"x")
    with pytest.raises(
        CheckpointError, match=r"without a checkpoint of its own; it contains 'a/model\.safetensors'"
    ):
        open_checkpoint(tmp_path / "x.ckpt")


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_files_and_tar_archives_are_told(tmp_path: Path, compress: Any) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "a.ckpt")
    (tmp_path / "packed.ckpt").write_bytes(compress((tmp_path / "a.ckpt").read_bytes()))
    with tarfile.open(tmp_path / "tar.ckpt", "w") as archive:
        archive.add(tmp_path / "a.ckpt", "a.ckpt")
    for name, message in (("packed", "it is a compressed file"), ("tar", "it is a tar archive")):
        with pytest.raises(CheckpointError, match=message) as caught:
            open_checkpoint(tmp_path / f"{name}.ckpt")
        assert "Unpack it" in (caught.value.hint or "")


def test_a_tensor_larger_than_its_file_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1).expand(10**12)}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"'a' claims 4000000000000 bytes in a file of \d+"):
        open_checkpoint(tmp_path / "x.pt")


def test_an_archive_whose_list_is_empty_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    torch.save({"weight": torch.ones(2)}, path)
    content = bytearray(path.read_bytes())
    end = content.rfind(b"PK\6\6")
    content[end + 24 : end + 48] = bytes(24)  # no entries, in a list of no bytes
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.ckpt: "):
        open_checkpoint(path)


@pytest.mark.parametrize("as_zip", [True, False])
def test_a_newer_pickle_protocol_is_no_damage(tmp_path: Path, as_zip: bool) -> None:
    path = tmp_path / "model.ckpt"
    torch.save({"weight": torch.zeros(2)}, path, pickle_protocol=4, _use_new_zipfile_serialization=as_zip)
    with pytest.raises(CheckpointError, match=r"protocol 4 or 5.*without pickle_protocol"):
        open_checkpoint(path)
