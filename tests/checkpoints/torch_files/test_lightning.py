"""A `last.ckpt` of Lightning keeps what `save_hyperparameters` was given, in classes of other packages."""

import argparse
import threading
from collections import OrderedDict
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import UnsafeCheckpointError

WEIGHT = torch.randn(3, 2)


class AttributeDict(dict[str, Any]):
    """Lightning's own, under its own name, and with code that must not run."""

    def __setstate__(self, state: object) -> None:
        raise AssertionError("code of the class ran")


AttributeDict.__module__ = "lightning.fabric.utilities.data"


def lightning_file(path: Path, **more: Any) -> Path:
    """What Lightning's trainer saves, as far as the weights and the settings go."""
    content = {"state_dict": {"model.denoiser.conv_in.weight": WEIGHT}, "epoch": 3, **more}
    torch.save(content, path)
    return path


@pytest.fixture(autouse=True)
def lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickle looks a class up in its module; there is no Lightning here."""
    import sys
    import types

    for name in (
        "lightning",
        "lightning.fabric",
        "lightning.fabric.utilities",
        "lightning.fabric.utilities.data",
    ):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["lightning.fabric.utilities.data"].AttributeDict = AttributeDict  # type: ignore[attr-defined]


def test_settings_in_diffusers_and_lightning_s_containers_are_passed_over(tmp_path: Path) -> None:
    configuration = pytest.importorskip("diffusers.configuration_utils")
    settings = AttributeDict(
        denoiser=configuration.FrozenDict({"in_channels": 4, "nested": {"a": (1, 2)}}),
        args=argparse.Namespace(rank=4, names=["a"]),
        odd=OrderedDict(a=1),
    )
    path = lightning_file(tmp_path / "last.ckpt", hyper_parameters=settings)
    with open_checkpoint(path) as checkpoint:
        assert list(checkpoint) == ["denoiser.conv_in.weight"]
        assert torch.equal(checkpoint.tensor("denoiser.conv_in.weight"), WEIGHT)
        assert checkpoint.skipped["hyper_parameters"] == "is not a weight"


def test_what_else_stands_among_the_settings_is_refused_by_name(tmp_path: Path) -> None:
    path = lightning_file(tmp_path / "last.ckpt", hyper_parameters=AttributeDict(share=Fraction(1, 2)))
    with pytest.raises(
        UnsafeCheckpointError, match=r"tensors do not need: fractions\.Fraction\. Nothing was run"
    ):
        open_checkpoint(path)


def test_what_the_host_allows_is_as_before(tmp_path: Path) -> None:
    """Also while a file is read in another thread."""
    path = lightning_file(tmp_path / "last.ckpt", hyper_parameters=argparse.Namespace(rank=4))
    before = set(torch.serialization.get_safe_globals())
    thread = threading.Thread(target=lambda: open_checkpoint(path).close())
    thread.start()
    thread.join()
    assert set(torch.serialization.get_safe_globals()) == before
    with torch.serialization.safe_globals([argparse.Namespace]):
        open_checkpoint(path).close()
        assert argparse.Namespace in torch.serialization.get_safe_globals()
        assert torch.load(path, weights_only=True)["hyper_parameters"].rank == 4
