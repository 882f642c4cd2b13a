"""What goes through a model's layers, summed up while a host calls it."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from accelerate import cpu_offload
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from safetensors.torch import save_file
from tests.out_of_memory import OUT_OF_MEMORY
from torch import Tensor, nn

from sigmascope.errors import ConfigError, NonFiniteError
from sigmascope.lora.statistics import LayerStatistics, ModelStatistics, Moments
from sigmascope.lora.statistics_collection import UnfinishedSums, collect_statistics

WIDEST = 1024
"""No layer of these models is wider: all moments are whole, and can be compared."""


def full(moments: Moments) -> Tensor:
    assert moments.full is not None
    return moments.full


class Chain(nn.Module):
    """Two linear layers and nothing else; one more that is never called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 4, bias=False)
        self.spare = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x))
        return result


def inputs(seed: int = 1) -> Tensor:
    return torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(seed))


def collected(model: nn.Module, *calls: Any, **options: Any) -> ModelStatistics:
    def run() -> None:
        with torch.no_grad():
            for call in calls:
                model(call)

    return collect_statistics(model, run, **options)


def gradients(output: Tensor, weight: Tensor, projection: Tensor) -> Tensor:
    """D, as autograd finds it."""
    return torch.autograd.grad(output, weight, projection, retain_graph=True)[0].flatten(1)


def agrees(found: LayerStatistics, expected: list[Tensor], calls: int) -> None:
    inputs, outputs = sum(d.mT @ d for d in expected), sum(d @ d.mT for d in expected)
    assert isinstance(inputs, Tensor)
    assert isinstance(outputs, Tensor)
    assert torch.allclose(full(found.inputs), inputs / calls, rtol=1e-4, atol=1e-4)
    assert torch.allclose(full(found.outputs), outputs / outputs.trace(), rtol=1e-4, atol=1e-5)


class Probed(nn.Module):
    """Lets a test see what is taken back through a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.model(x)
        if output.requires_grad:
            output.register_hook(lambda gradient: self.seen.append(gradient.clone()))  # type: ignore[no-untyped-call]
        return output


def test_moments_are_those_of_the_gradients_of_projections() -> None:
    model = Probed(Chain())
    found = collected(model, inputs(1), inputs(2), probes=2)
    assert len(model.seen) == 4
    outputs = [model.model(inputs(seed)) for seed in (1, 1, 2, 2)]
    for name in ("first", "second"):
        weight = model.model.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        expected = [
            gradients(output, weight, seen) for output, seen in zip(outputs, model.seen, strict=False)
        ]
        agrees(found[f"model.{name}"], expected, calls=2)
    assert found["model.first"].rows == 2 * 21


def test_a_sampling_is_taken_back_as_a_whole() -> None:
    """An error of its first step counts as it arrives behind the last."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))
    taken: list[Tensor] = []

    def sample(seed: int) -> Tensor:
        x = inputs(seed)
        for step in (0.5, 0.3, 0.2):
            x = x - step * model(x)
        return x

    def run() -> Iterator[Tensor]:
        for seed in (1, 2):
            made = sample(seed)
            made.register_hook(lambda gradient: taken.append(gradient.clone()))  # type: ignore[no-untyped-call]
            yield made

    found = collect_statistics(model, run)
    assert found.facts["calls"] == 6
    assert found.facts["samplings"] == len(taken) == 2
    felt: dict[str, list[Tensor]] = {}
    for name in ("0", "2"):
        weight = model.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        felt[name] = [
            gradients(sample(seed), weight, probe) for seed, probe in zip((1, 2), taken, strict=True)
        ]
    norms = [math.hypot(*(float(felt[name][number].norm()) for name in felt)) for number in (0, 1)]
    for name, of_name in felt.items():  # each sampling counts alike
        agrees(found[name], [one / norm for one, norm in zip(of_name, norms, strict=True)], calls=6)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (lambda x: (None, [x]), lambda out: out[1][0]),
        (lambda x: {"sample": x}, lambda out: out["sample"]),
        (lambda x: SimpleNamespace(scale=1, sample=x), lambda out: out.sample),
        (Transformer2DModelOutput, lambda out: out.sample),
    ],
    ids=["nested", "dict", "object", "diffusers"],
)
def test_gradients_pass_through_whatever_a_model_gives(
    given: Callable[[Tensor], Any], taken: Callable[[Any], Tensor]
) -> None:
    class Model(Chain):
        def forward(self, x: Tensor) -> Any:
            return given(super().forward(x))

    def run() -> Iterator[Tensor]:
        yield taken(model(inputs())) * 2

    model = Model()
    found = collect_statistics(model, run)
    assert found.facts["samplings"] == 1
    assert found["second"].weight > 0


