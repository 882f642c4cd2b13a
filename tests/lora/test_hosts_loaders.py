"""What `lora inspect` says of hosts, held to the hosts' own loaders, over layouts of public reports and of trainers.

ComfyUI's part needs a checkout, as the other tests of the marker `comfyui` do.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from diffusers.loaders import lora_conversion_utils
from safetensors.torch import save_file
from tests.comfy_shapes.checkout import Checkout, why_not
from tests.lora.host_loaders import (
    ENCODERS,
    PIPELINES,
    Made,
    by_comfyui,
    by_diffusers,
    encoder,
    encoder_targets,
    known_to_comfyui,
    known_to_comfyui_clip,
)
from tests.lora.reported_layouts import MAKE, REPORTED, WHOLE, Layout, Target, denoiser, tensors_of
from tests.lora.test_hosts import of_host
from tests.lora.test_hosts_comfyui import of_checkout
from typer.testing import CliRunner

from sigmascope.cli.root import app
from sigmascope.lora.convert import convert_lora
from sigmascope.lora.families.known import FAMILIES
from sigmascope.lora.hosts import HostReading
from sigmascope.lora.inspect import inspect_lora
from sigmascope.lora.reader import load_lora

LAYOUTS = REPORTED | WHOLE
MISREAD = {"diffusers 13484", "diffusers 13484 by fal"}
"""diffusers gives the last layer's modulation a change with its halves exchanged, so that no factor is right."""

if why_not() is None:  # a checkout hides packages that diffusers looks for when it is imported
    import diffusers

    for family, made in ENCODERS.items():
        for part in made:
            encoder(family, part)
    for name in MAKE:
        denoiser(name)
        getattr(diffusers, PIPELINES[name])


def said(reading: HostReading) -> Made:
    assert reading.taken is not None
    return reading.taken, {round(factor, 3): count for factor, count in (reading.strengths or {}).items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_diffusers_takes_what_is_said(name: str, tmp_path: Path) -> None:
    path = tmp_path / "lora.safetensors"
    named = LAYOUTS[name].save(path)
    reading = of_host(path)
    if name in MISREAD:
        assert "another change than the file has" in reading.unavailable["strengths"]
        with pytest.raises(AssertionError, match=r"adaLN_modulation\.1 is changed otherwise"):
            by_diffusers(LAYOUTS[name].family, path, named)
    elif reading.taken is None:
        assert "not measured" in reading.unavailable["taken"]
    else:
        assert said(reading) == by_diffusers(LAYOUTS[name].family, path, named)


@pytest.mark.comfyui
@pytest.mark.parametrize("name", LAYOUTS)
def test_comfyui_takes_what_is_said(comfy: Checkout, name: str, tmp_path: Path) -> None:
    layout, path = LAYOUTS[name], tmp_path / "lora.safetensors"
    named, known = layout.save(path), known_to_comfyui(comfy, layout.family)
    reading = of_checkout(comfy, path)
    family = FAMILIES[layout.family.partition(" ")[0]]
    if known is None or not is_in(comfy, layout.family):
        assert reading.unavailable["taken"] == f"this version has no {family.title}"
    else:
        assert said(reading) == by_comfyui(comfy, known, path, named)


@pytest.mark.slow
def test_diffusers_takes_one_kind_of_names_of_a_file_for_sdxl_with_both(tmp_path: Path) -> None:
    """diffusers' issue 11062, of LCMTurboMix: what kohya's names say in the original's words is left out, and nobody is told."""
    path, named = tmp_path / "lora.safetensors", dict[str, Target]()
    state: dict[str, Any] = {}
    for naming, only in (
        ("original", r"middle.*blocks\.0\.attn1"),
        ("diffusers", r"up_blocks\.0.*s\.0\.attn1"),
    ):
        tensors, some = Layout("sdxl", "lora_unet_", naming, "down", only=only).build()  # type: ignore[arg-type]
        state, named = state | tensors, named | some
    save_file(state, path, metadata={"modelspec.architecture": FAMILIES["sdxl"].architecture})
    reading, measured = of_host(path), by_diffusers("sdxl", path, named)
    assert said(reading) == measured
    assert 0 < measured[0] < reading.modules == len(named)
    (told,) = inspect_lora(path).findings
    format = (told.advice or "").rpartition("--format ")[2].rstrip(".")
    convert_lora(path, tmp_path / "NEW.safetensors", format)
    assert said(of_host(tmp_path / "NEW.safetensors"))[0] == len(named)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [None, 1, 3])
