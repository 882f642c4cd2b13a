"""Every tensor of a conditioning is held to the limits, and to what its encoder gives."""

from typing import Any

import pytest
import torch
from torch import nn

from sigmascope.stages.text_encoding import (
    TextEncodingThresholds,
    analyze_text_encoding_results,
    capture_text_encoding_baseline,
)

FIRST = torch.ones(1, 77, 8)


def validation(cond: Any, negative: Any = None, clip: Any = None, **limits: Any) -> dict[str, Any]:
    baseline = capture_text_encoding_baseline(None, clip)
    found = analyze_text_encoding_results(
        baseline, cond, negative, "a fox", None, 0.1, thresholds=TextEncodingThresholds(**limits)
    )
    return dict(found["validation"])


@pytest.mark.parametrize(
    ("later", "limits", "check", "message"),
    [
        (torch.ones(1, 77, 16), {}, "tensor_dimensions", "the conditionings are of different widths: 8, 16"),
        (torch.ones(1, 77, 8).half(), {"expected_dtype": "float32"}, "tensor_dimensions", "dtype float16"),
        (torch.ones(1, 154, 8), {"expected_tokens": 77}, "tensor_dimensions", "154 tokens, expected 77"),
        (torch.ones(1, 77, 8, device="meta"), {}, "device_placement", "on different devices: cpu, meta"),
        (
            torch.ones(1, 77, 8, device="meta"),
            {"expected_device": "cpu"},
            "device_placement",
            "on meta, expected cpu",
        ),
    ],
)
def test_a_later_region_is_held_to_the_limits(
    later: torch.Tensor, limits: dict[str, Any], check: str, message: str
) -> None:
    found = validation([[FIRST, {}], [later, {"start_percent": 0.5}]], **limits)["compatibility"][check]
    assert found["passed"] is False
    assert any(message in line for line in found["messages"])


def test_the_largest_value_of_all_regions_counts() -> None:
    found = validation([[FIRST, {}], [FIRST * 50, {}]], max_absolute_value=10.0)["output"]
    assert found["messages"] == ["positive: the largest element is 50, above the limit of 10"]


def test_a_mask_on_another_device_is_no_problem() -> None:
    mask = torch.ones(1, 8, 8, device="meta")
    assert validation([[FIRST, {"mask": mask}]])["compatibility"]["device_placement"]["passed"] is True


def test_zeros_for_the_negative_prompt_are_a_note() -> None:
    found = validation(
        FIRST, torch.zeros(1, 77, 8)
    )  # SDXL's force_zeros_for_empty_prompt, ComfyUI's zero out
    assert found["output"]["passed"] is True
    assert "negative: every element is 0, as in pipelines without a prompt" in found["notes"]


class Configured(nn.Module):
    """An encoder of which only the config matters."""

    def __init__(self, model_type: str, hidden_size: int, layers: int = 1) -> None:
        super().__init__()
        fields = {"model_type": model_type, "hidden_size": hidden_size, "num_hidden_layers": layers}
        self.config = type("Config", (), fields)()


CLIPS = {"text_encoder": Configured("clip_text_model", 768), "text_encoder_2": Configured("clip_text", 1280)}


@pytest.mark.parametrize(
    ("clip", "width", "note"),
    [
        (CLIPS, 4096, "width 4096 is the CLIPs' 2048, zero-padded as in SD 3 without T5"),
        (Configured("qwen3", 2560), 7680, "width 7680 is 3 layers of Qwen3 joined"),  # FLUX.2
        (
            Configured("gemma3", 3840, layers=48),
            188160,
            "width 188160 is 49 layers of Gemma 3 joined",
        ),  # LTX-2
        *(
            (
                Configured(kind, own),
                width,
                f"width {width} takes more than the {family} ({own}) that was given",
            )
            for kind, own, family, width in (
                ("clip_text_model", 768, "CLIP-L", 2048),  # SDXL
                ("clip_text_model", 1280, "OpenCLIP-G", 2048),
                ("clip_text_model", 768, "CLIP-L", 4096),  # SD 3, FLUX
                ("clip_text_model", 16, "CLIP", 36),  # a small SDXL: 16 + 20
                ("bert", 1024, "BERT", 2048),  # Hunyuan-DiT
            )
        ),
    ],
)
def test_widths_that_pipelines_make_of_others_pass_with_a_note(clip: Any, width: int, note: str) -> None:
    found = validation(torch.ones(1, 77, width), clip=clip)
    assert found["compatibility"]["tensor_dimensions"]["passed"] is True
    assert any(line.startswith(f"positive: {note}") for line in found["notes"])


@pytest.mark.parametrize(
    ("clip", "width"),
    [
        (Configured("umt5", 4096), 768),
        (Configured("umt5", 4096), 128),
        (Configured("umt5", 64), 4096),  # 64 of them are no layers joined
        (Configured("clip_text_model", 768), 1024),
        (Configured("clip_text_model", 768), 1000),
        ({"text_encoder": Configured("clip_text_model", 768)}, 2048),
        ({"text_encoder": Configured("qwen3", 2560)}, 12800),
    ],
)
def test_widths_that_nothing_makes_of_an_encoder_fail(clip: Any, width: int) -> None:
    found = validation(torch.ones(1, 77, width), clip=clip)["compatibility"]["tensor_dimensions"]
    assert found["passed"] is False
    assert found["messages"][0].startswith(f"positive: width {width}, but the encoder gives")


def test_a_width_that_two_clips_cannot_fill_fails() -> None:
    found = validation(torch.ones(1, 77, 1000), clip=CLIPS)["compatibility"]["tensor_dimensions"]
    assert found["messages"] == ["positive: width 1000, but the encoder gives 768 or 1280 or 2048"]