def test_a_large_model_counts_each_call_of_a_sampling_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sigmascope.lora.statistics_collection._MAX_ADDED_UP_BYTES", 0)
    model = nn.Sequential(nn.Linear(6, 6, bias=False))
    taken: list[Tensor] = []
    steps = (0.5, 0.3)

    def run() -> Iterator[Tensor]:
        x = inputs()
        for step in steps:
            x = x - step * model(x)
        x.register_hook(lambda gradient: taken.append(gradient.clone()))  # type: ignore[no-untyped-call]
        yield x

    found = collect_statistics(model, run)
    weight = model.get_parameter("0.weight").detach()
    # x₂ = x₁ − 0.3·x₁Wᵀ: a gradient g at x₂ is g − 0.3·gW at x₁.
    first, last = inputs(), inputs() - 0.5 * inputs() @ weight.mT
    back = taken[0] - 0.3 * taken[0] @ weight
    expected = [
        -step * felt.reshape(-1, 6).mT @ given.reshape(-1, 6)
        for step, felt, given in ((0.5, back, first), (0.3, taken[0], last))
    ]
    norm = math.hypot(*(float(one.norm()) for one in expected))
    agrees(found["0"], [one / norm for one in expected], calls=2)


def test_a_sampling_that_feels_a_thousand_times_as_much_counts_no_more() -> None:
    model, factor = Chain(), 1.0

    def run() -> Iterator[Tensor]:
        for seed, times in ((1, 1.0), (2, factor)):
            yield model(inputs(seed)) * times

    one = collect_statistics(model, run)
    factor = 1000.0
    other = collect_statistics(model, run)
    for name in one:
        assert torch.allclose(full(one[name].inputs), full(other[name].inputs), rtol=1e-4, atol=1e-7)
        assert torch.allclose(full(one[name].outputs), full(other[name].outputs), rtol=1e-4, atol=1e-7)


