import pytest
import torch
from tests.lbm.training.tiny_run import new_model, tiny_settings

from sigmascope.errors import ConfigError, LoraFormatError, ModelMismatchError
from sigmascope.lbm.model import LbmModel, build_lbm
from sigmascope.lbm.training.lora_layers import (
    denoiser_layers,
    is_part_of_name,
    plan_continued_lora,
    plan_new_lora,
    plan_training,
    select_layers,
)
from sigmascope.lora.adapters import DiffChange
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile

ATTN1 = "denoiser.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"


def lora_of(*layers: tuple[str, tuple[int, ...]], rank: int = 2, alpha: float = 3.0) -> LoraFile:
    modules = {}
    for name, shape in layers:
        inner = int(torch.Size(shape[1:]).numel())
        modules[name] = LoraFactors(torch.ones(shape[0], rank), torch.ones(rank, inner), alpha, shape)
    return LoraFile(modules)


@pytest.mark.parametrize(
    ("pattern", "layer", "expected"),
    [
        ("attn1", ATTN1, True),
        ("attn", ATTN1, True),
        ("attn2", ATTN1, False),
        ("blocks.1.attentions", ATTN1, True),
        ("down_blocks.1", "denoiser.down_blocks.10.conv", False),
        ("down_blocks.1", "denoiser.down_blocks.1.conv", True),
        ("1.conv", "denoiser.down_blocks.11.conv", False),
        ("ff.net", "a.ff.net.0.proj", True),
        ("ff.net", "a.ffxnet.0.proj", False),
        (ATTN1, ATTN1, True),
        ("", ATTN1, False),
    ],
)
def test_what_a_partial_name_means(pattern: str, layer: str, expected: bool) -> None:
    assert is_part_of_name(pattern, layer) is expected


def test_layers_are_chosen_once_and_in_order() -> None:
    layers = ("a.attn1.q", "a.attn2.q", "a.ff.net.0", "b.attn1.q")
    assert select_layers(layers, ["ff.net", "attn1", "b."], where="x") == (
        "a.attn1.q",
        "a.ff.net.0",
        "b.attn1.q",
    )
    assert select_layers(layers, None, where="x") == layers
    assert [layer for layer in layers if is_part_of_name("attn", layer)] == [
        "a.attn1.q",
        "a.attn2.q",
        "b.attn1.q",
    ]


def test_a_pattern_that_means_nothing_is_named_with_near_ones(tiny_model: LbmModel) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_new_lora(tiny_model, ["attn1", "atn1", "ff.nets"], rank=2)
    assert "'atn1' matches no layer's name (near: attn1" in str(caught.value)
    assert "'ff.nets' matches no layer's name (near: ff.net" in str(caught.value)
    assert "'attn1' is" not in str(caught.value)


def test_names_of_the_layer_list_are_taken(tiny_model: LbmModel) -> None:
    lines = list(denoiser_layers(tiny_model))
    assert plan_new_lora(tiny_model, lines[3:5], rank=2).trained == tuple(lines[3:5])


def test_ranks_are_those_asked_for_as_far_as_a_layer_has_them(tiny_model: LbmModel) -> None:
    plan = plan_new_lora(tiny_model, None, rank=40, conv_rank=30)
    for name, layer in denoiser_layers(tiny_model).items():
        weight = layer.weight.detach().flatten(1)
        asked = 40 if isinstance(layer, torch.nn.Linear) else 30
        assert plan.modules[name].rank == min(asked, *weight.shape), name
    assert plan.modules["denoiser.conv_out"].rank == 4
    assert plan.modules[ATTN1].rank == 40


def test_pointwise_convolutions_have_the_convolutions_rank(tiny_model: LbmModel) -> None:
    plan = plan_new_lora(tiny_model, ["conv_shortcut"], rank=8, conv_rank=3)
    assert {plan.modules[name].weight_shape[2:] for name in plan.trained} == {(1, 1)}
    assert {module.rank for module in plan.modules.values()} == {3}


def test_alpha_is_one_strength_for_all(tiny_model: LbmModel) -> None:
    plan = plan_new_lora(tiny_model, None, rank=40, conv_rank=30, alpha=10.0)
    assert {module.alpha / module.rank for module in plan.modules.values()} == {0.25}
    plain = plan_new_lora(tiny_model, None, rank=40)
    assert all(module.alpha == module.rank for module in plain.modules.values())


def test_the_full_size_denoiser_has_the_layers_of_the_specification() -> None:
    model = build_lbm(device="meta")
    plan = plan_new_lora(model, None, rank=1)
    assert len(plan.trained) == 792
    shapes = [module.weight_shape for module in plan.modules.values()]
    assert sum(len(shape) == 2 for shape in shapes) == 741
    denoiser = sum(row.frozen_parameters for row in plan.rows if row.block != "vae")
    assert denoiser == 2_426_231_044


