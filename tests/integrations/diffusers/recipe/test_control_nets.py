"""What is said of a LoRA on a ControlNet whose output is zero, beside what the ControlNet gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tests.integrations.diffusers.other_pipelines import controlnet
from torch import Tensor, nn

import sigmascope
from sigmascope.analysis.breakdown import headline
from sigmascope.analysis.lora_acting import acting_lora
from sigmascope.analysis.lora_idle import idle_lora
from sigmascope.integrations.diffusers.control_nets import begin_mute_nets

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`", "ignore:.FluxPosEmbed"),
]
LORA = {"r": 2, "init_lora_weights": False}


def train(net: nn.Module) -> None:
    """Give its zero convolutions values."""
    for name, weight in net.named_parameters():
        if name.startswith("controlnet_") and "cond" not in name:
            nn.init.normal_(weight)


def picture(pipeline: Any, call: dict[str, Any], **more: Any) -> Tensor:
    made: Tensor = pipeline(**call, **more, generator=torch.Generator().manual_seed(0)).images
    return made


@pytest.mark.parametrize(
    ("layers", "trained", "acts"),
    [(["to_q"], False, False), (["to_q", "controlnet_mid_block"], False, True), (["to_q"], True, True)],
    ids=str,
)
def test_a_lora_on_a_controlnet_acts_if_the_layers_that_it_ends_in_are_not_zero(
    layers: list[str], trained: bool, acts: bool
) -> None:
    pipeline, call = controlnet()
    if trained:
        train(pipeline.controlnet)
    bare = picture(pipeline, call)
    pipeline.controlnet.add_adapter(LoraConfig(**LORA, target_modules=layers), "a")
    for _ in range(2):  # what was looked at once is kept
        with sigmascope.watch(pipeline) as watching:
            moved = not torch.equal(picture(pipeline, call), bare)
        run = watching.record()
        assert moved is acts
        assert (acting_lora(run) is not None) is acts
        said = idle_lora(run)
        assert (said is None) is acts
        assert said is None or headline(run).startswith(said)
        assert said is None or "it is on controlnet, whose last layers are all zero" in said


@pytest.mark.parametrize("second", [True, False], ids=["of zeros", "of values"])
def test_a_change_of_zeros_on_the_last_layers_leaves_a_controlnet_of_zeros_so(second: bool) -> None:
    pipeline, call = controlnet()
    bare = picture(pipeline, call)
    net = pipeline.controlnet
    net.add_adapter(LoraConfig(**LORA, target_modules=["to_q"]), "a")
    net.add_adapter(LoraConfig(r=2, init_lora_weights=second, target_modules=["controlnet_mid_block"]), "b")
    net.set_adapters(["a", "b"])
    with sigmascope.watch(pipeline) as watching:
        moved = not torch.equal(picture(pipeline, call), bare)
    run = watching.record()
    assert moved is not second
    assert (acting_lora(run) is not None) is moved
    assert (idle_lora(run) is None) is moved


def test_a_lora_with_nan_on_a_controlnet_of_zeros_is_not_said_to_do_nothing() -> None:
    pipeline, call = controlnet()
    pipeline.controlnet.add_adapter(LoraConfig(**LORA, target_modules=["to_q"]), "a")
    next(p for name, p in pipeline.controlnet.named_parameters() if "lora_B" in name).data.fill_(torch.nan)
    with sigmascope.watch(pipeline) as watching:
        made = picture(pipeline, call)
    assert made.isnan().any()
    assert (idle_lora(watching.record()), acting_lora(watching.record())) == (None, None)


@pytest.mark.parametrize(("scales", "acts"), [([0.0, 1.0], False), ([1.0, 0.0], True), ([0.0, 0.0], False)])
def test_of_several_controlnets_the_scale_of_the_one_with_the_lora_counts(
    scales: list[float], acts: bool
) -> None:
    from diffusers import ControlNetModel, MultiControlNetModel, StableDiffusionControlNetPipeline

    first, call = controlnet()
    nets = [first.controlnet, ControlNetModel.from_config(first.controlnet.config).eval()]
    for net in nets:
        train(net)
    pipeline = StableDiffusionControlNetPipeline(
        **{**first.components, "controlnet": MultiControlNetModel(nets)}
    )
    pipeline.set_progress_bar_config(disable=True)
    given = {**call, "image": [call["image"]] * 2, "controlnet_conditioning_scale": scales}
    bare = picture(pipeline, given)
    nets[0].add_adapter(LoraConfig(**LORA, target_modules=["to_q"]), "a")
    with sigmascope.watch(pipeline) as watching:
        moved = not torch.equal(picture(pipeline, given), bare)
    run = watching.record()
    assert moved is acts
    assert (acting_lora(run) is not None) is acts
    assert (idle_lora(run) is None) is acts


def flux() -> tuple[Any, dict[str, Any]]:
    from diffusers import FluxControlNetModel

    net = FluxControlNetModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
    )
    return net, {
        "hidden_states": torch.randn(1, 4, 4),
        "controlnet_cond": torch.randn(1, 4, 4),
        "encoder_hidden_states": torch.randn(1, 3, 8),
        "pooled_projections": torch.randn(1, 8),
        "timestep": torch.tensor([1.0]),
        "img_ids": torch.zeros(4, 3),
        "txt_ids": torch.zeros(3, 3),
    }


def sd3() -> tuple[Any, dict[str, Any]]:
    from diffusers import SD3ControlNetModel

    net = SD3ControlNetModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=8,
        caption_projection_dim=16,
        pooled_projection_dim=8,
        pos_embed_max_size=8,
        extra_conditioning_channels=0,
    )
    return net, {
        "hidden_states": torch.randn(1, 4, 8, 8),
        "controlnet_cond": torch.randn(1, 4, 8, 8),
        "encoder_hidden_states": torch.randn(1, 3, 8),
        "pooled_projections": torch.randn(1, 8),
        "timestep": torch.tensor([1.0]),
    }


def given_by(net: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    with torch.no_grad():
        parts = net(**inputs, return_dict=False)
    return [tensor for part in parts if part is not None for tensor in part]


@pytest.mark.parametrize("make", [flux, sd3])
def test_last_layers_of_zeros_are_known_in_other_controlnets(
    make: Callable[[], tuple[Any, dict[str, Any]]],
) -> None:
    torch.manual_seed(0)
    net, inputs = make()
    assert not any(tensor.any() for tensor in given_by(net, inputs))
    assert begin_mute_nets({"controlnet": net}, ["controlnet"]).result() == {"controlnet"}
    train(net)
    assert any(tensor.any() for tensor in given_by(net, inputs))
    assert not begin_mute_nets({"controlnet": net}, ["controlnet"]).result()


def test_of_a_class_that_is_not_diffusers_own_nothing_is_known() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.controlnet_mid_block = nn.Linear(2, 2)
            nn.init.zeros_(self.controlnet_mid_block.weight)
            nn.init.zeros_(self.controlnet_mid_block.bias)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.controlnet_mid_block(x) + x
            return made

    assert not begin_mute_nets({"controlnet": Own()}, ["controlnet"]).result()
