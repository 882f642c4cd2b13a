import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

import sigmascope
from sigmascope.cli.lbm.infer import infer
from sigmascope.cli.root import app
from sigmascope.errors import ConfigError, FileError, ModelMismatchError, NonFiniteError, WriteError
from sigmascope.lbm.config import parse_config
from sigmascope.lbm.infer import translate_image
from sigmascope.lbm.model import build_lbm, load_lbm
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.writer import save_lora

LAYER = "denoiser.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
CONFIG = {
    "resolution": 32,
    "denoiser": {
        "block_out_channels": [32],
        "layers_per_block": 1,
        "down_block_types": ["DownBlock2D"],
        "up_block_types": ["UpBlock2D"],
        "transformer_layers_per_block": 1,
        "attention_head_dim": 2,
        "norm_num_groups": 8,
    },
    "vae": {"block_out_channels": [32, 32], "layers_per_block": 1, "norm_num_groups": 8},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its config, a picture of 30×20, and a LoRA of one layer."""
    folder = tmp_path_factory.mktemp("lbm")
    torch.manual_seed(0)
    config = parse_config(CONFIG)
    state = build_lbm(config).state_dict()
    save_file(state, folder / "base.safetensors")
    torch.save(
        {"state_dict": {f"model.{key}": tensor for key, tensor in state.items()}}, folder / "base.ckpt"
    )
    (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "in.png")
    factors = LoraFactors(torch.randn(32, 2) * 3, torch.randn(2, 32), alpha=2.0, weight_shape=(32, 32))
    save_lora(folder / "lora.safetensors", LoraFile({LAYER: factors}))
    return folder


@pytest.fixture
def arguments(folder: Path, tmp_path: Path) -> dict[str, str]:
    return arguments_of(folder, tmp_path / "out.png")


def arguments_of(folder: Path, output: Path) -> dict[str, str]:
    return {
        "--base_model_path": str(folder / "base.safetensors"),
        "--source_image": str(folder / "in.png"),
        "--output_path": str(output),
        "--device": "cpu",
    }


@dataclass(frozen=True)
class Plain:
    """What the base alone makes of the picture, written into a folder that was not there."""

    path: Path
    told: str
    picture: Any


@pytest.fixture(scope="module")
def plain(folder: Path) -> Plain:
    path = folder / "lora" / "assets" / "output.png"
    told = run(arguments_of(folder, path))
    return Plain(path, told, pixels(path))


def run(arguments: dict[str, str], *flags: str) -> str:
    """Give stdout; errors come as exceptions."""
    stdout: str = invoked(arguments, *flags).stdout
    return stdout


def invoked(arguments: dict[str, str], *flags: str) -> Any:
    flat = [part for pair in arguments.items() for part in pair]
    result = CliRunner().invoke(app, ["lbm", "infer", *flat, *flags], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def pixels(path: str | Path) -> Any:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def test_writes_what_the_library_gives(plain: Plain, folder: Path) -> None:
    assert plain.told.startswith(f"Wrote {plain.path} (30×20)")
    model = load_lbm(folder / "base.safetensors")
    expected = translate_image(model, Image.open(folder / "in.png"))
    assert np.array_equal(plain.picture, np.asarray(expected))


def test_a_size_that_no_memory_holds_is_an_error_with_a_next_step(arguments: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"does not fit into memory .*--tile_size 512"):
        run(arguments, "--size", "10000000x10000000")


def test_hyphens_are_the_same_flags(arguments: dict[str, str], plain: Plain) -> None:
    run({key.replace("_", "-"): value for key, value in arguments.items()})
    assert np.array_equal(pixels(arguments["--output_path"]), plain.picture)


def test_lightning_checkpoint_gives_the_same_picture(
    arguments: dict[str, str], folder: Path, plain: Plain
) -> None:
    arguments |= {"--base_model_path": str(folder / "base.ckpt")}
    run(arguments, "--config_path", str(folder / "config.yaml"))
    assert np.array_equal(pixels(arguments["--output_path"]), plain.picture)


def test_hot_and_merged_lora_agree_and_scale_zero_is_the_base(
    arguments: dict[str, str], folder: Path, plain: Plain
) -> None:
    def picture(*flags: str) -> Any:
        told.append(run(arguments, "--lora_path", str(folder / "lora.safetensors"), *flags))
        return pixels(arguments["--output_path"]).astype(int)

    told: list[str] = []
    hot, merged = picture(), picture("--merge", "--json")
    assert np.abs(hot - plain.picture).max() > 1
    assert np.abs(hot - merged).max() <= 1
    assert np.array_equal(picture("--lora_scale", "0"), plain.picture)
    check_json(json.loads(told[1]), arguments["--output_path"])


def check_json(told: dict[str, Any], output: str) -> None:
    """JSON is all there is on stdout, and names what was made, how, and the stages."""
    assert (told["width"], told["height"], told["output_path"]) == (30, 20, output)
    assert (told["lora"]["mode"], told["lora"]["applied_modules"]) == ("merged", 1)
    assert told["stages"][0]["name"] == "model_loading"


def test_run_is_saved_and_shown_with_every_stage(
    arguments: dict[str, str], folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    lora = {"--lora_path": str(folder / "lora.safetensors"), "--lora_scale": "0.5"}
    done = invoked(
        arguments | lora | {"--run_path": str(path), "--num_inference_steps": "3", "--seed": "5"}, "--verbose"
    )
    assert "latent_encoding" in done.stderr
    assert "latent_encoding" not in done.stdout
    stages = {stage.name: stage for stage in sigmascope.load_run(path).stages}
    assert list(stages) == [
        "model_loading",
        "lora_application",
        "latent_encoding",
        "denoising",
        "latent_decoding",
    ]
    assert len(stages["denoising"].steps) == 3
    assert stages["denoising"].facts["seed"] == 5
    assert stages["lora_application"].facts["applied_modules"] == 1
    assert stages["lora_application"].facts["scale"] == 0.5
    assert stages["model_loading"].facts["missing_keys"] == []
    denoiser = sum(
        parameter.numel()
        for parameter in build_lbm(parse_config(CONFIG), device="meta").denoiser.parameters()
    )
    assert stages["model_loading"].modules["denoiser"].parameters == denoiser


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        (("--lora_scale", "2.5"), ConfigError, "--lora_scale: expected 0.0 to 2.0, got 2.5"),
        (("--lora_scale", "-0.1"), ConfigError, "--lora_scale: expected 0.0 to 2.0"),
        (("--lora_scale", "nan"), ConfigError, "--lora_scale: expected 0.0 to 2.0"),
        (("--num_inference_steps", "0"), ConfigError, "num_inference_steps: expected 1 or more"),
        (("--torch_dtype", "int8"), ConfigError, "--torch_dtype: expected one of float32"),
        (("--device", "toaster"), ConfigError, "--device: 'toaster' is not a device"),
        (("--resolution", "0"), ConfigError, "--resolution: expected 1 or more, got 0"),
        (("--size", "huge"), ConfigError, "--size: expected bucket, keep"),
        (("--conditioning", "depth"), ConfigError, "--conditioning: expected KEY=PICTURE"),
        (("--output_path", "out.psd"), ConfigError, "cannot write a picture with the suffix '.psd'"),
        (("--output_path", f"{__file__}/out.png"), WriteError, "cannot be reached"),
        (("--run_path", f"{__file__}/run.json"), WriteError, "cannot be reached"),
        (("--source_image", "/no/such/in.png"), FileError, "no such file"),
        (("--base_model_path", "/no/such/model.ckpt"), FileError, "model.ckpt"),
        (("--lora_path", "/no/such/lora.safetensors"), FileError, "lora.safetensors"),
    ],
)
def test_bad_input_is_named(
    flags: tuple[str, str], error: type[Exception], message: str, arguments: dict[str, str]
) -> None:
    with pytest.raises(error) as caught:
        run(arguments | {flags[0]: flags[1]})
    assert message in str(caught.value)


@pytest.mark.parametrize("flag", ["--output_path", "--run_path"])
@pytest.mark.parametrize("way", ["plain", "link", "dots"])
def test_source_is_never_overwritten(arguments: dict[str, str], tmp_path: Path, flag: str, way: str) -> None:
    source = Path(arguments["--source_image"])
    before = source.read_bytes()
    target = tmp_path / "link.png" if way == "link" else source
    if way == "link":
        target.symlink_to(source)
    elif way == "dots":
        target = source.parent / ".." / source.parent.name / source.name
    with pytest.raises(ConfigError, match=f"{flag}: .* is also --source_image"):
        run(arguments | {flag: str(target)})
    assert source.read_bytes() == before


@pytest.mark.parametrize("flag", ["--base_model_path", "--lora_path", "--config_path", "--output_path"])
def test_run_never_replaces_another_file_of_the_command(
    arguments: dict[str, str], folder: Path, flag: str
) -> None:
    arguments |= {
        "--lora_path": str(folder / "lora.safetensors"),
        "--config_path": str(folder / "config.yaml"),
    }
    path = Path(arguments[flag])
    before = path.read_bytes() if path.exists() else None
    with pytest.raises(ConfigError, match=f"--run_path: .* is also {flag}"):
        run(arguments | {"--run_path": str(path)})
    assert (path.read_bytes() if path.exists() else None) == before


def test_run_never_replaces_a_config_that_is_found_or_weights_in_a_folder(
    arguments: dict[str, str], folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="is also the model's config"):
        run(arguments | {"--run_path": str(folder / "config.yaml")})
    (tmp_path / "model").mkdir()
    shard = tmp_path / "model" / "shard.safetensors"
    shard.write_bytes((folder / "base.safetensors").read_bytes())
    for model in (tmp_path / "model", tmp_path / "model" / "model.safetensors.index.json"):
        with pytest.raises(ConfigError, match="is also --base_model_path"):
            run(arguments | {"--base_model_path": str(model), "--run_path": str(shard)})


@pytest.mark.parametrize("flag", ["--output_path", "--run_path"])
def test_conditioning_is_never_overwritten(arguments: dict[str, str], tmp_path: Path, flag: str) -> None:
    depth = tmp_path / "depth.png"
    Image.new("RGB", (4, 4)).save(depth)
    with pytest.raises(ConfigError, match=f"{flag}: .* is also --conditioning depth"):
        run(arguments | {"--conditioning": f"depth={depth}", flag: str(depth)})


def test_write_protected_picture_is_found_before_translating(
    arguments: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Path(arguments["--output_path"])
    target.write_bytes(b"old")
    # The superuser may write to every file, so the system's answer is planted.
    allowed = os.access

    def access(path: Path, mode: int) -> bool:
        return not (Path(path) == target and mode == os.W_OK) and allowed(path, mode)

    monkeypatch.setattr(os, "access", access)
    monkeypatch.setattr("sigmascope.lbm.model.load_lbm", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(WriteError, match="is write-protected"):
        run(arguments)
    assert target.read_bytes() == b"old"


@pytest.mark.parametrize("failure", [NonFiniteError("NaN in the latent."), KeyboardInterrupt()])
def test_a_record_that_cannot_be_saved_does_not_hide_the_failure(
    arguments: dict[str, str],
    tmp_path: Path,
    failure: BaseException,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "run.json"

    def fail(*_: object, **__: object) -> None:
        path.mkdir()  # so that the record cannot be written
        raise failure

    monkeypatch.setattr("sigmascope.lbm.infer.translate_image", fail)
    base, source, output = (
        Path(arguments[flag]) for flag in ("--base_model_path", "--source_image", "--output_path")
    )
    with pytest.raises(type(failure)) as caught:  # without the parser, which turns Ctrl-C into its own error
        infer(base_model_path=base, source_image=source, output_path=output, device="cpu", run_path=path)
    assert caught.value is failure
    assert "record of the failed run was not saved" in caplog.text
    assert "run.json" in caplog.text


@pytest.mark.parametrize("size", ["keep", "32x48"])
def test_resolution_that_nothing_would_use_is_refused(arguments: dict[str, str], size: str) -> None:
    with pytest.raises(ConfigError, match=f"--resolution 64 has no effect with --size {size}"):
        run(arguments | {"--resolution": "64", "--size": size})


def test_lora_of_another_model_is_refused_and_a_record_beside_the_earlier_one_says_so(
    arguments: dict[str, str], tmp_path: Path
) -> None:
    factors = LoraFactors(torch.randn(8, 2), torch.randn(2, 8), alpha=2.0, weight_shape=(8, 8))
    save_lora(tmp_path / "other.safetensors", LoraFile({"denoiser.absent.to_q": factors}))
    path = tmp_path / "run.json"
    written = []
    for name in ("run.json", "run-failed.json"):
        with pytest.raises(ModelMismatchError, match="absent"):
            run(arguments, "--lora_path", str(tmp_path / "other.safetensors"), "--run_path", str(path))
        written.append(path.read_bytes())
        saved = sigmascope.load_run(tmp_path / name)
        assert not saved.complete
        assert [stage.success for stage in saved.stages] == [True, False]
    assert written[0] == written[1]
    assert not Path(arguments["--output_path"]).exists()


def test_nan_weights_leave_no_picture(arguments: dict[str, str], folder: Path, tmp_path: Path) -> None:
    state = build_lbm(parse_config(CONFIG)).state_dict()
    state["denoiser.conv_in.weight"][0, 0, 0, 0] = float("nan")
    save_file(state, tmp_path / "nan.safetensors")
    arguments |= {"--base_model_path": str(tmp_path / "nan.safetensors")}
    with pytest.raises(NonFiniteError, match=r"denoiser\.conv_in\.weight"):
        run(arguments, "--config_path", str(folder / "config.yaml"))
    assert not Path(arguments["--output_path"]).exists()


def test_help_names_every_flag_of_the_specification() -> None:
    result = CliRunner().invoke(app, ["lbm", "infer", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    for flag in (
        "--base_model_path",
        "--lora_path",
        "--source_image",
        "--output_path",
        "--lora_scale",
        "--num_inference_steps",
        "--torch_dtype",
        "--device",
        "--merge",
        "--hot",
        "--verbose",
        "--json",
        "--run_path",
    ):
        assert flag in result.output
