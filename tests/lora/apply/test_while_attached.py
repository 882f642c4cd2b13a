"""What `attach_lora` applies, and what can be changed while a LoRA is attached."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.lora.apply.test_apply import MakeLora
from tests.lora.small_net import SmallNet
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from sigmascope.errors import ConfigError, ModelMismatchError
from sigmascope.lora.apply import attach_lora
from sigmascope.lora.file import LoraFile


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(6, 6) for _ in range(11))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.down:
            x = x + layer(x)
        return x


@pytest.fixture
def model() -> Blocks:
    torch.manual_seed(0)
    return Blocks()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(1))


def by_hand(model: Blocks, lora: LoraFile, x: Tensor, weights: dict[str, float]) -> Tensor:
    for index, layer in enumerate(model.down):
        name = f"down.{index}"
        delta = weights.get(name, 0.0) * lora.modules[name].delta() if name in lora.modules else 0.0
        x = x + nn.functional.linear(x, layer.weight + delta, layer.bias)  # type: ignore[operator,arg-type]
    return x


ALL = {f"down.{index}": 1.0 for index in range(11)}


def test_blocks_and_patterns_choose_the_layers(model: Blocks, make_lora: MakeLora, x: Tensor) -> None:
    lora = make_lora(model)
    with attach_lora(model, lora, 2.0, blocks={"down.1": 0.25, "down": 0.5}) as attached:
        torch.testing.assert_close(
            model(x), by_hand(model, lora, x, dict.fromkeys(ALL, 1.0) | {"down.1": 0.5})
        )
        attached.blocks = {"down.1": 0.0}
        expected = by_hand(model, lora, x, dict.fromkeys(ALL, 2.0) | {"down.1": 0.0})
        torch.testing.assert_close(model(x), expected)
    with attach_lora(model, lora, only=r"down\.1\d"):
        torch.testing.assert_close(model(x), by_hand(model, lora, x, {"down.10": 1.0}))


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"only": "dwon.3"}, r"only 'dwon.3'.*down\.3"),
        ({"blocks": {"dwn.7": 0.5}}, r"dwn\.7.*nearest.*down\.7"),
    ],
)
def test_names_that_match_nothing_name_the_nearest(
    model: Blocks, make_lora: MakeLora, asked: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        attach_lora(model, make_lora(model), **asked)
    assert not any(layer._forward_hooks for layer in model.modules())


def test_parts_choose_components(make_lora: MakeLora) -> None:
    whole = nn.ModuleDict({part: nn.Sequential(nn.Linear(6, 6)) for part in ("unet", "text_encoder")})
    pipe = SimpleNamespace(components=dict(whole.items()))
    with attach_lora(pipe, make_lora(whole), parts=["unet"]) as attached:
        assert attached.applied == ("unet.0",)
    with pytest.raises(ConfigError, match=r"no component unett.*unet"):
        attach_lora(pipe, make_lora(whole), parts=["unett"])


@pytest.mark.slow
def test_a_compiled_model_takes_scales_blocks_and_files_without_compiling_anew(
    model: Blocks, make_lora: MakeLora, x: Tensor
) -> None:
    first, second = make_lora(model, rank=3), make_lora(model, rank=2, alpha=5.0, seed=9)
    second = second.only({f"down.{index}" for index in range(4)})
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = model(x)
    wanted = [
        by_hand(model, first, x, ALL),
        by_hand(model, first, x, dict.fromkeys(ALL, 0.5)),
        by_hand(model, first, x, dict.fromkeys(ALL, 0.5) | {"down.1": 0.15}),
        by_hand(model, second, x, dict.fromkeys(ALL, 0.5) | {"down.1": 0.15}),
    ]
    attached, counter = attach_lora(model, first), CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)

    def scale() -> None:
        attached.scale = 0.5

    def blocks() -> None:
        attached.blocks = {"down.1": 0.3}

    changes: list[Callable[[], None]] = [lambda: None, scale, blocks, lambda: attached.swap(second)]
    for change, expected in zip(changes, wanted, strict=True):
        change()
        torch.testing.assert_close(compiled(x), expected)
    attached.scale = 0.0
    assert torch.equal(compiled(x), plain)
    assert counter.frame_count == 1
    attached.detach()
    assert torch.equal(compiled(x), plain)
    assert not any(layer._forward_hooks for layer in model.modules())
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())


def test_a_swap_is_the_new_file_or_leaves_the_old_one(make_lora: MakeLora) -> None:
    torch.manual_seed(0)
    model, image = SmallNet(), torch.randn(1, 3, 8, 8)
    small, large = make_lora(model, rank=1, alpha=3.0, seed=5), make_lora(model, rank=2)
    with attach_lora(model, small):
        expected = model(image)
    with attach_lora(model, large) as attached:
        attached.swap(small)
        torch.testing.assert_close(model(image), expected)
        with pytest.raises(ModelMismatchError, match=r"5 modules do not fit into the attached ranks: stem"):
            attached.swap(make_lora(model, rank=3))
        torch.testing.assert_close(model(image), expected)


def test_what_is_attached_under_inference_mode_can_be_set_outside_it(make_lora: MakeLora) -> None:
    torch.manual_seed(0)
    model, image = SmallNet(), torch.randn(1, 3, 8, 8)
    with attach_lora(model, make_lora(model, seed=5), 0.5):
        expected = model(image)
    with torch.inference_mode():
        attached = attach_lora(model, make_lora(model))
        attached.swap(make_lora(model, seed=5))
    attached.scale = 0.5
    torch.testing.assert_close(model(image), expected)
    attached.detach()
