"""A LoRA of U-Net and text encoder, merged into a diffusers folder one component after the other, as the page says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sigmascope import merge_into_checkpoint


@pytest.mark.slow
def test_each_component_is_as_diffusers_fuses_it(
    pipelines: Callable[[str], Any], save: Callable[..., Path], tmp_path: Path
) -> None:
    pipeline = pipelines("sd15")
    lora = save(pipeline, "unet", "text_encoder", format="peft")
    pipeline.save_pretrained(tmp_path / "model")
    counts = {}
    for part in ("unet", "text_encoder"):
        into, merged = tmp_path / "model" / part, tmp_path / f"{part}.safetensors"
        report = merge_into_checkpoint([lora], into, merged, allow_unmatched=True)
        counts[part] = len(report.tensors)
    assert counts == {"unet": 181, "text_encoder": 12}
    pipeline.load_lora_weights(lora)
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    for part in counts:
        ours = load_file(tmp_path / f"{part}.safetensors")
        theirs = getattr(pipeline, part).state_dict()
        for key, weight in ours.items():
            torch.testing.assert_close(weight, theirs[key], rtol=1e-4, atol=1e-6, msg=key)