def test_calls_that_do_not_hang_together_are_taken_back_one_by_one() -> None:
    model = Chain()

    def run() -> Iterator[Tensor]:
        yield model(inputs(1)).detach()
        yield model(inputs(2)).detach()

    found, alone = collect_statistics(model, run), collected(model, inputs(1), inputs(2))
    assert found.facts["samplings"] == 0
    assert torch.equal(full(found["first"].inputs), full(alone["first"].inputs))


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_memory_that_runs_out_on_the_way_back_is_not_blamed_on_the_gradients(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Chain()

    def run() -> Iterator[Tensor]:
        yield model(inputs())

    def too_large(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Tensor, "backward", too_large)
    with pytest.raises(type(error)) as caught:
        collect_statistics(model, run)
    assert caught.value is error


def test_a_sampling_that_lets_no_gradient_through_is_told() -> None:
    model = Chain()

    def run() -> Iterator[Tensor]:
        made = model(inputs()).exp()
        yield made.mul_(2)  # exp needs what it gave

    with pytest.raises(ConfigError, match="no gradient flows back through sampling") as caught:
        collect_statistics(model, run)
    assert "--through calls" in str(caught.value.hint)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_wide_layers_keep_the_same_trace_in_less_memory() -> None:
    whole, sketched = collected(Chain(), inputs()), collected(Chain(), inputs(), full_up_to=4, rank=2)
    for name in whole:
        for side in ("inputs", "outputs"):
            expected, kept = getattr(whole[name], side), getattr(sketched[name], side)
            assert (kept.full is None) == (kept.size > 4)
            assert kept.trace == pytest.approx(expected.trace, rel=0.01)


def test_projections_of_the_output_are_of_unit_size() -> None:
    """With g of unit variance and D = gᵀx, the mean of DᵀD is xᵀx for each of the 4 outputs."""
    model = nn.Sequential(nn.Linear(6, 4, bias=False))
    found = collected(model, *[inputs()] * 60, probes=5)["0"]
    rows = inputs().reshape(-1, 6)
    assert torch.allclose(full(found.inputs) / 5, 4 * rows.mT @ rows, rtol=0.2, atol=8.0)
    assert torch.allclose(full(found.outputs), torch.eye(4) / 4, atol=0.03)


def test_a_layer_that_no_call_meets_is_named() -> None:
    assert collected(Chain(), inputs()).unmet == ("spare",)


def test_a_layer_that_the_output_does_not_feel_is_named() -> None:
    model = Chain()
    nn.init.zeros_(model.second.weight)
    found = collected(model, inputs())
    assert set(found) == {"second"}
    assert set(found.unmet) == {"first", "spare"}


def test_the_same_seed_gives_the_same_bits_and_another_seed_others() -> None:
    one, two, other = (full(collected(Chain(), inputs(), seed=seed)["first"].outputs) for seed in (3, 3, 4))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(3, 4, 3, padding=1), (2, 3, 11)),
        (nn.Conv2d(3, 4, 3, padding=1), (2, 3, 9, 7)),
        (nn.Conv2d(3, 4, (3, 5), stride=2, padding=(1, 2), dilation=(2, 1)), (2, 3, 13, 12)),
        (nn.Conv2d(3, 4, 3, padding="same", padding_mode="circular"), (1, 3, 6, 8)),
        (nn.Conv2d(3, 4, 1), (3, 6, 5)),
        (nn.Conv3d(2, 4, (3, 2, 2), stride=(1, 2, 2)), (1, 2, 5, 6, 6)),
    ],
)
def test_what_a_convolution_multiplies_is_what_pytorch_multiplies(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    """The gradient of its weight is the sum of g·patchᵀ, which PyTorch finds without patches."""
    torch.manual_seed(0)
    weight = layer.weight
    assert isinstance(weight, Tensor)
    x, model = torch.randn(shape), Probed(layer)
    found = collected(model, x)
    agrees(found["model"], [gradients(layer(x), weight, model.seen[0])], calls=1)


def tiny_unet() -> Any:
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=12,
        attention_head_dim=4,
        norm_num_groups=4,
    ).eval()


def denoise(unet: nn.Module, wrap: Callable[[], Any] = torch.no_grad) -> Callable[[], Tensor]:
    torch.manual_seed(5)
    sample, text = torch.randn(2, 4, 8, 8), torch.randn(2, 3, 12)

    def run() -> Tensor:
        with wrap():
            latent = sample
            for timestep in (900, 300):
                latent = latent - 0.1 * unet(latent, timestep, encoder_hidden_states=text).sample
            return latent

    return run


def assert_same_moments(found: ModelStatistics, expected: ModelStatistics) -> None:
    assert set(found) == set(expected)
    for name, layer in expected.items():
        for side in ("inputs", "outputs"):
            torch.testing.assert_close(full(getattr(found[name], side)), full(getattr(layer, side)))


def test_layers_that_are_moved_one_by_one_have_the_same_moments() -> None:
    unet, moved = tiny_unet(), tiny_unet()
    cpu_offload(moved, execution_device=torch.device("cpu"))
    found = collect_statistics(moved, denoise(moved), full_up_to=WIDEST)
    assert_same_moments(found, collect_statistics(unet, denoise(unet), full_up_to=WIDEST))
    assert all(parameter.is_meta for parameter in moved.parameters())


def cast_unet() -> Any:
    unet = tiny_unet()
    unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    return unet


def test_weights_that_are_stored_in_float8_have_the_moments_of_what_they_round_to() -> None:
    unet, cast = tiny_unet(), cast_unet()
    stored = {name: parameter.dtype for name, parameter in cast.named_parameters()}
    for name, parameter in unet.named_parameters():
        parameter.data.copy_(cast.get_parameter(name).float())
    found = collect_statistics(cast, denoise(cast), full_up_to=WIDEST)
    assert_same_moments(found, collect_statistics(unet, denoise(unet), full_up_to=WIDEST))
    assert {name: parameter.dtype for name, parameter in cast.named_parameters()} == stored
    assert torch.float8_e4m3fn in stored.values()


