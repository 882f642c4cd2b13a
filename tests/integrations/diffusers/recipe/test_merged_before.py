"""What was merged before a watch is never called nothing, unless it holds nothing but zeros; held to the model's pictures."""

import copy
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from peft import LoKrConfig, LoraConfig, OFTConfig
from tests.families import generate, make_pipeline
from tests.families.loras import lora_state
from torch import Tensor

import sigmascope
from sigmascope.analysis.lora_state import standing

pytestmark = pytest.mark.slow
Act = Callable[[Any], None]
ON: Final = ["to_q", "to_k"]
CONFIGS: Final[dict[str, Callable[[], Any]]] = {
    "lora": lambda: LoraConfig(r=2, target_modules=ON, init_lora_weights=False),
    "dora": lambda: LoraConfig(r=2, target_modules=ON, init_lora_weights=False, use_dora=True),
    "lokr": lambda: LoKrConfig(r=2, target_modules=ON, init_weights=False),
    "oft": lambda: OFTConfig(r=0, oft_block_size=4, target_modules=ON, init_weights=False),
    "zeros": lambda: LoraConfig(r=2, target_modules=ON),
}
ACTS: Final[dict[str, Act]] = {
    "fuse": lambda unet: unet.fuse_lora(),
    "fuse at 0": lambda unet: unet.fuse_lora(0.0),
    "unfuse": lambda unet: unet.unfuse_lora(),
    "set 0": lambda unet: unet.set_adapters(["a"], [0.0]),
    "set 0.5": lambda unet: unet.set_adapters(["a"], [0.5]),
    "set 1": lambda unet: unet.set_adapters(["a"], [1.0]),
    "set -1": lambda unet: unet.set_adapters(["a"], [-1.0]),
    "set -0.5": lambda unet: unet.set_adapters(["a"], [-0.5]),
    "add b": lambda unet: unet.add_adapter(CONFIGS["lora"](), "b"),
    "disable": lambda unet: unet.disable_lora(),
    "delete": lambda unet: unet.delete_adapters("a"),
}
WATCH: Final = "|"
LEFT: Final = (
    "fuse, set 0, unfuse, |",
    "fuse, |, set 0, unfuse",
    "fuse, set 0, |, unfuse",
    "fuse, set 0.5, unfuse, set 0, |",
    "fuse, set 0.5, unfuse, disable, |",
    "fuse, set 0.5, disable, |",
    "fuse, set 0, unfuse, |, set 1, set 0",
    "fuse, set 0.5, unfuse, |, delete",
    "fuse, |, set 0, unfuse, fuse",
)
"""Programs that leave a part of what was merged in the weights, and nothing that acts beside them."""


def words_of(kind: str, program: str) -> tuple[str | None, bool]:
    """What the run says of its LoRAs, and whether the picture moved by more than rounding."""
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    torch.manual_seed(3)
    pipeline.unet.add_adapter(CONFIGS[kind](), "a")
    before, inside = ([*filter(None, part.split(", "))] for part in program.split(WATCH))
    for act in before:
        ACTS[act](pipeline.unet)
    with sigmascope.watch(pipeline) as watching:
        for act in (part.strip(", ") for part in inside):
            if act:
                ACTS[act](pipeline.unet)
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    found = standing(watching.record())
    return found and found.words, not torch.allclose(picture, bare, atol=1e-5)


@pytest.mark.parametrize("program", LEFT)
def test_a_part_that_stays_of_what_was_merged_before_the_watch_is_not_called_nothing(program: str) -> None:
    assert words_of("lora", program) == ("unknown", True)


@pytest.mark.parametrize("kind", ["dora", "lokr"])
@pytest.mark.parametrize("program", ["fuse, set 0.5, unfuse, disable, |", "fuse, set 0, unfuse, |, disable"])
def test_so_it_is_of_other_kinds(kind: str, program: str) -> None:
    assert words_of(kind, program) == ("unknown", True)


@pytest.mark.parametrize(
    "program",
    ["fuse at 0, |", "fuse at 0, |, set 1, delete", "fuse at 0, |, set 1", "fuse, unfuse, set 0, |"],
)
def test_what_may_have_been_merged_at_0_before_the_watch_is_open(program: str) -> None:
    assert words_of("lokr", program) == ("unknown", False)


@pytest.mark.parametrize("program", ["fuse, |", "fuse, |, delete", "|, fuse, set 0, unfuse"])
def test_what_the_books_tell_is_said(program: str) -> None:
    words, moved = words_of("lora", program)
    assert (words, moved) == ("acts", True)


