import math
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from tests.lbm.conftest import TINY
from tests.lbm.training.tiny_run import new_model, randomised, tiny_settings
from torch import Tensor

from sigmascope.errors import ConfigError
from sigmascope.lbm.config import parse_config
from sigmascope.lbm.model import LbmModel, build_lbm
from sigmascope.lbm.training.lora_layers import (
    TrainableFull,
    TrainableLora,
    fresh_down,
    inject_lora,
    make_trainable,
    plan_training,
    prepare_full,
)
from sigmascope.lora.apply import attach_lora
from sigmascope.lora.file import LoraFile
from sigmascope.lora.reader import load_lora
from sigmascope.lora.writer import save_lora

X = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(3))
SIGMA = torch.tensor([0.25, 1.0])
SOME = ["attn1", "conv_in", "conv_shortcut"]
"""Linear layers, 3×3 and 1×1 convolutions: quicker to inject than all."""


def output(model: LbmModel) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(X, SIGMA)
    return result


def trained(model: LbmModel, **keys: object) -> TrainableLora:
    trainable = inject_lora(model, tiny_settings(**keys))
    randomised(trainable.parameters())
    return trainable


def saved(tmp_path: Path, lora: LoraFile, format: str = "native") -> str:
    path = tmp_path / f"{format}.safetensors"
    save_lora(path, lora, format=format)
    return str(path)


def test_a_fresh_lora_begins_as_the_base() -> None:
    model = new_model()
    before = output(model)
    inject_lora(model, tiny_settings(trainable_lora_modules=SOME))
    assert torch.equal(output(model), before)


def test_only_the_chosen_factors_are_trained() -> None:
    model = new_model()
    trainable = inject_lora(model, tiny_settings(trainable_lora_modules=["attn1", "conv_in"]))
    named = dict(trainable.parameters())
    assert {name.rpartition(".lora_")[0] for name in named} == set(trainable.plan.trained)
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in named.values()}
    assert sum(p.numel() for p in named.values()) == trainable.plan.trained_parameters
    assert named["denoiser.conv_in.lora_down.weight"].shape == (4, 4, 3, 3)
    assert named["denoiser.conv_in.lora_up.weight"].shape == (32, 4, 1, 1)


def test_the_first_down_factors_are_uniform_as_pefts_are() -> None:
    down = fresh_down((64, 32, 3, 3), 0, "a")
    bound = 1 / math.sqrt(32 * 9)
    assert stats.kstest(down.flatten().numpy(), stats.uniform(-bound, 2 * bound).cdf).pvalue > 0.01


def test_the_first_factors_follow_from_seed_and_layer_alone() -> None:
    everything = dict(inject_lora(new_model(), tiny_settings()).parameters())
    a_part = dict(
        inject_lora(new_model(seed=9), tiny_settings(trainable_lora_modules=["attn1"])).parameters()
    )
    another = dict(
        inject_lora(new_model(), tiny_settings(seed=1, trainable_lora_modules=["attn1"])).parameters()
    )
    for name, parameter in a_part.items():
        assert torch.equal(parameter, everything[name])
        if "lora_down" in name:
            assert not torch.equal(parameter, another[name])
    downs = {p.flatten()[:4].sum().item() for name, p in everything.items() if "lora_down" in name}
    assert len(downs) == len(everything) // 2


def test_pefts_layers_and_our_hooks_give_the_same_output() -> None:
    model = new_model()
    bare = output(model)
    trainable = trained(model, rank=6, conv_rank=3, alpha=9.0)
    with_peft, lora = output(model), trainable.state()
    plain = new_model()
    with attach_lora(plain, lora):
        ours = output(plain)
    assert {factors.scale for factors in lora.modules.values()} == {1.5}
    torch.testing.assert_close(with_peft, ours, rtol=1e-5, atol=1e-5)
    assert (with_peft - bare).abs().max() > 0.1


def test_factors_are_float32_over_a_narrow_base() -> None:
    torch.manual_seed(0)
    model = build_lbm(parse_config(TINY), dtype=torch.bfloat16).eval()
    settings = tiny_settings(trainable_lora_modules=SOME)
    trainable = inject_lora(model, settings)
    assert {p.dtype for _, p in trainable.parameters()} == {torch.float32}
    assert {p.dtype for p in model.denoiser.parameters() if not p.requires_grad} == {torch.bfloat16}
    wide = dict(inject_lora(new_model(), settings).parameters())
    assert all(torch.equal(p, wide[name]) for name, p in trainable.parameters())