def test_float8_with_gradient_checkpointing_is_refused_with_what_to_do() -> None:
    unet = cast_unet()
    unet.enable_gradient_checkpointing()
    with pytest.raises(ConfigError, match="float8 by layerwise casting") as caught:
        collect_statistics(unet, denoise(unet))
    assert "disable_gradient_checkpointing" in str(caught.value.hint)


@pytest.mark.parametrize("wrap", [torch.no_grad, torch.inference_mode])
def test_the_host_gets_the_bits_that_it_gets_without_us(wrap: Callable[[], Any]) -> None:
    unet = tiny_unet()
    run = denoise(unet, wrap)
    expected, results = run(), []
    state = torch.get_rng_state()
    found = collect_statistics(unet, lambda: results.append(run()))
    assert torch.equal(results[0], expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert found.facts["calls"] == 2
    assert found.unmet == ()  # time embedding and text projections too


def test_a_model_that_draws_random_numbers_leaves_the_host_s_where_they_were() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).train()

    def program() -> list[Tensor]:
        torch.manual_seed(0)
        return [model(inputs()), model(inputs()), torch.rand(3)]

    expected, results = program(), []
    collect_statistics(model, lambda: results.extend(program()))
    assert all(torch.equal(result, same) for result, same in zip(results, expected, strict=True))


def test_a_model_that_changes_its_input_changes_it_once() -> None:
    class InPlace(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2))

    x, model = torch.ones(2, 6), Probed(InPlace())
    found = collected(model, x)
    assert torch.equal(x, torch.full((2, 6), 2.0))
    chain = Chain()
    expected = gradients(chain(torch.full((2, 6), 2.0)), chain.first.weight, model.seen[0])
    agrees(found["model.first"], [expected], calls=1)


def test_autocast_of_the_host_rounds_no_sum() -> None:
    chain = Chain()
    model = Probed(chain)

    def run() -> None:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            model(inputs())

    found = collect_statistics(model, run, full_up_to=4, rank=2)
    in_float32 = gradients(chain(inputs()), chain.first.weight, model.seen[0].float())
    assert found["model.first"].inputs.trace == pytest.approx(float(in_float32.square().sum()), rel=0.02)


class Half(nn.Module):
    """Runs under autocast alone: what comes in is bfloat16, and its weights are not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Chain()
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x.bfloat16())
        self.dtypes.append(output.dtype)
        return output


def in_a_thread(function: Callable[[], object]) -> None:
    """As autograd runs what comes back from an accelerator, under nothing that the caller has entered."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


@pytest.mark.parametrize("elsewhere", [False, True], ids=["left", "in another thread"])
def test_gradients_pass_under_the_autocast_of_the_call_even_if_it_is_left(elsewhere: bool) -> None:
    model = Half()

    def run() -> Iterator[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = model(inputs())
            if elsewhere:
                backward = made.backward
                made.backward = lambda *args, **options: in_a_thread(lambda: backward(*args, **options))
                yield made
        if not elsewhere:
            yield made

    found = collect_statistics(model, run)
    assert set(model.dtypes) == {torch.bfloat16}
    assert len(model.dtypes) == 2
    assert found["inner.first"].inputs.trace > 0


def test_a_model_that_forbids_gradients_itself_is_told() -> None:
    class Closed(Chain):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return super().forward(x)

    with pytest.raises(ConfigError, match="no gradient reached any layer"):
        collected(Closed(), inputs())


def test_a_batch_norm_in_training_counts_the_host_s_call_alone() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).train()
    x = inputs().reshape(-1, 6)
    collect_statistics(model, lambda: model(x))
    assert int(model[1].num_batches_tracked) == 1  # type: ignore[arg-type]


