import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lbm.training.tiny_run import new_model, randomised, tiny_settings
from torch import Tensor

from sigmascope.errors import NonFiniteError
from sigmascope.lbm.model import LbmModel, load_lbm
from sigmascope.lbm.pocket import BASE_PATH, TUNED_PATH
from sigmascope.lbm.training.lora_layers import TrainableLora, inject_lora, prepare_full
from sigmascope.lbm.training.session import stored_lora, training_metadata, write_trained
from sigmascope.lbm.training.settings import TrainSettings, parse_train_settings
from sigmascope.lora.apply import attach_lora
from sigmascope.lora.file import read_training_facts
from sigmascope.lora.reader import load_lora
from sigmascope.lora.validate import validate_lora

FORMATS = ("native", "kohya", "peft")
X = torch.randn(1, 4, 32, 32, generator=torch.Generator().manual_seed(3))
SIGMA = torch.tensor([0.5])


def output(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(X, SIGMA)
    return result


def pocket_settings(**keys: Any) -> TrainSettings:
    fixed = {"train_shards": "a.tar", "base_model_path": str(BASE_PATH), "save_ckpt_path": "relit"}
    return parse_train_settings({**fixed, **keys})


@pytest.fixture(scope="module")
def pocket() -> LbmModel:
    return load_lbm(BASE_PATH)


@pytest.fixture(scope="module")
def written(
    pocket: LbmModel, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tensor, dict[str, Path], int]:
    """What the pocket model with a LoRA gives, the files of that LoRA, and its number of modules."""
    settings = pocket_settings(rank=3, conv_rank=2, alpha=2, output_formats=list(FORMATS))
    model = copy.deepcopy(pocket)
    trainable = inject_lora(model, settings)
    randomised(trainable.parameters(), std=0.05)
    folder = tmp_path_factory.mktemp("export") / "made" / "for it"
    paths = write_trained(trainable, settings, 500, folder)
    return output(model), dict(zip(FORMATS, paths, strict=True)), len(trainable.plan.modules)


def test_files_are_named_by_their_format(written: tuple[Tensor, dict[str, Path], int]) -> None:
    names = [path.name for path in written[1].values()]
    assert names == [f"lora{end}.safetensors" for end in ("", "-kohya", "-peft")]
    assert [load_lora(path).format for path in written[1].values()] == list(FORMATS)


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_of_any_format_acts_as_in_training(
    format: str, written: tuple[Tensor, dict[str, Path], int], pocket: LbmModel
) -> None:
    trained, paths, _ = written
    with attach_lora(pocket, load_lora(paths[format])):
        torch.testing.assert_close(output(pocket), trained, rtol=1e-4, atol=1e-5)
    assert (output(pocket) - trained).abs().max() > 0.01


@pytest.mark.parametrize("format", ["peft", "kohya"])
def test_diffusers_loads_the_files_with_equal_effect(
    format: str, written: tuple[Tensor, dict[str, Path], int], pocket: LbmModel
) -> None:
    from diffusers import StableDiffusionXLPipeline
    from peft.tuners.tuners_utils import BaseTunerLayer

    trained, paths, modules = written
    model = copy.deepcopy(pocket)
    if format == "peft":
        model.denoiser.load_lora_adapter(str(paths[format]), prefix="unet")
    else:
        state, alphas = StableDiffusionXLPipeline.lora_state_dict(
            str(paths[format]), unet_config=model.denoiser.config
        )
        StableDiffusionXLPipeline.load_lora_into_unet(state, network_alphas=alphas, unet=model.denoiser)
    assert sum(isinstance(module, BaseTunerLayer) for module in model.denoiser.modules()) == modules
    torch.testing.assert_close(output(model), trained, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "format", ["native", *(pytest.param(name, marks=pytest.mark.slow) for name in ("kohya", "peft"))]
)
def test_a_file_of_any_format_can_be_validated(
    format: str, written: tuple[Tensor, dict[str, Path], int]
) -> None:
    report = validate_lora(BASE_PATH, TUNED_PATH, written[1][format], workers=1)
    assert len(report.modules) == written[2]
    assert not [module for module in report.modules if module.status == "unmatched"]
    assert "lora.other_base" not in {finding.id for finding in report.findings}


def test_alpha_is_the_rank_and_the_header_says_what_was_done(
    written: tuple[Tensor, dict[str, Path], int],
) -> None:
    lora = load_lora(written[1]["native"])
    assert all(factors.alpha == factors.rank for factors in lora.modules.values())
    assert lora.metadata["lbm_native_naming"] == "true"
    facts = read_training_facts(lora.metadata)
    assert facts.training["steps"] == "500"
    assert facts.training["learning rate"] == "0.0001"
    assert facts.training["optimizer"] == "AdamW"
    assert facts.training["base model"] == "base.safetensors"
    assert facts.training["name"] == "relit"
    assert facts.provenance["step"] == "500"


def small_lora(**keys: Any) -> tuple[LbmModel, TrainableLora, TrainSettings]:
    model, settings = new_model(), tiny_settings(**{"trainable_lora_modules": ["attn1", "conv_in"], **keys})
    trainable = inject_lora(model, settings)
    randomised(trainable.parameters())
    return model, trainable, settings


def test_the_same_weights_give_the_same_bytes(tmp_path: Path) -> None:
    _, trainable, settings = small_lora()
    first, second = (write_trained(trainable, settings, 3, tmp_path / name)[0] for name in "ab")
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("precision", "dtype"), [("float32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_factors_are_stored_as_asked(precision: str, dtype: torch.dtype, tmp_path: Path) -> None:
    _, trainable, settings = small_lora(save_precision=precision, alpha=3.0)
    lora = load_lora(write_trained(trainable, settings, 1, tmp_path)[0])
    assert {factor.dtype for one in lora.modules.values() for factor in (one.up, one.down)} == {dtype}
    for name, factors in trainable.state().modules.items():
        exact = factors.delta()
        error = (lora.modules[name].delta() - exact).norm() / exact.norm()
        assert error < 4 * torch.finfo(dtype).eps


def test_frozen_modules_come_out_as_they_went_in(tmp_path: Path) -> None:
    _, first, settings = small_lora(save_precision="bf16")
    path = write_trained(first, settings, 1, tmp_path)[0]
    _, second, again = small_lora(
        lora_weights_path=str(path), trainable_lora_modules=["attn1"], save_precision="fp16"
    )
    assert second.plan.frozen == ("denoiser.conv_in",)
    before, after = load_lora(path), load_lora(write_trained(second, again, 2, tmp_path / "again")[0])
    frozen, expected = after.modules["denoiser.conv_in"], before.modules["denoiser.conv_in"]
    assert frozen.up.dtype == torch.bfloat16
    assert torch.equal(frozen.up, expected.up)
    assert torch.equal(frozen.down, expected.down)
    assert after.modules[second.plan.trained[0]].up.dtype == torch.float16


def test_a_continued_files_own_words_are_kept_and_its_origin_is_not() -> None:
    _, trainable, _ = small_lora()
    header = {"modelspec.trigger_phrase": "blue", "sigmascope_tuned": "x", "ss_network_dim": "9"}
    object.__setattr__(trainable.plan, "metadata", header)
    assert stored_lora(trainable, torch.float32).metadata == {"modelspec.trigger_phrase": "blue"}


def test_nan_is_not_written(tmp_path: Path) -> None:
    _, trainable, settings = small_lora()
    name, parameter = trainable.parameters()[-1]
    with torch.no_grad():
        parameter[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=name.removesuffix(".lora_up.weight")):
        write_trained(trainable, settings, 1, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_full_fine_tuning_writes_a_checkpoint_that_loads_by_itself(tmp_path: Path) -> None:
    model = new_model()
    model.num_iterations += 10
    trainable = prepare_full(model)
    settings = tiny_settings(full_finetune=True)
    (path,) = write_trained(trainable, settings, 7, tmp_path)
    assert path.name == "model.safetensors"
    loaded = load_lbm(path)
    assert loaded.config == settings.lbm
    assert loaded.num_iterations == 17
    for key, value in model.state_dict().items():
        if key != "num_iterations":
            assert torch.equal(loaded.state_dict()[key], value)
    with torch.no_grad():
        next(iter(model.denoiser.parameters()))[0] = float("inf")
    with pytest.raises(NonFiniteError, match="holds NaN or Inf"):
        write_trained(trainable, settings, 8, tmp_path)
    assert [one.name for one in sorted(tmp_path.iterdir())] == [
        "model.safetensors",
        "model.yaml",
    ]


def test_a_base_that_is_gone_does_not_cost_the_result(caplog: pytest.LogCaptureFixture) -> None:
    metadata = training_metadata(tiny_settings(base_model_path="gone.ckpt"), 1)
    assert metadata["sigmascope_base"] == "gone.ckpt"
    assert "sigmascope_base_fingerprint" not in metadata
    assert "fingerprint is left out" in caplog.text
