"""None is unknown and has a reason in `unavailable`, or it means that there is none; and no reason is about nothing."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, is_typeddict

import pytest
import torch
from tests.comfy_shapes.adapters import GLoRAAdapter, LoHaAdapter, loha_parts, lora_adapter, lora_parts
from tests.comfy_shapes.modules import CLIP_Q, CONV, LOOSE, NORM, OUT, BaseModel, Q, SDClipModel
from tests.comfy_shapes.patchers import ModelPatcher
from tests.comfy_shapes.versions import CLIP, DynamicModelPatcher
from tests.families import FAMILIES, make_pipeline
from tests.families.loras import lora_state, parts_of, write
from tests.monitor.conftest import FakeAccelerator
from tests.reasons import about_nothing, told, without_reason
from tests.stages.conftest import ComfyClip
from tests.stages.vaes import ComfyVae
from torch import nn

from sigmascope import decode_latents, encode_latents
from sigmascope.records.memory import AcceleratorMemory, AcceleratorPeak, PeakMemory
from sigmascope.stages import latent_encoding as latents
from sigmascope.stages import lora_application as lora
from sigmascope.stages import schema
from sigmascope.stages import text_encoding as texts

pytestmark = pytest.mark.filterwarnings("ignore")
MIB = 2**20


class Device(FakeAccelerator):
    """A faked accelerator whose memory the driver tells or does not."""

    def __init__(self, allocated: int, driver: bool) -> None:
        super().__init__()
        self.allocate(allocated)
        self.driver = driver

    def memory(self, device: str) -> AcceleratorMemory:
        allocated = self.allocated[device]
        if self.driver:
            return AcceleratorMemory(device, allocated, 2 * allocated, 8 * MIB, 5 * MIB, 3 * MIB)
        names = ("total_bytes", "free_bytes", "driver_used_bytes")
        return AcceleratorMemory(
            device, allocated, 2 * allocated, unavailable=dict.fromkeys(names, "the driver is gone")
        )


class Hostile:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


DEVICES: dict[str, Any] = {
    "none": None,
    "busy": Device(MIB, driver=True),
    "idle": Device(0, driver=True),
    "without driver": Device(MIB, driver=False),
}
PEAKS = (
    None,
    PeakMemory(5 * MIB, 0.1, unavailable={"ram_used_bytes": "nothing sampled it"}),
    PeakMemory(
        unavailable=dict.fromkeys(("rss_bytes", "ram_used_bytes"), "nothing sampled it"),
        accelerators=(AcceleratorPeak("cuda:0", 2 * MIB, 0.2, unavailable={"reserved_bytes": "not told"}),),
    ),
)
ENCODE: dict[str, dict[str, Any]] = {
    "sd15": {"device": "cpu", "num_images_per_prompt": 1, "do_classifier_free_guidance": False},
    "flux": {"prompt_2": None},
    "sd3": {"prompt_2": None, "prompt_3": None},
}


def of_pipeline(family: str, folder: Path) -> Iterator[object]:
    pipe = make_pipeline(family)
    denoiser = getattr(pipe, FAMILIES[family].denoiser)
    conditioning = pipe.encode_prompt("a red fox", **ENCODE.get(family, {}))
    path = write(lora_state(pipe, parts_of(family), only="to_q"), folder / f"{family}.safetensors")
    pictures = torch.rand(1, 3, 5, 32, 32) if family.startswith("wan") else torch.rand(1, 3, 32, 32)
    latent, encoded = encode_latents(pipe.vae, pictures)
    decoded, record = decode_latents(pipe.vae, latent)
    blind = lora.capture_lora_baseline(denoiser, None, path, keys="none")
    for baseline in (blind, None):
        yield lora.analyze_lora_application_results(baseline, denoiser, pipe, pipe, peak_memory=PEAKS[1])
    for device in DEVICES.values():
        before = lora.capture_lora_baseline(denoiser, pipe, path, accelerator=device)
        if device is None:
            pipe.load_lora_weights(str(path))
        yield before
        yield lora.analyze_lora_application_results(before, denoiser, pipe, pipe, peak_memory=PEAKS[2])
        text = texts.capture_text_encoding_baseline(denoiser, pipe, accelerator=device)
        yield text
        for privacy, peak in zip(("full", "hash", "none"), PEAKS, strict=True):
            yield texts.analyze_text_encoding_results(
                text,
                conditioning,
                None,
                "a red fox " * 90,
                "",
                0.3,
                prompt_privacy=privacy,  # type: ignore[arg-type]
                peak_memory=peak,
                error=None if peak is None else ValueError("of the encoder"),
            )
        encoding = latents.capture_latent_generation_baseline(pipe, pictures, accelerator=device)
        yield encoding
        yield latents.analyze_latent_generation_results(encoding, latent, None, None, record=encoded)
        yield latents.analyze_latent_generation_results(encoding, latent, 0.5, 1, {}, peak_memory=PEAKS[2])
        decoding = latents.capture_latent_decoding_baseline(pipe, latent, accelerator=device)
        yield decoding
        yield latents.analyze_latent_decoding_results(decoding, decoded, record=record)
        yield latents.analyze_latent_decoding_results(None, decoded, 0.0, "by hand", peak_memory=PEAKS[1])


def of_comfyui(_: Path) -> Iterator[object]:
    changes: dict[str, Any] = {
        Q: lora_adapter(),
        CLIP_Q: lora_adapter(seed=5),
        OUT: LoHaAdapter(set(), loha_parts(6, width=8)),
        CONV: ("diff", (torch.ones(8, 4, 3, 3),)),
        NORM: ("set", (torch.ones(6),)),
        LOOSE: ("nobody's", (torch.ones(6),)),
    }
    for kind in (ModelPatcher, DynamicModelPatcher):
        for device in DEVICES.values():
            for load in (False, True):
                unet, clip = kind(BaseModel()), CLIP(ModelPatcher(SDClipModel()))
                baseline = lora.capture_lora_baseline(unet, clip, accelerator=device)
                new_unet, new_clip = unet.clone(), clip.clone()
                new_unet.add_patches(changes, 1.0)
                new_clip.add_patches(changes, 0.5)
                if load and kind is ModelPatcher:
                    del new_unet.patches[LOOSE]
                    new_unet.load()
                results = (new_unet, new_clip)
                yield lora.analyze_lora_application_results(baseline, *results, results)
    unet.patches = {
        Q: [("much", lora_adapter(), 1.0, None, None), (1.0, lora_adapter(), "much", (0, 8), print)],
        OUT: [7, (1.0, GLoRAAdapter(set(), tuple(lora_parts()[:2])), 1.0, None, None), (1.0, None)],
        CONV: [(1.0, [torch.ones(8, 4, 3, 3), (0.5, lora_adapter(), 2.0, None, None)], 1.0, None, None)],
        "no.such.weight": [(1.0, lora_adapter(), 1.0, None, None)],
    }
    yield lora.analyze_lora_patches(unet, "UNet")
    yield lora.track_weight_modifications(BaseModel(), unet, "UNet")
    for device in DEVICES.values():
        both = ComfyClip(clip_l=768, clip_g=1280)
        text = texts.capture_text_encoding_baseline(None, both, accelerator=device)
        pair = [[torch.zeros(1, 77, 2048), {"pooled_output": torch.zeros(1, 1280)}]]
        yield text
        yield texts.analyze_text_encoding_results(text, pair, [[torch.zeros(5), {}]], "a fox", "b " * 99, 1.0)
        for video in (True, False):
            latent = {"samples": torch.zeros(1, 16, 2, 4, 4) if video else torch.zeros(5, 4, 4, 4)}
            vae, pictures = ComfyVae(video=video), torch.rand(5, 32, 32, 3)
            encoding = latents.capture_latent_generation_baseline(vae, pictures, accelerator=device)
            yield encoding
            yield latents.analyze_latent_generation_results(encoding, latent, 1.0, 1)
            decoding = latents.capture_latent_decoding_baseline(vae, latent, accelerator=device)
            yield decoding
            yield latents.analyze_latent_decoding_results(decoding, pictures, 1.0, 2)


ODD: dict[str, Any] = {
    "None": None,
    "number": 3,
    "text": "a fox",
    "object": object(),
    "hostile": Hostile(),
    "list": [1, 2],
    "empty list": [],
    "mapping": {"a": torch.zeros(2)},
    "vector": torch.zeros(3),
    "meta": torch.zeros(1, 4, 8, 8, device="meta"),
    "six axes": torch.zeros(1, 1, 4, 2, 8, 8),
    "NaN": torch.full((1, 4, 8, 8), float("nan")),
    "complex": torch.zeros(1, 4, 8, dtype=torch.complex64),
    "nested": torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=torch.jagged),
    "layer": nn.Linear(2, 2),
    "layer on meta": nn.Linear(2, 2, device="meta"),
    "layer without weights": nn.ReLU(),
}


def of_odd(thing: Any) -> Iterator[object]:
    for before, now in ((thing, thing), (None, nn.Linear(2, 2)), (nn.Linear(2, 2), thing)):
        baseline = lora.capture_lora_baseline(before, before, thing)
        yield baseline
        yield lora.analyze_lora_application_results(baseline, now, now, thing)
        yield lora.track_model_identity_changes(before, now, "UNet")
        yield lora.track_weight_modifications(before, now, "CLIP")
        yield lora.track_model_placement_changes(before, now, "CLIP")
        yield lora.calculate_memory_change(baseline["unet"], now)
        yield lora.analyze_lora_patches(now, "UNet")
    yield lora.analyze_lora_application_results(thing, thing, thing, thing)
    text = texts.capture_text_encoding_baseline(thing, thing)
    yield text
    yield texts.analyze_text_encoding_results(text, thing, thing, thing, thing, thing)
    given = thing if isinstance(thing, Mapping) else None
    yield texts.analyze_text_encoding_results(given, thing, [[thing, {}]], "a fox", thing, 0.0)
    encoding = latents.capture_latent_generation_baseline(thing, thing)
    decoding = latents.capture_latent_decoding_baseline(thing, thing)
    yield from (encoding, decoding)
    for known in (encoding, given):
        yield latents.analyze_latent_generation_results(known, thing, thing, thing, thing, thing, 8, None)
        yield latents.analyze_latent_decoding_results(decoding, thing, thing, thing, error=ValueError("x"))
        yield latents._calculate_latent_generation_memory_change(known, thing, thing)
    yield latents._analyze_latent_output(thing, 1, thing, None)
    yield latents._analyze_vae_encoding_performance(thing, thing, thing, 1, None)


CASES: dict[str, Callable[[Path], Iterator[object]]] = {
    **{family: (lambda path, family=family: of_pipeline(family, path)) for family in FAMILIES},  # type: ignore[misc]
    "ComfyUI": of_comfyui,
    **{name: (lambda _, thing=thing: of_odd(thing)) for name, thing in ODD.items()},  # type: ignore[misc]
}


_SLOW = ("sdxl", "sd3", "wan", "wan_vace", "qwen_image")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in _SLOW)) for case in CASES]
)
def test_what_is_none_has_a_reason_or_means_that_there_is_none(tmp_path: Path, case: str) -> None:
    results = list(CASES[case](tmp_path))
    assert set().union(*map(without_reason, results)) == set()
    assert set().union(*map(about_nothing, results)) == set()


def test_a_reason_that_is_left_out_is_noticed_and_one_too_many() -> None:
    found: Any = latents._analyze_vae_encoding_performance(1.0, "Direct VAE Encoding", 1, 8, None)
    assert without_reason(found) == about_nothing(found) == set()
    del found["unavailable"]["total_mb"], found["unavailable"]["width"]
    found["unavailable"] |= {"elapsed_time": "it is there", "seconds": "no such key"}
    assert without_reason(found) == {": total_mb", ": video_dimensions.width"}
    assert about_nothing(found) == {": elapsed_time", ": seconds"}


_BASES = {"_ModelBaseline", "StageAnalysis"}  # of the kinds that are made


@pytest.mark.slow
def test_every_kind_of_dict_that_gives_reasons_is_walked(tmp_path: Path) -> None:
    kinds = {
        name: kind
        for name, kind in vars(schema).items()
        if is_typeddict(kind) and "unavailable" in kind.__annotations__
    }
    walked = [
        set(facts)
        for case in ("sd15", "ComfyUI", "None")
        for result in CASES[case](tmp_path)
        for _, facts in told(result)
    ]
    never = {
        name
        for name, kind in kinds.items()
        if not any(kind.__required_keys__ <= keys <= set(kind.__annotations__) for keys in walked)
    }
    assert never == _BASES