def test_a_layer_with_two_names_is_known_by_both() -> None:
    class Shared(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.same = self.first

    found = collected(Shared(), inputs())
    assert torch.equal(full(found["same"].inputs), full(found["first"].inputs))


def test_a_convolution_that_pads_by_itself_has_no_statistics() -> None:
    class Causal(nn.Conv1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(nn.functional.pad(x, (2, 0)))

    model = nn.Sequential(nn.Conv1d(3, 4, 1), Causal(4, 4, 3), nn.Conv1d(4, 4, 1, groups=2))
    found = collected(model, torch.randn(1, 3, 9))
    assert (list(found), found.unmet) == (["0"], ("1", "2"))


def test_a_compiled_model_has_the_names_that_it_had() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    compiled = torch.compile(model, backend="eager")
    found = collect_statistics(compiled, lambda: compiled(inputs()))  # type: ignore[arg-type]
    assert set(found) == {"0", "1"}


def test_checkpointing_goes_with_the_plain_attention_too() -> None:
    unet = tiny_unet()
    unet.set_attn_processor(diffusers.models.attention_processor.AttnProcessor())
    unet.enable_gradient_checkpointing()
    assert collect_statistics(unet, denoise(unet)).unmet == ()


def is_as_it_was(unet: nn.Module) -> bool:
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in unet.modules()]
    return sum(hooks) == 0 and all(
        weight.requires_grad and weight.grad is None for weight in unet.parameters()
    )


def test_nothing_of_ours_stays_on_the_model() -> None:
    unet = tiny_unet()
    collect_statistics(unet, denoise(unet))
    assert is_as_it_was(unet)


def test_a_host_that_fails_in_the_middle_gets_its_own_error_and_a_clean_model() -> None:
    unet = tiny_unet()

    def run() -> None:
        denoise(unet)()
        raise KeyError("the host's")

    with pytest.raises(KeyError, match="the host's"):
        collect_statistics(unet, run)
    assert is_as_it_was(unet)


def test_gradient_checkpointing_changes_nothing() -> None:
    plain, checkpointed = tiny_unet(), tiny_unet()
    checkpointed.enable_gradient_checkpointing()
    expected = collect_statistics(plain, denoise(plain), full_up_to=WIDEST)
    found = collect_statistics(checkpointed.train(), denoise(checkpointed), full_up_to=WIDEST)
    assert set(found) == set(expected)
    for name, layer in expected.items():
        assert torch.allclose(full(found[name].inputs), full(layer.inputs), rtol=1e-4, atol=1e-6), name
        assert torch.allclose(full(found[name].outputs), full(layer.outputs), rtol=1e-3, atol=1e-9), name


def test_the_first_layer_that_met_nan_is_named() -> None:
    model = Chain()
    with torch.no_grad():
        model.first.weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"^first: its inputs or gradients hold NaN or Inf"):
        collected(model, torch.full((1, 2, 6), torch.inf))


def test_a_model_that_is_not_called_is_told() -> None:
    with pytest.raises(ConfigError, match="Chain\\) was not called"):
        collect_statistics(Chain(), lambda: None)


def test_a_model_without_layers_is_told() -> None:
    with pytest.raises(ConfigError, match="Identity has no Linear or convolution layer"):
        collect_statistics(nn.Identity(), lambda: None)


def test_names_are_those_of_the_model_without_peft() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(6, 4)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(6, 2, bias=False)})

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.base_layer(x)
            return result

    model = nn.Sequential()
    model.add_module("proj", Wrapped())
    found = collected(model, inputs())
    assert (list(found), found.unmet) == (["proj"], ())


SETTINGS = hashlib.sha256(b'{"scheme": 2}').hexdigest()
"""Of a run without any of its own."""


