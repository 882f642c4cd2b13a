from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from sigmascope import encode_latents
from sigmascope.errors import EveryStrategyFailedError
from sigmascope.pipeline import model_state
from sigmascope.pipeline.model_state import as_before, nbytes_to_copy, put_in_ram, why_not_in_ram

if TYPE_CHECKING:
    from tests.pipeline.conftest import Sample


class Layer(nn.Module):
    """Weights, a buffer, and a tensor and a list of tensors that are plain attributes."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))
        self.register_buffer("offset", torch.rand(3))
        self.plain = torch.rand(3)
        self.scale = [torch.rand(3), 2.0]

    def held(self) -> list[Any]:
        return [self.weight, self.offset, self.plain, self.scale[0]]


@pytest.fixture
def ram_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an accelerator: tensors of the CPU are copied to where RAM is said to be."""
    monkeypatch.setattr(model_state, "_CPU", torch.device("meta"))


@pytest.mark.usefixtures("ram_is_elsewhere")
def test_all_tensors_are_in_ram_meanwhile() -> None:
    layer = Layer()
    with as_before(layer, also_on_success=True):
        put_in_ram([layer])
        assert [one.device.type for one in layer.held()] == ["meta"] * 4
        assert isinstance(layer.weight, nn.Parameter)


@pytest.mark.usefixtures("ram_is_elsewhere")
def test_the_originals_are_back_and_never_moved() -> None:
    layer = Layer()
    before = layer.held()
    with as_before(layer, also_on_success=True):
        put_in_ram([layer])
    assert all(now is original for now, original in zip(layer.held(), before, strict=True))
    assert all(one.device.type == "cpu" for one in before)


@pytest.mark.usefixtures("ram_is_elsewhere")
def test_what_shares_a_weight_shares_its_copy() -> None:
    layer, other = Layer(), Layer()
    other.weight = layer.weight
    both = nn.ModuleList([layer, other])
    with as_before(both, also_on_success=True):
        put_in_ram([both])
        assert layer.weight is other.weight


@pytest.mark.usefixtures("ram_is_elsewhere")
def test_parameters_and_buffers_that_are_elsewhere_count() -> None:
    assert nbytes_to_copy([Layer()]) == 2 * 3 * 4


def test_what_is_in_ram_already_does_not_count() -> None:
    assert nbytes_to_copy([Layer()]) == 0


def test_weights_that_are_nowhere_cannot_be_copied() -> None:
    with torch.device("meta"):
        layer = nn.Linear(2, 2)
    assert "offloaded" in (why_not_in_ram([layer]) or "")


def test_a_vae_whose_weights_are_nowhere_is_passed_over_on_the_cpu(kl: "Sample") -> None:
    with torch.device("meta"):
        vae = type(kl.vae).from_config(kl.vae.config)
    with pytest.raises(
        EveryStrategyFailedError, match="CPU Fallback Encoding skipped: its weights are offloaded"
    ):
        encode_latents(vae, kl.pixels, strategies="cpu", predict=False)


def test_a_hook_of_accelerates_is_set_aside_on_the_cpu(kl: "Sample") -> None:
    from accelerate import cpu_offload_with_hook
    from accelerate.hooks import remove_hook_from_module

    vae = type(kl.vae).from_config(kl.vae.config).eval()
    vae.load_state_dict(kl.vae.state_dict())
    cpu_offload_with_hook(vae, execution_device="cpu")
    hook = vae._hf_hook
    moved: list[object] = []

    def move(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        moved.append(module)
        return args, kwargs

    hook.pre_forward = move
    latent, _ = encode_latents(vae, kl.pixels, strategies="cpu", predict=False)
    torch.testing.assert_close(latent, kl.latent, rtol=0, atol=1e-5)
    assert moved == []
    assert vae._hf_hook is hook
    encode_latents(vae, kl.pixels, strategies="direct", predict=False)
    assert moved
    remove_hook_from_module(vae)
