"""A LoRA that is fitted to the tuned model's outputs."""

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.families import make_pipeline
from tests.lora.conftest import MakeLora
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sigmascope.errors import ConfigError, LoraFormatError, ModelMismatchError, NonFiniteError
from sigmascope.lora.adapters import DiffChange
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.fit import FitOptions, FittedLora, RecordedCall, fit_lora, record_calls, save_fitted
from sigmascope.lora.reader import load_lora
from sigmascope.lora.writer import save_lora

Recorded = list[list[RecordedCall]]
Model = TypeVar("Model", bound=nn.Module)


class Net(nn.Module):
    """A convolution that strides and pads by reflection, and two linear layers."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1, padding_mode="reflect")
        self.first = nn.Linear(8, 12)
        self.second = nn.Linear(12, 5)
        self.checkpointed = checkpointed

    def forward(self, sample: Tensor, *, shift: Tensor) -> tuple[Tensor]:
        hidden = torch.tanh(self.conv(sample)).flatten(2).mT + shift
        if self.checkpointed:
            return (checkpoint(self._layers, hidden, use_reentrant=False),)
        return (self._layers(hidden),)

    def _layers(self, hidden: Tensor) -> Tensor:
        made: Tensor = self.second(torch.tanh(self.first(hidden)))
        return made


def tuned_from(base: Model, by: float = 0.5) -> Model:
    """Each weight changed by a matrix whose singular values halve from one to the next, as a fine-tune's fall."""
    tuned = copy.deepcopy(base)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.dim() > 1:
                change = torch.randn(parameter.flatten(1).shape, generator=generator)
                u, _, v = torch.linalg.svd(change, full_matrices=False)
                parameter.add_((u * (by * 0.5 ** torch.arange(u.shape[1])) @ v).reshape(parameter.shape))
    return tuned


def truncated(base: nn.Module, tuned: nn.Module, rank: int, dtype: torch.dtype = torch.float32) -> LoraFile:
    """The best LoRA of a rank by the weights alone (Eckart and Young, 1936), by NumPy."""
    modules = {}
    for name, layer in base.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            change = (tuned.get_parameter(f"{name}.weight") - layer.weight).detach().flatten(1).numpy()
            u, s, v = np.linalg.svd(change, full_matrices=False)
            up, down = torch.from_numpy(u[:, :rank] * s[:rank]), torch.from_numpy(v[:rank])
            modules[name] = LoraFactors(up.to(dtype), down.to(dtype), float(rank), tuple(layer.weight.shape))
    return LoraFile(modules)


def calls_of(tuned: nn.Module, count: int = 16) -> Recorded:
    generator = torch.Generator().manual_seed(3)

    def run() -> Iterator[None]:
        for _ in range(count):
            with torch.no_grad():
                tuned(
                    torch.randn(2, 3, 10, 6, generator=generator),
                    shift=torch.randn(8, generator=generator),
                )
            yield

    return record_calls(tuned, run)


@pytest.fixture
def base() -> Net:
    torch.manual_seed(0)
    return Net()


def applied(base: nn.Module, lora: LoraFile) -> nn.Module:
    """The base with the changes in its weights."""
    model = copy.deepcopy(base)
    with torch.no_grad():
        for name, factors in lora.modules.items():
            weight = model.get_parameter(f"{name}.weight")
            product = factors.up.double() @ factors.down.double() * (factors.alpha / factors.up.shape[1])
            weight.add_(product.reshape(weight.shape).float())
    return model


def error(base: nn.Module, lora: LoraFile, tuned: nn.Module) -> float:
    """Of the outputs for other inputs of the same kind, as a share of the change, by its definition."""
    generator = torch.Generator().manual_seed(99)
    with_lora = applied(base, lora)
    missing = change = 0.0
    with torch.no_grad():
        for _ in range(64):
            sample, shift = torch.randn(2, 3, 10, 6, generator=generator), torch.randn(8, generator=generator)
            (wanted,), (made,), (without,) = (
                model(sample, shift=shift) for model in (tuned, with_lora, base)
            )
            missing += float((made - wanted).square().sum())
            change += float((without - wanted).square().sum())
    return math.sqrt(missing / change)


def test_outputs_come_nearer_for_inputs_that_it_never_saw(base: Net) -> None:
    tuned = tuned_from(base)
    lora = truncated(base, tuned, 3)
    fitted = fit_lora(base, lora, calls_of(tuned), FitOptions(steps=100))
    assert fitted.is_nearer
    before, after = error(base, lora, tuned), error(base, fitted.lora, tuned)
    assert after < 0.75 * before
    assert fitted.before == pytest.approx(before, rel=0.25)  # other inputs of the same kind
    assert fitted.after == pytest.approx(after, rel=0.25)
    assert (fitted.calls, fitted.held_out) == (14, 2)