@pytest.mark.parametrize(
    ("family", "layer"),
    [
        ("sd15", "attentions.0.proj_in"),
        ("sdxl", "attentions.0.proj_in"),
        ("sdxl", "resnets.0.conv_shortcut"),
        ("sdxl", "resnets.0.conv1"),
        ("sdxl", "attentions.0.transformer_blocks.0.attn1.to_q"),
    ],
)
def test_diffusers_refuses_factors_without_the_layers_kernel(
    family: str, layer: str, kernel: int | None, tmp_path: Path
) -> None:
    path, name = tmp_path / "lora.safetensors", f"down_blocks.1.{layer}"
    target = Layout(family, "unet.", "diffusers", "A", None).names()[f"unet.{name}"]
    shape = target.shape[:2] if kernel is None else (*target.shape[:2], kernel, kernel)
    state = tensors_of(f"unet.{name}", "A", shape, None)
    save_file(state, path, metadata={"modelspec.architecture": FAMILIES[family].architecture})
    reading, measured = of_host(path), by_diffusers(family, path, {f"unet.{name}": target})
    assert said(reading) == measured
    assert measured[0] == (shape == target.shape)
    assert measured[0] or f"(unet.{name})" in reading.unavailable["refused"]


def test_matrices_for_a_projection_of_an_unknown_family_are_left_open(tmp_path: Path) -> None:
    path = tmp_path / "lora.safetensors"
    save_file(tensors_of("unet.down_blocks.1.attentions.0.proj_in", "A", (640, 640), None), path)
    assert "families differ" in of_host(path).unavailable["taken"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd-scripts' FLUX", "musubi-tuner's WAN", "Qwen-Image-Lightning 52"])
def test_diffusers_never_ends_with_a_negative_alpha(name: str, tmp_path: Path) -> None:
    path, lines = tmp_path / "lora.safetensors", Counter[str]()
    named = replace(LAYOUTS[name], alpha=-2.0).save(path)

    def count(frame: FrameType, *_: object) -> Any:
        if frame.f_code.co_filename != lora_conversion_utils.__file__:
            return None
        lines["run"] += 1
        if lines["run"] > 300_000:
            raise RecursionError
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        measured = by_diffusers(LAYOUTS[name].family, path, named)
    finally:
        sys.settrace(before)
    assert lines["run"] > 300_000
    assert said(of_host(path)) == measured == (0, {})
    assert "negative alpha" in of_host(path).unavailable["refused"]


INNER, OUTER, FIRST = "single_transformer_blocks.0.proj_out", "proj_out", "context_embedder"


@pytest.mark.slow
@pytest.mark.parametrize(
    "alphas",
    [{OUTER: 16.0}, {OUTER: 16.0, INNER: 1.0}, {INNER: 1.0}, {FIRST: 16.0, OUTER: 16.0, INNER: 1.0}, {FIRST: 1.0}],
    ids=str,
)  # fmt: skip
def test_diffusers_takes_an_alpha_for_all_names_that_end_with_its_name(
    alphas: dict[str, float], tmp_path: Path
) -> None:
    path, layout = tmp_path / "lora.safetensors", Layout("flux", "transformer.", "diffusers", "A", alpha=4.0)
    state, named = layout.build()
    state |= {f"transformer.{name}.alpha": torch.tensor(alpha) for name, alpha in alphas.items()}
    save_file(state, path, metadata={"modelspec.architecture": FAMILIES["flux"].architecture})
    assert said(of_host(path)) == by_diffusers("flux", path, named)


def is_in(comfy: Checkout, family: str) -> bool:
    """Whether this version knows the family."""
    return comfy.version.startswith(FAMILIES[family.partition(" ")[0]].in_comfyui_since or "")


# How the parts of a file begin and end: its denoiser's modules, and each text encoder's.
WITH_ENCODERS: dict[str, tuple[Layout, dict[str, str]]] = {
    "kohya's SD 1.5": (
        Layout("sd15", "lora_unet_", "diffusers", "down", only="mid.*attn1.to_q"),
        {"lora_te_": "text_encoder"},
    ),
    "kohya's SDXL": (
        Layout("sdxl", "lora_unet_", "original", "down", only="middle.*attn2.to_k"),
        {"lora_te1_": "text_encoder", "lora_te2_": "text_encoder_2"},
    ),
    "PEFT's SDXL": (
        Layout("sdxl", "unet.", "diffusers", "A", None, "mid.*attn2.to_k"),
        {"text_encoder.": "text_encoder", "text_encoder_2.": "text_encoder_2"},
    ),
    "kohya's FLUX": (
        Layout("flux", "lora_unet_", "original", "down", only="img_attn"),
        {"lora_te1_": "text_encoder", "lora_te3_": "text_encoder_2"},
    ),
    "ComfyUI's FLUX": (
        Layout("flux", "diffusion_model.", "original", "down", only="img_attn"),
        {
            "text_encoders.clip_l.transformer.": "text_encoder",
            "text_encoders.t5xxl.transformer.": "text_encoder_2",
        },
    ),
    "PEFT's FLUX": (
        Layout("flux", "transformer.", "diffusers", "A", only="attn.to_out"),
        {"text_encoder.": "text_encoder", "text_encoder_2.": "text_encoder_2"},
    ),
    "PEFT's SD 3": (
        Layout("sd3", "transformer.", "diffusers", "A", None, "attn.to_out"),
        {"text_encoder.": "text_encoder", "text_encoder_2.": "text_encoder_2"},
    ),
    "kohya's U-Net, ComfyUI's encoder": (
        Layout("sd15", "lora_unet_", "diffusers", "down", only="mid.*attn1.to_q"),
        {"text_encoders.clip_l.transformer.": "text_encoder"},
    ),
}
Parts = dict[str, dict[str, Target]]


def with_encoders(name: str, path: Path, only: str = "") -> tuple[Layout, dict[str, Target], Parts]:
    """Write a file with text encoders, or only such layers of them; what its modules change, the encoders' by the part."""
    layout, starts = WITH_ENCODERS[name]
    state, denoiser = layout.build()
    encoders: Parts = {}
    for start, part in starts.items():
        for layer, target in encoder_targets(layout.family, part).items():
            if not re.search(only, layer):
                continue
            module = start + (layer.replace(".", "_") if start.endswith("_") else layer)
            encoders.setdefault(part, {})[module] = target
            state |= tensors_of(module, layout.ending, target.shape, layout.alpha)
    save_file(state, path, metadata={"modelspec.architecture": FAMILIES[layout.family].architecture})
    return layout, denoiser, encoders


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_ENCODERS)
def test_diffusers_takes_what_is_said_of_text_encoders(name: str, tmp_path: Path) -> None:
    path = tmp_path / "lora.safetensors"
    held_to_diffusers(path, *with_encoders(name, path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "only",
    [
        "q_proj",
        "out_proj",
        "fc1",
        "text_projection|q_proj",
        "q_proj|fc1",
        "q_proj|out_proj|fc",
        "_projection|fc2",
    ],
)
@pytest.mark.parametrize("name", WITH_ENCODERS)
def test_diffusers_takes_what_is_said_of_some_layers_of_text_encoders(
    name: str, only: str, tmp_path: Path
) -> None:
    path = tmp_path / "lora.safetensors"
    held_to_diffusers(path, *with_encoders(name, path, only))


def held_to_diffusers(path: Path, layout: Layout, denoiser: dict[str, Target], encoders: Parts) -> None:
    family, reading = layout.family, of_host(path)
    assert said(reading) == by_diffusers(family, path, denoiser, **all_encoders(family))
    measured = [
        by_diffusers(family, path, named, part, **all_encoders(family)) for part, named in encoders.items()
    ]
    assert reading.encoders is not None
    assert said(reading.encoders) == together(measured)


@pytest.mark.comfyui
@pytest.mark.parametrize("name", WITH_ENCODERS)
def test_comfyui_takes_what_is_said_of_text_encoders(comfy: Checkout, name: str, tmp_path: Path) -> None:
    path = tmp_path / "lora.safetensors"
    layout, denoiser, encoders = with_encoders(name, path)
    reading = of_checkout(comfy, path)
    known = known_to_comfyui(comfy, layout.family)
    assert known is not None
    assert said(reading) == by_comfyui(comfy, known, path, denoiser)
    known = known_to_comfyui_clip(comfy, layout.family)
    assert reading.encoders is not None
    assert said(reading.encoders) == together(
        by_comfyui(comfy, known, path, named) for named in encoders.values()
    )


def all_encoders(family: str) -> dict[str, Any]:
    return {part: encoder(family, part) for part in ENCODERS[family]}


def together(made: Iterable[Made]) -> Made:
    factors: Counter[float] = Counter()
    for _, more in made:
        factors.update(more)
    return factors.total(), dict(factors)


@pytest.mark.comfyui
@pytest.mark.parametrize("name", LAYOUTS)
def test_hosts_agree_after_the_command_that_is_advised(comfy: Checkout, name: str, tmp_path: Path) -> None:
    layout, path = LAYOUTS[name], tmp_path / "lora.safetensors"
    if layout.ending == "lokr":  # each takes seconds to become factors
        layout = replace(layout, only=r"\b0\..*(attn1?\.to_out\.0|attn\.proj|attention\.(to_)?out(\.0)?)$")
    layout.save(path)
    known = known_to_comfyui(comfy, layout.family)
    advice = [
        finding.advice or "" for finding in inspect_lora(path).findings if finding.id == "lora_hosts_differ"
    ]
    command = re.search(r"sigmascope (lora convert .*)\.", "".join(advice))
    if known is None or command is None or not is_in(comfy, layout.family):
        return
    words = [
        str(path.with_name(word)) if word.endswith(".safetensors") else word for word in command[1].split()
    ]
    outcome = CliRunner().invoke(app, words)
    assert outcome.exit_code == 0, outcome.output
    mended = path.with_name("NEW.safetensors")
    named, whole = everything_in(mended, layout)
    assert by_diffusers(layout.family, mended, named) == by_comfyui(comfy, known, mended, named) == whole
    assert inspect_lora(mended).findings == ()


def everything_in(path: Path, layout: Layout) -> tuple[dict[str, Target], Made]:
    """A converted file's modules with their layers, and what a host makes that takes all of them."""
    writings = [
        Layout(layout.family, "transformer.", "diffusers", "A"),
        Layout(layout.family, "unet.", "diffusers", "A"),
        Layout(layout.family, "diffusion_model.", "original", "A"),
        Layout(layout.family, "lora_unet_", "original", "A"),
        Layout(layout.family, "lora_unet_", "diffusers", "A"),
    ]
    everything = {module: target for one in writings for module, target in one.names().items()}
    modules = load_lora(path).names
    return {module: everything[module] for module in modules}, (len(modules), {1.0: len(modules)})


FOR_EACH_HOST = [
    "diffusers 13484 by fal",
    "OneTrainer 1563, kohya",
    "ai-toolkit's Chroma",
    "sd-scripts' Chroma",
    "sd-scripts' Lumina 2",
    "Chroma, PEFT",
    "WAN, kohya",
    "WAN, original, alphas",
    "FLUX.2, PEFT",
    "LTX, original",
    "HunyuanVideo, its own names",
    "HunyuanVideo, Comfy's start",
]


def converted(name: str, format: str, folder: Path) -> Path:
    path = folder / "lora.safetensors"
    LAYOUTS[name].save(path)
    advice = next(one.advice or "" for one in inspect_lora(path).findings if one.id == "lora_hosts_differ")
    assert f"to {format} for" in advice
    made = path.with_name(f"{format}.safetensors")
    outcome = CliRunner().invoke(app, ["lora", "convert", str(path), str(made), "--format", format])
    assert outcome.exit_code == 0, outcome.output
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", FOR_EACH_HOST)
def test_diffusers_takes_what_is_converted_for_it(name: str, tmp_path: Path) -> None:
    layout, made = LAYOUTS[name], converted(name, "peft", tmp_path)
    named, whole = everything_in(made, layout)
    assert by_diffusers(layout.family, made, named) == whole


@pytest.mark.comfyui
@pytest.mark.parametrize("name", FOR_EACH_HOST)
def test_comfyui_takes_what_is_converted_for_it(comfy: Checkout, name: str, tmp_path: Path) -> None:
    layout, known = LAYOUTS[name], known_to_comfyui(comfy, LAYOUTS[name].family)
    if known is None or not is_in(comfy, layout.family):
        return
    made = converted(name, "comfyui", tmp_path)
    named, whole = everything_in(made, layout)
    assert by_comfyui(comfy, known, made, named) == whole


UNET = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_"
TO_Q_AND_V = {
    f"{UNET}{name}": Target(
        (f"down_blocks.1.attentions.0.transformer_blocks.0.attn1.{name}",), "", False, (640, 640)
    )
    for name in ("to_q", "to_v")
}
HALF_READ: dict[str, dict[str, torch.Tensor | None]] = {
    "two ranks": {"lora_down.weight": torch.ones(3, 640)},
    "one axis": {"lora_down.weight": torch.ones(4 * 640)},
    "no up": {"lora_up.weight": None},
    "no down": {"lora_down.weight": None},
}


def with_broken_module(path: Path, change: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Two sound modules of SDXL's U-Net, and one whose tensors are exchanged."""
    whole: dict[str, torch.Tensor | None] = {
        "lora_up.weight": torch.ones(640, 4),
        "lora_down.weight": torch.ones(4, 640),
    }
    modules = {"to_q": whole, "to_v": whole, "to_k": whole | change}
    state = {
        f"{UNET}{name}.{end}": tensor.clone()
        for name, tensors in modules.items()
        for end, tensor in tensors.items()
        if tensor is not None
    }
    save_file(state, path, {"modelspec.architecture": FAMILIES["sdxl"].architecture})
    return state


@pytest.mark.comfyui
@pytest.mark.parametrize("kind", HALF_READ)
def test_comfyui_makes_of_a_broken_module_what_is_said(comfy: Checkout, tmp_path: Path, kind: str) -> None:
    state = with_broken_module(tmp_path / "lora.safetensors", HALF_READ[kind])
    reading = of_checkout(comfy, tmp_path / "lora.safetensors")
    known = {f"{UNET}{name}": f"diffusion_model.{name}.weight" for name in ("to_q", "to_k", "to_v")}
    try:
        patches = comfy.lora.load_lora(state, known, log_missing=False)
    except KeyError:
        assert (reading.taken, reading.modules) == (0, 3)
        assert "refuses the file" in reading.unavailable["refused"]
        return
    changed = []
    for key in known.values():
        patch = [(1.0, patches[key], 1.0, None, None)] if key in patches else []
        changed.append(bool(comfy.lora.calculate_weight(patch, torch.zeros(640, 640), key).any()))
    assert (reading.taken, reading.modules) == (sum(changed), len(changed))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["two ranks", "one axis"])
def test_diffusers_refuses_a_broken_module(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "lora.safetensors"
    with_broken_module(path, HALF_READ[kind])
    reading = of_host(path, "diffusers")
    assert by_diffusers("sdxl", path, TO_Q_AND_V)[0] == reading.taken == 0
    with_broken_module(path, {})
    assert by_diffusers("sdxl", path, TO_Q_AND_V)[0] == 2
    assert "refuses the file" in reading.unavailable["refused"]