@pytest.mark.parametrize("program", ["fuse, |", "fuse, unfuse, |", "fuse, set 0.5, |, unfuse"])
def test_of_a_lora_of_zeros_it_is_known_whatever_became_of_it(program: str) -> None:
    assert words_of("zeros", program) == ("does nothing", False)


def test_a_pipeline_that_fused_in_its_text_encoder_leaves_it_open() -> None:
    """Text encoders keep no mark of a fusing: the pipeline does."""
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    pipeline.load_lora_weights(lora_state(pipeline, ["text_encoder"], size=0.3), adapter_name="a")
    pipeline.fuse_lora(components=["text_encoder"])
    pipeline.set_adapters("a", 0.0)
    pipeline.unfuse_lora(components=["text_encoder"])
    with sigmascope.watch(pipeline) as watching:
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    assert not torch.allclose(picture, bare, atol=1e-5)
    found = standing(watching.record())
    assert found is not None
    assert found.words == "unknown"
    assert "merged into text_encoder before the watch began" in found.says


def dora(pipeline: Any, share: float, factors: float) -> dict[str, Tensor]:
    """A DoRA with magnitudes of this share of the weights' norms, and with the second factors multiplied."""
    state = {
        name: tensor * (factors if ".lora_B" in name else 1.0)
        for name, tensor in lora_state(pipeline, ["unet"], size=0.3, only="to_q").items()
    }
    for name in [name for name in state if ".lora_A" in name]:
        module = name.removesuffix(".lora_A.weight")
        weight = pipeline.unet.get_submodule(module.removeprefix("unet.")).weight
        state[f"{module}.lora_magnitude_vector"] = torch.linalg.norm(weight.detach(), dim=1) * share
    return state


@pytest.mark.parametrize(
    "program", ["|", "|, set 0", "set 0, |", "fuse at 0, |", "|, fuse at 0", "fuse at 0, |, delete"]
)
@pytest.mark.parametrize(("share", "factors"), [(1.2, 0.0), (1.0, 0.0), (1.0, 1.0), (1.2, 1.0)])
def test_whether_a_dora_that_adds_nothing_acts_is_told_by_its_magnitudes(
    program: str, share: float, factors: float
) -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    state = dora(pipeline, share, factors)
    before, inside = ([*filter(None, part.strip(", ").split(", "))] for part in program.split(WATCH))
    if before:
        pipeline.load_lora_weights(state, adapter_name="a")
    for act in before:
        ACTS[act](pipeline.unet)
    with sigmascope.watch(pipeline) as watching:
        if not before:
            pipeline.load_lora_weights(state, adapter_name="a")
        for act in inside:
            ACTS[act](pipeline.unet)
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    moved = not torch.allclose(picture, bare, atol=1e-5)
    found = standing(watching.record())
    assert moved is (share != 1.0 or (program == "|" and factors != 0.0))
    words = found.words if found is not None else None
    assert words in (("acts", "unknown") if moved else ("does nothing", "unknown", None))
    if "fuse" not in program:
        assert words == ("acts" if moved else "does nothing")


@pytest.mark.parametrize("is_unloaded", [False, True])
def test_of_a_model_that_was_exchanged_for_another_one_nobody_knows_what_is_in_it(is_unloaded: bool) -> None:
    pipeline = make_pipeline("sd15")
    other = copy.deepcopy(pipeline.unet)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.01)
    with sigmascope.watch(pipeline) as watching:
        pipeline.load_lora_weights(lora_state(pipeline, ["unet"], size=0.3), adapter_name="a")
        pipeline.fuse_lora()
        if is_unloaded:
            pipeline.unload_lora_weights()
        generate(pipeline, "sd15", num_inference_steps=1)
        pipeline.unet = other
        generate(pipeline, "sd15", num_inference_steps=1)
    found = standing(watching.record())
    assert found is not None
    assert found.words == "unknown"
    assert "with other weights than those that it was merged into" in found.says


def test_of_zeros_that_were_merged_before_nothing_stays() -> None:
    words, moved = words_of("zeros", "fuse, |, delete")
    assert not moved
    assert words not in ("acts", "unknown")


def test_what_a_call_scales_to_0_beside_one_that_may_be_fused_is_not_said_to_act() -> None:
    """The pipeline lists a LoRA as fused whose layers are gone."""
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    pipeline.load_lora_weights(lora_state(pipeline, ("unet",), size=0.3), adapter_name="a")
    pipeline.unload_lora_weights()
    pipeline.fuse_lora(components=["text_encoder"])
    pipeline._merged_adapters.add("a")
    with sigmascope.watch(pipeline) as watching:
        pipeline.unet.add_adapter(CONFIGS["lora"](), "c")
        picture = generate(pipeline, "sd15", num_inference_steps=1, cross_attention_kwargs={"scale": 0.0})
    assert torch.equal(picture, bare)
    found = standing(watching.record())
    assert found is not None
    assert found.words == "unknown"


