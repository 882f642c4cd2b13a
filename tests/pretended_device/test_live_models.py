"""LoRAs on models, and watched pipelines, on a device: as on the CPU, and the host never waits for us."""

import copy
from typing import Any

import pytest
import torch
from tests.conftest import Pretend
from tests.lora.small_net import SmallNet
from tests.pocket_pipelines import KINDS, load_pocket
from tests.pretend_device import Kind, PretendedDevice
from torch import Tensor, nn

from sigmascope import LoraFactors, LoraFile, attach_lora, merge_into_model, watch
from sigmascope.probes import model_fingerprints
from sigmascope.probes.model_fingerprints import model_fingerprint

pytestmark = pytest.mark.slow

DEVICES: tuple[Kind, ...] = ("cuda", "mps")
COPIES_FROM_METAL = "probes/copies.py"
"""PyTorch tells of no moment at which a copy from Metal is over, so that one waits."""


def lora_for(model: nn.Module) -> LoraFile:
    """A change of each Linear and 2-D convolution."""
    generator = torch.Generator().manual_seed(3)
    modules = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d) and getattr(layer, "groups", 1) == 1:
            shape = tuple(layer.weight.shape)
            up, down = (torch.randn(*size, generator=generator) * 0.05 for size in sides(shape))
            modules[name] = LoraFactors(up, down, 2.0, shape)
    return LoraFile(modules)


def sides(shape: tuple[int, ...]) -> tuple[tuple[int, int], tuple[int, int]]:
    return (shape[0], 2), (2, shape[1] * torch.Size(shape[2:]).numel())


@pytest.fixture
def model() -> SmallNet:
    torch.manual_seed(0)
    return SmallNet()


@pytest.fixture
def image() -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", DEVICES)
def test_an_attached_lora_does_not_wait_and_gives_the_cpus_output(
    pretend: Pretend, kind: Kind, dtype: torch.dtype, model: SmallNet, image: Tensor
) -> None:
    lora = lora_for(model)
    with torch.no_grad(), attach_lora(model.to(dtype), lora):
        expected = model(image.to(dtype))
    with pretend(kind) as device, torch.no_grad():
        there = copy.deepcopy(model).to(kind)
        attached = attach_lora(there, lora)
        x = image.to(kind, dtype)
        device.waits.clear()
        device.uploads.clear()
        for _ in range(2):
            made = there(x)
        attached.scale = 0.5
        there(x)
        assert device.waits == []
        assert device.uploads == []  # factors are placed beside the weights at once
        attached.detach()
        assert torch.equal(made.cpu(), expected)


@pytest.mark.parametrize("kind", DEVICES)
def test_a_lora_follows_a_model_to_the_device(
    pretend: Pretend, kind: Kind, model: SmallNet, image: Tensor
) -> None:
    with torch.no_grad(), attach_lora(model, lora_for(model)):
        expected = model(image)
        with pretend(kind):
            assert torch.equal(model.to(kind)(image.to(kind)).cpu(), expected)
            assert torch.equal(model.to("cpu")(image), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", DEVICES)
def test_a_merge_there_gives_the_cpus_bits_and_takes_them_back(
    pretend: Pretend, kind: Kind, dtype: torch.dtype, model: SmallNet
) -> None:
    lora, model = lora_for(model), model.to(dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with merge_into_model(model, lora):
        expected = {name: value.clone() for name, value in model.state_dict().items()}
    with pretend(kind):
        model.to(kind)
        with merge_into_model(model, lora):
            assert all(torch.equal(value.cpu(), expected[name]) for name, value in model.state_dict().items())
        assert all(torch.equal(value.cpu(), before[name]) for name, value in model.state_dict().items())


def call(pipeline: Any) -> Tensor:
    made: Tensor = pipeline(
        "a matte red sphere before a blue wall",
        num_inference_steps=2,
        guidance_scale=2.0,
        output_type="latent",
        generator=torch.Generator().manual_seed(0),
    ).images
    return made.cpu()


class Watched:
    """What a watched call made and waited for, and the same call without a watch."""

    def __init__(self, device: PretendedDevice, pipeline: Any, **options: Any) -> None:
        self.device = device.device
        parts = {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}
        self.on_cpu = {name: model_fingerprint(part).value for name, part in parts.items()}
        model_fingerprints._KEPT.clear()  # they would stay what they are on their way to the device
        pipeline.to(self.device)
        self.plain = call(pipeline)
        device.waits.clear()
        call(pipeline)
        self.waits_of_the_host = len(device.waits)
        device.waits.clear()
        device.uploads.clear()
        with watch(pipeline, **options) as self.run:
            self.seen = call(pipeline)
            self.uploads = [upload for upload in device.uploads if upload.is_ours]
            first, device.waits = device.waits, []
            call(pipeline)
            second = device.waits
        self.ours = [wait for wait in first if wait.is_ours]
        self.ours_in_a_second_call = [wait for wait in second if wait.is_ours]
        self.other_waits = [len(waits) - sum(wait.is_ours for wait in waits) for waits in (first, second)]


WATCHED = [("unet", "cuda"), ("mmdit", "mps")]
"""Each architecture and each kind of device once: a pair takes ten seconds."""


@pytest.fixture(scope="module", params=WATCHED, ids="-".join)
def watched(request: pytest.FixtureRequest, pretend: Pretend) -> Watched:
    architecture, kind = request.param
    pipeline = load_pocket(architecture, "base")
    with pretend(kind) as device, attach_lora(pipeline, lora_for(getattr(pipeline, KINDS[architecture]))):
        return Watched(device, pipeline)


def test_a_watched_call_gives_the_same_bits(watched: Watched) -> None:
    assert torch.equal(watched.seen, watched.plain)


def test_the_record_knows_the_device(watched: Watched) -> None:
    assert [accelerator.device for accelerator in watched.run.host.accelerators] == [str(watched.device)]
    assert watched.run.stages[0].name == "generation"


def test_the_host_waits_in_a_watched_call_for_what_it_waits_for_alone(watched: Watched) -> None:
    assert watched.other_waits == [watched.waits_of_the_host] * 2


def places(waits: list[Any]) -> set[str]:
    return {wait.place.partition(":")[0] for wait in waits}


def test_nothing_of_ours_waits_but_for_metal(watched: Watched) -> None:
    allowed = {COPIES_FROM_METAL} if watched.device.type == "mps" else set()
    assert places([*watched.ours, *watched.uploads]) == allowed
    assert places(watched.ours_in_a_second_call) <= allowed


def test_the_record_has_the_fingerprints_that_the_cpu_gives(watched: Watched) -> None:
    recipes = [stage.facts["recipe"] for stage in watched.run.stages]
    assert recipes[0] == {**recipes[1], "generator_states": recipes[0]["generator_states"]}
    assert recipes[0]["models"] == watched.on_cpu
    assert not any(name.startswith("recipe") for stage in watched.run.stages for name in stage.unavailable)