class TestUnfinishedSums:
    """A run that was killed goes on after the inputs whose sums were written."""

    @pytest.fixture(autouse=True)
    def written_after_each_input(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sigmascope.lora.statistics_collection._WRITE_INTERVAL_SECONDS", 0.0)

    def of(
        self,
        unfinished: UnfinishedSums,
        *,
        sampled: bool,
        killed_at: int | None = None,
        full_up_to: int = 1024,
    ) -> ModelStatistics:
        model = Chain()
        begun.append(0)

        def left() -> Iterator[int]:
            for number in range(unfinished.inputs, 5):
                if number == killed_at:
                    raise Killed
                begun[-1] += 1
                yield number
                unfinished.input_done()

        def sampling() -> Iterator[object]:
            for number in left():
                yield model(inputs(number)) + model(inputs(number + 50))

        def calls() -> None:
            for number in left():
                model(inputs(number))

        run = sampling if sampled else calls
        return collect_statistics(model, run, full_up_to=full_up_to, rank=2, probes=2, unfinished=unfinished)

    def test_what_a_killed_run_leaves_holds_no_prompt(self, tmp_path: Path) -> None:
        settings = {"prompts": ["a portrait of Ada Lovelace"], "seed": 1}
        with pytest.raises(Killed):
            self.of(UnfinishedSums(tmp_path / "a", settings), sampled=False, killed_at=3)
        (left,) = tmp_path.iterdir()
        assert b"Ada" not in left.read_bytes()
        self.of(UnfinishedSums(tmp_path / "a", settings), sampled=False)
        assert begun[-1] == 2  # and it is known as the same run

    @pytest.mark.parametrize("sampled", [True, False])
    @pytest.mark.parametrize("full_up_to", [1024, 1])
    def test_the_sums_are_those_of_a_run_that_was_never_killed(
        self, tmp_path: Path, sampled: bool, full_up_to: int
    ) -> None:
        whole = self.of(UnfinishedSums(tmp_path / "a", {}), sampled=sampled, full_up_to=full_up_to)
        target = tmp_path / "b"
        with pytest.raises(Killed):
            self.of(UnfinishedSums(target, {}), sampled=sampled, killed_at=3, full_up_to=full_up_to)
        again = self.of(UnfinishedSums(target, {}), sampled=sampled, full_up_to=full_up_to)
        assert begun[-1] == 2
        assert again.facts == whole.facts
        for name, layer in whole.items():
            assert again[name].rows == layer.rows
            for one, other in ((layer.inputs, again[name].inputs), (layer.outputs, again[name].outputs)):
                assert torch.equal(one.diagonal, other.diagonal)

    def test_a_model_whose_weights_wait_elsewhere_goes_on_where_it_runs(self, tmp_path: Path) -> None:
        def summed(unfinished: UnfinishedSums, killed_at: int | None = None) -> ModelStatistics:
            model = Chain()
            cpu_offload(model, execution_device=torch.device("cpu"))

            def run() -> None:
                for number in range(unfinished.inputs, 3):
                    if number == killed_at:
                        raise Killed
                    model(inputs(number))
                    unfinished.input_done()

            return collect_statistics(model, run, unfinished=unfinished)

        whole = summed(UnfinishedSums(tmp_path / "a", {}))
        with pytest.raises(Killed):
            summed(UnfinishedSums(tmp_path / "b", {}), killed_at=2)
        again = summed(UnfinishedSums(tmp_path / "b", {}))
        assert_same_moments(again, whole)

    def test_sums_of_another_run_are_left_alone(self, tmp_path: Path) -> None:
        with pytest.raises(Killed):
            self.of(UnfinishedSums(tmp_path / "a", {"seed": 1}), sampled=False, killed_at=3)
        self.of(UnfinishedSums(tmp_path / "a", {"seed": 2}), sampled=False)
        assert begun[-1] == 5

    @pytest.mark.parametrize("facts", [None, {}, {"facts": json.dumps({"settings": SETTINGS})}])
    def test_a_damaged_file_begins_the_run_anew(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, facts: dict[str, str] | None
    ) -> None:
        if facts is None:
            (tmp_path / ".a.part").write_bytes(b"half of what was to be written")
        else:
            save_file({"0.0": torch.zeros(1)}, tmp_path / ".a.part", facts)
        self.of(UnfinishedSums(tmp_path / "a", {}), sampled=False)
        assert begun[-1] == 5
        assert "begins anew" in caplog.text

    @pytest.mark.parametrize("killed_at", [None, 3])
    def test_no_file_is_left_by_a_run_that_ends_or_is_interrupted(
        self, tmp_path: Path, killed_at: int | None
    ) -> None:
        with suppress(Killed), UnfinishedSums(tmp_path / "a", {}) as unfinished:
            self.of(unfinished, sampled=False, killed_at=killed_at)
        assert not list(tmp_path.iterdir())


begun: list[int] = []
"""How many inputs each run began."""


class Killed(BaseException):
    """Stands for the end of the process."""