@pytest.mark.slow
def test_one_layer_reaches_the_best_factors_that_there_are() -> None:
    # Reduced-rank regression: the best change of a rank for these inputs is the truncated SVD of ΔW·C^½.
    torch.manual_seed(1)
    base = nn.Linear(10, 7)
    tuned = tuned_from(base)
    generator = torch.Generator().manual_seed(2)
    mixing = (
        torch.diag(torch.logspace(0, 1.3, 10)) @ torch.linalg.qr(torch.randn(10, 10, generator=generator))[0]
    )
    inputs = torch.randn(400, 10, generator=generator) @ mixing

    def run() -> Iterator[None]:
        for rows in inputs.split(25):
            tuned(rows)
            yield

    lora = LoraFile({"": truncated(nn.Sequential(base), nn.Sequential(tuned), 3).modules["0"]})
    fitted = fit_lora(
        nn.Sequential(base),
        LoraFile({"0": lora.modules[""]}),
        record_calls(tuned, run),
        FitOptions(steps=2000),
    )
    change = (tuned.weight - base.weight).detach().double().numpy()
    seen = inputs[:350].double().numpy()
    values, vectors = np.linalg.eigh(seen.T @ seen / len(seen))
    root = vectors * np.sqrt(values)
    u, s, v = np.linalg.svd(change @ root)
    best = (u[:, :3] * s[:3]) @ v[:3] @ np.linalg.inv(root)
    found = fitted.lora.modules["0"]
    made = (found.up.double() @ found.down.double()).numpy()

    def left(of: Any) -> float:
        return float(np.linalg.norm(seen @ (change - of).T))

    assert left(made) < 1.02 * left(best)
    start = lora.modules[""]
    assert left((start.up @ start.down).double().numpy()) > 1.5 * left(best)  # where it started from


def test_what_comes_no_nearer_stays_as_it_was(base: Net) -> None:
    tuned = tuned_from(base)
    lora = truncated(base, tuned, 2)
    fitted = fit_lora(base, lora, calls_of(tuned), FitOptions(steps=3, learning_rate=30.0))
    assert fitted.after > fitted.before
    assert not fitted.is_nearer
    assert fitted.lora is lora


def test_the_model_is_as_it_was(base: Net) -> None:
    tuned = tuned_from(base)
    base.first.weight.requires_grad_(False)
    before = {name: parameter.clone() for name, parameter in base.named_parameters()}
    recorded = calls_of(tuned, 3)
    fit_lora(base, truncated(base, tuned, 2), recorded, FitOptions(steps=2))
    for model in (base, tuned):
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        assert all(parameter.grad is None for parameter in model.parameters())
    for name, parameter in base.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.requires_grad == (name != "first.weight")


def test_a_host_in_inference_mode_gets_the_same(base: Net) -> None:
    tuned = tuned_from(base)
    lora, recorded = truncated(base, tuned, 2), calls_of(tuned)
    with torch.inference_mode():
        inside = fit_lora(base, lora, recorded, FitOptions(steps=5))
    outside = fit_lora(base, lora, recorded, FitOptions(steps=5))
    assert inside.after == outside.after
    assert not inside.lora.modules["first"].up.is_inference()


def test_the_seed_decides(base: Net) -> None:
    tuned = tuned_from(base)
    lora, recorded = truncated(base, tuned, 2), calls_of(tuned)

    def ups(seed: int) -> Tensor:
        return fit_lora(base, lora, recorded, FitOptions(steps=5, seed=seed)).lora.modules["first"].up

    assert torch.equal(ups(0), ups(0))
    assert not torch.equal(ups(0), ups(1))


def test_checkpointed_blocks_give_the_same(base: Net) -> None:
    tuned = tuned_from(base)
    lora, recorded = truncated(base, tuned, 2), calls_of(tuned)
    checkpointed = Net(checkpointed=True)
    checkpointed.load_state_dict(base.state_dict())
    one, other = (fit_lora(model, lora, recorded, FitOptions(steps=5)) for model in (base, checkpointed))
    for name in lora.modules:
        assert torch.allclose(one.lora.modules[name].up, other.lora.modules[name].up, rtol=1e-5)


