"""What the dry run expects of memory, beside what PyTorch really keeps."""

import pytest
import torch
from tests.lbm.training.tiny_run import tiny_settings
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from sigmascope.lbm.model import build_lbm
from sigmascope.lbm.training.lora_layers import make_trainable
from sigmascope.lbm.training.train import estimate_memory

SIDE = 64


def really_kept() -> int:
    """Bytes that a forward pass on the CPU keeps for the way back."""
    settings = tiny_settings(batch_size=2)
    model = build_lbm(settings.lbm)
    make_trainable(model, settings)
    model.denoiser.train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = tensor
        return tensor

    side = SIDE // model.vae.factor
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        result = model.denoiser(
            torch.randn(2, settings.unet_input_channels, side, side),
            torch.zeros(2),
            encoder_hidden_states=None,
            return_dict=False,
        )
    assert result[0].requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.slow
def test_activations_are_those_that_a_forward_pass_really_keeps() -> None:
    expected = estimate_memory(tiny_settings(batch_size=2), (SIDE, SIDE)).activations
    assert expected == pytest.approx(really_kept(), rel=0.05)


@pytest.mark.slow
def test_twice_the_side_keeps_four_times_as_much() -> None:
    """Attention's matrix of all pairs, which would grow by sixteen, is never kept."""
    one, twice = (estimate_memory(tiny_settings(), (side, side)).activations for side in (4 * SIDE, 8 * SIDE))
    assert twice == pytest.approx(4 * one, rel=0.02)
