"""Random programs of what a host does with LoRAs, against the weights that the layers really compute with."""

import copy
import random
from collections.abc import Mapping
from typing import Any, Literal

import pytest
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.loaders import PeftAdapterMixin
from torch import Tensor, nn

from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
STEPS = 200
STRENGTHS = (-0.8, 0.0, 0.25, 0.5, 0.8, 1.0, 1.0, 1.7)
ROUNDING = 2e-6  # of ‖W‖: twelve fusings in float32
Weights = Mapping[str, Tensor]


class Tiny(ModelMixin, ConfigMixin, PeftAdapterMixin):  # type: ignore[misc]
    """Four layers with the adapters of diffusers' models; the last is as WAN's of patches."""

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(24, 32, bias=False), nn.Linear(32, 40)
        self.three, self.four = nn.Conv2d(4, 6, 3), nn.Conv3d(3, 5, (1, 2, 2))


def file_of(model: nn.Module, number: int) -> dict[str, Tensor]:
    """A LoRA for three of the four layers."""
    generator = torch.Generator().manual_seed(number)
    state: dict[str, Tensor] = {}
    for place, (name, layer) in enumerate(model.named_children()):
        if place != number:
            rows, columns, *kernel = layer.weight.shape  # type: ignore[misc]
            ones = [1] * len(kernel)
            down = 0.2 * torch.randn(1 + number % 3, columns, *kernel, generator=generator)
            up = 0.2 * torch.randn(rows, 1 + number % 3, *ones, generator=generator)
            state |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    return state


def used_weights(model: nn.Module) -> dict[str, Tensor]:
    """What each layer multiplies with: its answers to unit inputs, in float64; the model itself is left alone."""
    own = copy.deepcopy(model).double()
    found = {}
    with torch.no_grad():
        for name, shape in (("one", (24,)), ("two", (32,)), ("three", (4, 3, 3)), ("four", (3, 1, 2, 2))):
            size = int(torch.tensor(shape).prod())
            layer = own.get_submodule(name)
            units = torch.eye(size, dtype=torch.float64).reshape(size, *shape)
            found[f"{name}.weight"] = (layer(units) - layer(torch.zeros_like(units))).flatten(1)
    return found


class Program:
    """A host that does something at random, as long as diffusers and PEFT allow it."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.random = random.Random(seed)
        self.model: Any = Tiny().requires_grad_(False)
        self.files = [file_of(self.model, number) for number in range(self.random.randint(2, 4))]
        self.done: list[str] = []

    @property
    def adapters(self) -> list[str]:
        return list(getattr(self.model, "peft_config", {}))

    def step(self) -> None:
        acts = [self.load] if not self.adapters else [self.load, self.weigh, self.weigh, self.delete]
        if self.adapters:
            acts += [self.disable, self.enable, self.fuse, self.fuse, self.unfuse, self.unload, self.reload]
        act = self.random.choice(acts)
        self.done.append(act.__name__)
        act()

    def load(self) -> None:
        name = self.random.choice("abcd")
        if name not in self.adapters:
            state = {key: tensor.clone() for key, tensor in self.random.choice(self.files).items()}
            self.model.load_lora_adapter(state, prefix=None, adapter_name=name)

    def weigh(self) -> None:
        names = self.random.sample(self.adapters, self.random.randint(1, len(self.adapters)))
        self.model.set_adapters(names, [self.random.choice(STRENGTHS) for _ in names])

    def delete(self) -> None:
        self.model.delete_adapters(self.random.choice(self.adapters))

    def disable(self) -> None:
        self.model.disable_lora()

    def enable(self) -> None:
        self.model.enable_lora()

    def fuse(self) -> None:
        scale, some = self.random.choice((1.0, 1.0, 0.5)), self.random.random() < 0.3
        self.model.fuse_lora(scale, adapter_names=[self.random.choice(self.adapters)] if some else None)

    def unfuse(self) -> None:
        self.model.unfuse_lora()

    def unload(self) -> None:
        self.model.unload_lora()

    def reload(self) -> None:
        self.model.unload_lora()
        self.load()


def errors_of(
    seed: int, keys: Literal["none"] | None = None, steps: int = STEPS, at_once: int = 12
) -> list[float]:
    """Run a program; how far off each norm is, as a share of it. Verdicts are asserted.

    Args:
        seed: Of the program.
        keys: Of the baselines.
        steps: Of the program.
        at_once: How many of them lie between two checks, each against a baseline up to so many steps before.
    """
    program, errors = Program(seed), []
    model = program.model
    for start in range(0, steps, at_once):
        before, baseline = used_weights(model), capture_lora_baseline(model, None, keys=keys)
        for _ in range(program.random.randint(1, at_once)):
            program.step()
        found = analyze_lora_application_results(baseline, model, None, model)
        where = f"seed {seed}, step {start}: {program.done[start:]}"
        errors += compare(before, used_weights(model), dict(found), where)
        while len(program.done) < start + at_once:
            program.step()
    return errors


def compare(before: Weights, after: Weights, found: dict[str, Any], where: str) -> list[float]:
    """Norms that were estimated, as a file in the weights is on the model no more, are told to 15 %."""
    changes, errors, acting = found["unet_weight_changes"]["keys_value_changed"], [], False
    for key, old in before.items():
        true = float((after[key] - old).norm())
        told = changes[key]["delta_norm"] if key in changes else 0.0
        is_zero = true <= ROUNDING * float(old.norm())
        acting |= not is_zero
        assert told is not None, f"{where}: {key} unknown, {changes[key]['unavailable']}"
        assert is_zero or told > 0.0, f"{where}: {key} changed by {true}, and is not told"
        assert not is_zero or told <= 2 * ROUNDING * float(old.norm()), f"{where}: {key} has {told}, not 0"
        if not is_zero:
            error, is_estimated = abs(told - true) / true, changes[key]["measured_from"] == "sample"
            assert error <= (0.15 if is_estimated else 1e-3), f"{where}: {key} has {told}, not {true}"
            errors.append(error)
    assert found["effective"] is acting, where
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_random_program_is_told_right(seed: int) -> None:
    assert len(errors_of(seed)) > 5


@pytest.mark.slow
def test_step_by_step_no_contents_are_needed() -> None:
    assert len(errors_of(7, "none", steps=40, at_once=1)) > 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 103))
def test_a_hundred_random_programs_are_told_right(seed: int) -> None:
    assert len(errors_of(seed)) > 5
