"""`sigmascope lbm create-base` as a user meets it."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from sigmascope.cli.root import app
from sigmascope.errors import ConfigError, ModelMismatchError, NonFiniteError
from sigmascope.lbm.base import compare_files
from sigmascope.lbm.model import is_finite, load_lbm


@pytest.fixture
def files(backbone: Path, backbone_config: dict[str, Any], tmp_path: Path) -> Path:
    """A folder with a backbone and the YAML of an LBM."""
    (tmp_path / "training.yaml").write_text(json.dumps({**backbone_config, "resolution": 64}))  # JSON is YAML
    (tmp_path / "out").mkdir()
    return tmp_path


def create(files: Path, *more: str, name: str = "exact_base.ckpt") -> Any:
    arguments = [
        *("lbm", "create-base", "--config_path", str(files / "training.yaml")),
        *("--save_path", str(files / "out" / name), "--backbone_signature", str(files / "backbone")),
        *("--device", "cpu", *more),
    ]
    return CliRunner().invoke(app, arguments)


def test_both_files_and_the_config_are_written_and_named(files: Path) -> None:
    outcome = create(files)
    assert outcome.exit_code == 0, outcome.output
    out = files / "out"
    written = {"exact_base.ckpt", "exact_base.safetensors", "config.yaml"}
    assert {path.name for path in out.iterdir()} == written
    assert all(name in outcome.stdout.replace("\n", "") for name in written)
    assert "9 zero-filled" in outcome.stdout
    assert "add_embedding.linear_1.weight" in outcome.stdout.replace("\n", "")


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        (["--torch-dtype", "fp16"], torch.float16),  # dashes work as well
        (["--torch_dtype", "backbone"], torch.float32),
    ],
)
def test_the_weights_are_of_the_type_asked_for(files: Path, flags: list[str], dtype: torch.dtype) -> None:
    assert create(files, *flags).exit_code == 0
    state = load_file(files / "out" / "exact_base.safetensors")
    assert state.pop("num_iterations").dtype == torch.float32
    assert {tensor.dtype for tensor in state.values()} == {dtype}


@pytest.mark.slow
def test_json_lists_every_change_and_what_the_test_saw(files: Path) -> None:
    outcome = create(files, "--json", "--test_baseline", name="base.safetensors")
    assert outcome.exit_code == 0, outcome.output
    told = json.loads(outcome.stdout)
    first = told["adapted"]["denoiser.conv_in.weight"]
    assert first == {"change": "zero-filled", "from": [16, 4, 3, 3], "to": [16, 5, 3, 3]}
    assert len(told["adapted"]) == 9
    assert told["dropped"]["denoiser.add_embedding.linear_2.bias"] == [64]
    assert told["dtypes"] == {"bfloat16": len(load_file(told["paths"][0])) - 1}
    model = load_lbm(told["paths"][1])
    assert told["parameters"] == sum(weight.numel() for weight in model.denoiser.parameters())
    kinds = (torch.nn.Linear, torch.nn.Conv2d)
    assert told["modules"] == sum(isinstance(module, kinds) for module in model.denoiser.modules())
    tested = told["baseline"]
    assert tested["compared"] == len(model.state_dict())
    assert tested["dtype"] == "bfloat16"
    assert np.isfinite([tested["source_psnr"], tested["vae_psnr"]]).all()
    assert tested["inference_seconds"] > 0


def test_verbose_shows_every_weight_that_changed(files: Path) -> None:
    outcome = create(files, "--verbose", "--test_baseline")
    assert outcome.exit_code == 0, outcome.output
    shown = outcome.stdout.splitlines()
    made = load_file(files / "out" / "exact_base.safetensors")
    backbone = load_file(files / "backbone" / "unet" / "diffusion_pytorch_model.safetensors")
    changed = 0
    for key, weight in backbone.items():
        had, shape = (
            "×".join(map(str, each.shape)) for each in (weight, made.get(f"denoiser.{key}", weight))
        )
        if had != shape:
            changed += 1
            assert f"  denoiser.{key}: {had} -> {shape}, zero-filled" in shown
    assert changed == 9
    assert "  add_embedding.linear_1.bias: 64, dropped" in shown
    assert "dB from its source" in " ".join(outcome.stdout.split())


def test_a_backbone_that_does_not_fit_is_explained(files: Path, backbone_config: dict[str, Any]) -> None:
    denoiser = backbone_config["denoiser"] | {"block_out_channels": [16, 64]}
    (files / "training.yaml").write_text(json.dumps({**backbone_config, "denoiser": denoiser}))
    outcome = create(files)
    assert isinstance(outcome.exception, ModelMismatchError)
    assert "denoiser.conv_norm_out" not in outcome.exception.message  # this one fits
    assert "denoiser.mid_block.resnets.1.conv2.bias: [32] in the backbone, [64] in the LBM" in (
        outcome.exception.message
    )
    assert not list((files / "out").iterdir())


def test_nan_in_the_backbone_is_named_and_nothing_is_written(files: Path) -> None:
    path = files / "backbone" / "vae" / "diffusion_pytorch_model.safetensors"
    state = load_file(path)
    state["decoder.conv_out.bias"][0] = torch.inf
    save_file(state, path, {"format": "pt"})
    outcome = create(files)
    assert isinstance(outcome.exception, NonFiniteError)
    assert "decoder.conv_out.bias holds NaN or Inf" in outcome.exception.message
    assert not list((files / "out").iterdir())


@pytest.mark.parametrize(
    "flags", [["--torch_dtype", "int8"], ["--device", "cuda:77"], ["--variant", "nothing"]]
)
def test_options_that_cannot_work_are_refused_before_anything_is_written(
    files: Path, flags: list[str]
) -> None:
    outcome = create(files, *flags)
    assert outcome.exit_code != 0
    assert not list((files / "out").iterdir())


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_of_a_backbone_is_refused(files: Path, name: str) -> None:
    outcome = create(files, "--backbone_signature", name)  # the later one counts
    assert isinstance(outcome.exception, ConfigError)
    assert "--backbone_signature is empty" in outcome.exception.message
    assert not list((files / "out").iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="Windows ends a process without asking it")
def test_sigterm_leaves_everything_as_it_was(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = files / "out"
    (out / "exact_base.ckpt").write_bytes(b"earlier")
    before = signal.getsignal(signal.SIGTERM)
    seen: list[torch.Size] = []

    def looked_at(weight: torch.Tensor) -> bool:
        if len(seen) == 20:
            assert [path for path in out.iterdir() if path.name.startswith(".")]  # half of the base
            os.kill(os.getpid(), signal.SIGTERM)
        seen.append(weight.shape)
        return is_finite(weight)

    monkeypatch.setattr("sigmascope.lbm.base.is_finite", looked_at)
    outcome = create(files)
    assert outcome.exit_code == 143, outcome.output
    assert len(seen) <= 21
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {"exact_base.ckpt": b"earlier"}
    assert signal.getsignal(signal.SIGTERM) is before


def test_another_model_s_yaml_in_the_way_is_an_error(files: Path) -> None:
    (files / "out" / "exact_base.yaml").write_text("bridge_noise_sigma: 0.1")
    outcome = create(files)
    assert isinstance(outcome.exception, ConfigError)
    assert "exact_base.yaml" in outcome.exception.message


def test_a_difference_between_the_files_is_found(files: Path) -> None:
    assert create(files).exit_code == 0
    paths = (files / "out" / "exact_base.ckpt", files / "out" / "exact_base.safetensors")
    state = load_file(paths[1])
    assert compare_files(paths) == len(state)
    state["vae.vae_model.quant_conv.bias"][3] *= -1
    save_file(state, paths[1])
    with pytest.raises(Exception, match=r"quant_conv\.bias differs"):
        compare_files(paths)


def test_the_help_has_an_example() -> None:
    outcome = CliRunner().invoke(app, ["lbm", "create-base", "--help"])
    assert "sigmascope lbm create-base --config_path config.yaml" in " ".join(outcome.stdout.split())
