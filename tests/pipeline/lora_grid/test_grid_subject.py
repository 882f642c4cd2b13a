"""Grids of anything that paints: a layer whose output is the picture's colours."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from sigmascope import LoraFactors, LoraFile, lora_grid, save_lora
from sigmascope.pipeline.lora_grid import GridSubject


def two_layers() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3))
    for parameter in layers.parameters():
        nn.init.constant_(parameter, 0.2 if parameter.ndim == 2 else 0.0)
    return layers


@dataclass
class Stripes:
    """A stripe of a row's light and one three times as wide, by the first layer; the second layer never runs."""

    model: nn.Module = field(default_factory=two_layers)
    rows: tuple[str, ...] = ("dim", "bright")
    name: str = "stripes"
    kind: str = "prompt"
    light: tuple[float, float] = (0.5, 2.0)
    flat: bool = False

    def settings(self, row: int) -> Mapping[str, object]:
        return {"light": self.light[row], "flat": self.flat}

    def summary(self) -> str:
        return ""

    def paint(self, row: int, seed: int) -> Image.Image:
        inputs = torch.tensor([[self.light[row], 0.0], [0.0, 0.25]]) * (not self.flat)
        with torch.no_grad():
            colours = self.model.get_submodule("0")(inputs)
        pixels = np.nan_to_num(colours.numpy()).clip(0, 1) * 255
        return Image.fromarray(
            np.repeat(pixels[None], (1, 3), axis=1).repeat(4, axis=0).round().astype(np.uint8)
        )


def saved(path: Path, layer: str, up: float) -> Path:
    factors = LoraFactors(torch.full((3, 1), up), torch.ones(1, 2), 1.0, (3, 2))
    save_lora(path, LoraFile({layer: factors}))
    return path


def test_a_class_of_ones_own_is_a_subject() -> None:
    assert isinstance(Stripes(), GridSubject)


def test_the_differences_are_those_worked_by_hand(tmp_path: Path) -> None:
    """Each weight grows by 0.1·scale, so the stripes by 0.05 and 0.025 in the dim row, by 0.2 and 0.025 in the other."""
    lora = saved(tmp_path / "warm.safetensors", "0", 0.1)
    made = lora_grid(Stripes(), lora, output=tmp_path / "grid.png", scales=(1.0, 2.0))
    for row, scale, mean in ((0, 1.0, 0.03125), (0, 2.0, 0.0625), (1, 1.0, 0.06875)):
        assert made.cell(row, 0, scale).mean_difference == pytest.approx(mean, abs=0.002)
    assert made.cell(0, 0, 2.0).psnr_db == pytest.approx(
        23.6, abs=0.5
    )  # 10 · log10(1 / ((0.1² + 3 · 0.05²) / 4))
    assert made.findings() == ()


def test_a_lora_for_a_layer_that_does_not_run_is_named(tmp_path: Path) -> None:
    lora = saved(tmp_path / "asleep.safetensors", "1", 0.1)
    made = lora_grid(Stripes(), lora, output=tmp_path / "grid.png")
    assert [found.message for found in made.findings()] == [
        "asleep changes no picture: it does nothing, or less than one step of their colours."
    ]
    again = lora_grid(Stripes(), lora, output=tmp_path / "grid.png")
    assert all(cell.reused for cell in again.cells)
    assert again.findings() == made.findings()


def test_where_nothing_is_to_be_seen_no_lora_is_blamed(tmp_path: Path) -> None:
    lora = saved(tmp_path / "warm.safetensors", "0", 0.1)
    made = lora_grid(Stripes(flat=True), lora, output=tmp_path / "grid.png")
    assert {found.id for found in made.findings()} == {"lora_grid.blank_without_lora"}


def test_loras_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "style.safetensors" for folder in ("a", "b")]
    for path, up in zip(paths, (0.1, 0.2), strict=True):
        path.parent.mkdir()
        saved(path, "0", up)
    made = lora_grid(Stripes(), paths, output=tmp_path / "grid.png", scales=1.0)
    assert [lora.label for lora in made.loras] == ["a/style", "b/style"]


def test_a_lora_and_a_scale_given_twice_are_shown_once(tmp_path: Path) -> None:
    lora = saved(tmp_path / "warm.safetensors", "0", 0.1)
    made = lora_grid(Stripes(), [lora, lora], output=tmp_path / "grid.png", scales=(1.0, 1.0))
    assert [(cell.row, cell.lora, cell.scale) for cell in made.cells] == [
        (0, None, None), (0, 0, 1.0), (1, None, None), (1, 0, 1.0),
    ]  # fmt: skip
    assert made.loras[0].label == "warm"


def test_the_sheet_shows_each_picture_where_its_row_and_scale_are(tmp_path: Path) -> None:
    lora = saved(tmp_path / "warm.safetensors", "0", 0.1)
    lora_grid(Stripes(), lora, output=tmp_path / "grid.png", scales=(1.0, 2.0))
    with Image.open(tmp_path / "grid.png") as opened:
        sheet = np.asarray(opened.convert("RGB"))
    for number, level in enumerate((0.4, 0.6, 0.8)):  # the bright row's narrow stripe
        column = sheet[len(sheet) // 2 :, 320 * number + 40].astype(int)
        assert (np.abs(column - round(255 * level)).max(axis=1) <= 20).sum() >= 150
