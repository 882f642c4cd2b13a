"""A LoRA that ComfyUI merges into fp8 weights: what arrives is measured from both contents."""

import io

import pytest
import torch
from rich.console import Console
from tests.comfy_shapes.adapters import lora_adapter, lora_parts
from tests.comfy_shapes.modules import Q
from tests.comfy_shapes.patchers import ModelPatcher
from tests.reports.tracing_runs import run_of
from tests.stages.lora_targets import Analysis
from torch import Tensor, nn

from sigmascope.records.run import Stage
from sigmascope.reports.html import to_html
from sigmascope.stages.lora_application import (
    analyze_lora_application_results,
    capture_lora_baseline,
    in_short,
    print_lora_analysis_summary,
)

FP8 = torch.float8_e4m3fn


def merged(unet: ModelPatcher, strength: float) -> tuple[Analysis, Tensor, Tensor]:
    """The analysis, how far the weight really changed, and how far it was to."""
    layer = unet.model.get_submodule(Q.removesuffix(".weight"))
    before = layer.weight.detach().to(FP8)
    layer.weight = nn.Parameter(before, requires_grad=False)
    baseline = capture_lora_baseline(unet, None)
    clone = unet.clone()
    clone.add_patches({Q: lora_adapter()}, strength)
    layer.weight = nn.Parameter(before.float(), requires_grad=False)  # float8 does not add
    clone.load()
    after = layer.weight.detach().to(FP8)
    layer.weight = nn.Parameter(after, requires_grad=False)
    kept = clone.backup[Q]
    clone.backup[Q] = kept._replace(weight=before) if hasattr(kept, "_replace") else before
    up, down, *_ = lora_parts()
    found = dict(analyze_lora_application_results(baseline, clone, None, (clone, None)))
    return found, after.double() - before.double(), strength / 2 * (up @ down).double()


@pytest.mark.parametrize("strength", [0.02, 0.1, 1.0])
def test_share_and_noise_are_measured_from_the_contents(unet: ModelPatcher, strength: float) -> None:
    found, real, wanted = merged(unet, strength)
    share = float((real * wanted).sum() / (wanted * wanted).sum())
    noise = float((real - share * wanted).norm() / wanted.norm())
    arriving = found["unet_weight_changes"]["arriving"]
    assert (arriving["stored"], arriving["weights"]) == ("float8_e4m3fn", 1)
    assert (arriving["share"], arriving["noise"]) == pytest.approx((share, noise), rel=1e-4)
    ids = {finding["id"] for finding in found["findings"]}
    assert ("lora_arrives_weak" in ids) == (share < 0.8)
    assert ("lora_arrives_noisy" in ids) == (noise > 0.5)


def test_a_change_below_a_step_of_fp8_is_weak(unet: ModelPatcher) -> None:
    found, *_ = merged(unet, 0.02)
    (weak,) = (finding for finding in found["findings"] if finding["id"] == "lora_arrives_weak")
    assert weak["severity"] == "warning"
    assert "1 weight of the denoiser" in weak["message"]


def test_plain_weights_have_no_such_figures(unet: ModelPatcher) -> None:
    baseline = capture_lora_baseline(unet, None)
    clone = unet.clone()
    clone.add_patches({Q: lora_adapter()}, 0.1)
    clone.load()
    found = analyze_lora_application_results(baseline, clone, None, (clone, None))
    changes = found["unet_weight_changes"]
    assert changes is not None
    assert changes["arriving"] is None


def test_summary_and_page_say_what_arrived(unet: ModelPatcher) -> None:
    """The figures of the contents, in whole per cent."""
    found, real, wanted = merged(unet, 0.1)
    share = float((real * wanted).sum() / (wanted * wanted).sum())
    noise = float((real - share * wanted).norm() / wanted.norm())
    text = io.StringIO()
    print_lora_analysis_summary(found, Console(file=text, width=200))
    said = " ".join(text.getvalue().split())
    assert f"Arrived: {100 * share:.3g} %, with noise of {100 * noise:.3g} % of its size" in said
    assert "(1 weight measured, stored as float8_e4m3fn)" in said
    changes = {"unet_weight_changes": in_short(found["unet_weight_changes"])}
    page = to_html(run_of(Stage("lora_application", 0.0, 1.0, facts={"lora_application": changes})))
    sentence = f"Of what was merged into float8_e4m3fn weights, {100 * share:.0f} % arrived"
    assert f"{sentence}, with noise of {100 * noise:.0f} % of its size." in page