def test_strength_goes_into_the_factors_and_shares_are_even(base: Net) -> None:
    tuned = tuned_from(base)
    lora = truncated(base, tuned, 2)
    skewed = LoraFile(
        {
            name: LoraFactors(factors.up * 4000, factors.down / 1000, 0.5, factors.weight_shape)
            for name, factors in lora.modules.items()
        }
    )  # the same change: 4000 / 1000 · 0.5 / 2 = 1
    recorded = calls_of(tuned)
    one, other = (fit_lora(base, given, recorded, FitOptions(steps=20)) for given in (lora, skewed))
    assert one.before == pytest.approx(other.before, rel=1e-4)
    for name, found in other.lora.modules.items():
        assert found.alpha == found.up.shape[1]
        assert torch.allclose(found.delta(), one.lora.modules[name].delta(), atol=2e-3)
        # Evened by powers of two, root mean squares differ by a factor of 2 at most, and a little by the fit.
        assert 0.2 < float(found.up.square().mean() / found.down.square().mean()) < 5.0


def test_one_input_is_measured_on_itself(base: Net) -> None:
    tuned = tuned_from(base)
    fitted = fit_lora(base, truncated(base, tuned, 2), calls_of(tuned, 1), FitOptions(steps=20))
    assert (fitted.calls, fitted.held_out) == (1, 0)
    assert fitted.is_nearer


