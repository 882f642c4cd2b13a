"""The right LoRA on a real pipeline of each family: every module matched, on the model, and its effect to the digit."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families import FAMILIES, generate, make_pipeline
from tests.families.loras import State, as_kohya, half, lora_state, modules_of, parts_of, write
from torch import Tensor, nn

from sigmascope import ModelLoadingMonitor
from sigmascope.lora.verdict import judge_applied, judge_lora
from sigmascope.probes.adapters.peft import read_adapters

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
CHANGED = ("flux", "wan")
"""With a text encoder and without: enough where each test takes a pipeline of its own."""


@dataclass(frozen=True)
class Styled:
    """A pipeline, the LoRA for it, and what was seen while it was loaded."""

    family: str
    pipeline: Any
    state: State
    path: Path
    monitor: ModelLoadingMonitor
    baseline: dict[str, Any]
    bare_image: Tensor

    @property
    def denoiser(self) -> Any:
        return getattr(self.pipeline, FAMILIES[self.family].denoiser)

    @property
    def encoders(self) -> dict[str, Any]:
        return {name: getattr(self.pipeline, name) for name in FAMILIES[self.family].lora_encoders}

    def analysis(self) -> dict[str, Any]:
        """What became of the models since before the LoRA."""
        return self.monitor.analyze_lora_application_results(
            self.baseline, self.denoiser, self.encoders, self.pipeline
        )

    def weight(self, module: str) -> Tensor:
        """The weight now, by itself: of a layer of PEFT that of the layer inside."""
        part, _, name = module.partition(".")
        found: Tensor = getattr(self.pipeline, part).get_submodule(name).weight
        return found.detach()

    def delta(self, module: str) -> Tensor:
        """ΔW by hand, up · down."""
        down, up = (self.state[f"{module}.lora_{end}.weight"].double() for end in "AB")
        return (up.flatten(1) @ down.flatten(1)).reshape(up.shape[0], *down.shape[1:])


def styled(family: str, folder: Path, *, leave_out: tuple[str, ...] = ()) -> Styled:
    """Load a LoRA under the eyes of a monitor; `leave_out` says of which modules it has no factors."""
    pipeline = make_pipeline(family)
    state = lora_state(pipeline, parts_of(family))
    state = {key: value for key, value in state.items() if not any(mark in key for mark in leave_out)}
    path = write(state, folder / f"{family}.safetensors")
    bare_image = generate(pipeline, family)
    monitor = ModelLoadingMonitor()
    found = Styled(family, pipeline, state, path, monitor, {}, bare_image)
    found.baseline.update(monitor.capture_lora_baseline(found.denoiser, found.encoders, path))
    monitor.start_monitoring("lora_application")
    pipeline.load_lora_weights(str(path), adapter_name="style")
    monitor.end_monitoring("lora_application", found.denoiser, "UNet")
    return found


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Styled:
    """For tests that leave it as it is."""
    return styled(request.param, tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def analysis(loaded: Styled) -> dict[str, Any]:
    return loaded.analysis()


@pytest.fixture(params=CHANGED)
def own(request: pytest.FixtureRequest, tmp_path: Path) -> Styled:
    """For tests that change it."""
    return styled(
        request.param,
        tmp_path,
        leave_out=("up_blocks", "mid_block", *(f"down_blocks.{n}" for n in (1, 2, 3))),
    )


def test_every_module_matches(loaded: Styled) -> None:
    verdict = judge_lora(loaded.path, loaded.pipeline)
    assert verdict.fits
    assert {module.name for module in verdict.matched} == modules_of(loaded.state)


def test_every_module_is_found_on_the_model(loaded: Styled) -> None:
    patches = read_adapters(loaded.pipeline).value or ()
    verdict = judge_applied(loaded.path, patches, loaded.pipeline)
    assert verdict.complete
    assert verdict.strengths == {1.0: len(modules_of(loaded.state))}


def test_analysis_of_the_right_lora_is_a_success(analysis: dict[str, Any]) -> None:
    assert analysis["success"]
    assert not [f for f in analysis["findings"] if f["severity"] in ("error", "critical")]


def test_analysis_finds_the_changes_of_every_weight(loaded: Styled, analysis: dict[str, Any]) -> None:
    start = f"{FAMILIES[loaded.family].denoiser}."
    denoiser = {f"{m.removeprefix(start)}.weight" for m in modules_of(loaded.state) if m.startswith(start)}
    encoders = {f"{m}.weight" for m in modules_of(loaded.state) if not m.startswith(start)}
    assert analysis["unet_weight_changes"]["keys_value_changed"].keys() == denoiser
    assert analysis["clip_weight_changes"]["keys_value_changed"].keys() == encoders


def test_norms_of_all_changes_are_those_of_up_times_down(loaded: Styled, analysis: dict[str, Any]) -> None:
    changes = analysis["unet_weight_changes"]["keys_value_changed"]
    start = FAMILIES[loaded.family].denoiser
    for key, change in changes.items():
        expected = torch.linalg.vector_norm(loaded.delta(f"{start}.{key.removesuffix('.weight')}"))
        assert change["delta_norm"] == pytest.approx(float(expected), rel=1e-6), key
        assert change["predicted"]


def test_lora_changes_the_output(loaded: Styled) -> None:
    assert not torch.equal(generate(loaded.pipeline, loaded.family), loaded.bare_image)


def test_names_are_those_that_diffusers_saves(loaded: Styled, tmp_path: Path) -> None:
    from peft.utils import get_peft_model_state_dict
    from safetensors.torch import load_file

    layers = {
        f"{name}_lora_layers": get_peft_model_state_dict(getattr(loaded.pipeline, name), adapter_name="style")
        for name in parts_of(loaded.family)
    }
    type(loaded.pipeline).save_lora_weights(tmp_path, **layers)
    saved = load_file(tmp_path / "pytorch_lora_weights.safetensors")
    assert saved.keys() == loaded.state.keys()
    assert judge_lora(tmp_path / "pytorch_lora_weights.safetensors", loaded.pipeline).fits


def test_strength_of_0_is_no_effective_change(own: Styled) -> None:
    own.pipeline.set_adapters(["style"], adapter_weights=[0.0])
    analysis = own.analysis()
    assert analysis["effective"] is False
    assert analysis["unet_weight_changes"]["keys_value_changed"] == {}
    assert [f["id"] for f in analysis["findings"] if f["severity"] == "warning"].count("lora_without_effect")
    assert torch.equal(generate(own.pipeline, own.family), own.bare_image)


def test_strength_multiplies_the_change(own: Styled) -> None:
    own.pipeline.set_adapters(["style"], adapter_weights=[0.25])
    start = f"{FAMILIES[own.family].denoiser}."
    squares = [own.delta(m).square().sum() for m in modules_of(own.state) if m.startswith(start)]
    expected = 0.25 * float(sum(squares)) ** 0.5
    assert own.analysis()["unet_weight_changes"]["delta_norm"] == pytest.approx(expected, rel=1e-6)


def fuse(styled: Styled, scale: float = 1.0) -> None:
    styled.pipeline.fuse_lora(components=list(parts_of(styled.family)), lora_scale=scale)


@pytest.mark.parametrize("own", ["sd15", *CHANGED], indirect=True)
def test_fused_weights_are_base_and_scaled_product(own: Styled) -> None:
    originals = {module: own.weight(module).double().clone() for module in modules_of(own.state)}
    fuse(own, 0.5)
    for module, original in originals.items():
        expected = original + 0.5 * own.delta(module)
        torch.testing.assert_close(own.weight(module).double(), expected, rtol=0.0, atol=1e-6)


def test_fused_changes_are_found_as_predicted(own: Styled) -> None:
    fuse(own)
    analysis = own.analysis()
    weights = analysis["unet_weight_changes"]
    assert analysis["unet_lora_patches"]["states"].keys() == {"merged"}
    assert len(weights["keys_value_changed"]) == analysis["unet_lora_patches"]["total_patched_keys"]
    assert not weights["not_as_predicted"]
    assert not weights["unexplained"]


def test_unfused_and_unloaded_is_drift_and_no_change(own: Styled) -> None:
    fuse(own)
    own.pipeline.unfuse_lora(components=list(parts_of(own.family)))
    own.pipeline.unload_lora_weights()
    analysis = own.analysis()
    weights = analysis["unet_weight_changes"]
    assert weights["keys_value_changed"] == {}
    assert weights["drift"]["keys"]
    assert weights["drift"]["largest_relative_change"] < 1e-5
    assert analysis["effective"] is False
    assert {f["severity"] for f in analysis["findings"] if f["id"] == "lora_drift"} == {"info"}


def test_unloaded_is_as_before(own: Styled) -> None:
    own.pipeline.unload_lora_weights()
    weights = own.analysis()["unet_weight_changes"]
    assert (weights["keys_added"], weights["keys_removed"], weights["keys_value_changed"]) == ([], [], {})
    assert not weights["drift"]["keys"]


def test_lora_that_is_loaded_twice_is_named_and_overlaps_itself(own: Styled) -> None:
    own.pipeline.load_lora_weights(str(own.path), adapter_name="again")
    own.pipeline.set_adapters(["style", "again"])
    patches = own.analysis()["unet_lora_patches"]
    assert patches["loras"].keys() == {"style", "again"}
    assert [set(twice["sources"]) for twice in patches["applied_twice"]] == [{"style", "again"}]
    assert [pair["overall"] for pair in patches["overlaps"]] == [pytest.approx(1.0)]
    assert judge_applied(own.path, read_adapters(own.pipeline).value or (), own.pipeline).findings[0].id == (
        "lora_applied_twice"
    )


def test_two_loras_in_orthogonal_directions_are_both_seen_and_do_not_overlap(
    own: Styled, tmp_path: Path
) -> None:
    own.pipeline.unload_lora_weights()
    for name in (0, 1):
        path = write(half(own.state, name), tmp_path / f"{name}.safetensors")
        own.pipeline.load_lora_weights(str(path), adapter_name=f"half{name}")
    own.pipeline.set_adapters(["half0", "half1"], adapter_weights=[0.5, 2.0])
    patches = own.analysis()["unet_lora_patches"]
    assert {name: facts["strengths"] for name, facts in patches["loras"].items()} == {
        "half0": [0.5],
        "half1": [2.0],
    }
    assert [pair["overall"] for pair in patches["overlaps"]] == [pytest.approx(0.0, abs=1e-9)]


def test_images_are_bit_identical_with_and_without_the_monitor(
    loaded: Styled, analysis: dict[str, Any]
) -> None:
    plain = make_pipeline(loaded.family)
    plain.load_lora_weights(str(loaded.path), adapter_name="style")
    assert analysis["success"]
    assert torch.equal(generate(loaded.pipeline, loaded.family), generate(plain, loaded.family))
    assert attributes(loaded.pipeline) == attributes(plain)


def attributes(pipeline: Any) -> dict[str, set[str]]:
    """What is set on every module of a pipeline, hooks included."""
    return {
        f"{part}.{name}": set(vars(module))
        | {f"{k} {len(v)}" for k, v in vars(module).items() if k.endswith("_hooks")}
        for part, component in pipeline.components.items()
        if isinstance(component, nn.Module)
        for name, module in component.named_modules()
    }


@pytest.mark.parametrize(
    ("family", "not_loaded"),
    [
        ("sd15", []),
        ("sdxl", ["lora_unet_add_embedding_linear_1", "lora_unet_add_embedding_linear_2"]),
    ],
)
def test_kohya_names_all_match_and_those_that_diffusers_drops_are_named(
    family: str, not_loaded: list[str], tmp_path: Path
) -> None:
    pipeline = make_pipeline(family)
    path = write(as_kohya(lora_state(pipeline, parts_of(family))), tmp_path / "kohya.safetensors")
    assert judge_lora(path, pipeline).fits
    pipeline.load_lora_weights(str(path), adapter_name="style")
    verdict = judge_applied(path, read_adapters(pipeline).value or (), pipeline)
    assert [module.name for module in verdict.missing] == not_loaded
    assert set(verdict.strengths) == {1.0}