def test_the_table_counts_every_parameter_once(tiny_model: LbmModel) -> None:
    plan = plan_new_lora(tiny_model, ["attn1", "conv_in"], rank=3, conv_rank=2)
    assert plan.frozen_parameters == sum(parameter.numel() for parameter in tiny_model.parameters())
    layers = denoiser_layers(tiny_model)
    expected = sum(
        (3 if "attn1" in name else 2) * sum(layers[name].weight.flatten(1).shape) for name in plan.trained
    )
    assert plan.trained_parameters == expected
    rows = {(row.block, row.kind): row for row in plan.rows}
    assert rows["conv_in", "convolution"].trained_modules == 1
    assert rows["conv_in", "convolution"].rank_text == "2"
    attention = rows["down_blocks.1", "self-attention"]
    assert (attention.trained_modules, attention.modules, attention.rank_text) == (4, 4, "3")
    assert rows["down_blocks.1", "cross-attention"].trained_modules == 0
    assert rows["down_blocks.1", "cross-attention"].rank_text == ""
    assert rows["vae", "all"].trained_parameters == 0
    assert plan.rows[0].block == "conv_in"
    assert plan.rows[-1].block == "vae"


def test_full_fine_tuning_trains_the_denoiser(tiny_model: LbmModel) -> None:
    plan = plan_training(tiny_model, tiny_settings(full_finetune=True))
    assert plan.trained_parameters == sum(p.numel() for p in tiny_model.denoiser.parameters())
    assert plan.frozen_parameters == sum(p.numel() for p in tiny_model.vae.parameters())
    assert plan.modules == {}


def test_a_files_ranks_and_alphas_are_taken_over(tiny_model: LbmModel) -> None:
    lora = lora_of((ATTN1, (64, 64)), ("denoiser.conv_in", (32, 4, 3, 3)), rank=3, alpha=7.0)
    plan = plan_continued_lora(tiny_model, lora, ["attn1"])
    assert plan.trained == (ATTN1,)
    assert plan.frozen == ("denoiser.conv_in",)
    assert {(module.rank, module.alpha) for module in plan.modules.values()} == {(3, 7.0)}
    assert plan.trained_parameters == 3 * (64 + 64)
    model = sum(parameter.numel() for parameter in tiny_model.parameters())
    assert plan.frozen_parameters == model + 3 * (32 + 36)


def test_whole_changes_stored_under_rank_9999_have_a_strength_of_one(tiny_model: LbmModel) -> None:
    lora = lora_of(("denoiser.conv_in", (32, 4, 3, 3)), rank=32, alpha=9999.0)
    module = plan_continued_lora(tiny_model, lora, None).modules["denoiser.conv_in"]
    assert module.alpha / module.rank == 1.0


def test_a_module_that_could_not_learn_is_refused_unless_it_stays_frozen(tiny_model: LbmModel) -> None:
    lora = lora_of((ATTN1, (64, 64)), ("denoiser.conv_in", (32, 4, 3, 3)), rank=3, alpha=3.0)
    still = lora_of(("denoiser.conv_in", (32, 4, 3, 3)), rank=3, alpha=0.0)
    both = LoraFile({**lora.modules, **still.modules})
    with pytest.raises(LoraFormatError, match=r"1 module has alpha 0.*: denoiser\.conv_in\."):
        plan_continued_lora(tiny_model, both, None)
    assert plan_continued_lora(tiny_model, both, ["attn1"]).frozen == ("denoiser.conv_in",)


def test_modules_that_fit_nothing_are_named(tiny_model: LbmModel) -> None:
    with pytest.raises(ModelMismatchError, match=r"1 of 2 modules.*denoiser\.conv_inn.*nearest: denoiser"):
        plan_continued_lora(
            tiny_model,
            lora_of(("denoiser.conv_inn", (32, 4, 3, 3)), ("denoiser.conv_out", (4, 32, 3, 3))),
            None,
        )
    with pytest.raises(
        ModelMismatchError, match=r"conv_in is \(32, 5, 3, 3\) in the LoRA and \(32, 4, 3, 3\)"
    ):
        plan_continued_lora(tiny_model, lora_of(("denoiser.conv_in", (32, 5, 3, 3))), None)
    vae = "vae.vae_model.encoder.conv_in"
    with pytest.raises(ModelMismatchError, match=rf"1 module is outside the denoiser: {vae}"):
        plan_continued_lora(
            tiny_model, lora_of((vae, (32, 3, 3, 3)), ("denoiser.conv_in", (32, 4, 3, 3))), None
        )


def test_what_would_be_lost_from_a_file_is_refused(tiny_model: LbmModel) -> None:
    plain = lora_of(("denoiser.conv_in", (32, 4, 3, 3)))
    with pytest.raises(LoraFormatError, match="2 keys belong to no module: a, b"):
        plan_continued_lora(tiny_model, LoraFile(plain.modules, unused_keys=("a", "b")), None)
    diff = {"denoiser.conv_in.bias": DiffChange({"diff": torch.ones(32)})}
    with pytest.raises(LoraFormatError, match="more than up and down factors"):
        plan_continued_lora(tiny_model, LoraFile(plain.modules, changes=diff), None)


def test_a_pattern_for_layers_that_only_the_model_has_says_so(tiny_model: LbmModel) -> None:
    with pytest.raises(
        ConfigError, match="'conv_out' matches 1 layer of the model, but none in the LoRA file"
    ):
        plan_continued_lora(tiny_model, lora_of(("denoiser.conv_in", (32, 4, 3, 3))), ["conv_out"])


def test_planning_changes_nothing() -> None:
    model = new_model()
    keys, flags = list(model.state_dict()), [p.requires_grad for p in model.parameters()]
    plan_new_lora(model, None, rank=2)
    assert list(model.state_dict()) == keys
    assert [p.requires_grad for p in model.parameters()] == flags