def spoiled(tuned: Net) -> Net:
    with torch.no_grad():
        tuned.second.bias[0] = torch.nan
    return tuned


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"steps": 0}, ConfigError, "--steps 0"),
        ({"gradient_accumulation_steps": 0}, ConfigError, "--gradient_accumulation_steps 0"),
        ({"learning_rate": -1.0}, ConfigError, "--learning_rate -1"),
        ({"learning_rate": 1e30, "steps": 3}, NonFiniteError, "smaller --learning_rate"),
    ],
)
def test_numbers_that_make_no_sense(
    base: Net, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    tuned = tuned_from(base)
    with pytest.raises(error, match=says):
        fit_lora(base, truncated(base, tuned, 2), calls_of(tuned, 2), FitOptions(**options))
    assert not any(module._forward_hooks for module in base.modules())


def test_what_cannot_be_fitted_is_told(base: Net) -> None:
    tuned = tuned_from(base)
    lora, recorded = truncated(base, tuned, 2), calls_of(tuned, 2)
    with pytest.raises(ConfigError, match="no call of the tuned model was recorded"):
        fit_lora(base, lora, [[], []])
    with pytest.raises(ConfigError, match="outputs equal the base model's"):
        fit_lora(tuned, lora, recorded)
    with pytest.raises(ConfigError, match="Net is in float16"):
        fit_lora(copy.deepcopy(base).half(), lora, recorded)
    with pytest.raises(NonFiniteError, match="outputs hold NaN"):
        fit_lora(base, lora, calls_of(spoiled(tuned_from(base)), 2))
    wide = Net()
    wide.second = nn.Linear(12, 6)
    other = LoraFile({"first": lora.modules["first"]})
    with pytest.raises(ModelMismatchError, match=r"gives \(2, 15, 6\) .* answered with \(2, 15, 5\)"):
        fit_lora(wide, other, recorded)
    with pytest.raises(LoraFormatError, match=r"first \(diff\)"):
        fit_lora(base, LoraFile({}, changes={"first": DiffChange({"diff": torch.zeros(12, 8)})}), recorded)


class TestRecordedCalls:
    """`record_calls`."""

    def test_each_call_is_an_input_of_a_plain_function(self, base: Net) -> None:
        def run() -> None:
            for _ in range(3):
                base(torch.zeros(1, 3, 4, 4), shift=torch.zeros(8))

        assert [len(calls) for calls in record_calls(base, run)] == [1, 1, 1]

    def test_a_generator_tells_where_an_input_ends(self, base: Net) -> None:
        def run() -> Iterator[None]:
            for calls in (2, 0, 3):
                for _ in range(calls):
                    base(torch.zeros(1, 3, 4, 4), shift=torch.zeros(8))
                yield

        assert [len(calls) for calls in record_calls(base, run)] == [2, 3]

    def test_they_hold_what_the_model_got_and_gave_though_the_host_goes_on_to_change_it(
        self, base: Net
    ) -> None:
        sample, shift = torch.ones(1, 3, 4, 4), torch.zeros(8)
        outputs = []

        def run() -> None:
            with torch.inference_mode():
                outputs.append(base(sample, shift=shift)[0])
                wanted.append(outputs[0].clone())
                outputs[0].zero_()
            sample.zero_()

        wanted: list[Tensor] = []
        ((call,),) = record_calls(base, run)
        assert torch.equal(call.args[0].values, torch.ones(1, 3, 4, 4))
        assert torch.equal(call.output, wanted[0])
        assert not call.output.is_inference()

    def test_what_does_not_change_from_call_to_call_is_kept_once(self, base: Net) -> None:
        def run() -> Iterator[None]:
            for step in range(3):
                base(torch.full((1, 3, 4, 4), float(step)), shift=torch.zeros(8))
            yield

        ((one, two, three),) = record_calls(base, run)
        assert one.kwargs["shift"] is two.kwargs["shift"] is three.kwargs["shift"]
        assert [float(call.args[0].values[0, 0, 0, 0]) for call in (one, two, three)] == [0.0, 1.0, 2.0]

    def test_an_error_of_the_host_passes_and_leaves_no_hook(self, base: Net) -> None:
        def run() -> None:
            raise KeyError("the host's own")

        with pytest.raises(KeyError, match="the host's own"):
            record_calls(base, run)
        assert not base._forward_hooks
        assert not base._forward_pre_hooks

    @pytest.mark.parametrize(
        ("model", "says"), [(nn.Linear(2, 2), "was not called"), (nn.Identity(), "returns no tensor")]
    )
    def test_nothing_to_record(self, model: nn.Module, says: str) -> None:
        def run() -> None:
            if isinstance(model, nn.Identity):
                model("no tensor")

        with pytest.raises(ConfigError, match=says):
            record_calls(model, run)


class TestFiles:
    """`save_fitted`."""

    def fitted(self, base: nn.Module, tuned: nn.Module) -> Callable[[LoraFile], FittedLora]:
        recorded = calls_of(tuned)
        return lambda lora: fit_lora(base, lora, recorded, FitOptions(steps=60))

    def test_names_dtype_and_header_stay(self, base: Net, tmp_path: Path) -> None:
        tuned = tuned_from(base)
        source, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
        save_lora(source, truncated(base, tuned, 3, torch.float16), {"ss_tag": "mine"})
        fitted = save_fitted(source, target, self.fitted(base, tuned))
        assert fitted.is_nearer
        one, other = load_file(source), load_file(target)
        assert {name: (t.dtype, t.shape) for name, t in one.items()} == {
            name: (t.dtype, t.shape) for name, t in other.items()
        }
        assert not torch.equal(one["first.lora_up.weight"], other["first.lora_up.weight"])
        with safe_open(target, "pt") as file:
            assert file.metadata()["ss_tag"] == "mine"
            assert file.metadata()["sigmascope_fitted_from"] == "a.safetensors"
        assert error(base, load_lora(target), tuned) < 0.8 * error(base, load_lora(source), tuned)

    def test_what_is_there_is_lost_to_no_failure(self, base: Net, tmp_path: Path) -> None:
        tuned = tuned_from(base)
        source, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
        save_lora(source, truncated(base, tuned, 2))
        target.write_bytes(b"what was there")

        def fails(_lora: LoraFile) -> FittedLora:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            save_fitted(source, target, fails)
        with pytest.raises(ConfigError, match="is the input"):
            save_fitted(source, source, fails)
        assert target.read_bytes() == b"what was there"
        assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow
def test_a_part_of_a_pipeline_is_fitted_and_the_others_stay(tmp_path: Path, make_lora: MakeLora) -> None:
    pipe = make_pipeline("sd15")
    unet = make_lora(pipe.unet, prefix="unet.")
    text = make_lora(pipe.text_encoder, prefix="text_encoder.")
    both = LoraFile({**unet.modules, **text.modules})
    source, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    tensors = {}
    for name, factors in both.modules.items():
        kernel = factors.weight_shape[2:]
        tensors[f"{name}.lora_A.weight"] = factors.down.reshape(-1, factors.weight_shape[1], *kernel)
        tensors[f"{name}.lora_B.weight"] = factors.up.reshape(*factors.up.shape, *(1 for _ in kernel))
    save_file(tensors, source)
    tuned = tuned_from(pipe.unet, 0.01)
    arguments = (
        torch.randn(1, 4, 8, 8),
        torch.tensor(1),
        torch.randn(1, 7, pipe.unet.config.cross_attention_dim),
    )

    def run() -> None:
        with torch.no_grad():
            tuned(*arguments)

    recorded = record_calls(tuned, run)
    save_fitted(source, target, lambda lora: fit_lora(pipe.unet, lora, recorded, FitOptions(steps=2)))
    made = load_file(target)
    assert made.keys() == tensors.keys()
    moved = {name for name in made if not torch.equal(made[name], tensors[name])}
    assert moved
    assert all(name.startswith("unet.") for name in moved)