@pytest.mark.parametrize("format", ["native", "kohya", "peft"])
def test_a_file_of_any_format_is_gone_on_with(format: str, tmp_path: Path) -> None:
    source = trained(new_model(), rank=6, conv_rank=3, trainable_lora_modules=SOME)
    path = saved(tmp_path, source.state(), format)
    model = new_model()
    trainable = inject_lora(model, tiny_settings(lora_weights_path=path))
    expected = source.state()
    assert list(trainable.state().modules) == list(expected.modules)
    for name, factors in trainable.state().modules.items():
        assert torch.equal(factors.up, expected.modules[name].up), name
        assert torch.equal(factors.down, expected.modules[name].down), name
        assert (factors.rank, factors.alpha) == (expected.modules[name].rank, expected.modules[name].alpha)
    assert len(trainable.parameters()) == 2 * len(expected.modules)


def test_alphas_of_a_file_stay_as_they_are(tmp_path: Path) -> None:
    source = trained(new_model(), rank=3, trainable_lora_modules=["attn1"])
    lora = source.state()
    path = tmp_path / "lora.safetensors"
    save_lora(path, lora)
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    for key in list(tensors):
        if key.endswith(".alpha"):
            tensors[key] = torch.tensor(7.0)
    save_file(tensors, path)
    model = new_model()
    trainable = inject_lora(model, tiny_settings(lora_weights_path=str(path)))
    state = trainable.state()
    assert {factors.alpha for factors in state.modules.values()} == {7.0}
    assert all(torch.equal(one.up, lora.modules[name].up) for name, one in state.modules.items())
    with_peft = output(model)
    plain = new_model()
    with attach_lora(plain, load_lora(path)):
        torch.testing.assert_close(with_peft, output(plain), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_part_of_a_file_is_trained_and_the_rest_acts_and_stays(tmp_path: Path) -> None:
    lora = trained(new_model(), trainable_lora_modules=SOME).state()
    path = saved(tmp_path, lora)
    model = new_model()
    trainable = inject_lora(model, tiny_settings(lora_weights_path=path, trainable_lora_modules=["attn1"]))
    assert all("attn1" in name for name, _ in trainable.parameters())
    assert len(trainable.plan.frozen) == len(lora) - len(trainable.plan.trained)
    expected = new_model()
    with attach_lora(expected, lora):
        torch.testing.assert_close(output(model), output(expected), rtol=1e-5, atol=1e-5)
    frozen = {key: value.clone() for key, value in model.state_dict().items() if "attn1" not in key}
    model(X, SIGMA).square().mean().backward()
    with torch.no_grad():
        for _, parameter in trainable.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in frozen.items())
    after = trainable.state()
    for name in trainable.plan.frozen:
        assert torch.equal(after.modules[name].up, lora.modules[name].up)
    assert all(
        not torch.equal(after.modules[name].up, lora.modules[name].up) for name in trainable.plan.trained
    )


def test_the_state_is_a_copy() -> None:
    trainable = trained(new_model(), trainable_lora_modules=SOME)
    state = trainable.state()
    kept = state.modules["denoiser.conv_in"].up.clone()
    randomised(trainable.parameters(), std=3.0)
    assert torch.equal(state.modules["denoiser.conv_in"].up, kept)


def test_every_factor_gets_a_gradient_once_up_is_not_zero() -> None:
    model = new_model()
    trainable = trained(model)
    model(X, SIGMA).square().mean().backward()
    for name, parameter in trainable.parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_full_fine_tuning_trains_the_denoisers_weights() -> None:
    model = new_model()
    trainable = prepare_full(model)
    named = dict(trainable.parameters())
    assert all(name in model.state_dict() for name in named)
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in named.values()}
    assert len(named) == len(list(model.denoiser.parameters()))
    assert set(trainable.state()) == set(model.state_dict())


def test_the_settings_say_which_of_the_two() -> None:
    assert isinstance(make_trainable(new_model(), tiny_settings(full_finetune=True)), TrainableFull)
    assert isinstance(make_trainable(new_model(), tiny_settings(trainable_lora_modules=SOME)), TrainableLora)


def test_a_plan_can_be_had_before_the_model_is_changed(tiny_model: LbmModel) -> None:
    plan = plan_training(tiny_model, tiny_settings(trainable_lora_modules=["attn2"]))
    assert all("attn2" in name for name in plan.trained)
    assert not any("lora_" in key for key in tiny_model.state_dict())


def test_a_peft_that_takes_patterns_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import peft

    def without_patterns(config: Any, *args: object, **kwargs: object) -> object:
        config.rank_pattern = {}
        return peft.inject_adapter_in_model(config, *args, **kwargs)

    monkeypatch.setattr("sigmascope.lbm.training.lora_layers.inject_adapter_in_model", without_patterns)
    with pytest.raises(ConfigError, match="PEFT gave it rank"):
        inject_lora(new_model(), tiny_settings(rank=6, conv_rank=3, trainable_lora_modules=SOME))
