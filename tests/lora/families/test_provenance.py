"""Which bases a LoRA's header tells apart."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sigmascope.checkpoints import open_checkpoint
from sigmascope.lora.fingerprint import denoiser_fingerprint

State = dict[str, Tensor]


@pytest.fixture
def fingerprint(tmp_path: Path) -> Callable[[State], str]:
    def of(state: State) -> str:
        save_file(state, tmp_path / "model.safetensors")
        with open_checkpoint(tmp_path / "model.safetensors") as checkpoint:
            return denoiser_fingerprint(checkpoint)

    return of


@pytest.fixture
def state() -> State:
    generator = torch.Generator().manual_seed(0)
    return {
        "denoiser.to_q.weight": torch.randn(160, 160, generator=generator),
        "denoiser.to_q.bias": torch.randn(160, generator=generator),
        "vae.scale": torch.ones(1),
    }


def test_bases_that_differ_only_in_a_large_layer_are_told_apart(
    fingerprint: Callable[[State], str], state: State
) -> None:
    trained = {**state, "denoiser.to_q.weight": state["denoiser.to_q.weight"] * 1.01}
    assert fingerprint(state) != fingerprint(trained)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_copy_in_another_dtype_is_the_same_base(
    fingerprint: Callable[[State], str], state: State, dtype: torch.dtype
) -> None:
    assert fingerprint(state) == fingerprint({key: value.to(dtype) for key, value in state.items()})


def test_other_parts_do_not_matter(fingerprint: Callable[[State], str], state: State) -> None:
    assert fingerprint(state) == fingerprint({**state, "vae.scale": torch.zeros(1)})