def test_of_zeros_that_were_merged_no_part_stays() -> None:
    assert words_of("zeros", "|, fuse, set 0, unfuse") != ("acts", False)


@pytest.mark.parametrize("program", ["fuse at 0, |, set 1, unfuse", "fuse at 0, |, set 1"])
def test_what_was_fused_at_0_before_and_set_to_1_since_is_not_said_to_act(program: str) -> None:
    words, moved = words_of("lora", program)
    assert (words, moved) == ("unknown", False)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PEFT, on merged and on several adapters
@pytest.mark.parametrize(
    "program",
    [
        "fuse at 0, |, set -1, add b, set -1",
        "fuse at 0, |, set -1, unfuse",
        "fuse, |, set 0.5, add b, set -0.5",
        "|, fuse at 0, set -1, add b, set -1",
        "|, fuse at 0, set -1, unfuse",
        "|, fuse, set 0.5, unfuse, set -0.5",
    ],
)
def test_what_takes_away_a_part_that_was_left_in_the_weights_is_not_said_to_act(program: str) -> None:
    """PEFT takes out as much as is set then, not what it put in."""
    assert words_of("lora", program) == ("unknown", False)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PEFT, on merged and on several adapters
@pytest.mark.parametrize("scale", [1.0, 0.5, 0.0])
def test_what_was_taken_out_before_a_call_is_not_taken_out_at_its_scale(scale: float) -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    pipeline.unet.add_adapter(CONFIGS["lora"](), "a")
    with sigmascope.watch(pipeline) as watching:
        pipeline.unet.fuse_lora()
        pipeline.unet.add_adapter(CONFIGS["zeros"](), "b")
        picture = generate(pipeline, "sd15", num_inference_steps=1, cross_attention_kwargs={"scale": scale})
    assert torch.allclose(picture, bare, atol=1e-5)
    found = standing(watching.record())
    assert found is not None
    assert found.words == "does nothing"


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PEFT, on merged and on several adapters
@pytest.mark.parametrize(
    "program",
    ["fuse at 0, |, set -1, add b", "fuse, |, unfuse", "fuse, |, add b, set 0.5", "|, fuse, set 0.5, unfuse"],
)
def test_what_acts_beside_a_part_that_was_left_is_said_to(program: str) -> None:
    assert words_of("lora", program) == ("acts", True)


def test_a_watch_of_all_pipelines_hears_a_model_before_its_pipeline() -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    pipeline.load_lora_weights(lora_state(pipeline, ("unet",), size=0.3), adapter_name="a")
    pipeline.fuse_lora(lora_scale=0.0)
    with sigmascope.watch() as watching:
        pipeline.unet.set_adapters(["a"], [1.0])
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    assert torch.equal(picture, bare)
    found = standing(watching.record())
    assert found is not None
    assert found.words == "unknown"


def test_what_was_seen_fused_at_0_and_is_set_to_another_strength_since_is_not_said_to_act() -> None:
    """Of a pipeline that fused before, something may be in its text encoder too."""
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    pipeline.load_lora_weights(lora_state(pipeline, ("unet",), size=0.3), adapter_name="a")
    pipeline.fuse_lora(components=["unet"])
    pipeline.unfuse_lora(components=["unet"])
    with sigmascope.watch(pipeline) as watching:
        pipeline.fuse_lora(components=["unet"], lora_scale=0.0)
        pipeline.set_adapters(["a"], [0.5])
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    assert torch.allclose(picture, bare, atol=1e-5)
    found = standing(watching.record())
    assert found is not None
    assert found.words in ("unknown", "does nothing")


@pytest.mark.filterwarnings("ignore:All adapters are already merged")
def test_what_was_fused_stays_in_the_weights_though_it_was_fused_again_at_0() -> None:
    """PEFT merges what is merged no second time, and keeps the strength that was set last."""
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    with sigmascope.watch(pipeline) as watching:
        pipeline.load_lora_weights(lora_state(pipeline, ("unet",), size=0.3), adapter_name="a")
        pipeline.disable_lora()
        for scale in (1.0, 0.0, 1.0):
            pipeline.fuse_lora(components=["unet"], lora_scale=scale)
        pipeline.delete_adapters("a")
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    assert not torch.allclose(picture, bare, atol=1e-5)
    found = standing(watching.record())
    assert found is not None
    assert found.words == "acts"
