"""Factors that are read together are those that are read one by one, and what is known of a file is of the file as it is."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import NonFiniteError
from sigmascope.lora.compatibility import judge_lora
from sigmascope.lora.reader import open_lora

SHAPES = {"a": (8, 4), "b": (8, 4), "c": (4, 6)}
MODEL = {f"{name}.weight": shape for name, shape in SHAPES.items()}


def state(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, (out, inner) in SHAPES.items():
        tensors[f"{name}.lora_up.weight"] = torch.randn(out, 2, generator=generator).to(dtype)
        tensors[f"{name}.lora_down.weight"] = torch.randn(2, inner, generator=generator).to(dtype)
        tensors[f"{name}.alpha"] = torch.tensor(3.0)
    return tensors


def saved(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
    save_file(dict(tensors), path, metadata)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tensors_together_are_those_one_by_one(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = state(dtype=dtype) | {"odd": torch.tensor([1, 2, 3], dtype=torch.int8), "none": torch.zeros(0)}
    with open_checkpoint(saved(tmp_path / "lora.safetensors", tensors)) as checkpoint:
        keys = [*reversed(checkpoint.keys())]
        together = checkpoint.tensors(keys)
    assert [*together] == keys
    assert all(torch.equal(together[key], tensors[key]) for key in keys)
    assert all(together[key].dtype == tensors[key].dtype for key in keys)


def test_stacked_factors_are_those_of_the_file(tmp_path: Path) -> None:
    tensors = state()
    with open_lora(saved(tmp_path / "lora.safetensors", tensors)) as lora:
        stacks = [*lora.stacks(lora.names)]
        alphas = {name: lora.alpha_of(name) for name in lora.names}
    assert [stack.names for stack in stacks] == [("a", "b"), ("c",)]
    for names, ups, downs in stacks:
        for name, up, down in zip(names, ups, downs, strict=True):
            assert torch.equal(up, tensors[f"{name}.lora_up.weight"])
            assert torch.equal(down, tensors[f"{name}.lora_down.weight"])
    assert alphas == dict.fromkeys(SHAPES, 3.0)


def test_verdict_has_the_norm_of_the_formed_change(tmp_path: Path) -> None:
    tensors = state()
    verdict = judge_lora(saved(tmp_path / "lora.safetensors", tensors), MODEL)
    for module in verdict.modules:
        up, down = (tensors[f"{module.name}.lora_{end}.weight"].to(torch.float64) for end in ("up", "down"))
        assert module.norm == pytest.approx(float(torch.linalg.matrix_norm(1.5 * up @ down)), rel=1e-12)
        assert (module.alpha, module.scale, module.finite) == (3.0, 1.5, True)


@pytest.mark.parametrize("bad", ["a.lora_up.weight", "a.lora_down.weight", "a.alpha"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_module_that_is_not_finite_is_told_among_others(tmp_path: Path, bad: str, value: float) -> None:
    tensors = state()
    tensors[bad].view(-1)[0] = value
    verdict = judge_lora(saved(tmp_path / "lora.safetensors", tensors), MODEL)
    assert [module.finite for module in verdict.modules] == [False, True, True]
    assert verdict.modules[1].norm is not None


def test_alpha_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    tensors = state() | {"a.alpha": torch.tensor(float("inf"))}
    with open_lora(saved(tmp_path / "lora.safetensors", tensors)) as lora:
        with pytest.raises(NonFiniteError, match=r"lora\.safetensors: a: alpha is inf"):
            lora.alpha_of("a")
        assert lora.alpha_of("b") == 3.0


def test_a_file_that_was_written_anew_is_read_as_it_is(tmp_path: Path) -> None:
    path = saved(tmp_path / "lora.safetensors", state())
    with open_lora(path) as lora:
        assert lora.names == ("a", "b", "c")
    other = {key.replace("a.", "d.", 1): tensor for key, tensor in state(1).items() if key[0] != "c"}
    saved(path, other, {"ss_network_dim": "2"})
    with open_lora(path) as lora:
        assert set(lora.names) == {"b", "d"}
        assert lora.metadata == {"ss_network_dim": "2"}
        assert torch.equal(lora.modules["b"].up, other["b.lora_up.weight"])
    wider = state() | {"a.lora_down.weight": torch.ones(2, 7)}
    with open_lora(saved(path, wider)) as lora:
        assert lora.shape_of("a") == (8, 7)


def test_configuration_beside_a_file_counts_as_it_is_now(tmp_path: Path) -> None:
    tensors = {
        "base_model.model.a.lora_A.weight": torch.ones(2, 4),
        "base_model.model.a.lora_B.weight": torch.ones(8, 2),
    }
    path = saved(tmp_path / "adapter_model.safetensors", tensors)
    for alpha in (4, 6):
        (tmp_path / "adapter_config.json").write_text(f'{{"r": 2, "lora_alpha": {alpha}}}')
        with open_lora(path) as lora:
            assert lora.alpha_of("a") == lora.modules["a"].alpha == alpha
