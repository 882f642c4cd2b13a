"""`sigmascope lora convert` as a user calls it."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cli.lora.conftest import Terminal

from sigmascope.lora.adapters import DiffChange
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.reader import load_lora
from sigmascope.lora.writer import save_lora


@pytest.fixture
def convert(terminal: Terminal) -> Terminal:
    """Run the command in this process, with an 80-column terminal's width."""
    return partial(terminal, "lora", "convert")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    factors = LoraFactors(torch.randn(6, 3).bfloat16(), torch.randn(3, 5).bfloat16(), 2.0, (6, 5))
    changes = {f"denoiser.layer_{number}.bias": DiffChange({"diff_b": torch.ones(3)}) for number in range(12)}
    path = tmp_path / "relight.safetensors"
    save_lora(path, LoraFile({"denoiser.conv_in": factors}, changes=changes))
    return path


def test_it_says_what_it_did(convert: Terminal, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    outcome = convert(source, target, "--format", "kohya")
    assert outcome.code == 0
    for said in ("relight.safetensors", "native to kohya", "lbm", "Other changes", "12", "Written:"):
        assert said in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert load_lora(target).format == "kohya"


@pytest.mark.parametrize(
    ("layer", "in_diffusers"),
    [("unet.down_blocks.3.resnets.0.time_emb_proj", True), ("transformer.blocks.0.ffn.net.2", False)],
)
def test_kohya_files_are_for_diffusers_only_where_its_pipeline_reads_them(
    layer: str, in_diffusers: bool, convert: Terminal, tmp_path: Path
) -> None:
    """Of WAN it takes those alone that hold all of a block's layers, by its own loader."""
    factors = {f"{layer}.lora_B.weight": torch.ones(6, 2), f"{layer}.lora_A.weight": torch.ones(2, 5)}
    save_file(factors, tmp_path / "in.safetensors")
    said = convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "--format", "kohya").out
    assert "LyCORIS" in said
    assert ("load_lora_weights" in " ".join(said.split())) is in_diffusers


def test_its_report_as_json(convert: Terminal, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    options = (
        "--format",
        "peft",
        "--prefix",
        "none",
        "--save_precision",
        "bf16",
        "--drop_unsupported",
        "--json",
    )
    report = json.loads(convert(source, target, *options).out)
    assert (report["source_format"], report["format"], report["modules"]) == ("native", "peft", 1)
    assert len(report["left_out"]) == 12
    assert {tensor.dtype for tensor in load_file(target).values()} == {torch.bfloat16}
    assert list(load_lora(target).modules) == ["conv_in"]


def test_what_is_left_out_is_listed(convert: Terminal, source: Path, tmp_path: Path) -> None:
    outcome = convert(source, tmp_path / "out.safetensors", "--format", "peft", "--drop-unsupported")
    assert "Left out: 12" in outcome.out
    assert "denoiser.layer_0.bias (" in outcome.out
    assert "and 2 more; --json lists all" in outcome.out


def test_a_change_that_the_format_cannot_hold_stops_it(
    convert: Terminal, source: Path, tmp_path: Path
) -> None:
    outcome = convert(source, tmp_path / "out.safetensors", "--format", "peft")
    assert outcome.code == 1
    assert "denoiser.layer_0.bias: peft files can hold a bias's change only beside factors" in outcome.err
    assert list(tmp_path.iterdir()) == [source]


def test_what_peft_cannot_hold_becomes_plain_factors(convert: Terminal, tmp_path: Path) -> None:
    whole = torch.diag(torch.tensor([4.0, 2.0, 1.0]))
    save_lora(
        tmp_path / "in.safetensors", LoraFile({}, changes={"denoiser.conv_in": DiffChange({"diff": whole})})
    )
    options = ("--format", "peft", "--rank", "2")
    outcome = convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", *options)
    assert "1, of rank 2, error 21.8 %" in outcome.out  # 1 / √21
    told = json.loads(
        convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", *options, "--json").out
    )
    assert told["relative_error"] == pytest.approx(21**-0.5, rel=1e-4)
    (factors,) = load_lora(tmp_path / "out.safetensors").modules.values()
    torch.testing.assert_close(
        factors.delta(), torch.diag(torch.tensor([4.0, 2.0, 0.0])), rtol=1e-3, atol=1e-3
    )


def test_its_help_has_an_example(convert: Terminal) -> None:
    outcome = convert("--help")
    assert outcome.code == 0
    assert "sigmascope lora convert" in outcome.out
